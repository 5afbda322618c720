"""The driver's state and the batches that it holds come back bit for bit."""

from __future__ import annotations

import base64
import json
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine3d.errors import EngineError, UserError
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.checkpoint.driver_state import Measurements, RandomState, RunState, read_batch, write_batch
from hybridflow.checkpoint.set_results import Best, MeasuredSet
from hybridflow.data.files.config import DifficultyConfig
from hybridflow.data.sampler import PromptOrder
from hybridflow.rollout.buffered_groups import BufferedGroups
from hybridflow.rollout.ledger import Ledger, StreamLimits
from hybridflow.rundir.status.progress import PhaseFile


def a_batch(first_sample: int = 0) -> SampleBatch:
    batch = SampleBatch.from_generations(
        prompts=[[5, 6], [7, 8, 9], [5]],
        responses=[[10, 11, 2], [12], [13, 14]],
        logprobs=[[-0.1, -1e-30, -2.5], [-0.7], [-3.3, -0.0]],
        sample_ids=range(first_sample, first_sample + 3),
        group_ids=[4, 4, 9],
        prompt_indices=[40, 40, 2],
        policy_versions=[7, 8, 8],
        finish_reasons=["stop", "abort", "length"],
        response_masks=[[True, False, True], [True], [True, True]],
    )
    odd = torch.tensor([math.nan, -math.inf, 1e-45])
    return batch.replace(rewards=odd, values=torch.rand(len(batch.logprobs)))


def test_measured_pass_rates_of_prompts_come_back(tmp_path: Path) -> None:
    order = PromptOrder(10, 1, difficulty=DifficultyConfig())
    sampler = order.sampler()
    sampler.measured({1: 0.5, 7: 0.125})
    replace(a_state(), sampler=sampler.state_dict()).write(tmp_path)
    restored = order.sampler()
    restored.load_state_dict(RunState.read(tmp_path).sampler)
    assert restored.state_dict() == sampler.state_dict()


def a_state(ahead: SampleBatch | None = None) -> RunState:
    return RunState(
        step=12,
        policy_version=13,
        samples_drawn=4096,
        sampler={"count": 64, "seed": 3, "position": 96},
        updates=24,
        steps_without_update=1,
        random=RandomState.capture(),
        run="a1b2",
        inputs={"data.jsonl.train_path": "xxh3_128:00"},
        groups=BufferedGroups.of_batch(ahead) if ahead is not None else None,
        first_measured={"aime": MeasuredSet("beef", "reward_mean", 0, 30, 4, {"mean@4": 0.1, "mean@4_low": 0.1 + 0.2})},
        last_measured={"aime": MeasuredSet("beef", "reward_mean", 12, 30, 4, {"mean@4": 0.25})},
        best=Best("eval/aime/mean@4", 8, 1 / 3, "beef"),
        algorithm={"kl_controller": {"coefficient": 0.1 + 0.2}, "lagrange": {"log_multiplier": -1e-30, "updates": 3.0}},
    )


def assert_equal(one: SampleBatch, other: SampleBatch) -> None:
    assert one.columns().keys() == other.columns().keys()
    for name, column in one.columns().items():
        back = other.columns()[name]
        assert (column.dtype, column.shape) == (back.dtype, back.shape), name
        assert column.contiguous().numpy().tobytes() == back.numpy().tobytes(), name


def test_a_batch_comes_back_bit_for_bit(tmp_path: Path) -> None:
    batch = a_batch()
    # Columns that are views, and that share memory, are written as what they show.
    batch = batch.replace(old_logprobs=batch.logprobs, returns=torch.rand(12)[::2])
    write_batch(tmp_path / "batch.safetensors", batch)
    back = read_batch(tmp_path / "batch.safetensors")
    assert_equal(batch, back)
    assert back.finish_reasons.tolist() == [0, 2, 1] and back.advantages is None


def test_a_batch_that_cannot_be_written_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot write .*/none/batch.safetensors: "):  # as on a full disk
        write_batch(tmp_path / "none/batch.safetensors", a_batch())


def test_a_batch_of_padded_rows_is_read(tmp_path: Path) -> None:
    """Checkpoints before format 4 have such batches."""
    columns = {
        "input_ids": torch.tensor([[5, 6, 3], [7, 8, 9]]),
        "prompt_lengths": torch.tensor([2, 3]),
        "generated_ids": torch.tensor([[10, 3, 3, 3], [12, 13, 2, 3]]),
        "response_lengths": torch.tensor([1, 3]),
        "response_mask": torch.tensor([[True, False, False, False], [True, False, True, False]]),
        "logprobs": torch.tensor([[-0.5, 0.0, 0.0, 0.0], [-1.5, -2.5, -3.5, 0.0]]),
    } | {
        name: torch.arange(2)
        for name in ("sample_ids", "group_ids", "prompt_indices", "policy_versions", "finish_reasons")
    }
    save_file(columns, tmp_path / "batch.safetensors", metadata={"pad_token_id": "3"})
    back = read_batch(tmp_path / "batch.safetensors")
    assert back.prompts() == [[5, 6], [7, 8, 9]] and back.responses() == [[10], [12, 13, 2]]
    assert back.response_mask.tolist() == [True, True, False, True]
    assert back.logprobs.tolist() == [-0.5, -1.5, -2.5, -3.5]
    assert back.group_ids.tolist() == [0, 1]


def test_a_batch_of_no_samples_comes_back(tmp_path: Path) -> None:
    batch = a_batch().select([])
    write_batch(tmp_path / "batch.safetensors", batch)
    assert_equal(batch, read_batch(tmp_path / "batch.safetensors"))


def test_a_file_that_is_no_batch_is_named(tmp_path: Path) -> None:
    (tmp_path / "batch.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"batch\.safetensors holds no rollout batch"):
        read_batch(tmp_path / "batch.safetensors")


def samples_ahead(state: RunState) -> SampleBatch:
    assert state.groups is not None and state.groups.ended is not None
    return state.groups.ended


@pytest.mark.parametrize("streamed", [False, True])
def test_the_state_comes_back_with_its_samples(tmp_path: Path, streamed: bool) -> None:
    ended, begun = a_batch(), a_batch(first_sample=30)
    groups = replace(BufferedGroups.of_batch(ended), begun=begun, streamed=streamed)
    state = replace(a_state(), groups=groups, evaluation_due=True)
    files = state.write(tmp_path)
    assert sorted(files) == sorted(tmp_path.iterdir()) and len(files) == 3
    back = RunState.read(tmp_path)
    assert_equal(ended, samples_ahead(back))
    assert back.groups is not None and back.groups.begun is not None
    assert_equal(begun, back.groups.begun)
    assert replace(back.groups, ended=None, begun=None) == replace(groups, ended=None, begun=None)
    for name in ("step", "policy_version", "samples_drawn", "sampler", "updates", "steps_without_update", "run"):
        assert getattr(back, name) == getattr(state, name), name
    assert back.random == state.random and back.inputs == state.inputs
    assert back.algorithm == state.algorithm and back.evaluation_due
    assert back.measurements == state.measurements


def test_a_batch_that_was_generated_ahead_is_read_from_format_4(tmp_path: Path) -> None:
    batch = a_batch()
    a_state().write(tmp_path)
    write_batch(tmp_path / "buffer-00000.safetensors", batch)
    document = json.loads((tmp_path / "driver.json").read_text())
    del document["groups"]
    (tmp_path / "driver.json").write_text(json.dumps(document | {"buffer": ["buffer-00000.safetensors"]}))
    back = RunState.read(tmp_path)
    assert_equal(batch, samples_ahead(back))
    assert back.groups is not None and not back.groups.streamed
    assert back.groups.ledger == BufferedGroups.of_batch(batch).ledger


def test_the_groups_of_a_stream_are_read_from_format_4(tmp_path: Path) -> None:
    batch = a_batch()
    a_state().write(tmp_path)
    write_batch(tmp_path / "stream-ended.safetensors", batch)
    document = json.loads((tmp_path / "driver.json").read_text())
    groups = BufferedGroups.of_batch(batch)
    stream = {"ledger": groups.ledger, "first_samples": groups.first_samples, "ended": "stream-ended.safetensors"}
    del document["groups"]
    (tmp_path / "driver.json").write_text(json.dumps(document | {"buffer": [], "stream": stream | {"scores": {}}}))
    back = RunState.read(tmp_path)
    assert_equal(batch, samples_ahead(back))
    assert back.groups is not None and back.groups.streamed and back.groups.ledger == groups.ledger


def test_groups_of_a_batch_are_complete() -> None:
    batch = a_batch()
    groups = BufferedGroups.of_batch(batch)
    assert groups.draws == dict(zip(batch.group_ids.tolist(), batch.prompt_indices.tolist(), strict=True))
    ledger = Ledger(StreamLimits(len(groups.draws), max_staleness=1), lambda count: [])
    assert ledger.restore(groups.ledger) == () and ledger.ready == len(groups.draws)


def test_a_state_of_format_1_has_none_of_the_algorithm(tmp_path: Path) -> None:
    a_state(a_batch()).write(tmp_path)
    driver = tmp_path / "driver.json"
    document = json.loads(driver.read_text())
    del document["algorithm"], document["evaluation_due"]
    driver.write_text(json.dumps(document))
    back = RunState.read(tmp_path)
    assert back.algorithm == {} and back.step == 12 and len(samples_ahead(back)) == 3
    assert not back.evaluation_due


def test_evaluations_of_earlier_versions_count_as_none(tmp_path: Path) -> None:
    a_state().write(tmp_path)
    driver = tmp_path / "driver.json"
    document = json.loads(driver.read_text())
    del document["first_measured"], document["last_measured"]
    earlier: dict[str, Any] = {"accuracy_before": 0.25, "accuracy_after": 0.5}
    earlier |= {"first_evaluation": None, "last_of_sets": {"aime": {}}}
    driver.write_text(json.dumps(document | earlier))
    back = RunState.read(tmp_path)
    assert (back.step, back.measurements) == (12, Measurements())


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1)  # the generators of python and numpy keep every second one for later
    np.random.standard_normal()

    def draw() -> tuple[float, float, float, list[float]]:
        return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(3).tolist()

    a_state().write(tmp_path)
    expected = [draw(), draw()]
    RunState.read(tmp_path).random.restore()
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"buffer": ["no.safetensors"]}', '{"groups": null, "random": {}}'])
def test_a_state_that_is_not_one_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "driver.json").write_text(text)
    with pytest.raises(UserError) as caught:
        RunState.read(tmp_path)
    assert str(tmp_path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("step", "12", "step"),
        ("step", 1.5, "step"),
        ("step", -5, "step"),
        ("policy_version", 10**30, "policy_version"),
        ("samples_drawn", -1, "samples_drawn"),
        ("updates", True, "updates"),
        ("sampler", {"count": "many"}, "sampler.count"),
        ("sampler", {"count": 64, "seed": 3}, "sampler.position: nothing"),
        ("sampler", {"count": 64, "position": 3}, "sampler.seed: nothing"),
        ("sampler", {"count": 0, "seed": 3, "position": 0}, "sampler.count: 0"),
        ("sampler", {"count": 64, "seed": 3, "position": -1}, "sampler.position: -1"),
        ("sampler", {"count": 64, "seed": 3, "position": 9, "returned": "[[9, 1]]"}, "sampler.returned: draw 9"),
        ("sampler", {"count": 64, "seed": 3, "position": 9, "returned": "[[1, 64]]"}, "sampler.returned: draw 1"),
        ("sampler", {"count": 64, "seed": 3, "position": 9, "returned": "{}"}, "sampler.returned: expected a list"),
        ("first_measured", {"aime": {"step": 3}}, "it has no first_measured.aime.identity"),
        ("inputs", {"seed": 1}, "inputs.seed"),
        ("algorithm", {"kl": {"coefficient": None}}, "algorithm.kl.coefficient"),
        ("random", {"python": [], "numpy": [], "torch": 1}, "random.torch"),
        ("random", {"python": [], "numpy": [], "torch": ""}, "random: "),
        ("more", 1, "'more'"),
        ("groups", {"ledger": {}}, "'first_samples'"),
        ("groups", {"ledger": {}, "first_samples": {}, "streamed": 1}, "groups.streamed: 1, expected true or false"),
        ("groups", {"ended": "../groups-ended.safetensors"}, "groups.ended: '../groups-ended.safetensors', expected "),
        ("stream", {"begun": "/groups-begun.safetensors"}, "stream.begun: '/groups-begun.safetensors', expected "),
        ("buffer", ["buffer-00000.safetensors"] * 2, "buffer: "),
    ],
)
def test_a_state_of_other_types_is_refused_by_the_name_of_what_is_wrong(
    tmp_path: Path, key: str, value: object, field: str
) -> None:
    a_state().write(tmp_path)
    document = json.loads((tmp_path / "driver.json").read_text())
    (tmp_path / "driver.json").write_text(json.dumps(document | {key: value}))
    with pytest.raises(UserError) as caught:
        RunState.read(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/driver.json is not the state of a run's driver: {field}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["step", "sampler", "random", "run", "groups", "samples_drawn"])
def test_a_state_that_lacks_something_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    a_state().write(tmp_path)
    document = json.loads((tmp_path / "driver.json").read_text())
    del document[name]
    (tmp_path / "driver.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=rf"driver\.json is not the state of a run's driver: it has no {name}$"):
        RunState.read(tmp_path)


@pytest.mark.parametrize(
    ("first", "replacement", "is_accepted"),
    [
        (0, b"\x07\x00", True),  # the seed
        (8, (0).to_bytes(4, "little"), False),  # random numbers left
        (8, (624).to_bytes(4, "little"), True),
        (8, (625).to_bytes(4, "little"), False),
        (12, (0).to_bytes(4, "little"), False),  # not seeded
        (16, (624).to_bytes(8, "little"), True),  # the next one
        (16, (625).to_bytes(8, "little"), False),
        (24, b"\xff" * 8, True),  # a word
        (5056, b"\x00", False),  # a byte too many
    ],
)
def test_a_state_of_torchs_generator_is_refused_as_torch_refuses_it(
    tmp_path: Path, first: int, replacement: bytes, is_accepted: bool
) -> None:
    state = bytearray(torch.Generator().manual_seed(3).get_state().numpy().tobytes())
    state[first : first + len(replacement)] = replacement
    a_state().write(tmp_path)
    document = json.loads((tmp_path / "driver.json").read_text())
    document["random"]["torch"] = base64.b64encode(state).decode()
    (tmp_path / "driver.json").write_text(json.dumps(document))
    with nullcontext() if is_accepted else pytest.raises(RuntimeError):
        torch.Generator().set_state(torch.frombuffer(state, dtype=torch.uint8))
    with nullcontext() if is_accepted else pytest.raises(UserError, match=r"driver: random: torch: "):
        RunState.read(tmp_path)


def test_reading_a_state_leaves_the_generators_alone(tmp_path: Path) -> None:
    a_state().write(tmp_path)
    before = RandomState.capture()
    torch.rand(3), random.random()
    assert RandomState.capture() != before
    before = RandomState.capture()
    RunState.read(tmp_path)
    assert RandomState.capture() == before


def test_a_batch_elsewhere_is_not_read(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    a_state().write(checkpoint)
    document = json.loads((checkpoint / "driver.json").read_text())
    (checkpoint / "driver.json").write_text(json.dumps(document | {"buffer": [f"{tmp_path}/buffer-00000.safetensors"]}))
    with pytest.raises(UserError, match=r"buffer: \['/.*, expected one name such as buffer-00000"):
        RunState.read(checkpoint)


def test_the_phase_file_says_what_the_run_is_at(tmp_path: Path) -> None:
    phases = PhaseFile(tmp_path / "phase.json")
    phases.enter("start")
    first = json.loads((tmp_path / "phase.json").read_text())
    assert (first["step"], first["phase"]) == (0, "start")
    phases.step = 3
    phases.enter("update")
    second = json.loads((tmp_path / "phase.json").read_text())
    assert (second["step"], second["phase"]) == (3, "update") and second["since"] >= first["since"] > 1e9
    assert [path.name for path in tmp_path.iterdir()] == ["phase.json"]


def test_a_phase_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    PhaseFile(tmp_path / "gone" / "phase.json").enter("rollout")


def test_samples_that_are_kept_come_back_beside_those_that_were_made_ahead(tmp_path: Path) -> None:
    state = replace(a_state(a_batch()), replay=a_batch(first_sample=30))
    files = state.write(tmp_path)
    assert sorted(files) == sorted(tmp_path.iterdir()) and len(files) == 3
    back = RunState.read(tmp_path)
    assert state.replay is not None and back.replay is not None and len(samples_ahead(back)) == 3
    assert_equal(state.replay, back.replay)
    driver = tmp_path / "driver.json"
    document = json.loads(driver.read_text())
    driver.write_text(json.dumps(document | {"replay": "../other.safetensors"}))
    with pytest.raises(UserError, match=r"replay: '\.\./other\.safetensors', expected replay\.safetensors"):
        RunState.read(tmp_path)
    del document["replay"]
    driver.write_text(json.dumps(document))  # as a run has it that keeps none
    assert RunState.read(tmp_path).replay is None

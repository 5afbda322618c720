"""Engines whose ranks are groups with attention and a KV cache of their own generate what one rank generates."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from pydantic import ValidationError

from engine3d.errors import EngineError, UserError
from engine3d.models import load_model_spec
from engine3d.platform.cpu.sglang import START_METHOD_VARIABLE
from engine3d.rollout import RolloutConfig, RolloutEngine, SamplingConfig
from engine3d.rollout.launch import read_model, server_arguments
from engine3d.rollout.served import check_served
from engine3d.rollout.shard import EngineShard
from tests.engine3d.rollout.test_engine import reference_logprobs
from tests.support import tiny_families
from tests.support.checkpoint_sender import CheckpointSender, transfer
from tests.support.engine_processes import schedulers_of
from tests.support.engine_responses import responses_of
from tests.support.listening import listeners
from tests.support.reference_routes import by_layer, reference_routes
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.trainer_ranks import trainer_ranks
from tests.support.transfers import connect, differences, locations, started
from tests.support.warm import warm_starts

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [5, 5]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=12)
GROUPS = RolloutConfig.model_validate(
    TINY_ROLLOUT.model_dump()
    | {
        "token_versions": False,
        "routes": True,
        "tp": 2,
        "ep": 2,
        "attention_dp": 2,
        "memory_saver": True,
        "fused_sampling": True,
    }
    | {"server_args": {"chunked_prefill_size": 128}}
)
PEERS = RolloutConfig.model_validate(GROUPS.model_dump() | {"peer_collectives": True})


@pytest.fixture(scope="module")
def grouped(tiny_model_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    """Two ranks, a group each, that exchange tokens by memory, with other weights than the first tiny model's."""
    log = tmp_path_factory.mktemp("grouped") / "log"
    with started([RolloutEngine(tiny_model_dirs[1], PEERS, log_path=log)], afresh=True) as [engine]:
        assert log.read_text().count("Tokens of up to 32 MB go between ranks by kernels.") == 2
        yield engine


@pytest.mark.processes
def test_groups_generate_what_one_rank_generates(
    engine: RolloutEngine, grouped: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    transfer(grouped, tiny_model_dirs[0], version=1)
    for prompts in (PROMPTS, PROMPTS[:1]):  # one alone leaves a group with nothing to do
        expected = [group[0] for group in responses_of(engine, prompts, GREEDY)]
        responses = [group[0] for group in responses_of(grouped, prompts, GREEDY)]
        for one, other in zip(expected, responses, strict=True):
            assert other.token_ids == one.token_ids
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)
            assert torch.equal(by_layer(other.routes, 2), by_layer(one.routes, 2))
    sampling = SamplingConfig(temperature=0.7, max_new_tokens=12)
    for prompt, group in zip(PROMPTS, responses_of(grouped, PROMPTS, sampling, samples_per_prompt=3), strict=True):
        assert len({tuple(response.token_ids) for response in group}) == 3
        for response in group:
            of_all = reference_logprobs(tiny_model_dirs[0], prompt, response.token_ids, sampling.temperature)
            chosen = of_all.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            assert response.logprobs == pytest.approx(chosen.tolist(), abs=1e-3)
            routes = reference_routes(tiny_model_dirs[0], [*prompt, *response.token_ids])
            assert torch.equal(by_layer(response.routes, 2), routes[:-1])
    sequences = [[3, 4, 5, 6], [7, 8, 9], [5, 6, 7]]
    for one, other in zip(*(instance.logprobs(sequences, [1] * 3) for instance in (engine, grouped)), strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)


@pytest.mark.processes
def test_both_groups_have_requests_and_a_prompt_is_in_one_of_them(grouped: RolloutEngine) -> None:
    assert grouped.log_path is not None
    before = grouped.log_path.stat().st_size
    prompts = [[3 + number, *range(40, 63)] for number in range(6)]
    responses_of(grouped, prompts, SamplingConfig(max_new_tokens=4), samples_per_prompt=4)
    said = grouped.log_path.read_text()[before:]
    for group in range(2):
        batches = [line for line in said.splitlines() if f"DP{group} " in line and "Prefill batch" in line]
        computed = sum(int(line.split("#new-token: ")[1].split(",")[0]) for line in batches)
        assert 3 * 24 <= computed < 2 * 3 * 24  # three of the prompts, computed once
    # Room for all requests at once, of which each group has its half.
    assert f"max_running_requests={GROUPS.max_running_requests // 2 + 1}" in grouped.log_path.read_text()


@pytest.mark.processes
def test_weights_of_a_trainer_come_bit_for_bit(
    grouped: RolloutEngine, tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    layouts: list[dict[str, int]] = [{"ep": 2}, {"tp": 2}]
    with trainer_ranks(tiny_model_dirs[0], 2, tmp_path) as trainer:
        for number, sizes in enumerate(layouts, 1):
            sources = trainer.call("build", locations("here", 0, 1), sizes=sizes)
            connected = connect(trainer, [grouped], sources, [locations("here", 8, 9)], tiny_model_dirs[0])
            trainer.call("change", seed=number)
            export = tmp_path / f"export-{number}"
            trainer.call("export", directory=export)
            assert differences([grouped], export)
            connected.transfer(10 * number)
            assert differences([grouped], export) == [], sizes
            assert set(responses_of(grouped, PROMPTS, GREEDY)[0][0].versions) == {10 * number}


def nobody_else_reaches(engine: RolloutEngine) -> bool:
    assert engine._host is not None
    listening = listeners(engine._host.pid)
    # Ranks have gloo's, as those of any engine; what takes requests and calls is in the engine's directory.
    return bool(listening) and all(
        "scheduler" in listener.process and listener.only_this_host for listener in listening
    )


@pytest.mark.processes
def test_nobody_else_reaches_its_processes(grouped: RolloutEngine) -> None:
    assert nobody_else_reaches(grouped)


@pytest.mark.processes
def test_memory_is_given_back_and_taken_again(grouped: RolloutEngine) -> None:
    before = responses_of(grouped, PROMPTS, GREEDY)
    grouped.release_memory()
    grouped.restore_memory()  # with whatever was there in its place
    again = responses_of(grouped, PROMPTS[:1], GREEDY) + responses_of(grouped, PROMPTS[1:], GREEDY)
    assert [group[0].token_ids for group in again] == [group[0].token_ids for group in before]


def wanted_s(engine: RolloutEngine) -> tuple[float, float]:
    """Time in the next second in which all ranks, and the process that hands requests out, run or wait for a core.

    That of their main threads. Which of the two it is depends on other processes.
    """
    assert engine._host is not None
    children = psutil.Process(engine._host.pid).children(recursive=True)
    processes = [
        [child for child in children if " ".join(child.cmdline()).startswith(f"sglang::{name}")]
        for name in ("scheduler", "data_parallel_controller")
    ]
    assert [len(kind) for kind in processes] == [2, 1]

    def wanted_ns(process: psutil.Process) -> int:
        running, waiting, _ = Path(f"/proc/{process.pid}/schedstat").read_text().split()
        return int(running) + int(waiting)

    before = [sum(map(wanted_ns, kind)) for kind in processes]
    time.sleep(1)
    of_ranks, of_controller = (
        (sum(map(wanted_ns, kind)) - earlier) / 1e9 for kind, earlier in zip(processes, before, strict=True)
    )
    return of_ranks, of_controller


@pytest.mark.processes
def test_ranks_leave_the_cores_to_others_while_memory_is_released(
    grouped: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    sender = CheckpointSender(grouped, tiny_model_dirs[0])
    sender.transfer(tiny_model_dirs[0], version=50)
    before, (polling, dealing) = responses_of(grouped, PROMPTS, GREEDY), wanted_s(grouped)
    grouped.release_memory()
    released = min(wanted_s(grouped)[0] for _ in range(3))
    assert differences([grouped], tiny_model_dirs[0]) == []
    sender.transfer(tiny_model_dirs[0], version=51)
    grouped.restore_memory()
    again = responses_of(grouped, PROMPTS, GREEDY)
    assert [group[0].token_ids for group in again] == [group[0].token_ids for group in before]
    assert released < min(polling, wanted_s(grouped)[0]) / 3
    assert dealing < 0.5  # SGLang's own wants all of a core


@pytest.mark.processes
def test_the_end_of_a_rank_ends_the_engine(grouped: RolloutEngine) -> None:
    """The last test of this engine: SGLang's own watch knows no rank of a group."""
    rank = schedulers_of(grouped)[0]
    threading.Timer(0.3, os.kill, (rank, signal.SIGKILL)).start()
    before = time.monotonic()
    with pytest.raises(EngineError, match=rf"died during generation: .* Subprocess sched.* \(pid={rank}\) crashed"):
        while True:
            responses_of(grouped, [[5]] * 60, SamplingConfig(max_new_tokens=60, ignore_eos=True))
    assert time.monotonic() - before < 10


@pytest.mark.processes
@pytest.mark.long
def test_spawned_processes_reach_each_other(
    engine: RolloutEngine,
    tiny_model_dirs: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on GPUs, where none of SGLang's processes has what another has loaded.
    monkeypatch.setenv(START_METHOD_VARIABLE, "spawn")
    with started([RolloutEngine(tiny_model_dirs[0], GROUPS, log_path=tmp_path / "log")], afresh=True) as [spawned]:
        assert spawned.verify_weights(tiny_model_dirs[0]) == [[], []]
        expected = [group[0].token_ids for group in responses_of(engine, PROMPTS, GREEDY)]
        assert [group[0].token_ids for group in responses_of(spawned, PROMPTS, GREEDY)] == expected
        spawned.release_memory()
        spawned.restore_memory()
        assert [group[0].token_ids for group in responses_of(spawned, PROMPTS, GREEDY)] == expected
        assert nobody_else_reaches(spawned)


@pytest.mark.processes
@pytest.mark.long
def test_latents_are_in_one_group_and_dense_layers_are_cut_over_all(tmp_path: Path) -> None:
    tiny_families.make("deepseek_v3", tmp_path / "model")
    alone = RolloutConfig.model_validate(GROUPS.model_dump() | {"tp": 1, "ep": 1, "attention_dp": 1})
    token_ids = []
    with warm_starts():
        for config in (alone, GROUPS):
            with RolloutEngine(tmp_path / "model", config) as engine:
                token_ids.append([group[0].token_ids for group in responses_of(engine, PROMPTS, GREEDY)])
    assert token_ids[0] == token_ids[1]


def test_sglang_deals_out_what_an_engine_has(tiny_model_dirs: tuple[Path, Path]) -> None:
    model = read_model(tiny_model_dirs[0], weights_needed=True)
    config = GROUPS.model_copy(update={"max_running_requests": 65, "max_total_tokens": 1001})
    arguments = server_arguments(config, model)
    assert (arguments["dp_size"], arguments["max_running_requests"], arguments["max_total_tokens"]) == (
        2,
        2 * (33 + 1),
        501,
    )
    assert arguments["enable_dp_attention"] is arguments["enable_dp_lm_head"] is True
    with pytest.raises(UserError, match="attention_dp=2 was not tried with an engine on 2 hosts"):
        server_arguments(config, model, EngineShard(0, 2, "tcp://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tp": 4, "attention_dp": 3}, "attention_dp is 3 and must divide tp, which is 4"),
        ({"tp": 4, "ep": 2, "attention_dp": 2}, "ep and attention_dp are both 2, and tp is 4: SGLang fails there"),
        ({"tp": 2, "ep": 2, "peer_collectives": True}, "peer_collectives=true does nothing with attention_dp=1"),
        ({"tp": 2, "attention_dp": 2, "deterministic": True}, "attention_dp=2 was not tried with deterministic=true"),
        ({"tp": 2, "attention_dp": 2, "memory_saver": True, "release_weights": True}, "not tried with release_weights"),
        ({"tp": 2, "attention_dp": 2, "token_versions": True}, "attention_dp=2 was not tried with token_versions=true"),
    ],
)
def test_what_was_not_tried_is_refused(settings: dict[str, int], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        RolloutConfig.model_validate(settings)


def test_models_with_which_sglang_fails_are_refused(tmp_path: Path) -> None:
    for name, config, line in (
        (
            "llama",
            RolloutConfig(tp=2, attention_dp=2),
            "attention_dp=2: expected 1, because LlamaForCausalLM has no exper",
        ),
        (
            "deepseek_v3",
            RolloutConfig(tp=4, ep=4, attention_dp=2),
            "attention_dp=2 with tp=4: expected tp, because vocab_size=97 is no multiple of 128",
        ),
    ):
        tiny_families.make(name, tmp_path / name)
        with pytest.raises(UserError, match=line):
            check_served(load_model_spec(tmp_path / name), config)

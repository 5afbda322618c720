"""A run that learns from a stream of rollouts: how old samples are, and that a kill loses and repeats nothing."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks import logprobs
from benchmarks.kill_harness import Kill, KilledRun
from hybridflow.checkpoint.driver_state import read_batch
from hybridflow.cli.main import main
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics.timeline import read_spans
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.proves import proves
from tests.support.runs import ROOT, SMALL, records
from tests.support.warm import warm_python

RECIPE = str(ROOT / "launch/recipes/stream.yaml")
STEPS, GROUPS, STALENESS = 5, 8, 2
STREAMED = [
    f"trainer.steps={STEPS}",
    "evaluation.eval.interval=2",
    "rollout.stream.on_new_weights=resend",
    "rollout.sampling.max_new_tokens=24",
    "rollout.sampling.ignore_eos=true",
    "rollout.engine.max_running_requests=3",  # so that some are under way whenever weights change
    "checkpoint.save_interval=1",
    "placement.rollout=cpu:2-3",  # two engines
    "rollout.weights.rolling=true",
    "rollout.engine.routes=true",
]


HANGS_ON = "26+24="
"""A prompt, which each epoch draws once, whose responses are never rewarded."""
REWARD = f"""
import time
def score(generated_texts, prompts):
    if {HANGS_ON!r} in prompts:
        time.sleep(1000)
    return [len(text) / 4 for text in generated_texts]
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("rewards") / "length.py"
    path.write_text(REWARD)
    function = f'{{name: length, path: "{path}:score", on_failure: drop, timeout_s: 1}}'
    return [RECIPE, *SMALL, *STREAMED, f"reward.functions=[{function}]"]


@pytest.fixture(scope="module")
def run(recipe: list[str], tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """A run that was killed in its second step, lost its engine in the fourth, and went on each time."""
    run = KilledRun(tmp_path_factory.mktemp("stream"), recipe, interpreter=warm_python())
    outcome = run.run(Kill("driver", "update", 2, 0.0))
    assert outcome.killed and not outcome.left_over, run.output
    outcome = run.run(Kill("rollout", "update", 4, 0.0))
    assert outcome.killed and not outcome.left_over, run.output
    assert outcome.exit_code == 1
    lines = [line for line in run.output.splitlines() if re.match(r"hybridflow: rollout rank [01], ", line)]
    # One of SGLang's processes, in the middle of a call or before the next one; or the rank that has them.
    assert len(lines) == 1, run.output
    assert re.search(
        "rollout engine died|rollout engine is not running: its process was killed|the process died", lines[0]
    )
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    return run


def _state(run: KilledRun, step: int) -> tuple[Path, dict[str, Any]]:
    checkpoint = run.run_directory / "checkpoints" / f"step-{step:08d}"
    state: dict[str, Any] = json.loads((checkpoint / "driver.json").read_text())
    return checkpoint, state


@pytest.mark.processes
@pytest.mark.long
def test_each_prompt_is_learned_from_once_although_the_run_was_killed(run: KilledRun) -> None:
    learned: list[set[int]] = []
    for step in range(STEPS + 1):
        _, state = _state(run, step)
        ledger = state["groups"]["ledger"]
        buffered = {group["number"] for group in (*ledger["groups"], *ledger["returned"])}
        learned.append(set(range(state["sampler"]["position"])) - buffered)
        assert len(buffered) <= (STALENESS + 1) * GROUPS
    for before, after in pairwise(learned):
        assert before < after and len(after - before) == GROUPS
    assert learned[-1] == set(range(STEPS * GROUPS))
    _, state = _state(run, STEPS)
    assert state["groups"]["ledger"] == {"groups": [], "returned": []}
    assert not list(run.run_directory.glob("checkpoints/*5/groups-*"))
    # Each checkpoint that a run went on from became whole after the samples of its step.
    stored = sorted(path.name for path in (run.run_directory / "samples").iterdir())
    assert stored == [f"step-{step:08d}.parquet" for step in range(1, STEPS + 1)]


@pytest.mark.processes
@pytest.mark.long
def test_a_checkpoint_holds_what_has_ended_and_what_has_begun(run: KilledRun) -> None:
    begun = scored = 0
    for step in range(STEPS):
        checkpoint, state = _state(run, step)
        groups = state["groups"]
        firsts = {int(number): first for number, first in groups["first_samples"].items()}
        ids: list[int] = []
        for name in ("ended", "begun"):
            if name in groups:
                batch = read_batch(checkpoint / groups[name])
                assert batch.token_versions is not None
                versions = batch.token_versions.split(batch.response_lengths.tolist())
                assert [int(tokens.min()) for tokens in versions] == batch.policy_versions.tolist()
                assert max(int(tokens.max()) for tokens in versions) <= state["policy_version"]
                assert all(
                    firsts[group] <= sample < firsts[group] + 4
                    for group, sample in zip(batch.group_ids.tolist(), batch.sample_ids.tolist(), strict=True)
                )
                assert batch.missing_routes.tolist() == [0] * len(batch)
                complete = set(batch.response_lengths.tolist()) == {24}
                assert complete if name == "ended" else max(batch.response_lengths.tolist()) < 24
                ids += batch.sample_ids.tolist()
                begun += name == "begun"
                if name == "ended":
                    assert set(groups["scores"]) <= set(map(str, batch.sample_ids.tolist()))
                    scored += len(groups["scores"])
        assert len(ids) == len(set(ids)) and max(ids, default=-1) < state["samples_drawn"]
    assert begun and scored


@pytest.mark.processes
@pytest.mark.long
def test_samples_are_as_old_as_they_may_be_and_some_are_of_several_versions(run: KilledRun) -> None:
    train = records(run.run_directory, "train")
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    assert all(0 <= record["rollout/staleness_mean"] <= STALENESS for record in train)
    assert 1 <= max(record["stream/staleness_max"] for record in train) <= STALENESS
    assert max(record["stream/mixed_versions_share"] for record in train) > 0
    assert all(record["correction/effective_samples"] > 0 for record in train)
    assert {"stream/engines_busy_share", "stream/trainer_wait_ms", "stream/throughput_tokens_per_sec"} <= train[
        1
    ].keys()


@pytest.mark.processes
@pytest.mark.long
def test_every_token_has_the_routes_of_an_engine(run: KilledRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Over changes of weights, a lost engine and restarts from checkpoints."""
    assert main(["samples", str(run.run_directory), "--routes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == STEPS
    for line in lines:
        assert "with routes of 2 layers x 2 experts, 0.00% missing" in line, line
    assert all(record["rollout/missing_routes_share"] == 0 for record in records(run.run_directory, "train"))


@pytest.mark.processes
@pytest.mark.long
def test_engines_get_new_weights_one_after_another(run: KilledRun) -> None:
    for record in records(run.run_directory, "train"):
        assert 0 < record["sync/pause_max_ms"] <= record["sync/pause_sum_ms"] <= record["sync/time_ms"]
    spans = [span for span in read_spans(run.run_directory / "timeline.json") if span.role == "rollout"]
    paused = {rank: [span for span in spans if (span.rank, span.method) == (rank, "paused")] for rank in (0, 1)}
    assert len(paused[0]) == len(paused[1]) > 1
    for first, second in zip(paused[0], paused[1], strict=True):
        assert first.begin < first.end <= second.begin < second.end


@proves("qwen3_moe", "ep dp padding streams checkpoints resharding")
@pytest.mark.processes
@pytest.mark.long
def test_each_token_was_drawn_with_the_weights_of_its_version(
    run: KilledRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logprobs.main([str(run.run_directory), "--samples", "1000"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    distances, learned = result["distances"], STEPS * GROUPS - STEPS * GROUPS // 20  # but for what hangs in each epoch
    assert sum(distances[kind]["tokens"] for kind in (logprobs.FIRST, logprobs.LATER)) == learned * 4 * 24
    assert result["left_out"] == 0
    for kind in (logprobs.FIRST, logprobs.LATER):
        assert distances[kind]["most"] < 1e-4
    assert distances[logprobs.BEFORE]["mean"] > 1e-3


@pytest.mark.processes
@pytest.mark.long
def test_responses_that_are_never_rewarded_are_left_out_and_nothing_else(run: KilledRun) -> None:
    tables = [pq.read_table(path) for path in sorted((run.run_directory / "samples").iterdir())]
    learned = Counter(prompt for table in tables for prompt in table["prompt_index"].to_pylist())
    with (run.run_directory / "samples.jsonl").open() as file:
        prompts = {json.loads(line)["prompt"] for line in file}
    assert HANGS_ON not in prompts
    epochs = STEPS * GROUPS // 20
    assert Counter(learned.values()) == {epochs * 4: 19}
    assert sum(record["reward/dropped"] for record in records(run.run_directory, "train")) == epochs * 4


@pytest.mark.processes
@pytest.mark.long
def test_a_step_that_waits_for_its_groups_is_abandoned_for_a_checkpoint(tmp_path: Path) -> None:
    """The run has made rollouts ahead in a batch before; their prompts are drawn again."""
    function = tmp_path / "reward.py"
    function.write_text("def score(generated_texts):\n    return [len(text) / 4 for text in generated_texts]\n")
    rewards = f'reward.functions=[{{name: length, path: "{function}:score", timeout_s: 1000}}]'
    ahead = [
        "trainer.max_staleness=1",
        "checkpoint={save_interval: 2, async_save: false, on_stop_s: 300}",
        rewards,
        "trainer.steps=4",
    ]
    both = [f"trainer.prompts_per_step={GROUPS}", "rollout.verify_weights=false"]
    batch = [*ahead, *both, "rollout.stream=null", "algorithm.correction=null"]
    run = KilledRun(tmp_path / "run", [RECIPE, *SMALL, *batch], interpreter=warm_python())
    outcome = run.run(Kill("driver", "update", 3, 0.0))
    assert outcome.killed, run.output

    function.write_text("import time\ndef score(generated_texts):\n    time.sleep(900)\n")
    stream = ["rollout.stream={on_new_weights: recompute}"]
    run._recipe = [RECIPE, *SMALL, *ahead, *both, *stream]
    outcome = run.run(Kill("driver", "rollout", 1, 5.0, signal.SIGTERM))
    assert "resume: after step 2" in run.output
    assert outcome.killed and outcome.exit_code == 75, run.output
    assert not outcome.left_over

    function.write_text("def score(generated_texts):\n    return [len(text) / 4 for text in generated_texts]\n")
    outcome = run.run()
    assert outcome.exit_code == 0, run.output
    tables = [pq.read_table(path) for path in sorted((run.run_directory / "samples").iterdir())]
    learned = {group for table in tables for group in table["group_id"].to_pylist()}
    assert learned == set(range(4 * GROUPS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["rollout.stream=null"], r"trainer\.max_staleness=2 without rollout\.stream, .* expected 0 or 1"),
        (
            ["rollout.stream.left_over=carry", "rollout.over_sampling=0.5", "trainer.max_staleness=0"],
            r"left_over=carry with trainer\.max_staleness=0",
        ),
        (
            ["rollout.stream=null", "trainer.max_staleness=1", "rollout.over_sampling=0.5"],
            "over_sampling=0.5 without a",
        ),
        (
            ["rollout.weights.rolling=true", "trainer.max_staleness=0"],
            r"rollout\.weights\.rolling=true with trainer\.max_staleness=0, .* expected false, or a max",
        ),
        (
            ["rollout.weights.rolling=true", "rollout.stream=null", "trainer.max_staleness=1"],
            r"weights\.rolling=true without a stream, .* expected stream: \{\}, or false",
        ),
        (
            [
                "rollout.weights.rolling=true",
                "rollout.engine.memory_saver=true",
                "rollout.engine.release_weights=true",
            ],
            r"rolling=true with rollout\.engine\.release_weights=true, .* expected one of them",
        ),
        (["rollout.weights.rolling_engines=2"], r"rolling_engines=2 without rolling=true, expected it, or 1"),
        (["rollout.stream.cache_target=0.7"], r"cache_target=0.7 without dynamic_batching=true, expected it, or 0.85"),
        (["rollout.lease_after_s=2"], r"lease_after_s=2 without lease=true, expected it, or 0.5"),
        (
            ["rollout.stream.left_over=carry", "rollout.over_sampling=0"],
            r"left_over=carry with over_sampling=0 leaves nothing, expected drop, or some over_sampling",
        ),
        (
            ["rollout.lease=true", "rollout.stream=null", "trainer.max_staleness=0"],
            r"lease=true without a stream, .* expected stream: \{\}, or false",
        ),
        (
            ["rollout.lease=true"],
            r"rollout\.lease=true with placement\.rollout on devices of its own alone, .* expected",
        ),
        (
            [
                "rollout.lease=true",
                "placement.rollout=cpu:1-2",
                "rollout.engine={memory_saver: true, release_weights: true}",
                "rollout.weights.share=false",
            ],
            r"lease=true with rollout\.engine\.release_weights=true, .* expected one of them",
        ),
        (["placement.rollout=cpu:0"], r"rollout\.stream with placement\.rollout and placement\.actor both on cpu:0"),
    ],
)
def test_what_does_not_go_with_a_stream_is_refused(settings: list[str], line: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=line):
        check_recipe(load_recipe(RECIPE, [*SMALL, f"run_dir={tmp_path}", *settings]))

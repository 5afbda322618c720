"""A run whose samples are episodes, which loses its driver, an engine and processes of environments in their middle."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import logprobs
from benchmarks.kill_harness import Kill, KilledRun
from engine3d.rollout.requests import GIVEN
from hybridflow.data.tokenizer import load_tokenizer
from tests.support.proves import proves
from tests.support.runs import ROOT, records, stored_samples
from tests.support.warm import warm_python

STEPS, GROUPS, SAMPLES = 5, 8, 4
DISCOUNT = 0.5
DIES_IN, RAISES_IN = 9, 20
"""Draws in which an environment ends its process, and in which it raises."""
ENVIRONMENT = f"""
import os
from hybridflow.environments.guess import Guess

class Fragile(Guess):
    async def reset(self, task):
        self._seed = task.seed
        return await super().reset(task)

    async def step(self, turn):
        if self._seed == {DIES_IN}:
            os._exit(3)
        if self._seed == {RAISES_IN}:
            raise ValueError("not today")
        return await super().step(turn)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    directory = tmp_path_factory.mktemp("episodes")
    (directory / "fragile.py").write_text(ENVIRONMENT)
    recipe = [
        str(ROOT / "launch/recipes/game.yaml"),
        "name=fragile",
        f"environment.path={directory}/fragile.py:Fragile",
        "evaluation.games={data: {path: launch/recipes/data/game-train.parquet, prompt: messages, answer: answer},"
        " samples: 4, temperature: 1.0}",
        "environment.credit=turn",
        f"environment.turn_discount={DISCOUNT}",
        f"data.files.cache={directory}/cache",
        "warmup.steps=3",
        f"trainer.steps={STEPS}",
        f"trainer.prompts_per_step={GROUPS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        "rollout.engine.deterministic=true",
        "rollout.engine.max_running_requests=3",  # some are in flight whenever weights change
        "rollout.stream={on_new_weights: resend, engine_restarts: 1}",
        "algorithm.correction={weights: token, truncate: 2.0}",
        "trainer.max_staleness=1",
        "trainer.export=false",
        "checkpoint.save_interval=1",
        "placement.rollout=cpu:2-3",
    ]
    run = KilledRun(directory / "run", recipe, interpreter=warm_python())
    outcome = run.run(Kill("driver", "rollout", 2, 0.1))
    assert outcome.killed and not outcome.left_over, run.output
    # Not in the update, which may be so short that the engine is lost as it takes weights; that ends a run.
    outcome = run.run(Kill("engine", "rollout", 3, 0.0), limit_s=600.0)
    assert outcome.killed and outcome.exit_code == 0 and not outcome.left_over, run.output
    assert "is lost and is started again" in run.output  # and may serve again before the run ends
    return run


@pytest.fixture(scope="module")
def rows(run: KilledRun) -> list[dict[str, Any]]:
    """Every sample that was trained on."""
    tables = stored_samples(run.run_directory)
    return [dict(zip(table, values, strict=True)) for table in tables for values in zip(*table.values(), strict=True)]


@pytest.mark.processes
@pytest.mark.long
def test_every_episode_is_trained_on_once_but_for_those_whose_environment_failed(
    run: KilledRun, rows: list[dict[str, Any]]
) -> None:
    counts = Counter(row["group_id"] for row in rows)
    # The end of a process takes the other episodes that it has, and no more; those may be the whole of a group.
    assert counts.keys() <= set(range(STEPS * GROUPS)) - {DIES_IN, RAISES_IN}
    assert max(counts.values()) == SAMPLES
    train = records(run.run_directory, "train")
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    dropped = sum(record["reward/dropped"] for record in train)
    assert dropped == STEPS * GROUPS * SAMPLES - len(rows)
    assert sum(record.get("reward/environment/failed_raised", 0) for record in train) == SAMPLES
    assert sum(record.get("reward/environment/failed_died", 0) for record in train) == dropped - SAMPLES >= SAMPLES


@pytest.mark.processes
@pytest.mark.long
def test_episodes_are_what_the_chat_template_makes_of_their_messages(
    run: KilledRun, rows: list[dict[str, Any]]
) -> None:
    tokenizer = load_tokenizer(run.run_directory / "initial")
    turns = Counter[int]()
    for row in rows:
        tokens, mask, versions = row["response_tokens"], row["response_mask"], row["token_versions"]
        assert [version != GIVEN for version in versions] == mask
        assert all(logprob == 0.0 for logprob, drawn in zip(row["logprobs"], mask, strict=True) if not drawn)
        given = [token for token, drawn in zip(tokens, mask, strict=True) if not drawn]
        text = str(tokenizer.decode(given)).replace("<|end|><|user|>", "<|user|>")  # of a turn without room for its end
        answers = text.split("<|assistant|>")
        assert answers[-1] == "" and {answer.removesuffix("<|end|>") for answer in answers[:-1]} <= {
            "<|user|>+", "<|user|>-", "<|user|>?",
        }  # fmt: skip
        assert mask[0] and mask[-1]
        turns[len(answers)] += 1
        # A number that is right ends the game, and nothing else has a reward.
        last = str(tokenizer.decode(tokens[-2:], skip_special_tokens=True))
        assert row["reward"] in (0.0, 1.0)
        if row["reward"]:
            assert last.isdigit()
    assert turns[3] and set(turns) <= {1, 2, 3}
    train = records(run.run_directory, "train")
    assert all(1 <= record["reward/environment/turns"] <= 3 for record in train)
    assert all(record["reward/environment/environment_tokens"] > 0 for record in train)


@pytest.mark.processes
@pytest.mark.long
def test_each_token_has_the_return_of_its_turn(rows: list[dict[str, Any]]) -> None:
    several = 0
    for row in rows:
        numbers, last = row["turns"], max(row["turns"])
        assert [number > 0 for number in numbers] == row["response_mask"]
        assert set(numbers) - {0} == set(range(1, last + 1))
        of_turns = [0.0, *(row["reward"] * DISCOUNT ** (last - number) for number in range(1, last + 1))]
        assert row["turn_returns"] == [of_turns[number] for number in numbers]
        several += row["reward"] > 0 and last > 1
    assert several


@proves("qwen3_moe", "ep dp padding streams episodes checkpoints resharding")
@pytest.mark.processes
@pytest.mark.long
def test_each_token_of_a_turn_was_drawn_with_the_weights_of_its_version(
    run: KilledRun, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns after others too, with all tokens before them as they are, over lost engines and changes of weights."""
    assert logprobs.main([str(run.run_directory), "--samples", "1000"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    distances = result["distances"]
    drawn = sum(sum(row["response_mask"]) for row in rows)
    assert sum(distances[kind]["tokens"] for kind in (logprobs.FIRST, logprobs.LATER)) == drawn
    assert result["left_out"] == 0
    assert all(distances[kind]["most"] < 1e-4 for kind in (logprobs.FIRST, logprobs.LATER)), result


@pytest.mark.processes
@pytest.mark.long
def test_a_checkpoint_holds_complete_episodes_with_their_scores(run: KilledRun) -> None:
    scored = 0
    for path in sorted(run.run_directory.glob("checkpoints/*/driver.json")):
        groups = json.loads(path.read_text())["groups"]
        assert "begun" not in groups
        scored += len(groups["scores"])
    assert scored


@pytest.mark.processes
@pytest.mark.long
def test_an_evaluation_plays_episodes_and_one_alone_plays_them_again(run: KilledRun, tmp_path: Path) -> None:
    first, last = records(run.run_directory, "eval")
    assert (first["step"], last["step"]) == (0, STEPS)
    for record in (first, last):
        # The process that ends takes episodes of the first evaluation too.
        left_out = record["eval/games/left_out_samples"]
        assert record["eval/games/samples"] + left_out == 28 and not (record is last and left_out)
        assert record["eval/games/mean@4"] == record["eval/games/pass@1"]
        assert 1 <= record["eval/games/reward/environment/turns"] <= 3
    texts = (run.run_directory / f"evaluations/games/step-{STEPS:08}.jsonl").read_text().splitlines()
    assert len(texts) == 7 and any(set("+-") & set(json.loads(text)["response"]) for text in texts)
    done = subprocess.run(
        [warm_python(), "-m", "hybridflow", "evaluate", str(run.run_directory), "--out", str(tmp_path / "alone")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    alone = json.loads((tmp_path / "alone/evaluation.json").read_text())["sets"]["games"]
    of_run = {name.removeprefix("eval/games/"): value for name, value in last.items()}
    for name in ("reward_mean", "pass@4", "response_length_mean", "reward/environment/turns"):
        assert alone["statistics"][name] == of_run[name], name


@pytest.mark.processes
@pytest.mark.long
def test_a_step_of_episodes_is_replayed_bit_for_bit(run: KilledRun, tmp_path: Path) -> None:
    done = subprocess.run(
        [warm_python(), "-m", "hybridflow", "replay", str(run.run_directory), "--step", "4"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

"""The role that calls the reward functions: rewards of a batch, failures that cost samples, and those that end it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine3d.layout import Layout
from engine3d.rollout.config import Sampling
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.resource_pool import cluster_nodes, release, reserve
from hybridflow.config.recipe import load_recipe
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.data.tasks import ARITHMETIC_CHARACTERS, Example
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.rewards.config import RewardConfig, RewardFunctionConfig
from hybridflow.rewards.result import reward_metrics
from hybridflow.roles.reward import FunctionRewardWorker, reward_result
from hybridflow.rundir.samples.evaluation_texts import read_texts, text_file
from hybridflow.trainer.evaluation.of_set import SetMeasurer
from hybridflow.trainer.samples.texts import sample_texts
from hybridflow.workers.worker_group import RankUserError
from tests.support.called_group import CalledGroup
from tests.support.resumable import DEMO

pytestmark = pytest.mark.processes

EXAMPLES = {0: Example("1+1=", "2"), 1: Example("3+4=", "7")}
MODULE = """
def odd_ones_fail(generated_texts):
    if any(text == "7" for text in generated_texts):
        raise KeyError("no such problem")
    return {"rewards": [float(text) for text in generated_texts], "counts": {"calls": [1] * len(generated_texts)}}
"""


@contextmanager
def a_group(directory: Path, on_failure: str, **settings: float) -> Iterator[CalledGroup]:
    """Start a group with a function that fails on the text 7."""
    (directory / "mine.py").write_text(MODULE)
    make_character_tokenizer(ARITHMETIC_CHARACTERS, directory / "tokenizer")
    mine = RewardFunctionConfig(
        name="mine", path=f"{directory}/mine.py:odd_ones_fail", weight=0.5, on_failure=on_failure, **settings
    )  # type: ignore[arg-type]
    config = RewardConfig(functions=(RewardFunctionConfig(name="arithmetic", path="arithmetic"), mine))
    pools = reserve(pool_devices({"reward": "cpu:0"}, {}, cluster_nodes()))
    arguments = ({"reward": config}, directory / "tokenizer", (), directory)
    with CalledGroup("reward", FunctionRewardWorker, pools["reward"], Layout(), *arguments, log_dir=directory) as group:
        group.start().result()
        yield group
    release(pools)


def a_batch() -> RemoteBatch:
    """Answers 2, 3 and 7 to the problems 0, 0 and 1: right, wrong and right."""
    digits = {digit: 3 + ARITHMETIC_CHARACTERS.index(digit) for digit in "237"}
    return RemoteBatch.of(
        SampleBatch.from_generations(
            prompts=[[4]] * 3,
            responses=[[digits["2"], 2], [digits["3"], 2], [digits["7"], 2]],
            logprobs=[[-1.0, -1.0]] * 3,
            sample_ids=[50, 51, 52],
            group_ids=[0, 0, 1],
            prompt_indices=[0, 0, 1],
            policy_versions=[1] * 3,
            finish_reasons=["stop"] * 3,
        )
    )


def test_a_failure_drops_its_sample_and_no_other(ray_cluster: None, tmp_path: Path) -> None:
    with a_group(tmp_path, "drop") as group:
        batch = a_batch()
        result = reward_result(group.score(batch, examples=EXAMPLES))
        assert result.dropped.tolist() == [False, False, True]
        assert result.total[:2].tolist() == [1 + 0.5 * 2, 0.5 * 3] and result.total[2].isnan()
        assert result.by_name["arithmetic"].tolist() == [1.0, 0.0, 1.0]
        [failure] = result.failures
        assert (failure.function, failure.sample) == ("mine", 2) and "no such problem" in failure.reason
        values = reward_metrics(result)
        assert values["reward/mine/failed"] == 1 and values["reward/mine/mean"] == 2.5
        assert values["reward/mine/calls"] == 2  # one by one, after a call that raised
        log = group.ranks.log_path(0)
        assert log is not None and "sample 52: reward 'mine' raised KeyError" in log.read_text()
        kept = batch.with_per_sample(rewards=result.total).select((~result.dropped).nonzero()[:, 0]).fetch()
        assert kept.sample_ids.tolist() == [50, 51] and kept.rewards is not None
        assert torch.equal(kept.rewards, torch.tensor([2.0, 1.5]))


def test_a_failure_that_is_to_stop_the_run_is_one_line(ray_cluster: None, tmp_path: Path) -> None:
    with a_group(tmp_path, "stop") as group:
        with pytest.raises(RankUserError) as caught:
            group.score(a_batch(), examples=EXAMPLES).result()
        line = str(caught.value)
        assert line.startswith(
            f"reward rank 0, score: reward 'mine' ({tmp_path}/mine.py:odd_ones_fail) raised KeyError"
        )
        assert "no such problem" in line and "\n" not in line


def test_a_response_of_a_held_out_set_that_got_no_reward_is_not_a_wrong_one(ray_cluster: None, tmp_path: Path) -> None:
    settings = f"{{data: {{path: {tmp_path}/none.jsonl}}, samples: 2, temperature: 1.0, passing: 2, texts: 2}}"
    planned = load_recipe(DEMO, [f"evaluation.sums={settings}"]).sets["sums"]
    prompts = Prompts(list(EXAMPLES.values()), [[4], [4]])
    with a_group(tmp_path, "value", failure_value=-9.0) as group:
        measurer = SetMeasurer(
            sets={"sums": prompts},
            identities={"sums": "f00d"},
            learned={"sums": 1},
            samples_of=FixedGenerator(a_batch()),  # type: ignore[arg-type]
            functions={"reward": group},  # type: ignore[dict-item]
            reward_model=None,
            judge=None,
            tokenizer=make_character_tokenizer(ARITHMETIC_CHARACTERS, tmp_path / "tokenizer"),
            texts=tmp_path / "evaluations",
            characters=100,
        )
        measured = measurer.measure(planned, 3)
    assert (measured.identity, measured.step, measured.prompts, measured.samples) == ("f00d", 3, 1, 2)
    expected = {
        "accuracy": 1.75,
        "mean@2": 0.5,
        "pass@1": 0.5,
        "pass@2": 1.0,
        "maj@2": 1.0,
        "prompts": 1,
        "samples": 2,
    }
    expected |= {"left_out_samples": 1, "training_prompts": 1, "response_length_mean": 2.0, "truncated_fraction": 0.0}
    expected |= {"reward/arithmetic/failed": 0, "reward/mine/failed": 1, "reward/mine/calls": 2.0}
    assert {name: measured.statistics[name] for name in expected} == expected
    assert measured.statistics["reward/arithmetic/mean"] == pytest.approx(2 / 3)
    texts = read_texts(text_file(tmp_path / "evaluations", "sums", 3))
    assert [(text.index, text.response, text.reward, text.passing, text.scored) for text in texts] == [
        (0, "2", 2.0, 1, 2),
        (1, "7", None, 0, 0),
    ]


class FixedGenerator:
    """Gives one batch, whatever is asked."""

    def __init__(self, batch: RemoteBatch) -> None:
        self._batch = batch

    def sample(
        self, draw: Draw, sampling: Sampling, samples_per_prompt: int, first_sample: int | None = None
    ) -> FixedGenerator:
        assert list(draw.indices) == [0, 1] and samples_per_prompt == 2 and first_sample is None
        return self

    rewards: None = None  # those of an environment

    def batch(self) -> RemoteBatch:
        return self._batch


def test_some_samples_of_a_batch_as_texts(ray_cluster: None, tmp_path: Path) -> None:
    tokenizer = make_character_tokenizer(ARITHMETIC_CHARACTERS, tmp_path)
    examples = [Example("1+1=", "2"), Example("3+4=", [7] * 20)]
    batch, rewards = a_batch(), torch.tensor([1.0, 0.0, 0.5])
    of_all = sample_texts(batch, rewards, examples, tokenizer, count=9, characters=40)
    assert [(sample.response, sample.reward, sample.sample, sample.version) for sample in of_all] == [
        *(("2", 1.0, 50, 1), ("3", 0.0, 51, 1), ("7", 0.5, 52, 1))
    ]
    assert [sample.prompt for sample in of_all] == ["1"] * 3
    assert (of_all[0].answer, of_all[2].answer) == (
        "2",
        "[7, 7, 7, 7, 7, 7, 7 [... 20 characters ...] 7, 7, 7, 7, 7, 7, 7]",
    )
    two = sample_texts(batch, rewards, examples, tokenizer, count=2, characters=40)
    assert [sample.sample for sample in two] == [50, 51]
    kept = sample_texts(batch.select([2, 0]), rewards[[2, 0]], examples, tokenizer, count=2, characters=40)
    assert [(sample.sample, sample.reward) for sample in kept] == [(52, 0.5), (50, 1.0)]

"""Given responses as batches, and what is kept of the reference, on an actor that is a function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine3d.errors import UserError
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import pack
from hybridflow.config.recipe import load_recipe
from hybridflow.data.given_responses import GivenResponses
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.data.tasks import Example
from hybridflow.trainer.samples.given_responses import GivenSource
from tests.support.runs import ROOT


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(samples: SampleBatch) -> RemoteBatch:
        _, summary = pack(samples)
        assert summary is not None
        return RemoteBatch(summary.per_sample, [])

    monkeypatch.setattr(RemoteBatch, "of", of)


def given(count: int) -> GivenResponses:
    """Example n has responses of n + 1 and 1 tokens."""
    return GivenResponses(
        [Example(f"{row}", "") for row in range(count)],
        [[5, 6]] * count,
        0,
        responses=[([7] * (row + 1), [8]) for row in range(count)],
        rewards=[(1.0, 0.0)] * count,
    )


class Source(GivenSource):
    """A source whose actor gives each response as many nats as it has tokens, times its number of updates."""

    def __init__(self, name: str = "dpo", train: int = 5, evaluation: int = 3, replicas: int = 1) -> None:
        recipe = load_recipe(ROOT / f"launch/recipes/algorithms/{name}.yaml")
        actor: Any = SimpleNamespace(layout=SimpleNamespace(dp=replicas))
        super().__init__(recipe.algorithm, 1.0, 2, given(train), given(evaluation), actor)
        self.requested: list[int] = []
        self.updates = 1

    def policy_logprobs(self, batch: RemoteBatch) -> Tensor:
        self.requested.append(len(batch))
        return -self.updates * batch.per_sample["response_lengths"].double()


def draw(*rows: int) -> Draw:
    return Draw(Prompts([], []), list(rows), range(10, 10 + len(rows)))


def test_the_reference_is_asked_once_for_every_response() -> None:
    source = Source()
    source.measure()
    assert sum(source.requested) == 2 * (5 + 3) and max(source.requested) <= 6
    source.updates = 7
    for _ in range(3):
        batch = source.batch(draw(3, 0), 100)
        assert batch.per_sample["reference_logprobs"].tolist() == [-4.0, -1.0, -1.0, -1.0]
    assert batch.per_sample["sample_ids"].tolist() == [100, 101, 102, 103]
    assert batch.per_sample["group_ids"].tolist() == [10, 10, 11, 11]
    assert batch.per_sample["prompt_indices"].tolist() == [3, 3, 0, 0]
    assert batch.per_sample["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]
    held_out = torch.cat([batch.per_sample["reference_logprobs"] for batch in source.held_out()])
    assert held_out.tolist() == [-1.0, -1.0, -2.0, -1.0, -3.0, -1.0]
    assert sum(source.requested) == 2 * (5 + 3)


def test_every_replica_has_an_example_of_each_part() -> None:
    source = Source(train=7, replicas=3)
    source.measure()
    assert min(source.requested) >= 2 * 3 and sum(source.requested) == 2 * (7 + 3)


def test_what_was_kept_is_the_reference_of_a_resumed_run() -> None:
    before, after = Source(), Source()
    before.measure()
    after.updates = 7
    after.load_state_dict(before.state_dict())
    assert after.requested == []
    expected = before.batch(draw(4), 0).per_sample["reference_logprobs"]
    assert torch.equal(after.batch(draw(4), 0).per_sample["reference_logprobs"], expected)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            lambda: Source(train=4),
            "of the 4 train examples the checkpoint has the reference's log-probs of those of 5;",
        ),
        (
            lambda: Source(evaluation=2),
            "of the 2 evaluation examples the checkpoint has the reference's log-probs of th",
        ),
        (
            lambda: Source("kto"),
            "of the 5 train examples the checkpoint has the reference's log-probs of none; expected",
        ),
    ],
)
def test_what_is_of_other_examples_is_refused(source: Any, reason: str) -> None:
    before = Source()
    before.measure()
    with pytest.raises(UserError) as caught:
        source().load_state_dict(before.state_dict())
    assert str(caught.value).startswith(f"resume: {reason}")


def test_nothing_is_accepted_in_place_of_the_data_of_a_reference() -> None:
    from hybridflow.checkpoint.compatibility import check_accepted

    algorithm = load_recipe(ROOT / "launch/recipes/algorithms/dpo.yaml").algorithm
    check_accepted(["seed"], algorithm)
    with pytest.raises(
        UserError, match=r"'data\.arithmetic\.seed' with algorithm.name=dpo, whose checkpoints hold what"
    ):
        check_accepted(["data.arithmetic.seed"], algorithm)


def test_engines_are_needed_unless_an_algorithm_says_otherwise() -> None:
    assert AlgorithmSettings.model_construct(name="grpo").needs_engines

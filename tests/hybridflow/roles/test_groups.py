"""Groups have the methods of their worker classes, with types: mypy checks this file too."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import pytest
from torch import Tensor

from engine3d.rollout.config import SamplingConfig
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.data.prompts import Draw
from hybridflow.roles.groups import FunctionRewardGroup, PolicyGroup, RolloutGroup, ValueGroup
from hybridflow.roles.model import CheckpointFailure, Update
from hybridflow.roles.policy import PolicyWorker
from hybridflow.roles.reward import FunctionRewardWorker
from hybridflow.roles.rollout import Pause, RolloutWorker
from hybridflow.roles.value import ValueWorker
from hybridflow.rollout.source import RolloutSource
from hybridflow.workers.future import Future
from hybridflow.workers.methods import Method, registrations
from hybridflow.workers.worker_group import WorkerGroup


@pytest.mark.parametrize(
    ("group", "worker"),
    [
        (PolicyGroup, PolicyWorker),
        (ValueGroup, ValueWorker),
        (RolloutGroup, RolloutWorker),
        (FunctionRewardGroup, FunctionRewardWorker),
    ],
)
def test_a_group_has_every_registered_method_of_its_workers(group: type[WorkerGroup], worker: type) -> None:
    declared = {name for name in dir(group) if isinstance(getattr(group, name), Method)}
    assert declared == registrations(worker).keys()


def accepted(
    actor: PolicyGroup,
    critic: ValueGroup,
    rollout: RolloutGroup,
    batch: RemoteBatch,
    source: RolloutSource,
    draw: Draw,
    settings: AlgorithmSettings,
) -> None:
    """Calls that mypy must accept: an error in one of these lines is one of its run."""
    update = actor.update(batch, algorithm=settings, temperature=1.0, serving=0)
    assert_type(update, Future[list[Update]])
    assert_type(actor.logprobs(batch, temperature=1.0), Future[Columns])
    assert_type(critic.score(batch).per_sample(), dict[str, Tensor])
    assert_type(source.sample(draw, SamplingConfig(), 1).batch(), RemoteBatch)
    assert_type(rollout.commit_weights(1), Future[list[Pause | None]])
    assert_type(rollout.engines([0]).commit_weights(1), Future[list[Pause | None]])
    assert_type(actor.start().result(), list[dict[str, str] | CheckpointFailure])


def refused(
    actor: PolicyGroup,
    critic: ValueGroup,
    rollout: RolloutGroup,
    source: RolloutSource,
    plain: WorkerGroup,
    scores: Future[Columns],
    batch: RemoteBatch,
    settings: AlgorithmSettings,
) -> None:
    """Calls that mypy must refuse: otherwise the comment is unused, which is an error of its run."""
    actor.generate(batch)  # type: ignore[attr-defined]
    rollout.comit_weights(1)  # type: ignore[attr-defined]
    rollout.commit_weights("newest")  # type: ignore[arg-type]
    rollout.commit_weights()  # type: ignore[call-arg]
    actor.logprobs(batch)  # type: ignore[call-arg]
    actor.update(batch, algorithm=settings, temperature="high", serving=0)  # type: ignore[arg-type]
    critic.values([1, 2])  # type: ignore[arg-type]
    source.sample(batch, SamplingConfig(), 1)  # type: ignore[arg-type]
    actor.export(Path("weights")).per_sample()  # type: ignore[misc]
    scores.batch()  # type: ignore[misc]
    assert_type(rollout.take_turn().result(), list[int])  # type: ignore[assert-type]
    plain.update(batch)  # type: ignore[attr-defined]

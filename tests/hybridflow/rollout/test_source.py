"""The driver's end of a stream: what it raises of a controller in a thread and of ranks."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from engine3d.errors import EngineError, UserError
from engine3d.rollout.config import SamplingConfig
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.data.prompts import Prompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.data.tasks import Example
from hybridflow.errors.rank_failure import Failure
from hybridflow.rollout.controller import RolloutController
from hybridflow.rollout.engine_handles import EngineHandles
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.source import RolloutSource
from hybridflow.rollout.stream.plan import StreamPlan


def make_source(handles: EngineHandles, max_staleness: int = 0) -> RolloutSource:
    """The driver's end of a stream over these engines: four prompts a step, two samples of each."""
    limits = StreamLimits(4, max_staleness)
    plan = StreamPlan(limits, 2, 8, len(handles.actors), sampling=SamplingConfig(), together=True)
    prompts = Prompts([Example("question", "answer")] * 16, [[1, 2]] * 16)
    return RolloutSource(plan, {}, LimitsConfig(), prompts, PromptOrder(16, 0), handles)


class _Rank:
    """A rank whose every answer is a failure of its worker."""

    def __init__(self, *, user_error: bool) -> None:
        self._failure = Failure("rollout", 1, "open_stream", "no more memory", user_error, 0.0, "")
        self.call_concurrently = SimpleNamespace(options=lambda **_: self)

    def remote(self, method: str, results: int) -> Any:
        answer = Future[Any]()
        answer.set_result(self._failure)
        return SimpleNamespace(future=lambda: answer)


@pytest.mark.parametrize(("user_error", "kind"), [(False, EngineError), (True, UserError)])
def test_an_engine_that_cannot_open_ends_the_run(user_error: bool, kind: type[Exception]) -> None:
    with (
        closing(make_source(EngineHandles(actors=[_Rank(user_error=user_error)], nodes=["node"]))) as source,
        pytest.raises(kind, match="rollout rank 1, open_stream: no more memory"),
    ):
        source.open(0, steps_left=1)


@pytest.mark.parametrize(
    ("cause", "message"), [(None, "rollout controller: KeyError: 7"), ("rollout rank 0 died", "rollout rank 0 died")]
)
def test_an_error_of_the_controller_is_explained_by_a_dead_rank(
    cause: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*, ask: bool = False) -> None:
        if ask and cause is not None:
            raise EngineError(cause)

    async def failing(self: RolloutController, version: int, rates: object) -> None:
        raise KeyError(7)

    monkeypatch.setattr(RolloutController, "trained", failing)
    with closing(make_source(EngineHandles(check=check))) as source, pytest.raises(EngineError, match=f"^{message}$"):
        source.trained(1, {})

"""Columns of a step's samples that models compute before the update: log-probs and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics import names as metrics
from hybridflow.roles.groups import PolicyGroup, TeacherEngineGroup, TeacherGroup, ValueGroup
from hybridflow.workers.future import Future


class ModelColumns:
    """Calls of a step's models for columns. They return at once, and `wait` waits for all.

    Args:
        actor: of the run.
        reference: computes the log-probs of the reference; None without one.
        teacher: None without one.
        critics: by the column of their values.
        temperature: of the log-probs.
        serving: version of the weights before the step.
        records_routes: True if the pass of the old log-probs records routes, which updates replay.
        waits: called before `wait` waits.
    """

    def __init__(
        self,
        actor: PolicyGroup,
        reference: Callable[..., Future[Columns]] | None,
        teacher: TeacherGroup | TeacherEngineGroup | None,
        critics: Mapping[str, ValueGroup],
        temperature: float,
        serving: int,
        records_routes: bool,
        waits: Callable[[], None],
    ) -> None:
        self._actor, self._reference, self._teacher = actor, reference, teacher
        self._critics, self._temperature, self._waits = critics, temperature, waits
        self._serving, self._records_routes = serving, records_routes
        self._in_flight: list[Future[Any]] = []
        self._teaching: Future[Columns] | None = None
        self._began = 0.0

    def logprobs(self, batch: RemoteBatch, *, old: bool) -> RemoteBatch:
        """Add `ref_logprobs`, of the reference if there is one.

        Args:
            batch: of the step.
            old: add `old_logprobs`, of the actor. They are added anyway with the routes that updates replay.
        """
        columns, of_actor, generated = {}, list[Future[Columns]](), batch.as_generated()
        if self._reference is not None:
            columns["ref_logprobs"] = self._reference(generated, temperature=self._temperature)
        if old or self._records_routes:
            of_actor = [self._of_actor(generated, "old_logprobs", records_routes=self._records_routes)]
        return self._added(batch, columns, *of_actor)

    def teacher_logprobs(self, batch: RemoteBatch, *, top_k: int, of_student: bool) -> RemoteBatch:
        """Add the teacher's log-probs; see `Step.teacher_logprobs`."""
        assert self._teacher is not None
        generated = batch.as_generated()
        if top_k and of_student:
            best = self._actor.top_tokens(generated, count=top_k)
            batch, generated = self._added(batch, {}, best), generated.with_columns(best)
        self._teaching = self._teacher.teacher_logprobs(generated, temperature=self._temperature, top_k=top_k)
        return self._added(batch, {}, self._teaching)

    def values(self, batch: RemoteBatch) -> RemoteBatch:
        """Add the values of every critic."""
        generated = batch.as_generated()
        return self._added(batch, {column: critic.values(generated) for column, critic in self._critics.items()})

    def current_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        """Add `current_logprobs`, of the actor as it is."""
        # Recorded routes are a column of a call.
        generated = batch if self._records_routes else batch.as_generated()
        return batch.with_columns(self._of_actor(generated, "current_logprobs"))

    def _of_actor(self, batch: RemoteBatch, column: str, *, records_routes: bool = False) -> Future[Columns]:
        return self._actor.actor_logprobs(
            batch,
            temperature=self._temperature,
            column=column,
            serving=self._serving,
            records_routes=records_routes,
        )

    def wait(self) -> dict[str, float]:
        """Wait for the columns in flight. Returns metrics of the time that they took."""
        times = {}
        if self._in_flight:
            self._waits()
            for future in self._in_flight:
                future.wait()
            self._in_flight.clear()
            times[metrics.INFERENCE_TIME] = 1000 * (time.perf_counter() - self._began)
        if self._teaching is not None:
            times[metrics.DISTILLATION_TEACHER_TIME] = 1000 * max(self._teaching.notes())
            self._teaching = None
        return times

    def _added(
        self, batch: RemoteBatch, columns: Mapping[str, Future[Columns]], *unnamed: Future[Columns]
    ) -> RemoteBatch:
        if (columns or unnamed) and not self._in_flight:
            self._began = time.perf_counter()
        self._in_flight += [*columns.values(), *unnamed]
        return batch.with_columns(*unnamed, **columns)


def old_logprobs(batch: SampleBatch, *, config: AlgorithmSettings) -> Columns:
    """Column `old_logprobs`, for another name. Raises ValueError for samples that have none."""
    if batch.old_logprobs is None:
        raise ValueError("current_logprobs: the samples have no old_logprobs; expected Step.logprobs before the update")
    return Columns({"old_logprobs": batch.old_logprobs})

"""The evaluations of a run: each while all else waits, or beside the step after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from engine3d.errors import EngineError
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.checkpoint.driver_state import Measurements
from hybridflow.checkpoint.evaluation_result import Subject
from hybridflow.checkpoint.set_results import MeasuredSet
from hybridflow.config.evaluation import PlannedSet
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics, Timer
from hybridflow.roles.rollout import LONGEST_ROLLOUT_S
from hybridflow.trainer.evaluation import Evaluation, begin_evaluation, evaluate_given, evaluate_responses
from hybridflow.trainer.set_evaluation import SetMeasurer
from hybridflow.trainer.step import Machinery
from hybridflow.workers.future import Future as Call


@dataclass(frozen=True)
class DueEvaluation:
    """What is measured of the policy after a step.

    Args:
        step: after which; 0 is before the first.
        version: of the weights.
        sets: the named sets for which it is time.
        own: whether it is time for the prompts of evaluation that the data have.
        first_sample: the id of its first response, where ids were given out before the engines were asked.
        samples_drawn: ids that were given out once it has its own.
    """

    step: int
    version: int
    sets: tuple[PlannedSet, ...]
    own: bool
    first_sample: int | None = None
    samples_drawn: int = 0


@dataclass(frozen=True)
class _Asked:
    """Responses that the engines were asked for: to a named set, or to the data's own prompts if that is None."""

    planned: PlannedSet | None
    responses: Call[SampleBatch]


@dataclass
class _Found:
    """What was measured, so far."""

    sets: dict[str, MeasuredSet] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    own: Evaluation | None = None


class Evaluations:
    """Evaluates the policy when it is time, and keeps what was measured first and last.

    With `trainer.eval_beside` an evaluation is only planned after its step. The engines are asked once they have made
    the samples of the next step (`begin`), which the models then learn from; the weights that come of it wait for its
    end (`finish`). Reward functions score in a thread of its own: those of the step are done before. A reward model
    scores at the end, since its devices may be those of models that learn.

    Args:
        machinery, sinks: of the run.
        subject: what is measured on the prompts of evaluation that the data have.
        measurer: of the named sets.
        thread: one, for an evaluation beside a step. It is to be left once the roles are gone.
    """

    def __init__(
        self, machinery: Machinery, sinks: Metrics, subject: Subject, measurer: SetMeasurer, thread: Executor
    ) -> None:
        self._machinery, self._sinks, self._subject, self._measurer = machinery, sinks, subject, measurer
        self.thread = thread
        self.measurements = Measurements()
        """What was measured first and last."""
        self.pending: DueEvaluation | None = None
        """What is to be measured beside the next step."""
        self._asked: list[_Asked] = []
        self._scoring: Future[_Found] | None = None
        self._unlogged: tuple[DueEvaluation, _Found] | None = None

    def evaluate(self, step: int, version: int) -> None:
        """Evaluate the policy of after a step on each held-out set for which it is time, or plan to.

        Args:
            step: 0 is before the first.
            version: of the weights that the engines serve.
        """
        due = self._due(step, version)
        if due is None:
            return
        if self._machinery.recipe.trainer.eval_beside and step < self._machinery.recipe.trainer.steps:
            count = self._samples(due)
            first = self._machinery.source.reserve_samples(
                count
            )  # now, so that the samples of the steps have the ids that they always have
            self.pending = replace(due, first_sample=first, samples_drawn=first + count)
            return
        self._machinery.phases.enter("eval")
        found = self._measured(due, self._ask(due))
        if due.own and self._machinery.given is not None:
            found.own = evaluate_given(self._machinery, step, self._subject)
        self._take(due, found)
        self.log()

    def begin(self) -> None:
        """Ask the engines for the responses of the evaluation that is planned, if one is, and score them beside."""
        if (due := self.pending) is not None:
            self._asked = list(self._ask(due))
            by_functions = [each for each in self._asked if self._has_functions(each.planned)]
            self._scoring = self.thread.submit(self._measured, due, by_functions)

    def finish(self, values: dict[str, float]) -> DueEvaluation | None:
        """Wait for the end of the evaluation that was begun, if one was, before the engines get other weights.

        Args:
            values: figures of the step, which get the time of the wait.

        Returns:
            What was measured; `log` writes its record.

        Raises:
            UserError, EngineError: as of an evaluation that all else waits for.
        """
        due, scoring = self.pending, self._scoring
        if due is None or scoring is None:
            return None
        self._machinery.phases.enter("eval")
        with Timer(values, metrics.EVAL_WAIT_TIME):
            found = self._awaited(due, scoring)
            by_model = [each for each in self._asked if not self._has_functions(each.planned)]
            more = self._measured(due, by_model)
        found = _Found(found.sets | more.sets, found.times | more.times, found.own or more.own)
        self.pending, self._scoring, self._asked = None, None, []
        self._take(due, found)
        return due

    def log(self) -> None:
        """Write the record of what was measured last, unless it is written."""
        if self._unlogged is None:
            return
        (due, found), self._unlogged = self._unlogged, None
        figures: dict[str, float] = {}
        for each in due.sets:
            figures[metrics.of_set(each.name, metrics.SET_TIME)] = found.times[each.name]
            figures |= found.sets[each.name].metrics(each.name)
        self._sinks.log(due.step, (found.own.values if found.own is not None else {}) | figures, phase="eval")
        if found.own is not None:
            self._sinks.log_samples(due.step, found.own.texts, phase="eval")

    def _due(self, step: int, version: int) -> DueEvaluation | None:
        """What is to be measured after a step, if anything is."""
        recipe, last = self._machinery.recipe, self._machinery.recipe.trainer.steps
        sets = tuple(each for each in recipe.sets.values() if each.due(step, last))
        interval, own = recipe.trainer.eval_interval, recipe.trainer.eval_before_train
        if step:
            own = step == last or bool(interval and step % interval == 0)
        own = own and len(self._machinery.run.evaluation) > 0
        return DueEvaluation(step, version, sets, own) if sets or own else None

    def _samples(self, due: DueEvaluation) -> int:
        """How many responses an evaluation is of."""
        own = len(self._machinery.run.evaluation) * self._machinery.recipe.trainer.eval_samples if due.own else 0
        return sum(map(self._measurer.samples, due.sets)) + own

    def _ask(self, due: DueEvaluation) -> Iterator[_Asked]:
        """Ask the engines for the responses of one set after another: for those of the next as that is asked for."""
        first = due.first_sample
        for planned in due.sets:
            yield _Asked(planned, self._measurer.begin(planned, first))
            first = first + self._measurer.samples(planned) if first is not None else None
        if due.own and self._machinery.given is None:
            yield _Asked(None, begin_evaluation(self._machinery, first))

    def _measured(self, due: DueEvaluation, asked: Iterable[_Asked]) -> _Found:
        """Wait for responses, and score them."""
        found, times = _Found(), dict[str, float]()
        for each in asked:
            name = each.planned.name if each.planned is not None else ""
            with Timer(times, name):
                batch = each.responses.batch()
                _check_version(due, batch)
                if each.planned is not None:
                    found.sets[name] = self._measurer.measure_responses(each.planned, batch, due.step)
                else:
                    found.own = evaluate_responses(self._machinery, batch, due.step, self._subject)
        found.times = times
        return found

    def _has_functions(self, planned: PlannedSet | None) -> bool:
        """Whether reward functions score a set, and no model does."""
        scorer = planned.scorer if planned is not None else "reward"
        return scorer in self._machinery.roles.functions

    def _awaited(self, due: DueEvaluation, scoring: Future[_Found]) -> _Found:
        """What the thread has measured. Each of its calls has a limit of its own, whose error says who was late."""
        limits = self._machinery.recipe.limits
        longest_s = (len(due.sets) + 1) * (LONGEST_ROLLOUT_S + limits.call_s)
        try:
            return scoring.result(limits.quiet_s)
        except TimeoutError:
            if scoring.done():
                raise
        log.info(f"step {due.step + 1}: the evaluation of step {due.step} is not over; the new weights wait for it")
        try:
            return scoring.result(longest_s)
        except TimeoutError:
            if scoring.done():
                raise
            raise EngineError(f"the evaluation of step {due.step} was not over after {longest_s:g} s") from None

    def _take(self, due: DueEvaluation, found: _Found) -> None:
        before, last_of_sets = self.measurements, self.measurements.last_of_sets | found.sets
        last = found.own.measured if found.own is not None else before.last
        first_of_sets = found.sets | before.first_of_sets
        self.measurements = Measurements(before.first or last, last, first_of_sets, last_of_sets)
        self._unlogged = due, found


def _check_version(due: DueEvaluation, batch: RemoteBatch) -> None:
    """Raises EngineError where other weights than those of the step made a response."""
    versions = sorted(set(batch.facts["policy_versions"].tolist()))
    if versions != [due.version]:
        found = ", ".join(map(str, versions))
        raise EngineError(
            f"the evaluation of step {due.step} has responses of weights version {found}, expected {due.version}"
        )

"""The evaluations of a run: synchronous ones, and ones in the background of the next step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from engine3d.errors import EngineError
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.checkpoint.driver_state import Measurements
from hybridflow.checkpoint.set_results import MeasuredSet
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.config.evaluation import PlannedSet
from hybridflow.config.run import TrainerConfig
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics, Timer
from hybridflow.roles.rollout import LONGEST_ROLLOUT_S
from hybridflow.rollout.rollouts import Responses
from hybridflow.rundir.status.progress import PhaseFile
from hybridflow.trainer.evaluation.of_set import SetMeasurer
from hybridflow.trainer.samples.given_responses import PairMeasurer


@dataclass(frozen=True)
class DueEvaluation:
    """The sets that are due after a step.

    Args:
        step: after which; 0 is before the first.
        version: of the weights.
        sets: not empty.
        first_sample: the id of its first response, where ids were reserved before the prompts were submitted.
        samples_drawn: ids that were given out once it has its own.
    """

    step: int
    version: int
    sets: tuple[PlannedSet, ...]
    first_sample: int | None = None
    samples_drawn: int = 0


@dataclass(frozen=True)
class _PendingSet:
    """A set with its responses, which the engines generate."""

    planned: PlannedSet
    responses: Responses


@dataclass
class _Measured:
    """Measurements of sets, and the milliseconds that they took, by the names of the sets."""

    sets: dict[str, MeasuredSet] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


class Evaluations:
    """Evaluates the policy when it is time, and keeps the first and the last measurement of each set.

    With `trainer.async_evaluation` an evaluation is only planned after its step. Its prompts are submitted once the
    engines have made the samples of the next step (`begin`), which the models then train on; the weights of that step
    wait for its end (`finish`). Reward functions score in a thread of its own: those of the step are done before. A
    reward model scores at the end, since its devices may be those of models that learn.

    Args:
        sets: held-out sets of the run, by name.
        trainer: with the last step, and whether evaluations run in the background.
        limits: of calls.
        phases, sinks: of the run.
        measurer: of the sets.
        pairs: measures the sets in a run without engines; None in another.
        thread: one, for an evaluation in the background of a step. It is to be left once the roles are gone.
    """

    def __init__(
        self,
        sets: Mapping[str, PlannedSet],
        trainer: TrainerConfig,
        limits: LimitsConfig,
        phases: PhaseFile,
        sinks: Metrics,
        measurer: SetMeasurer,
        pairs: PairMeasurer | None,
        thread: Executor,
    ) -> None:
        self._sets, self._trainer, self._limits = sets, trainer, limits
        self._phases, self._sinks, self._measurer, self._pairs = phases, sinks, measurer, pairs
        self.thread = thread
        self.measurements = Measurements()
        """The first and the last measurement of each set."""
        self.pending: DueEvaluation | None = None
        """The sets to measure in the background of the next step."""
        self._pending_sets: list[_PendingSet] = []
        self._scoring: Future[_Measured] | None = None
        self._unlogged: tuple[DueEvaluation, _Measured] | None = None

    def evaluate(self, step: int, version: int) -> None:
        """Evaluate the policy of after a step on each held-out set for which it is time, or plan to.

        Args:
            step: 0 is before the first.
            version: of the weights that the engines serve.
        """
        due = self._due(step, version)
        if due is None:
            return
        if self._trainer.async_evaluation and step < self._trainer.steps:
            count = sum(map(self._measurer.samples, due.sets))
            # Now, so that the samples of the steps have the ids that they always have.
            first = self._measurer.samples_of.reserve_samples(count)
            self.pending = replace(due, first_sample=first, samples_drawn=first + count)
            return
        self._phases.enter("eval")
        measured = (
            self._measure(due, self._submit(due)) if self._pairs is None else self._measure_pairs(due, self._pairs)
        )
        self._take(due, measured)
        self.log()

    def begin(self) -> None:
        """Submit the prompts of the planned evaluation, if there is one, and score the responses in the background."""
        if (due := self.pending) is not None:
            self._pending_sets = list(self._submit(due))
            by_functions = [pending for pending in self._pending_sets if self._has_functions(pending.planned)]
            self._scoring = self.thread.submit(self._measure, due, by_functions)

    def finish(self, values: dict[str, float]) -> DueEvaluation | None:
        """Wait for the end of the evaluation that was begun, if one was, before the engines get other weights.

        Args:
            values: metrics of the step, which get the time of the wait.

        Returns:
            What was measured; `log` writes its record.

        Raises:
            UserError, EngineError: as of an evaluation that all else waits for.
        """
        due, scoring = self.pending, self._scoring
        if due is None or scoring is None:
            return None
        self._phases.enter("eval")
        with Timer(values, metrics.EVAL_WAIT_TIME):
            scored = self._awaited(due, scoring)
            by_model = [pending for pending in self._pending_sets if not self._has_functions(pending.planned)]
            more = self._measure(due, by_model)
        self.pending, self._scoring, self._pending_sets = None, None, []
        self._take(due, _Measured(scored.sets | more.sets, scored.times | more.times))
        return due

    def log(self) -> None:
        """Write the record of what was measured last, unless it is written."""
        if self._unlogged is None:
            return
        (due, measured), self._unlogged = self._unlogged, None
        values: dict[str, float] = {}
        for name in (planned.name for planned in due.sets):
            values[metrics.of_set(name, metrics.SET_TIME)] = measured.times[name]
            values |= measured.sets[name].metrics(name)
        self._sinks.log(due.step, values, phase="eval")

    def _due(self, step: int, version: int) -> DueEvaluation | None:
        """The sets to measure after a step, if there are any."""
        sets = tuple(planned for planned in self._sets.values() if planned.due(step, self._trainer.steps))
        return DueEvaluation(step, version, sets) if sets else None

    def _submit(self, due: DueEvaluation) -> Iterator[_PendingSet]:
        """Submit the prompts of one set after another: those of the next when that is asked for."""
        first = due.first_sample
        for planned in due.sets:
            yield _PendingSet(planned, self._measurer.begin(planned, first))
            first = first + self._measurer.samples(planned) if first is not None else None

    def _measure(self, due: DueEvaluation, submitted: Iterable[_PendingSet]) -> _Measured:
        """Wait for responses, and score them."""
        measured = _Measured()
        for pending in submitted:
            name = pending.planned.name
            with Timer(measured.times, name):
                batch = pending.responses.batch()
                _check_version(due, batch)
                measured.sets[name] = self._measurer.measure_responses(
                    pending.planned, batch, due.step, pending.responses.rewards
                )
        return measured

    def _measure_pairs(self, due: DueEvaluation, pairs: PairMeasurer) -> _Measured:
        """Measure the sets without engines."""
        measured, measurer = _Measured(), self._measurer
        for name in (planned.name for planned in due.sets):
            identity, again = measurer.identities[name], measurer.learned[name]
            with Timer(measured.times, name):
                measured.sets[name] = pairs.measure(due.step, identity=identity, training_prompts=again)
        return measured

    def _has_functions(self, planned: PlannedSet) -> bool:
        """True if reward functions score a set, and no model does."""
        return planned.scorer in self._measurer.functions

    def _awaited(self, due: DueEvaluation, scoring: Future[_Measured]) -> _Measured:
        """The measurements of the thread. Each of its calls has a limit of its own, whose error says who was late."""
        longest_s = len(due.sets) * (LONGEST_ROLLOUT_S + self._limits.call_s)
        try:
            return scoring.result(self._limits.quiet_s)
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

    def _take(self, due: DueEvaluation, measured: _Measured) -> None:
        before = self.measurements
        self.measurements = Measurements(measured.sets | before.first, before.last | measured.sets)
        self._unlogged = due, measured


def _check_version(due: DueEvaluation, batch: RemoteBatch) -> None:
    """Raises EngineError where other weights than those of the step made a response."""
    versions = sorted(set(batch.per_sample["policy_versions"].tolist()))
    if versions != [due.version]:
        listed = ", ".join(map(str, versions))
        raise EngineError(
            f"the evaluation of step {due.step} has responses of weights version {listed}, expected {due.version}"
        )

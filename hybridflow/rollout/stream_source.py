"""The driver's end of a stream of rollouts: the groups of each step, and what a checkpoint holds of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayError

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError, UserError
from engine3d.rollout.config import Sampling
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stored_rows import gathered
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes.termination import termination
from hybridflow.config.recipe import Recipe
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Draw, Prompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.metrics.timeline import Span, timeline
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.result import RewardResult, SampleScore, of_samples
from hybridflow.rollout.buffered_groups import BufferedGroups, buffered_groups, stream_state
from hybridflow.rollout.controller import ControllerPrompts, start_controller
from hybridflow.rollout.dynamic_batching import RequestBounds
from hybridflow.rollout.generator import Generator
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.source import Rollout, RolloutSnapshot, RolloutSource, drawn_event
from hybridflow.rollout.stream_types import StepRows, StreamPlan, StreamState
from hybridflow.workers.future import Future

_LOOK_S = 0.2
_MEND_S = 1.0
_LATER_S = 60.0


class Check(Protocol):
    """Raises what an engine's rank died of."""

    def __call__(self, *, ask: bool = False) -> None: ...


@dataclass(frozen=True)
class EngineHandles:
    """How the controller reaches the engines.

    Args:
        actors: handle of the first rank of every engine, by number.
        nodes: Ray's id of the node of each.
        threads: Ray's name of the threads in which they take calls beside those of their group.
        hosts: of each engine, each of which has a rank.
        scorers: handle of every rank of the reward functions.
    """

    actors: Sequence[Any]
    nodes: Sequence[str]
    threads: str
    hosts: int = 1
    scorers: Sequence[Any] = ()


@dataclass(frozen=True)
class Lending:
    """Engines on devices of models, which take requests while a step waits for its groups.

    Args:
        engines: their numbers.
        after_s: that a step waits before, in seconds.
        take_turn: waits until the models do not compute, and the engines have their memory.
    """

    engines: tuple[int, ...]
    after_s: float
    take_turn: Callable[[], object]


class Restarts(Protocol):
    """Starts engines again; see `EngineRestarts`."""

    def begin(self, engine: int, cause: str) -> None: ...
    def started(self, *, wait: bool = False) -> Sequence[int]: ...
    def give_weights(self, engine: int, version: int) -> None: ...


def stream_plan(recipe: Recipe, prompts: Prompts, engines: int, lending: Lending | None) -> StreamPlan:
    """The plan of a recipe's stream.

    Args:
        recipe: with `rollout.stream`.
        prompts: of training.
        engines: their number.
        lending: engines that take requests only while a step waits, if there are any.
    """
    rollout, trainer, stream = recipe.rollout, recipe.trainer, recipe.rollout.stream
    assert stream is not None
    bounds = None
    if stream.dynamic_batching:
        lengths = np.unique(PackedPrompts.of(prompts.tokens).lengths())
        longest = max(map(rollout.sampling_table.sequence_tokens, lengths.tolist()))
        bounds = RequestBounds(rollout.engine.max_running_requests, longest, stream.cache_target)
    limits = StreamLimits(
        trainer.prompts_per_step,
        trainer.max_staleness,
        extra=recipe.extra_groups,
        late=stream.late,
        queue=stream.queue,
        excess=stream.left_over,
    )
    return StreamPlan(
        limits,
        rollout.samples_per_prompt,
        rollout.engine.max_running_requests,
        engines,
        bounds,
        lending.engines if lending is not None else (),
        stream.engine_restarts,
        min((config.batches_at_once for config in recipe.functions.values()), default=1),
        # A rank says itself what hangs below it.
        engine_answers_s=rollout.engine.request_timeout_s + _LATER_S,
        scorer_answers_s=recipe.limits.call_s,
        sampling=rollout.sampling_table,
    )


class StreamSource(RolloutSource):
    """Gives each step its groups, as they become whole.

    Args:
        plan: of the stream.
        functions: reward functions of each kind of score, "reward" or "cost".
        limits: of calls.
        prompts: to train on.
        order: of the prompts.
        engines: that serve the stream, once they were started.
        generator: calls all engines for other prompts than those of steps.
        check: raises what an engine's rank died of, where that is known; with `ask` it finds out.
        lending: the engines that take requests only while a step waits, if there are any.
        restarts: starts engines again that were lost; the first that is lost ends the run if None.
    """

    drains = False
    scored_as_they_end = True

    def __init__(
        self,
        plan: StreamPlan,
        functions: Mapping[str, RewardConfig],
        limits: LimitsConfig,
        prompts: Prompts,
        order: PromptOrder,
        engines: EngineHandles,
        generator: Generator,
        check: Check,
        lending: Lending | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        self._plan, self._functions, self._limits = plan, functions, limits
        self._prompts, self._check, self._engines = prompts, check, engines
        self._generator, self._lending, self._restarts = generator, lending, restarts
        self._controller = start_controller(
            plan,
            ControllerPrompts(PackedPrompts.of(prompts.tokens), prompts.examples if engines.scorers else ()),
            order,
            engines.actors,
            engines.nodes,
            engines.threads,
            engines.scorers,
        )
        self._version = 0
        self._open = False
        self._drawn: tuple[Draw, Rollout] | None = None
        self._groups_per_step = plan.limits.groups_per_step
        self._taken = False
        """True once the step has its groups."""
        self._further: dict[int, int] = {}
        """Prompt indices of the step's draws besides its groups, by the draw's number."""
        self._metrics: dict[str, float] = {}
        self._scores: dict[int, Mapping[str, SampleScore]] = {}
        self._events: tuple[dict[str, Any], ...] = ()

    # A step

    def open(self, version: int, *, steps_left: int) -> None:
        """Begin, with engines that serve this version, for so many steps."""
        self._version = version
        figures = [self._open_engine(number) for number in range(len(self._engines.actors))]
        groups = steps_left * self._plan.limits.groups_per_step
        self._get(self._controller.open.remote(version, groups, figures))
        self._open = True

    def close(self) -> None:
        ray.kill(self._controller)

    def _open_engine(self, number: int) -> EngineFigures:
        """Have an engine take requests. How it is."""
        call = self._engines.actors[number].call_beside.options(concurrency_group=self._engines.threads)
        figures: EngineFigures = self._get(call.remote("open_stream", 1))
        return figures

    def notice_lost(self) -> None:
        """Have engines started again that were lost; what they had goes on at others meanwhile."""
        if self._restarts is not None and self._open:
            for engine, cause in self._get(self._controller.take_lost.remote()).items():
                self._restarts.begin(engine, cause)

    def lose(self, engine: int, cause: str) -> None:
        """An engine is gone: have it started again. Raises EngineError where none may be any more."""
        if not self._open:
            raise EngineError(f"rollout engine {engine}: {cause}")
        self._get(self._controller.lose.remote(engine, cause))
        self.notice_lost()

    def mend(self, *, wait: bool = False) -> None:
        """Have engines that were lost started again, and those that have started take requests.

        Args:
            wait: until none is lost.

        Raises:
            EngineError: one could not be started.
        """
        self.notice_lost()
        if self._restarts is not None and self._open:
            for engine in self._restarts.started(wait=wait):
                self._restarts.give_weights(engine, self._version)
                figures = self._open_engine(engine)
                self._get(self._controller.gain.remote(engine, self._version, figures))

    def draw(self, count: int | None = None) -> Draw:
        """The prompts of the step's groups, once these are whole.

        Raises:
            UserError: the step has its groups already, or a first draw is of another number of prompts.
            EngineError: an engine failed.
        """
        if self._taken and count is not None:
            return self._draw_further(count)
        if self._taken and self._drawn is None:
            raise UserError("a second draw of a step with rollout.stream, expected one rollout for each update")
        if count not in (None, self._groups_per_step):
            raise UserError(f"first draw of {count} prompts with rollout.stream, expected {self._groups_per_step}")
        self._taken = True
        if self._drawn is None:
            taking, times = self._controller.take.remote(self._version), dict[str, float]()
            with self._lent(taking, times):
                rows: StepRows = self._get(taking, of_step=True)
            batch = gathered([row for each in rows.groups for row in each.rows])
            rollout = Rollout(batch, None)  # they took no time of the step's own
            ends = ((end, score) for each in rows.groups for end, score in zip(each.ends, each.scores, strict=False))
            self._scores = {end.sample: score for end, score in ends}
            hosts = self._engines.hosts
            timeline.record(Span("rollout", hosts * engine, "stream", begin, end) for engine, begin, end in rows.busy)
            groups = [each.group for each in rows.groups]
            draw = Draw(self._prompts, [each.prompt for each in groups], [each.number for each in groups])
            self._drawn, self._metrics, self._events = (draw, rollout), rows.figures | times, rows.events
        return self._drawn[0]

    def _draw_further(self, count: int) -> Draw:
        """Prompts of the step besides its groups, for the responses of one call of all engines."""
        drawn: list[tuple[int, int]] = self._get(self._controller.draw.remote(count))
        self._further |= dict(drawn)
        draw = Draw(self._prompts, [index for _, index in drawn], [number for number, _ in drawn])
        self._events += (drawn_event(draw),)
        return draw

    @contextmanager
    def _lent(self, taking: Any, times: dict[str, float]) -> Iterator[None]:
        """The engines on devices of models take requests in the block, unless the step has its groups soon.

        After an error they keep what they have, which a checkpoint then holds.

        Args:
            taking: the step's groups, in the object store once they are whole.
            times: get how long each part took, in ms, by metric name.
        """
        lending = self._lending
        if lending is None:
            yield
            return
        times |= dict.fromkeys((metrics.STREAM_LEND_TIME, metrics.STREAM_LENT_TIME, metrics.STREAM_WITHDRAW_TIME), 0.0)
        if _is_ready(taking, lending.after_s, of_step=True):
            yield
            return
        with Timer(times, metrics.STREAM_LEND_TIME):
            lending.take_turn()
        with Timer(times, metrics.STREAM_LENT_TIME):
            self._get(self._controller.lend.remote(lending.engines))
            yield
        with Timer(times, metrics.STREAM_WITHDRAW_TIME):
            self._get(self._controller.withdraw.remote(lending.engines))

    def rollout(self, draw: Draw, step: int) -> Rollout:
        """The responses to what `draw` returned. Raises UserError for other prompts."""
        if self._further.keys() >= set(draw.groups):
            assert self._plan.sampling is not None
            began = time.perf_counter()
            batch = self.sample(draw, self._plan.sampling, self._plan.samples_per_prompt).batch()
            return Rollout(batch, time.perf_counter() - began)
        drawn, self._drawn = self._drawn, None
        if drawn is None or drawn[0] is not draw:
            raise UserError(
                f"step {step}: responses to other prompts than those that the stream gave, expected "
                "step.generate(step.draw()) once a step with rollout.stream"
            )
        return drawn[1]

    def rewards(self, what: str, sample_ids: Sequence[int]) -> RewardResult | None:
        """What functions have given these samples; None where not all of them were scored.

        Args:
            what: "reward" or "cost".
            sample_ids: of the last step's samples.

        Raises:
            UserError: a function failed on all of them, or every sample is dropped.
        """
        config = self._functions.get(what)
        if config is None or not all(sample in self._scores for sample in sample_ids):
            return None
        return of_samples([self._scores[sample][what] for sample in sample_ids], config.functions)

    def take_metrics(self) -> dict[str, float]:
        taken, self._metrics = self._metrics, {}
        return taken

    def take_events(self) -> tuple[dict[str, Any], ...]:
        """Decisions of the stream up to the last step's groups; see `StreamEvents`."""
        events, self._events = self._events, ()
        return events

    def trained(self, version: int, rates: Mapping[int, float]) -> None:
        self._version, self._further, self._taken = version, {}, False
        self._get(self._controller.learned.remote(version, rates))

    # Other prompts

    def sample(
        self, draw: Draw, sampling: Sampling, samples_per_prompt: int, first_sample: int | None = None
    ) -> Future[SampleBatch]:
        self.mend(wait=True)  # a call is of all engines
        if first_sample is None:
            first_sample = self.reserve_samples(len(draw.indices) * samples_per_prompt)
        return self._generator.sample(draw, sampling, samples_per_prompt, first_sample)

    def reserve_samples(self, count: int) -> int:
        first: int = self._get(self._controller.reserve_samples.remote(count))
        return first

    # Weights

    def drain(self) -> None:
        """`rollout.stream.on_new_weights` says what becomes of requests in flight."""

    def change(self, engines: Sequence[int]) -> None:
        if self._open:
            self._get(self._controller.change.remote(engines))

    def serve(self, engines: Sequence[int], version: int) -> None:
        if self._open:
            self._get(self._controller.serve.remote(engines, version))

    # Checkpoints

    def begin_step(self) -> None:
        """The controller has the groups of the step until it is over."""

    def abandon(self) -> None:
        self._drawn, self._taken = None, False
        further, self._further = self._further, {}
        self._get(self._controller.give_back.remote(further))
        if self._lending is not None:  # models may compute next
            self._get(self._controller.withdraw.remote(self._lending.engines))

    def snapshot(self) -> RolloutSnapshot:
        order, state = self._get(self._controller.state.remote())
        assert isinstance(state, StreamState)
        return RolloutSnapshot(order, state.samples_drawn, buffered_groups(state, self._prompts))

    def restore(self, snapshot: RolloutSnapshot) -> None:
        groups, drawn = snapshot.groups, snapshot.samples_drawn
        state = None if groups is None else stream_state(groups, drawn, self._plan.samples_per_prompt)
        self._get(self._controller.restore.remote(snapshot.order, state, drawn))

    def unusable(self, groups: BufferedGroups) -> str | None:
        return None if groups.streamed else "rollout.stream is set now"

    def _waiting_for(self) -> str:
        found: str = self._get(self._controller.waiting_for.remote())
        return found

    def _get(self, ref: Any, *, of_step: bool = False) -> Any:
        """A result of the controller. Raises what an engine's rank died of, or else what the controller says.

        `of_step`: a step's groups, which may take as long as engines come further, and functions of rewards have time.
        """
        limits, began = self._limits, time.monotonic()
        end, quiet = began + limits.call_s, began + limits.quiet_s
        mended = 0.0
        try:
            while not _is_ready(ref, _LOOK_S, of_step=of_step):
                self._check()
                if of_step and time.monotonic() > mended + _MEND_S:
                    self.mend()
                    mended = time.monotonic()
                if of_step and time.monotonic() > quiet:
                    log.info(f"rollout: after {time.monotonic() - began:.0f} s the step {self._waiting_for()}")
                    quiet = time.monotonic() + limits.quiet_s
                elif not of_step and time.monotonic() > end:
                    raise EngineError(f"rollout controller: no answer within {limits.call_s:g} s (limits.call_s)")
            return ray.get(ref)
        except RayError as error:
            self._check(ask=True)
            cause = getattr(error, "cause", None)
            if isinstance(cause, EngineError | UserError):
                raise cause from None
            raise EngineError(f"rollout controller: {' '.join(str(error).split())}") from None


def _is_ready(ref: Any, timeout_s: float, *, of_step: bool) -> bool:
    """Whether a result is there within so long. A run that is asked to save and to end does not wait for a step's."""
    with termination.waiting() if of_step else nullcontext():
        return bool(ray.wait([ref], timeout=timeout_s)[0])

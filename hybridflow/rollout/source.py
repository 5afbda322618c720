"""The source of a run's samples, in the driver: the groups of each step, and what a checkpoint holds of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from engine3d.errors import EngineError, UserError
from engine3d.rollout.config import Sampling
from engine3d.rollout.requests import EngineStats
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.stored_rows import gathered
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.processes.termination import termination
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Draw, DrawnPrompt, Prompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.environments.environment import Task
from hybridflow.errors.log import log
from hybridflow.errors.rank_failure import Failure
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.metrics.timeline import TimelineSpan, timeline
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.result import RewardResult, SampleScore, of_samples
from hybridflow.rollout.buffered_groups import BufferedGroups, buffered_groups, stream_state
from hybridflow.rollout.controller import ControllerPrompts, start_controller
from hybridflow.rollout.engine_handles import DeviceLease, EngineHandles, Restarts
from hybridflow.rollout.other_requests import OtherRows
from hybridflow.rollout.rollouts import Responses, Rollout, RolloutSnapshot, drawn_event
from hybridflow.rollout.stream.groups import StepRows, StreamState
from hybridflow.rollout.stream.plan import StreamPlan

_LOOK_S = 0.2
_RECOVERY_S = 1.0
_OTHER_SEEDS = 1 << 31
"""Seed of the first task of an evaluation. Those of groups count from 0."""


class RolloutSource:
    """Samples of a run: the groups of its steps, one by one or all together, and responses to other prompts.

    Trainer, steps, evaluations and checkpoints know nothing else of how samples are made.

    Args:
        plan: of the rollouts.
        functions: reward functions of each kind of score, "reward" or "cost".
        limits: of calls.
        prompts: to train on.
        order: of the prompts; None where there are none.
        engines: that respond, once they were started; None in a run without any.
        lease: the engines that take requests only while a step waits, if there are any.
        restarts: starts engines again that were lost; the first that is lost ends the run if None.
    """

    def __init__(
        self,
        plan: StreamPlan,
        functions: Mapping[str, RewardConfig],
        limits: LimitsConfig,
        prompts: Prompts,
        order: PromptOrder | None,
        engines: EngineHandles | None,
        lease: DeviceLease | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        self._plan, self._functions, self._limits = plan, functions if not plan.together else {}, limits
        self._prompts, self._engines = prompts, engines or EngineHandles()
        self._lease, self._restarts = lease, restarts
        scorers = () if plan.together else self._engines.scorers
        self._controller = start_controller(
            plan,
            ControllerPrompts(PackedPrompts.of(prompts.tokens), prompts.examples if scorers else ()),
            order,
            self._engines.actors,
            self._engines.nodes,
            self._engines.threads,
            scorers,
        )
        self.drains = plan.one_ahead
        """True if requests in flight have to end before engines get other weights."""
        self.scored_as_they_end = not plan.together
        """True if buffered groups hold scores, which other settings of rewards make useless."""
        self._version = 0
        self._open = False
        self._drawn: tuple[Draw, Rollout | None] | None = None
        """The step's groups, and their samples once they are there."""
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
        """Begin, once: engines serve the weights of `version`. Nothing is generated ahead after `steps_left` steps."""
        self._version = version
        stats = [self._open_engine(number) for number in range(len(self._engines.actors))]
        groups = steps_left * self._plan.limits.groups_per_step
        self._call("open", version, groups, stats)
        self._open = True

    def close(self) -> None:
        """End what the source has started."""
        self._controller.close()

    def _open_engine(self, number: int) -> EngineStats:
        """Open an engine for requests. Returns its stats."""
        call = self._engines.actors[number].call_concurrently.options(concurrency_group=self._engines.threads)
        stats: EngineStats | Failure = self._get(call.remote("open_stream", 1).future())
        if isinstance(stats, Failure):  # the rank answers with the error of its worker
            raise stats.exception()
        return stats

    def notice_lost(self) -> None:
        """Restart lost engines. Their requests continue at others meanwhile."""
        if self._restarts is not None and self._open:
            for engine, cause in self._call("take_lost").items():
                self._restarts.begin(engine, cause)

    def restart_engine(self, engine: int, cause: str) -> None:
        """An engine is gone: have it started again. Raises EngineError where none may be any more."""
        if not self._open:
            raise EngineError(f"rollout engine {engine}: {cause}")
        self._call("remove_engine", engine, cause)
        self.notice_lost()

    def recover_engines(self, *, wait: bool = False) -> None:
        """Restart lost engines, and open those that have started for requests.

        Args:
            wait: until none is lost.

        Raises:
            EngineError: one could not be started.
        """
        self.notice_lost()
        if self._restarts is not None and self._open:
            for engine in self._restarts.started(wait=wait):
                self._restarts.give_weights(engine, self._version)
                stats = self._open_engine(engine)
                self._call("add_engine", engine, self._version, stats)

    def draw(self, count: int | None = None) -> Draw:
        """The prompts of the step's groups, once these are complete or are to be made together; or further prompts.

        Raises:
            UserError: the source has no other prompts than those of the step.
            EngineError: an engine failed.
        """
        together, exact = self._plan.together, self._plan.one_ahead or not self._plan.together
        if together and exact and count is not None:
            raise UserError(f"{count} prompts beside those of the step with trainer.max_staleness, expected 0 of it")
        if self._taken and self._drawn is None and count is None and exact:
            raise UserError("a second draw of a step whose rollouts run ahead, expected one rollout for each update")
        if together and (self._taken or count is not None or not self._engines.actors):
            return self._draw_further(count or self._groups_per_step)
        if self._taken and count is not None:
            return self._draw_further(count)
        if count not in (None, self._groups_per_step):
            raise UserError(f"first draw of {count} prompts with rollout.stream, expected {self._groups_per_step}")
        self._taken = True
        if self._drawn is None:
            self._drawn = (self._draw_of(self._call("next_groups")), None) if together else self._take()
            if together:
                draw = self._drawn[0]
                self._further |= dict(zip(draw.groups, draw.indices, strict=True))
                self._events += (drawn_event(draw),)
        return self._drawn[0]

    def _take(self) -> tuple[Draw, Rollout]:
        """The groups of the step."""
        times = dict[str, float]()
        if self._plan.together:
            self._engines.take_turn()
        taking = self._controller.call("take", self._version)
        with self._leased(taking, times):
            rows: StepRows = self._get(taking, of_step=True, together=self._plan.together)
        batch = gathered([row for group in rows.groups for row in group.rows])
        self._scores = {group.samples[index]: score for group in rows.groups for index, score in group.scores.items()}
        self._record(rows.busy, "generate" if self._plan.together else "stream")
        draw = self._draw_of([(group.group.number, group.group.prompt) for group in rows.groups])
        if not self._plan.together:
            self._metrics, self._events = rows.metrics | times, rows.events
            return draw, Rollout(batch, None)  # they took no time of the step's own
        name = metrics.ROLLOUT_ACCEPTANCE_LENGTH  # the others say how a stream runs
        self._metrics = {name: rows.metrics[name]} if name in rows.metrics else {}
        seconds = max(end for *_, end in rows.busy) - min(begin for _, begin, _ in rows.busy) if rows.busy else None
        return draw, Rollout(batch, seconds)

    def _draw_of(self, groups: Sequence[tuple[int, int]]) -> Draw:
        return Draw(self._prompts, [index for _, index in groups], [number for number, _ in groups])

    def _record(self, busy: Iterable[tuple[int, float, float]], what: str) -> None:
        """Record when engines were busy on the timeline, on the first host of each."""
        hosts = self._engines.hosts
        timeline.record(TimelineSpan("rollout", hosts * engine, what, begin, end) for engine, begin, end in busy)

    def _draw_further(self, count: int) -> Draw:
        """Prompts of the step besides its groups, for the responses of one call of all engines."""
        draw = self._draw_of(self._call("draw", count))
        self._further |= dict(zip(draw.groups, draw.indices, strict=True))
        self._events += (drawn_event(draw),)
        return draw

    @contextmanager
    def _leased(self, taking: Any, times: dict[str, float]) -> Iterator[None]:
        """The engines on devices of models take requests in the block, unless the step has its groups soon.

        After an error they keep what they have, which a checkpoint then holds.

        Args:
            taking: the step's groups, in the object store once they are complete.
            times: get how long each part took, in ms, by metric name.
        """
        lease = self._lease
        if lease is None:
            yield
            return
        times |= dict.fromkeys(
            (metrics.STREAM_LEASE_START_TIME, metrics.STREAM_LEASED_TIME, metrics.STREAM_RECLAIM_TIME), 0.0
        )
        if _is_ready(taking, lease.after_s, of_step=True):
            yield
            return
        with Timer(times, metrics.STREAM_LEASE_START_TIME):
            lease.take_turn()
        with Timer(times, metrics.STREAM_LEASED_TIME):
            self._call("lease", lease.engines)
            yield
        with Timer(times, metrics.STREAM_RECLAIM_TIME):
            self._call("reclaim", lease.engines)

    def rollout(self, draw: Draw, step: int) -> Rollout:
        """The responses to what `draw` returned. Raises UserError for other prompts."""
        if self._drawn is not None and self._drawn[0] is draw:
            rollout, self._drawn = self._drawn[1], None
            if rollout is None:
                _, rollout = self._take()
            return rollout
        if self.drains or (not self._plan.together and not self._further.keys() >= set(draw.groups)):
            raise UserError(
                f"step {step}: responses to other prompts than those that were made ahead, expected "
                "step.generate(step.draw()) once a step with rollout.stream or trainer.max_staleness above 0"
            )
        if unknown := sorted(set(draw.groups) - self._further.keys()):
            raise UserError(f"step {step}: responses to draw {unknown[0]}, expected only draws of this step")
        self._discard_drawn()
        assert self._plan.sampling is not None
        began = time.perf_counter()
        batch = self.sample(draw, self._plan.sampling, self._plan.samples_per_prompt).batch()
        return Rollout(batch, time.perf_counter() - began)

    def _discard_drawn(self) -> None:
        """Discard the step's groups if they are submitted together and were not taken."""
        if self._drawn is not None and self._plan.together:
            self._call("discard_groups")
        self._drawn = None

    def rewards(self, what: str, sample_ids: Sequence[int]) -> RewardResult | None:
        """Scores of these samples by reward functions; None where not all of them were scored.

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
        """Metrics since the last call, by name."""
        taken, self._metrics = self._metrics, {}
        return taken

    def take_events(self) -> tuple[dict[str, Any], ...]:
        """Decisions of the stream up to the last step's groups; see `StreamEvents`."""
        events, self._events = self._events, ()
        return events

    def trained(self, version: int, rates: Mapping[int, float]) -> None:
        """End the step: engines serve `version`. `rates`: pass rates of its prompts, for a curriculum."""
        self._discard_drawn()
        self._version, self._further, self._taken = version, {}, False
        self._call("trained", version, rates)

    # Other prompts

    def sample(
        self, draw: Draw, sampling: Sampling, samples_per_prompt: int, first_sample: int | None = None
    ) -> Responses:
        """Ask all engines for responses; see `Samples.sample`."""
        self.recover_engines(wait=True)  # all engines respond
        if first_sample is None:
            first_sample = self.reserve_samples(len(draw.indices) * samples_per_prompt)
        drawn = [
            DrawnPrompt(draw.prompts.tokens[index], index, group, first_sample + row * samples_per_prompt)
            for row, (index, group) in enumerate(zip(draw.indices, draw.groups, strict=True))
        ]
        self._engines.take_turn()
        # Of turns, which are requested one by one, no rank reports progress.
        together = self._plan.episodes is None
        if not together:
            examples = [(draw.prompts.examples[prompt.index], _OTHER_SEEDS + prompt.group) for prompt in drawn]
            tasks = [Task(example.prompt, example.answer, example.fields, seed) for example, seed in examples]
            responding = self._controller.call("play", drawn, tasks, sampling, samples_per_prompt)
        else:
            responding = self._controller.call("respond", drawn, sampling, samples_per_prompt)

        def wait() -> tuple[RemoteBatch, RewardResult | None]:
            responses: OtherRows = self._get(responding, of_step=True, together=together)
            self._record(responses.busy, "generate")
            scores = responses.scores
            return gathered(responses.rows), of_samples(scores, self._functions["reward"].functions) if scores else None

        return Responses(wait)

    def reserve_samples(self, count: int) -> int:
        """Give out `count` sample ids. Returns the first of them."""
        first: int = self._call("reserve_samples", count)
        return first

    # Weights

    def drain(self) -> None:
        """Wait for requests that engines got together. Raises what failed.

        `rollout.stream.on_new_weights` says what becomes of those that they got one by one.
        """
        if self.drains:
            self._get(self._controller.call("drain"), of_step=True, together=True)

    def change(self, engines: Sequence[int]) -> None:
        """Send nothing more to these engines, whose weights are about to change."""
        if self._open:
            self._call("change", engines)

    def serve(self, engines: Sequence[int], version: int) -> None:
        """Send requests to these engines again, which serve `version`."""
        if self._open:
            self._call("serve", engines, version)

    # Checkpoints

    def begin_step(self) -> None:
        """Remember the state that `abandon` returns to."""
        if self._plan.together:
            self._call("begin_step")

    def abandon(self) -> None:
        """Return to the state before the step, which will not train."""
        self._drawn, self._taken = None, False
        further, self._further = self._further, {}
        self._call("abandon_step", further)
        if self._lease is not None:  # models may compute next
            self._call("reclaim", self._lease.engines)

    def snapshot(self) -> RolloutSnapshot:
        """The state between two steps."""
        together = self._plan.together
        order, state = self._get(self._controller.call("state"), of_step=together, together=together)
        assert isinstance(state, StreamState)
        groups = None
        if not together or state.groups:
            groups = replace(buffered_groups(state, self._prompts), streamed=not together)
        return RolloutSnapshot(order, state.samples_drawn, groups)

    def restore(self, snapshot: RolloutSnapshot) -> None:
        """Continue from a snapshot, before `open`."""
        groups, drawn = snapshot.groups, snapshot.samples_drawn
        state = None if groups is None else stream_state(groups, drawn, self._plan.samples_per_prompt)
        self._call("restore", snapshot.order, state, drawn)

    def unusable(self, groups: BufferedGroups) -> str | None:
        """Reason for which buffered groups cannot be trained on with this recipe; None if they can."""
        batches = [batch for batch in (groups.ended, groups.begun) if batch is not None]
        if any((batch.routes is None) == self._plan.routes for batch in batches):
            return f"samples {'have' if self._plan.routes else 'had'} routes {'now' if self._plan.routes else 'then'}"
        if not self._plan.together:
            return None if groups.streamed else "rollout.stream is set now"
        if groups.streamed:
            return "rollout.stream is null now"
        if not self._plan.one_ahead:
            return "trainer.max_staleness is 0"
        prompts = self._plan.limits.groups_per_step
        return None if len(groups.draws) == prompts else f"trainer.prompts_per_step is {prompts}"

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the controller, and wait for its answer."""
        return self._get(self._controller.call(method, *arguments))

    def _get(self, answer: Future[Any], *, of_step: bool = False, together: bool = False) -> Any:
        """A result of the controller. Raises what an engine's rank died of, or else what the controller says.

        Args:
            answer: of the controller.
            of_step: True for responses, which may take as long as engines come further, and functions of rewards have
                time.
            together: True for responses whose progress the ranks report.
        """
        watched = self._engines.watched() if together else nullcontext(lambda: None)
        try:
            with watched as look:
                self._wait_for(answer, look, of_step=of_step, quiet=not together)
            error: BaseException | None = answer.exception()  # of a controller in a thread any error
        except (RayError, EngineError) as raised:
            error = raised
        if error is None:
            return answer.result()
        self._engines.check(ask=True)
        cause = getattr(error, "cause", error)
        if isinstance(cause, EngineError | UserError):
            raise cause from None
        text = " ".join(str(error).split())
        if isinstance(error, RayError):
            raise EngineError(f"rollout controller: {text}") from None
        raise EngineError(f"rollout controller: {type(error).__name__}: {text}") from error

    def _wait_for(self, answer: Future[Any], look: Callable[[], None], *, of_step: bool, quiet: bool) -> None:
        limits, began = self._limits, time.monotonic()
        end, logged = began + limits.call_s, began
        recovered = 0.0
        while not _is_ready(answer, _LOOK_S, of_step=of_step):
            self._engines.check()
            look()
            now = time.monotonic()
            if of_step and now > recovered + _RECOVERY_S:
                self.recover_engines()
                recovered = time.monotonic()
            if of_step and quiet and now > logged + limits.quiet_s:
                log.info(f"rollout: after {now - began:.0f} s {self._call('waiting_for')}")
                logged = time.monotonic()
            elif not of_step and now > end:
                raise EngineError(f"rollout controller: no answer within {limits.call_s:g} s (limits.call_s)")


def _is_ready(answer: Future[Any], timeout_s: float, *, of_step: bool) -> bool:
    """True if a result is there within `timeout_s`. A run that is to save and end does not wait for a step's."""
    with termination.waiting() if of_step else nullcontext():
        return bool(wait([answer], timeout=timeout_s).done)

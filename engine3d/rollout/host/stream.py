"""The responses in flight in the host process of an engine: submitted one by one, or several together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from engine3d.rollout.host.generation import SglangBatches, adapter_name, drawn, sampling_parameters
from engine3d.rollout.host.log import log_answered
from engine3d.rollout.host.messages import EndedResponses
from engine3d.rollout.host.progress import SchedulerState
from engine3d.rollout.requests import EngineStats, Request, Response
from engine3d.rollout.scheduler.text_stops import BEFORE, PARAMETER, window

if TYPE_CHECKING:
    from engine3d.models.experts.routes import RouteFormat

InFlightPolicy = Literal["wait", "continue", "recompute", "resend"]
"""Policy for responses in flight when weights change. "wait": the transfer waits until they have ended. "continue",
"recompute": they pause, and continue with their KV cache or a recomputed one. "resend": they are aborted, and sent
again with their tokens.
"""

_TOGETHER_S = 0.02
_NOTHING = Response([], [], [])


class ResponseStream:
    """The responses in flight.

    Args:
        manager: SGLang's tokenizer manager.
        batches: for requests that are submitted together.
        report: sends the responses that have ended to the client. One that could not be made has its `error`.
        scheduler_state: the state of the scheduler.
        cache_tokens: capacity of its KV cache.
        engine_seed: seed of a deterministic engine; None of another.
        routes: format of the routes that come with responses; None without any.
    """

    def __init__(
        self,
        manager: Any,
        batches: SglangBatches,
        report: Callable[[EndedResponses], None],
        scheduler_state: Callable[[], SchedulerState],
        cache_tokens: int,
        engine_seed: int | None,
        routes: RouteFormat | None = None,
    ) -> None:
        self._manager, self._batches, self._report = manager, batches, report
        self._scheduler_state, self._cache_tokens = scheduler_state, cache_tokens
        self._engine_seed, self._routes = engine_seed, routes
        self._prompt_tokens = self._cached_tokens = self._resent = self._continued = 0
        self._serial = itertools.count()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._names: dict[int, str] = {}
        """SGLang's names of the responses that are with the scheduler."""
        self._prefixes: dict[int, Response] = {}
        """Tokens of responses that were submitted one by one, from before they were last sent."""
        self._batch_names: dict[int, str] = {}
        """The same of responses that were submitted together."""
        self._aborted: set[int] = set()
        self._waiting: set[int] = set()
        """Responses that wait until generation is resumed."""
        self._resends = False
        self._caches = 0
        self._parked = asyncio.Event()
        self._ended: dict[int, Response] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, id: int, requests: Sequence[Request], *, together: bool) -> None:
        """Begin responses. `id`: of the call. `together`: they reach the scheduler, and end, in one message."""
        if together:
            task = asyncio.create_task(self._respond_together(id, requests))
            self._tasks |= dict.fromkeys((request.sample for request in requests), task)
            return
        for request in requests:
            self._prefixes[request.sample] = self._begun(request)
            self._tasks[request.sample] = asyncio.create_task(self._respond(request))

    def abort(self, samples: Iterable[int]) -> None:
        """Abort responses: each ends with what it has, and with finish reason "abort"."""
        aborted = {sample: self._tasks[sample] for sample in samples if sample in self._tasks}
        self._aborted.update(aborted)
        for sample in aborted:
            if (name := self._names.get(sample) or self._batch_names.get(sample)) is not None:
                self._manager.abort_request(name)
        left = {task for sample, task in self._tasks.items() if sample not in self._aborted}
        for task in {task for sample, task in aborted.items() if sample in self._waiting} - left:
            task.cancel()

    def leave_cache(self) -> None:
        """Keep requests from here on from reusing the KV cache of earlier ones."""
        self._caches += 1

    async def park(self) -> None:
        """Abort what is with the scheduler, to be sent again; return when nothing is. The engine must be paused."""
        self._resends = True
        try:
            while self._names:
                self._parked.clear()
                self._manager.abort_request(abort_all=True)
                await self._parked.wait()
        finally:
            self._resends = False

    def continues(self) -> None:
        """Count the responses that stand still with the scheduler while weights change."""
        self._continued += len(self._names)

    @property
    def stats(self) -> EngineStats:
        """Latest stats of the engine."""
        state = self._scheduler_state()
        return EngineStats(
            self._cache_tokens,
            state.used_tokens,
            state.queued,
            state.retracted,
            state.batches,
            state.batch_tokens,
            self._prompt_tokens,
            self._cached_tokens,
            self._resent,
            self._continued,
            state.verified,
            state.accepted,
        )

    def so_far(self, new: dict[str, Response]) -> dict[int, Response]:
        """Tokens of the responses that were submitted one by one. `new`: of those with the scheduler, by its names."""
        return {
            sample: _joined(prefix, new.get(self._names.get(sample, ""), _NOTHING))
            for sample, prefix in self._prefixes.items()
        }

    def _begun(self, request: Request) -> Response:
        """Tokens that a response has already. Routes that nobody knows are missing."""
        prefix = request.prefix or _NOTHING
        if self._routes is None or prefix.routes is not None or not prefix.token_ids:
            return prefix
        rows = len(request.prompt) + len(prefix.token_ids) - 1
        return replace(prefix, routes=self._routes.empty(rows).numpy())

    async def _respond(self, request: Request) -> None:
        sample = request.sample
        try:
            while (response := await self._attempt(request)) is None:
                pass
        except asyncio.CancelledError:
            if sample not in self._aborted:
                raise
            response = replace(self._prefixes[sample], finish_reason="abort")
        except Exception as error:
            response = replace(self._prefixes[sample], finish_reason="abort", error=_line(error))
        del self._prefixes[sample]
        self._forget([sample])
        self._end(sample, response)

    async def _respond_together(self, id: int, requests: Sequence[Request]) -> None:
        responses = {request.sample: replace(_NOTHING, finish_reason="abort") for request in requests}
        try:
            await self._resumed(responses)
            left = [request for request in requests if request.sample not in self._aborted]
            names = [f"{id}-{request.sample}." for request in left]  # no name begins with another, as in `_attempt`
            parameters = [sampling_parameters(request, self._engine_seed) for request in left]
            self._batch_names |= {request.sample: name for request, name in zip(left, names, strict=True)}
            ended = await self._batches.generate(id, left, names, parameters) if left else []
            responses |= {request.sample: response for request, response in zip(left, ended, strict=True)}
        except asyncio.CancelledError:
            if not self._aborted.issuperset(responses):
                raise
        except Exception as error:
            failed = replace(_NOTHING, finish_reason="abort", error=_line(error))
            responses = dict.fromkeys(responses, failed)
        finally:
            for sample in responses:
                self._batch_names.pop(sample, None)
        self._forget(responses)
        self._report(EndedResponses(responses, self.stats))

    async def _resumed(self, samples: Iterable[int]) -> None:
        """Wait until generation is resumed, where it is paused: before a request has a name in the scheduler."""
        self._waiting.update(samples)
        try:
            async with self._manager.is_pause_cond:
                await self._manager.is_pause_cond.wait_for(lambda: not self._manager.is_pause)
        finally:
            self._waiting.difference_update(samples)

    def _forget(self, samples: Iterable[int]) -> None:
        for sample in samples:
            del self._tasks[sample]
            self._aborted.discard(sample)

    async def _attempt(self, request: Request) -> Response | None:
        """Send a request with what its response has; the complete response, or None where it is to be sent again."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sample = request.sample
        await self._resumed([sample])
        prefix = self._prefixes[sample]
        if sample in self._aborted:
            return replace(prefix, finish_reason="abort")
        left = request.sampling.max_new_tokens - len(prefix.token_ids)
        if left <= 0:  # it was begun with a larger limit, before a restart
            return replace(prefix, finish_reason="length")
        name = f"stream-{next(self._serial)}."  # no name begins with another, which SGLang would abort with it
        sampling = sampling_parameters(request, self._engine_seed) | {"max_new_tokens": left}
        if (texts := sampling.get("custom_params")) and prefix.token_ids:  # a text may begin in what is there already
            turn = prefix.token_ids[request.turn_start or 0 :]
            sampling["custom_params"] = texts | {BEFORE: turn[-window(texts[PARAMETER]) :]}
        tokens = [*request.prompt, *prefix.token_ids]
        known = len(tokens) - 1 if prefix.token_ids else 0  # rows of routes: those of the pass that drew each token
        input = GenerateReqInput(
            input_ids=tokens,
            sampling_params=sampling,
            rid=name,
            return_logprob=True,
            extra_key=f"stream-{self._caches}",
            lora_path=adapter_name(),
            return_routed_experts=self._routes is not None,
            routed_experts_start_len=known,
        )
        self._names[sample] = name
        try:
            async for output in self._manager.generate_request(input):
                meta = output["meta_info"]
        finally:
            del self._names[sample]
            if not self._names:
                self._parked.set()
        self._prompt_tokens += len(tokens)
        self._cached_tokens += int(meta.get("cached_tokens") or 0)
        new = drawn(meta, token_versions=True, routes=self._routes, tokens_before=len(tokens) - known)
        self._prefixes[sample] = response = _joined(prefix, new)
        if response.finish_reason == "abort" and self._resends and sample not in self._aborted:
            self._resent += 1
            return None
        return response

    def _end(self, sample: int, response: Response) -> None:
        if not self._ended:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self._report_ended)
        self._ended[sample] = response

    def _report_ended(self) -> None:
        ended, self._ended = self._ended, {}
        self._report(EndedResponses(ended, self.stats))


def _line(error: Exception) -> str:
    """The error in one line. Called where it is handled: the log gets its traceback."""
    log_answered()
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _joined(prefix: Response, new: Response) -> Response:
    if not new.token_ids:
        return replace(prefix, finish_reason=new.finish_reason)
    routes = new.routes
    if prefix.token_ids and routes is not None:
        assert prefix.routes is not None  # `_begun`
        routes = np.concatenate([prefix.routes, routes])
    return Response(
        prefix.token_ids + new.token_ids,
        prefix.logprobs + new.logprobs,
        prefix.versions + new.versions,
        new.finish_reason,
        routes=routes,
    )

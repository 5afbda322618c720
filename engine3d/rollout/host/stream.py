"""Responses that are asked for one by one and answered one by one, in the host process of an engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError
from engine3d.rollout.host.log import log_answered
from engine3d.rollout.host.messages import Ended, Response, ResponseRequest, StreamFailed
from engine3d.rollout.host.progress import SchedulerState
from engine3d.rollout.scheduler.text_stops import BEFORE, PARAMETER, window
from engine3d.rollout.scheduler.under_way import Drawn
from engine3d.rollout.scheduler.versions import VERSIONS

UnderWay = Literal["wait", "continue", "recompute", "resend"]
"""What becomes of responses under way when weights change: the transfer waits until they have ended; they stand still
and go on with their KV cache, or compute it anew; or they are aborted, and sent again with what they have."""

_TOGETHER_S = 0.02
_NOTHING = Response([], [], [])


class ResponseStream:
    """The responses of a stream that are under way.

    Args:
        manager: SGLang's tokenizer manager.
        tell: sends to the client what has ended, or why a response could not be made.
        scheduler_state: says how the scheduler is.
        cache_tokens: that its KV cache has room for.
    """

    def __init__(
        self,
        manager: Any,
        tell: Callable[[Ended | StreamFailed], None],
        scheduler_state: Callable[[], SchedulerState],
        cache_tokens: int,
    ) -> None:
        self._manager, self._tell = manager, tell
        self._scheduler_state, self._cache_tokens = scheduler_state, cache_tokens
        self._prompt_tokens = self._cached_tokens = self._resent = self._continued = 0
        self._serial = itertools.count()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._names: dict[int, str] = {}
        self._begun: dict[int, Response] = {}
        self._given_up: set[int] = set()
        self._held_back: set[int] = set()
        self._resends = False
        self._caches = 0
        self._parked = asyncio.Event()
        self._ended: dict[int, Response] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def submit(self, requests: Iterable[ResponseRequest]) -> None:
        """Begin responses. Raises EngineError for a sample that is under way already."""
        for request in requests:
            if request.sample in self._tasks:
                raise EngineError(f"sample {request.sample} is under way already")
            self._begun[request.sample] = request.begun or _NOTHING
            self._tasks[request.sample] = asyncio.create_task(self._respond(request))

    def abort(self, samples: Iterable[int]) -> None:
        """Give responses up: each ends with what it has, and with finish reason "abort"."""
        for sample in samples:
            if sample in self._tasks:
                self._given_up.add(sample)
                if (name := self._names.get(sample)) is not None:
                    self._manager.abort_request(name)
                elif sample in self._held_back:  # by a transfer of weights; else it looks before it is sent
                    self._tasks[sample].cancel()

    def leave_cache(self) -> None:
        """Let what is sent from here on find nothing in the KV cache of what was sent before."""
        self._caches += 1

    async def park(self) -> None:
        """Abort what is with the scheduler, to be sent again; return when nothing is. The engine must be paused."""
        self._resends = True
        while self._names:
            self._parked.clear()
            self._manager.abort_request(abort_all=True)
            await self._parked.wait()
        self._resends = False

    def continues(self) -> None:
        """What is with the scheduler stands still while weights change, and goes on."""
        self._continued += len(self._names)

    @property
    def figures(self) -> EngineFigures:
        """How the engine is."""
        state = self._scheduler_state()
        return EngineFigures(
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
        )

    def so_far(self, drawn: dict[str, Drawn]) -> dict[int, Response]:
        """What the responses under way have, given what the scheduler has drawn of those that are with it."""
        found = {}
        for sample, begun in self._begun.items():
            new = drawn.get(self._names.get(sample, ""))
            found[sample] = begun if new is None else _joined(begun, new.token_ids, new.logprobs, new.versions)
        return found

    async def _respond(self, request: ResponseRequest) -> None:
        sample = request.sample
        try:
            while (response := await self._attempt(request)) is None:
                pass
        except asyncio.CancelledError:
            if sample not in self._given_up:
                raise
            response = replace(self._begun[sample], finish_reason="abort")
        except Exception as error:
            log_answered()
            self._tell(StreamFailed(f"sample {sample}: {type(error).__name__}: {' '.join(str(error).split())}"))
            return
        del self._tasks[sample], self._begun[sample]
        self._given_up.discard(sample)
        self._end(sample, response)

    async def _attempt(self, request: ResponseRequest) -> Response | None:
        """Send a request with what its response has; the whole response, or None where it is to be sent again."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sample, manager = request.sample, self._manager
        self._held_back.add(sample)
        try:
            async with manager.is_pause_cond:  # before it has a name, which says that the scheduler has it
                await manager.is_pause_cond.wait_for(lambda: not manager.is_pause)
        finally:
            self._held_back.discard(sample)
        begun = self._begun[sample]
        if sample in self._given_up:
            return replace(begun, finish_reason="abort")
        left = request.sampling["max_new_tokens"] - len(begun.token_ids)
        if left <= 0:  # it was begun with a larger limit, before a restart
            return replace(begun, finish_reason="length")
        name = f"stream-{next(self._serial)}."  # no name begins with another, which SGLang would abort with it
        sampling = request.sampling | {"max_new_tokens": left}
        if (texts := sampling.get("custom_params")) and begun.token_ids:  # a text may begin in what is there already
            sampling["custom_params"] = texts | {BEFORE: begun.token_ids[-window(texts[PARAMETER]) :]}
        asked = GenerateReqInput(
            input_ids=request.prompt + begun.token_ids,
            sampling_params=sampling,
            rid=name,
            return_logprob=True,
            extra_key=f"stream-{self._caches}",
        )
        self._names[sample] = name
        try:
            async for output in manager.generate_request(asked):
                meta = output["meta_info"]
        finally:
            del self._names[sample]
            if not self._names:
                self._parked.set()
        self._prompt_tokens += len(request.prompt) + len(begun.token_ids)
        self._cached_tokens += int(meta.get("cached_tokens") or 0)
        reason = meta["finish_reason"]["type"]
        tokens = meta.get("output_token_logprobs") or []
        # An abort in SGLang's queue tells tokens and no versions: such a piece is drawn again.
        versions = [int(version) for version in meta.get(VERSIONS) or []]
        if len(versions) == len(tokens):
            drawn = [int(token) for _, token, _ in tokens], [float(logprob) for logprob, _, _ in tokens]
            begun = self._begun[sample] = _joined(begun, *drawn, versions)
        elif reason != "abort":
            raise EngineError(f"sample {sample} has {len(tokens)} tokens and {len(versions)} versions")
        if reason == "abort" and self._resends and sample not in self._given_up:
            self._resent += 1
            return None
        return replace(begun, finish_reason=reason)

    def _end(self, sample: int, response: Response) -> None:
        if not self._ended:
            asyncio.get_running_loop().call_later(_TOGETHER_S, self._tell_ended)
        self._ended[sample] = response

    def _tell_ended(self) -> None:
        ended, self._ended = self._ended, {}
        self._tell(Ended(ended, self.figures))


def _joined(begun: Response, tokens: list[int], logprobs: list[float], versions: list[int]) -> Response:
    return Response(begun.token_ids + tokens, begun.logprobs + logprobs, begun.versions + versions)

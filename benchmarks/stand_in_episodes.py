"""Engines and environments of episodes that only count tokens, for streams on a clock of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.stand_in_engine import StandInEngine
from engine3d.rollout.requests import Request, Response
from hybridflow.batch.stored_rows import SampleEnds
from hybridflow.environments.episode import EpisodeAnswer, EpisodeClose, EpisodeMessage, EpisodeStart

DRAWN, ANSWERED = 1, 0
"""Tokens that an engine draws, and that an environment appends."""


class TurnEngine(StandInEngine):
    """An engine of turns. Its tokens follow the prefix, `length` of each request."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._requests: dict[int, Request] = {}

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        self._requests |= {request.sample: request for request in requests}
        # What a response has already is a prompt to a stand-in, which counts what is drawn.
        await super().submit([replace(request, prefix=None) for request in requests], together=together)

    async def ended(self) -> SampleEnds:
        ends = await super().ended()
        samples = []
        for end in ends.samples:
            request = self._requests.pop(end.sample)
            turn = self._response(request, end.tokens, end.oldest) if end.complete else None
            samples.append(replace(end, turn=turn, row=None))
        return SampleEnds(samples, ends.stats)

    def _response(self, request: Request, count: int, version: int) -> Response:
        prefix = request.prefix or Response([], [], [])
        count = min(count, request.sampling.max_new_tokens - len(prefix.token_ids))
        return Response(
            [*prefix.token_ids, *[DRAWN] * count],
            [*prefix.logprobs, *[-1.0] * count],
            [*prefix.versions, *[version] * count],
            "stop",
        )


class StandInEnvironments:
    """Environments that answer by a formula.

    Args:
        seconds: of an answer.
        answer: to a message, with the number of turns of its episode before it.
    """

    def __init__(self, seconds: float, answer: Callable[[EpisodeMessage, int], EpisodeAnswer]) -> None:
        self._seconds, self._answer = seconds, answer
        self._turns: dict[int, int] = {}
        self._ready: asyncio.Queue[EpisodeAnswer] = asyncio.Queue()

    @property
    def open(self) -> int:
        """Episodes that have not been closed."""
        return len(self._turns)

    async def send(self, messages: Sequence[EpisodeMessage]) -> None:
        for message in messages:
            if isinstance(message, EpisodeClose):
                del self._turns[message.sample]
                continue
            self._turns[message.sample] = turns = (
                0 if isinstance(message, EpisodeStart) else self._turns[message.sample] + 1
            )
            answer = replace(self._answer(message, turns), seconds=self._seconds)
            asyncio.get_running_loop().call_later(self._seconds, self._ready.put_nowait, answer)

    async def answers(self) -> Sequence[EpisodeAnswer]:
        answers = [await self._ready.get()]
        while not self._ready.empty():
            answers.append(self._ready.get_nowait())
        return answers

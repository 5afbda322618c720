"""Session of an agent: its requests one after the other, their limits, and its reward."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine3d.errors import UserError
from engine3d.serving.openai_requests import CompletionOrder
from hybridflow.endpoint.conversation import Drawn, SessionTokens
from hybridflow.endpoint.token_tree import Branch

_MOST_REFUSED = 100
"""Refused requests of a session, after which its agent floods."""
_MOST_WAITING = 256
"""Requests of a session at a time, beyond which its agent floods."""


_MOST_NAMES = 64
"""Names of counts, beyond which calls of tools are counted together."""


class RefusedError(Exception):
    """A request that is not served.

    Args:
        message: one line.
        status: of the answer.
        code: of the error, by which a client may know it.
        param: name of the option that is wrong, if it is one.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a session.

    Args:
        tokens: of all sequences of its tree.
        turns: answers of the policy.
        turn_tokens: of an answer; those that are left if None.
    """

    tokens: int
    turns: int
    turn_tokens: int | None = None


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens that the policy has drawn. `complete`: it has ended by itself."""

    tokens: Sequence[int]
    complete: bool


@dataclass
class Answering:
    """A request and its answer to be.

    Args:
        answering: the answer to be.
        is_waited_for: True while the client that sent it is connected.
        delivered: True once the answer was sent.
    """

    answering: asyncio.Task[Drawn]
    is_waited_for: Callable[[], bool]
    delivered: bool = False

    def joined_by(self, *, retry: bool) -> bool:
        """True if an equal request is this one again, rather than one for another answer.

        `retry`: the client says so.
        """
        return retry or not (self.delivered or self.is_waited_for())


class Session:
    """An agent's requests, reward and counts. All calls are of one event loop.

    Args:
        conversation: of the session, without a token.
        limits: of it.
        draw: has the policy continue a branch with at most this many tokens.
    """

    def __init__(
        self,
        conversation: SessionTokens,
        limits: SessionLimits,
        draw: Callable[[Branch, int], Awaitable[DrawnTokens]],
    ) -> None:
        self.conversation = conversation
        """Tokens of the session."""
        self._limits, self._draw = limits, draw
        self._turn = asyncio.Lock()
        self._over: str | None = None
        self.key = secrets.token_hex(32)
        """Key that its requests have to bring."""
        self.exchanges: dict[str, Answering] = {}
        """Last exchange of each request, by its content."""
        self.waiting = 0
        """Requests that have no answer yet."""
        self.last_answer = asyncio.get_running_loop().time()
        """Time of the last answer, or of the begin."""
        self.rewards: list[float] = []
        """Rewards that were reported."""
        self.counts: Counter[str] = Counter()
        """Events by name."""
        self.delivered = 0
        """Answers that were sent."""
        self.truncated = False
        """True once a request was refused since no turns or tokens were left."""
        self.flooded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Words for the flood of its agent, set once there is one."""

    async def complete(self, order: CompletionOrder, *, messages: bool) -> Drawn:
        """Answer a request, behind those before it. `messages`: it is of messages, not of a text.

        Raises:
            RefusedError: there is no answer.
        """
        if self.waiting >= _MOST_WAITING:
            raise self.refused(RefusedError(f"{self.waiting} requests of this session wait", 429))
        self.waiting += 1
        try:
            async with self._turn:
                return await self._answered(order, messages=messages)
        finally:
            self.waiting -= 1
            self.last_answer = asyncio.get_running_loop().time()

    async def _answered(self, order: CompletionOrder, *, messages: bool) -> Drawn:
        if self._over is not None:
            raise RefusedError(self._over, 410, "session_over")
        conversation, limits = self.conversation, self._limits
        if self.counts["requests"] >= limits.turns:
            raise self._out_of(f"{limits.turns} answers (environment.max_turns)", "max_turns_exceeded")
        try:
            position = (
                conversation.of_messages(order.messages, order.tools)
                if messages
                else conversation.of_text(order.prompt)
            )
        except UserError as error:
            raise self.refused(RefusedError(str(error))) from None
        branch = position.branch
        left = limits.tokens - conversation.tree.tokens - len(branch.tokens)
        if left < 1:
            raise self._out_of(f"{limits.tokens} tokens", "context_length_exceeded")
        branches = len(conversation.tree)
        drawn = await self._draw(branch, min(most for most in (left, limits.turn_tokens, order.max_tokens) if most))
        self.counts["requests"] += 1
        self.counts["branches"] += branches > 0 and branch.sequence == branches
        answer = conversation.answer(position, drawn.tokens, complete=drawn.complete, messages=messages)
        for name in answer.called:
            known = len(self.counts) < _MOST_NAMES or f"calls_{name}" in self.counts
            self.counts[f"calls_{name}" if known else "calls_others"] += 1
        return answer

    def _out_of(self, what: str, code: str) -> RefusedError:
        self.truncated = True
        return self.refused(RefusedError(f"this session has had its {what}", 400, code))

    def refused(self, error: RefusedError) -> RefusedError:
        """Count a refusal. Returns it."""
        self.counts["refused"] += 1
        if self.counts["refused"] > _MOST_REFUSED and not self.flooded.done():
            self.flooded.set_result(f"had {_MOST_REFUSED} requests refused, the last one since {error}")
        return error

    def report(self, content: Any) -> None:
        """Add a reward: {"reward": number}, and counts by name if there are some.

        Raises:
            RefusedError: it is none.
        """
        reward = content.get("reward") if isinstance(content, Mapping) else None
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if not is_number or not abs(reward) <= 1e30:  # type: ignore[arg-type]
            raise self.refused(RefusedError(f'reward: {reward!r:.40}, expected {{"reward": a finite number}}'))
        if self._over is not None:
            raise RefusedError(self._over, 410, "session_over")
        self.rewards.append(float(reward))  # type: ignore[arg-type]

    def totals(self) -> dict[str, float]:
        """Counts of the session by name, once it has ended."""
        undelivered = {"undelivered": self.counts["requests"] - self.delivered}
        return {name: float(count) for name, count in (self.counts | undelivered).items() if count}

    async def end(self, reason: str) -> None:
        """Refuse all further requests, once the one that is drawn has its answer."""
        self._over = reason
        async with self._turn:
            pass

    def abandon(self, reason: str) -> None:
        """Refuse all further requests."""
        self._over = reason

"""Episodes of a stream: the tokens of each so far, and what it waits for: its engine or its environment.

An episode is one sample. With an environment it is one sequence of tokens, to which the policy and the environment
append in turn. An agent continues any of its sequences, or begins another. Nothing is ever decoded and encoded again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine3d.rollout.requests import BEGINS, GIVEN, FinishReason, Request, Response
from hybridflow.batch.stored_rows import SampleEnd, StoredRow
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import (
    EpisodeAnswer,
    EpisodeClose,
    EpisodeMessage,
    EpisodeRank,
    EpisodeStart,
    EpisodeTurn,
)
from hybridflow.rewards.config import ENVIRONMENT
from hybridflow.rewards.result import SampleScore

_NOTHING = Response([], [], [])


@dataclass(frozen=True)
class EpisodePlan:
    """Limits of episodes.

    Args:
        max_turns: most turns of the policy.
        max_turn_tokens: most tokens of a turn; those that are left of the episode if None.
        turn_discount: factor of a later turn's reward in the return of a turn; None if credit is not assigned to turns.
    """

    max_turns: int
    max_turn_tokens: int | None = None
    turn_discount: float | None = None


@dataclass(slots=True)
class DrawnTurn:
    """A turn that the policy has drawn.

    Args:
        sequence: index of its sequence.
        start: token of the sequence's response at which it begins.
        tokens: count of them.
        reward: that followed it.
    """

    sequence: int
    start: int
    tokens: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """Credit of an episode's turns, by token of its response.

    Args:
        numbers: number of each token's turn, from 1; 0 of a token that the policy did not write.
        returns: return of that turn; 0 likewise.
    """

    numbers: Sequence[int]
    returns: Sequence[float]


@dataclass(slots=True)
class EpisodeSequence:
    """Tokens of an episode of which each follows those before.

    Args:
        context: token ids before the first that is drawn.
        response: all further tokens so far.
    """

    context: Sequence[int]
    response: Response = _NOTHING


@dataclass(slots=True)
class Episode:
    """An episode in flight.

    Args:
        request: its last one.
        most_tokens: of its response.
        began: time at which it began, by the stream's clock.
        sequences: of its tokens: one with an environment.
        current: index of the sequence to which the next turn belongs.
        turns: of the policy, in the order of time.
        counts: of events in all turns, by name.
        sent: time at which it was sent to its engine.
        policy_s: time for which it waited for its engine, in seconds.
        environment_s: time for which it waited for its environment, in seconds.
    """

    request: Request
    most_tokens: int
    began: float
    sequences: list[EpisodeSequence] = field(default_factory=list)
    current: int = 0
    turns: list[DrawnTurn] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    sent: float = 0.0
    policy_s: float = 0.0
    environment_s: float = 0.0

    @property
    def sequence(self) -> EpisodeSequence:
        """The sequence to which the next turn belongs."""
        return self.sequences[self.current]

    @property
    def reward(self) -> float:
        """Sum of the rewards so far."""
        return sum((turn.reward for turn in self.turns), 0.0)

    def credit(self, discount: float) -> TurnCredit:
        """Credit of the turns, in the order of `joined`'s tokens.

            G_k = sum_{l >= k} discount^(l - k) r_l

        Source: Kevin, arXiv:2507.11948, whose rewards of a turn are those of the later ones too, discounted.
        """
        starts, tokens = [], 0
        for number, sequence in enumerate(self.sequences):
            tokens += len(sequence.context) if number else 0
            starts.append(tokens)
            tokens += len(sequence.response.token_ids)
        numbers, returns, following = [0] * tokens, [0.0] * tokens, 0.0
        for number in range(len(self.turns), 0, -1):
            turn = self.turns[number - 1]
            following = turn.reward + discount * following
            start = starts[turn.sequence] + turn.start
            numbers[start : start + turn.tokens] = [number] * turn.tokens
            returns[start : start + turn.tokens] = [following] * turn.tokens
        return TurnCredit(numbers, returns)

    def joined(self) -> tuple[Sequence[int], Response]:
        """Context of the first sequence, and all further tokens: those of each other sequence with its context."""
        if not self.sequences:
            return self.request.prompt, _NOTHING
        first, *others = self.sequences
        tokens, logprobs = list(first.response.token_ids), list(first.response.logprobs)
        versions = list(first.response.versions)
        for other in others:
            context, response = other.context, other.response
            tokens += [*context, *response.token_ids]
            logprobs += [*[0.0] * len(context), *response.logprobs]
            versions += [BEGINS, *[GIVEN] * (len(context) - 1), *response.versions]
        return first.context, Response(tokens, logprobs, versions)


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """An episode that is over.

    Args:
        request: its last one.
        response: all of its tokens, with the reason for which it ended: "abort" if its environment failed.
        score: of it; dropped if its environment failed.
        engine: number of the engine that drew its last turn; -1 if none did.
        began: time at which it began, by the stream's clock.
        prompt: token ids of its prompt.
        credit: of its turns; None if they have none of their own.
    """

    request: Request
    response: Response
    score: SampleScore
    engine: int
    began: float
    prompt: Sequence[int]
    credit: TurnCredit | None = None

    @property
    def drawn(self) -> int:
        """Tokens of the policy."""
        return sum(version >= 0 for version in self.response.versions)

    def end(self, version: int, row: StoredRow) -> SampleEnd:
        """The end of its sample.

        Args:
            version: of weights, for an episode without a token of the policy.
            row: of the stored sample.
        """
        oldest = self.response.oldest_version
        request, tokens = self.request, len(self.response.token_ids)
        oldest = version if oldest == GIVEN else oldest
        return SampleEnd(request.sample, request.group, request.index, tokens, oldest, complete=True, row=row)


type EpisodeStore = Callable[[Sequence[EndedEpisode], int], Sequence[StoredRow]]
"""Stores ended episodes as samples, and returns the row of each. Gets the version of weights for an episode without a
token of the policy.
"""


@dataclass(frozen=True)
class EpisodeSetup:
    """Environments of a stream, and limits of its episodes.

    Args:
        plan: limits.
        ranks: that have environments.
        task: of a prompt, by its index, for a group of this number.
        store: of ended episodes.
    """

    plan: EpisodePlan
    ranks: Sequence[EpisodeRank]
    task: Callable[[int, int], Task]
    store: EpisodeStore


class Episodes:
    """The episodes of a stream.

    Args:
        setup: of them.
        clock: in seconds.
        spawn: starts a task.
        submit: called with requests to send to engines, of which True says that they continue an episode.
        ended: called with episodes that are over.
    """

    def __init__(
        self,
        setup: EpisodeSetup,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        submit: Callable[[Request, bool], None],
        ended: Callable[[Sequence[EndedEpisode]], None],
    ) -> None:
        self._setup, self._clock, self._spawn = setup, clock, spawn
        self._submit, self._ended = submit, ended
        self._in_flight: dict[int, Episode] = {}
        self._messages: dict[int, list[EpisodeMessage]] = {}
        """Messages to each rank that are to be sent together; none of a rank to which nothing is being sent."""
        self._open = False

    def __len__(self) -> int:
        return len(self._in_flight)

    def __contains__(self, sample: int) -> bool:
        return sample in self._in_flight

    def open(self, answered: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to collect answers. `answered`: called after some were taken in."""
        self._open = True
        for number, rank in enumerate(self._setup.ranks):
            self._spawn(self._collect(rank, answered))
            if number in self._messages:
                self._spawn(self._send_all(number))

    def begin(self, request: Request, task: Task | None = None) -> None:
        """Begin an episode with its environment.

        Args:
            request: of the first turn, without a prefix. Its sampling has the most tokens of the episode.
            task: of another prompt than those of training; None of these.
        """
        most = request.sampling.max_new_tokens
        self._in_flight[request.sample] = Episode(request, most, self._clock())
        task = task or self._setup.task(request.prompt_index, request.group)
        self._send(EpisodeStart(request.sample, task, request.tokens + most))

    def sent(self, sample: int) -> None:
        """Record that a request was sent to an engine."""
        self._in_flight[sample].sent = self._clock()

    def turn_ended(self, sample: int, engine: int, response: Response) -> int:
        """Send a turn to its environment. Returns the number of its tokens.

        Args:
            sample: id of the episode.
            engine: that drew it.
            response: all tokens of its sequence.
        """
        episode = self._in_flight[sample]
        start = len(episode.sequence.response.token_ids)
        turn = response.token_ids[start:]
        episode.sequence.response = response
        episode.request = replace(episode.request, engine=engine)
        episode.turns.append(DrawnTurn(episode.current, start, len(turn)))
        episode.policy_s += self._clock() - episode.sent
        self._send(EpisodeTurn(sample, turn, complete=response.finish_reason == "stop"))
        return len(turn)

    def forget(self, samples: Iterable[int]) -> None:
        """Give up episodes, whose answers are ignored from here on."""
        for sample in samples:
            if self._in_flight.pop(sample, None) is not None:
                self._send(EpisodeClose(sample))

    def _rank(self, sample: int) -> int:
        return sample % len(self._setup.ranks)

    def _send(self, message: EpisodeMessage) -> None:
        """Send a message with the others of this moment."""
        rank = self._rank(message.sample)
        if rank not in self._messages:
            self._messages[rank] = []
            if self._open:
                self._spawn(self._send_all(rank))
        self._messages[rank].append(message)

    async def _send_all(self, rank: int) -> None:
        """Send what there is, one call after another: no end of an episode overtakes its begin."""
        while messages := self._messages[rank]:
            self._messages[rank] = []
            await self._setup.ranks[rank].send(messages)
        del self._messages[rank]

    async def _collect(self, rank: EpisodeRank, answered: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            if answers := await rank.answers():
                self._take_in(answers)
                await answered()

    def _take_in(self, answers: Sequence[EpisodeAnswer]) -> None:
        over = []
        for answer in answers:
            episode = self._in_flight.get(answer.sample)
            if episode is not None and (ended := self._continue(episode, answer)) is not None:
                del self._in_flight[answer.sample]
                self._send(EpisodeClose(answer.sample))
                over.append(ended)
        if over:
            self._ended(over)

    def _continue(self, episode: Episode, answer: EpisodeAnswer) -> EndedEpisode | None:
        """Append an answer, and request the next turn. Returns the episode if it is over."""
        begins = not episode.turns
        episode.environment_s += answer.seconds
        if answer.failure is not None:
            return self._failed(episode, answer.failure, answer.reason)
        for name, count in answer.counts.items():
            episode.counts[name] = episode.counts.get(name, 0.0) + count
        if not begins:
            episode.turns[-1].reward += answer.reward
            if answer.done:
                return self._over(episode, "length" if answer.truncated else "stop")
        if answer.sequence is not None:
            self._continue_sequence(episode, answer, answer.sequence)
            return None
        if begins:
            episode.sequences = [EpisodeSequence(episode.request.prompt)]
        length = len(episode.sequence.response.token_ids) + len(answer.tokens)
        if not begins and (len(episode.turns) >= self._setup.plan.max_turns or length >= episode.most_tokens):
            return self._over(episode, "length")
        if length >= episode.most_tokens:
            return self._failed(
                episode,
                "flooded",
                f"began with {length} tokens, expected less than the {episode.most_tokens} of an episode",
            )
        turn = self._setup.plan.max_turn_tokens
        limit = episode.most_tokens - length if turn is None else min(episode.most_tokens - length, turn)
        self._request(episode, answer.tokens, limit)
        return None

    def _continue_sequence(self, episode: Episode, answer: EpisodeAnswer, number: int) -> None:
        """Request the turn of an agent, behind one of its sequences or in another."""
        episode.current = number
        if number == len(episode.sequences):
            episode.sequences.append(EpisodeSequence(answer.tokens))
            self._request(episode, (), answer.limit)
        else:
            self._request(episode, answer.tokens, answer.limit)

    def _request(self, episode: Episode, tokens: Sequence[int], limit: int) -> None:
        """Append tokens to the current sequence, and request a turn of at most `limit` tokens."""
        sequence = episode.sequence
        if tokens:
            sequence.response = sequence.response.extended(tokens)
        length = len(sequence.response.token_ids)
        episode.request = replace(
            episode.request,
            prompt=sequence.context,
            sampling=episode.request.sampling.model_copy(update={"max_new_tokens": length + limit}),
            prefix=sequence.response if length else None,
            turn_start=length,
        )
        self._submit(episode.request, bool(episode.turns))

    def _failed(self, episode: Episode, kind: str, reason: str) -> EndedEpisode:
        episode.counts[f"failed_{kind}"] = 1.0
        return self._over(episode, "abort", dropped=reason)

    def _over(self, episode: Episode, finish: FinishReason, dropped: str | None = None) -> EndedEpisode:
        prompt, tokens = episode.joined()
        response = replace(tokens, finish_reason=finish)
        drawn = sum(version >= 0 for version in response.versions)
        counts = episode.counts | {
            "policy_tokens": drawn,
            "environment_tokens": len(response.versions) - drawn,
        }
        metrics = {
            "turns": float(len(episode.turns)),
            "policy_ms": 1000 * episode.policy_s,
            "environment_ms": 1000 * episode.environment_s,
        }
        value = episode.reward if dropped is None else math.nan
        score = SampleScore(
            value,
            dropped is not None,
            {ENVIRONMENT: value},
            {} if dropped is None else {ENVIRONMENT: dropped},
            {f"{ENVIRONMENT}/{name}": number for name, number in metrics.items()},
            {f"{ENVIRONMENT}/{name}": number for name, number in counts.items()},
        )
        engine = -1 if episode.request.engine is None else episode.request.engine
        discount = self._setup.plan.turn_discount
        credit = None if discount is None else episode.credit(discount)
        return EndedEpisode(episode.request, response, score, engine, episode.began, prompt, credit)

"""Episodes of a stream with engines and environments that only count tokens, on a clock that jumps."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from benchmarks.stand_in_episodes import ANSWERED, DRAWN, StandInEnvironments, TurnEngine
from benchmarks.virtual_clock import run
from engine3d.errors import EngineError
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import BEGINS, GIVEN, Request
from hybridflow.batch.stored_rows import SampleEnd, SampleEnds, StoredRow
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeAnswer, EpisodeMessage, EpisodeTurn
from hybridflow.rollout.episodes.episodes import EndedEpisode, EpisodePlan, EpisodeSetup
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.engines import EngineLostError
from hybridflow.rollout.stream.groups import GatheredGroup, StepRows
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream

SAMPLES, GROUPS, TURN = 2, 4, 5
type Answer = Callable[[EpisodeMessage, int], EpisodeAnswer]


class _Engine(TurnEngine):
    """Can be lost, and keeps its requests."""

    lost = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: list[Request] = []

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> None:
        self.requests += requests
        await super().submit(requests, together=together)

    async def ended(self) -> SampleEnds:
        ends = await super().ended()
        if self.lost:
            raise EngineLostError("it was killed")
        return ends


class _Setup:
    """A stream of episodes, whose rows are the ended episodes."""

    def __init__(
        self, answer: Answer, *, engines: int = 2, staleness: int = 1, restarts: int = 0, ranks: int = 2, **plan: Any
    ) -> None:
        self.version = 0
        self.engines: list[Any] = [
            _Engine(8, lambda n: 0.01, lambda request: TURN, lambda: self.version) for _ in range(engines)
        ]
        self.ranks = [StandInEnvironments(0.05, answer) for _ in range(ranks)]
        self._numbers = itertools.count()
        plan = {"max_turns": 3, **plan}
        setup = EpisodeSetup(
            EpisodePlan(**plan),
            self.ranks,
            lambda prompt, group: Task(str(prompt), seed=group),
            self._store,
        )
        self.plan = StreamPlan(
            StreamLimits(GROUPS, staleness),
            SAMPLES,
            8,
            engines,
            restarts=restarts,
            sampling=SamplingConfig(max_new_tokens=40),
            episodes=setup.plan,
        )
        self._setup = setup
        self.stream = self.another()

    def another(self) -> RolloutStream:
        clock = asyncio.get_running_loop().time
        return RolloutStream(self.plan, self.engines, self._draw, lambda _: [0, 0, 0], clock, episodes=self._setup)

    def _draw(self, count: int) -> Iterator[tuple[int, int]]:
        return ((number, number % 5) for number in itertools.islice(self._numbers, count))

    def _store(self, episodes: Sequence[EndedEpisode], version: int) -> Sequence[StoredRow]:
        assert version == self.version
        return [StoredRow(episode, 0) for episode in episodes]

    async def step(self) -> StepRows:
        rows = await self.stream.take(self.version)
        self.version += 1
        self.stream.trained(self.version)
        return rows


def _scored(group: GatheredGroup) -> list[tuple[SampleEnd, Any]]:
    """Samples of a complete group, with their scores."""
    return [(end, group.scores[end.index]) for end in group.ended]


def _episodes(rows: StepRows) -> list[EndedEpisode]:
    return [row.packed for group in rows.groups for row in group.rows]


def _three_turns(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
    """Two tokens after each turn; the third ends the episode."""
    if turns == 0:
        return EpisodeAnswer(message.sample, [ANSWERED])
    return EpisodeAnswer(message.sample, [ANSWERED, ANSWERED], reward=0.5, done=turns == 3, counts={"calls": 1.0})


def test_an_episode_is_one_list_of_tokens_with_a_reward() -> None:
    async def play() -> None:
        setup = _Setup(_three_turns, max_turns=9)
        setup.stream.open(0)
        for _ in range(3):
            rows = await setup.step()
            assert len(rows.groups) == GROUPS
            for group in rows.groups:
                assert [end.index for end in group.ended] == [0, 1] and all(end.complete for end in group.ended)
                for end, score in _scored(group):
                    assert end.tokens == 1 + 3 * TURN + 2 * 2
                    assert score["reward"].total == 1.5 and not score["reward"].dropped
                    assert score["reward"].counts["environment/calls"] == 3
                    assert score["reward"].metrics["environment/turns"] == 3
                    assert score["reward"].metrics["environment/environment_ms"] == pytest.approx(200)
                    # A decoding step of 0.01 s for each token, and no wait: every engine has capacity.
                    assert score["reward"].metrics["environment/policy_ms"] == pytest.approx(150, abs=1)
            for episode in _episodes(rows):
                turn, answer = [DRAWN] * TURN, [ANSWERED] * 2
                assert episode.response.token_ids == [ANSWERED, *turn, *answer, *turn, *answer, *turn]
                given = [version == GIVEN for version in episode.response.versions]
                assert given == [token == ANSWERED for token in episode.response.token_ids]
                assert {
                    logprob for logprob, is_given in zip(episode.response.logprobs, given, strict=True) if is_given
                } == {0.0}
                assert episode.response.finish_reason == "stop"
                assert episode.request.engine == episode.engine >= 0
        await asyncio.sleep(100)
        in_flight = len(setup.stream.groups) * SAMPLES
        assert sum(rank.open for rank in setup.ranks) <= in_flight  # the others were closed

    run(play())


def test_a_turn_begins_behind_the_last_one_though_nothing_stands_between_them() -> None:
    def silent(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        return EpisodeAnswer(message.sample, [] if turns else [ANSWERED], done=turns == 3)

    async def play() -> None:
        setup = _Setup(silent)
        setup.stream.open(0)
        await setup.step()
        starts = {request.turn_start for engine in setup.engines for request in engine.requests}
        assert starts == {1, 1 + TURN, 1 + 2 * TURN}

    run(play())


def test_a_tree_of_an_agent_is_one_sample_that_holds_each_drawn_token_once() -> None:
    # Sequence, and the tokens before the turn: the second is another branch of the first, and the first goes on.
    script: list[tuple[int, list[int]]] = [(0, [7, 7]), (1, [7, 7, DRAWN, 8]), (0, [9])]

    def branching(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        if turns == len(script):
            return EpisodeAnswer(message.sample, reward=2.0, done=True, truncated=True)
        sequence, tokens = script[turns]
        return EpisodeAnswer(message.sample, tokens, sequence=sequence, limit=turns + 1)

    async def play() -> None:
        setup = _Setup(branching, max_turns=1)  # the host counts turns
        setup.stream.open(0)
        rows = await setup.step()
        first, again = [DRAWN], [DRAWN] * 3
        for episode in _episodes(rows):
            response = episode.response
            assert episode.prompt == [7, 7]
            assert response.token_ids == [*first, 9, *again, 7, 7, DRAWN, 8, *[DRAWN] * 2]
            assert response.versions == [0, GIVEN, 0, 0, 0, BEGINS, GIVEN, GIVEN, GIVEN, 0, 0]
            assert [logprob == 0.0 for logprob in response.logprobs] == [version < 0 for version in response.versions]
            assert (episode.drawn, response.finish_reason, episode.score.total) == (6, "length", 2.0)
            assert episode.score.counts["environment/environment_tokens"] == 5
        requests: dict[int, list[Request]] = {
            request.sample: [] for engine in setup.engines for request in engine.requests
        }
        for engine in setup.engines:
            for request in engine.requests:
                requests[request.sample].append(request)
        for one, two, three in (row for row in requests.values() if len(row) == 3):
            assert [list(request.prompt) for request in (one, two, three)] == [[7, 7], [7, 7, DRAWN, 8], [7, 7]]
            assert (one.prefix, two.prefix) == (None, None)
            assert three.prefix is not None and three.prefix.token_ids == [*first, 9]
            assert [request.tokens for request in (one, two, three)] == [2, 4, 4]
            assert [request.sampling.max_new_tokens for request in (one, two, three)] == [1, 2, 2 + 3]

    run(play())


def test_a_turn_is_credited_with_its_reward_and_those_of_later_turns() -> None:
    def paid(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        answer = _three_turns(message, turns)
        return EpisodeAnswer(message.sample, answer.tokens, reward=float(turns), done=turns == 3)

    async def play(discount: float | None, returns: list[float]) -> None:
        setup = _Setup(paid, turn_discount=discount)
        setup.stream.open(0)
        for episode in _episodes(await setup.step()):
            assert episode.score.total == 1 + 2 + 3
            if discount is None:
                assert episode.credit is None
                continue
            assert episode.credit is not None
            first, second, third = ([number] * TURN for number in (1, 2, 3))
            assert episode.credit.numbers == [0, *first, 0, 0, *second, 0, 0, *third]
            of_turns = [0.0, *returns]
            assert episode.credit.returns == [of_turns[number] for number in episode.credit.numbers]

    run(play(None, []))
    run(play(1.0, [6.0, 5.0, 3.0]))
    run(play(0.5, [1 + 0.5 * 3.5, 2 + 0.5 * 3, 3.0]))


def test_turns_of_a_tree_are_credited_in_the_order_of_time() -> None:
    script: list[tuple[int, list[int]]] = [(0, [7, 7]), (1, [7, 7, DRAWN, 8]), (0, [9])]

    def branching(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        if turns == len(script):
            return EpisodeAnswer(message.sample, reward=4.0, done=True)
        sequence, tokens = script[turns]
        return EpisodeAnswer(message.sample, tokens, sequence=sequence, limit=turns + 1, reward=float(turns))

    async def play() -> None:
        setup = _Setup(branching, max_turns=1, turn_discount=1.0)
        setup.stream.open(0)
        for episode in _episodes(await setup.step()):
            assert episode.credit is not None
            # Its first sequence has the first and the third turn, and its second one the second, behind its context.
            assert episode.credit.numbers == [1, 0, 3, 3, 3, 0, 0, 0, 0, 2, 2]
            assert episode.credit.returns == [7, 0, 4, 4, 4, 0, 0, 0, 0, 6, 6]

    run(play())


@pytest.mark.parametrize(
    ("plan", "tokens"),
    [
        ({"max_turns": 2}, 1 + 2 * TURN + 2),
        ({"max_turns": 99, "max_turn_tokens": 3}, 1 + 8 * 3 + 7 * 2),  # of 40, two more answers would leave no token
    ],
)
def test_limits_end_an_episode_with_the_rewards_that_it_has(plan: dict[str, int], tokens: int) -> None:
    def endless(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        return EpisodeAnswer(message.sample, [ANSWERED] * (2 if turns else 1), reward=1.0)

    async def play() -> None:
        setup = _Setup(endless, **plan)
        setup.stream.open(0)
        rows = await setup.step()
        for group in rows.groups:
            for end, score in _scored(group):
                assert end.tokens == tokens
                assert score["reward"].total == score["reward"].metrics["environment/turns"]
        assert {episode.response.finish_reason for episode in _episodes(rows)} == {"length"}

    run(play())


def test_a_failed_environment_drops_its_sample_and_keeps_its_group() -> None:
    def failing(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        if message.sample % 4 == 1 and isinstance(message, EpisodeTurn):
            return EpisodeAnswer(message.sample, failure="timeout", reason="gave no answer within 1 s")
        if message.sample % 4 == 3:
            return EpisodeAnswer(message.sample, failure="raised", reason="raised ValueError")
        return _three_turns(message, turns)

    async def play() -> None:
        setup = _Setup(failing, staleness=0)
        setup.stream.open(0)
        for step in range(3):
            rows = await setup.step()
            assert not rows.taken.evicted and set(rows.taken.staleness) == {0}
            scores = [score["reward"] for group in rows.groups for _, score in _scored(group)]
            assert [score.dropped for score in scores] == [False, True] * GROUPS
            assert all(math.isnan(score.total) for score in scores if score.dropped)
            by_sample = {end.sample: (end, score) for group in rows.groups for end, score in _scored(group)}
            for sample, (end, score) in by_sample.items():
                if sample % 4 == 1:
                    assert score["reward"].counts["environment/failed_timeout"] == 1
                    assert end.tokens == 1 + TURN
                if sample % 4 == 3:
                    assert score["reward"].failures == {"environment": "raised ValueError"}
                    assert end.tokens == 0 and end.oldest == step
            aborted = [episode for episode in _episodes(rows) if episode.response.finish_reason == "abort"]
            assert len(aborted) == GROUPS

    run(play())


def _others(count: int) -> list[tuple[Request, Task]]:
    """First turns of episodes of other prompts, for two engines."""
    return [
        (
            Request(900 + row, [8, 9], SamplingConfig(max_new_tokens=40), row, engine=row % 2),
            Task("held out", seed=row),
        )
        for row in range(count)
    ]


@pytest.mark.parametrize("is_lost", [False, True])
def test_episodes_of_other_prompts_are_played_beside_those_of_groups(is_lost: bool) -> None:
    async def play() -> None:
        setup = _Setup(_three_turns, restarts=1)
        setup.stream.open(0)
        await setup.step()
        playing = asyncio.create_task(setup.stream.play(_others(6)))
        await asyncio.sleep(0.12)  # in the second turn
        setup.engines[0].lost = is_lost
        rows = await playing
        episodes: list[EndedEpisode] = [row.packed for row in rows.rows]
        assert [episode.request.sample for episode in episodes] == [*range(900, 906)]
        assert [score.total for score in rows.scores] == [1.5] * 6
        for number, episode in enumerate(episodes):
            assert episode.prompt == [8, 9] and episode.drawn == 3 * TURN
            assert episode.engine == (1 if is_lost else number % 2)
        assert not setup.stream._others
        sent = [request for engine in setup.engines for request in engine.requests if request.sample >= 900]
        assert all(request.prompt == [8, 9] for request in sent)
        await setup.step()

    run(play())


def test_failed_episodes_of_other_prompts_have_their_prompt_and_no_reward() -> None:
    def failing(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        if message.sample >= 900:
            return EpisodeAnswer(message.sample, failure="raised", reason="raised ValueError")
        return _three_turns(message, turns)

    async def play() -> None:
        setup = _Setup(failing)
        setup.stream.open(0)
        rows = await setup.stream.play(_others(2))
        assert [score.failures for score in rows.scores] == [{"environment": "raised ValueError"}] * 2
        assert [row.packed.prompt for row in rows.rows] == [[8, 9]] * 2

    run(play())


def test_episodes_of_other_prompts_end_with_an_abandoned_step() -> None:
    async def play() -> None:
        setup = _Setup(_three_turns)
        setup.stream.open(0)
        playing = asyncio.create_task(setup.stream.play(_others(4)))
        await asyncio.sleep(0.07)  # some wait for their environment
        await setup.stream.abandon(set())
        with pytest.raises(EngineError, match="4 of 4 responses were aborted: the step was abandoned"):
            await playing
        await asyncio.sleep(1)
        assert not sum(rank.open for rank in setup.ranks)

    run(play())


def test_an_episode_continues_at_another_engine_when_its_own_is_lost() -> None:
    async def play() -> None:
        setup = _Setup(_three_turns, restarts=1)
        setup.stream.open(0)
        await asyncio.sleep(0.12)  # in the second turn
        setup.engines[0].lost = True
        rows = await setup.step()
        assert list(setup.stream.take_lost()) == [0]
        assert {episode.engine for episode in _episodes(rows)} == {1}
        assert {len(episode.response.token_ids) for episode in _episodes(rows)} == {1 + 3 * TURN + 2 * 2}

    run(play())


def test_a_restart_keeps_what_has_ended_and_begins_the_others_again() -> None:
    def uneven(message: EpisodeMessage, turns: int) -> EpisodeAnswer:
        answer = _three_turns(message, turns)
        return EpisodeAnswer(message.sample, done=True, reward=9.0) if message.sample % 2 and turns == 1 else answer

    async def play() -> None:
        setup = _Setup(uneven)
        setup.stream.open(0)
        await asyncio.sleep(0.24)  # every other sample has ended
        state = await setup.stream.state()
        await asyncio.gather(*setup.stream.close(), return_exceptions=True)
        assert [len(group.ended) for group in state.groups] == [1] * len(state.groups)
        assert not state.prefixes
        again = setup.stream = setup.another()
        again.restore(state)
        again.open(0)
        rows = await setup.step()
        for group in rows.groups:
            assert [score["reward"].total for _, score in _scored(group)] == [1.5, 9.0]

    run(play())


def test_turns_return_to_the_engine_that_has_their_prefix() -> None:
    async def play() -> None:
        setup = _Setup(_three_turns)
        sent: dict[int, set[int]] = {}
        for number, engine in enumerate(setup.engines):
            submit = engine.submit

            async def noted(requests: Any, *, together: bool, number: int = number, submit: Any = submit) -> None:
                for request in requests:
                    sent.setdefault(request.sample, set()).add(number)
                await submit(requests, together=together)

            engine.submit = noted
        setup.stream.open(0)
        rows = await setup.step()
        for group in rows.groups:
            assert all(len(sent[end.sample]) == 1 for end in group.ended)

    run(play())

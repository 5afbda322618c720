"""Episodes of a stream: where their turns go, and what becomes of their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from engine3d.rollout.requests import Request, Response
from hybridflow.batch.stored_rows import SampleEnd
from hybridflow.environments.environment import Task
from hybridflow.rollout.episodes.episodes import EndedEpisode, Episodes, EpisodeSetup
from hybridflow.rollout.other_requests import OtherRequests, OtherRows
from hybridflow.rollout.stream.engines import StreamTasks


class EpisodesOfGroups(Protocol):
    """A stream as its episodes see it."""

    def submit_turn(self, request: Request, continues: bool) -> None:
        """Request a turn of a group's episode. `continues`: it has had one before."""

    def add_episode(self, end: SampleEnd, episode: EndedEpisode) -> None:
        """Add a group's episode that is over."""

    def feed(self) -> None:
        """Send requests to engines that have capacity."""

    @property
    def newest_version(self) -> int:
        """Version of the newest weights that an engine serves."""


class StreamEpisodes:
    """Episodes of groups, and those of other prompts. Nothing happens in a stream without any.

    Args:
        setup: of them; None in a stream whose samples are of one turn.
        clock: in seconds.
        tasks: of the stream.
        others: requests of other prompts.
        groups: the stream.
    """

    def __init__(
        self,
        setup: EpisodeSetup | None,
        clock: Callable[[], float],
        tasks: StreamTasks,
        others: OtherRequests,
        groups: EpisodesOfGroups,
    ) -> None:
        self._tasks, self._others, self._groups = tasks, others, groups
        self._store = setup.store if setup is not None else None
        self._episodes: Episodes | None = None
        if setup is not None:
            self._episodes = Episodes(setup, clock, tasks.spawn, self._submit, self._ended)

    def __bool__(self) -> bool:
        return self._episodes is not None

    def __len__(self) -> int:
        return len(self._episodes) if self._episodes is not None else 0

    @property
    def begin(self) -> Callable[[Request], None] | None:
        """Begins an episode of a group; None in a stream without any."""
        return self._episodes.begin if self._episodes is not None else None

    def open(self) -> None:
        """Begin to collect answers of environments."""
        if self._episodes is not None:
            self._episodes.open(self._answered)

    def sent(self, sample: int) -> None:
        """Record that a request was sent to an engine."""
        if self._episodes is not None:
            self._episodes.sent(sample)

    def turn_ended(self, sample: int, engine: int, response: Response) -> int:
        """Send a turn to its environment, as `Episodes.turn_ended` does."""
        assert self._episodes is not None
        return self._episodes.turn_ended(sample, engine, response)

    def forget(self, samples: Iterable[int]) -> None:
        """Give up episodes."""
        if self._episodes is not None:
            self._episodes.forget(samples)

    async def play(self, begun: Sequence[tuple[Request, Task]]) -> OtherRows:
        """Play episodes of other prompts, as `OtherRequests.play` does."""
        assert self._episodes is not None
        return await self._others.play(self._episodes, begun)

    async def _answered(self) -> None:
        """Send the turns that follow answers of environments."""
        self._others.submit_turns()
        self._groups.feed()
        await self._tasks.wake()

    def _submit(self, request: Request, continues: bool) -> None:
        if request.sample in self._others:
            self._others.add_turn(request)
        else:
            self._groups.submit_turn(request, continues)

    def _ended(self, episodes: Sequence[EndedEpisode]) -> None:
        """Store episodes that are over as samples."""
        assert self._store is not None
        version = self._groups.newest_version
        for episode, row in zip(episodes, self._store(episodes, version), strict=True):
            if episode.request.sample in self._others:
                self._others.episode_ended(episode, row)
            else:
                self._groups.add_episode(episode.end(version, row), episode)

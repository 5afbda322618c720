"""Turns of many episodes at a time, with real environment processes that wait, and an engine that only counts tokens.

    python benchmarks/episodes.py --output episodes.json      2,000 episodes at a time, 50 ms of waiting for each answer

The controller, the tokens of episodes, the host of environments and its processes are the real ones, in real time. The
named alternative is the least time that it could take: the waits of the environments and the engine's turns alone.
Prints a table, and writes one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.stand_in_episodes import TurnEngine
from engine3d.rollout.config import SamplingConfig
from hybridflow.batch.stored_rows import StoredRow
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeAnswer, EpisodeMessage
from hybridflow.environments.episode_host import EpisodeHost
from hybridflow.environments.observation_tokens import ObservationTokens
from hybridflow.rollout.episodes.episodes import EndedEpisode, EpisodePlan, EpisodeSetup
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream

_SAMPLES = 8
_ENVIRONMENT = f"{Path(__file__).with_name('waiting_environment.py')}:Waiting"
_TURN_TOKENS, _TOKEN_S = 16, 0.002


class _LocalRank:
    """Environments of this process's host."""

    def __init__(self, host: EpisodeHost) -> None:
        self._host = host

    async def send(self, messages: Sequence[EpisodeMessage]) -> None:
        self._host.send(messages)

    async def answers(self) -> Sequence[EpisodeAnswer]:
        return await asyncio.to_thread(self._host.take_answers, 0.2)


@dataclass(frozen=True)
class Played:
    """Result of some episodes.

    Args:
        episodes: at a time.
        turns: of all.
        seconds: that all took.
        least_s: the same without any time of this project.
        cpu_s: processor time of the controller and the host of environments.
        environment_cpu_s: processor time of the environments' processes.
        dropped: episodes whose environment failed.
    """

    episodes: int
    turns: int
    seconds: float
    least_s: float
    cpu_s: float
    environment_cpu_s: float
    dropped: int

    @property
    def ratio(self) -> float:
        """Time compared with the least."""
        return self.seconds / self.least_s


async def play(episodes: int, turns: int, wait_s: float, workers: int, directory: Path) -> Played:
    """Play episodes, all at the same time. Made with a whole number of groups."""
    config = EnvironmentConfig(
        path=_ENVIRONMENT, arguments={"seconds": wait_s, "turns": turns}, workers=workers, max_turns=turns
    )
    host = EpisodeHost(config, ObservationTokens(make_character_tokenizer("0123456789", directory)))
    host.start()
    numbers = itertools.count()

    def draw(count: int) -> Iterator[tuple[int, int]]:
        return ((number, 0) for number in itertools.islice(numbers, count))

    def store(ended: Sequence[EndedEpisode], version: int) -> Sequence[StoredRow]:
        return [StoredRow(None, 0) for _ in ended]

    limits = StreamLimits(episodes // _SAMPLES, 0)
    plan = StreamPlan(
        limits, _SAMPLES, episodes, 1, sampling=SamplingConfig(max_new_tokens=10_000), episodes=EpisodePlan(turns)
    )
    setup = EpisodeSetup(EpisodePlan(turns), [_LocalRank(host)], lambda *_: Task("0"), store)
    engine = TurnEngine(episodes, lambda _: _TOKEN_S, lambda _: _TURN_TOKENS)
    clock = asyncio.get_running_loop().time
    stream = RolloutStream(plan, [engine], draw, lambda _: range(8), clock, episodes=setup)
    stream.ledger.draws_left = limits.groups_per_step
    began, cpu = time.perf_counter(), time.process_time()
    stream.open(0)
    rows = await stream.take(0)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    await asyncio.gather(*stream.close(), return_exceptions=True)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    host.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    scores = [score["reward"] for group in rows.groups for score in group.scores.values()]
    return Played(
        len(scores),
        sum(int(score.metrics["environment/turns"]) for score in scores),
        seconds,
        turns * (wait_s + _TURN_TOKENS * _TOKEN_S),
        cpu_s,
        after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime,
        sum(score.dropped for score in scores),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000, help="at a time")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--wait-ms", type=float, default=50.0, help="of each answer")
    parser.add_argument("--workers", type=int, default=2, help="processes of environments")
    parser.add_argument("--output", type=Path, help="file for the JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="episodes-") as directory:
        played = asyncio.run(
            play(options.episodes, options.turns, options.wait_ms / 1000, options.workers, Path(directory))
        )
    print(f"{played.episodes:,} episodes, {played.turns:,} turns in {played.seconds:.2f} s, {played.dropped} dropped")
    print(f"{played.turns / played.seconds:,.0f} turns/s; {played.ratio:.2f} times the waits and the engine alone")
    print(f"processor: {1e6 * played.cpu_s / played.turns:.0f} us a turn in the controller and host, ", end="")
    print(f"{1e6 * played.environment_cpu_s / played.turns:.0f} us in environments")
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()}
    result = json.dumps(asdict(played) | {"ratio": played.ratio, "machine": machine})
    if options.output is not None:
        options.output.write_text(result + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

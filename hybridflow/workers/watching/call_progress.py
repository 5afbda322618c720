"""Progress of a call that takes long: pure functions of what is seen of its ranks, and of the logs of engines.

A rank that waits in a collective operation stands still as well as the one that it waits for, so that silence alone
names nobody. `standstill` names the rank that keeps the others waiting, in this order: a process that is stopped; one
that sends no heartbeat any more; the one that has done the fewest parts of its work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridflow.cluster.processes.process_tree import family
from hybridflow.cluster.processes.rank_look import RankLook, RankPlace, used_by
from hybridflow.rundir.status.watching import ENGINES, JUDGE_SERVERS, TEACHER_ENGINES, last_lines

_UNUSUAL = 2.0
"""Times the longest pause of earlier calls: a longer one is no progress."""
_STANDSTILL = 3.0
"""Times the longest pause of earlier calls: a call that takes longer is more than a slow one."""
_BUSY = 0.03
"""Share of one core for each rank: one that imports libraries, loads weights or compiles uses more, also where many
programs share the cores. An idle one with its heartbeat uses less."""
_OF_RAY = 4
"""Ranks whose idle use is that of Ray's own processes."""
_READING = 1e6
"""Bytes a second of a process that reads weights from a slow disk."""
_LINES = 40
_ENGINE_LOGS = {"rollout": ENGINES, "teacher": TEACHER_ENGINES, "judge": JUDGE_SERVERS}
_STAGES = (
    (re.compile(r"Loading safetensors checkpoint shards:\s+(\d+)%"), "loading weights, {} %"),
    (re.compile(r"Capture .*graphs? begin"), "capturing CUDA graphs"),
    (re.compile(r"KV Cache is allocated|Memory pool end"), "KV cache allocated"),
    (re.compile(r"Load weight end"), "weights loaded"),
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"Init torch distributed begin"), "connecting its ranks"),
)


@dataclass(frozen=True, slots=True)
class ProgressLimits:
    """Limits of the time without progress of a call, in seconds.

    Args:
        progress_s: ordinarily.
        compile_s: in the first call of a method.
    """

    progress_s: float
    compile_s: float


@dataclass(frozen=True, slots=True)
class Standstill:
    """The rank that keeps the others waiting.

    Args:
        location: of the rank.
        method: that it runs; "" for none.
        reason: one line without the rank.
        since: in seconds since the epoch.
    """

    location: RankPlace
    method: str
    reason: str
    since: float


@dataclass(frozen=True)
class Usage:
    """CPU time in seconds, and bytes read, of the processes of some ranks since they were started, at `time_s`."""

    time_s: float
    cpu_s: float
    read_bytes: int
    ranks: int

    @classmethod
    def of(cls, looks: Sequence[RankLook], time_s: float) -> Usage:
        """Return the sum over ranks."""
        cpu_s, read_bytes = sum(look.cpu_s for look in looks), sum(look.read_bytes for look in looks)
        return cls(time_s, cpu_s, read_bytes, len(looks))

    @classmethod
    def of_descendants(cls, time_s: float) -> Usage:
        """Sum over all descendants of this process, Ray on this machine included, while ranks have no processes yet."""
        this = psutil.Process()
        cpu_s, read_bytes = used_by(process for process in family([this]) if process.pid != this.pid)
        return cls(time_s, cpu_s, read_bytes, _OF_RAY)

    def is_busy_since(self, before: Usage) -> bool:
        """True if the processes computed or read between two looks."""
        span_s = self.time_s - before.time_s
        computes = self.cpu_s - before.cpu_s > _BUSY * span_s * max(1, self.ranks)
        return computes or self.read_bytes - before.read_bytes > _READING * span_s


def moving(awaited: Sequence[RankLook], others: Sequence[RankLook], window_s: float) -> list[RankLook]:
    """Return the ranks at work for a call; none where one of them made no progress, cannot say, or is stopped.

    Args:
        awaited: the ranks that have not answered.
        others: all others of the run. They count where no awaited rank has its turn.
        window_s: within which each has to have done a part of its work.
    """
    if any(look.stopped for look in (*awaited, *others)):
        return []
    at_work = [look for look in awaited if _is_at_work(look)] or [look for look in others if _is_at_work(look)]
    return at_work if at_work and all(_moves(look, window_s) for look in at_work) else []


def is_first_part(awaited: Sequence[RankLook]) -> bool:
    """True if all ranks are in their first call of the method and have done no part: they may compile kernels."""
    beats = [look.beat for look in awaited if _is_at_work(look)]
    return bool(beats) and all(beat is not None and beat.usual_s is None and not beat.completed for beat in beats)


def amount_done(role: Sequence[RankLook], method: str, since: float) -> str:
    """Return the work that the ranks of a role have done in a call, such as "312 of 1,024 responses".

    Args:
        role: all ranks of it. Those that have answered are idle.
        method: of the call.
        since: begin of the call, in seconds since the epoch.
    """
    beats = [look.beat for look in role if look.beat is not None]
    beats = [beat for beat in beats if beat.method == method or (not beat.method and beat.since >= since)]
    if total := sum(beat.total for beat in beats):
        unit = next(beat.unit for beat in beats if beat.total)
        return f"{sum(beat.done for beat in beats):,} of {total:,} {unit}"
    most = max(beats, key=lambda beat: beat.completed, default=None)
    return f"{_amount(most.completed, most.unit or 'parts')} done" if most is not None else ""


def _amount(count: int, units: str) -> str:
    one = units.removesuffix("es" if units.endswith("ches") else "s")
    return f"{count:,} {one if count == 1 else units}"


def starting_stage(log_dir: Path | None, role: str, ranks: Sequence[int]) -> str:
    """Return the last stage in the log of the first engine that still starts; "starting" where none is named."""
    name = _ENGINE_LOGS.get(role)
    if log_dir is None or name is None or not ranks:
        return "starting"
    path = log_dir / f"{name}-{ranks[0]}.log"
    lines = last_lines(path, _LINES) if path.exists() else []
    for line in reversed(lines):
        text = line.rpartition(b"\r")[2].decode(errors="replace")
        for pattern, stage in _STAGES:
            if (match := pattern.search(text)) is not None:
                return f"engine {ranks[0]}: {stage.format(*match.groups())}"
    return f"engine {ranks[0]}: starting"


def standstill(
    awaited: Sequence[RankLook],
    others: Sequence[RankLook],
    silence_s: float,
    limits: ProgressLimits,
    stopped_before: Collection[tuple[str, int]] = (),
) -> Standstill | None:
    """Return the rank that keeps a call waiting; None while an awaited rank makes progress, or may.

    Args:
        awaited: the ranks that have not answered.
        others: all others of the run.
        silence_s: seconds since a rank answered.
        limits: of a standstill.
        stopped_before: address and id of the processes that were stopped at the last look already.
    """
    if silence_s < limits.progress_s:
        return None

    def stopped(look: RankLook) -> list[int]:
        return [pid for pid in look.stopped if (look.location.address, pid) in stopped_before]

    for look in awaited:
        if pids := stopped(look):
            return _stopped(look, pids, silence_s)
    # Where none of them has begun, they wait for inputs from others, or for their turn.
    at_work = [look for look in awaited if _is_at_work(look)] or [look for look in others if _is_at_work(look)]
    if not all(stopped(look) or _stands_still(look, limits) for look in at_work):
        return None
    for look in others:  # some may be members of a collective operation of the awaited ranks
        if pids := stopped(look):
            return _stopped(look, pids, silence_s)
    if not at_work:
        return None
    silent = [look for look in at_work if look.beat_age_s >= _limit_s(look, limits)]
    if silent:
        look = max(silent, key=lambda look: look.beat_age_s)
        if look.location.pid in look.stopped:  # at the first look after a long pause of this process
            return _stopped(look, [look.location.pid], silence_s)
        return _standing(look, "no heartbeat", look.beat_age_s)
    behind = min(at_work, key=lambda look: (_parts_done(look), -look.pause_s))
    done, most = _parts_done(behind), max(map(_parts_done, at_work))
    others_did = f", by another rank: {most}" if most > done else ""
    return _standing(behind, "no progress", behind.pause_s, f"; parts done: {done}{others_did}")


def _is_at_work(look: RankLook) -> bool:
    return look.is_there and look.beat is not None and look.beat.is_at_work


def _moves(look: RankLook, window_s: float) -> bool:
    beat = look.beat
    if beat is None or not beat.counts or not beat.completed:
        return False
    return max(look.beat_age_s, look.pause_s) < max(window_s, _UNUSUAL * (beat.usual_s or 0.0))


def _limit_s(look: RankLook, limits: ProgressLimits) -> float:
    usual_s = look.beat.usual_s if look.beat is not None else None
    if usual_s is None:
        return max(limits.progress_s, limits.compile_s)
    return max(limits.progress_s, _STANDSTILL * usual_s)


def _stands_still(look: RankLook, limits: ProgressLimits) -> bool:
    """True if it reports nothing, or has parts to do and does none."""
    if look.beat is None:
        return False
    idle_s = max(look.beat_age_s, look.pause_s if look.beat.counts else 0.0)
    return idle_s >= _limit_s(look, limits)


def _stopped(look: RankLook, pids: Sequence[int], silence_s: float) -> Standstill:
    which = f"process {pids[0]} is" if len(pids) == 1 else f"processes {', '.join(map(str, pids))} are"
    # Its last heartbeat tells when; a process that it has started has none.
    for_s = look.beat_age_s if look.location.pid in pids and look.beat is not None else silence_s
    return _standing(look, f"{which} stopped", for_s, ", as by SIGSTOP")


def _standing(look: RankLook, what: str, for_s: float, more: str = "") -> Standstill:
    since = time.time() - for_s
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    method = look.beat.method if look.beat is not None else ""
    return Standstill(look.location, method, f"{what} since {clock} ({for_s:.0f} s, limits.progress_s){more}", since)


def _parts_done(look: RankLook) -> int:
    return look.beat.completed if look.beat is not None else 0

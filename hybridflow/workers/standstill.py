"""Which rank keeps the others waiting, where a call comes no further: a pure function of what is seen of all ranks.

A rank that waits in a collective operation stands still as well as the one that it waits for, so that silence alone
names nobody. In this order: a process that is stopped; one that says nothing any more; the one that has done the fewest
parts of its work.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hybridflow.cluster.processes.rank_look import RankLook, RankPlace

_UNUSUAL = 3.0
"""Times the longest pause of earlier calls: what takes longer is more than a slow one."""


@dataclass(frozen=True, slots=True)
class ProgressLimits:
    """How long a call may come no further, in seconds.

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
        place: of the rank.
        method: that it runs; "" for none.
        reason: one line without the rank.
        since: in seconds since the epoch.
    """

    place: RankPlace
    method: str
    reason: str
    since: float


def standstill(
    awaited: Sequence[RankLook],
    others: Sequence[RankLook],
    silence_s: float,
    limits: ProgressLimits,
    stopped_before: Collection[tuple[str, int]] = (),
) -> Standstill | None:
    """The rank that keeps a call waiting; None while somebody who is waited for makes progress, or may.

    Args:
        awaited: the ranks that have not answered.
        others: all others of the run.
        silence_s: how long no rank has answered, in seconds.
        limits: of what is a standstill.
        stopped_before: address and id of the processes that were stopped at the last look already.
    """
    if silence_s < limits.progress_s:
        return None

    def stopped(look: RankLook) -> list[int]:
        return [pid for pid in look.stopped if (look.place.address, pid) in stopped_before]

    for look in awaited:
        if pids := stopped(look):
            return _stopped(look, pids, silence_s)
    # Where none of them has begun, they wait for what others make, or for their turn.
    at_work = [look for look in awaited if _is_at_work(look)] or [look for look in others if _is_at_work(look)]
    if not all(stopped(look) or _stands_still(look, limits) for look in at_work):
        return None
    for look in others:  # of which some may be members of a collective operation that the awaited are in
        if pids := stopped(look):
            return _stopped(look, pids, silence_s)
    if not at_work:
        return None
    silent = [look for look in at_work if look.beat_age_s >= _limit_s(look, limits)]
    if silent:
        look = max(silent, key=lambda each: each.beat_age_s)
        return _found(look, "no heartbeat", look.beat_age_s)
    behind = min(at_work, key=lambda each: (_parts(each), -each.pause_s))
    own, most = _parts(behind), max(map(_parts, at_work))
    others_did = f", by another rank: {most}" if most > own else ""
    return _found(behind, "no progress", behind.pause_s, f"; parts done: {own}{others_did}")


def _is_at_work(look: RankLook) -> bool:
    return look.is_there and look.beat is not None and look.beat.is_at_work


def _limit_s(look: RankLook, limits: ProgressLimits) -> float:
    usual_s = look.beat.usual_s if look.beat is not None else None
    if usual_s is None:
        return max(limits.progress_s, limits.compile_s)
    return max(limits.progress_s, _UNUSUAL * usual_s)


def _stands_still(look: RankLook, limits: ProgressLimits) -> bool:
    """Whether it says nothing, or has parts to do and does none."""
    if look.beat is None:
        return False
    idle_s = max(look.beat_age_s, look.pause_s if look.beat.counts else 0.0)
    return idle_s >= _limit_s(look, limits)


def _stopped(look: RankLook, pids: Sequence[int], silence_s: float) -> Standstill:
    which = f"process {pids[0]} is" if len(pids) == 1 else f"processes {', '.join(map(str, pids))} are"
    # Its last heartbeat tells when; a process that it has started has none.
    for_s = look.beat_age_s if look.place.pid in pids and look.beat is not None else silence_s
    return _found(look, f"{which} stopped", for_s, ", as by SIGSTOP")


def _found(look: RankLook, what: str, for_s: float, more: str = "") -> Standstill:
    since = time.time() - for_s
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    method = look.beat.method if look.beat is not None else ""
    return Standstill(look.place, method, f"{what} since {clock} ({for_s:.0f} s, limits.progress_s){more}", since)


def _parts(look: RankLook) -> int:
    return look.beat.parts if look.beat is not None else 0

"""The driver's part in having the logs of all hosts on its own, where they share no disk."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.checks.facts import mark_directory
from hybridflow.cluster.hosts.driver_link import known_link

_BEGIN_S = 30.0
_ALL_S = 15.0
_MARK_S = 10.0


def keep_logs(run: Path, processes: Mapping[int, Collection[str]], *, in_place: bool) -> None:
    """Have what processes on other hosts write into the run's directory there in that of this host too, from now on.

    Before they are started. Nothing is done where all hosts see the directory, or there is no launch.

    Args:
        run: the directory.
        processes: names of logs such as `actor-1`, by the host's number.
        in_place: whether an earlier start of the run goes on.

    Raises:
        EngineError: a host cannot write there.
    """
    link = known_link()
    if link is None or not link.apart:
        return
    names = {str(index): sorted(processes.get(index, ())) for index in sorted(link.apart)}
    link.ask("keep_logs", _BEGIN_S, path=str(run), in_place=in_place, processes=names)


def gather_logs() -> None:
    """Have on this host all that ranks on others have written so far; where a host does not answer, without it."""
    _ask("send_logs", _ALL_S)


def request_recordings() -> None:
    """Have ranks on other hosts write what torch's flight recorder has, where they do not see this host's request."""
    _ask("request_recordings", _MARK_S)


def hosts_apart(directory: Path, setting: str) -> list[int]:
    """The hosts of this process's launch that see another directory at a path than this host.

    Args:
        directory: or its nearest parent that is there.
        setting: that names it.

    Raises:
        UserError: nothing can be written there.
        EngineError: a host does not answer.
    """
    link = known_link()
    if link is None or len(link.cluster.hosts) == 1:
        return []
    with mark_directory(directory, setting) as mark:
        answers = link.ask("sees_mark", _MARK_S, mark=str(mark))
    return [index for index, answer in enumerate(answers, start=1) if not answer["sees"]]


def _ask(kind: str, limit_s: float) -> None:
    link = known_link()
    if link is not None and link.apart:
        with contextlib.suppress(EngineError):
            link.ask_each(kind, limit_s)

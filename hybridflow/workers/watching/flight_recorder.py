"""torch's flight recorder: the last collective operations of each rank, written when a run fails.

The driver asks for them by making a directory, which every rank's heartbeat looks for: Python serves no signal while a
rank hangs in a collective operation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hybridflow.cluster.ray import rank_logs
from hybridflow.rundir.file_names import FLIGHT_RECORDER
from hybridflow.rundir.status.heartbeat import BEAT_S

_KINDS = ("nccl", "gloo")
_SETTLES_S = 0.5
_LIMIT_S = 3.0


class FlightRecorder:
    """Flight recorder of this process's collectives.

    Args:
        role, rank: whose process this is.
        log_path: of its log, in the run's directory.
    """

    def __init__(self, role: str, rank: int, log_path: Path) -> None:
        self._name, self._directory = f"{role}_{rank}", _directory(log_path.parent)
        self._requested = self._requested_at()  # by an earlier start of the run
        # Where torch writes it by itself at the timeout of an operation; otherwise among the user's or temporary files.
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(log_path.absolute().parent / f"nccl-timeout-{role}_"))

    def is_requested(self) -> bool:
        """True if the driver requested a recording since this process began, or `forget_request`: the run fails."""
        return self._requested_at() not in (None, self._requested)

    def forget_request(self) -> None:
        """Take no request until now for a new one."""
        self._requested = self._requested_at()

    def write(self) -> None:
        """Write the recordings. Raises OSError."""
        for kind, read in _recordings():
            target = self._directory / kind / self._name
            target.parent.mkdir(exist_ok=True)
            scratch = target.with_name(f".{target.name}.new")
            scratch.write_bytes(read())
            scratch.replace(target)

    def _requested_at(self) -> float | None:
        try:
            return self._directory.stat().st_mtime
        except OSError:
            return None


def request_recordings(log_dir: Path) -> Path | None:
    """Request recordings from the ranks that log into a directory. Return their directory; None if impossible."""
    with contextlib.suppress(OSError):
        rank_logs.request_recordings(log_dir.absolute().parent)
        return _directory(log_dir)
    return None


def wait_for_recordings(directory: Path, ranks: int) -> None:
    """Wait until all ranks have written, or nobody has anything more to write; remove the directory if nobody had.

    Args:
        directory: the requested one.
        ranks: number of ranks that might write.
    """
    deadline, seen, since = time.monotonic() + _LIMIT_S, 0, time.monotonic()
    while time.monotonic() < deadline:
        count = max((len(list((directory / kind).glob("[!.]*"))) for kind in _KINDS), default=0)
        if count > seen:
            seen, since = count, time.monotonic()
        if seen >= ranks or (time.monotonic() - since > BEAT_S + _SETTLES_S):
            break
        time.sleep(0.1)
    with contextlib.suppress(OSError):
        directory.rmdir()  # fails while something is in it


def _directory(log_dir: Path) -> Path:
    return log_dir.absolute().parent / FLIGHT_RECORDER


def _recordings() -> list[tuple[str, Callable[[], bytes]]]:
    """Return each kind of process group that this process has, with a function that reads its recording."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    kinds: list[tuple[str, Callable[[], bytes]]] = []
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        kinds.append(("nccl", c10d._dump_nccl_trace))  # type: ignore[attr-defined]
    kinds.append(("gloo", c10d._dump_fr_trace))  # type: ignore[attr-defined]
    return kinds

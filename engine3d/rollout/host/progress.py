"""Progress of an engine, seen from outside its scheduler: every batch that it has run brought a request further.

SGLang's scheduler sends tokens of a response that nobody streams fifty at a time, and of a prompt nothing: a counter in
a file of the engine's run directory tells a slow engine from one that stands still. Beside it is what the KV cache
holds.
"""

from __future__ import annotations

import os
import struct
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from engine3d.run_files import RUN_DIRECTORY_VARIABLE

PROGRESS_EVERY_S = 0.5
"""Seconds between two reports of progress of a host process to its client."""
_FORMAT = struct.Struct("<7q")
_NAME = "batches-"


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A scheduler after its last batch.

    Args:
        batches: that it has run so far.
        used_tokens: of its KV cache that requests hold; what they have in common counts once.
        queued: requests that wait for room.
        retracted: requests that gave their room back so far.
        batch_tokens: sum over all batches of the tokens that requests held after each.
        verified: chains of drafts that were verified so far.
        accepted: drafts of them that were accepted.
    """

    batches: int = 0
    used_tokens: int = 0
    queued: int = 0
    retracted: int = 0
    batch_tokens: int = 0
    verified: int = 0
    accepted: int = 0


class SchedulerReporter:
    """Tells other processes of a scheduler.

    Args:
        run_directory: of the engine.
        scheduler: SGLang's.
    """

    def __init__(self, run_directory: Path, scheduler: Any) -> None:
        number = int(scheduler.ps.attn_dp_rank)
        self._file = os.open(run_directory / f"{_NAME}{number}", os.O_WRONLY | os.O_CREAT, 0o600)
        self._scheduler = scheduler
        self._batches = self._batch_tokens = self._verified = self._accepted = 0

    def batch_done(self, accepted: list[int] | None = None) -> None:
        """Another batch was run. `accepted`: drafts of each of its requests; None of one without drafts."""
        if accepted is not None:
            self._verified += len(accepted)
            self._accepted += sum(accepted)
        self._batches += 1
        scheduler = self._scheduler
        used, _ = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        self._batch_tokens += int(used)
        queued = len(scheduler.waiting_queue)
        counts = self._batch_tokens, self._verified, self._accepted
        state = SchedulerState(self._batches, int(used), queued, _retracted, *counts)
        os.pwrite(self._file, _FORMAT.pack(*astuple(state)), 0)


_retracted = 0
"""Requests that the scheduler of this process took back, as its KV cache was full."""


def scheduler_state(run_directory: Path) -> SchedulerState:
    """The engine's schedulers after their last batches, added up. Before the first a file is not there, or empty."""
    written = [path.read_bytes() for path in run_directory.glob(f"{_NAME}*")]
    states = [_FORMAT.unpack(state) for state in written if state]
    return SchedulerState(*map(sum, zip(*states, strict=True))) if states else SchedulerState()


def start_counting(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang's `Scheduler.__init__`.

    The first rank of each host tells, and of each group with attention of its own: the others run the same batches.
    """
    arguments = scheduler.server_args
    alike = arguments.tp_size // arguments.nnodes // arguments.dp_size
    if scheduler.tp_worker.model_runner.ps.tp_rank % alike == 0:
        scheduler.engine3d_reporter = SchedulerReporter(Path(os.environ[RUN_DIRECTORY_VARIABLE]), scheduler)


def count_batch(result: None, scheduler: Any, batch: Any, output: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang's `Scheduler.process_batch_result`."""
    reporter: SchedulerReporter | None = getattr(scheduler, "engine3d_reporter", None)
    if reporter is not None:
        reporter.batch_done(getattr(output, "num_correct_drafts_per_req_cpu", None))


def count_retracted(result: tuple[list[Any], float, list[Any]], *args: Any, **kwargs: Any) -> None:
    """After SGLang's `ScheduleBatch.retract_decode`, with the requests that it took back."""
    global _retracted
    _retracted += len(result[0])

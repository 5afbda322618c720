"""How far an engine is, seen from outside its scheduler: every batch that it has run brought a request further.

SGLang's scheduler sends tokens of a response that nobody streams fifty at a time, and of a prompt nothing: a counter in
a file of the engine's run directory tells a slow engine from one that stands still.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine3d.run_files import RUN_DIRECTORY_VARIABLE

PROGRESS_EVERY_S = 0.5
"""How often a host process tells its client whether the engine comes further."""
_BYTES = 8


class BatchCounter:
    """Counts batches for other processes.

    Args:
        run_directory: of the engine.
    """

    def __init__(self, run_directory: Path) -> None:
        self._file = os.open(_path(run_directory), os.O_WRONLY | os.O_CREAT, 0o600)
        self._batches = 0

    def count(self) -> None:
        self._batches += 1
        os.pwrite(self._file, self._batches.to_bytes(_BYTES, "little"), 0)


def batches_run(run_directory: Path) -> int:
    """Batches that the engine's scheduler has run so far."""
    path = _path(run_directory)
    return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0


def start_counting(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang's `Scheduler.__init__`: the first rank of each host counts, since all run the same batches."""
    arguments = scheduler.server_args
    if scheduler.tp_worker.model_runner.ps.tp_rank % (arguments.tp_size // arguments.nnodes) == 0:
        scheduler.engine3d_batches = BatchCounter(Path(os.environ[RUN_DIRECTORY_VARIABLE]))


def count_batch(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang's `Scheduler.process_batch_result`."""
    counter: BatchCounter | None = getattr(scheduler, "engine3d_batches", None)
    if counter is not None:
        counter.count()


def _path(run_directory: Path) -> Path:
    return run_directory / "batches"

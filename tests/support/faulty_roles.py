"""Roles that fail on the way of weights from the actor to the engines: real ones, but for the fault."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.reshard.transport.sender import Sent, Transport, mapped
from engine3d.rollout.scheduler.rank import AdapterBase
from hybridflow.roles.model import CheckpointFailure
from hybridflow.roles.policy import PolicyWorker
from hybridflow.roles.rollout import RolloutWorker
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ONE_TO_ALL, register

_OVERWRITTEN = -123.25


class Overwritten(RolloutWorker):
    """An engine whose own memory is overwritten before it is verified."""

    @register(ONE_TO_ALL)
    def seal_weights(self, version: int, *, flush_cache: bool, base: AdapterBase | None = None) -> None:
        super().seal_weights(version, flush_cache=flush_cache, base=base)
        for rank in self._engine.share_weights():
            for buffer in mapped(rank):
                buffer.fill_(_OVERWRITTEN)


class DiesSending(PolicyWorker):
    """Rank 1 is killed before it has sent its part."""

    def __init__(self, context: WorkerContext, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self._note = _note_path(context)

    @register(ONE_TO_ALL)
    def send_weights(self, version: int, *, transfer: int = 0) -> dict[Transport, Sent]:
        if self._rank == 1:
            _note(self._note)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send_weights(version, transfer=transfer)


class DoesNotStart(PolicyWorker):
    """Rank 1 fails when it is to build its model."""

    def __init__(self, context: WorkerContext, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self._note = _note_path(context)

    @register(ONE_TO_ALL)
    def start(self) -> dict[str, str] | CheckpointFailure:
        if self._rank == 1:
            _note(self._note)
            raise UserError("no room for the optimizer")
        return super().start()


def _note_path(context: WorkerContext) -> Path:
    assert context.log_path is not None
    return context.log_path.parents[1] / "fault"


def _note(path: Path) -> None:
    """Write down when the fault was."""
    path.write_text(str(time.time()))

"""Lines that say what a run is starting, so that nobody wonders at a minute of silence."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hybridflow.cluster.devices.device_map import Device
from hybridflow.errors.log import log


class StartLog:
    """Prints lines, each with the seconds since this was made. Any thread may use it."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        """Print one line."""
        log.info(f"start {time.monotonic() - self._began:5.1f} s  {what}")

    def roles(self, devices: Mapping[str, Sequence[Device]]) -> None:
        """Say which roles start, and on how many devices."""
        self.say("starting " + ", ".join(f"{role} ({_amount(held)})" for role, held in devices.items()))

    def ready_with(self, role: str, starting: Future[Any]) -> None:
        """Say that a role is ready, once its start has ended well."""
        starting.add_done_callback(lambda done: None if _failed(done) else self.say(f"{role} is ready"))


def _failed(done: Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


def _amount(devices: Sequence[Device]) -> str:
    kind = "GPU" if devices[0].kind == "cuda" else "CPU slot"
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"

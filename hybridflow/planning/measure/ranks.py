"""Measurements on ranks: processes that exchange what they have by the collective library that models use."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from engine3d.environment import exchange_variables
from engine3d.errors import UserError
from engine3d.platform import platform
from hybridflow.planning.measure.rates import ROUNDS

_RESULTS = "seconds.pt"
_LIMIT_S = 240.0
_ROUNDS_TOGETHER = 4 * ROUNDS
"""Rounds of what all ranks call, of which the shortest counts: each that waits makes all wait."""


def on_ranks(measurement: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Call a function on ranks, each on a device of its own, and return what it returns on rank 0.

    Args:
        measurement: a function of a module, called in each with the arguments. Its result holds tensors and numbers.
        ranks: processes.
        arguments: of the function.

    Raises:
        UserError: a rank failed, or they did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Of the ranks' imports, unless the user has chosen them.
        before = exchange_variables({"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")})
        try:
            context = multiprocessing.spawn(_rank, (ranks, folder, measurement, arguments), ranks, join=False)
        finally:
            exchange_variables(before)
        ends = time.monotonic() + _LIMIT_S
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > ends:
                    raise UserError(f"profile: measurements of {ranks} ranks did not end within {_LIMIT_S:.0f} s")
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"profile: a rank of the measurement failed: {reason}") from error
        finally:
            for process in context.processes:
                process.kill()
        return torch.load(Path(folder) / _RESULTS)


def seconds_together(operation: Callable[[], object], times: int = 1) -> float:
    """Measure the seconds of an operation that all ranks call: the shortest of some rounds, each of so many times."""
    rounds = []
    for _ in range(_ROUNDS_TOGETHER):
        dist.barrier()
        platform.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            operation()
        platform.synchronize()
        rounds.append((time.perf_counter() - began) / times)
    return min(rounds[1:])


def _rank(rank: int, ranks: int, folder: str, measurement: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it warns of what a tiny model leaves to it
    dist.init_process_group(
        platform.collective_backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    result = measurement(*arguments)
    if rank == 0:
        torch.save(result, Path(folder) / _RESULTS)
    dist.barrier()
    dist.destroy_process_group()

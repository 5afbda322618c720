"""Run a function on several gloo processes, with a limit on how long it may take."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine3d import rendezvous
from tests.support.warm import Forked

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = dict(os.environ)
"""Environment of every rank, whatever a test sets later: ranks are forked from one server."""


class RankFailedError(AssertionError):
    """A rank raised, died or took too long. The message has its number and its traceback."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float, may_die: Collection[int] = ()
) -> list[Any]:
    """Call `function(*args)` on `world_size` processes that see torchrun's variables, and return what each returned.

    All processes are gone when this returns. The libraries are imported once, in a server that the processes fork from.
    The store where the ranks meet is this process's, as it is the agent's under torchrun: a rank that is done takes it
    from nobody.

    Args:
        function: of a module, with arguments and result that can be pickled.
        world_size: processes.
        args: of the function.
        timeout_s: for everything, in seconds.
        may_die: ranks that may be killed, and then return None.

    Raises:
        RankFailedError: with the traceback of the first rank that failed, or the ranks that were late.
    """
    store = rendezvous.serve(rendezvous.listen("127.0.0.1"))
    ranks: list[_Rank] = []
    try:
        with tempfile.TemporaryFile() as call:
            call.write(pickle.dumps((function, args)))
            call.flush()
            for rank in range(world_size):
                started = _Rank(call.fileno(), rank, world_size, store.port)
                ranks.append(started)
        return _collect(ranks, time.monotonic() + timeout_s, timeout_s, may_die)
    finally:
        for process in ranks:
            process.end()


def meet_others(device: str) -> dist.ProcessGroup:
    """The group of all ranks, on a process of `run_distributed`: of "cuda" each on a GPU of its own, or of "cpu"."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    group = dist.group.WORLD
    assert group is not None
    return group


class _Rank:
    """A process that has not ended, and the connection on which it sends its result."""

    def __init__(self, call: int, rank: int, size: int, port: int) -> None:
        self.rank = rank
        self.connection, sender = multiprocessing.Pipe(duplex=False)
        arguments = ["-m", "tests.support.distributed", *map(str, (rank, size, port))]
        with sender, open(os.devnull, "rb") as nothing:  # noqa: PTH123
            descriptors = [nothing.fileno(), 1, 2, os.open(f"/proc/self/fd/{call}", os.O_RDONLY), sender.fileno()]
            try:
                self._process = _started(arguments, descriptors)
            finally:
                os.close(descriptors[3])

    def end(self) -> None:
        self._process.kill()
        self.connection.close()


def _started(arguments: list[str], descriptors: list[int]) -> Forked | _Spawned:
    # A process forked from one that has used CUDA cannot use it.
    if torch.cuda.is_available():
        return _Spawned(arguments, descriptors)
    return Forked("test_rank", arguments, _ENVIRONMENT, descriptors)


class _Spawned:
    """The same with an interpreter of its own."""

    def __init__(self, arguments: list[str], descriptors: list[int]) -> None:
        call, sender = descriptors[3:]
        self._process = subprocess.Popen(
            [sys.executable, *arguments, str(call), str(sender)],
            stdin=subprocess.DEVNULL,
            pass_fds=(call, sender),
            cwd=_ROOT,
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _collect(ranks: Sequence[_Rank], deadline: float, timeout_s: float, may_die: Collection[int]) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    waiting = {process.connection: process.rank for process in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} were not done after {timeout_s} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, result = pickle.loads(connection.recv_bytes())
            except EOFError:
                if rank in may_die:
                    continue
                raise RankFailedError(f"rank {rank} died") from None
            if not succeeded:
                raise RankFailedError(f"rank {rank} of {len(ranks)}:\n{result}")
            results[rank] = result
    return results


def main(rank: int, world_size: int, port: int, call: int = 3, sender: int = 4) -> None:
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    torch.set_num_threads(1)
    # An engine freezes what is there, and unfreezes it when it is closed: all that was imported would be looked through
    # again, for most of a second with each later engine. Frozen here, once, closed engines can go.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    connection = Connection(sender, readable=False)
    try:
        with os.fdopen(call, "rb") as file:
            function, args = pickle.load(file)
        # Bytes, because a tensor's own way through a pipe would need this process to outlive it.
        connection.send_bytes(pickle.dumps((True, function(*args))))
    except Exception:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    connection.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

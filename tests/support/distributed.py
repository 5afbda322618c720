"""Run a function on several gloo processes, with a limit on how long it may take."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from engine3d import rendezvous

_PRELOADED = ("tests.support.preloaded",)


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
    # A process forked from one that has used CUDA cannot use it.
    method: Any = "spawn" if torch.cuda.is_available() else "forkserver"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(list(_PRELOADED))
    store = rendezvous.serve(rendezvous.listen("127.0.0.1"))
    processes: list[ForkServerProcess] = []
    waiting: dict[Connection, int] = {}
    try:
        for rank in range(world_size):
            process, connection = _start(context, function, args, rank, world_size, store.port)
            processes.append(process)
            waiting[connection] = rank
        return _collect(waiting, world_size, time.monotonic() + timeout_s, timeout_s, may_die)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def meet_others(device: str) -> dist.ProcessGroup:
    """The group of all ranks, on a process of `run_distributed`: of "cuda" each on a GPU of its own, or of "cpu"."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    group = dist.group.WORLD
    assert group is not None
    return group


def _start(
    context: ForkServerContext, function: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, port: int
) -> tuple[ForkServerProcess, Connection]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank, args=(sender, function, args, rank, size, port))
    process.start()
    sender.close()
    return process, receiver


def _collect(
    waiting: dict[Connection, int], world_size: int, deadline: float, timeout_s: float, may_die: Collection[int]
) -> list[Any]:
    results: list[Any] = [None] * world_size
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
                raise RankFailedError(f"rank {rank} of {world_size}:\n{result}")
            results[rank] = result
    return results


def _rank(
    connection: Connection, function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int
) -> None:
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
    try:
        # Bytes, because a tensor's own way through a pipe would need this process to outlive it.
        connection.send_bytes(pickle.dumps((True, function(*args))))
    except Exception:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    connection.close()

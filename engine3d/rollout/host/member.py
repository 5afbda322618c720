"""The host process of an engine's part that is not the first: it runs ranks, and tells its client how far they are."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
from typing import Any

from engine3d.rollout.host.messages import START_ID, ClientConnection, HostCall, Progress, Reply
from engine3d.rollout.host.progress import PROGRESS_EVERY_S, scheduler_state
from engine3d.run_files import remove_run_files


def serve_member(engine: Any, client: ClientConnection) -> None:
    """Run the ranks of this host until the client goes, or one of them fails.

    Args:
        engine: SGLang's, of another node than the first.
        client: of this process.
    """
    calls: queue.SimpleQueue[HostCall] = queue.SimpleQueue()
    client.deliver = calls.put
    ranks = multiprocessing.active_children()

    def fail() -> None:
        for rank in ranks:
            if rank.exitcode:
                print(f"Subprocess {rank.name} (pid={rank.pid}) crashed with exit code {rank.exitcode}")
        client.die()

    # SGLang signals it when one of its processes has failed; its own handler would wait five seconds first.
    signal.signal(signal.SIGQUIT, lambda *_: fail())
    client.send(Reply(START_ID))
    reported = 0
    while all(rank.exitcode is None for rank in ranks):
        with contextlib.suppress(queue.Empty):
            call = calls.get(timeout=PROGRESS_EVERY_S)
            if call.method == "shutdown":
                end_engine(engine, client, call.id)
            client.send(Reply(call.id))
        if (batches := scheduler_state(client.launch.run_directory).batches) != reported:
            reported = batches
            client.send(Progress({}))
    fail()


def end_engine(engine: Any, client: ClientConnection, id: int) -> None:
    """End SGLang's processes on this host, and this one; the reply to call `id` is the last thing that it does."""
    engine.shutdown()
    multiprocessing.active_children()  # reaps them
    remove_run_files(client.launch.run_directory)
    client.send(Reply(id))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

"""Schedulers of an engine that has released memory, or is paused: they wait, where SGLang's poll on a core each."""

from __future__ import annotations

from typing import Any

_LONGEST_MS = 50
"""Longest wait, in milliseconds. A request to the first rank ends it. A request to another group of ranks waits for its
end.
"""


def wait_while_released(result: None, scheduler: Any) -> None:
    """Wait for what the engine is asked, after SGLang's `Scheduler.maybe_sleep_on_idle`.

    SGLang calls that in each iteration without work, in all of its loops. The first rank of all waits at its sockets.
    All others wait for it in the collective that hands on what it received, also those of groups with attention of
    their own: it is on the CPU, and takes no core. With `sleep_on_idle` SGLang waits by itself.
    """
    if not scheduler.weight_updater.offload_tags or scheduler.server_args.sleep_on_idle:
        return
    if scheduler.ps.tp_rank > 0 or scheduler.ps.pp_rank > 0:
        return
    import zmq

    sockets = zmq.Poller()
    sockets.register(scheduler.ipc_channels.recv_from_tokenizer, zmq.POLLIN)
    sockets.register(scheduler.ipc_channels.recv_from_rpc, zmq.POLLIN)
    sockets.poll(_LONGEST_MS)


def wait_while_paused(result: None, scheduler: Any, *_: Any) -> None:
    """Put a paused scheduler to sleep like an idle one, after SGLang's `Scheduler.process_input_requests`.

    SGLang goes from there to the next requests at once, and with requests in flight it is never idle.
    """
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()

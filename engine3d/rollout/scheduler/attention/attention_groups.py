"""Sockets of an engine's processes whose ranks are groups with attention of their own: in its directory.

SGLang has them listen at TCP ports of the host, at fixed distances from its own, where anybody on the host may send
them what they unpickle, and where a second engine finds the ports taken. An engine is on one host here.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine3d.platform import platform
from engine3d.run_files import RUN_DIRECTORY_VARIABLE

_LOOK_MS = 1000
"""Milliseconds between two announcements of the controller."""
_workers = itertools.count()


class Controller:
    """SGLang's `run_data_parallel_controller_process`, with plugins.

    SGLang loads them in all of its processes but that of its controller, which has none of its own where processes are
    spawned, as on GPUs. A class, because SGLang puts a wrapper in the place of a function, and a wrapper's name leads
    the spawned process to what it wraps.
    """

    run: Callable[..., None]
    """SGLang's function."""

    def __init__(self, **arguments: Any) -> None:
        """Be the process, to its end."""
        from sglang.srt.plugins import load_plugins

        load_plugins()
        type(self).run(**arguments)


def register() -> None:
    """Register the hooks with SGLang, in each of its processes."""
    from sglang.srt.managers import data_parallel_controller
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if platform.device_type == "cpu":
        from engine3d.platform.cpu.sglang_modules import collectives as sglang_collectives

        sglang_collectives.register()
    HookRegistry.register("sglang.srt.server_args.PortArgs.init_new", _in_directory, HookType.AROUND)
    controller = "sglang.srt.managers.data_parallel_controller"
    Controller.run = staticmethod(data_parallel_controller.run_data_parallel_controller_process)
    HookRegistry.register(f"{controller}.run_data_parallel_controller_process", Controller, HookType.REPLACE)
    HookRegistry.register(f"{controller}.get_zmq_socket_on_host", _worker_socket, HookType.REPLACE)
    broadcast = f"{controller}.DataParallelController._broadcast_worker_ports"
    HookRegistry.register(broadcast, _known_to_all, HookType.REPLACE)
    HookRegistry.register(f"{controller}.DataParallelController.event_loop", _deal_out, HookType.REPLACE)


def _deal_out(controller: Any) -> None:
    """Hand requests out as they come; SGLang's own loop polls for them on a core."""
    from sglang.srt.managers.data_parallel_controller import sock_recv

    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(_LOOK_MS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))


def _in_directory(
    original: Callable[..., Any], server_args: Any, dp_rank: int | None = None, worker_ports: Any = None
) -> Any:
    """SGLang's `PortArgs.init_new`; the names are the same in every process."""
    if not server_args.enable_dp_attention:
        return original(server_args, dp_rank, worker_ports)
    alone = copy.copy(server_args)
    alone.enable_dp_attention = False
    return replace(
        original(alone),
        tokenizer_ipc_name=_address("tokenizer"),
        scheduler_input_ipc_name=_address("controller" if dp_rank is None else f"group-{dp_rank}"),
        detokenizer_ipc_name=_address("detokenizer"),
        rpc_ipc_name=_address("calls"),
        metrics_ipc_name=_address("metrics"),
    )


def _worker_socket(context: Any, socket_type: Any, host: str | None = None) -> tuple[int, Any]:
    """SGLang's `get_zmq_socket_on_host`, called once for each group: its number in place of a port."""
    from sglang.srt.utils.network import get_zmq_socket

    number = next(_workers)
    return number, get_zmq_socket(context, socket_type, _address(f"group-{number}"), True)


def _known_to_all(controller: Any, server_args: Any, worker_ports: list[int] | None = None) -> list[int] | None:
    """SGLang's `DataParallelController._broadcast_worker_ports`: there are no other hosts."""
    return worker_ports


def _address(name: str) -> str:
    return f"ipc://{os.environ[RUN_DIRECTORY_VARIABLE]}/{name}.socket"

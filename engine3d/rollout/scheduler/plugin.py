"""Our hooks in SGLang, found through the entry point group `sglang.srt.plugins` in every process that it starts.

Nothing is hooked unless the engine's host process asked for it in the environment, so that SGLang is untouched when
anyone else starts it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from engine3d.platform import platform
from engine3d.platform.cpu.sglang import START_METHOD_VARIABLE
from engine3d.rollout.host.progress import count_batch, count_retracted, start_counting
from engine3d.rollout.scheduler import drafts, local_experts, peer_collectives, routes
from engine3d.rollout.scheduler.attention import attention_groups
from engine3d.rollout.scheduler.routes import ROUTES_VARIABLE
from engine3d.rollout.scheduler.text_stops import check_last_tokens, check_text_stops
from engine3d.rollout.scheduler.versions import VERSIONS_VARIABLE, note_version
from engine3d.run_files import RUN_DIRECTORY_VARIABLE, segment_name
from engine3d.sglang_source import complete_configs
from engine3d.stacks import write_stacks_on_request
from engine3d.startup import leave_out

MEETING_VARIABLE = "ENGINE3D_ROLLOUT_MEETING"
"""Environment variable with the address of the store at which the ranks of an engine on several hosts meet."""
MEETING_TIMEOUT_VARIABLE = "ENGINE3D_ROLLOUT_MEETING_TIMEOUT_S"
"""Environment variable with the seconds that they wait for each other there."""
# In the run directory: where those of an engine on one host meet.
_MEETING = "meeting"
_SCHEME = "engine3d"
_MEETING_S = 600.0

ALONE_VARIABLE = "ENGINE3D_SERVER"
"""Environment variable of a server whose weights nobody writes: it meets where our engines do, and is SGLang's
otherwise.
"""

FUSED_SAMPLING_VARIABLE = "ENGINE3D_FUSED_SAMPLING"
"""Environment variable of an engine that draws tokens by one kernel."""

PEERS_VARIABLE = "ENGINE3D_PEER_COLLECTIVES"
"""Environment variable of an engine whose ranks write tokens into each other's memory."""

CASCADE_VARIABLE = "ENGINE3D_CASCADE_ATTENTION"
"""Environment variable of an engine that reads shared pages once."""

LOCAL_EXPERTS_VARIABLE = "ENGINE3D_LOCAL_EXPERTS_ONLY"
"""Environment variable of an engine that leaves other ranks' experts out."""

# The method of SGLang's scheduler by which a Call reaches the ranks.
ANSWER_METHOD = "engine3d_answer"


def register() -> None:
    """Register our hooks with SGLang, in a process of a rollout engine."""
    if RUN_DIRECTORY_VARIABLE not in os.environ:
        return
    write_stacks_on_request()
    # SGLang's debug dumper imports Megatron-Core where it finds it: three seconds of every start, for nothing here.
    leave_out("megatron.core")
    _lock_progress_bars()
    complete_configs()
    _hook_start()
    if ALONE_VARIABLE not in os.environ:
        _hook_engine()


def _lock_progress_bars() -> None:
    # By themselves they make a semaphore among processes, which stays in /dev/shm when SGLang kills its schedulers.
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def _hook_start() -> None:
    """Hook the start of processes, their meeting, and the names of their shared memory."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    environment = "sglang.srt.distributed.parallel_state.init_distributed_environment"
    HookRegistry.register(environment, _meet, HookType.AROUND)
    for name in ("managers.load_snapshot.shm_path_for", "utils.stale_shm_cleanup.make_shm_name"):
        HookRegistry.register(f"sglang.srt.{name}", _name_segment, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", _freeze, HookType.AFTER)
    attention_groups.register()
    if START_METHOD_VARIABLE in os.environ:
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _set_start_method, HookType.AFTER)


def _hook_engine() -> None:
    """Hook an engine's further calls, besides SGLang's own."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engine3d.rollout.scheduler.rank import RELEASE_VARIABLE

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.init_torch_distributed", _await_trainer, HookType.BEFORE)
    HookRegistry.register(f"{runner}.load_model", _keep_rank, HookType.AFTER)
    if FUSED_SAMPLING_VARIABLE in os.environ:
        HookRegistry.register(f"{runner}.init_torch_distributed", _draw_by_one_kernel, HookType.BEFORE)
    if CASCADE_VARIABLE in os.environ:
        HookRegistry.register(f"{runner}.init_torch_distributed", _read_once, HookType.BEFORE)
    if drafts.DRAFT_VARIABLE in os.environ:
        HookRegistry.register(f"{runner}.init_torch_distributed", _draft, HookType.BEFORE)
        drafts.register()
    if PEERS_VARIABLE in os.environ:
        peer_collectives.register()
    if LOCAL_EXPERTS_VARIABLE in os.environ:
        local_experts.register()
    if RELEASE_VARIABLE not in os.environ:
        loading = "sglang.srt.model_executor.model_runner_components.load_model_utils.load_model_with_memory_saver"
        HookRegistry.register(loading, _load_outside_memory_saver, HookType.AROUND)
    if (saver := platform.rollout_memory_saver()) is not None:
        adapter = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter"
        HookRegistry.register(f"{adapter}.create", saver, HookType.REPLACE)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.__init__", _add_answer, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.__init__", start_counting, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.process_batch_result", count_batch, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.maybe_sleep_on_idle", wait_while_released, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.process_input_requests", wait_while_paused, HookType.AFTER)
    batch = "sglang.srt.managers.schedule_batch.ScheduleBatch"
    HookRegistry.register(f"{batch}.retract_decode", count_retracted, HookType.AFTER)
    if VERSIONS_VARIABLE in os.environ:
        HookRegistry.register(f"{scheduler}.run_batch", note_version, HookType.AFTER)
    if ROUTES_VARIABLE in os.environ:
        routes.register()
    HookRegistry.register("sglang.srt.managers.schedule_batch.Req.__init__", check_text_stops, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.__init__", check_last_tokens, HookType.AFTER)


def _freeze(*_: Any, **__: Any) -> None:
    # What is there once the engine is made stays. Python's collector would look at it again and again while requests
    # come and go, on each rank at another time, and all would wait for it. Not earlier: SGLang thaws what was frozen
    # when it has captured its CUDA graphs.
    gc.freeze()


def _meet(initialise: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # SGLang would have its ranks meet at a server that listens at all addresses of the host.
    from torch.distributed import register_rendezvous_handler

    register_rendezvous_handler(_SCHEME, _at_our_store)
    return initialise(*args, **kwargs | {"distributed_init_method": f"{_SCHEME}://"})


def _at_our_store(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """torch's rendezvous for an address of our scheme, with rank and world size in its query."""
    from torch.distributed import PrefixStore

    from engine3d.rendezvous import file_address, join

    given = dict(parse_qsl(urlsplit(url).query))
    address = os.environ.get(MEETING_VARIABLE) or file_address(Path(os.environ[RUN_DIRECTORY_VARIABLE]) / _MEETING)
    timeout_s = float(os.environ.get(MEETING_TIMEOUT_VARIABLE, _MEETING_S))
    yield PrefixStore("sglang", join(address, timeout_s)), int(given["rank"]), int(given["world_size"])


def _await_trainer(runner: Any) -> None:
    # SGLang notes here how much memory is free, and sizes the KV cache by it: a trainer that shares the device must
    # have taken its part before.
    from engine3d.rollout.scheduler.rank import weight_source

    if not runner.is_draft_worker:
        weight_source(runner.ps.tp_rank)


def _draw_by_one_kernel(runner: Any) -> None:
    # Of the model runner, which has not made its sampler yet: here SGLang's layers are imported anyway.
    from engine3d.rollout.scheduler import fused_sampler

    if not runner.is_draft_worker:
        fused_sampler.register()


def _draft(runner: Any) -> None:
    # Here for the same reason.
    if not runner.is_draft_worker:
        platform.install_draft_kernels()


def _read_once(runner: Any) -> None:
    # Here for the same reason. It refuses drafts by itself.
    from engine3d.rollout.scheduler.attention import cascade_backend

    cascade_backend.register()


def _load_outside_memory_saver(load: Callable[..., Any], **arguments: Any) -> Any:
    # The memory saver's memory cannot be mapped by a trainer. Weights that stay lie outside it, for trainers to write.
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    with platform.shareable_memory():
        return load(**arguments | {"memory_saver_adapter": TorchMemorySaverAdapter.create(enable=False)})


def _keep_rank(result: Any, runner: Any) -> None:
    from engine3d.rollout.scheduler.rank import EngineRank

    if not runner.is_draft_worker:
        runner.engine3d_rank = EngineRank(runner)


def _add_answer(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    # SGLang's collective_rpc calls a scheduler's method by its name.
    rank = scheduler.tp_worker.model_runner.engine3d_rank
    rank.attach(scheduler)
    setattr(scheduler, ANSWER_METHOD, rank.answer)
    if rank.rank > 0 and scheduler.ipc_channels.recv_from_rpc is not None:
        # Of groups with attention of their own each first rank is connected. One of them would get a call, by turns,
        # from where it reaches nobody, and all would answer. From the first rank of all it reaches all.
        scheduler.ipc_channels.recv_from_rpc.close(linger=0)
        scheduler.ipc_channels = replace(scheduler.ipc_channels, recv_from_rpc=None)


def _name_segment(name: Callable[[str], str], kind: str) -> str:
    # SGLang unlinks its shared memory when it ends in order, and sometimes not then: its name says whose it is.
    return segment_name(name(kind), Path(os.environ[RUN_DIRECTORY_VARIABLE]))


def _set_start_method(result: Any, *args: Any, **kwargs: Any) -> None:
    # SGLang sets "spawn" just before it starts its processes; the platform may know that another is right and faster.
    multiprocessing.set_start_method(os.environ[START_METHOD_VARIABLE], force=True)


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

"""The process that owns an SGLang engine, for one client.

It leads a session of its own, because SGLang kills the whole process tree of the parent of a process that fails. It
lives as long as its client: when the connection ends or the client is gone, it kills its process group and itself. An
engine on several hosts has such a process on each; the first one's answers, the others' only run ranks
(`serve_member`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from engine3d.errors import EngineError
from engine3d.models import load_model_spec
from engine3d.models.experts.routes import RouteFormat
from engine3d.platform import platform
from engine3d.rollout import moe_configs
from engine3d.rollout.host.generation import SglangBatches, adapter_name, add_adapter
from engine3d.rollout.host.log import log_answered
from engine3d.rollout.host.messages import (
    START_ID,
    ClientConnection,
    GivenLogprobs,
    HostCall,
    Limits,
    Progress,
    Reply,
)
from engine3d.rollout.host.progress import PROGRESS_EVERY_S, SchedulerState, scheduler_state
from engine3d.rollout.host.stream import InFlightPolicy, ResponseStream
from engine3d.rollout.requests import Request, Response
from engine3d.rollout.scheduler.plugin import ANSWER_METHOD
from engine3d.rollout.scheduler.rank import Call, RankResult, answers_path
from engine3d.rollout.scheduler.versions import VERSIONS_VARIABLE
from engine3d.run_files import remove_run_files
from engine3d.stacks import write_stacks_on_request
from engine3d.startup import jit_kernels
from engine3d.startup.imports import quick_imports

_TITLE = "sglang::scheduler"


def watched_ranks() -> dict[int, str]:
    """A descriptor for each rank's process, which can be read once that has ended, and what to call it."""
    titles: dict[int, str] = {}
    for process in psutil.Process().children(recursive=True):  # those before what they have started
        with contextlib.suppress(psutil.NoSuchProcess):  # a compiler, perhaps
            title = " ".join(process.cmdline()[:1])
            if title.startswith(_TITLE) and process.ppid() not in titles:  # a rank's forks have its title
                titles[process.pid] = title.removeprefix("sglang::")
    descriptors: dict[int, str] = {}
    for pid, title in titles.items():
        with contextlib.suppress(OSError):  # a system without, where SGLang's own watch is all
            descriptors[os.pidfd_open(pid)] = f"{title} (pid={pid})"
    return descriptors


_CLEAR_UP_S = 10.0  # between the last response and a scheduler that has cleared up after it
_KEEPING_CACHE: tuple[InFlightPolicy, ...] = ("continue", "recompute")  # responses stay with a scheduler that is paused


class _Server:
    """Answers calls with an engine; each public method is one that the client can call by name."""

    def __init__(self, engine: Any, client: ClientConnection) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._client = client
        info = engine._scheduler_init_result.scheduler_infos[0]
        self._groups = int(self._manager.server_args.dp_size)  # of ranks, with attention and a KV cache of their own
        self._cache_tokens = int(info["max_total_num_tokens"]) * self._groups
        arguments = self._manager.server_args
        routes = None
        if arguments.enable_return_routed_experts:
            routes = RouteFormat.of(load_model_spec(arguments.model_path).sizes)
        self._batches = SglangBatches(engine, token_versions=VERSIONS_VARIABLE in os.environ, routes=routes)
        self._stream = ResponseStream(
            self._manager,
            self._batches,
            client.send,
            self._scheduler_state,
            self._cache_tokens,
            arguments.random_seed if arguments.enable_deterministic_inference else None,
            routes,
        )
        self._standstill: InFlightPolicy | None = None  # of a transfer that was begun: the fate of responses in flight
        self._locked = False  # True while a transfer has SGLang's lock, which generations in flight hold too
        self._beginning = asyncio.Lock()  # of a transfer
        self._calling = asyncio.Lock()  # SGLang has one socket for calls of all ranks
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer calls, all at the same time, until the client goes."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[HostCall] = asyncio.Queue()
        self._client.deliver = lambda call: loop.call_soon_threadsafe(inbox.put_nowait, call)
        # SGLang signals SIGQUIT when one of its processes has failed; its own handler would wait five seconds first.
        self._manager.auto_create_handle_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._fail)
        for descriptor, rank in watched_ranks().items():
            loop.add_reader(descriptor, self._fail, rank)
        if adapter_name() is not None:
            await add_adapter(self._manager)
        vocab_size = self._manager.model_config.vocab_size
        self._client.send(Reply(START_ID, Limits(self._cache_tokens, int(vocab_size))))
        telling = asyncio.create_task(self._tell_progress())
        telling.add_done_callback(lambda _: self._client.die())
        while True:
            call = await inbox.get()
            task = asyncio.create_task(self._answer(call))
            self._tasks[call.id] = task
            task.add_done_callback(functools.partial(self._forget, call.id))

    async def _tell_progress(self) -> None:
        """Tell the client, while calls or responses are in flight, that the engine has come further, and how far."""
        reported = 0
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            if not self._tasks and not self._stream:
                continue
            batches = self._scheduler_state().batches
            if batches != reported:
                reported = batches
                self._client.send(Progress(self._batches.done, self._stream.stats))

    def _scheduler_state(self) -> SchedulerState:
        return scheduler_state(self._client.launch.run_directory)

    def _fail(self, ended: str | None = None) -> None:
        """End, since a process has failed: the rank that has `ended`, or another that misses it."""
        watchdog = self._manager._subprocess_watchdog
        for process, name in zip(watchdog._processes, watchdog._names, strict=True):
            if process.exitcode:
                print(f"Subprocess {name} (pid={process.pid}) crashed with exit code {process.exitcode}")
                ended = None
        if ended is not None:
            print(f"Subprocess {ended} crashed")
        self._client.die()

    def _forget(self, id: int, task: asyncio.Task[None]) -> None:
        del self._tasks[id]

    async def _answer(self, call: HostCall) -> None:
        try:
            result = await getattr(self, call.method)(call.id, **call.arguments)
        except asyncio.CancelledError:
            reply = Reply(call.id, error=f"{call.method} was cancelled")
        except Exception as error:
            log_answered()
            line = " ".join(str(error).split())
            reply = Reply(call.id, error=line if isinstance(error, EngineError) else f"{type(error).__name__}: {line}")
        else:
            reply = Reply(call.id, result)
        self._client.send(reply)

    async def cancel(self, id: int, call_id: int) -> None:
        """Cancel a call: what it waits for in the scheduler is aborted."""
        if task := self._tasks.get(call_id):
            for name in [name for name in self._manager.rid_to_state if name.startswith(f"logprobs-{call_id}-")]:
                self._manager.abort_request(name)
            task.cancel()

    async def submit(self, id: int, requests: list[Request], together: bool) -> None:
        """Begin responses. Each is sent as it ends, or all in one message if they are submitted `together`."""
        self._stream.submit(id, requests, together=together)

    async def abort(self, id: int, samples: list[int]) -> None:
        """Abort responses: each ends with what it has."""
        self._stream.abort(samples)

    async def in_flight(self, id: int) -> dict[int, Response]:
        """Tokens of the responses in flight, by sample."""
        ranks = await self.call_ranks(id, Call("in_flight", {}))
        return self._stream.so_far(ranks[0])

    async def logprobs(self, id: int, sequences: list[list[int]], firsts: list[int], top: int) -> list[GivenLogprobs]:
        """Log-probs of given tokens: each sequence is a prompt to which nothing is generated."""
        outputs = await self._batches.outputs(
            id,
            [f"logprobs-{id}-{index}" for index in range(len(sequences))],
            [index % self._groups for index in range(len(sequences))],
            input_ids=sequences,
            sampling_params=[{"max_new_tokens": 0, "temperature": 1.0}] * len(sequences),
            # SGLang has none of the very first token that it is asked for.
            logprob_start_len=[first - 1 for first in firsts],
            top_logprobs_num=[top] * len(sequences),
        )
        return [_given_logprobs(output["meta_info"]) for output in outputs]

    async def begin_weights(self, id: int, in_flight: InFlightPolicy) -> None:
        """Hold back new generations until `commit_weights`.

        Args:
            id: of the request.
            in_flight: policy for responses in flight.
        """
        async with self._beginning:  # also one that was cancelled ends before the next begins
            if self._standstill is not None:
                return  # the last transfer was not committed: this one takes over from it
            try:
                await self._stand_still(in_flight)
                # The batch in flight reads the weights to its end.
                await self.call_ranks(id, Call("settle", {"paused": in_flight in _KEEPING_CACHE}))
            except BaseException:  # the previous weights are complete, and are served as before
                await self._resume()
                raise
            self._standstill = in_flight

    async def _stand_still(self, in_flight: InFlightPolicy) -> None:
        """Hold back requests, and wait until those in flight have ended, or stand still."""
        if in_flight in _KEEPING_CACHE:
            self._stream.continues()
            await self._pause("in_place" if in_flight == "continue" else "retract")
            # A pause has no answer, and calls of ranks take another socket, which may be quicker: the scheduler would
            # run one more batch on half-written weights. This request takes the socket of the pause, so its answer
            # comes after it.
            await self._manager.get_internal_state()
            return
        # Not SGLang's own abort, which looks once a second whether all have ended. Requests that come wait for this
        # condition, where they can be aborted, and not for the lock.
        async with self._manager.is_pause_cond:
            self._manager.is_pause = True
        if in_flight == "resend":
            await self._stream.park()
        else:
            await self._wait_for_generations()

    async def _resume(self) -> None:
        """End a standstill: requests that were held back begin, and those that stand still continue."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._locked:
            self._locked = False
            await self._manager.model_update_lock.release_writer()
        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _wait_for_generations(self) -> None:
        """Wait for generations in flight."""
        lock = self._manager.model_update_lock
        try:
            await lock.acquire_writer()
        except asyncio.CancelledError:
            await lock.acquire_reader()  # its release wakes those who wait behind us
            await lock.release_reader()
            raise
        self._locked = True

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def drop_old_cache(self, id: int) -> None:
        """Drop the KV cache of the previous weights, except that of responses which the scheduler keeps."""
        if self._standstill in _KEEPING_CACHE:  # SGLang drops all at once, and only where it has no requests at all
            self._stream.leave_cache()
            await self.call_ranks(id, Call("drop_unused_cache", {}))
            return
        await self._flush()

    async def commit_weights(self, id: int, version: int) -> None:
        """Serve the weights that are there as this version. Nothing in it can fail but the process."""
        if self._standstill is None:
            raise EngineError(f"version {version} was never begun")
        if VERSIONS_VARIABLE in os.environ:
            await self.call_ranks(id, Call("serve", {"version": version}))
        self._manager._update_weight_version_if_provided(str(version))
        self._standstill = None
        await self._resume()

    async def call_ranks(self, id: int, call: Call) -> list[Any]:
        """Call a method of EngineRank on every rank; their results in order of rank."""
        path = self._client.launch.run_directory / f"call-{id}"
        path.write_bytes(pickle.dumps(call))
        # To its end even where the request is given up: SGLang would take its answer for that of the next.
        await asyncio.shield(asyncio.create_task(self._on_ranks(path)))
        file = answers_path(path)
        if not file.exists():
            raise EngineError("the ranks gave no answers")
        answers: list[RankResult] = pickle.loads(file.read_bytes())
        file.unlink()
        errors = [f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers) if answer.error is not None]
        if errors:
            raise EngineError("; ".join(dict.fromkeys(errors)))
        return [answer.result for answer in answers]

    async def _on_ranks(self, path: Path) -> None:
        async with self._calling:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                None, functools.partial(self._engine.collective_rpc, ANSWER_METHOD, path=str(path))
            )
        path.unlink()

    async def _flush(self) -> None:
        result = await self._manager.flush_cache(_CLEAR_UP_S)
        if not result.success:
            raise EngineError("SGLang keeps its cache while requests run, expected none in flight")

    async def release_memory(self, id: int, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._flush()  # a scheduler that still clears up would end itself
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def restore_memory(self, id: int, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)
        if self._groups > 1:
            await self.call_ranks(id, Call("forget_requests", {}))

    async def trace(self, id: int, directory: str, steps: int) -> None:
        from sglang.srt.managers.io_struct import ProfileReq

        devices = ["GPU"] if platform.gpus else []
        request = ProfileReq(
            output_dir=directory,
            start_step=1,  # the next one; without it SGLang would begin a second trace and lose both
            num_steps=steps,
            activities=["CPU", *devices],
            with_stack=False,
            record_shapes=False,
            profile_id="engine",
        )
        try:
            await self._manager.start_profile(request)
        except RuntimeError as error:
            raise EngineError(f"SGLang begins no trace: {error}") from error

    async def shutdown(self, id: int) -> None:
        """End SGLang's processes; the reply is the last thing that this process does."""
        end_engine(self._engine, self._client, id)


def _given_logprobs(meta: dict[str, Any]) -> GivenLogprobs:
    tops = meta["input_top_logprobs"][1:]
    return GivenLogprobs(
        logprobs=[float(logprob) for logprob, _, _ in meta["input_token_logprobs"][1:]],
        top_tokens=[[int(token) for _, token, _ in top] for top in tops],
        top_logprobs=[[float(logprob) for logprob, _, _ in top] for top in tops],
    )


def _engine_class() -> Any:
    """SGLang's engine without its detokenizer, which would wait for ever: tokens go to and come from our clients.

    With `skip_tokenizer_init` schedulers send what they generate past it. It is a process of 0.6 GB, and its imports
    are a third of a small engine's start.
    """
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):
        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

    return TokenEngine


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


def main() -> None:
    """`python -m engine3d.rollout.host.program FD`: serve the client at the other end of this inherited Unix socket."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    write_stacks_on_request()
    client = ClientConnection(Connection(descriptor))
    launch = client.launch
    os.environ.update(moe_configs.environment(launch.run_directory / "moe", launch.server_arguments))
    if platform.gpus:
        jit_kernels.start(launch.server_arguments)
    # Slow from here on: the client's end is watched already.
    with quick_imports():
        engine_class = _engine_class()
    engine = engine_class(**platform.rollout_device_arguments() | launch.server_arguments)
    gc.freeze()  # what is there now stays
    if launch.server_arguments.get("node_rank", 0) > 0:
        serve_member(engine, client)
    engine.loop.run_until_complete(_Server(engine, client).serve())


if __name__ == "__main__":
    main()

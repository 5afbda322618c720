"""The process that owns an SGLang engine, for one client.

It leads a session of its own, because SGLang kills the whole process tree of the parent of a process that fails. It
lives as long as its client: when the connection ends or the client is gone, it kills its process group and itself. An
engine on several hosts has such a process on each; the first one's answers, the others' only run ranks
(`engine3d.rollout.host.member`).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine3d.errors import EngineError
from engine3d.platform import platform
from engine3d.rollout import moe_configs
from engine3d.rollout.cache import samples_together
from engine3d.rollout.host.client_connection import ClientConnection
from engine3d.rollout.host.log import log_answered
from engine3d.rollout.host.member import end_engine, serve_member
from engine3d.rollout.host.messages import (
    START_ID,
    Generation,
    GivenLogprobs,
    Limits,
    Progress,
    Reply,
    Request,
    Response,
    ResponseRequest,
)
from engine3d.rollout.host.progress import PROGRESS_EVERY_S, SchedulerState, scheduler_state
from engine3d.rollout.host.ranks import watched_ranks
from engine3d.rollout.host.stream import ResponseStream, UnderWay
from engine3d.rollout.scheduler.plugin import ANSWER_METHOD
from engine3d.rollout.scheduler.rank import Answer, Call, answers_path
from engine3d.rollout.scheduler.versions import VERSIONS_VARIABLE
from engine3d.stacks import write_stacks_when_asked
from engine3d.startup import jit_kernels
from engine3d.startup.imports import quick_imports

_CLEAR_UP_S = 10.0  # between the last response and a scheduler that has cleared up after it
_KEEPING_CACHE: tuple[UnderWay, ...] = ("continue", "recompute")  # responses stay with a scheduler that is paused


class _Server:
    """Answers requests with an engine; each public method is one that the client can call by name."""

    def __init__(self, engine: Any, client: ClientConnection) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._client = client
        info = engine._scheduler_init_result.scheduler_infos[0]
        self._groups = int(self._manager.server_args.dp_size)  # of ranks, with attention and a KV cache of their own
        self._cache_tokens = int(info["max_total_num_tokens"]) * self._groups
        self._stream = ResponseStream(self._manager, client.send, self._scheduler_state, self._cache_tokens)
        self._standstill: UnderWay | None = None  # of a transfer that was begun: the fate of responses in flight
        self._calling = asyncio.Lock()  # SGLang has one socket for calls of all ranks
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._generating: dict[int, list[str]] = {}  # SGLang's names of a request's responses

    async def serve(self) -> None:
        """Answer requests, all at the same time, until the client goes."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Request] = asyncio.Queue()
        self._client.deliver = lambda request: loop.call_soon_threadsafe(inbox.put_nowait, request)
        # SGLang signals SIGQUIT when one of its processes has failed; its own handler would wait five seconds first.
        self._manager.auto_create_handle_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._fail)
        for descriptor, rank in watched_ranks().items():
            loop.add_reader(descriptor, self._fail, rank)
        vocab_size = self._manager.model_config.vocab_size
        self._client.send(Reply(START_ID, Limits(self._cache_tokens, int(vocab_size))))
        telling = asyncio.create_task(self._tell_progress())
        telling.add_done_callback(lambda _: self._client.die())
        while True:
            request = await inbox.get()
            task = asyncio.create_task(self._answer(request))
            self._tasks[request.id] = task
            task.add_done_callback(functools.partial(self._forget, request.id))

    async def _tell_progress(self) -> None:
        """Tell the client, as long as requests wait, that the engine has come further, and how far."""
        told = 0
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            if not self._tasks and not self._stream:
                continue
            batches = self._scheduler_state().batches
            if batches != told:
                told, under_way = batches, self._manager.rid_to_state
                done = {id: sum(name not in under_way for name in names) for id, names in self._generating.items()}
                self._client.send(Progress(done, self._stream.figures))

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

    async def _answer(self, request: Request) -> None:
        try:
            result = await getattr(self, request.method)(request.id, **request.arguments)
        except asyncio.CancelledError:
            reply = Reply(request.id, error=f"{request.method} was cancelled")
        except Exception as error:
            log_answered()
            line = " ".join(str(error).split())
            reply = Reply(
                request.id, error=line if isinstance(error, EngineError) else f"{type(error).__name__}: {line}"
            )
        else:
            reply = Reply(request.id, result)
        self._client.send(reply)

    async def cancel(self, id: int, request_id: int) -> None:
        """Give a request up: its generations are aborted in the scheduler."""
        if task := self._tasks.get(request_id):
            for name in [name for name in self._manager.rid_to_state if name.startswith(f"{request_id}-")]:
                self._manager.abort_request(name)
            task.cancel()

    async def generate(
        self, id: int, prompts: list[list[int]], sampling: list[dict[str, Any]], samples_per_prompt: int
    ) -> list[list[Generation]]:
        """`sampling` has one entry for each sample, prompt by prompt."""
        version = self._version
        order = _order(len(prompts), samples_per_prompt, self._manager.server_args.max_running_requests)
        together = samples_together(len(prompts), samples_per_prompt, self._groups)
        outputs = await self._ask(
            id,
            [f"{id}-{index}" for index in order],
            [index // together % self._groups for index in order],
            input_ids=[prompts[index // samples_per_prompt] for index in order],
            sampling_params=[sampling[index] for index in order],
        )
        found = {index: _generation(output, version) for index, output in zip(order, outputs, strict=True)}
        return [
            [found[start + sample] for sample in range(samples_per_prompt)]
            for start in range(0, len(found), samples_per_prompt)
        ]

    async def _ask(self, id: int, names: list[str], groups: list[int], **of_each: list[Any]) -> list[dict[str, Any]]:
        """SGLang's outputs of responses, in the order of `names`.

        Args:
            id: of the request that they belong to.
            names: SGLang's of them.
            groups: of the engine's ranks with attention of their own, the one that makes each.
            of_each: further arguments of `async_generate`, with an entry for each response.
        """
        asked, places = [], []
        for group in sorted(set(groups)):
            own = [place for place, other in enumerate(groups) if other == group]
            arguments: dict[str, Any] = {name: [values[place] for place in own] for name, values in of_each.items()}
            if self._groups > 1:
                arguments["routed_dp_rank"] = group
            asked.append(
                self._engine.async_generate(rid=[names[place] for place in own], return_logprob=True, **arguments)
            )
            places += own
        self._generating[id] = names
        try:
            outputs = [output for part in await asyncio.gather(*asked) for output in part]
        finally:
            del self._generating[id]
        return [output for _, output in sorted(zip(places, outputs, strict=True), key=lambda each: each[0])]

    async def submit(self, id: int, requests: list[ResponseRequest]) -> None:
        """Begin responses; each is told as it ends."""
        self._stream.submit(requests)

    async def abort(self, id: int, samples: list[int]) -> None:
        """Give responses up: each ends with what it has."""
        self._stream.abort(samples)

    async def under_way(self, id: int) -> dict[int, Response]:
        """What the responses under way have, by sample."""
        drawn = await self.call_ranks(id, Call("under_way", {}))
        return self._stream.so_far(drawn[0])

    async def logprobs(self, id: int, sequences: list[list[int]], firsts: list[int], top: int) -> list[GivenLogprobs]:
        """Log-probs of given tokens: each sequence is a prompt to which nothing is generated."""
        outputs = await self._ask(
            id,
            [f"{id}-{index}" for index in range(len(sequences))],
            [index % self._groups for index in range(len(sequences))],
            input_ids=sequences,
            sampling_params=[{"max_new_tokens": 0, "temperature": 1.0}] * len(sequences),
            # SGLang has none of the very first token that it is asked for.
            logprob_start_len=[first - 1 for first in firsts],
            top_logprobs_num=[top] * len(sequences),
        )
        return [_given_logprobs(output["meta_info"]) for output in outputs]

    @property
    def _version(self) -> int:
        return int(self._manager.server_args.weight_version)

    async def begin_weights(self, id: int, under_way: UnderWay) -> None:
        """Let no generation begin until `commit_weights`.

        Args:
            id: of the request.
            under_way: the fate of responses in flight.
        """
        if self._standstill is not None:
            return  # the last transfer was not committed: this one takes over from it
        pauses_scheduler = under_way in _KEEPING_CACHE
        if under_way == "wait":
            await self._wait_for_generations()
        elif under_way == "resend":
            # Not SGLang's own abort, which looks once a second whether all have ended.
            async with self._manager.is_pause_cond:
                self._manager.is_pause = True
            await self._stream.park()
        else:
            self._stream.continues()
            await self._pause("in_place" if under_way == "continue" else "retract")
        self._standstill = under_way
        if pauses_scheduler:
            # A pause has no answer, and calls of ranks take another socket, which may be quicker: the scheduler would
            # run one more batch on half-written weights. This request takes the socket of the pause, so its answer
            # comes after it.
            await self._manager.get_internal_state()
        # The batch in flight reads the weights to its end.
        await self.call_ranks(id, Call("settle", {"paused": pauses_scheduler}))

    async def _wait_for_generations(self) -> None:
        """Wait for generations in flight, and hold others back."""
        lock = self._manager.model_update_lock
        try:
            await lock.acquire_writer()
        except asyncio.CancelledError:
            await lock.acquire_reader()  # its release wakes those who wait behind us
            await lock.release_reader()
            raise

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
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._standstill is None:
            raise EngineError(f"version {version} was never begun")
        if VERSIONS_VARIABLE in os.environ:
            await self.call_ranks(id, Call("serve", {"version": version}))
        self._manager._update_weight_version_if_provided(str(version))
        under_way, self._standstill = self._standstill, None
        if under_way == "wait":
            await self._manager.model_update_lock.release_writer()
        else:
            await self._manager.continue_generation(ContinueGenerationReqInput())

    async def call_ranks(self, id: int, call: Call) -> list[Any]:
        """Call a method of EngineRank on every rank; their results in order of rank."""
        path = self._client.launch.run_directory / f"call-{id}"
        path.write_bytes(pickle.dumps(call))
        # To its end even where the request is given up: SGLang would take its answer for that of the next.
        await asyncio.shield(asyncio.create_task(self._on_ranks(path)))
        file = answers_path(path)
        if not file.exists():
            raise EngineError("the ranks gave no answers")
        answers: list[Answer] = pickle.loads(file.read_bytes())
        file.unlink()
        errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(answers) if each.error is not None]
        if errors:
            raise EngineError("; ".join(dict.fromkeys(errors)))
        return [each.result for each in answers]

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


def _order(prompts: int, samples: int, running: int) -> list[int]:
    """In which order to ask for samples, which are numbered prompt by prompt.

    A prompt is computed once for all its samples only where the first is under way before the others come. So of the
    prompts that run at the same time, the first samples come first. The others come prompt by prompt: a batch keeps
    this order, and a GPU whose processors read the same prompt's cache at the same time has it from its own cache.
    """
    block = max(1, running // samples)
    order: list[int] = []
    for start in range(0, prompts, block):
        together = range(start * samples, min(start + block, prompts) * samples)
        order += [index for index in together if index % samples == 0]
        order += [index for index in together if index % samples]
    return order


def _generation(output: dict[str, Any], first_version: int) -> Generation:
    meta = output["meta_info"]
    drawn = meta.get("output_token_logprobs") or []
    return Generation(
        token_ids=[int(token) for _, token, _ in drawn],
        logprobs=[float(logprob) for logprob, _, _ in drawn],
        finish_reason=meta["finish_reason"]["type"],
        weight_version=int(meta["weight_version"]),
        first_weight_version=first_version,
    )


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


def main() -> None:
    """`python -m engine3d.rollout.host.program FD`: serve the client at the other end of this inherited Unix socket."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    write_stacks_when_asked()
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

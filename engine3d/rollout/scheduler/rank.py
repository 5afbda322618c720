"""One rank of an engine, inside SGLang's scheduler process: it says where its weights lie and lets them be written.

The client reaches it through SGLang's `collective_rpc`, which calls a method of the scheduler by name on every rank but
brings no results back. A call and its results go between ranks over SGLang's process group, since they may be on
several hosts, and between the first rank and its host process through files of the engine's run directory.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine3d.errors import EngineError, UserError
from engine3d.platform import platform
from engine3d.rollout.host.generation import ADAPTER_VARIABLE
from engine3d.rollout.host.log import log_answered
from engine3d.rollout.requests import Response
from engine3d.rollout.scheduler.drafts import DRAFT_VARIABLE
from engine3d.rollout.scheduler.routes import routes_so_far
from engine3d.rollout.scheduler.versions import VERSIONS
from engine3d.run_files import open_own

if TYPE_CHECKING:
    from engine3d.models.precision import Precision
    from engine3d.reshard.describe.memory import SharedShards
    from engine3d.reshard.describe.shards import Location, RankShards
    from engine3d.reshard.describe.trace import LoadTrace
    from engine3d.reshard.plan.coordinate import ReceiveOrder
    from engine3d.reshard.transport.participant import Participant
    from engine3d.reshard.transport.program import CopyProgram
    from engine3d.reshard.transport.sender import Sent, Transport
    from engine3d.reshard.verify import BufferDifference


# The files in which trainer's ranks say where their weights lie: for each of the engine's ranks one path, or nothing
# between two os.pathsep.
SOURCES_VARIABLE = "ENGINE3D_ROLLOUT_WEIGHT_SOURCES"
SOURCES_TIMEOUT_VARIABLE = "ENGINE3D_ROLLOUT_WEIGHT_SOURCES_TIMEOUT_S"

# Set where the engine releases its weights with its memory.
RELEASE_VARIABLE = "ENGINE3D_ROLLOUT_RELEASE_WEIGHTS"

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one method of EngineRank on every rank."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankResult:
    """Outcome of a call on one rank: a result, or an error in one line."""

    result: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that a transfer's adapters belong to.

    Args:
        fingerprint: of its weights.
        sent: True if the transfer brought these, too.
    """

    fingerprint: str
    sent: bool


def answers_path(call: Path) -> Path:
    """File of the pickled outcomes of all ranks, in their order, which the first rank writes for the Call at `call`."""
    return call.with_suffix(".answers")


class EngineRank:
    """The weights of one rank, made after SGLang has loaded its model and before it captures CUDA graphs."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._aliased: dict[int, Any] = {}
        self._trace: LoadTrace | None = None
        self._adapter: LoadTrace | None = None
        self._drafting: LoadTrace | None = None
        """Trace of the layer that drafts, if transfers bring it."""
        self._base: str | None = None
        """Fingerprint of the model that a transfer brought, under adapters."""
        self._shards: RankShards | None = None
        self._participant: Participant | None = None
        self._program: CopyProgram | None = None
        self._scheduler: Any = None
        self.version = 0
        """Of the weights that forward passes read from here on."""
        source = weight_source(self.rank)
        if source is not None:
            self._bind(source)

    @property
    def rank(self) -> int:
        return int(self._runner.ps.tp_rank)

    def attach(self, scheduler: Any) -> None:
        """Know SGLang's scheduler of this rank, which is made after the model was loaded."""
        self._scheduler = scheduler

    @property
    def _local_rank(self) -> int:
        """Among the engine's ranks on this host, whose devices this process sees in this order."""
        arguments = self._runner.server_args
        return self.rank % int(arguments.tp_size // arguments.nnodes)

    def answer(self, path: str) -> None:
        """Make the Call at `path` on every rank, and write all RankResults next to it.

        Args:
            path: on the first rank's host.
        """
        group = self._runner.tp_group
        is_first = self.rank == 0
        calls: list[Call | None] = [pickle.loads(Path(path).read_bytes()) if is_first else None]
        if group.world_size > 1:
            torch.distributed.broadcast_object_list(calls, src=group.ranks[0], group=group.cpu_group)
        answers: list[RankResult | None] = [None] * group.world_size if is_first else []
        answer = self._answer(calls[0])
        if group.world_size > 1:
            torch.distributed.gather_object(answer, answers or None, dst=group.ranks[0], group=group.cpu_group)
        else:
            answers = [answer]
        if is_first:
            answers_path(Path(path)).write_bytes(pickle.dumps(answers))

    def _answer(self, call: Call | None) -> RankResult:
        assert call is not None
        try:
            return RankResult(getattr(self, call.method)(**call.arguments))
        except Exception as error:  # told to the client, which knows what to do about it
            log_answered()
            line = " ".join(str(error).split())
            known = isinstance(error, (UserError, EngineError))
            return RankResult(error=line if known else f"{type(error).__name__}: {line}")

    # What a Call may name

    def share(
        self, name: str, first_rank: int, locations: Sequence[Location] | None, *, drafts: bool = False
    ) -> SharedShards:
        """The rank's shards, with handles by which other processes of the node can map their memory.

        Args:
            name: how errors call the engine.
            first_rank: number of the engine's first rank among the ranks of all engines.
            locations: where each rank of the engine is, where the platform cannot know.
            drafts: True if transfers bring the layer that drafts, too.
        """
        from engine3d.reshard.describe.memory import SharedShards
        from engine3d.reshard.describe.shards import Location, RankShards

        self._drafting = self._trace_drafting() if drafts else None
        trace, pulls = self._described(), self._releases
        aliases = tuple(self._aliased.values())
        location = (
            locations[self.rank] if locations else Location(platform.node, platform.device_name(self._local_rank))
        )
        rank = first_rank + self.rank
        self._shards = RankShards(
            f"{name} rank {self.rank}", rank, location, trace.buffers, trace.holdings, aliases, owner=name
        )
        handles = tuple(
            None if pulls or index in self._aliased else platform.share_memory(tensor.untyped_storage())
            for index, tensor in enumerate(self._memory())
        )
        return SharedShards(self._shards, handles, pulls)

    def settle(self, paused: bool) -> None:
        """Return when no forward pass reads the weights any more.

        Args:
            paused: whether the scheduler was asked to begin none; otherwise there is nothing for one to be of.

        Raises:
            EngineError: the scheduler continues.
        """
        if paused and not self._scheduler._engine_paused:
            raise EngineError("the scheduler was asked to pause and continues; its weights cannot be written")
        platform.synchronize()

    def serve(self, version: int) -> None:
        """Forward passes that begin after this are of this version of the weights."""
        self.version = version

    def in_flight(self) -> dict[str, Response]:
        """Responses that have a token, by SGLang's names of their requests; empty but on the first rank."""
        return responses_in_flight(self._scheduler) if self.rank == 0 else {}

    def drop_unused_cache(self) -> None:
        """Drop the KV cache of earlier requests, and keep that of requests in flight."""
        drop_unused(self._scheduler)

    def connect(self, orders: Sequence[ReceiveOrder]) -> None:
        """Make ready for what this rank takes itself. `orders`: one for each rank of the engine."""
        from engine3d.reshard.plan.transfers import Link
        from engine3d.reshard.transport.participant import Participant, RankMemory
        from engine3d.reshard.transport.program import CopyProgram, Route
        from engine3d.reshard.transport.sender import mapped

        assert self._shards is not None, "share comes first"
        shards = self._shards
        self._let_go()
        order, memory = orders[self.rank], self._memory()
        if order.one_sided or order.collective is not None:  # not of memory that is the trainer's, which may be strided
            flat = [tensor.data.view(-1) for tensor in memory]
        if order.one_sided:
            sources = {index: mapped(shared) for index, shared in order.sources.items()}
            self._program = CopyProgram(
                [
                    Route(transfer.segments, sources[transfer.source], flat, near=transfer.link is Link.DEVICE)
                    for transfer in order.one_sided
                ]
            )
        if order.collective is not None:
            incoming = [transfer for message in order.collective.incoming for transfer in message.transfers]
            resident = {
                transfer.target: RankMemory(shards, flat) for transfer in incoming
            }  # all of it is for this rank
            self._participant = Participant(order.collective, memory[0].device, None, resident)

    def receive(self, version: int) -> dict[Transport, Sent]:
        """Take this rank's part of a version; return when all of it is there.

        Returns:
            What it read itself, as `WeightSender.send` says what it wrote.
        """
        from engine3d.reshard.transport.sender import Sent

        taken: dict[Transport, Sent] = {}
        if self._program is not None:
            start = time.perf_counter()
            self._program.run()
            platform.synchronize()
            taken["one_sided"] = Sent(self._program.nbytes, time.perf_counter() - start)
        if self._participant is not None:
            self._participant.run(version)
        return taken

    def forget_requests(self) -> None:
        """The memory of the KV cache is there again, with whatever: let no row of the table of requests point anywhere.

        A group of ranks that has nothing to do computes attention for rows that are nobody's, where others have to.
        """
        self._scheduler.req_to_token_pool.req_to_token.zero_()

    def restore(self) -> None:
        """The memory of released weights is there again: write what no transfer does, the zeros of padding."""
        trace = self._traced()
        loaded = sum(prod(stop - start for start, stop in holding.box) for holding in trace.holdings)
        if loaded < sum(buffer.elements for buffer in trace.buffers):
            self._trace_load()

    def seal(self, base: AdapterBase | None = None) -> None:
        """All weights are written: bring what SGLang derives from them up to date.

        Args:
            base: the model under adapters.

        Raises:
            EngineError: adapters came alone, and this rank has not the model that they belong to.
        """
        from engine3d.reshard.describe.adapter import scale_experts
        from engine3d.reshard.describe.trace import refresh_derived

        if base is not None and base.sent:
            self._base = base.fingerprint
        elif base is not None and self._base != base.fingerprint:
            raise EngineError(f"adapters of the model {base.fingerprint} came to an engine with {self._base or 'none'}")

        platform.synchronize()
        refresh_derived(self._runner.model)
        if self._drafting is not None:
            refresh_derived(self._drafting_model)
        if self._adapter is not None:
            scale_experts(self._runner.lora_manager)
        platform.synchronize()

    def weight_bytes(self) -> int:
        """Bytes of all parameters in this rank's own memory, those that draft included."""
        memory = self._memory(with_drafting=False)
        of_model = sum(tensor.nbytes for index, tensor in enumerate(memory) if index not in self._aliased)
        if DRAFT_VARIABLE not in os.environ:
            return of_model
        shared = self._shared_parameters()
        return of_model + sum(
            parameter.nbytes for name, parameter in self._drafting_model.named_parameters() if name not in shared
        )

    def verify(self, directory: str) -> list[BufferDifference]:
        """Compare what this rank holds with what SGLang's loader makes of a HuggingFace directory, bit for bit."""
        from engine3d.reshard.verify import adapter_differences, differences

        weights, path = self._traced(), Path(directory)
        differing = differences(self._runner.model, weights, path)
        if self._drafting is not None:
            differing += differences(self._drafting_model, self._drafting, path)
        if self._adapter is not None:
            differing += adapter_differences(self._runner.lora_manager, self._adapter, path)
        return differing

    # What they stand on

    def _bind(self, source: SharedShards) -> None:
        """Map parameters with the same bytes as the trainer's to the trainer's memory, and free their own."""
        from engine3d.reshard.describe.shards import RankShards
        from engine3d.reshard.describe.trace import rebind_views
        from engine3d.reshard.plan.aliases import find_aliases

        trace, memory = self._traced(), self._memory()
        target = RankShards("engine", self.rank, source.shards.location, trace.buffers, trace.holdings)
        storages: dict[int, torch.UntypedStorage] = {}
        for alias in find_aliases([source.shards], target):
            if alias.source_buffer not in storages:
                handle = source.handles[alias.source_buffer]
                assert handle is not None
                storages[alias.source_buffer] = platform.map_memory(handle)
            parameter = memory[alias.target_buffer]
            shape = trace.buffers[alias.target_buffer].shape
            view = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            view.set_(storages[alias.source_buffer], alias.offset, shape, alias.strides)
            parameter.data = view
            self._aliased[alias.target_buffer] = alias
        rebind_views(self._runner.model)
        platform.empty_cache()

    def _let_go(self) -> None:
        """Leave transfers: the group, and the memory of others."""
        self._program = None
        if self._participant is not None:
            self._participant.close()
            self._participant = None

    def _memory(self, *, with_drafting: bool = True) -> list[torch.Tensor]:
        """The memory of each buffer of the trace, as it is now."""
        from engine3d.reshard.verify import loadable_memory

        memory = loadable_memory(self._runner.model)
        adapter = self._adapter.tensors if self._adapter is not None else ()
        drafting: list[torch.Tensor] = []
        if with_drafting and self._drafting is not None:
            of_layer = loadable_memory(self._drafting_model)
            drafting = [of_layer[buffer.name] for buffer in self._drafting.buffers]
        return [*(memory[buffer.name] for buffer in self._traced().buffers), *adapter, *drafting]

    def _described(self) -> LoadTrace:
        """The trace of the weights, with that of the adapter or of the layer that drafts after it."""
        from engine3d.reshard.describe.adapter import adapter_trace, show_experts

        if self._drafting is not None:
            return _joined(self._traced(), self._drafting)
        if ADAPTER_VARIABLE not in os.environ:
            return self._traced()
        show_experts(self._runner.lora_manager)
        weights = self._traced()
        adapter = self._adapter = adapter_trace(self._runner.lora_manager, weights)
        return _joined(weights, adapter)

    @property
    def _drafting_model(self) -> Any:
        """SGLang's model of the layer that drafts."""
        return self._scheduler.draft_worker.draft_worker.draft_runner.model

    def _shared_parameters(self) -> list[str]:
        """Names of parameters of the layer that drafts which are the model's own memory: embedding and output layer."""
        served = {parameter.data_ptr() for parameter in self._runner.model.parameters()}
        named = self._drafting_model.named_parameters()
        return [name for name, parameter in named if parameter.data_ptr() in served]

    def _trace_drafting(self) -> LoadTrace:
        from engine3d.models import load_model_spec
        from engine3d.models.precision import served_tensors
        from engine3d.reshard.describe.trace import trace_load

        spec = load_model_spec(self._runner.model_config.model_path)
        tensors = served_tensors(replace(spec, mtp=True), self._runner.dtype, None)
        of_layer = {name: tensor for name, tensor in tensors.items() if name not in spec.hf_tensors}
        return replace(trace_load(self._drafting_model, of_layer, self._shared_parameters()), tensors=())

    def _traced(self) -> LoadTrace:
        if self._trace is None:
            # Without the tensors, which would keep memory that a parameter gives up when it is bound to the trainer's.
            self._trace = replace(self._trace_load(), tensors=())
        return self._trace

    def _trace_load(self) -> LoadTrace:
        from engine3d.models import load_model_spec
        from engine3d.models.precision import quantised_as, served_tensors
        from engine3d.reshard.describe.trace import trace_load

        config = self._runner.model_config
        spec = load_model_spec(config.model_path)
        precision: Precision | None = "fp8" if config.quantization == "fp8" else None
        if precision is not None:
            spec = quantised_as(spec, config.hf_config.quantization_config)
        return trace_load(self._runner.model, served_tensors(spec, self._runner.dtype, precision))

    @property
    def _releases(self) -> bool:
        """True if the weights lie in memory that SGLang's memory saver releases."""
        return RELEASE_VARIABLE in os.environ


def _joined(weights: LoadTrace, further: LoadTrace) -> LoadTrace:
    from engine3d.reshard.describe.trace import LoadTrace

    first = len(weights.buffers)
    moved = tuple(replace(holding, buffer=first + holding.buffer) for holding in further.holdings)
    return LoadTrace(weights.buffers + further.buffers, weights.holdings + moved)


def weight_source(rank: int) -> SharedShards | None:
    """Read the shared memory of the trainer's rank on the device of an engine's rank, once it was written.

    Returns:
        None where there is no such rank, or nothing is to be shared with it.

    Raises:
        EngineError: it did not write in time.
    """
    sources = os.environ.get(SOURCES_VARIABLE, "").split(os.pathsep)
    path = Path(sources[rank]) if rank < len(sources) and sources[rank] else None
    if path is None:
        return None
    timeout_s = float(os.environ[SOURCES_TIMEOUT_VARIABLE])
    end = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > end:
            raise EngineError(f"the trainer did not say within {timeout_s:g} s where its weights lie ({path})")
        time.sleep(_POLL_S)
    with open_own(path) as file:  # a pickle runs what it says: nobody else may have put it there
        shared: SharedShards = pickle.load(file)
    return shared


def responses_in_flight(scheduler: Any) -> dict[str, Response]:
    """The responses of SGLang's scheduler that have a token, by the names of their requests.

    A token whose forward pass still runs is not among them.
    """
    batches = [scheduler.running_batch, scheduler.last_batch]
    requests = [request for batch in batches if batch is not None for request in batch.reqs] + scheduler.waiting_queue
    responses = {}
    for request in requests:
        count = len(request.output_ids)
        if count and not request.finished():
            versions = (request.customized_info or {}).get(VERSIONS, [])
            logprobs = request.logprob.output_token_logprobs_val
            routes = routes_so_far(request, scheduler.req_to_token_pool)
            responses[request.rid] = Response(
                list(request.output_ids),
                [float(logprob) for logprob in logprobs],
                list(versions),
                routes=None if routes is None else routes.numpy(),
            )
    return responses


def drop_unused(scheduler: Any) -> None:
    """Evict from SGLang's prefix cache everything that no request uses."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=cache.evictable_size()))

"""Exchange of tokens and sums between the ranks that share experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.errors import EngineError, UserError
from engine3d.models.experts.permutation import LocalTokens, sum_partials
from engine3d.platform import platform
from engine3d.platform.peer_memory import PeerMemory


def _no_op() -> None:
    """Release nothing: no other tensor uses this one's memory."""


@dataclass(frozen=True)
class PendingTensor:
    """A tensor that the ranks are sending each other.

    Args:
        value: makes what is queued from now on wait for the tensor, and returns it. To be called once.
        done: to be called when all that reads the tensor has been queued. Another tensor may use its memory then.
        local: tokens of this rank, which are not in the tensor.
    """

    value: Callable[[], Tensor]
    done: Callable[[], None] = _no_op
    local: LocalTokens | None = None


class TokenDispatcher:
    """Collective operations of a group. Rank r has the r-th share of the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = group.size()

    def to_experts(self, scores: Tensor) -> PendingTensor:
        """(experts, T) of this rank's tokens -> (R, E, T) of this rank's experts."""
        return self._exchange(scores.view(self.ranks, -1, scores.shape[1]))

    def from_experts(self, scores: Tensor) -> PendingTensor:
        """(R, E, T) of this rank's experts -> (R, E, T) of this rank's tokens."""
        return self._exchange(scores)

    def chunks(self, tokens: Tensor) -> Sequence[Tensor]:
        """(T, ...) in chunks that are exchanged one after another, of as many tokens on every rank."""
        return (tokens,)

    def gather_ahead(self, tokens: Tensor) -> Sequence[PendingTensor] | None:
        """`gather` of all chunks; None where other tensors would come later for it."""
        return None

    def gather(self, tokens: Tensor) -> PendingTensor:
        """(T, H) of each rank, contiguous -> (R * T, H)."""
        if self.ranks == 1:
            return PendingTensor(lambda: tokens)
        result = tokens.new_empty(self.ranks * len(tokens), *tokens.shape[1:])
        return _pending(result, dist.all_gather_into_tensor(result, tokens, self._group, async_op=True))

    def reduce_scatter(self, partials: Tensor, into: Tensor | None = None) -> PendingTensor:
        """(R * T, H) of each rank -> (T, H), the sum over ranks of this rank's tokens.

        Args:
            into: existing tensor for the result.
        """
        if self.ranks == 1 and into is None:
            return PendingTensor(lambda: partials)
        result = partials.new_empty(len(partials) // self.ranks, *partials.shape[1:]) if into is None else into
        return _pending(result, dist.reduce_scatter_tensor(result, partials, group=self._group, async_op=True))

    def _exchange(self, tensor: Tensor) -> PendingTensor:
        if self.ranks == 1:
            return PendingTensor(lambda: tensor)
        result = torch.empty_like(tensor)
        return _pending(result, dist.all_to_all_single(result, tensor, group=self._group, async_op=True))


def _pending(result: Tensor, work: dist.Work) -> PendingTensor:
    def receive() -> Tensor:
        work.wait()
        return result

    return PendingTensor(receive)


class CopyEngineDispatcher(TokenDispatcher):
    """Copies of tokens and sums into the memory of the other ranks, all of one host.

    On GPUs copy engines make them, so that all processors compute meanwhile. A kernel of NCCL occupies some of them for
    as long as it runs. A grouped GEMM gives each processor its share before it begins, so that it ends only once it
    has had them all.

    Tokens are sent in two chunks. The second one's copies overlap with the computation of the first one, and the first
    one's sums with the computation of the second one.

    Sums are in float32, in the order of ranks, and rounded once.

    Args:
        group: several ranks.
        timeout_s: limit of each wait for another rank.
    """

    CHUNKS = 2
    TENSORS = 3
    """Tensors in flight at the same time: tokens of two chunks, and the sums of one."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group)
        _check_one_host(group)
        self._timeout_s = timeout_s
        self._free: list[PeerMemory] = []
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """Current size of this rank's memory that the others write into."""
        return sum(memory.nbytes for memory in self._free)

    def chunks(self, tokens: Tensor) -> Sequence[Tensor]:
        return tokens.tensor_split(min(self.CHUNKS, len(tokens)))

    def gather_ahead(self, tokens: Tensor) -> Sequence[PendingTensor]:
        return [self.gather(chunk) for chunk in self.chunks(tokens)]

    def gather(self, tokens: Tensor) -> PendingTensor:
        memory, shape = self._take(self.ranks * tokens.nbytes), (self.ranks, *tokens.shape)
        receive = _send(memory, shape, [(peer, tokens) for peer in self._others(memory.rank)])
        local = LocalTokens(tokens, memory.rank * len(tokens))
        return PendingTensor(lambda: receive().flatten(0, 1), lambda: self._release(memory), local)

    def reduce_scatter(self, partials: Tensor, into: Tensor | None = None) -> PendingTensor:
        by_rank = partials.unflatten(0, (self.ranks, -1))
        memory = self._take(partials.nbytes)
        mine = memory.rank
        receive = _send(memory, by_rank.shape, [(peer, by_rank[peer]) for peer in self._others(mine)])

        def total() -> Tensor:
            result = sum_partials(receive(), by_rank[mine], mine, into)
            self._release(memory)
            return result

        return PendingTensor(total)

    def _others(self, mine: int) -> list[int]:
        """The other ranks in the order in which this one copies to them: never two ranks to the same one at a time."""
        return [(mine + step) % self.ranks for step in range(1, self.ranks)]

    def _take(self, nbytes: int) -> PeerMemory:
        """Memory of at least `nbytes`, as many on every rank. All memory is allocated again where it is smaller."""
        if self._taken == self.TENSORS:
            raise EngineError(f"experts: more than {self.TENSORS} tensors are in flight between ranks")
        if not self._taken and (not self._free or self._free[0].nbytes < nbytes):
            platform.synchronize()  # the other ranks have read what they copied, and met this one
            self._free.clear()
            self._free = [platform.peer_memory(self._group, nbytes, self._timeout_s) for _ in range(self.TENSORS)]
        if self._free[-1].nbytes < nbytes:
            raise EngineError(
                f"experts: {nbytes} bytes are to be sent between ranks while tensors of {self._free[-1].nbytes} bytes "
                "are in flight"
            )
        self._taken += 1
        return self._free.pop()

    def _release(self, memory: PeerMemory) -> None:
        self._taken -= 1
        self._free.append(memory)


def _send(memory: PeerMemory, shape: Sequence[int], blocks: Sequence[tuple[int, Tensor]]) -> Callable[[], Tensor]:
    """Queue copies of blocks to other ranks, each to this rank's index of `shape`, (ranks, ...).

    Returns:
        a function that makes the current stream wait for all that the ranks send, and returns what this rank received.
    """
    dtype = blocks[0][1].dtype
    copies = [(memory.of(peer, shape, dtype)[memory.rank], block) for peer, block in blocks]
    memory.meet()
    wait = memory.copy(copies)

    def receive() -> Tensor:
        wait()
        memory.meet()
        return memory.of(memory.rank, shape, dtype)

    return receive


def _check_one_host(group: dist.ProcessGroup) -> None:
    """Refuse a group with ranks of several hosts.

    Raises:
        UserError: names two of them.
    """
    nodes: list[str] = [""] * group.size()
    dist.all_gather_object(nodes, platform.node, group)
    if other := next((node for node in nodes if node != nodes[0]), None):
        raise UserError(
            f"train.copy_engine_dispatcher=true: ranks that share experts are on {nodes[0]} and on {other}; expected "
            "one host, or false"
        )


_dispatchers: dict[str, CopyEngineDispatcher] = {}


def copy_engine_dispatcher(group: dist.ProcessGroup, timeout_s: float) -> TokenDispatcher:
    """The dispatcher of a group. All layers share it, because they share its memory."""
    if group.size() == 1:
        return TokenDispatcher(group)
    if group.group_name not in _dispatchers:
        _dispatchers[group.group_name] = CopyEngineDispatcher(group, timeout_s)
    return _dispatchers[group.group_name]


def release() -> None:
    """Forget the dispatchers of groups that are to end, with their memory."""
    _dispatchers.clear()


def forget_pass(module: torch.nn.Module) -> None:
    """Drop the tensors of the last pass that Megatron-Core's token dispatchers keep.

    Their graph has hooks on the parameters, and the hooks refer to the model: a cycle that no garbage collector sees.

    Args:
        module: a model that makes no pass any more.
    """
    for layer in module.modules():
        dispatcher = vars(layer).get("token_dispatcher")
        for name, value in list(vars(dispatcher).items()) if dispatcher is not None else ():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)

"""How ranks that share experts give each other their tokens, and sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.errors import EngineError, UserError
from engine3d.models.experts.rows import Apart, add_parts
from engine3d.platform import platform
from engine3d.platform.peer_memory import PeerMemory


def _nothing() -> None:
    """The tensor's memory is its own."""


@dataclass(frozen=True)
class Coming:
    """A tensor that the ranks are sending each other.

    Args:
        value: has what is queued from now on wait for the tensor, and returns it. To be called once.
        done: to be called when all that reads the tensor has been queued: its memory may be used for another one then.
        apart: what is not in the tensor, as this rank has it already.
    """

    value: Callable[[], Tensor]
    done: Callable[[], None] = _nothing
    apart: Apart | None = None


class Way:
    """By collective operations of a group, whose ranks have the experts one after another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = group.size()

    def to_experts(self, scores: Tensor) -> Coming:
        """(experts, T) of this rank's tokens -> (R, E, T) of this rank's experts."""
        return self._exchange(scores.view(self.ranks, -1, scores.shape[1]))

    def from_experts(self, scores: Tensor) -> Coming:
        """The other way."""
        return self._exchange(scores)

    def pieces(self, tokens: Tensor) -> Sequence[Tensor]:
        """(T, ...) as the parts that go between ranks one after another, of as many tokens on every rank."""
        return (tokens,)

    def gather_ahead(self, tokens: Tensor) -> Sequence[Coming] | None:
        """`gather` of all pieces, if they may come before other tensors without these coming later for it."""
        return None

    def gather(self, tokens: Tensor) -> Coming:
        """(T, H) of each rank, contiguous -> (R * T, H)."""
        if self.ranks == 1:
            return Coming(lambda: tokens)
        result = tokens.new_empty(self.ranks * len(tokens), *tokens.shape[1:])
        return _collected(result, dist.all_gather_into_tensor(result, tokens, self._group, async_op=True))

    def add_up(self, parts: Tensor, into: Tensor | None = None) -> Coming:
        """(R * T, H) of each rank -> (T, H), the sum over ranks of this rank's tokens.

        Args:
            into: where that is written, if it is to be in a tensor that is there already.
        """
        if self.ranks == 1 and into is None:
            return Coming(lambda: parts)
        result = parts.new_empty(len(parts) // self.ranks, *parts.shape[1:]) if into is None else into
        return _collected(result, dist.reduce_scatter_tensor(result, parts, group=self._group, async_op=True))

    def _exchange(self, tensor: Tensor) -> Coming:
        if self.ranks == 1:
            return Coming(lambda: tensor)
        result = torch.empty_like(tensor)
        return _collected(result, dist.all_to_all_single(result, tensor, group=self._group, async_op=True))


def _collected(result: Tensor, work: dist.Work) -> Coming:
    def receive() -> Tensor:
        work.wait()
        return result

    return Coming(receive)


class CopyingWay(Way):
    """Tokens and sums by copies into the memory of the other ranks, all of one host.

    On GPUs copy engines make them, and leave the processors to what is computed meanwhile. A kernel of NCCL takes some
    of these for as long as it runs, and a product over all experts, which gives each processor its share before it
    begins, ends no sooner than it has had them all.

    Tokens go in two pieces: the second one's copies run beside what is computed of the first one, and its sums beside
    what is computed of the second one.

    Sums are in float32, in the order of ranks, and rounded once.

    Args:
        group: of several ranks.
        timeout_s: of waits for another rank.
    """

    PIECES = 2
    TENSORS = 3
    """On their way at the same time: tokens of two pieces, and the sums of one."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group)
        _check_one_host(group)
        self._timeout_s = timeout_s
        self._free: list[PeerMemory] = []
        self._taken = 0

    @property
    def nbytes(self) -> int:
        """Memory of this rank that the others write into, now."""
        return sum(memory.nbytes for memory in self._free)

    def pieces(self, tokens: Tensor) -> Sequence[Tensor]:
        return tokens.tensor_split(min(self.PIECES, len(tokens)))

    def gather_ahead(self, tokens: Tensor) -> Sequence[Coming]:
        return [self.gather(piece) for piece in self.pieces(tokens)]

    def gather(self, tokens: Tensor) -> Coming:
        memory, shape = self._take(self.ranks * tokens.nbytes), (self.ranks, *tokens.shape)
        receive = _send(memory, shape, [(peer, tokens) for peer in self._others(memory.rank)])
        apart = Apart(tokens, memory.rank * len(tokens))
        return Coming(lambda: receive().flatten(0, 1), lambda: self._give_back(memory), apart)

    def add_up(self, parts: Tensor, into: Tensor | None = None) -> Coming:
        of_ranks = parts.unflatten(0, (self.ranks, -1))
        memory = self._take(parts.nbytes)
        mine = memory.rank
        receive = _send(memory, of_ranks.shape, [(peer, of_ranks[peer]) for peer in self._others(mine)])

        def total() -> Tensor:
            result = add_parts(receive(), of_ranks[mine], mine, into)
            self._give_back(memory)
            return result

        return Coming(total)

    def _others(self, mine: int) -> list[int]:
        """The other ranks in the order in which this one copies to them: never two ranks to the same one at a time."""
        return [(mine + step) % self.ranks for step in range(1, self.ranks)]

    def _take(self, nbytes: int) -> PeerMemory:
        """Memory of at least so many bytes; every rank asks for as many. All is made anew where there is less."""
        if self._taken == self.TENSORS:
            raise EngineError(f"experts: more than {self.TENSORS} tensors are on their way between ranks")
        if not self._taken and (not self._free or self._free[0].nbytes < nbytes):
            platform.synchronize()  # the other ranks have read what they copied, and met this one
            self._free.clear()
            self._free = [platform.peer_memory(self._group, nbytes, self._timeout_s) for _ in range(self.TENSORS)]
        if self._free[-1].nbytes < nbytes:
            raise EngineError(f"experts: {nbytes} bytes are to go between ranks beside {self._free[-1].nbytes}")
        self._taken += 1
        return self._free.pop()

    def _give_back(self, memory: PeerMemory) -> None:
        self._taken -= 1
        self._free.append(memory)


def _send(memory: PeerMemory, shape: Sequence[int], parts: Sequence[tuple[int, Tensor]]) -> Callable[[], Tensor]:
    """Have parts come to other ranks, each as this rank's of `shape`, (ranks, ...).

    Returns:
        What has the current stream wait for all that the ranks send, and gives what this one has been sent.
    """
    dtype = parts[0][1].dtype
    copies = [(memory.of(peer, shape, dtype)[memory.rank], part) for peer, part in parts]
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
    if other := next((each for each in nodes if each != nodes[0]), None):
        raise UserError(
            f"train.expert_copies=true: ranks that share experts are on {nodes[0]} and on {other}; expected one host, "
            "or false"
        )


_copying: dict[str, CopyingWay] = {}


def copying_way(group: dist.ProcessGroup, timeout_s: float) -> Way:
    """That of a group, the same one for all layers, because its memory is."""
    if group.size() == 1:
        return Way(group)
    if group.group_name not in _copying:
        _copying[group.group_name] = CopyingWay(group, timeout_s)
    return _copying[group.group_name]


def release() -> None:
    """Forget the ways of groups that are to end, with their memory."""
    _copying.clear()

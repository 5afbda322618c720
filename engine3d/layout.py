"""Layout of a model over ranks: sizes, and the coordinates of every rank.

The rank order is Megatron-Core's default, "tp-cp-ep-dp-pp": neighbouring ranks share a tensor-parallel group, and
pipeline stages lie furthest apart. Dense and expert layers cut the same ranks of a stage in two ways:

    dense    tp x cp x dp          (tp fastest)
    expert   etp x ep x edp        (etp fastest), with etp * ep * edp = tp * cp * dp

A rank has `vpp` model chunks. Layers pass through the first chunk of each stage, then through the second of each, and
so on: virtual stage `chunk * pp + stage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate

from engine3d.errors import UserError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Coordinates of a rank in a layout. Every field counts from zero."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of the six parallel dimensions, and the split of layers over pipeline stages.

    Args:
        tp: tensor parallel size of dense layers.
        pp: pipeline stages.
        ep: expert parallel size.
        etp: tensor parallel size of expert layers.
        cp: context parallel size.
        dp: data parallel size: complete copies of the dense layers.
        vpp: virtual stages of each pipeline stage, each a model chunk of its ranks (interleaved schedule).
        stages: layers of each of the pp * vpp virtual stages, in the order in which layers pass through them; None for
            stages of similar cost (`balanced_stages`).

    Raises:
        UserError: a size below one, expert sizes that do not divide the ranks of a stage, virtual stages without a
            pipeline, or another number of `stages`.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int = 1
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name != "stages" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise UserError(f"layout: {field.name}={size!r}, expected a whole number of at least 1")
        self._check_stages()
        if self.stage_size % (self.etp * self.ep):
            raise UserError(
                f"layout: etp*ep = {self.etp}*{self.ep} = {self.etp * self.ep} does not divide the "
                f"tp*cp*dp = {self.tp}*{self.cp}*{self.dp} = {self.stage_size} ranks of a pipeline stage"
            )

    def _check_stages(self) -> None:
        if self.vpp > 1 and self.pp == 1:
            raise UserError(f"layout: vpp={self.vpp} with pp=1: expected vpp=1, or pp of at least 2")
        if self.stages is None:
            return
        text = ",".join(map(str, self.stages))
        if len(self.stages) != self.virtual_stages:
            raise UserError(
                f"layout: stages={text} has {len(self.stages)} stages, expected "
                f"pp*vpp = {self.pp}*{self.vpp} = {self.virtual_stages}"
            )
        if min(self.stages) < 1:
            stage = next(number for number, layers in enumerate(self.stages) if layers < 1)
            raise UserError(f"layout: stages={text}: stage {stage} has no layers, expected at least 1 in each")

    @classmethod
    def of_world(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int = 1,
        cp: int = 1,
        vpp: int = 1,
        stages: tuple[int, ...] | None = None,
    ) -> Layout:
        """The layout that fills world_size ranks: dp is what the other sizes leave.

        Raises:
            UserError: tp*pp*cp does not divide world_size, or the sizes are not a layout.
        """
        model = tp * pp * cp
        if min(tp, pp, cp) < 1 or world_size < 1 or world_size % model:
            raise UserError(f"layout: tp*pp*cp = {tp}*{pp}*{cp} = {model} does not divide the {world_size} ranks")
        return cls(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, dp=world_size // model, vpp=vpp, stages=stages)

    @property
    def virtual_stages(self) -> int:
        """Model chunks that a token passes through: those of all pipeline stages."""
        return self.pp * self.vpp

    @property
    def micro_batch_group(self) -> int:
        """Micro-batches that pass through a chunk before the next chunk's turn; their number is a multiple of it."""
        return self.pp if self.vpp > 1 else 1

    def bubble(self, micro_batches: int) -> float:
        """Time for which a rank waits for other stages in an update, over the time for which it computes.

        (pp - 1) / (vpp * micro_batches), with stages and micro-batches of the same cost (Narayanan et al. 2021,
        arXiv 2104.04473, section 2.2).
        """
        return (self.pp - 1) / (self.vpp * micro_batches)

    def passes_ahead(self, pp: int) -> int:
        """Forward passes of a rank before its first backward pass, but for that one's own.

        An update of enough micro-batches in Megatron-Core's schedules (`schedules.get_pp_rank_microbatches`). Each
        model chunk has a forward pass of each micro-batch.
        """
        after = self.pp - 1 - pp
        return after if self.vpp == 1 else 2 * after + (self.vpp - 1) * self.pp

    def in_flight(self, pp: int) -> tuple[tuple[int, ...], ...]:
        """Micro-batches of each model chunk of a rank between forward and backward pass, at each moment of a period.

        A moment is the end of a forward pass, from the last one before the first backward pass on. From there on a
        backward and a forward pass follow in turn. Forward passes go through the chunks with pp micro-batches at a
        time, backward passes in the opposite order.
        """
        forward, backward = [0] * self.vpp, [0] * self.vpp
        moments = []
        for number in range(self.passes_ahead(pp) + self.virtual_stages):
            forward[number // self.pp % self.vpp] += 1
            step = number - self.passes_ahead(pp)
            if step >= 0:
                moments.append(tuple(begun - done for begun, done in zip(forward, backward, strict=True)))
                backward[self.vpp - 1 - step // self.pp % self.vpp] += 1
        return tuple(dict.fromkeys(moments))

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.stage_size // (self.etp * self.ep)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a rank.

        Raises:
            UserError: rank outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise UserError(f"layout: rank {rank} is outside the world of {self.world_size}")
        pp, within = divmod(rank, self.stage_size)
        dp, dense = divmod(within, self.tp * self.cp)
        cp, tp = divmod(dense, self.tp)
        edp, expert = divmod(within, self.etp * self.ep)
        ep, etp = divmod(expert, self.etp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at the given dense coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def tensor_groups(self) -> list[range]:
        """The ranks of each tensor-parallel group of dense layers."""
        return [range(first, first + self.tp) for first in range(0, self.world_size, self.tp)]

    def expert_groups(self) -> list[range]:
        """The ranks of each group that holds every expert once: expert- and expert-tensor-parallel."""
        size = self.etp * self.ep
        return [range(first, first + size) for first in range(0, self.world_size, size)]

    def ranks(self) -> Iterator[tuple[int, Coordinates]]:
        """Every rank with its coordinates."""
        for rank in range(self.world_size):
            yield rank, self.coordinates(rank)

    def __str__(self) -> str:
        sizes = [
            f"{field.name}={size}" for field in fields(self) if (size := getattr(self, field.name)) not in (1, None)
        ]
        return " ".join(sizes).replace(", ", ",") or "one rank"


@lru_cache(maxsize=64)
def balanced_stages(costs: tuple[int, ...], head: int, stages: int) -> tuple[int, ...]:
    """Split layers into consecutive stages, so that the most costly one costs as little as it can.

    Of such splits it is one whose stages cost about the same. Where several do, the first stages have as few layers as
    they can: the first has the embedding, and the earlier a stage, the more micro-batches are in flight on it.

    Args:
        costs: of each layer, in any unit.
        head: cost of the output layer, which the last stage has, in the same unit.
        stages: at most as many as there are layers.

    Returns:
        Layers of each stage, at least 1.
    """
    count = len(costs)
    until = [0, *accumulate(costs)]
    until[count] += head
    # By first layer, of the stages from one on: their largest cost, the sum of squares, and the layers of each.
    splits: dict[int, tuple[int, int, tuple[int, ...]]] = {count: (0, 0, ())}
    for stage in reversed(range(stages)):
        lasts, splits = splits, {}
        for first in [0] if stage == 0 else range(stage, count - (stages - stage) + 1):
            for last in sorted(last for last in lasts if last > first):
                cost = until[last] - until[first]
                largest, squares, layers = lasts[last]
                largest, squares = max(largest, cost), squares + cost**2
                if first not in splits or (largest, squares) < splits[first][:2]:
                    splits[first] = largest, squares, (last - first, *layers)
    return splits[0][2]

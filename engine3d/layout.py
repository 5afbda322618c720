"""How a model is cut over ranks: sizes, and the coordinates of every rank.

The rank order is Megatron-Core's default, "tp-cp-ep-dp-pp": neighbouring ranks share a tensor-parallel group, and
pipeline stages lie furthest apart. Dense and expert layers cut the same ranks of a stage in two ways:

    dense    tp x cp x dp          (tp fastest)
    expert   etp x ep x edp        (etp fastest), with etp * ep * edp = tp * cp * dp
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from engine3d.errors import UserError


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands in a layout. Every field counts from zero."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of the six parallel dimensions.

    Args:
        tp: tensor parallel size of dense layers.
        pp: pipeline stages.
        ep: expert parallel size.
        etp: tensor parallel size of expert layers.
        cp: context parallel size.
        dp: data parallel size: whole copies of the dense layers.

    Raises:
        UserError: a size below one, or expert sizes that do not divide the ranks of a stage.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"layout: {field.name}={size!r}, expected a whole number of at least 1")
        if self.stage_size % (self.etp * self.ep):
            raise UserError(
                f"layout: etp*ep = {self.etp}*{self.ep} = {self.etp * self.ep} does not divide the "
                f"tp*cp*dp = {self.tp}*{self.cp}*{self.dp} = {self.stage_size} ranks of a pipeline stage"
            )

    @classmethod
    def of_world(cls, world_size: int, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, cp: int = 1) -> Layout:
        """The layout that fills world_size ranks: dp is what the other sizes leave.

        Raises:
            UserError: tp*pp*cp does not divide world_size, or the sizes are not a layout.
        """
        model = tp * pp * cp
        if min(tp, pp, cp) < 1 or world_size < 1 or world_size % model:
            raise UserError(f"layout: tp*pp*cp = {tp}*{pp}*{cp} = {model} does not divide the {world_size} ranks")
        return cls(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, dp=world_size // model)

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
        sizes = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        return " ".join(size for size in sizes if not size.endswith("=1")) or "one rank"

"""Sequences of different lengths as arguments of a call, and their micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine3d.errors import UserError
from engine3d.models.attention.context_parallel import rank_order
from engine3d.models.experts.routes import TokenRoutes
from engine3d.training.passes.micro_batch_plan import padded_length

CHOSEN = "chosen_tokens"
"""Column (T, k) int64 of k further tokens at each position whose log-probs are requested. The model reads it, and the
loss function gets it like any other column."""

WEIGHTS = "weights"
"""Column (T,) of each token's weight in the loss. Of a layer for multi-token prediction, which learns without weights,
it says which tokens it learns: those whose weight is not 0, or all without the column."""


@dataclass(frozen=True)
class Sequences:
    """N sequences laid end to end, T tokens in all, with any number of per-token columns.

    A per-token value is stored at its token: the log-prob at t is that of token t given those before it, the value at t
    that of the state in which token t was chosen.

    Args:
        tokens: (T,) int64 token ids.
        lengths: (N,) int64 tokens of each sequence, at least 1 each.
        columns: name to (T,) tensor, or (T, k) with k values of each token.
        names: of the sequences in errors; numbers if absent.
        routes: experts of each token, by sequence (`models.experts.routes`); None if the routers choose.

    Raises:
        UserError: lengths that do not add up to T, an empty sequence, or a column or routes of another length.
    """

    tokens: Tensor
    lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    names: Sequence[str] = ()
    routes: TokenRoutes | None = None

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if total != self.tokens.numel():
            raise UserError(f"sequences: lengths add up to {total} tokens, {self.tokens.numel()} were given")
        if self.lengths.numel() and int(self.lengths.min()) < 1:
            raise UserError(f"sequences: sequence {int(self.lengths.argmin())} is empty")
        if (
            self.routes is not None
            and (lengths := [len(rows) for rows in self.routes.samples]) != self.lengths.tolist()
        ):
            raise UserError(f"sequences: routes of {lengths} tokens, expected {self.lengths.tolist()}")
        for name, column in self.columns.items():
            if column.shape[:1] != self.tokens.shape or column.dim() > 2:
                raise UserError(
                    f"sequences: column {name!r} has shape {tuple(column.shape)}, expected ({total},) or ({total}, k)"
                )

    def __len__(self) -> int:
        return self.lengths.numel()

    def name(self, number: int) -> str:
        """Name of a sequence in errors."""
        return self.names[number] if self.names else f"sequence {number}"

    def offsets(self) -> list[int]:
        """N + 1 positions: where each sequence starts, and the end."""
        return [0, *torch.cumsum(self.lengths, 0).tolist()]

    @staticmethod
    def of(samples: Sequence[Sequence[int]], **columns: Tensor) -> Sequences:
        """Sequences from lists of token ids."""
        lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int64)
        tokens = torch.tensor([token for sample in samples for token in sample], dtype=torch.int64)
        return Sequences(tokens, lengths, dict(columns))


@dataclass(frozen=True)
class MicroBatch:
    """Sequences as input of the model: packed (1, S), or one a row (B, S), padded at the end.

    With context parallelism each rank has S / cp of the positions of packed sequences: of split ones in the order of
    `rank_order`, or else complete sequences. A flat position is then an index into the outputs of all cp ranks, those
    of rank 0 first.

    Args:
        input_ids, position_ids, targets: (B, S / cp) int64; the target at a position is the token after it.
        sequences: (B, S / cp) int32 number of each position's sequence among those of the micro-batch; -1 for padding.
        cu_seqlens: (K + 1,) int32 bounds of the packed sequences of this rank, padding as a last one; None where one a
            row. Of split sequences those of all ranks, with the padding of each sequence.
        max_length: tokens of the longest of these, with its padding.
        source: (T,) int64 flat position at which each real token's outputs are computed, -1 for first tokens.
        flat: (T,) int64 position of each real token in the tokens that were cut.
        members: (T,) int64 number of each real token's sequence among those of the micro-batch.
        last: (K,) int64 flat position of the last token of each sequence.
        indices: the numbers that the sequences have among those that were cut.
        columns: name to (T,) or (T, k) tensor, of the real tokens.
        cp: ranks that share the micro-batch.
        cp_rank: this rank of them.
        split: True if each sequence is split over these ranks.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    sequences: Tensor
    cu_seqlens: Tensor | None
    max_length: int
    source: Tensor
    flat: Tensor
    members: Tensor
    last: Tensor
    indices: tuple[int, ...]
    columns: dict[str, Tensor]
    cp: int = 1
    cp_rank: int = 0
    split: bool = False

    @property
    def positions(self) -> int:
        """Number of positions that the ranks which share the micro-batch compute, padding included."""
        return self.input_ids.numel() * self.cp

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""

        def moved(tensor: Tensor) -> Tensor:
            # A copy from other memory waits for all queued work, so that the host is no longer ahead of the GPU.
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return replace(
            self,
            input_ids=moved(self.input_ids),
            position_ids=moved(self.position_ids),
            targets=moved(self.targets),
            sequences=moved(self.sequences),
            cu_seqlens=None if self.cu_seqlens is None else moved(self.cu_seqlens),
            source=moved(self.source),
            members=moved(self.members),
            last=moved(self.last),
            columns={name: moved(column) for name, column in self.columns.items()},
        )

    def at_tokens(self, computed: Tensor) -> Tensor:
        """(B * S,) outputs for next tokens -> (T,) outputs of the real tokens; 0 at first tokens, which have none.

        (B * S, k) outputs -> (T, k).
        """
        outputs = computed[self.source.clamp(min=0)]
        real = self.source.view(-1, *[1] * (outputs.dim() - 1)) >= 0
        return torch.where(real, outputs, torch.zeros_like(outputs))

    def at_positions(self, column: Tensor) -> Tensor:
        """(T, k) column of the real tokens -> (B * S / cp, k) at this rank's positions; 0 elsewhere."""
        placed = column.new_zeros(self.positions + 1, *column.shape[1:])
        placed[self.source] = column  # those of first tokens, at -1, go to the end, which is cut off
        return placed[:-1].chunk(self.cp)[self.cp_rank]

    def at_ends(self, computed: Tensor) -> Tensor:
        """(B, S) outputs -> (K,) those at the last token of each sequence."""
        return computed.reshape(-1)[self.last]


def micro_batch(
    sequences: Sequences,
    shares: Sequence[Sequence[int]],
    *,
    packed: bool,
    multiple: int,
    positions: int = 0,
    cp: int = 1,
    cp_rank: int = 0,
) -> MicroBatch:
    """Build a micro-batch, with a length padded to a multiple of `multiple`.

    Args:
        shares: indices of its sequences: of each context-parallel rank's, or one share of all (`MicroBatchPlan`).
        packed: lay the sequences end to end; otherwise one a row, in one share.
        multiple: with context parallelism a multiple of 2 * cp.
        positions: of a packed one, a multiple of `multiple`; `packed_positions` if that is more.
        cp: ranks that share the packed sequences.
        cp_rank: the rank whose positions are taken.
    """
    indices, offsets = [index for share in shares for index in share], sequences.offsets()
    spans = [(offsets[index], offsets[index + 1]) for index in indices]
    lengths = [end - start for start, end in spans]
    flat = torch.cat([torch.arange(start, end) for start, end in spans] or [torch.empty(0, dtype=torch.int64)])
    bounds: list[int] = []
    if packed:
        of_all = sequences.lengths.tolist()
        rows, width = 1, max(positions, packed_positions(of_all, shares, multiple=multiple, cp=cp))
        starts, bounds = _laid_out(of_all, shares, width, cp)
    else:
        rows, width = max(1, len(lengths)), _padded(max(lengths, default=0), multiple)
        starts = [row * width for row in range(len(lengths))]

    input_ids, targets = torch.zeros(2, rows * width, dtype=torch.int64)
    position_ids = torch.arange(width).repeat(rows)
    numbers = torch.full((rows * width,), -1, dtype=torch.int32)
    source = torch.empty(len(flat), dtype=torch.int64)
    at = 0
    for number, (start, (first, last), length) in enumerate(zip(starts, spans, lengths, strict=True)):
        tokens = sequences.tokens[first:last]
        input_ids[start : start + length] = tokens
        targets[start : start + length - 1] = tokens[1:]
        numbers[start : start + length] = number
        source[at : at + length] = torch.arange(start - 1, start + length - 1)
        source[at] = -1
        at += length

    cu_seqlens = None
    longest = max(lengths, default=0)
    if packed:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        longest = int(cu_seqlens.diff().max())
        position_ids = torch.cat([torch.arange(length) for length in cu_seqlens.diff().tolist()])
    batch = MicroBatch(
        input_ids=input_ids.view(rows, width),
        position_ids=position_ids.view(rows, width),
        targets=targets.view(rows, width),
        sequences=numbers.view(rows, width),
        cu_seqlens=cu_seqlens,
        max_length=longest,
        source=source,
        flat=flat,
        members=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        last=torch.tensor(starts, dtype=torch.int64) + torch.tensor(lengths, dtype=torch.int64) - 1,
        indices=tuple(indices),
        columns={name: column[flat] for name, column in sequences.columns.items()},
    )
    return batch if cp == 1 else _on_rank(batch, cp, cp_rank, split=len(shares) == 1)


def packed_positions(lengths: Sequence[int], shares: Sequence[Sequence[int]], *, multiple: int, cp: int) -> int:
    """Positions of a packed micro-batch: a multiple of `multiple`, as many on each rank.

    Args:
        lengths: tokens of each sequence, by index.
        shares: as `micro_batch` takes them; `multiple` and `cp` likewise.
    """
    ranks = cp // len(shares)
    longest = max(sum(padded_length(lengths[index], ranks) for index in share) for share in shares)
    return len(shares) * _padded(longest, multiple // len(shares))


def _laid_out(
    lengths: Sequence[int], shares: Sequence[Sequence[int]], width: int, cp: int
) -> tuple[list[int], list[int]]:
    """The first position of each sequence of a packed micro-batch, and the bounds of sequences and padding."""
    starts, bounds = list[int](), {0}
    for number, share in enumerate(shares, 1):
        at = (number - 1) * width // len(shares)
        for index in share:
            starts.append(at)
            bounds.add(at)
            at += padded_length(lengths[index], cp // len(shares))
        bounds |= {at, number * width // len(shares)}
    return starts, sorted(bounds)


def _on_rank(batch: MicroBatch, cp: int, cp_rank: int, *, split: bool) -> MicroBatch:
    """One rank's positions of a packed micro-batch."""
    assert batch.cu_seqlens is not None
    bounds, source, last = batch.cu_seqlens, batch.source, batch.last
    shard = torch.arange(batch.positions).chunk(cp)[cp_rank]
    if split:
        order = rank_order(bounds, batch.positions, cp)
        flat_position = torch.empty_like(order)
        flat_position[order] = torch.arange(len(order))
        source, last = flat_position[source].where(source >= 0, -1), flat_position[last]
        shard = order.chunk(cp)[cp_rank]
    else:
        first = int(shard[0])
        bounds = bounds[(bounds >= first) & (bounds <= first + len(shard))] - first
    return replace(
        batch,
        input_ids=batch.input_ids[:, shard],
        position_ids=batch.position_ids[:, shard],
        targets=batch.targets[:, shard],
        sequences=batch.sequences[:, shard],
        cu_seqlens=bounds,
        max_length=int(bounds.diff().max()),
        source=source,
        last=last,
        cp=cp,
        cp_rank=cp_rank,
        split=split,
    )


def _padded(length: int, multiple: int) -> int:
    return max(1, -(-length // multiple)) * multiple

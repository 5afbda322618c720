"""Sequences of different lengths: how a call hands them over, and how they are cut into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine3d.errors import UserError

CHOSEN = "chosen_tokens"
"""A column (T, k) int64 by which callers ask for the log-probs of k further tokens in the place of each token. It is
read by the model, and the loss function gets it like any other column."""

# The lowest limit of cost is then known to a thousandth of the span in which it can lie.
_HALVINGS = 10


@dataclass(frozen=True)
class Sequences:
    """N sequences laid end to end, T tokens in all, with any number of per-token columns.

    A per-token figure lies at the token that it is about: the log-prob at t is that of token t given those before it,
    the value at t that of the state in which token t was chosen.

    Args:
        tokens: (T,) int64 token ids.
        lengths: (N,) int64 tokens of each sequence, at least 1 each.
        columns: name to (T,) tensor, or (T, k) with k figures of each token.

    Raises:
        UserError: lengths that do not add up to T, an empty sequence, or a column of another length.
    """

    tokens: Tensor
    lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if total != self.tokens.numel():
            raise UserError(f"sequences: lengths add up to {total} tokens, {self.tokens.numel()} were given")
        if self.lengths.numel() and int(self.lengths.min()) < 1:
            raise UserError(f"sequences: sequence {int(self.lengths.argmin())} is empty")
        for name, column in self.columns.items():
            if column.shape[:1] != self.tokens.shape or column.dim() > 2:
                raise UserError(
                    f"sequences: column {name!r} has shape {tuple(column.shape)}, expected ({total},) or ({total}, k)"
                )

    def __len__(self) -> int:
        return self.lengths.numel()

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
    """Sequences in the form in which the model reads them: packed (1, S), or one a row (B, S), padded at the end.

    Args:
        input_ids, position_ids, targets: (B, S) int64; the target at a position is the token after it.
        sequences: (B, S) int32 number of each position's sequence among those of the micro-batch; -1 for padding.
        cu_seqlens: (K + 1,) int32 bounds of the packed sequences, padding as a last one; None where one a row.
        max_length: tokens of the longest sequence.
        source: (T,) int64 flat position at which each real token's figures are computed, -1 for first tokens.
        flat: (T,) int64 position of each real token in the tokens that were cut.
        members: (T,) int64 number of each real token's sequence among those of the micro-batch.
        last: (K,) int64 flat position of the last token of each sequence.
        indices: the numbers that the sequences have among those that were cut.
        columns: name to (T,) or (T, k) tensor, of the real tokens.
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

    @property
    def positions(self) -> int:
        """How many positions the model computes, padding included."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""

        def moved(tensor: Tensor) -> Tensor:
            # A copy from other memory waits for all that the GPU has to do, and the host is no longer ahead of it.
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return MicroBatch(
            input_ids=moved(self.input_ids),
            position_ids=moved(self.position_ids),
            targets=moved(self.targets),
            sequences=moved(self.sequences),
            cu_seqlens=None if self.cu_seqlens is None else moved(self.cu_seqlens),
            max_length=self.max_length,
            source=moved(self.source),
            flat=self.flat,
            members=moved(self.members),
            last=moved(self.last),
            indices=self.indices,
            columns={name: moved(column) for name, column in self.columns.items()},
        )

    def figures(self, computed: Tensor) -> Tensor:
        """(B * S,) figures of next tokens -> (T,) figures of the real tokens; 0 at first tokens, which have none.

        (B * S, k) figures -> (T, k).
        """
        taken = computed[self.source.clamp(min=0)]
        real = self.source.view(-1, *[1] * (taken.dim() - 1)) >= 0
        return torch.where(real, taken, torch.zeros_like(taken))

    def where_computed(self, column: Tensor) -> Tensor:
        """(T, k) column of the real tokens -> (B * S, k), where `figures` finds their figures; 0 elsewhere."""
        placed = column.new_zeros(self.positions + 1, *column.shape[1:])
        placed[self.source] = column  # those of first tokens, at -1, go to the end, which is cut off
        return placed[:-1]

    def last_figures(self, computed: Tensor) -> Tensor:
        """(B, S) figures -> (K,) those at the last token of each sequence."""
        return computed.reshape(-1)[self.last]


def least_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """How many micro-batches of at most max_tokens first fit by falling length fills; a longer sequence is alone."""
    filled = _fill(lengths, lengths, max_tokens, len(lengths), math.inf)
    assert filled is not None  # there is a micro-batch for each sequence
    return sum(map(bool, filled))


def assign(lengths: Sequence[int], costs: Sequence[float], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Indices of sequences for each micro-batch, so that the most costly one costs little more than it must.

    There are `least_micro_batches`, or `at_least` if that is more. Every sequence is in exactly one, and none of
    several is above max_tokens. The same on every rank that has the same sequences. The most costly comes first: memory
    grows once, and ranks that wait for each other have micro-batches of like cost at the same time. Where there are
    fewer sequences than micro-batches, the last are empty.

    Of two ways the better: from the most costly sequence down to the micro-batch that costs least so far; or first fit
    under the lowest limit of cost that leaves room for all (multifit: Coffman, Garey and Johnson 1978, "An application
    of bin-packing to multiprocessor scheduling").

    Args:
        lengths: tokens of each sequence.
        costs: of each, in any unit.
        max_tokens: most tokens of a micro-batch of several sequences.
        at_least: micro-batches that are wanted.
    """
    count = max(at_least, least_micro_batches(lengths, max_tokens))

    def fill(max_cost: float | None) -> list[list[int]] | None:
        return _fill(lengths, costs, max_tokens, count, max_cost)

    def cost(batch: Sequence[int]) -> float:
        return sum(costs[index] for index in batch)

    best = fill(math.inf)
    assert best is not None
    lowest, highest = max(max(costs, default=0), sum(costs) / count), max(map(cost, best))
    for _ in range(_HALVINGS):
        limit = (lowest + highest) / 2
        tried = fill(limit)
        if tried is None:
            lowest = limit
        else:
            best, highest = tried, max(map(cost, tried))
    spread = fill(None)
    if spread is not None and max(map(cost, spread)) <= highest:
        best = spread
    return sorted(best, key=cost, reverse=True)


def _fill(
    lengths: Sequence[int], costs: Sequence[float], max_tokens: int, count: int, max_cost: float | None
) -> list[list[int]] | None:
    """Sequences from the longest down, each to the first micro-batch with room for it, or to the cheapest of those.

    Args:
        max_cost: most that a micro-batch may cost, and the first is taken; None for the cheapest.

    Returns:
        Ascending indices for each of `count` micro-batches; None where a sequence finds no room.
    """
    batches: list[list[int]] = [[] for _ in range(count)]
    tokens, spent = np.zeros(count, np.int64), np.zeros(count)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        room = (tokens + lengths[index] <= max_tokens) | (tokens == 0)
        if max_cost is None:
            number = int(np.where(room, spent, math.inf).argmin())
        else:
            room &= spent + costs[index] <= max_cost
            number = int(room.argmax())
        if not room[number]:
            return None
        batches[number].append(index)
        tokens[number] += lengths[index]
        spent[number] += costs[index]
    return [sorted(batch) for batch in batches]


def micro_batch(
    sequences: Sequences, indices: Sequence[int], *, packed: bool, multiple: int, positions: int = 0
) -> MicroBatch:
    """The micro-batch of the sequences at `indices`; its length is padded to a multiple of `multiple`.

    Args:
        packed: lay the sequences end to end; otherwise one a row.
        positions: of a packed one, at least so many.
    """
    offsets = sequences.offsets()
    spans = [(offsets[index], offsets[index + 1]) for index in indices]
    lengths = [end - start for start, end in spans]
    flat = torch.cat([torch.arange(start, end) for start, end in spans] or [torch.empty(0, dtype=torch.int64)])
    if packed:
        rows, width = 1, _padded(max(sum(lengths), positions), multiple)
        starts = [0, *torch.cumsum(torch.tensor(lengths), 0).tolist()][: len(lengths)]
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
        position_ids[start : start + length] = torch.arange(length)
        numbers[start : start + length] = number
        source[at : at + length] = torch.arange(start - 1, start + length - 1)
        source[at] = -1
        at += length

    cu_seqlens = None
    longest = max(lengths, default=0)
    if packed:
        padding = width - sum(lengths)
        bounds = [*starts, sum(lengths)] + ([width] if padding else [])
        cu_seqlens = torch.tensor(bounds if lengths else [0, width], dtype=torch.int32)
        longest = max(longest, padding)
        position_ids[sum(lengths) :] = torch.arange(padding)
    return MicroBatch(
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


def _padded(length: int, multiple: int) -> int:
    return max(1, -(-length // multiple)) * multiple

"""Sequences of different lengths: how a call hands them over, and how they are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine3d.errors import UserError


@dataclass(frozen=True)
class Sequences:
    """N sequences laid end to end, T tokens in all, with any number of per-token columns.

    A per-token figure lies at the token that it is about: the log-prob at t is that of token t given those before it,
    the value at t that of the state in which token t was chosen.

    Args:
        tokens: (T,) int64 token ids.
        lengths: (N,) int64 tokens of each sequence, at least 1 each.
        columns: name to (T,) tensor.

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
            if column.shape != self.tokens.shape:
                raise UserError(f"sequences: column {name!r} has shape {tuple(column.shape)}, expected ({total},)")

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
        cu_seqlens: (K + 1,) int32 bounds of the packed sequences, padding as a last one; None where one a row.
        max_length: tokens of the longest sequence.
        source: (T,) int64 flat position at which each real token's figures are computed, -1 for first tokens.
        flat: (T,) int64 position of each real token in the tokens that were cut.
        columns: name to (T,) tensor, of the real tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    max_length: int
    source: Tensor
    flat: Tensor
    columns: dict[str, Tensor]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return MicroBatch(
            input_ids=moved(self.input_ids),
            position_ids=moved(self.position_ids),
            targets=moved(self.targets),
            cu_seqlens=None if self.cu_seqlens is None else moved(self.cu_seqlens),
            max_length=self.max_length,
            source=moved(self.source),
            flat=self.flat,
            columns={name: moved(column) for name, column in self.columns.items()},
        )

    def figures(self, computed: Tensor) -> Tensor:
        """(B, S) figures of next tokens -> (T,) figures of the real tokens; 0 at first tokens, which have none."""
        taken = computed.reshape(-1)[self.source.clamp(min=0)]
        return torch.where(self.source >= 0, taken, torch.zeros_like(taken))


def assign(lengths: Sequence[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Indices of sequences for each micro-batch: first fit by falling length, the same on every rank.

    Every sequence is in exactly one micro-batch; no micro-batch of several is above max_tokens. There are at least
    `at_least` micro-batches, the last of them empty where there are fewer sequences.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    loads: list[int] = []
    batches: list[list[int]] = []
    for index in order:
        fitting = (number for number, load in enumerate(loads) if load + lengths[index] <= max_tokens)
        number = next(fitting, len(batches))
        if number == len(batches):
            batches.append([])
            loads.append(0)
        batches[number].append(index)
        loads[number] += lengths[index]
    while len(batches) < at_least:
        divisible = max(batches, key=len, default=[])
        batches.append([divisible.pop() for _ in range(len(divisible) // 2)])
    return [sorted(batch) for batch in batches]


def micro_batch(sequences: Sequences, indices: Sequence[int], *, packed: bool, multiple: int) -> MicroBatch:
    """The micro-batch of the sequences at `indices`; its length is padded to a multiple of `multiple`.

    Args:
        packed: lay the sequences end to end; otherwise one a row.
    """
    offsets = sequences.offsets()
    spans = [(offsets[index], offsets[index + 1]) for index in indices]
    lengths = [end - start for start, end in spans]
    flat = torch.cat([torch.arange(start, end) for start, end in spans] or [torch.empty(0, dtype=torch.int64)])
    if packed:
        rows, width = 1, _padded(sum(lengths), multiple)
        starts = [0, *torch.cumsum(torch.tensor(lengths), 0).tolist()][: len(lengths)]
    else:
        rows, width = max(1, len(lengths)), _padded(max(lengths, default=0), multiple)
        starts = [row * width for row in range(len(lengths))]

    input_ids, targets = torch.zeros(2, rows * width, dtype=torch.int64)
    position_ids = torch.arange(width).repeat(rows)
    source = torch.empty(len(flat), dtype=torch.int64)
    at = 0
    for start, (first, last), length in zip(starts, spans, lengths, strict=True):
        tokens = sequences.tokens[first:last]
        input_ids[start : start + length] = tokens
        targets[start : start + length - 1] = tokens[1:]
        position_ids[start : start + length] = torch.arange(length)
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
        cu_seqlens=cu_seqlens,
        max_length=longest,
        source=source,
        flat=flat,
        columns={name: column[flat] for name, column in sequences.columns.items()},
    )


def _padded(length: int, multiple: int) -> int:
    return max(1, -(-length // multiple)) * multiple

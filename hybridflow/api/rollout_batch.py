"""RolloutBatch: samples as a caller has them, one padded row each.

Prompts and responses are kept apart, and **both are padded on the right**: row `i` of `input_ids` holds
`prompt_lengths[i]` prompt tokens and then padding, row `i` of `generated_ids` holds `response_lengths[i]` tokens and
then padding. Roles and engines have the same samples without padding: see `SampleBatch`.

B is the number of samples, S the width of the prompts, S' the width of the responses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch import sample_batch
from hybridflow.batch.load_balance import even_ranges
from hybridflow.batch.sample_batch import (
    SampleBatch,
    check_names,
    check_unique,
    row_indices,
    same_columns,
    within,
)

PROMPT, RESPONSE, SAMPLE = "(B, S)", "(B, S')", "(B,)"
"""Shapes of columns."""

COLUMNS: dict[str, tuple[str, torch.dtype]] = {
    "input_ids": (PROMPT, torch.int64),
    "generated_ids": (RESPONSE, torch.int64),
} | {
    name: (SAMPLE if symbol == sample_batch.SAMPLE else RESPONSE, dtype)
    for name, (symbol, dtype) in sample_batch.COLUMNS.items()
    if symbol != sample_batch.TOKENS
}
"""Shape and dtype of every column of a `RolloutBatch`, by its name."""


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """B samples of a rollout with everything that is known about each.

    Construction checks every shape, dtype and device, that lengths fit the widths and that no sample id occurs twice;
    ValueError in one line otherwise. Nothing is ever changed in place: every method returns a new batch.
    """

    input_ids: Tensor
    """(B, S) int64: prompt tokens, padded on the right with `pad_token_id`."""
    prompt_lengths: Tensor
    """(B,) int64: tokens of each prompt, at least 1."""
    generated_ids: Tensor
    """(B, S') int64: response tokens, the end-of-sequence token included, padded on the right."""
    response_lengths: Tensor
    """(B,) int64: tokens of each response."""
    response_mask: Tensor
    """(B, S') bool: the response tokens that the policy wrote, which are the ones that enter a loss."""
    logprobs: Tensor
    """(B, S') float32: log-prob of each response token from the rollout engine, 0 on padding."""
    sample_ids: Tensor
    """(B,) int64: identity of the sample, unique over the run."""
    group_ids: Tensor
    """(B,) int64: identity of the drawn prompt; the samples of one draw share it."""
    prompt_indices: Tensor
    """(B,) int64: index of the prompt, and so of its answer, in the data set."""
    policy_versions: Tensor
    """(B,) int64: version of the weights that generated the response."""
    finish_reasons: Tensor
    """(B,) int64: values of `FinishReason`."""
    pad_token_id: int
    rewards: Tensor | None = None
    """(B,) float32."""
    costs: Tensor | None = None
    """(B,) float32."""
    advantages: Tensor | None = None
    """(B, S') float32, 0 outside `response_mask`."""
    old_logprobs: Tensor | None = None
    """(B, S') float32: log-probs of the same weights, recomputed by the trainer before its first update."""
    ref_logprobs: Tensor | None = None
    """(B, S') float32: log-probs of the reference policy."""
    values: Tensor | None = None
    """(B, S') float32: the critic's values."""
    returns: Tensor | None = None
    """(B, S') float32: the critic's targets."""
    cost_values: Tensor | None = None
    """(B, S') float32: the cost critic's values."""
    cost_returns: Tensor | None = None
    """(B, S') float32: the cost critic's targets."""
    weights: Tensor | None = None
    """(B, S') float32: weight of each token in the loss of its mini-batch, as `sequence_weights` gives it."""

    def __post_init__(self) -> None:
        sizes = {
            PROMPT: tuple(self.input_ids.shape),
            RESPONSE: tuple(self.generated_ids.shape),
            SAMPLE: (self.input_ids.shape[0],) if self.input_ids.dim() else (),
        }
        if len(sizes[PROMPT]) != 2 or len(sizes[RESPONSE]) != 2:
            raise ValueError(
                f"RolloutBatch: input_ids has shape {sizes[PROMPT]} and generated_ids {sizes[RESPONSE]}, "
                "expected two dimensions each"
            )
        if sizes[RESPONSE][0] != sizes[PROMPT][0]:
            raise ValueError(
                f"RolloutBatch: {sizes[PROMPT][0]} rows of input_ids and {sizes[RESPONSE][0]} of generated_ids"
            )
        for name, column in self.columns().items():
            symbol, dtype = COLUMNS[name]
            if tuple(column.shape) != sizes[symbol] or column.dtype != dtype or column.device != self.input_ids.device:
                raise ValueError(
                    f"RolloutBatch: column {name} is {tuple(column.shape)} {column.dtype} on {column.device}, "
                    f"expected {symbol} = {sizes[symbol]} {dtype} on {self.input_ids.device}"
                )
        self._check_facts()

    def _check_facts(self) -> None:
        if not len(self):
            return
        for name, lengths, least, most in (
            ("prompt_lengths", self.prompt_lengths, 1, self.input_ids.shape[1]),
            ("response_lengths", self.response_lengths, 0, self.generated_ids.shape[1]),
        ):
            if int(lengths.min()) < least or int(lengths.max()) > most:
                raise ValueError(
                    f"RolloutBatch: {name} lie in {int(lengths.min())}..{int(lengths.max())}, expected {least}..{most}"
                )
        if bool((self.response_mask & ~within(self.response_lengths, self.generated_ids)).any()):
            raise ValueError("RolloutBatch: response_mask counts a position past its response_length")
        check_unique(self.sample_ids, "RolloutBatch")

    def columns(self) -> dict[str, Tensor]:
        """The columns that are there, by name."""
        return {name: column for name in COLUMNS if (column := getattr(self, name)) is not None}

    def __len__(self) -> int:
        """B, the number of samples."""
        return self.input_ids.shape[0]

    @property
    def attention_mask(self) -> Tensor:
        """(B, S) bool: which positions of `input_ids` hold a prompt token."""
        return within(self.prompt_lengths, self.input_ids)

    @property
    def sequence_lengths(self) -> Tensor:
        """(B,) int64: prompt and response tokens of each sample together."""
        return self.prompt_lengths + self.response_lengths

    @classmethod
    def of(cls, samples: SampleBatch, pad_token_id: int) -> RolloutBatch:
        """The samples as rows, as wide as the longest prompt and the longest response."""
        is_response = samples.is_response
        width = int(samples.prompt_lengths.max()) if len(samples) else 0
        prompts = torch.full((len(samples), width), pad_token_id, dtype=torch.int64)
        prompts.masked_scatter_(within(samples.prompt_lengths, prompts), samples.tokens.masked_select(~is_response))
        columns = samples.columns()
        columns["generated_ids"] = columns.pop("tokens").masked_select(is_response)
        columns = {
            name: samples.padded(column) if COLUMNS[name][0] == RESPONSE else column for name, column in columns.items()
        }
        responses = columns["generated_ids"]
        responses.masked_fill_(~within(samples.response_lengths, responses), pad_token_id)
        return cls(input_ids=prompts, **columns, pad_token_id=pad_token_id)

    def samples(self) -> SampleBatch:
        """The same without padding."""
        return SampleBatch.from_padded(self.to("cpu").columns())

    def prompts(self) -> list[list[int]]:
        """The prompt tokens of each sample, without padding."""
        return [row[:n] for row, n in zip(self.input_ids.tolist(), self.prompt_lengths.tolist(), strict=True)]

    def responses(self) -> list[list[int]]:
        """The response tokens of each sample, without padding."""
        return [row[:n] for row, n in zip(self.generated_ids.tolist(), self.response_lengths.tolist(), strict=True)]

    def replace(self, **columns: Tensor | None) -> RolloutBatch:
        """The same batch with the named columns set, for example `batch.replace(rewards=rewards)`."""
        check_names(columns, COLUMNS, "RolloutBatch")
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The same batch with every column on `device`."""
        return dataclasses.replace(self, **{name: column.to(device) for name, column in self.columns().items()})  # type: ignore[arg-type]

    def select(self, indices: Sequence[int] | Tensor) -> RolloutBatch:
        """The samples at `indices` (integers, each at most once), in that order; widths stay as they are."""
        rows = row_indices(indices, "RolloutBatch").to(self.input_ids.device)
        return dataclasses.replace(self, **{name: column[rows] for name, column in self.columns().items()})  # type: ignore[arg-type]

    def split(self, parts: int) -> list[RolloutBatch]:
        """`parts` consecutive pieces in order; sizes differ by one at most. Raises ValueError for an empty piece."""
        if not 1 <= parts <= len(self):
            raise ValueError(f"RolloutBatch: cannot split {len(self)} samples into {parts} non-empty parts")
        return [self.select(part) for part in even_ranges(len(self), parts)]

    @staticmethod
    def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """One batch of all samples in order, padded to the widest. All must hold the same columns and pad token."""
        names = same_columns([batch.columns() for batch in batches], "RolloutBatch")
        first = batches[0]
        for index, batch in enumerate(batches):
            if batch.pad_token_id != first.pad_token_id:
                raise ValueError(f"RolloutBatch: batches 0 and {index} of concatenate differ in pad_token_id")
        widths = {
            PROMPT: max(batch.input_ids.shape[1] for batch in batches),
            RESPONSE: max(batch.generated_ids.shape[1] for batch in batches),
        }

        def widen(name: str, column: Tensor) -> Tensor:
            symbol, _ = COLUMNS[name]
            if symbol == SAMPLE:
                return column
            padding = first.pad_token_id if name in ("input_ids", "generated_ids") else 0
            return torch.nn.functional.pad(column, (0, widths[symbol] - column.shape[1]), value=padding)

        columns = {name: torch.cat([widen(name, getattr(batch, name)) for batch in batches]) for name in names}
        return dataclasses.replace(first, **columns)  # type: ignore[arg-type]

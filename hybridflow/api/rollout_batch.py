"""RolloutBatch: samples as a caller has them, one padded row each.

Prompts and responses are kept apart, and **both are padded on the right**: row `i` of `input_ids` holds
`prompt_lengths[i]` prompt tokens and then padding, row `i` of `generated_ids` holds `response_lengths[i]` tokens and
then padding. Roles and engines have the same samples without padding: see `SampleBatch`.

B is the number of samples, S the width of the prompts, S' the width of the responses. Routes are of whole samples: W is
their width, and C the number of a token's experts in all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import ROUTES, SAMPLE, SampleFields, column_types, pad_rows, wide, within

PROMPT, RESPONSE = "(B, S)", "(B, S')"
WIDE_RESPONSE, TOKEN_ROUTES = wide(RESPONSE), "(B, W, C)"
"""Shapes of columns."""
COLUMNS = column_types({"input_ids": PROMPT, "generated_ids": RESPONSE}, RESPONSE, TOKEN_ROUTES)
"""Shape and dtypes of every column of a `RolloutBatch`, by its name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutBatch(SampleFields):
    """B samples of a rollout with everything that is known about each; columns of responses are (B, S'), 0 on padding.

    Construction checks every shape, dtype and device, that lengths fit the widths and that no sample id occurs twice;
    ValueError in one line otherwise. Nothing is ever changed in place: every method returns a new batch.
    """

    types: ClassVar = COLUMNS
    called: ClassVar = "RolloutBatch"

    input_ids: Tensor
    """(B, S) int64: prompt tokens, padded on the right with `pad_token_id`."""
    generated_ids: Tensor
    """(B, S') int64: response tokens, the end-of-sequence token included, padded on the right."""
    pad_token_id: int

    def __post_init__(self) -> None:
        prompts, responses = tuple(self.input_ids.shape), tuple(self.generated_ids.shape)
        if len(prompts) != 2 or len(responses) != 2:
            raise ValueError(
                f"RolloutBatch: input_ids has shape {prompts} and generated_ids {responses}, expected two dimensions "
                "each"
            )
        if responses[0] != prompts[0]:
            raise ValueError(f"RolloutBatch: {prompts[0]} rows of input_ids and {responses[0]} of generated_ids")
        sizes = {PROMPT: prompts, RESPONSE: responses, SAMPLE: prompts[:1]}
        sizes |= {WIDE_RESPONSE: (*responses, *self.width), TOKEN_ROUTES: (*prompts[:1], *self.route_shape)}
        self._check_columns(sizes, self.input_ids.device)
        for name, least, most in (("prompt_lengths", 1, prompts[1]), ("response_lengths", 0, responses[1])):
            lengths = getattr(self, name)
            if len(self) and not least <= int(lengths.min()) <= int(lengths.max()) <= most:
                raise ValueError(
                    f"RolloutBatch: {name} lie in {int(lengths.min())}..{int(lengths.max())}, expected {least}..{most}"
                )
        if bool((self.response_mask & ~within(self.response_lengths, self.generated_ids)).any()):
            raise ValueError("RolloutBatch: response_mask counts a position past its response_length")

    @property
    def attention_mask(self) -> Tensor:
        """(B, S) bool: which positions of `input_ids` hold a prompt token."""
        return within(self.prompt_lengths, self.input_ids)

    @classmethod
    def of(cls, samples: SampleBatch, pad_token_id: int) -> RolloutBatch:
        """The samples as rows, as wide as the longest prompt and the longest response."""
        is_response, columns = samples.is_response, samples.columns()
        tokens, routes = columns.pop("tokens"), columns.pop(ROUTES, None)
        return cls(
            input_ids=pad_rows(tokens.masked_select(~is_response), samples.prompt_lengths, pad_token_id),
            generated_ids=pad_rows(tokens.masked_select(is_response), samples.response_lengths, pad_token_id),
            **{
                name: column if COLUMNS[name][0] == SAMPLE else samples.padded(column)
                for name, column in columns.items()
            },
            routes=None if routes is None else pad_rows(routes, samples.sequence_lengths),
            pad_token_id=pad_token_id,
        )

    def samples(self) -> SampleBatch:
        """The same without padding."""
        return SampleBatch.from_padded(self.to("cpu").columns())

    def prompts(self) -> list[list[int]]:
        """The prompt tokens of each sample, without padding."""
        return [row[:n] for row, n in zip(self.input_ids.tolist(), self.prompt_lengths.tolist(), strict=True)]

    def responses(self) -> list[list[int]]:
        """The response tokens of each sample, without padding."""
        return [row[:n] for row, n in zip(self.generated_ids.tolist(), self.response_lengths.tolist(), strict=True)]

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The same batch with every column on `device`."""
        return dataclasses.replace(self, **{name: column.to(device) for name, column in self.columns().items()})  # type: ignore[arg-type]

    def select(self, indices: Sequence[int] | Tensor) -> RolloutBatch:
        """The samples at `indices` (integers, each at most once), in that order; widths stay as they are."""
        rows = self._rows(indices).to(self.input_ids.device)
        return dataclasses.replace(self, **{name: column[rows] for name, column in self.columns().items()})  # type: ignore[arg-type]

    @staticmethod
    def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """One batch of all samples in order, padded to the widest. All must hold the same columns and pad token."""
        names = RolloutBatch._same_columns(batches)
        first = batches[0]
        for index, batch in enumerate(batches):
            if batch.pad_token_id != first.pad_token_id:
                raise ValueError(f"RolloutBatch: batches 0 and {index} of concatenate differ in pad_token_id")
        longest = max(batch.generated_ids.shape[1] for batch in batches)
        widths = {
            PROMPT: max(batch.input_ids.shape[1] for batch in batches),
            RESPONSE: longest,
            WIDE_RESPONSE: longest,
            TOKEN_ROUTES: max((batch.route_shape[0] for batch in batches if batch.route_shape), default=0),
        }

        def widen(name: str, column: Tensor) -> Tensor:
            symbol, _ = COLUMNS[name]
            if symbol == SAMPLE:
                return column
            padding = first.pad_token_id if name in ("input_ids", "generated_ids") else 0
            inner = [0, 0] * (column.dim() - 2)  # from the last dimension on
            return torch.nn.functional.pad(column, (*inner, 0, widths[symbol] - column.shape[1]), value=padding)

        columns = {name: torch.cat([widen(name, getattr(batch, name)) for batch in batches]) for name in names}
        return dataclasses.replace(first, **columns)  # type: ignore[arg-type]

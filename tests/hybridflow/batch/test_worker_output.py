"""Results of a rank for its samples: packed, summarised, and refused where they do not fit."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.remote_batch import _named
from hybridflow.batch.worker_output import LOSS_TOKENS, Columns, Packed, Spans, pack
from tests.support.group_workers import batch_of

SAMPLES = batch_of([3, 4, 5], longest=4)
"""Responses of 4, 1 and 2 tokens after prompts of 1, 2 and 3."""


def test_a_batch_is_kept_whole_and_its_figures_of_samples_are_told() -> None:
    packed, summary = pack(SAMPLES)
    assert isinstance(packed, Packed) and summary is not None
    assert packed.arrays["tokens"].tolist() == [3] * 5 + [4] * 3 + [5] * 5
    assert summary.per_sample[LOSS_TOKENS].tolist() == [4, 1, 2]
    assert summary.per_sample["sample_ids"].tolist() == [3, 4, 5] and "logprobs" not in summary.per_sample


def test_spans_are_those_of_the_samples() -> None:
    packed, _ = pack(SAMPLES)
    lengths = torch.stack([SAMPLES.sequence_lengths, SAMPLES.response_lengths], dim=1)
    taken = packed.take(Spans.of(lengths, torch.tensor([2, 0])))
    assert taken.arrays["tokens"].tolist() == [5] * 5 + [3] * 5
    assert taken.arrays["logprobs"].tolist() == [-5.0] * 2 + [-3.0] * 4
    assert taken.arrays["group_ids"].tolist() == [2, 1]
    unpacked = taken.unpack()
    assert unpacked.responses() == [[5] * 2, [3] * 4]  # type: ignore[union-attr]


def test_several_figures_of_each_token_go_with_its_sample() -> None:
    chosen = torch.arange(14).view(7, 2)
    packed, _ = pack(Columns({"chosen_tokens": chosen, "teacher_logprobs": torch.zeros(7)}), [SAMPLES])
    lengths = torch.stack([SAMPLES.sequence_lengths, SAMPLES.response_lengths], dim=1)
    taken = packed.take(Spans.of(lengths, torch.tensor([2, 0])))
    assert taken.arrays["chosen_tokens"].tolist() == chosen[[5, 6, 0, 1, 2, 3]].tolist()


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (Columns({"chosen_tokens": torch.zeros(6, 2)}), r"column chosen_tokens has shape \(6, 2\), expected \(7,\)"),
        (
            Columns({"values": torch.zeros(3, 4)}),
            r"column values has shape \(3, 4\), expected \(7,\), one value for each re",
        ),
        (Columns({"values": torch.zeros(13)}), r"column values has shape \(13,\), expected \(7,\)"),
        (
            Columns(per_sample={"score": torch.zeros(7)}),
            r"per-sample column score has shape \(7,\), expected \(3,\), one value for each sample",
        ),
    ],
)
def test_columns_that_are_not_those_of_the_batch_are_refused_by_their_maker(columns: Columns, line: str) -> None:
    with pytest.raises(ValueError, match=f"^columns: {line}"):
        pack(columns, [SAMPLES])


def test_columns_whose_names_say_nothing_are_refused_by_their_reader() -> None:
    column = torch.zeros(7).numpy()
    assert list(_named(Packed({"logprobs": column}), "ref_logprobs")) == ["ref_logprobs"]
    with pytest.raises(ValueError, match="samples: no column 'advantage', expected one of tokens, prompt_lengths"):
        _named(Packed({"advantage": column}), "")
    with pytest.raises(ValueError, match="batch: columns values, returns as ref_logprobs, expected one column"):
        _named(Packed({"values": column, "returns": column}), "ref_logprobs")

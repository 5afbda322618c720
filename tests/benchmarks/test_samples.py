"""Samples from engines to updates: both ways of the benchmark end with the same sequences, and one is smaller."""

from __future__ import annotations

import pytest

from benchmarks import samples


def test_lengths_are_as_asked_for() -> None:
    case = samples.make_case(samples=300, mean=40, longest=320, prompt=10)
    lengths = [len(response) for response in case.responses]
    assert (len(lengths), max(lengths)) == (300, 320) and min(lengths) >= 1
    assert sum(lengths) / 300 == pytest.approx(40, rel=0.05)
    assert [len(row) for row in case.logprobs] == lengths
    assert case.lengths == [len(prompt) + length for prompt, length in zip(case.prompts, lengths, strict=True)]


def test_all_are_of_one_length_where_the_longest_is_the_mean() -> None:
    case = samples.make_case(samples=30, mean=40, longest=40, prompt=10)
    assert [len(response) for response in case.responses] == [40] * 30
    assert len(set(map(len, case.prompts))) > 1


@pytest.mark.processes
def test_both_ways_end_with_the_same_sequences(ray_cluster: None) -> None:
    case = samples.make_case(samples=40, mean=20, longest=200, prompt=5)
    measurement = samples.measure(case, ranks=3, repeats=1)  # raises where they differ
    # Tokens, log-probs and masks, and two columns of responses that ranks added; rows of their longest.
    tokens, responses = sum(case.lengths), sum(map(len, case.responses))
    ragged = 8 * tokens + (1 + 4 + 2 * 4) * responses
    assert 0 <= measurement["ragged"]["stored_bytes"] - ragged < 100 * len(case.prompts)
    assert measurement["padded"]["stored_bytes"] > 40 * 200 * 13
    assert (
        measurement["ragged_of_padded"]["stored_bytes"]
        == measurement["ragged"]["stored_bytes"] / measurement["padded"]["stored_bytes"]
    )
    assert all(measurement[way]["host_seconds"] > 0 for way in ("ragged", "padded"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--samples", "0"], "samples.py: --samples is 0, expected at least 1"),
        (
            ["--mean", "41", "--longest", "40"],
            "samples.py: --mean is 41 and --longest 40, expected none shorter than the mean",
        ),
        (["--samples", "3", "--ranks", "4"], "samples.py: --samples is 3 for 4 ranks, expected at least as many"),
        (["--sample", "many"], "samples.py: argument --samples: invalid int value: 'many'"),
    ],
)
def test_arguments_that_cannot_be_right_are_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert samples.main(arguments) == 2
    assert capsys.readouterr().err == line + "\n"

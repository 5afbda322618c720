"""Three steps of every algorithm, on every kind of placement, are what they were when they were recorded.

Bit for bit: losses, gradient norms, rewards, texts and exported weights of every run, and log-probs, values, advantages
and returns where `PPOTrainer` shows them. One thread a process, and a deterministic engine, make two runs the same.

On a processor of another vendor, family or instruction set, kernels sum in another order. There floats are compared
with a tolerance, and weights by their norms: the first steps of Adam follow the sign of each gradient, and where a
gradient is nearly 0 its sign depends on that order. Tokens must be the same there too: a draw so close to the edge
of a token's probability is improbable.

With other versions of torch, Megatron-Core or SGLang nothing can be said: the values are to be recorded anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.algorithms.registry import ALGORITHMS
from tests.integration.reference_runs import (
    CASES,
    RECORD,
    VALUES,
    differences,
    platform,
    run_case,
    stored,
    without_digests,
)

RELATIVE, ABSOLUTE = 1e-3, 1e-5
_SHOWN = 20


def test_every_algorithm_has_a_case() -> None:
    assert {name.split("-")[0] for name in CASES} == set(ALGORITHMS)
    assert {path.stem for path in VALUES.iterdir()} == set(CASES)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_recorded(name: str, tmp_path: Path) -> None:
    recorded, here = stored(name), platform()
    of_versions = [{key: value for key, value in each.items() if key != "cpu"} for each in (recorded["platform"], here)]
    assert of_versions[0] == of_versions[1], f"recorded with other versions; record the values anew by `{RECORD}`"
    found, expected = run_case(name, tmp_path), recorded["values"]
    if recorded["platform"]["cpu"] == here["cpu"]:
        lines = differences(found, expected)
    else:
        lines = differences(
            without_digests(found), without_digests(expected), relative=RELATIVE, absolute=ABSOLUTE
        )  # fmt: skip
    assert not lines, "\n".join([f"{len(lines)} values differ:", *lines[:_SHOWN]])


def test_a_changed_bit_is_a_difference() -> None:
    expected = {"metrics": [{"step": 1, "loss": 0.1}], "model": {"weight": ["digest", 2.0]}}
    found = {"metrics": [{"step": 1, "loss": 0.1 + 2**-56}], "model": {"weight": ["other", 2.0]}}
    assert differences(found, expected) == [
        "/metrics/0/loss: 0.10000000000000002, expected 0.1",
        "/model/weight/0: 'other', expected 'digest'",
    ]
    assert not differences(without_digests(found), without_digests(expected), relative=RELATIVE)
    assert differences({"step": 1}, {"loss": 1}) == ["/loss: only in one of the two", "/step: only in one of the two"]
    assert differences([1], [1, 2]) == [": 1 values, expected 2"]

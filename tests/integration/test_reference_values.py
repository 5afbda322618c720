"""Short runs of the algorithms on every kind of placement are what they were when they were recorded.

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
from tests.integration.algorithm_steps import CASES as STEPPED
from tests.integration.reference_runs import (
    CASES,
    RELATIVE,
    VALUES,
    differences,
    expect_recorded,
    run_case,
    without_digests,
)

OTHERS = {"ppo-split": pytest.mark.long} | dict.fromkeys(
    (
        "ppo-colocate",
        "grpo-one-step-apart",
        "ppo-standalone",
        "remax-standalone",
        "remax-colocate",
        "safe_rlhf-colocate",
    ),
    pytest.mark.release,
)
"""Marks of an algorithm that another case, or one of two steps, covers on other devices."""


def test_every_algorithm_has_a_case() -> None:
    assert {name.split("-")[0] for name in (*CASES, *STEPPED)} == set(ALGORITHMS)
    assert {path.stem for path in VALUES.glob("*.json")} == set(CASES)
    assert {path.stem for path in VALUES.glob("steps/*.json")} == set(STEPPED)


@pytest.mark.processes
@pytest.mark.parametrize("name", [pytest.param(name, marks=OTHERS.get(name, ())) for name in CASES])
def test_values_are_those_recorded(name: str, tmp_path: Path) -> None:
    expect_recorded(name, run_case(name, tmp_path))


def test_a_changed_bit_is_a_difference() -> None:
    expected = {"metrics": [{"step": 1, "loss": 0.1}], "model": {"weight": ["digest", 2.0]}}
    changed = {"metrics": [{"step": 1, "loss": 0.1 + 2**-56}], "model": {"weight": ["other", 2.0]}}
    assert differences(changed, expected) == [
        "/metrics/0/loss: 0.10000000000000002, expected 0.1",
        "/model/weight/0: 'other', expected 'digest'",
    ]
    assert not differences(without_digests(changed), without_digests(expected), relative=RELATIVE)
    assert differences({"step": 1}, {"loss": 1}) == ["/loss: only in one of the two", "/step: only in one of the two"]
    assert differences([1], [1, 2]) == [": 1 values, expected 2"]

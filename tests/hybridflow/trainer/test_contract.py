"""Each breach of what holds of every sample ends the step, and the line names the sample."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from engine3d.errors import EngineError
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.trainer.contract import Contract, Numbers


def _batch(**per_sample: list[int]) -> RemoteBatch:
    """Samples 10 to 13 of the draws 5 and 6, of version 3, that ended at a stop token."""
    default = {
        "sample_ids": [10, 11, 12, 13],
        "group_ids": [5, 5, 6, 6],
        "policy_versions": [3, 3, 3, 3],
        "finish_reasons": [0, 0, 1, 0],
    }
    return RemoteBatch({name: torch.tensor(values) for name, values in (default | per_sample).items()}, [])


def test_samples_of_weights_within_the_limit_are_learned_from_once() -> None:
    contract = Contract(1)
    contract.check(_batch(), step=4, serving=3)
    contract.check(_batch(), step=4, serving=4)
    contract.learned(_batch())
    line = "step 5: sample 10 of draw 5, made by version 3 of the weights, was trained on in an earlier step; the batch"
    with pytest.raises(EngineError, match=line):
        contract.check(_batch(), step=5, serving=4)
    contract.check(_batch(), step=5, serving=4, recalled=frozenset({10, 11, 12, 13}))
    contract.check(_batch(group_ids=[4, 4, 7, 7]), step=5, serving=4)


@pytest.mark.parametrize(
    ("per_sample", "line"),
    [
        ({"finish_reasons": [0, 0, 2, 0]}, "sample 12 of draw 6, made by version 3 of the weights, was given up"),
        (
            {"policy_versions": [3, 5, 3, 3]},
            "sample 11 of draw 5, made by version 5 of the weights, is of weights that no",
        ),
        (
            {"policy_versions": [3, 3, 3, 2]},
            "sample 13 of draw 6, made by version 2 of the weights, is of weights older",
        ),
    ],
)
def test_a_breach_names_the_sample(per_sample: dict[str, list[int]], line: str) -> None:
    with pytest.raises(EngineError, match=line):
        Contract(1).check(_batch(**per_sample), step=5, serving=4)


def test_what_is_recalled_may_be_older() -> None:
    old = _batch(policy_versions=[0, 0, 0, 0])
    Contract(0).check(old, step=9, serving=8, recalled=frozenset({10, 11, 12, 13}))
    with pytest.raises(EngineError, match="sample 13"):
        Contract(0).check(old, step=9, serving=8, recalled=frozenset({10, 11, 12}))


def test_a_run_that_goes_on_knows_what_it_has_learned_from() -> None:
    contract = Contract(0)
    contract.begin(8, [6, 9, 2])
    for group in (0, 1, 3, 5, 7):
        with pytest.raises(EngineError, match=f"draw {group}, .* in an earlier step"):
            contract.check(_batch(group_ids=[group] * 4), step=2, serving=3)
    for group in (2, 6, 8, 9):
        contract.check(_batch(group_ids=[group] * 4), step=2, serving=3)


def test_ranges_are_the_set_that_was_put_in() -> None:
    chance = random.Random(3)
    numbers, plain = Numbers(), set[int]()
    for _ in range(300):
        begin = chance.randrange(200)
        end = begin + chance.randrange(4)
        numbers.add(begin, end)
        plain |= set(range(begin, end))
        assert {number for number in range(210) if number in numbers} == plain
    ranges = numbers.ranges
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert sum(end - begin for begin, end in ranges) == len(plain)

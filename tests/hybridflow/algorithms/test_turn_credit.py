"""Advantages of an episode's turns, and their gradient, against numbers by hand."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.config import load
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_table import ScoreColumns, batch_of, table_of
from hybridflow.config.fit.episodes import OF_TURNS
from tests.support.local_step import advantages_of, loss_of, weights_of

NUMBERS = [[1, 1, 0, 2, 2, 2], [1, 0, 0, 2, 0, 3], [1, 2], [0, 1]]
"""Turns of the tokens of four episodes; two turns of the third follow each other without a token between them."""
RETURNS = [[3.0, 1.0], [2.0, 2.0, 0.0], [4.0, 0.0], [5.0]]
"""Return of each turn."""
GROUPS = [7, 7, 7, 2]


def _episodes() -> SampleBatch:
    lengths = [len(numbers) for numbers in NUMBERS]
    masks = [[number > 0 for number in numbers] for numbers in NUMBERS]
    return SampleBatch.from_generations(
        prompts=[[3]] * len(NUMBERS),
        responses=[list(range(length)) for length in lengths],
        logprobs=[[-0.5 * drawn for drawn in mask] for mask in masks],
        sample_ids=range(len(NUMBERS)),
        group_ids=GROUPS,
        prompt_indices=GROUPS,
        policy_versions=[0] * len(NUMBERS),
        finish_reasons=["stop"] * len(NUMBERS),
        response_masks=masks,
        turns=NUMBERS,
        turn_returns=[
            [returns[number - 1] if number else 0.0 for number in numbers]
            for numbers, returns in zip(NUMBERS, RETURNS, strict=True)
        ],
    ).replace(rewards=torch.tensor([returns[0] for returns in RETURNS]))


def _by_hand(scale: float) -> list[float]:
    mean = 12 / 7  # of 3, 1, 2, 2, 0, 4 and 0
    flat = []
    for numbers, returns, group in zip(NUMBERS, RETURNS, GROUPS, strict=True):
        centred = [(value - mean) / scale if group == 7 else 0.0 for value in returns]
        flat += [centred[number - 1] if number else 0.0 for number in numbers]
    return flat


@pytest.mark.parametrize("name", OF_TURNS)
def test_the_tokens_of_a_turn_share_the_advantage_of_its_return(name: str) -> None:
    deviation = (sum((value - 12 / 7) ** 2 for value in (3, 1, 2, 2, 0, 4, 0)) / 6) ** 0.5
    scale = 1.0 if name == "dr_grpo" else deviation + 1e-6
    advantages, _ = advantages_of(_episodes(), load(name).settings())
    assert advantages.tolist() == pytest.approx(_by_hand(scale), abs=1e-6)
    assert advantages[-1] == 0  # a group of one turn
    order = [3, 1, 0, 2]
    again, _ = advantages_of(_episodes().select(order), load(name).settings())
    by_sample = advantages.split([6, 6, 2, 2])
    assert again.tolist() == torch.cat([by_sample[row] for row in order]).tolist()


def test_an_episode_has_the_same_weight_however_many_turns_it_has() -> None:
    config = load("grpo").settings(loss_aggregation="seq-mean-token-mean")
    samples = _episodes()
    weights = weights_of(samples, config, 6)
    assert [float(row.sum()) for row in weights.split([6, 6, 2, 2])] == pytest.approx([0.25] * 4)
    advantages, _ = advantages_of(samples, config)
    logprobs = samples.logprobs.clone().requires_grad_()
    loss, _ = loss_of(
        config, {"logprobs": logprobs, "old_logprobs": samples.logprobs, "advantages": advantages}, weights
    )
    loss.backward()
    tokens = [5.0] * 6 + [3.0] * 6 + [2.0] * 2 + [1.0] * 2  # that the policy wrote in the episode of each
    expected = -advantages / (4 * torch.tensor(tokens))
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_turns_are_stored_for_a_replay() -> None:
    samples = _episodes()
    again = batch_of(table_of(samples, ScoreColumns(), 1))
    assert again.turns is not None and torch.equal(again.turns, samples.turns)  # type: ignore[arg-type]
    assert again.turn_returns is not None and torch.equal(again.turn_returns, samples.turn_returns)  # type: ignore[arg-type]

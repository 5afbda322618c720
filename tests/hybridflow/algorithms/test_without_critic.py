"""Algorithms that need nothing but samples and rewards: advantages and loss together, against each paper's formula.

The formulas are written once more, as plain loops in float64 whose gradient autograd finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.config import load
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.metrics import names as metrics
from tests.support.columns import check_pieces_add_up
from tests.support.local_step import advantages_of, loss_of, make_samples, weights_of

LIMIT = 6
"""The most tokens of a response."""
KL = 0.05

GROUPS = [5, 8, 5, 2, 8, 5, 8, 11, 5, 2, 8]
"""Group ids in no order and of several sizes. Group 11 has one sample left."""
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
"""Rewards. Those of group 2 are equal."""

Rows = list[list[int]]
"""Positions of each sample's loss tokens among those of all responses."""


def members(groups: list[int], sample: int) -> list[int]:
    return [other for other, group in enumerate(groups) if group == groups[sample]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def centred(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    return [reward - mean([rewards[member] for member in members(groups, row)]) for row, reward in enumerate(rewards)]


def rloo(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    results = []
    for row, reward in enumerate(rewards):
        others = [rewards[member] for member in members(groups, row) if member != row]
        results.append(reward - mean(others) if others else 0.0)
    return results


def opo(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    results = []
    for row, reward in enumerate(rewards):
        local = members(groups, row)
        results.append(
            reward - sum(lengths[entry] * rewards[entry] for entry in local) / sum(lengths[entry] for entry in local)
        )
    return results


def gpg(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    invalid = [row for row in range(len(rewards)) if len({rewards[member] for member in members(groups, row)}) == 1]
    alpha = len(rewards) / (len(rewards) - len(invalid))
    return [alpha * advantage for advantage in centred(rewards, groups, lengths)]


def pass_at_2(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    results = []
    for row, reward in enumerate(rewards):
        local = [rewards[member] for member in members(groups, row)]
        n, wrong = len(local), local.count(0.0)
        if n <= 2 or wrong == n:
            results.append(0.0)
            continue
        rho = 1 - math.comb(wrong, 2) / math.comb(n, 2)
        sigma = math.sqrt(rho * (1 - rho)) + 1e-6
        results.append((1 - rho if reward else 1 - rho - (wrong - 1) / (n - 1)) / sigma)
    return results


def whitened(advantages: list[list[float]]) -> list[list[float]]:
    every = [advantage for row in advantages for advantage in row]
    center = mean(every)
    std = math.sqrt(mean([(advantage - center) ** 2 for advantage in every]))
    return [[(advantage - center) / (std + 1e-6) for advantage in row] for row in advantages]


Plain = Callable[[list[float], list[int], list[int]], list[float]]

CASES: dict[str, tuple[str, dict[str, Any], Plain]] = {
    "rloo": ("rloo", {}, rloo),
    "rloo with KL": ("rloo", {"kl_coef": KL}, rloo),
    "reinforce_plus_plus": (
        "reinforce_plus_plus",
        {"kl_coef": KL, "gamma": 0.9},
        lambda rewards, groups, lengths: rewards,
    ),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {"kl_coef": KL}, centred),
    "dr_grpo": ("dr_grpo", {"kl_coef": KL}, centred),
    "gpg": ("gpg", {}, gpg),
    "opo": ("opo", {}, opo),
    "opo with KL": ("opo", {"kl_coef": KL}, opo),
    "pass_at_k": ("pass_at_k", {"pass_k": 2, "kl_coef": KL}, pass_at_2),
}


def settings(case: str) -> AlgorithmSettings:
    name, local, _ = CASES[case]
    config: AlgorithmSettings = load(name).settings(name=name, **local)
    return config


def samples_of(seed: int = 0) -> SampleBatch:
    torch.manual_seed(seed)
    samples = make_samples(GROUPS, REWARDS, longest=LIMIT)
    return samples.replace(ref_logprobs=samples.logprobs + 0.3 * torch.randn(len(samples.logprobs)))


def rows_of(samples: SampleBatch) -> Rows:
    starts = (samples.response_lengths.cumsum(0) - samples.response_lengths).tolist()
    return [
        [start + index for index in range(length) if samples.response_mask[start + index]]
        for start, length in zip(starts, samples.response_lengths.tolist(), strict=True)
    ]


def plain_advantages(samples: SampleBatch, case: str) -> list[list[float]]:
    """Compute the advantages of each sample's loss tokens."""
    name, _, plain = CASES[case]
    config, rows = settings(case), rows_of(samples)
    assert samples.ref_logprobs is not None
    kl = [[float(samples.logprobs[t]) - float(samples.ref_logprobs[t]) for t in row] for row in rows]
    if name == "reinforce_plus_plus":
        results = []
        for reward, of_tokens in zip(REWARDS, kl, strict=True):
            gains = [-KL * token for token in of_tokens]
            gains[-1] += reward
            results.append([sum(0.9**away * gain for away, gain in enumerate(gains[t:])) for t in range(len(gains))])
        return whitened(results)
    penalised = config.kl_coef > 0 and config.kl_in == "reward"
    rewards = [reward - KL * math.fsum(entry) * penalised for reward, entry in zip(REWARDS, kl, strict=True)]
    entry = plain(rewards, samples.group_ids.tolist(), [len(row) for row in rows])
    results = [[advantage] * len(row) for advantage, row in zip(entry, rows, strict=True)]
    return whitened(results) if name == "reinforce_plus_plus_baseline" else results


def plain_loss(samples: SampleBatch, case: str, logprobs: Tensor) -> Tensor:
    """The paper's objective, negated, of the first update from a rollout, whose policy has made the samples."""
    name, config, rows = CASES[case][0], settings(case), rows_of(samples)
    assert samples.ref_logprobs is not None
    per_sequence = []
    for row, advantages in zip(rows, plain_advantages(samples, case), strict=True):
        total = logprobs.new_zeros(())
        for t, advantage in zip(row, advantages, strict=True):
            if load(name).settings.on_policy:
                total = total - advantage * logprobs[t]
            else:
                total = total - advantage * (logprobs[t] - logprobs[t].detach()).exp()
            if config.kl_coef and config.kl_in == "loss":
                difference = samples.ref_logprobs[t].double() - logprobs[t]
                k3 = difference.exp() - 1 - difference
                total = total + KL * (0.5 * difference**2 if config.kl_estimator == "k2" else k3)
        per_sequence.append(total)
    summed = torch.stack(per_sequence).sum()
    if name == "rloo":
        return summed / len(rows)
    if name == "dr_grpo":
        return summed / (len(rows) * LIMIT)
    return summed / sum(len(row) for row in rows)


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_those_of_the_paper(case: str) -> None:
    samples = samples_of()
    advantages, _ = advantages_of(samples, settings(case))
    for row, expected in zip(rows_of(samples), plain_advantages(samples, case), strict=True):
        assert advantages[row].tolist() == pytest.approx(expected, rel=2e-5, abs=1e-6)
    assert advantages[~samples.response_mask].count_nonzero() == 0


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_paper(case: str) -> None:
    samples, config = samples_of(), settings(case)
    exact = samples.logprobs.double().requires_grad_()
    expected = plain_loss(samples, case, exact)
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    logprobs = samples.logprobs.clone().requires_grad_()
    assert samples.ref_logprobs is not None
    columns = {
        "logprobs": logprobs,
        "advantages": advantages_of(samples, config)[0],
        "ref_logprobs": samples.ref_logprobs,
    }
    loss, _ = loss_of(config, columns, weights_of(samples, config, LIMIT))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-7)
    assert gradient[samples.response_mask].count_nonzero() > 0


@pytest.mark.parametrize("case", CASES)
def test_advantages_do_not_depend_on_the_order_of_samples_or_on_ranks(case: str) -> None:
    samples, config = samples_of(1), settings(case)
    full, step = advantages_of(samples, config)
    order = torch.randperm(len(samples))
    shards = full.split(samples.response_lengths.tolist())
    for ranks in (3, len(samples) + 2):
        shuffled, shuffled_step = advantages_of(samples.select(order), config, ranks=ranks)
        torch.testing.assert_close(shuffled, torch.cat([shards[row] for row in order]), rtol=1e-6, atol=1e-7)
        assert shuffled_step.values == pytest.approx(step.values)


@pytest.mark.parametrize("case", CASES)
def test_a_group_is_what_is_left_of_it(case: str) -> None:
    """A lost sample's reward is no part of the baseline of the others, and groups of one have no advantage."""
    samples, config = samples_of(2), settings(case)
    left = [row for row in range(len(samples)) if row not in (0, 4, 6)]
    result = advantages_of(samples.select(left), config)[0]
    # As if the lost samples had another reward: nothing of them may matter.
    rewards = samples.rewards
    assert rewards is not None
    others = samples.replace(rewards=rewards.index_fill(0, torch.tensor([0, 4, 6]), 9.0))
    assert torch.equal(advantages_of(others.select(left), config)[0], result)
    if case in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return
    shards = result.split(samples.response_lengths[left].tolist())
    single = [row for row in left if GROUPS[row] == 11]
    assert all(shards[left.index(row)].count_nonzero() == 0 for row in single)


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_figures_do_not_depend_on_the_cut(case: str) -> None:
    """Nor on whether samples are rows, which are padded here with nan of no weight, or end to end."""
    samples, config = samples_of(3), settings(case)
    assert samples.ref_logprobs is not None
    advantages, weights = advantages_of(samples, config)[0], weights_of(samples, config, LIMIT)
    within = samples.padded(torch.ones_like(samples.response_mask)) > 0
    columns = {
        name: samples.padded(column).masked_fill(~within, math.nan)
        for name, column in {
            "logprobs": samples.logprobs + 0.6 * torch.randn(len(samples.logprobs)),
            "old_logprobs": samples.logprobs,
            "advantages": advantages.masked_fill(~samples.response_mask, math.nan),
            "ref_logprobs": samples.ref_logprobs,
            "rollout_logprobs": samples.logprobs + 0.01,
        }.items()
    }
    padded = samples.padded(weights)
    cuts = [torch.randperm(len(samples)).tensor_split(sizes) for sizes in ([3, 7], [1], [2, 4, 9])]
    stats = check_pieces_add_up(lambda *given: loss_of(config, *given), columns, padded, "logprobs", cuts)
    assert math.isfinite(stats[metrics.TRAIN_LOSS])
    (gradient,) = torch.autograd.grad(loss_of(config, columns, padded)[0], columns["logprobs"])
    assert gradient.isfinite().all() and gradient[padded == 0].count_nonzero() == 0


def test_with_one_response_of_a_set_pass_at_k_is_grpo_but_for_bessel() -> None:
    samples = samples_of()
    advantages, step = advantages_of(samples, load("pass_at_k").settings(name="pass_at_k", pass_k=1))
    grpo, _ = advantages_of(samples, load("grpo").settings(name="grpo"))
    for row, group in zip(rows_of(samples), GROUPS, strict=True):
        size = GROUPS.count(group)
        bessel = math.sqrt(size / (size - 1)) if size > 1 else 1.0
        assert advantages[row].tolist() == pytest.approx((bessel * grpo[row]).tolist(), rel=1e-4, abs=1e-6)
    assert step.values == {metrics.REWARD_PASS_AT_K: pytest.approx((0.5 + 0.25 + 1 + 1) / 4)}


def test_a_response_is_right_above_the_reward_that_is_set() -> None:
    samples = samples_of().replace(rewards=torch.tensor(REWARDS) * 0.5)
    pass_at_k = load("pass_at_k").settings
    strict, _ = advantages_of(samples, pass_at_k(name="pass_at_k", pass_k=2, right_above=0.5))
    lenient, _ = advantages_of(samples, pass_at_k(name="pass_at_k", pass_k=2))
    assert strict.count_nonzero() == 0
    assert torch.equal(lenient, advantages_of(samples_of(), settings("pass_at_k"))[0])


def test_gpg_tells_the_share_of_samples_that_say_something() -> None:
    assert advantages_of(samples_of(), settings("gpg"))[1].values == {metrics.REWARD_VALID_FRACTION: 8 / 11}


def test_one_response_to_each_prompt_is_enough_for_reinforce_plus_plus() -> None:
    torch.manual_seed(0)
    samples = make_samples(list(range(6)), [1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    advantages, _ = advantages_of(samples, load("reinforce_plus_plus").settings(name="reinforce_plus_plus"), ranks=2)
    counted = advantages[samples.response_mask].double()
    assert counted.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert counted.std(correction=0).item() == pytest.approx(1.0, rel=1e-4)


def test_a_batch_of_one_reward_has_no_advantages() -> None:
    torch.manual_seed(0)
    samples = make_samples(GROUPS, [0.3] * len(GROUPS))
    for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "dr_grpo", "gpg", "opo", "pass_at_k"):
        advantages, step = advantages_of(samples, load(name).settings(name=name))
        assert advantages.abs().max() < 1e-9, name
        assert all(math.isfinite(value) for value in step.values.values()), name

"""DPO and KTO on ranks that are functions: what an update is of, and that no cut of the samples changes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.config import load
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.preferences import best_and_worst, pairs_of_groups, reference_sums
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import joined_per_sample, pack
from hybridflow.metrics import names as metrics
from hybridflow.trainer.operations.updates import mini_batches
from tests.hybridflow.algorithms.losses.test_preference import plain_dpo, plain_kto
from tests.support.columns import check_pieces_add_up
from tests.support.local_step import loss_of, make_samples

CASES: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "beta": 0.4},
    "cdpo": {"name": "dpo", "label_smoothing": 0.1, "nll_coef": 0.2},
    "ipo": {"name": "dpo", "loss": "ipo", "beta": 1.0, "length_normalisation": True},
    "kto": {"name": "kto", "desirable_weight": 1.3},
}
PAIRS = 7


@dataclass
class _Applied:
    columns: dict[str, Tensor]

    def per_sample(self) -> dict[str, Tensor]:
        return self.columns


@dataclass
class _Step:
    """The operations of a step that these algorithms need. Samples are in ranks' memory, each on one of them.

    Args:
        config: of the algorithm.
        samples: with `current_logprobs` and `ref_logprobs`.
        ranks: samples are sharded over them in turns.
    """

    config: Any
    samples: SampleBatch
    ranks: int = 1
    least_samples: int = 2
    number: int = 3
    values: dict[str, float] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    updated: list[Experience] = field(default_factory=list)

    def current_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        return batch

    def logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        return batch

    def apply(self, batch: RemoteBatch, function: Any) -> _Applied:
        positions = {sample: row for row, sample in enumerate(self.samples.sample_ids.tolist())}
        rows = [positions[sample] for sample in batch.per_sample["sample_ids"].tolist()]
        shards = [list(range(rank, len(rows), self.ranks)) for rank in range(self.ranks)]
        result = joined_per_sample(
            [
                function(self.samples.select([rows[at] for at in shard]), config=self.config).per_sample
                for shard in shards
            ]
        )
        order = torch.tensor([at for shard in shards for at in shard]).argsort()
        return _Applied({name: column[order] for name, column in result.items()})

    def log(self, stats: dict[str, Tensor]) -> None:
        for name, figure in stats.items():
            self.logged[name] = torch.cat([self.logged.get(name, figure[:0]), figure])
            self.values[name] = float(self.logged[name].mean())

    def update(self, experience: Experience) -> None:
        self.updated.append(experience)


def settings(case: str) -> Any:
    return load(CASES[case]["name"]).settings(**CASES[case])


def samples_of(case: str, seed: int = 0) -> SampleBatch:
    """Two responses to each prompt; of kto's examples the second one is to another prompt, and some are bad."""
    torch.manual_seed(seed)
    first = [1.0, 1.0, 0.0] if case == "kto" else [1.0]
    rewards = [reward for pair in range(PAIRS) for reward in (first[pair % len(first)], 0.0)]
    samples = make_samples([pair for pair in range(PAIRS) for _ in range(2)], rewards)
    count = len(samples.logprobs)
    outside = ~samples.response_mask
    return samples.replace(
        current_logprobs=(-2 * torch.rand(count)).masked_fill(outside, math.nan),
        ref_logprobs=(-2 * torch.rand(count)).masked_fill(outside, math.nan),
    )


def remote(samples: SampleBatch) -> RemoteBatch:
    _, summary = pack(samples)
    assert summary is not None
    reference = reference_sums(samples, config=None).per_sample["reference"]
    return RemoteBatch(summary.per_sample, []).with_per_sample(reference_logprobs=reference)


def prepared(case: str, samples: SampleBatch, ranks: int = 1) -> tuple[RemoteBatch, _Step]:
    step: Any = _Step(settings(case), samples, ranks)
    prepare = load(step.config.name).prepare
    assert prepare is not None
    return prepare(step, remote(samples)), step


def plain_loss(case: str, samples: SampleBatch, logprobs: Tensor) -> Tensor:
    """The paper's loss of log-probs of tokens in float64, as sums written sample by sample."""
    assert samples.ref_logprobs is not None
    config, fixed = settings(case), samples.ref_logprobs.double()
    rows = torch.arange(len(samples)).repeat_interleave(samples.response_lengths)
    rows = rows.masked_fill(~samples.response_mask, -1)
    policy = torch.stack([logprobs[rows == row].sum() for row in range(len(samples))]).view(-1, 2)
    reference = torch.stack([fixed[rows == row].sum() for row in range(len(samples))]).view(-1, 2)
    tokens = torch.tensor([int((rows == row).sum()) for row in range(len(samples))]).view(-1, 2)
    if case == "kto":
        assert samples.rewards is not None
        return plain_kto(policy, reference, samples.rewards.view(-1, 2), config)
    return plain_dpo(policy, reference, tokens, config)


@pytest.mark.parametrize("case", CASES)
def test_an_update_has_the_gradient_of_the_plain_formula(case: str) -> None:
    samples = samples_of(case)
    assert samples.current_logprobs is not None
    exact = samples.current_logprobs.double().requires_grad_()
    expected = plain_loss(case, samples, exact)
    (expected_gradient,) = torch.autograd.grad(expected, exact)
    batch, step = prepared(case, samples)
    advantages, weights, learned = tokens_of(samples, batch)
    logprobs = samples.current_logprobs.clone().requires_grad_()
    loss, _ = loss_of(step.config, {"logprobs": logprobs, "advantages": advantages}, weights)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-6, atol=1e-9)
    assert step.values[metrics.PREFERENCE_LOSS] == pytest.approx(expected.item(), rel=1e-9)
    assert step.values[metrics.PREFERENCE_EXAMPLES] == PAIRS
    assert learned == list(range(0, 2 * PAIRS, 2) if case == "kto" else range(2 * PAIRS))


def tokens_of(samples: SampleBatch, batch: RemoteBatch) -> tuple[Tensor, Tensor, list[int]]:
    """(R,) advantages and weights at each token, 0 in samples that are not learned from; and those that are."""
    learned = batch.per_sample["sample_ids"].tolist()
    results = []
    for name in ("advantages", "weights"):
        of_samples = torch.zeros(len(samples)).index_copy(0, torch.tensor(learned), batch.per_sample[name])
        results.append(of_samples.repeat_interleave(samples.response_lengths).where(samples.response_mask, 0.0))
    return results[0], results[1], learned


@pytest.mark.parametrize("case", CASES)
def test_no_cut_into_micro_batches_and_no_packing_changes_the_update(case: str) -> None:
    """Also where the two responses of a pair lie apart; outside the mask columns hold nan."""
    samples = samples_of(case, 1)
    batch, step = prepared(case, samples)
    advantages, weights, _ = tokens_of(samples, batch)
    assert samples.current_logprobs is not None
    within = samples.padded(torch.ones_like(samples.response_mask)) > 0
    columns = {
        name: samples.padded(column).masked_fill(~within, math.nan)
        for name, column in {"logprobs": samples.current_logprobs, "advantages": advantages}.items()
    }
    padded = samples.padded(weights)
    cuts = [torch.randperm(len(samples)).tensor_split(sizes) for sizes in ([3, 7], [1], [2, 4, 9])]

    def loss(given: dict[str, Tensor], weights: Tensor) -> tuple[Tensor, Statistics]:
        return loss_of(step.config, given, weights)

    stats = check_pieces_add_up(loss, columns, padded, "logprobs", cuts)
    assert math.isfinite(stats[metrics.TRAIN_LOSS])


@pytest.mark.parametrize("case", CASES)
def test_coefficients_do_not_depend_on_the_ranks(case: str) -> None:
    samples = samples_of(case, 2)
    one, alone = prepared(case, samples)
    for ranks in (3, len(samples) + 2):
        several, dealt = prepared(case, samples, ranks=ranks)
        assert torch.equal(one.per_sample["advantages"], several.per_sample["advantages"])
        assert alone.values == dealt.values


def test_a_pair_stays_in_one_mini_batch() -> None:
    batch = remote(samples_of("dpo"))
    shards = mini_batches(batch, 3, load("dpo").together)
    assert [shard.per_sample["group_ids"].tolist() for shard in shards] == [
        [0, 0, 1, 1],
        [2, 2, 3, 3],
        [4, 4, 5, 5, 6, 6],
    ]


def test_figures_are_of_all_updates_of_a_step() -> None:
    samples = samples_of("dpo")
    step: Any = _Step(settings("dpo"), samples)
    prepare = load("dpo").prepare
    assert prepare is not None
    for shard in 2 * mini_batches(remote(samples), 2, 2):
        prepare(step, shard)
    assert step.values[metrics.PREFERENCE_EXAMPLES] == 2 * PAIRS
    full: Any = prepared("dpo", samples)[1]
    assert step.values[metrics.PREFERENCE_MARGIN] == pytest.approx(full.values[metrics.PREFERENCE_MARGIN])


# Pairs of groups


def test_the_best_and_the_worst_of_each_group_by_hand() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.5, 2.0, 0.0, 7.0])
    groups = torch.tensor([4, 4, 9, 4, 9, 4, 4, 1])
    rows, without = best_and_worst(rewards, groups)
    assert rows.tolist() == [3, 0]  # of equal ones the first; group 9 has no difference, and 1 has one sample
    assert without == 2
    rows, without = best_and_worst(torch.ones(3), torch.tensor([0, 0, 1]))
    assert rows.tolist() == [] and rows.dtype == torch.int64 and without == 2


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="best_and_worst"):
        best_and_worst(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))


def test_pairs_of_groups_bring_what_the_reference_says() -> None:
    torch.manual_seed(0)
    samples = make_samples([3, 3, 3, 5, 5, 8, 8], [0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 1.0])
    samples = samples.replace(ref_logprobs=-torch.rand(len(samples.logprobs)))
    step: Any = _Step(load("dpo").settings(name="dpo", pairs="group"), samples)
    _, summary = pack(samples)
    assert summary is not None
    batch = pairs_of_groups(step, RemoteBatch(summary.per_sample, []))
    assert batch.per_sample["sample_ids"].tolist() == [1, 0, 6, 5]
    assert batch.per_sample["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]
    expected = reference_sums(samples, config=None).per_sample["reference"][[1, 0, 6, 5]]
    assert torch.equal(batch.per_sample["reference_logprobs"], expected)
    assert step.values == {metrics.PREFERENCE_WITHOUT_DIFFERENCE: 1}


def test_a_step_with_too_few_pairs_learns_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    samples = samples_of("dpo")
    step: Any = _Step(settings("dpo"), samples, least_samples=4)
    few = remote(samples).select(range(6))
    load("dpo").learn(step, Experience(few))
    assert step.updated == []
    said = "hybridflow: step 3: 3 pairs, and an update needs 4: none is made\n"
    assert capsys.readouterr().err == said
    step.values |= {metrics.PREFERENCE_LOSS: 0.5, metrics.TRAIN_LOSS: 3.0, metrics.TRAIN_RATIO: 1.0}
    load("dpo").learn(step, Experience(remote(samples)))
    assert len(step.updated) == 1
    assert step.values[metrics.TRAIN_LOSS] == step.values[metrics.TRAIN_POLICY_LOSS] == 0.5
    assert metrics.TRAIN_RATIO not in step.values
    assert not capsys.readouterr().err

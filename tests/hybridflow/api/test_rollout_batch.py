"""RolloutBatch: what it holds, how it is cut and joined, and what it refuses."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from hybridflow.api.rollout_batch import RolloutBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason


def make_batch(samples: int, *, first_id: int = 0, seed: int = 0) -> RolloutBatch:
    generator = random.Random(seed)
    prompts = [[generator.randrange(3, 50) for _ in range(generator.randrange(1, 6))] for _ in range(samples)]
    responses = [[generator.randrange(3, 50) for _ in range(generator.randrange(0, 9))] for _ in range(samples)]
    return RolloutBatch.of(
        SampleBatch.from_generations(
            prompts=prompts,
            responses=responses,
            logprobs=[[-generator.random() for _ in response] for response in responses],
            sample_ids=range(first_id, first_id + samples),
            group_ids=[index // 2 for index in range(samples)],
            prompt_indices=[7 + index // 2 for index in range(samples)],
            policy_versions=[3] * samples,
            finish_reasons=["stop"] * samples,
        ),
        1,
    )


def per_sample(batch: RolloutBatch) -> dict[int, tuple[object, ...]]:
    """Return the values of each sample id, free of padding."""
    return {
        sample_id: (prompt, response, logprobs[: len(response)], group, prompt_index)
        for sample_id, prompt, response, logprobs, group, prompt_index in zip(
            batch.sample_ids.tolist(),
            batch.prompts(),
            batch.responses(),
            batch.logprobs.tolist(),
            batch.group_ids.tolist(),
            batch.prompt_indices.tolist(),
            strict=True,
        )
    }


def test_both_parts_are_padded_on_the_right() -> None:
    batch = RolloutBatch.of(
        SampleBatch.from_generations(
            prompts=[[5, 6, 7], [8]],
            responses=[[9], [10, 11]],
            logprobs=[[-0.5], [-0.25, -1.0]],
            sample_ids=[40, 41],
            group_ids=[20, 20],
            prompt_indices=[3, 3],
            policy_versions=[1, 2],
            finish_reasons=["length", FinishReason.STOP],
        ),
        1,
    )
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.generated_ids.tolist() == [[9, 1], [10, 11]]
    assert batch.response_mask.tolist() == [[True, False], [True, True]]
    assert batch.logprobs.tolist() == [[-0.5, 0.0], [-0.25, -1.0]]
    assert batch.sequence_lengths.tolist() == [4, 3]
    assert batch.finish_reasons.tolist() == [FinishReason.LENGTH, FinishReason.STOP]
    assert batch.prompts() == [[5, 6, 7], [8]]
    assert batch.responses() == [[9], [10, 11]]


def test_select_split_and_concatenate_keep_every_sample_whole() -> None:
    first, second = make_batch(7), make_batch(6, first_id=100, seed=1)
    joined = RolloutBatch.concatenate([first, second])
    assert per_sample(joined) == per_sample(first) | per_sample(second)
    assert joined.sample_ids.tolist() == [*range(7), *range(100, 106)]
    batches = joined.split(4)
    assert [len(batch) for batch in batches] == [3, 3, 3, 4]
    again = RolloutBatch.concatenate(batches)
    assert again.sample_ids.tolist() == joined.sample_ids.tolist()
    chosen = joined.select([12, 0, 5])
    assert chosen.sample_ids.tolist() == [105, 0, 5]
    assert per_sample(chosen) == {sample: per_sample(joined)[sample] for sample in (105, 0, 5)}
    assert per_sample(joined.select(torch.tensor([2]))) == {2: per_sample(joined)[2]}


def test_concatenate_pads_with_the_pad_token_and_keeps_masks_false_there() -> None:
    wide = make_batch(4, seed=3)
    narrow = RolloutBatch.of(
        SampleBatch.from_generations(
            prompts=[[5]],
            responses=[[6]],
            logprobs=[[-1.0]],
            sample_ids=[99],
            group_ids=[9],
            prompt_indices=[0],
            policy_versions=[0],
            finish_reasons=["abort"],
        ),
        1,
    )
    row = RolloutBatch.concatenate([narrow, wide])
    assert row.input_ids[0].tolist() == [5] + [1] * (wide.input_ids.shape[1] - 1)
    assert row.generated_ids[0].tolist() == [6] + [1] * (wide.generated_ids.shape[1] - 1)
    assert int(row.response_mask[0].sum()) == 1


def test_there_and_back_without_padding() -> None:
    batch = make_batch(6)
    values = torch.rand(batch.generated_ids.shape).where(batch.response_mask, 0.0)
    batch = batch.replace(rewards=torch.arange(6.0), values=values)
    samples = batch.samples()
    assert len(samples.tokens) == int(batch.sequence_lengths.sum())
    assert (samples.prompts(), samples.responses()) == (batch.prompts(), batch.responses())
    again = RolloutBatch.of(samples, 1)
    assert list(again.columns()) == list(batch.columns())
    for name, column in again.columns().items():
        assert torch.equal(column, batch.columns()[name]), name
    assert batch.select([3]).samples().responses() == batch.responses()[3:4]  # rows wider than they need be


def test_replace_keeps_the_other_columns() -> None:
    batch = make_batch(5)
    full = batch.replace(rewards=torch.arange(5.0))
    assert batch.rewards is None
    selected = full.select([3])
    assert selected.rewards is not None
    assert selected.rewards.tolist() == [3.0]


def test_pickle_and_device_move_keep_everything() -> None:
    batch = make_batch(4).replace(rewards=torch.ones(4))
    for copy in (pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert per_sample(copy) == per_sample(batch)
        assert copy.rewards is not None
        assert copy.rewards.tolist() == [1.0] * 4


def test_an_empty_batch_is_a_batch() -> None:
    assert len(make_batch(3).select([])) == 0


def _one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_wrong_columns_are_refused_in_one_line() -> None:
    batch = make_batch(4)
    width = batch.generated_ids.shape[1]
    with pytest.raises(ValueError, match="RolloutBatch") as error:
        batch.replace(rewards=torch.zeros(3))
    assert "rewards is (3,) torch.float32" in _one_line(error)
    assert "expected (B,) = (4,) torch.float32" in _one_line(error)
    with pytest.raises(ValueError, match=r"advantages .* torch.float64 .* expected \(B, S'\)"):
        batch.replace(advantages=torch.zeros(4, width, dtype=torch.float64))
    with pytest.raises(ValueError, match="no column 'reward', expected one of input_ids"):
        batch.replace(reward=torch.zeros(4))
    with pytest.raises(ValueError, match="response_mask counts a position past"):
        batch.replace(response_mask=torch.ones(4, width, dtype=torch.bool), response_lengths=torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"prompt_lengths lie in 0\.\.0, expected 1"):
        batch.replace(prompt_lengths=torch.zeros(4).long())


def test_a_sample_cannot_occur_twice() -> None:
    batch = make_batch(4)
    with pytest.raises(ValueError, match="sample id 2 occurs more than once"):
        batch.select([1, 2, 2])
    with pytest.raises(ValueError, match="occurs more than once"):
        RolloutBatch.concatenate([batch, batch.select([0])])


def test_splits_and_joins_that_cannot_be_are_refused() -> None:
    batch = make_batch(3)
    with pytest.raises(ValueError, match="cannot split 3 samples into 4 non-empty shards"):
        batch.split(4)
    with pytest.raises(ValueError, match="batches 0 and 1 of concatenate differ in rewards"):
        RolloutBatch.concatenate([batch, make_batch(2, first_id=10).replace(rewards=torch.zeros(2))])
    with pytest.raises(ValueError, match="integer indices"):
        batch.select(torch.tensor([True, False, True]))


def test_routes_are_of_whole_samples() -> None:
    lengths, width = ([(3, 2), (1, 6)], [(4, 1), (2, 2), (1, 0)]), 4
    batches = []
    for first, pairs in enumerate(lengths):
        numbers = [10 * (10 * first + sample) for sample in range(len(pairs))]
        routes = [
            [[number + token + entry for entry in range(width)] for token in range(prompt + response - 1)]
            for number, (prompt, response) in zip(numbers, pairs, strict=True)
        ]
        batches.append(
            SampleBatch.from_generations(
                prompts=[[5] * prompt for prompt, _ in pairs],
                responses=[[6] * response for _, response in pairs],
                logprobs=[[-0.5] * response for _, response in pairs],
                sample_ids=numbers,
                group_ids=numbers,
                prompt_indices=numbers,
                policy_versions=[1] * len(pairs),
                finish_reasons=["stop"] * len(pairs),
                routes=[np.array(rows, dtype="int16").reshape(-1, width) for rows in routes],
            )
        )
    one, other = (RolloutBatch.of(batch, 1) for batch in batches)
    assert one.routes is not None and one.routes.shape == (2, 7, width)
    joined = RolloutBatch.concatenate([other, one])
    assert joined.routes is not None and joined.routes.shape == (5, 7, width)
    back, expected = joined.samples(), SampleBatch.concatenate([batches[1], batches[0]])
    assert back.routes is not None and expected.routes is not None
    assert torch.equal(back.routes, expected.routes) and back.routes.dtype == torch.int16
    assert back.missing_routes.tolist() == [0] * 5
    assert (back.routes[back.sequence_lengths.cumsum(0) - 1] == -1).all()
    some, right = joined.select([4, 1]).samples().routes, expected.select([4, 1]).routes
    assert some is not None and right is not None and torch.equal(some, right)
    with pytest.raises(ValueError, match=r"column routes is \(22, 4\) torch.int32 .* torch.uint8 or torch.int16"):
        expected.replace(routes=expected.routes.int())

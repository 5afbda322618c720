"""SampleBatch: samples end to end, how they are cut and joined, and what is refused."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

from hybridflow.api.rollout_batch import RolloutBatch
from hybridflow.batch.sample_batch import COLUMNS, RESPONSE, WIDE_RESPONSE, SampleBatch
from hybridflow.batch.sample_fields import FinishReason


def make_batch(samples: int, *, first_id: int = 0, seed: int = 0) -> SampleBatch:
    """Responses of 0 to 8 tokens; every per-token column tells tokens apart."""
    generator = random.Random(seed)
    prompts = [[generator.randrange(3, 50) for _ in range(generator.randrange(1, 6))] for _ in range(samples)]
    responses = [[generator.randrange(3, 50) for _ in range(generator.randrange(0, 9))] for _ in range(samples)]
    return SampleBatch.from_generations(
        prompts=prompts,
        responses=responses,
        logprobs=[[-generator.random() for _ in response] for response in responses],
        sample_ids=range(first_id, first_id + samples),
        group_ids=[index // 2 for index in range(samples)],
        prompt_indices=[7 + index // 2 for index in range(samples)],
        policy_versions=[3] * samples,
        finish_reasons=["stop"] * samples,
        response_masks=[[generator.random() < 0.7 for _ in response] for response in responses],
    )


def by_sample_id(batch: SampleBatch) -> dict[int, tuple[object, ...]]:
    """Return the values of each sample id."""
    lengths = batch.response_lengths.tolist()
    columns = [
        [shard.tolist() for shard in column.split(lengths)]
        for name, column in batch.columns().items()
        if COLUMNS[name][0] in (RESPONSE, WIDE_RESPONSE)
    ]
    return {
        sample: tuple(stats)
        for sample, *stats in zip(
            batch.sample_ids.tolist(),
            batch.prompts(),
            batch.responses(),
            batch.group_ids.tolist(),
            batch.prompt_indices.tolist(),
            *columns,
            strict=True,
        )
    }  # type: ignore[misc]


def test_a_token_is_computed_by_the_weights_that_draw_the_next() -> None:
    """-1 is the version of tokens that were given, such as a tool's."""
    batch = SampleBatch.from_generations(
        prompts=[[5, 6, 7], [8], [9, 9]],
        responses=[[10, 11, 12, 13], [14, 15], []],
        logprobs=[[0.0] * 4, [0.0] * 2, []],
        sample_ids=[0, 1, 2],
        group_ids=[0, 0, 0],
        prompt_indices=[0, 0, 0],
        policy_versions=[2, 4, 6],
        finish_reasons=["stop"] * 3,
        token_versions=[[2, -1, -1, 3], [4, 5], []],
    )
    assert batch.drawing_versions.tolist() == [2, 2, 2, 3, 3, 3, 3, 4, 5, 5, 6, 6]
    assert batch.replace(token_versions=None).drawing_versions.tolist() == [3] * 7 + [5] * 3 + [6] * 2


def test_samples_lie_end_to_end() -> None:
    batch = SampleBatch.from_generations(
        prompts=[[5, 6, 7], [8]],
        responses=[[9], [10, 11]],
        logprobs=[[-0.5], [-0.25, -1.0]],
        sample_ids=[40, 41],
        group_ids=[20, 20],
        prompt_indices=[3, 3],
        policy_versions=[1, 2],
        finish_reasons=["length", FinishReason.STOP],
    )
    assert batch.tokens.tolist() == [5, 6, 7, 9, 8, 10, 11]
    assert batch.is_response.tolist() == [False, False, False, True, False, True, True]
    assert batch.logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert batch.response_mask.tolist() == [True] * 3
    assert batch.sequence_lengths.tolist() == [4, 3]
    assert batch.finish_reasons.tolist() == [FinishReason.LENGTH, FinishReason.STOP]
    assert batch.prompts() == [[5, 6, 7], [8]]
    assert batch.responses() == [[9], [10, 11]]
    assert batch.padded(batch.logprobs).tolist() == [[-0.5, 0.0], [-0.25, -1.0]]
    assert [batch.place_of(position) for position in range(3)] == [(0, 0), (1, 0), (1, 1)]


def test_padded_rows_and_back() -> None:
    batch = make_batch(7)
    rows = batch.padded(batch.logprobs)
    assert rows.shape == (7, int(batch.response_lengths.max()))
    for row, length, logprob in zip(
        rows, batch.response_lengths, batch.logprobs.split(batch.response_lengths.tolist()), strict=True
    ):
        assert torch.equal(row[:length], logprob) and not row[length:].any()
    assert torch.equal(batch.flat(rows), batch.logprobs)
    assert torch.equal(batch.flat(torch.nn.functional.pad(rows, (0, 20 - rows.shape[1]))), batch.logprobs)
    # A response of no tokens is none of the places.
    positions = [batch.place_of(position) for position in range(len(batch.logprobs))]
    assert positions == [
        (sample, token) for sample, length in enumerate(batch.response_lengths) for token in range(length)
    ]


def test_select_split_and_concatenate_keep_every_sample_whole() -> None:
    first, second = make_batch(7), make_batch(6, first_id=100, seed=1)
    joined = SampleBatch.concatenate([first, second])
    assert by_sample_id(joined) == by_sample_id(first) | by_sample_id(second)
    assert joined.sample_ids.tolist() == [*range(7), *range(100, 106)]
    shards = joined.split(4)
    assert [len(shard) for shard in shards] == [3, 3, 3, 4]
    again = SampleBatch.concatenate(shards)
    assert again.sample_ids.tolist() == joined.sample_ids.tolist() and by_sample_id(again) == by_sample_id(joined)
    chosen = joined.select([12, 0, 5])
    assert chosen.sample_ids.tolist() == [105, 0, 5]
    assert by_sample_id(chosen) == {sample: by_sample_id(joined)[sample] for sample in (105, 0, 5)}
    assert by_sample_id(joined.select(torch.tensor([2]))) == {2: by_sample_id(joined)[2]}


def test_a_copy_keeps_everything() -> None:
    batch = make_batch(4).replace(rewards=torch.ones(4))
    copy = pickle.loads(pickle.dumps(batch))
    assert by_sample_id(copy) == by_sample_id(batch)
    assert copy.rewards is not None
    assert copy.rewards.tolist() == [1.0] * 4


def test_an_empty_batch_is_a_batch() -> None:
    empty = make_batch(3).select([])
    assert len(empty) == len(empty.tokens) == 0
    assert empty.prompts() == [] and empty.padded(empty.logprobs).shape == (0, 0)


def _one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_wrong_columns_are_refused_in_one_line() -> None:
    batch = make_batch(4)
    count = len(batch.logprobs)
    with pytest.raises(ValueError, match="samples") as error:
        batch.replace(rewards=torch.zeros(3))
    assert "rewards is (3,) torch.float32" in _one_line(error)
    assert "expected (B,) = (4,) torch.float32" in _one_line(error)
    with pytest.raises(ValueError, match=rf"advantages .* torch.float64 .* expected \(R,\) = \({count},\)"):
        batch.replace(advantages=torch.zeros(count, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"advantages is \(4, \d\)"):
        batch.replace(advantages=batch.padded(batch.logprobs))
    with pytest.raises(ValueError, match="no column 'reward', expected one of tokens"):
        batch.replace(reward=torch.zeros(4))
    with pytest.raises(ValueError, match=r"tokens is .* expected \(T,\)"):
        batch.replace(prompt_lengths=batch.prompt_lengths + 1)
    with pytest.raises(ValueError, match="prompt_lengths has 0, expected at least 1"):
        batch.replace(prompt_lengths=torch.zeros(4).long())
    with pytest.raises(ValueError, match=r"response_lengths has -\d+, expected at least 0"):
        batch.replace(response_lengths=batch.response_lengths - 1 - batch.response_lengths.max())
    with pytest.raises(ValueError, match=r"response_lengths \(3,\), expected \(B,\) each"):
        batch.replace(response_lengths=batch.response_lengths[:3])


def test_a_sample_cannot_occur_twice() -> None:
    batch = make_batch(4)
    with pytest.raises(ValueError, match="sample id 2 occurs more than once"):
        batch.select([1, 2, 2])
    with pytest.raises(ValueError, match="occurs more than once"):
        SampleBatch.concatenate([batch, batch.select([0])])


def test_lists_that_do_not_fit_together_name_the_sample() -> None:
    good = {
        "prompts": [[5], [6]],
        "responses": [[7], [8, 9]],
        "logprobs": [[-1.0], [-1.0, -2.0]],
        "sample_ids": [70, 71],
        "group_ids": [0, 0],
        "prompt_indices": [0, 0],
        "policy_versions": [0, 0],
        "finish_reasons": ["stop", "stop"],
    }
    SampleBatch.from_generations(**good)  # type: ignore[arg-type]
    for changed, message in (
        ({"logprobs": [[-1.0], [-1.0]]}, "sample 71 has 2 response tokens, 1 log-probs"),
        ({"logprobs": [[-1.0], [-1.0, float("nan")]]}, "sample 71 has log-prob nan at response token 1"),
        ({"finish_reasons": ["stop", "tired"]}, "finish reason 'tired', expected one of stop, length, abort"),
        ({"group_ids": [0]}, "1 entries of group_ids for 2 prompts"),
        ({"sample_ids": [70, 70]}, "sample id 70 occurs more than once"),
    ):
        with pytest.raises(ValueError, match=message):
            SampleBatch.from_generations(**(good | changed))  # type: ignore[arg-type]


def test_splits_and_joins_that_cannot_be_are_refused() -> None:
    batch = make_batch(3)
    with pytest.raises(ValueError, match="cannot split 3 samples into 4 non-empty shards"):
        batch.split(4)
    with pytest.raises(ValueError, match="batches 0 and 1 of concatenate differ in rewards"):
        SampleBatch.concatenate([batch, make_batch(2, first_id=10).replace(rewards=torch.zeros(2))])
    with pytest.raises(ValueError, match="needs at least one batch"):
        SampleBatch.concatenate([])
    with pytest.raises(ValueError, match="integer indices"):
        batch.select(torch.tensor([True, False, True]))


def with_several_figures(batch: SampleBatch, width: int) -> SampleBatch:
    """The batch with columns of so many figures of each token, which tell tokens and figures apart."""
    generator = torch.Generator().manual_seed(int(batch.sample_ids[0]))
    shape = (len(batch.logprobs), width)
    return batch.replace(
        chosen_tokens=torch.randint(0, 50, shape, generator=generator),
        teacher_chosen_logprobs=-torch.rand(shape, generator=generator),
    )


def test_columns_of_several_figures_of_each_token_are_cut_and_joined_with_their_samples() -> None:
    first, second = (with_several_figures(make_batch(7, first_id=start, seed=start), 3) for start in (0, 100))
    joined = SampleBatch.concatenate([first, second])
    assert joined.chosen_tokens is not None and joined.chosen_tokens.shape == (len(joined.logprobs), 3)
    assert by_sample_id(joined) == by_sample_id(first) | by_sample_id(second)
    chosen = joined.select([12, 0, 5])
    assert by_sample_id(chosen) == {sample: by_sample_id(joined)[sample] for sample in (105, 0, 5)}
    again = SampleBatch.concatenate(joined.split(4))
    assert by_sample_id(again) == by_sample_id(joined)
    empty = joined.select([])
    assert empty.chosen_tokens is not None and empty.chosen_tokens.shape == (0, 3)


def test_padded_rows_of_several_figures_of_each_token_and_back() -> None:
    batch = with_several_figures(make_batch(7), 3)
    assert batch.chosen_tokens is not None and batch.teacher_chosen_logprobs is not None
    longest = int(batch.response_lengths.max())
    rows = RolloutBatch.of(batch, 1)
    assert rows.chosen_tokens is not None and rows.chosen_tokens.shape == (7, longest, 3)
    shards = batch.chosen_tokens.split(batch.response_lengths.tolist())
    for row, length, shard in zip(rows.chosen_tokens, batch.response_lengths, shards, strict=True):
        assert torch.equal(row[:length], shard) and not row[length:].any()
    assert by_sample_id(rows.samples()) == by_sample_id(batch)
    short = rows.select([int(batch.response_lengths.argmin())])
    narrow = RolloutBatch.of(short.samples(), 1)
    other = RolloutBatch.of(with_several_figures(make_batch(3, first_id=50, seed=9), 3), 1)
    joined = RolloutBatch.concatenate([narrow, other])
    assert by_sample_id(joined.samples()) == by_sample_id(short.samples()) | by_sample_id(other.samples())


def test_columns_of_several_figures_are_as_wide_as_each_other() -> None:
    batch = with_several_figures(make_batch(4), 3)
    count = len(batch.logprobs)
    with pytest.raises(ValueError, match=rf"teacher_chosen_logprobs .* expected \(R, K\) = \({count}, 3\)"):
        batch.replace(teacher_chosen_logprobs=torch.zeros(count, 2))
    with pytest.raises(ValueError, match=rf"teacher_chosen_logprobs .* expected \(R, K\) = \({count},\)"):
        batch.replace(chosen_tokens=None)

"""Batches whose tensors stay with the ranks that made them: what each rank gets, and what the driver does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.resource_pool import cluster_nodes, release, reserve
from hybridflow.workers.worker_group import RankError
from tests.support.called_group import CalledGroup
from tests.support.group_workers import Model, batch_of, response_tokens

pytestmark = pytest.mark.processes

LONGEST = 7


@pytest.fixture(scope="module")
def groups(ray_cluster: None) -> Iterator[dict[str, CalledGroup]]:
    """Two rollout ranks; an actor of tp 2, dp 2; a reference of pp 2 beside the rollout ranks."""
    pools = reserve(
        pool_devices({"rollout": "cpu:0-1", "actor": "cpu:2-5", "reference": "cpu:0-1"}, {}, cluster_nodes())
    )
    layouts = {"rollout": Layout(dp=2), "actor": Layout(tp=2, dp=2), "reference": Layout(pp=2)}
    made = {role: CalledGroup(role, Model, pools[role], layouts[role], call_timeout_s=300) for role in pools}
    yield made
    for group in made.values():
        group.shutdown()
    release(pools)


def with_routes(batch: SampleBatch) -> SampleBatch:
    """The same with two experts a token: the id of its sample, and its position in the sample."""
    lengths = batch.sequence_lengths
    positions = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    routes = torch.stack([batch.sample_ids.repeat_interleave(lengths), positions], dim=1)
    return batch.replace(routes=routes.to(torch.uint8))


def test_ranks_get_the_routes_of_their_own_samples_where_they_need_them(groups: dict[str, CalledGroup]) -> None:
    samples = with_routes(batch_of([3, 1, 4, 15, 9], LONGEST))
    batch = RemoteBatch.of(samples).select([4, 2, 0, 1])
    assert batch.per_sample["route_bytes"].tolist() == [2 * length for length in batch.lengths.tolist()]
    assert same(batch.fetch(), samples.select([4, 2, 0, 1]))
    for rank, sample, rows in groups["actor"].routes(batch).result():
        assert rank in (0, 2) and rows == [[sample, position] for position in range(len(rows))]
        assert len(rows) == int(samples.sequence_lengths[samples.sample_ids == sample])
    assert all("routes" not in columns for _, columns in groups["actor"].seen(batch).result())
    for routes in (True, False):  # those for other nodes are cut where they are
        shards = batch.shard([[0, 3], [1, 2]], [frozenset({"another"})] * 2, routes=routes)
        for shard, rows in zip(shards, ([4, 1], [2, 0]), strict=True):
            cut, expected = shard.unpack(), samples.select(rows)
            assert isinstance(cut, SampleBatch)
            assert same(cut.with_routes(), expected if routes else expected.replace(routes=None))
            if routes:
                # Memory of the object store, of which a rank has no copy.
                assert cut.routes is None and cut.stored_routes is not None
                assert not any(rows.flags.owndata or rows.flags.writeable for rows in cut.stored_routes.samples)
                assert same(cut.select([1]), expected.select([1]))


def same(result: SampleBatch, expected: SampleBatch) -> bool:
    return list(result.columns()) == list(expected.columns()) and all(
        torch.equal(column, expected.columns()[name]) for name, column in result.columns().items()
    )


def test_tokens_go_from_rank_to_rank_and_every_sample_keeps_its_figures(groups: dict[str, CalledGroup]) -> None:
    samples = [3, 1, 4, 15, 9, 2, 6, 5, 35, 8]
    batch = groups["rollout"].generate(samples, longest=LONGEST).batch()
    assert batch.per_sample["sample_ids"].tolist() == samples
    assert batch.per_sample["loss_tokens"].tolist() == [1 + sample % LONGEST for sample in samples]
    assert same(batch.fetch(), batch_of(samples, LONGEST))

    batch = batch.with_columns(ref_logprobs=groups["reference"].logprobs(batch))
    batch = batch.with_per_sample(rewards=torch.tensor(samples) / 100)
    future = groups["actor"].returns(batch)
    batch = batch.with_columns(future)
    assert future.notes() == [0, 2]  # tp 0 of each replica
    lengths = torch.tensor([1 + sample % LONGEST for sample in samples])
    expected = lengths * (torch.tensor(samples) / 10 + torch.tensor(samples) / 100)
    torch.testing.assert_close(future.per_sample()["total"], expected)

    full = batch.fetch()
    assert same(full.replace(ref_logprobs=None, rewards=None, returns=None), batch_of(samples, LONGEST))
    assert full.returns is not None and full.ref_logprobs is not None
    assert torch.equal(full.ref_logprobs, response_tokens(full) / 10)
    torch.testing.assert_close(full.padded(full.returns).sum(dim=1), future.per_sample()["total"])


def test_a_call_waits_for_no_column_that_it_is_not_given(groups: dict[str, CalledGroup], tmp_path: Path) -> None:
    generated = groups["rollout"].generate([3, 1, 4], longest=LONGEST).batch()
    slow = groups["reference"].logprobs(generated, until=tmp_path / "end")
    batch = generated.with_columns(ref_logprobs=slow).with_per_sample(rewards=torch.ones(3))
    seen = groups["actor"].seen(batch.as_generated()).result()
    assert not slow.done()
    (tmp_path / "end").touch()
    assert {name for _, row in seen for name in row} == {*generated.fetch().columns(), "rewards"}
    assert batch.fetch().ref_logprobs is not None


def test_each_rank_gets_its_part_and_the_parts_cost_alike(groups: dict[str, CalledGroup]) -> None:
    samples = list(range(20, 37))
    batch = groups["rollout"].generate(samples, longest=LONGEST).batch()
    batch = batch.with_columns(ref_logprobs=groups["reference"].logprobs(batch)).with_per_sample(
        weights=torch.arange(17) / 4
    )
    seen: list[tuple[int, dict[str, Any]]] = groups["actor"].seen(batch).result()
    assert [row["sample_ids"] for _, row in seen] == [
        [sample] for sample in samples
    ]  # in the order of the batch, whoever had them
    assert {rank for rank, _ in seen} == {0, 2}
    totals = {0: 0, 2: 0}
    for rank, row in seen:
        [sample] = row["sample_ids"]
        length = 1 + sample % LONGEST
        totals[rank] += row["prompt_lengths"][0] + row["response_lengths"][0]
        assert row["tokens"] == [sample] * (1 + sample % 3 + length)
        assert row["ref_logprobs"] == pytest.approx([sample / 10] * length)
        assert row["weights"] == [(sample - 20) / 4] * length  # a figure of the sample, for each of its tokens
    assert abs(totals[0] - totals[2]) <= 1 + 3 + LONGEST


def test_selected_and_joined_batches_hold_their_samples(groups: dict[str, CalledGroup]) -> None:
    first = groups["rollout"].generate([1, 2, 3, 4, 5], longest=LONGEST).batch()
    second = groups["rollout"].generate([11, 12, 13], longest=3).batch()
    first = first.with_columns(ref_logprobs=groups["reference"].logprobs(first))
    second = second.with_columns(ref_logprobs=groups["actor"].logprobs(second))
    joined = RemoteBatch.concatenate([first.select([4, 0, 2]), second.select(torch.tensor([2, 1]))])
    samples = [5, 1, 3, 13, 12]
    assert joined.per_sample["sample_ids"].tolist() == samples
    full = joined.fetch()
    assert full.sample_ids.tolist() == samples
    assert full.ref_logprobs is not None
    lengths = [1 + sample % (LONGEST if sample < 10 else 3) for sample in samples]
    assert full.responses() == [[sample] * length for sample, length in zip(samples, lengths, strict=True)]
    assert torch.equal(full.ref_logprobs, response_tokens(full) / 10)
    halves = joined.split(2)
    assert [half.fetch().sample_ids.tolist() for half in halves] == [samples[:2], samples[2:]]
    assert groups["actor"].undivided_ids(joined).result() == [samples] * 4
    assert same(RemoteBatch.of(full).select([3]).fetch(), joined.select([3]).fetch())


def test_results_of_a_batch_come_in_its_order(groups: dict[str, CalledGroup]) -> None:
    samples = [3, 1, 4, 15, 9, 2]
    batch = groups["rollout"].generate(samples, longest=LONGEST).batch()
    future = groups["actor"].logprobs(batch)
    assert future.shard_indices is not None and sum(future.shard_indices[0]) != sum(
        range(3)
    )  # not simply the first half
    batch = batch.with_columns(ref_logprobs=future).with_per_sample(rewards=torch.zeros(6))
    full = batch.fetch()
    assert full.ref_logprobs is not None and torch.equal(full.ref_logprobs, response_tokens(full) / 10)
    assert [row["sample_ids"] for _, row in groups["actor"].seen(batch).result()] == [[sample] for sample in samples]
    with pytest.raises(EngineError, match=r"actor\.returns: returned columns, which are joined to a batch"):
        groups["actor"].returns(batch).result()


def test_results_of_a_batch_are_data_in_its_order(groups: dict[str, CalledGroup]) -> None:
    samples = [8, 1, 2, 3, 4, 35, 6, 7]
    batch = groups["rollout"].generate(samples, longest=LONGEST).batch()
    ids = groups["actor"].ids(batch)
    assert ids.shard_indices is not None and [*ids.shard_indices[0], *ids.shard_indices[1]] != list(
        range(8)
    )  # by what samples cost
    again = groups["rollout"].generate(ids, longest=LONGEST).batch()
    assert again.per_sample["sample_ids"].tolist() == samples


def test_a_call_need_not_wait_for_the_columns_that_it_reads(groups: dict[str, CalledGroup], tmp_path: Path) -> None:
    batch = groups["rollout"].generate(list(range(6)), longest=LONGEST).batch().with_per_sample(rewards=torch.zeros(6))
    slow = groups["reference"].logprobs(batch, until=tmp_path / "end")
    future = groups["actor"].returns(batch.with_columns(ref_logprobs=slow))
    assert not slow.done() and not future.done()
    (tmp_path / "end").touch()
    lengths = torch.tensor([1 + sample % LONGEST for sample in range(6)])
    torch.testing.assert_close(future.per_sample()["total"], lengths * torch.arange(6) / 10)


def test_the_driver_holds_no_tensors(groups: dict[str, CalledGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a hundred megabytes pass from ranks to ranks; the driver's memory and traffic stay small."""
    passed: list[int] = []
    get, put = ray.get, ray.put

    def measured_get(refs: Any, **options: Any) -> Any:
        values = get(refs, **options)
        passed.append(len(ray.cloudpickle.dumps(values)))
        return values

    def measured_put(value: Any, **options: Any) -> Any:
        passed.append(len(ray.cloudpickle.dumps(value)))
        return put(value, **options)

    monkeypatch.setattr(ray, "get", measured_get)
    monkeypatch.setattr(ray, "put", measured_put)
    samples, longest = list(range(100, 164)), 100_000
    monkeypatch.setattr(groups["rollout"].ranks, "call_timeout_s", 120)
    before = psutil.Process().memory_info().rss
    batch = groups["rollout"].generate([sample * longest - 1 for sample in samples], longest=longest).batch()
    batch = batch.with_columns(ref_logprobs=groups["reference"].logprobs(batch)).with_per_sample(rewards=torch.ones(64))
    assert len(groups["actor"].returns(batch).per_sample()["total"]) == 64
    moved = 64 * longest * (8 + 1 + 4 + 4 + 4)  # tokens, mask, log-probs, those of the reference, returns
    assert moved > 130e6
    assert sum(passed) < 200_000
    assert psutil.Process().memory_info().rss - before < 20e6


def test_what_cannot_be_done_with_a_batch(groups: dict[str, CalledGroup]) -> None:
    batch = groups["rollout"].generate([1, 2, 3], longest=LONGEST).batch()
    other = groups["rollout"].generate([4, 5], longest=LONGEST).batch()
    with pytest.raises(UserError, match=r"actor\.logprobs: cannot shard 1 samples over 2 ranks"):
        groups["actor"].logprobs(batch.select([0]))
    with pytest.raises(UserError, match=r"actor\.logprobs: 2 batches in one call, expected one"):
        groups["actor"].logprobs(batch, other)
    with pytest.raises(ValueError, match=r"actor\.logprobs is no call with these 2 samples in this order"):
        other.with_columns(ref_logprobs=groups["actor"].logprobs(batch))
    with pytest.raises(ValueError, match=r"actor\.logprobs is no call with these 3 samples in this order"):
        batch.with_columns(ref_logprobs=groups["actor"].logprobs(batch.select([2, 1, 0])))
    with pytest.raises(ValueError, match="advantages is a per-sample column of it already, expected a new column"):
        batch.with_per_sample(advantages=torch.zeros(3)).with_columns(advantages=groups["actor"].logprobs(batch))
    with pytest.raises(ValueError, match="no column is called advantage, expected one of tokens, "):
        batch.with_per_sample(advantage=torch.zeros(3))
    with pytest.raises(UserError, match=r"actor\.logprobs: data next to a batch would be split differently"):
        groups["actor"].logprobs(batch, torch.zeros(3))
    with pytest.raises(UserError, match=r"actor\.logprobs: a batch by keyword, expected it by position"):
        groups["actor"].logprobs(until=batch)
    with pytest.raises(ValueError, match=r"per-sample column rewards has shape \(2,\), expected \(3,\)"):
        batch.with_per_sample(rewards=torch.zeros(2))
    with pytest.raises(ValueError, match="differ in rewards"):
        RemoteBatch.concatenate([batch, other.with_per_sample(rewards=torch.zeros(2))])
    some = batch.select([0, 1]).with_columns(ref_logprobs=groups["actor"].logprobs(batch.select([0, 1])))
    rest = batch.select([2])
    with pytest.raises(ValueError, match="column ref_logprobs is there for 2 of 3 samples"):
        RemoteBatch.concatenate([some, rest]).fetch()


def test_a_column_that_fails_is_the_cause(ray_cluster: None) -> None:
    pools = reserve(pool_devices({"critic": "cpu:6-7"}, {}, cluster_nodes()))
    with CalledGroup("critic", Model, pools["critic"], Layout(dp=2), call_timeout_s=300) as group:
        batch = group.generate([1, 2], longest=LONGEST).batch()
        batch = batch.with_columns(ref_logprobs=group.fail(batch)).with_per_sample(rewards=torch.zeros(2))
        with pytest.raises(
            RankError, match=r"critic rank 1, fail: ValueError: columns: column logprobs has shape \(\d,\)"
        ):
            group.returns(batch).result()
    release(pools)


def test_a_column_that_does_not_come_is_the_cause(ray_cluster: None, tmp_path: Path) -> None:
    pools = reserve(pool_devices({"critic": "cpu:6", "reference": "cpu:7"}, {}, cluster_nodes()))
    with (
        CalledGroup("critic", Model, pools["critic"], Layout(), call_timeout_s=300) as critic,
        CalledGroup("reference", Model, pools["reference"], Layout(), call_timeout_s=300) as reference,
    ):
        batch = critic.generate([1, 2], longest=LONGEST).batch()
        batch = batch.with_columns(ref_logprobs=reference.logprobs(batch, until=tmp_path / "never"))
        with pytest.raises(RankError, match="reference rank 0, logprobs: no answer within 2 s"):
            critic.seen(batch).result(2.0)
    release(pools)

"""The benchmark of streams: small runs learn each group once, within the staleness, and their figures hold together."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.controller_load import measure_controller
from benchmarks.response_lengths import LONGEST, PUBLISHED, Lengths
from benchmarks.rollout_stream import cases, main, transfers
from benchmarks.stream_load import DeviceLease, Workload, measure_batch, measure_stream
from hybridflow.rollout.ledger import StreamLimits

_SMALL = Workload(engines=4, slots=16, groups=16, samples=4, warm_up=3, steps=8)
_CASES = cases(_SMALL.groups, 4)
_STREAMS = [case for case in _CASES if case.limits is not None]


@pytest.mark.slow
@pytest.mark.parametrize("case", _STREAMS, ids=lambda case: case.name)
def test_each_group_is_learned_from_once_and_is_not_too_old(case) -> None:  # type: ignore[no-untyped-def]
    measured = measure_stream(_SMALL, 20.0, case.limits)
    groups = [number for step in measured.learned for number in step.groups]
    assert len(measured.learned) == 11 and {len(step.groups) for step in measured.learned} == {16}
    assert len(set(groups)) == len(groups)
    assert measured.most_staleness <= case.limits.max_staleness
    assert max(age for step in measured.learned for age in step.staleness) <= case.limits.max_staleness
    assert 0 < measured.slots <= measured.busy <= 1 + 1e-9
    assert measured.step_s >= 20.0 and measured.trainer <= 1 + 1e-9
    if not (case.limits.extra or case.limits.late == "evict"):
        assert measured.evicted == measured.dropped == 0


def test_a_synchronous_stream_has_the_responses_of_the_batch_call_and_running_ahead_is_faster() -> None:
    batch, rollout_s = measure_batch(_SMALL, 20.0, ahead=False)
    ahead, _ = measure_batch(_SMALL, 20.0, ahead=True)
    assert batch.step_s == pytest.approx(rollout_s + 20.0)
    assert ahead.most_staleness == 1 and batch.most_staleness == 0
    by_name = {case.name: case for case in _STREAMS}
    steps = {
        name: measure_stream(_SMALL, 20.0, by_name[f"stream, {name}"].limits) for name in ("staleness 0", "staleness 1")
    }  # type: ignore[arg-type]
    assert [step.tokens for step in steps["staleness 0"].learned] == [step.tokens for step in batch.learned]
    assert [step.tokens for step in ahead.learned] == [step.tokens for step in batch.learned]
    assert steps["staleness 1"].step_s < ahead.step_s < batch.step_s
    assert steps["staleness 1"].busy > batch.busy


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
def test_rolling_transfers_keep_engines_at_work_and_samples_as_fresh(staleness: int) -> None:
    limits, by_transfer = StreamLimits(_SMALL.groups, staleness), {}
    for name, transfer in transfers(0.5, 0.25).items():
        by_transfer[name] = measured = measure_stream(_SMALL, 20.0, limits, transfer)
        groups = [number for step in measured.learned for number in step.groups]
        assert len(set(groups)) == len(groups) == 11 * _SMALL.groups
        assert max(age for step in measured.learned for age in step.staleness) <= staleness
        assert measured.evicted == measured.dropped == 0
    assert by_transfer["in no time"].sync_s == by_transfer["in no time"].pause_s == 0
    for policy in ("wait", "go on"):
        one, some, all_ = (by_transfer[f"{policy}, {name}"] for name in ("rolling, 1", "rolling, 2", "all at once"))
        assert one.pause_s < some.pause_s + 1e-6 < all_.pause_s and all_.pause_s <= all_.longest_pause_s
    assert (
        by_transfer["go on, all at once"].pause_s == pytest.approx(4 * 0.25) == by_transfer["go on, all at once"].sync_s
    )
    assert by_transfer["go on, rolling, 1"].pause_s == pytest.approx(0.5)
    assert by_transfer["go on, rolling, 1"].sync_s == pytest.approx(4 * 0.5)
    assert by_transfer["go on, rolling, 2"].sync_s == pytest.approx(2 * 0.5)
    assert by_transfer["wait, rolling, 1"].tokens_per_s > by_transfer["wait, all at once"].tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_engines_on_leased_devices_make_steps_shorter(staleness: int) -> None:
    limits = StreamLimits(_SMALL.groups, staleness)
    full = replace(_SMALL, engines=2, slots=4, steps=24)  # steps wait for engines, not for one response
    more = replace(full, engines=4)
    alone = measure_stream(full, 5.0, limits)
    leased = measure_stream(more, 5.0, limits, lease=DeviceLease(2, after_s=0.1, turn_s=0.1))
    groups = [number for step in leased.learned for number in step.groups]
    assert len(set(groups)) == len(groups) == 27 * full.groups
    assert max(age for step in leased.learned for age in step.staleness) <= staleness
    assert leased.tokens_per_s > 1.15 * alone.tokens_per_s
    assert (leased.reclaimed > 0) == (staleness > 0) and alone.reclaimed == 0
    assert abs(leased.given_up) < 0.02  # what was reclaimed went on with what it had


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--engines", "2", "--slots", "8", "--groups", "4", "--samples", "2", "--warm-up", "2", "--steps", "3"]
    results = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main([*small, "--train-share", "0.1", "--seed", seed, "--output", str(tmp_path / name)]) == 0
        results.append(json.loads((tmp_path / name).read_text()))
    assert [case.name for case in _CASES] == list(results[0]["measured"][0]["cases"])
    assert results[0]["measured"] == results[1]["measured"] != results[2]["measured"]
    assert str(tmp_path) not in json.dumps(results)
    assert "stream, staleness 4" in capsys.readouterr().out


@pytest.mark.parametrize("task", sorted(PUBLISHED))
def test_lengths_are_those_that_were_published(task: str) -> None:
    points = PUBLISHED[task]
    assert all(left[0] < right[0] and left[1] < right[1] for left, right in itertools.pairwise(points))
    lengths = Lengths(task, 3)
    assert [lengths.at(share) for share, _ in points] == [tokens for _, tokens in points]
    drawn = sorted(lengths.draw(number) for number in range(4000))
    for share in (0.25, 0.5, 0.75, 0.9):
        assert drawn[int(share * 4000)] == pytest.approx(lengths.at(share), rel=0.15)
    assert drawn[-1] == LONGEST


def test_the_controller_is_measured_in_real_time() -> None:
    load = measure_controller(
        Workload(engines=4, slots=8, groups=16, samples=2, step_s=(0.0001, 0.0)), 2, seconds=0.5, settle_s=0.2
    )
    assert load.requests <= 32 and load.groups <= 48 and load.ends_per_s > 0
    assert 0 < load.controller < 1 and 0 < load.engines < 1

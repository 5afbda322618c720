"""PF-PPO: what a step learns from, what enters the buffer and what leaves it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine3d.errors import EngineError
from hybridflow.algorithms import pf_ppo
from hybridflow.algorithms.pf_ppo import PFPPOSettings
from hybridflow.algorithms.replay import ReplayBuffer
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.metrics import names as metrics
from tests.support.steps import NumberedStep, fetched, ids


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteBatch, "fetch", fetched)
    NumberedStep.responses.clear()


def a_step(config: PFPPOSettings, **fields: Any) -> NumberedStep:
    """Sample k of each group has reward k."""
    kept = ReplayBuffer(config.replay_buffer_size, config.replay_max_age)
    return NumberedStep(config, lambda group, sample: float(sample), kept=kept, **fields)


def following(step: NumberedStep) -> NumberedStep:
    """The next step of the same run."""
    return replace(step, number=step.number + 1, values={}, draws=[], recalled=[], updated=[], calls=[])


def test_the_paper_is_a_filtration_without_replay() -> None:
    step = a_step(PFPPOSettings(filtration="best-worst", filter_prob=1.0, replay_buffer_size=0))
    batch = pf_ppo.make_experience(step).batch
    assert ids(batch) == [100 * group + k for group in range(4) for k in (0, 3)]
    assert step.calls == ["generate", "rewards", "logprobs", "critic_values", "estimate"]  # models see what stays
    assert step.values == {metrics.SAMPLING_KEPT: 0.5}


def test_too_few_samples_stop_the_step_with_one_line() -> None:
    step = a_step(PFPPOSettings(filtration="best-n", filter_prob=1.0), least=5)
    with pytest.raises(
        EngineError, match=r"step 1: 4 of 16 samples are left by algorithm\.filtration=best-n, expected"
    ):
        pf_ppo.make_experience(step)


def test_what_is_left_at_least() -> None:
    assert PFPPOSettings(filter_prob=0.0).least_kept(8) == 8
    assert PFPPOSettings().least_kept(8) == 2
    assert PFPPOSettings(filtration="best-n", filtration_n=3).least_kept(8) == 3


def test_a_filter_of_probability_zero_is_ppo() -> None:
    step = a_step(PFPPOSettings(filter_prob=0.0, replay_buffer_size=0))
    assert len(pf_ppo.make_experience(step).batch) == 16 and step.values[metrics.SAMPLING_KEPT] == 1


def test_the_others_leave_with_the_probability() -> None:
    step = a_step(PFPPOSettings(filtration="best-n", filter_prob=0.8, replay_buffer_size=0), prompts=500, samples=5)
    batch = pf_ppo.make_experience(step).batch
    best = [sample for sample in ids(batch) if sample % 100 == 4]
    assert len(best) == 500
    assert abs(len(batch) - 500 - 0.2 * 2000) < 60


def test_steps_by_hand() -> None:
    config = PFPPOSettings(filtration="best-n", filter_prob=1.0, replay_buffer_size=6, replay_ratio=0.5)
    first = a_step(config)
    assert ids(pf_ppo.make_experience(first).batch) == [3, 103, 203, 303]
    assert first.values | {metrics.REPLAY_SIZE: 4, metrics.REPLAY_SHARE: 0.0} == first.values
    assert metrics.REPLAY_AGE not in first.values and not first.recalled

    second = following(first)
    batch = pf_ppo.make_experience(second).batch
    [old] = second.recalled
    assert len(old) == 2 and set(ids(old)) < {3, 103, 203, 303}
    assert sorted(ids(batch)) == sorted([403, 503, 603, 703, *ids(old)])
    assert second.values[metrics.REPLAY_SHARE] == pytest.approx(2 / 6)
    assert second.values[metrics.REPLAY_AGE] == 1
    # Of 4 two have left, and 4 have come: as many as there is room for.
    assert second.values[metrics.REPLAY_SIZE] == 6
    left = sorted({3, 103, 203, 303} - set(ids(old)))
    assert second.kept is not None and ids(second.kept.samples) == [*left, 403, 503, 603, 703]
    assert second.calls == ["generate", "rewards", "recall", "logprobs", "critic_values", "estimate"]
    # What was generated comes back as it was, reward included.
    for sample, log, reward in zip(ids(old), old.logprobs.split(3), old.rewards.tolist(), strict=True):  # type: ignore[union-attr]
        assert log.tolist() == [-0.5] * 3 and reward == 3.0 and sample % 100 == 3
    assert set(old.policy_versions.tolist()) == {1}


def test_what_stayed_by_chance_is_learned_from_and_does_not_enter() -> None:
    step = a_step(PFPPOSettings(filtration="best-n", filter_prob=0.0, replay_buffer_size=100))
    assert len(pf_ppo.make_experience(step).batch) == 16
    assert step.kept is not None and ids(step.kept.samples) == [3, 103, 203, 303]


def test_no_sample_is_learned_from_more_than_twice_and_none_that_is_too_old() -> None:
    config = PFPPOSettings(filtration="best-random", filter_prob=0.5, replay_buffer_size=25, replay_max_age=3)
    step, seen = a_step(config), Counter[int]()
    for _ in range(15):
        batch = pf_ppo.make_experience(step).batch
        seen.update(ids(batch))
        assert len(set(ids(batch))) == len(batch)
        replayed = [sample for old in step.recalled for sample in ids(old)]
        assert len(replayed) <= 0.5 * (len(batch) - len(replayed))
        for old in step.recalled:
            assert (step.number - old.policy_versions <= 3).all() and (old.policy_versions < step.number).all()
        assert len(step.replay) <= 25
        step = following(step)
    assert set(seen.values()) == {1, 2}


def test_a_resumed_run_learns_from_the_same_samples() -> None:
    config = PFPPOSettings(filter_prob=0.5, replay_buffer_size=20)
    step, results = a_step(config), []
    for _ in range(6):
        results.append(ids(pf_ppo.make_experience(step).batch))
        step = following(step)
    for at in range(1, 6):
        again = a_step(config)
        for _ in range(at):
            pf_ppo.make_experience(again)
            again = following(again)
        saved = again.replay.samples  # what a checkpoint holds
        resumed = replace(again, kept=ReplayBuffer(20, config.replay_max_age))
        resumed.replay.restore(saved)
        assert ids(pf_ppo.make_experience(resumed).batch) == results[at]


def test_old_and_new_are_mixed() -> None:
    config = PFPPOSettings(filtration="best-n", filter_prob=0.0, replay_buffer_size=1000, replay_ratio=1.0)
    step = a_step(config, prompts=40)
    pf_ppo.make_experience(step)
    batch = pf_ppo.make_experience(following(step)).batch
    old = batch.per_sample["policy_versions"] == 1
    halves = [int(half.sum()) for half in old.chunk(2)]
    assert sum(halves) == 40 and min(halves) > 10
    assert torch.equal(batch.per_sample["group_ids"] < 40, old)

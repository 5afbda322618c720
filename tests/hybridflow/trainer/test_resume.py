"""Draws of a resumed run: as those of a run that was not interrupted, whatever is dropped of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine3d.checkpoint.manifest import Manifest
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.checkpoint.driver_state import RunState
from hybridflow.checkpoint.resume import Resumption
from hybridflow.config.reading.yaml_loader import public_settings
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.sampler import PromptSampler
from hybridflow.rollout.buffered_groups import BufferedGroups
from hybridflow.rollout.rollouts import RolloutSnapshot
from hybridflow.rollout.source import RolloutSource
from hybridflow.trainer.contract import Contract
from hybridflow.trainer.resume import _OF_SAMPLES, ResumedDraws, _changed, resumed_draws
from hybridflow.trainer.startup.rollout_source import stream_plan
from tests.hybridflow.checkpoint.test_driver_state import a_state
from tests.support.local_step import make_samples
from tests.support.resumable import a_recipe
from tests.support.runs import ROOT

COUNT, POSITION = 20, 33
STREAM = ("rollout.stream={}", "trainer.max_staleness=1")
KINDS = ("rollout.adaptive_sampling=[{prompt_tokens: 4, max_new_tokens: 2}, {prompt_tokens: 8, max_new_tokens: 4}]",)
JUDGED = (
    "reward.functions=[{name: judge, path: judge, arguments: {rubric: '{{ response }}', choices: {good: 1, bad: 0}}}]",
    "judge={path: /models/judge}",
    "placement.judge='cpu:2'",
)
AHEAD = ("trainer.max_staleness=1", "trainer.prompts_per_step=4")


def sampler(count: int = COUNT) -> PromptSampler:
    return PromptSampler(count, 7)


def before() -> tuple[PromptSampler, dict[int, int]]:
    """A sampler that has drawn, and prompts of all draws by their identity."""
    drawn = sampler()
    return drawn, dict(drawn.draw(POSITION))


def a_stream(draws: dict[int, int], begun: list[int], returned: list[int]) -> BufferedGroups:
    groups = [{"number": number, "prompt": draws[number], "attempt": 0} for number in (*begun, *returned)]
    ledger = {"groups": [group | {"oldest": None} for group in groups[: len(begun)]], "returned": groups[len(begun) :]}
    return BufferedGroups(ledger, {str(number): 8 * number for number in begun})


def made_ahead(draws: dict[int, int], numbers: list[int]) -> SampleBatch:
    batch = make_samples(numbers, [0.0] * len(numbers), longest=3)
    return batch.replace(prompt_indices=batch.group_ids.clone().apply_(draws.__getitem__))


def resumed(
    tmp_path: Path,
    state: RunState,
    *overrides: str,
    saved: tuple[str, ...] = (),
    accepted: tuple[str, ...] = (),
    changed_code: tuple[str, ...] = (),
) -> ResumedDraws:
    recipe, was = a_recipe(tmp_path, *overrides), a_recipe(tmp_path, *saved)
    manifest = Manifest(step=12, created="", roles={}, recipe=public_settings(was), software={}, files=())
    resumption = Resumption(tmp_path, manifest, state, True, accepted, changed_code)
    return resumed_draws(public_settings(recipe), sampler(), source_of(recipe), resumption, state)


def source_of(recipe: Recipe) -> RolloutSource:
    """The source of a recipe's rollouts; of a stream only what is asked of it here, since another needs engines."""
    source = RolloutSource.__new__(RolloutSource)
    source._plan = stream_plan(recipe, Prompts([], []), 0)
    source.scored_as_they_end = not source._plan.together
    return source


def check_exact(resumed: ResumedDraws, draws: dict[int, int], trained: set[int]) -> None:
    """Every draw up to some later one is trained on once: in the checkpoint's run or in this one."""
    after = sampler()
    after.load_state_dict(resumed.snapshot.order)
    kept = set(resumed.ahead) - {number for number, _ in after.returned}
    later = dict(after.draw(len(after.returned) + 12))
    assert not kept & set(later)
    assert trained | kept | set(later) == set(range(POSITION + 12))
    assert not trained & (kept | set(later))
    all_draws = sampler().next(POSITION + 12)
    assert all(all_draws[number] == prompt for number, prompt in later.items())
    contract = Contract(1)
    contract.begin(POSITION, resumed.ahead)
    assert {number for number in range(POSITION + 12) if number not in contract._learned} == kept | set(later)


def test_groups_that_other_code_has_scored_are_drawn_again(tmp_path: Path) -> None:
    drawn, draws = before()
    state = replace(a_state(), sampler=drawn.state_dict(), groups=a_stream(draws, [5, 30], []))
    changed = resumed(tmp_path, state, *STREAM, saved=STREAM, changed_code=("reward.functions.own.code",))
    assert changed.notes == (
        "resume: 2 prompts that were drawn ahead are drawn again first: reward.functions.own.code changed",
    )
    assert resumed(tmp_path, state, *STREAM, saved=STREAM).snapshot.groups is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "saved", "accepted", "reason"),
    [
        (AHEAD, STREAM, (), "rollout.stream is null now"),
        (STREAM, STREAM, ("model.create.seed",), "checkpoint.accept has model.create.seed"),
        (STREAM, STREAM, ("data.jsonl.eval_path",), "checkpoint.accept has data.jsonl.eval_path"),
        ((*STREAM, "rollout.samples_per_prompt=3"), STREAM, (), "rollout.samples_per_prompt changed"),
        ((*STREAM, "reward.functions=[{name: other, path: /a.py:score}]"), STREAM, (), "reward changed"),
        ((*STREAM, *KINDS), STREAM, (), "rollout.adaptive_sampling changed"),
        ((*STREAM, *JUDGED, "judge.path=/models/other"), (*STREAM, *JUDGED), (), "judge changed"),
    ],
)
def test_groups_of_a_stream_that_is_dropped_are_drawn_first(
    tmp_path: Path, given: tuple[str, ...], saved: tuple[str, ...], accepted: tuple[str, ...], reason: str
) -> None:
    """A stream trains on groups as they end, so that draws after a slow one were trained on."""
    drawn, draws = before()
    stream = a_stream(draws, [5, 30, 32], [11])
    state = replace(a_state(), sampler=drawn.state_dict(), groups=stream)
    draws_again = resumed(tmp_path, state, *given, saved=saved, accepted=accepted)
    assert draws_again.snapshot.groups is None
    assert draws_again.notes == (f"resume: 4 prompts that were drawn ahead are drawn again first: {reason}",)
    check_exact(draws_again, draws, set(range(POSITION)) - {5, 11, 30, 32})
    # Resumed once more before these are drawn.
    again = resumed(tmp_path, replace(state, sampler=draws_again.snapshot.order, groups=None), *given, saved=given)
    assert again.notes == ()
    check_exact(again, draws, set(range(POSITION)) - {5, 11, 30, 32})


@pytest.mark.parametrize(
    ("given", "saved", "reason"),
    [
        (("trainer.max_staleness=0",), AHEAD, "trainer.max_staleness is 0"),
        (STREAM, AHEAD, "rollout.stream is set now"),
        ((*AHEAD, "rollout.sampling.temperature=0.7"), AHEAD, "rollout.sampling changed"),
        ((*AHEAD, "trainer.prompts_per_step=8"), AHEAD, "trainer.prompts_per_step is 8"),
        ((*AHEAD, "trainer.prompts_per_step=2"), AHEAD, "trainer.prompts_per_step is 2"),
    ],
)
def test_a_rollout_that_is_dropped_is_drawn_first(
    tmp_path: Path, given: tuple[str, ...], saved: tuple[str, ...], reason: str
) -> None:
    drawn, draws = before()
    buffered = made_ahead(draws, [29, 29, 30, 30, 31, 32])
    state = replace(a_state(), sampler=drawn.state_dict(), groups=BufferedGroups.of_batch(buffered))
    draws_again = resumed(tmp_path, state, *given, saved=saved)
    assert draws_again.snapshot.groups is None
    assert draws_again.notes == (f"resume: 4 prompts that were drawn ahead are drawn again first: {reason}",)
    check_exact(draws_again, draws, set(range(29)))


def test_what_the_recipe_has_a_use_for_is_kept(tmp_path: Path) -> None:
    drawn, draws = before()
    state = replace(a_state(), sampler=drawn.state_dict(), groups=a_stream(draws, [30, 32], [11]))
    kept = resumed(tmp_path, state, *STREAM, saved=STREAM)
    assert (kept.snapshot, kept.notes) == (RolloutSnapshot(state.sampler, state.samples_drawn, state.groups), ())
    check_exact(kept, draws, set(range(POSITION)) - {11, 30, 32})
    buffered = made_ahead(draws, [29, 30, 31, 32])
    state = replace(state, groups=BufferedGroups.of_batch(buffered))
    kept = resumed(tmp_path, state, *AHEAD, saved=AHEAD)
    assert kept.snapshot.groups is state.groups and kept.notes == ()
    assert state.groups is not None and state.groups.ended is buffered
    check_exact(kept, draws, set(range(29)))


@pytest.mark.parametrize("count", [COUNT, COUNT + 1])
def test_of_other_prompts_it_says_how_many_may_be_repeated(tmp_path: Path, count: int) -> None:
    drawn = sampler(count)
    draws = dict(drawn.draw(POSITION))
    state = replace(a_state(), sampler=drawn.state_dict(), groups=a_stream(draws, [5, 32], [11]))
    draws_again = resumed(tmp_path, state, *STREAM, saved=STREAM, accepted=("data.arithmetic.train_size",))
    assert draws_again.snapshot.order["position"] == POSITION - 3 and draws_again.snapshot.order["count"] == COUNT
    assert (draws_again.snapshot.groups, draws_again.ahead) == (None, [])
    assert draws_again.notes == (
        "resume: other prompts or another order of them (data.arithmetic.train_size): draws continue after 30. Up to "
        f"{(POSITION - 3) % count} prompts of this epoch may be drawn again. 3 that were drawn ahead are dropped.",
    )


def test_a_recipe_of_these_tests_is_one(tmp_path: Path) -> None:
    recipe: Recipe = a_recipe(tmp_path, *STREAM)
    settings: Any = public_settings(recipe)
    assert settings["rollout"]["sampling"] and settings["rollout"]["samples_per_prompt"] and settings["reward"]


@pytest.mark.parametrize(
    ("override", "changed"), [("tool_timeout_s=1", []), ("max_turns=2", ["environment.max_turns"])]
)
def test_episodes_are_drawn_again_where_their_environment_answers_otherwise(override: str, changed: list[str]) -> None:
    game = ROOT / "launch/recipes/game.yaml"
    saved, given = (public_settings(load_recipe(game, more)) for more in ([], [f"environment.{override}"]))
    assert _changed(saved, given, _OF_SAMPLES) == changed

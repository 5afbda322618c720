"""Placements: every one fits, the best is that of an exhaustive search, and what does not fit is one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_truth import RESULTS  # noqa: F401  the tree's root is importable
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.memory.overhead import DRIVER_BYTES
from engine3d.models import model_spec
from engine3d.training.config import TrainConfig
from hybridflow.planning.search.engines import EngineSearch
from hybridflow.planning.search.layouts import LayoutSearch
from hybridflow.planning.search.placements import PlacementSearch, allocations, partitions
from hybridflow.planning.search.role_choices import SearchSettings
from hybridflow.planning.search.run_plan import RoleGroup, RunPlan
from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.hardware import load_profile
from hybridflow.planning.time.phases import RoleLayout, phase_costs
from hybridflow.planning.time.workload import RoleWork, Workload, drawn_lengths
from tests.support.tiny_families import MOE

PROFILE = load_profile("h200")
SPEC = model_spec(MOE)
CONFIG = TrainConfig()
WORK = Workload(
    (RoleWork("actor", SPEC, CONFIG, trained=True, passes=0),),
    prompts=32,
    samples=4,
    prompt=64.0,
    longest_prompt=64,
    lengths=drawn_lengths(128, 512, 0.8),
    longest=512,
)
PPO = replace(
    WORK,
    roles=(
        *WORK.roles,
        RoleWork("critic", replace(SPEC, value_head=True), CONFIG, trained=True, passes=1),
        RoleWork("reference", SPEC, CONFIG, trained=False, passes=1),
    ),
)
FOUR_MODELS = replace(
    PPO,
    roles=(
        *PPO.roles,
        RoleWork("reward_model", replace(SPEC, value_head=True), CONFIG, trained=False, passes=1),
    ),
)
SETTINGS = SearchSettings(base=EngineShape())


def _search(work: Workload = WORK, **settings: object) -> PlacementSearch:
    return PlacementSearch(work, PROFILE, replace(SETTINGS, **settings))  # type: ignore[arg-type]


def test_partitions_and_allocations_are_complete() -> None:
    assert [len(list(partitions("abcd"[:count]))) for count in (1, 2, 3, 4)] == [1, 2, 5, 15]  # Bell numbers
    assert sorted(allocations(4, 2, 8)) == [(1, 3), (2, 2), (3, 1)]
    assert list(allocations(4, 1, 8)) == [(4,)]
    large = list(allocations(1024, 2, 8))
    assert len(large) == 7 and all(sum(sizes) == 1024 and sizes[0] % 128 == 0 for sizes in large)
    assert list(allocations(2, 3, 8)) == []


@pytest.mark.parametrize("work", [WORK, PPO, FOUR_MODELS], ids=["grpo", "ppo", "four models"])
def test_the_best_plan_is_that_of_an_exhaustive_search(work: Workload) -> None:
    pruned, every = (_search(work).best(2, 3, exhaustive=exhaustive) for exhaustive in (False, True))
    assert [_key(plan) for plan in pruned] == [_key(plan) for plan in every]
    seconds = [plan.step.step for plan in every]
    assert seconds == sorted(seconds) and len({_key(plan) for plan in every}) == len(every)


def _key(plan: RunPlan) -> tuple[object, ...]:
    return plan.groups, tuple(str(proposal.layout) for proposal in plan.roles.values()), str(plan.engines)


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_the_costs_of_a_plan_are_those_of_its_layouts(name: str) -> None:
    """More ranks than cores take turns on them, in a search as in the prediction of a recipe."""
    profile = load_profile(name).with_cluster(4)
    search = PlacementSearch(PPO, profile, replace(SETTINGS, gpus=name != "cpu"))
    plan = search.on_groups((RoleGroup(("actor", "critic", "reference", "rollout"), 0, 4),))
    assert plan is not None and plan.engines is not None
    roles = {role: RoleLayout(proposal.layout, proposal.config) for role, proposal in plan.roles.items()}
    shape, tokens = plan.engines.shape, plan.engines.cache_tokens
    assert plan.costs == phase_costs(PPO, profile.hardware, roles, shape, cache_tokens=tokens, colocated=True)
    ranks = profile.hardware.for_ranks(shape.ranks)
    assert (ranks.flops == profile.hardware.flops) == (name != "cpu")


def test_memory_of_a_phase_counts_every_model_once() -> None:
    groups = (RoleGroup(("actor", "critic", "reference", "reward_model", "rollout"), 0, 2),)
    plan = _search(FOUR_MODELS).on_groups(groups)
    assert plan is not None and plan.engines is not None
    staying = sum(proposal.heaviest.staying for proposal in plan.roles.values())
    engines = plan.engines.weights + plan.engines.cache + plan.engines.workspace + plan.engines.reading
    memory = {phase.phase: phase.total for phase in plan.memory}
    assert memory["rollout"] == staying + engines + DRIVER_BYTES
    actor = plan.roles["actor"].heaviest
    others = staying - actor.staying + plan.engines.weights + plan.engines.workspace
    assert memory["update of actor"] == actor.total + others + DRIVER_BYTES


def test_the_layouts_of_a_plan_are_the_fastest_of_all_that_fit() -> None:
    [plan, *_] = _search(alone=True).best(4, 1)
    group = plan.group_of("actor")
    search = LayoutSearch(SPEC, CONFIG, PROFILE.hardware, longest=576, expert_tensor_parallel=True)
    batch = replace(plan.roles["actor"].batch, together=1)
    costs = [
        search.costs.update(layout, config, with_micro_batches).seconds
        for layout, config, with_micro_batches in search._candidates(group.gpus, batch)
    ]
    assert plan.roles["actor"].cost.seconds == pytest.approx(min(costs))  # all of this small model fit
    assert {layout.etp for layout, _, _ in search._candidates(4, batch)} > {1}
    engines = EngineSearch(WORK, PROFILE.hardware, EngineShape())
    gpus = plan.group_of("rollout").gpus
    choices = [engines.fitted(shape, 0) for shape in engines.shapes(gpus)]
    assert plan.engines is not None
    assert plan.engines.cost.seconds == min(choice.cost.seconds for choice in choices if choice is not None)


def test_stale_engines_have_devices_of_their_own() -> None:
    plans = _search(replace(WORK, staleness=1)).best(4, 10)
    assert {plan.kind for plan in plans} == {"standalone"}
    assert all(plan.staleness == 1 and plan.step.hidden > 0 for plan in plans)
    assert plans[0].step.step < max(plans[0].step.phases["rollout"], 1e9)


def test_only_accepted_layouts_are_proposed() -> None:
    def accepts(role: str, layout: Layout, config: TrainConfig) -> None:
        if layout.pp > 1 or layout.ep != 2:
            raise UserError(f"{role}: {layout} was not tried")

    plans = _search(accepts=accepts).best(4, 3)
    assert {(proposal.layout.pp, proposal.layout.ep) for plan in plans for proposal in plan.roles.values()} == {(1, 2)}
    with pytest.raises(UserError, match=r"1 GPUs of .*no layout fits .*\(such as actor: one rank was not tried\)"):
        _search(accepts=accepts).best(1)


def test_a_plan_that_does_not_fit_names_the_shortage() -> None:
    small = replace(PROFILE, hardware=replace(PROFILE.hardware, memory=3 * 10**9))
    with pytest.raises(UserError) as refused:
        PlacementSearch(WORK, small, SETTINGS).best(2)
    line = str(refused.value)
    assert line.startswith("actor: 2 GPUs of 3.0 GB: no layout fits 128 sequences") and "the least is " in line
    assert "\n" not in line

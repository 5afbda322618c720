"""A run that goes on has the state of every role that it trains, and no other without being told to."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from engine3d.checkpoint.manifest import read_manifest, write_manifest
from hybridflow.algorithms.config import load
from hybridflow.checkpoint.compatibility import check_accepted
from hybridflow.checkpoint.resume import find_resumption
from hybridflow.config.recipe import Recipe
from tests.support.resumable import a_recipe, make_checkpoint, refusal, write_role
from tests.support.small_checkpoints import describe


def of_algorithm(recipe: Recipe, name: str) -> Recipe:
    return recipe.model_copy(update={"algorithm": load(name).settings()})


ROLES = {
    "grpo": ("actor",),
    "ppo": ("actor", "critic"),
    "safe_rlhf": ("actor", "critic", "cost_critic"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROLES)
def test_a_checkpoint_of_all_trained_roles_is_taken(tmp_path: Path, name: str) -> None:
    recipe = of_algorithm(a_recipe(tmp_path), name)
    assert recipe.trained_roles == ROLES[name]
    checkpoint = make_checkpoint(recipe, 2, roles=ROLES[name])
    resumption, notes = find_resumption(of_algorithm(a_recipe(tmp_path, "resume=auto"), name))
    assert resumption is not None and notes == [f"resume: after step 2, from {checkpoint}"]
    assert [resumption.role(role) for role in ROLES[name]] == [checkpoint / role for role in ROLES[name]]


@pytest.mark.parametrize(
    ("name", "saved", "reason"),
    [
        ("ppo", ("actor",), "has no critic, only actor; algorithm.name=ppo trains actor, critic"),
        (
            "safe_rlhf",
            ("actor",),
            "has no critic and no cost_critic, only actor; algorithm.name=safe_rlhf trains actor, critic, cost_critic",
        ),
    ],
)
def test_a_role_that_a_checkpoint_lacks_is_named(
    tmp_path: Path, name: str, saved: tuple[str, ...], reason: str
) -> None:
    checkpoint = make_checkpoint(a_recipe(tmp_path), 2, roles=saved)
    accepting = a_recipe(tmp_path, "resume=auto", "checkpoint.accept=[roles]")
    assert refusal(of_algorithm(accepting, name)) == [f"resume: {checkpoint} {reason}"]


@pytest.mark.slow
def test_a_role_that_is_no_longer_trained_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(of_algorithm(a_recipe(tmp_path), "safe_rlhf"), 2, roles=ROLES["safe_rlhf"])
    lines = {role: f"roles.{role}: trained in the checkpoint, not trained in the recipe" for role in ROLES["safe_rlhf"]}
    heading = f"resume: {checkpoint} is of another run than this recipe; checkpoint.accept takes what may differ"
    assert refusal(a_recipe(tmp_path, "resume=auto")) == [heading, lines["critic"], lines["cost_critic"]]
    assert refusal(of_algorithm(a_recipe(tmp_path, "resume=auto"), "ppo")) == [heading, lines["cost_critic"]]
    accepting = a_recipe(tmp_path, "resume=auto", "checkpoint.accept=[roles.cost_critic]")
    check_accepted(accepting.checkpoint.accept, accepting.algorithm)
    assert refusal(accepting) == [heading, lines["critic"]]
    assert find_resumption(of_algorithm(accepting, "ppo"))[0] is not None
    accepting = a_recipe(tmp_path, "resume=auto", "checkpoint.accept=[roles]")
    check_accepted(accepting.checkpoint.accept, accepting.algorithm)
    assert find_resumption(accepting)[0] is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "ending", "expected"), [("actor", "a value head", "logits"), ("critic", "logits", "a value head")]
)
def test_a_role_that_ends_otherwise_is_named(tmp_path: Path, role: str, ending: str, expected: str) -> None:
    """A checkpoint as an import of a model with a head makes it, which is of no run."""
    recipe = of_algorithm(a_recipe(tmp_path), "ppo")
    checkpoint = make_checkpoint(recipe, 2, roles=ROLES["ppo"])
    manifest = read_manifest(checkpoint)
    changed = {
        name: dataclasses.replace(summary, value_head=role == "actor") for name, summary in manifest.roles.items()
    }
    for name in changed:
        shutil.rmtree(checkpoint / name)
        write_role(checkpoint, name, value_head=role == "actor")
    (checkpoint / "driver.json").unlink()
    write_manifest(checkpoint, describe(checkpoint, 2, roles=changed))
    resuming = of_algorithm(a_recipe(tmp_path, "resume=auto"), "ppo")
    assert refusal(resuming) == [f"resume: {checkpoint}: the {role} ends in {ending}, expected {expected}"]

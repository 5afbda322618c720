"""KV caches for the requests of a step, and settings and notes of the sample store."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.rollout.cache import tokens_needed
from hybridflow.cli.main import main
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import Example
from hybridflow.planning.memory.samples import Lengths, SetLengths, cache_tokens, check_kept_routes, store_notes

DEMO = Path(__file__).parents[4] / "launch" / "recipes" / "demo.yaml"
LENGTHS = Lengths(prompt=20, response=12, sets=(SetLengths(prompts=10, samples=4, sequence=42),))

STREAM = ["rollout.stream={}", "trainer.max_staleness=2", "rollout.over_sampling=0.25", "placement.rollout=cpu:2"]


def recipe(*overrides: str) -> Recipe:
    unset = ["rollout.engine.max_total_tokens=null", "trainer.prompts_per_step=64", "rollout.samples_per_prompt=8"]
    return load_recipe(DEMO, [*unset, *overrides])


def needed(requests: int, sequence_tokens: int, page_tokens: int = 1) -> int:
    return tokens_needed(requests=requests, sequence_tokens=sequence_tokens, page_tokens=page_tokens)


@pytest.mark.parametrize(
    ("overrides", "engines", "expected"),
    [
        ([], 1, needed(512, 32)),
        ([], 2, needed(256, 32)),
        ([], 3, needed(176, 32)),  # 22 prompts for the engine that has most
        (["rollout.engine.max_running_requests=100"], 1, needed(100, 32)),
        (["trainer.prompts_per_step=2"], 1, needed(40, 42)),  # ten held-out prompts, four samples each
        (["rollout.engine.max_total_tokens=5000"], 1, 5000),
        (["rollout.engine={tp: 4, attention_dp: 4}"], 2, 4 * needed(64, 32)),  # eight prompts for each group
        (["rollout.engine={tp: 4, attention_dp: 4}", "trainer.prompts_per_step=3"], 1, 4 * needed(12, 42)),
        (["rollout.engine={tp: 4, attention_dp: 4, max_running_requests: 100}"], 1, 4 * needed(25, 32)),
        ([*STREAM, "rollout.engine.max_running_requests=4096"], 1, needed((3 * 64 + 16) * 8, 32)),
        ([*STREAM, "rollout.engine.max_running_requests=100"], 1, needed(100, 32)),
    ],
)
def test_a_cache_holds_the_requests_of_a_step_or_of_an_evaluation(
    overrides: list[str], engines: int, expected: int
) -> None:
    given = recipe(*overrides)
    assert cache_tokens(given.rollout, given.groups_in_flight, LENGTHS, engines, "cpu") == expected


def test_a_request_has_pages_of_its_own_and_one_more() -> None:
    assert needed(1, 32) == 2 * 33 + 1 + 8
    assert needed(3, 65, 64) == 4 * (2 + 1) * 64 + 64 + 8
    given = recipe()
    assert cache_tokens(given.rollout, given.groups_in_flight, LENGTHS, 1, "cuda") == needed(512, 32, 64)


def test_lengths_are_of_the_longest(tmp_path: Path) -> None:
    held_out = Prompts([Example("9", "1")], [[1] * 9])
    lengths = Lengths.of(recipe().rollout, recipe().sets, [[1] * 3, [1] * 7], {"eval": held_out})
    assert lengths == Lengths(prompt=7, response=4, sets=(SetLengths(prompts=1, samples=4, sequence=13),))
    assert (lengths.sequence, lengths.longest_sequence) == (11, 13)
    assert Lengths.of(recipe().rollout, recipe().sets, [[1]], {}).longest_sequence == 5


STEP = ["trainer.prompts_per_step=100", "rollout.samples_per_prompt=10"]


def notes(*overrides: str, tokens: int = 1000) -> list[str]:
    recipe = load_recipe(DEMO, [*STEP, *overrides])
    return store_notes(recipe.samples, recipe.samples_per_step, tokens)


def test_a_step_that_may_outgrow_the_store_is_told() -> None:
    line = (
        "samples.keep_mb=4: 1,000 samples of up to 1,000 tokens may take 5 MB, and then only those of the newest step "
        "are kept"
    )
    assert notes("samples.keep_mb=4") == [line]
    assert notes("samples.keep_mb=5") == notes("samples.keep_mb=null") == notes("samples.store=false") == notes() == []
    assert notes("samples.store=false", tokens=10**9) == []
    of_routes = store_notes(load_recipe(DEMO, [*STEP, "samples.keep_mb=4"]).samples, 1000, 1000, 384)
    assert "1,000 samples of up to 1,000 tokens may take 389 MB" in of_routes[0]


def test_kept_samples_have_no_routes() -> None:
    check_kept_routes(0, routes=True)
    check_kept_routes(5, routes=False)
    with pytest.raises(UserError, match=r"replay_buffer_size=5 was not tried with rollout\.engine\.routes=true"):
        check_kept_routes(5, routes=True)


def test_a_check_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["trainer.prompts_per_step=20000", "samples.keep_mb=1"]
    assert main(["check", str(DEMO), *many]) == 0
    assert "samples.keep_mb=1: 160,000 samples of up to " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["samples.keep_mb=0"], "samples.keep_mb = 0: expected at least 1"),
        (["samples.store=false", "samples.keep_mb=5"], "samples: keep_mb=5 with store=false, which keeps nothing"),
        (["samples.store=false", "samples.keep_mb=null"], "samples: keep_mb=null with store=false"),
        (
            ["trainer.rollout_data_dir=x"],
            "here it is samples.store; hybridflow samples shows samples/ of the run's directory",
        ),
    ],
)
def test_settings_that_contradict(overrides: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(DEMO, overrides)
    assert line in str(caught.value)

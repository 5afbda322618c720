"""Two steps of the recipe of each algorithm are those recorded, and can be made again from their samples."""

from __future__ import annotations

import pytest

from tests.integration.algorithm_steps import RECIPE_CASES, SteppedCases, recorded_as, run_cases_apart
from tests.integration.reference_runs import expect_recorded
from tests.integration.replayed_steps import expect_replayed

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> SteppedCases:
    """Values of two steps of each case, on roles that were started once."""
    return run_cases_apart(tmp_path_factory.mktemp("steps"), *RECIPE_CASES)


@pytest.mark.parametrize("name", RECIPE_CASES)
def test_two_steps_of_each_algorithm_are_those_recorded(name: str, stepped: SteppedCases) -> None:
    expect_recorded(recorded_as(name), stepped.values[name])


@pytest.mark.parametrize("name", RECIPE_CASES)
def test_two_steps_of_each_algorithm_are_made_again_from_their_samples(name: str, stepped: SteppedCases) -> None:
    expect_replayed(stepped.directory / name)

"""Files of the user's code in the checksums of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.checkpoint.own_code import changed_code, code_checksums, without_code
from hybridflow.config.recipe import load_recipe
from tests.support.runs import ROOT

TOOLS, AGENT = "launch/recipes/tools.yaml", "examples/own_agent.yaml"


@pytest.mark.parametrize(
    ("recipe", "override", "name"),
    [
        ("launch/recipes/game.yaml", "environment.path={file}:Own", "environment.path.code"),
        (AGENT, "environment.agent={file}:play", "environment.agent.code"),
        (AGENT, "environment.agent=[python, {file}]", "environment.agent.1.code"),
        (TOOLS, "environment.tools.functions=[{file}:price]", "environment.tools.functions.0.code"),
        (TOOLS, "environment.tools.reward={file}:score", "environment.tools.reward.code"),
        (
            "launch/recipes/demo.yaml",
            "reward.functions=[{{name: own, path: {file}:score}}]",
            "reward.functions.own.code",
        ),
    ],
)
def test_the_code_of_samples_and_scores_is_known_by_its_file(
    recipe: str, override: str, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    loaded = load_recipe(ROOT / recipe, [override.format(file=file)])
    assert name not in code_checksums(loaded.functions, loaded.environment)  # until it is there
    digests = []
    for text in ("1", "2", "1"):
        file.write_text(text)
        digests.append(code_checksums(loaded.functions, loaded.environment))
    assert changed_code(digests[0], digests[1]) == [name]
    assert changed_code(digests[0], digests[2]) == changed_code({}, digests[0]) == []
    assert without_code({"model.weights": "a", **digests[0]}) == {"model.weights": "a"}

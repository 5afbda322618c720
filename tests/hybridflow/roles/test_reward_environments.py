"""The role of rewards with the environment of a recipe: turns in, answers as messages out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.recipe import load_recipe
from hybridflow.data.tokenizer import make_chat_tokenizer
from hybridflow.environments.environment import Task
from hybridflow.environments.episode import EpisodeStart, EpisodeTurn
from hybridflow.roles.reward import FunctionRewardWorker

GAME = Path(__file__).parents[3] / "launch/recipes/game.yaml"


@pytest.mark.slow
def test_a_rank_answers_turns_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(GAME)
    assert recipe.data.files is not None
    tokenizer = make_chat_tokenizer(tmp_path)
    worker = FunctionRewardWorker(
        None,  # type: ignore[arg-type]
        recipe.all_functions,
        tmp_path,
        (),
        tmp_path,
        recipe.environment,
        recipe.data.files.chat,
    )
    try:
        worker.start()
        worker.of_environments("send", [EpisodeStart(1, Task("1-7", "5"))])
        (started,) = worker.of_environments("take_answers", 60.0)
        assert (started.tokens, started.failure) == ([], None)
        worker.of_environments("send", [EpisodeTurn(1, tokenizer.encode("4<|end|>"), complete=True)])
        (answer,) = worker.of_environments("take_answers", 60.0)
        assert tokenizer.decode(answer.tokens) == "<|user|>+<|end|><|assistant|>"
        worker.of_environments("send", [EpisodeTurn(1, tokenizer.encode("5<|end|>"), complete=True)])
        (right,) = worker.of_environments("take_answers", 60.0)
        assert (right.reward, right.done) == (1.0, True)
    finally:
        worker.shutdown()

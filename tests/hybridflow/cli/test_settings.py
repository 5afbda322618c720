"""`hybridflow settings`: what it shows of which name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hybridflow.cli.main import main
from hybridflow.config.reading.described_settings import all_settings
from hybridflow.config.recipe import Recipe


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["settings", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], name: str) -> str:
    assert main(["settings", name]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err


@pytest.mark.slow
def test_a_setting_has_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    expected = (
        "train.optimizer.lr\n    number, above 0, at most 10; default 1e-06\n    Learning rate after the warm-up.\n"
    )
    assert shown(capsys, "train.optimizer.lr") == shown(capsys, "train.optimizer.lr=1e-5") == expected
    assert expected in shown(capsys, "lr") and "warmup.optimizer.lr\n" in shown(capsys, "lr")
    assert shown(capsys, "evaluation.gsm8k.samples").startswith("evaluation.NAME.samples\n    integer")
    assert shown(capsys, "reward.functions[0].name").startswith("reward.functions[].name\n    text; required")
    assert "Only with" in shown(capsys, "algorithm.gae_lambda")


def test_a_prefix_shows_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    section = shown(capsys, "train.optimizer")
    names = re.findall(r"^\S+", section, re.MULTILINE)
    train: Any = Recipe.model_fields["train"].annotation
    fields = train.model_fields["optimizer"].annotation.model_fields
    assert names == ["train.optimizer", *(f"train.optimizer.{name}" for name in fields)]
    assert "Adam with decoupled weight decay" in section
    assert shown(capsys, "train.optimizer.") == section


def test_without_a_name_every_group_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    overview = shown(capsys)
    assert set(Recipe.model_fields) <= set(re.findall(r"^[a-z_]+", overview, re.MULTILINE))
    assert overview.endswith("such as train.optimizer.\n")


@pytest.mark.slow
def test_unknown_names_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "trainer.step: no such setting: did you mean trainer.steps?" in refused(capsys, "trainer.step")
    assert "did you mean train.micro_batch_tokens?" in refused(capsys, "train.micro_batch_token")
    assert "here it is train.optimizer.lr" in refused(capsys, "actor_rollout_ref.actor.optim.lr")
    assert "here it is train.optimizer.lr" in refused(capsys, "learning_rate")
    assert "no such setting: hybridflow settings lists them" in refused(capsys, "xyzzy")


def test_every_setting_of_a_recipe_is_there_with_a_meaning() -> None:
    settings = all_settings()
    paths = [setting.path for setting in settings]
    assert len(paths) == len(set(paths)) > 300
    assert all(setting.meaning for setting in settings)
    assert {"algorithm.name", "train.layout.tp", "reference.train.dtype", "rollout.engine.tp"} <= set(paths)

"""Imports, commands and options of other systems: one line that says what it is here."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import hybridflow
from hybridflow.cli.main import main
from hybridflow.config.reading.known_names import ATTRIBUTES, COMMANDS, MODULES, OPTIONS, import_text


def test_every_text_says_what_it_is_here() -> None:
    for name, text in {**ATTRIBUTES, **COMMANDS, **MODULES, **OPTIONS}.items():
        assert re.match(r"(here |absent|is of )", text), (name, text)
    assert not set(ATTRIBUTES) & set(hybridflow.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_no_module_that_is_there_is_in_the_table(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"hybridflow.{name}")


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        (
            "from hybridflow import GRPOTrainer",
            "there is no hybridflow.GRPOTrainer: here it is RLTrainer(model, algorithm='grpo'",
        ),
        (
            "from hybridflow.trainer import GRPOConfig",
            "there is no hybridflow.trainer.GRPOConfig: here it is PPOConfig(...)",
        ),
        ("from hybridflow.protocol import DataProto", "there is no hybridflow.protocol: here it is RolloutBatch"),
        ("import hybridflow.trainer.main_ppo", "there is no hybridflow.trainer.main_ppo: here it is hybridflow train"),
        (
            "import hybridflow.workers.reward_manager.dapo",
            "there is no hybridflow.workers.reward_manager: here a reward",
        ),
        ("from hybridflow import HybridEngine", "there is no hybridflow.HybridEngine: absent: actor and engines on"),
        (
            "from hybridflow.data import RolloutBatch",
            "there is no hybridflow.data.RolloutBatch: here it is from hybridfl",
        ),
        ("from hybridflow.utils import get_ppo_config", "there is no hybridflow.utils.get_ppo_config: here it is from"),
        (
            "from hybridflow.algorithms import GRPO",
            "there is no hybridflow.algorithms.GRPO: here it is RLTrainer(model",
        ),
        (
            "from hybridflow.trainers.ppo_trainer import PPOTrainer",
            "there is no hybridflow.trainers: here it is hybrid",
        ),
        ("from hybridflow.launch import main", "there is no hybridflow.launch: here it is hybridflow launch slurm"),
        (
            "from hybridflow import PPOTrainr",
            "there is no hybridflow.PPOTrainr: did you mean from hybridflow import PPOT",
        ),
        ("from hybridflow.metrics import Meter", "there is no hybridflow.metrics.Meter: import from hybridflow itself"),
        (
            "import hybridflow.patience",
            "there is no hybridflow.patience: import from hybridflow itself; its API is DataF",
        ),
    ],
)
def test_an_import_of_another_system_is_told_what_it_is_here(statement: str, line: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(statement)
    assert str(error.value).startswith(line)


def test_imports_of_the_guides_work() -> None:
    from hybridflow.algorithms import PPOConfig  # type: ignore[attr-defined]
    from hybridflow.config import TrainerConfig  # type: ignore[attr-defined]
    from hybridflow.trainer import PPOTrainer  # type: ignore[attr-defined]
    from hybridflow.utils import is_flash_attn_available

    get_ppo_config = importlib.import_module("hybridflow.utils.config").get_ppo_config
    assert get_ppo_config(lr=1e-5) == PPOConfig(lr=1e-5) and TrainerConfig is PPOConfig
    assert PPOTrainer is hybridflow.PPOTrainer and is_flash_attn_available is hybridflow.is_flash_attn_available
    assert not hasattr(hybridflow, "_ipython_display_") and not hasattr(hybridflow, "GRPOTrainer")
    assert import_text("patience") is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["grpo"], "there is no command grpo: here it is hybridflow train RECIPE algorithm.name=grpo"),
        (["sft"], "there is no command sft: here it is hybridflow train RECIPE [key=value ...] with warmup"),
        (["export", "runs/demo"], "there is no command export: here it is hybridflow checkpoint export RUN OUT"),
        (["chek", "a.yaml"], "there is no command chek: did you mean check?"),
        (["checkpoint", "lst", "a"], "there is no command lst: did you mean list?"),
        (["launch", "slrum", "a.yaml", "--nodes", "2"], "there is no command slrum: did you mean slurm?"),
        (["patience"], "there is no command patience: expected init, train, "),
        (["check", "a.yaml", "--prnt"], "--prnt: no such option; did you mean --print?"),
        (["init", "a", "--patience"], "--patience: no such option (see hybridflow init --help)"),
        (["train", "a.yaml", "--lr", "1e-6"], "--lr: here it is train.optimizer.lr"),
        (
            ["train", "a.yaml", "--seed", "3"],
            "--seed: no such option; settings stand behind the recipe as key=value, such as seed=",
        ),
        (
            ["train", "a.yaml", "--trainer.steps=3"],
            "--trainer.steps: no such option; settings stand behind the recipe as key=value, such as trainer.steps=...",
        ),
        (["train"], "the following arguments are required: RECIPE (see hybridflow train --help)"),
        (["train", "a.yaml", "--role", "rollout"], "--role: is of hosts: hybridflow launch slurm RECIPE"),
        (["train", "a.yaml", "--actor_learning_rate", "1e-6"], "--actor_learning_rate: here it is train.optimizer.lr"),
        (["train", "a.yaml", "--rollout-batch-size=32"], "--rollout-batch-size: here it is trainer.prompts_per_step"),
        (
            ["check", "--patience", "a.yaml"],
            "--patience: no such option; settings stand behind the recipe as key=value",
        ),
    ],
)
def test_a_command_or_option_of_another_system_is_told_what_it_is_here(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"hybridflow: {line}")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["trainer.main_ppo", "trainers.ppo_trainer"])
def test_a_module_that_is_run_says_so_in_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"hybridflow.{module}", "algorithm.adv_estimator=grpo"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "here it is hybridflow train RECIPE" in line

"""Whole steps of the algorithms with critics, on declared placements."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine3d.models import initialise_random, model_spec
from hybridflow.config.reading.yaml_loader import settings_yaml
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics.expert_loads import read_expert_loads
from hybridflow.report.page import render
from hybridflow.report.run_data import read_run
from hybridflow.rundir.file_names import TIMELINE
from tests.support.runs import ROOT, SMALL, records, run_recipe
from tests.support.warm import warm_python

pytestmark = pytest.mark.processes

PLACEMENTS = {
    "colocate": ["placement.pools.all=cpu:0"],
    "split": ["placement.pools={policy: cpu:0, judges: cpu:1}"],
    "standalone": ["placement.pools={actor: cpu:0, reference: cpu:1, critic: cpu:2, rollout: cpu:3}"],
}
TRACES = {"colocate": ["trainer.profile={steps: [1, 3], micro_batches: 1}"], "split": [], "standalone": []}
ONE_RANK = ["train.layout.ep=1", "critic.train.layout.ep=1"]
FEW = ["algorithm.critic_warmup_steps=1", "trainer.steps=3", "rollout.samples_per_prompt=2"]
GUARDED = [
    "trainer.epochs=2",
    "algorithm.kl_guard=1e-12",
]
LENGTH = """import time


def score(generated_texts):
    time.sleep(0.5)
    return [len(text) for text in generated_texts]
"""
"""Not the same for all responses of a policy that knows nothing, and slow enough to be seen beside the others."""
RECIPES = ROOT / "launch/recipes"


def spans(directory: Path) -> list[tuple[str, str, float, float]]:
    """Role, method, begin and end in seconds of every call on every rank."""
    events = json.loads((directory / TIMELINE).read_text())["traceEvents"]
    roles = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return [
        (roles[event["pid"]], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]


def overlapping(directory: Path, methods: set[str]) -> list[tuple[str, str]]:
    """The pairs of roles that were at these methods at the same time."""
    calls = [span for span in spans(directory) if span[1] in methods]
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(calls, 2)
        if one[0] != other[0] and one[2] < other[3] and other[2] < one[3]
    ]


COMPUTES = {"generate", "logprobs", "values", "score", "update", "update_values"}


@pytest.mark.long
@pytest.mark.release
def test_ppo_is_the_same_on_every_placement(tmp_path: Path) -> None:
    """Bit for bit, where the layouts of each role are equal; roles that share devices take turns."""
    by_placement = {}
    (tmp_path / "slow.py").write_text(LENGTH)
    reward = f"reward.functions=[{{name: length, path: '{tmp_path}/slow.py:score'}}]"
    for name, pools in PLACEMENTS.items():
        recipe = str(RECIPES / f"placement/{name}.yaml")
        done = run_recipe(
            recipe, tmp_path, *pools, *ONE_RANK, *FEW, *GUARDED, *TRACES[name], reward, "trainer.prompts_per_step=64"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        by_placement[name] = records(tmp_path / "small", "sft", "train", "eval")
        assert "updates would have begun past algorithm.kl_guard=1e-12 and were skipped" in done.stderr
        if name == "colocate":
            assert not overlapping(tmp_path / "small", COMPUTES - {"score"})  # functions compute on no device
        if name == "standalone":
            together = {frozenset(pair) for pair in overlapping(tmp_path / "small", COMPUTES)}
            judges = itertools.combinations(("reference", "critic", "reward"), 2)
            assert {frozenset(pair) for pair in judges} <= together
        (tmp_path / "small").rename(tmp_path / name)
    traces = ["step-1-critic.json.gz", "step-3-actor.json.gz", "step-3-critic.json.gz"]  # the actor learns from step 2
    assert sorted(path.name for path in tmp_path.glob("*/profile/*")) == traces
    same = [[_timeless(record) for record in one] for one in by_placement.values()]
    assert same[0] == same[1] == same[2]
    first, second, third = (record for record in by_placement["split"] if record["phase"] == "train")
    assert "train/loss" not in first  # only the critic learns
    assert first["critic/skipped_updates"] == 0
    for step in (second, third):  # of four updates the first starts from the policy that the guard compares with
        assert 0 < step["train/refused_updates"] == step["train/skipped_updates"] < 4
    assert second["train/learning_rate"] == third["train/learning_rate"]  # whose schedule starts over each time
    assert math.isfinite(third["critic/explained_variance"])


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    other = ("_ms", "_sec", "_mb", "_bytes")
    return {name: value for name, value in record.items() if not name.endswith(other) and not name.startswith("sync/")}


def a_scorer(directory: Path) -> Path:
    """A model with a random scalar head that reads the tokens of the recipes."""
    recipe = load_recipe(RECIPES / "safe_rlhf.yaml")
    assert recipe.model.create is not None
    config = recipe.model.create.config | {"architectures": ["Qwen3MoeForSequenceClassification"], "num_labels": 1}
    initialise_random(model_spec(config, value_head=True), directory, 3, torch.float32)
    (path,) = directory.glob("*.safetensors")
    head = {"score.weight": 0.3 * torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(4))}
    save_file(load_file(path) | head, path, metadata={"format": "pt"})
    return directory


def _expect_expert_loads(run: Path, steps: list[dict[str, Any]]) -> None:
    """Check that the matrices of a run's file agree with the metrics of its steps."""
    kept = read_expert_loads(run / "expert_loads.jsonl")
    assert [record.step for record in kept] == [step["step"] for step in steps]
    for step, record in zip(steps, kept, strict=True):
        assert list(record.models) == [*(["actor"] if step["step"] > 1 else []), "critic", "cost_critic"]
        for role, model in record.models.items():
            group = "train" if role == "actor" else role
            assert model.dead.sum() == step[f"{group}/dead_experts"]
            assert model.entropies.mean() == pytest.approx(step[f"{group}/expert_load_entropy"], rel=1e-3)


@pytest.mark.long
def test_safe_rlhf_weighs_costs_that_models_and_functions_find(tmp_path: Path) -> None:
    scorer = a_scorer(tmp_path / "scorer")
    done = run_recipe(
        str(RECIPES / "safe_rlhf.yaml"),
        tmp_path,
        "placement={actor: cpu:0, rollout: cpu:0}",
        *ONE_RANK,
        *FEW,
        "cost_critic.train.layout.ep=1",
        "train.megatron={moe_z_loss_coeff: 1e-3, moe_aux_loss_coeff: 1e-3}",
        *(
            "trainer.steps=null",
            "trainer.epochs_of_data=1.1",
            "evaluation.eval.before_train=false",
        ),  # 3 steps of 8 of 20
        f"reward_model={{path: {scorer}, weight: 0.5}}",
        f"cost_model={{path: {scorer}, weight: 2.0}}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    steps = records(tmp_path / "small", "train")
    assert len(steps) == 3
    assert [record["step"] for record in records(tmp_path / "small", "eval")] == [3]
    texts = [json.loads(line) for line in (tmp_path / "small" / "samples.jsonl").read_text().splitlines()]
    assert [(text["phase"], text["step"]) for text in texts[::4]] == [("train", step) for step in (1, 2, 3)]
    assert all(text["prompt"].endswith("=") and text["version"] == text["step"] for text in texts[:12])
    assert {text["reward"] for text in texts[:12]} - {0.0, 1.0}  # the reward model's share is in it
    for step in steps:
        assert step["reward/mean"] == pytest.approx(step["reward/arithmetic/mean"] + 0.5 * step["reward/model/mean"])
        assert step["cost/mean"] == pytest.approx(step["cost/length/mean"] + 2 * step["cost/model/mean"], rel=1e-5)
        assert step["reward/model/mean"] == pytest.approx(step["cost/model/mean"]) != 0
        assert step["cost_critic/gradient_norm"] > 0
        assert step["critic/gradient_norm"] > 0
        learning = [model for model in ("train", "critic", "cost_critic") if f"{model}/gradient_norm" in step]
        assert len(learning) == (2 if step["step"] == 1 else 3)  # the critics alone in the first step
        assert all(step[f"{model}/expert_load_max"] > 1 for model in learning)
        assert step["step"] == 1 or (step["train/router_z_loss"] > 0 and step["train/update_balance_loss"] > 0.9)
        assert step["cost_critic/return_mean"] != pytest.approx(step["critic/return_mean"])
    _expect_expert_loads(tmp_path / "small", steps)
    stored = pq.read_table(tmp_path / "small" / "samples").to_pandas()
    assert stored["step"].value_counts().to_dict() == {1: 16, 2: 16, 3: 16}
    given = stored["reward/arithmetic"] + 0.5 * stored["reward/model"]
    assert stored["reward"].to_numpy() == pytest.approx(given.to_numpy())
    assert stored["cost"].to_numpy() == pytest.approx((stored["cost/length"] + 2 * stored["cost/model"]).to_numpy())
    means = stored.groupby("step")["reward"].mean().tolist()
    assert means == pytest.approx([step["reward/mean"] for step in steps])
    assert stored["advantage"].isna().all()  # each token has its own
    assert (stored["ended"] > stored["began"]).all() and (stored["engine"] == 0).all()
    # lambda <- exp(min(log lambda + lr * lambda * (mean cost - limit), log max)); the step uses the one before.
    for before, after in itertools.pairwise(steps):
        old = before["cost/multiplier"]
        expected = math.exp(min(math.log(old) + 0.3 * old * (before["cost/mean"] - 1.9), math.log(5)))
        expected = old if before["step"] == 1 else expected  # in which the critics alone learn
        assert after["cost/multiplier"] == pytest.approx(expected, rel=1e-4)
    roles = {role for role, _, _, _ in spans(tmp_path / "small")}
    models = {"actor", "reference", "critic", "cost_critic", "reward_model", "cost_model"}
    assert roles == models | {"rollout", "reward"}
    assert not overlapping(tmp_path / "small", COMPUTES - {"score"})


@pytest.mark.long
def test_models_alone_reward_and_cost(tmp_path: Path) -> None:
    """No function of rewards or costs: their sums, the evaluation, the report and a resumed end are the models'."""
    scorer = a_scorer(tmp_path / "scorer")
    overrides = (
        "placement={actor: cpu:0, rollout: cpu:0}",
        *ONE_RANK,
        *FEW,
        "trainer.steps=1",
        "algorithm.critic_warmup_steps=0",
        "cost_critic.train.layout.ep=1",
        "reward=null",
        "cost=null",
        f"reward_model={{path: {scorer}, weight: 0.5}}",
        f"cost_model={{path: {scorer}, weight: 2.0}}",
        "checkpoint.save_interval=1",
        "resume=auto",
    )
    recipe = str(RECIPES / "safe_rlhf.yaml")
    done = run_recipe(recipe, tmp_path, *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    [step] = records(tmp_path / "small", "train")
    assert step["reward/mean"] == pytest.approx(0.5 * step["reward/model/mean"]) != 0
    assert step["cost/mean"] == pytest.approx(2 * step["cost/model/mean"]) != 0
    evaluations = records(tmp_path / "small", "eval")
    assert [evaluation["step"] for evaluation in evaluations] == [0, 1]
    for evaluation in evaluations:
        assert evaluation["eval/prompts"] == 16 and evaluation["eval/training_prompts"] == 0
        assert "eval/mean@1" in evaluation and "eval/maj@1" not in evaluation
    scores = [[evaluation[f"eval/score_mean{end}"] for end in ("", "_low", "_high")] for evaluation in evaluations]
    values = " -> ".join(f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in scores)
    last = f"mean reward model score of 16 held-out prompts: {values}, step 0 -> step 1"
    assert last in done.stdout.splitlines()
    assert "Mean score of held-out prompts by the reward model" in render(read_run(tmp_path / "small"))
    assert {role for role, _, _, _ in spans(tmp_path / "small")} >= {"reward_model", "cost_model", "rollout"}
    resumed = run_recipe(recipe, tmp_path, *overrides)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert last in resumed.stdout.splitlines()


OWN_LOOP = """
import sys
from pathlib import Path

import torch

from hybridflow import PPOConfig, PPOTrainer

if __name__ == "__main__":
    with PPOTrainer(PPOConfig(recipe=Path(sys.argv[1]))) as trainer:
        for _ in range(2):
            trainer.update(trainer.rollout())
        trainer.export("exported")
        rollouts = trainer.rollout()
        for wrong in (rollouts.replace(costs=None), rollouts.replace(costs=rollouts.costs * torch.nan)):
            try:
                trainer.update(wrong)
            except Exception as error:
                print("refused", error)
        dearer = trainer.update(rollouts.replace(costs=rollouts.costs + 1))
        print("dearer", dearer["cost_critic/return_mean"] - float(rollouts.cost_returns[rollouts.response_mask].mean()))
"""


@pytest.mark.long
@pytest.mark.release
def test_safe_rlhf_in_a_loop_of_ones_own_learns_what_a_run_learns(tmp_path: Path) -> None:
    """Bit for bit: figures, multiplier and weights."""
    shared = [*SMALL, "placement={actor: cpu:0, rollout: cpu:0}", *ONE_RANK, "cost_critic.train.layout.ep=1"]
    shared += [
        "trainer.steps=2",
        "evaluation.eval.before_train=false",
        "rollout.samples_per_prompt=2",
        "algorithm.critic_warmup_steps=1",
        "algorithm.gamma=1",
        "algorithm.gae_lambda=1",
    ]
    for name in ("run", "loop"):
        recipe = load_recipe(RECIPES / "safe_rlhf.yaml", [*shared, f"run_dir={tmp_path}", f"name={name}"])
        (tmp_path / f"{name}.yaml").write_text(settings_yaml(recipe))
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    said = {}
    for name, program in (("run", ["-m", "hybridflow", "train"]), ("loop", ["loop.py"])):
        done = subprocess.run(
            [warm_python(), *program, f"{name}.yaml"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said[name] = done.stdout.splitlines()
    run, loop = ([_timeless(record) for record in records(tmp_path / name, "sft", "train")] for name in ("run", "loop"))
    assert run == loop[: len(run)]
    assert [record["cost/multiplier"] for record in run if record["phase"] == "train"][1] != 1
    weights = [
        load_file(path) for path in (tmp_path / "run/model", tmp_path / "exported") for path in path.glob("*.s*")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [line.removeprefix("refused ") for line in said["loop"] if line.startswith("refused ")] == [
        "update: rollouts without costs, expected those of rollout() or others",
        "update: the cost of row 0 is nan, expected a finite number",
    ]
    [dearer] = [line.removeprefix("dearer ") for line in said["loop"] if line.startswith("dearer ")]
    assert float(dearer) == pytest.approx(1, abs=0.01)  # each return is that of the dearer costs, without a discount


@pytest.mark.long
def test_a_reward_model_scores_an_evaluation_beside_a_step_once_the_models_have_learned(tmp_path: Path) -> None:
    scorer = a_scorer(tmp_path / "scorer")
    overrides = [
        *("placement={actor: cpu:0, rollout: cpu:2}", *ONE_RANK, *FEW, "trainer.steps=2", "evaluation.eval.interval=1"),
        *("cost_critic.train.layout.ep=1", "reward=null", f"reward_model={{path: {scorer}, weight: 0.5}}"),
    ]
    by_mode = {}
    for name, setting in (("waiting", "false"), ("beside", "true")):
        recipe, settings = str(RECIPES / "safe_rlhf.yaml"), (f"name={name}", f"trainer.async_evaluation={setting}")
        done = run_recipe(recipe, tmp_path, *overrides, *settings)
        assert done.returncode == 0, done.stderr[-3000:]
        by_mode[name] = [
            {figure: value for figure, value in record.items() if not figure.endswith(("_ms", "_per_sec", "mfu"))}
            for record in sorted(records(tmp_path / name, "train", "eval"), key=lambda measured: measured["phase"])
        ]
        for record in by_mode[name]:
            for figure in [name for name in record if name.startswith(("memory/", "samples/"))]:
                del record[figure]
    assert by_mode["waiting"] == by_mode["beside"]
    assert [record["step"] for record in by_mode["beside"] if "eval/score_mean" in record] == [0, 1, 2]
    calls = spans(tmp_path / "beside")
    ends = sorted(end for role, method, _, end in calls if (role, method) == ("rollout", "commit_weights"))
    for begin, end in itertools.pairwise(ends):
        within = [call for call in calls if begin < call[2] < end]
        learned = max(call[3] for call in within if call[1] in ("update", "update_values"))
        generated, scored = (
            [span for span in within if span[:2] == call]
            for call in (("rollout", "generate"), ("reward_model", "score"))
        )
        assert len(generated) == len(scored) == 2
        assert generated[1][2] < learned <= scored[1][2]

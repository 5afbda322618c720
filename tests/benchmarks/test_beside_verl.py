"""Comparison with verl: its settings, its prompts, and the table from logs of both systems."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.beside_verl import compare
from benchmarks.beside_verl.logs import checked, read_ours, read_verl
from benchmarks.beside_verl.table import VariantSteps, lines, summary
from benchmarks.beside_verl.workloads import WORKLOADS, write_prompts
from engine3d.errors import UserError
from engine3d.models import model_spec
from hybridflow.cluster.devices.device_map import Node
from hybridflow.config.recipe import load_recipe
from hybridflow.data.tokenizer import CHAT_CHARACTERS, make_chat_tokenizer
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import ROOT

HERE = ROOT / "benchmarks/beside_verl"
VARIANTS: dict[str, Any] = yaml.safe_load((HERE / "variants.yaml").read_text())
VERL = os.environ.get("HYBRIDFLOW_TEST_VERL")
"""Folder in which verl is installed (`verl.lock`)."""
OURS = {
    "phase": "train",
    "rollout/response_length_mean": 6.0,
    "rollout/time_ms": 4000.0,
    "train/update_time_ms": 5000.0,
    "sync/time_ms": 500.0,
    "train/step_time_ms": 10000.0,
    "step/device_tokens_per_sec": 17.6,
    "mismatch/logprob_abs_diff_mean": 0.01,
    "train/gradient_norm": 0.05,
    "train/entropy": 4.5,
}
VERLS = {
    "timing_s/step": 20.0,
    "timing_s/gen": 5.0,
    "timing_s/old_log_prob": 4.0,
    "timing_s/update_actor": 8.0,
    "timing_s/update_weights": 2.0,
    "perf/total_num_tokens": 176,
    "response_length/mean": 6.0,
    "rollout_corr/logprob_abs_diff": 0.02,
    "actor/grad_norm": 0.06,
    "actor/entropy": 4.4,
}


def _run(directory: Path, name: str, records: list[dict[str, Any]], exit_code: int = 0) -> None:
    """Write a run of `compare.py` with these records as its metrics."""
    run = directory / "dry-run" / name
    path = run / ("ours/metrics.jsonl" if name.startswith("ours") else "metrics.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "stderr").write_text("\n".join(f"line {number}" for number in range(40)))
    (run / "result.json").write_text(json.dumps({"exit_code": exit_code, "seconds": 60.0, "peak_bytes": 8 * 10**9}))


def _ours(**changed: float) -> list[dict[str, Any]]:
    return [{"step": step} | OURS | (changed if step == 3 else {}) for step in (1, 2, 3)]


def _verls(**changed: float) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [{"step": step, "data": VERLS | (changed if step == 3 else {})} for step in (1, 2, 3)]
    return [{"step": 0, "data": {"val/loss": 1.0}}, *steps]


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("variant", VARIANTS["ours"]["variants"])
def test_every_variant_of_ours_is_a_recipe(workload: str, variant: str, tmp_path: Path) -> None:
    work = WORKLOADS[workload]
    if work.cpu and variant == "tuned":
        pytest.skip("its settings are for GPUs")
    recipe_file, *overrides = work.model
    settings = compare.commands_settings(
        VARIANTS, "ours", variant, work, _names(tmp_path, Path("unused")) | {"model": "unused"}
    )
    made = load_recipe(Path(recipe_file), overrides).model
    write_prompts(tmp_path, work, 1, order_seed=1, alphabet=CHAT_CHARACTERS[1:])
    settings = [*(setting for setting in settings if not setting.startswith("model.path")), "model.path=null"]
    settings.append(f"model={json.dumps(made.model_dump(mode='json'))}")
    recipe = load_recipe(HERE / "ours.yaml", settings)
    check_recipe(recipe, [Node("node 0", gpus=0 if work.cpu else 1, cpu_slots=2)], must_fit=False)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "ours.jsonl").read_text().splitlines()]
    assert sum(
        len(prompt) + recipe.rollout.sampling_table.for_prompt(len(prompt)).max_new_tokens for prompt in prompts
    ) == (work.tokens // work.samples)


def _names(directory: Path, run: Path) -> dict[str, object]:
    options = compare._parser().parse_args(["--directory", str(directory)])
    return compare._run_names(options, directory, run)


def test_both_systems_draw_the_same_prompts_in_a_step(tmp_path: Path) -> None:
    from hybridflow.data.sampler import PromptSampler

    work = WORKLOADS["dry-run"]
    write_prompts(tmp_path, work, 3, order_seed=7, alphabet=CHAT_CHARACTERS[1:])
    verl, ours = ([json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("verl", "ours"))
    assert [ours[index] for index in PromptSampler(12, 7).next(12)] == verl
    assert [len(row["prompt"]) for row in verl] == 6 * [12, 20]
    assert [row["extra_info"]["max_new_tokens"] for row in verl] == 6 * [4, 8]
    assert len({row["prompt"] for row in verl}) == 12


def test_workloads_are_as_long_as_described() -> None:
    assert WORKLOADS["fixed"].tokens == 2**20
    nemo = WORKLOADS["nemo-rl"]
    assert nemo.tokens / nemo.requests == 3200 and max(map(sum, nemo.lengths)) == 4096
    assert max(response for _, response in WORKLOADS["long-tail"].lengths) == 8192


def test_table_of_both_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, "ours-tuned-0", _ours(**{"train/step_time_ms": 8000.0, "step/device_tokens_per_sec": 22.0}))
    _run(tmp_path, "ours-tuned-1", _ours())
    _run(tmp_path, "verl-plain-0", _verls(**{"timing_s/step": 21.0}))
    read = [
        compare.read_variant(name, VARIANTS, WORKLOADS["dry-run"], tmp_path / "dry-run", 1)
        for name in ("ours tuned", "verl plain")
    ]
    assert [(variant.runs, len(variant.steps), list(variant.problems)) for variant in read] == [(2, 4, []), (1, 2, [])]
    stats = {variant.name: summary(variant, 1e13, 1e13) for variant in read}
    ours, verls = (stats[name]["columns"] for name in ("ours tuned", "verl plain"))
    assert ours["tokens/s per GPU"] == {"median": 17.6, "least": 17.6, "most": 22.0}
    assert ours["log-probs s"]["median"] == 0.0 and ours["rest s"] == {"median": 0.5, "least": 0.0, "most": 0.5}
    assert ours["MFU"]["median"] == pytest.approx(0.2) and verls["MFU"]["median"] == pytest.approx(0.125)
    assert verls["rest s"] == {"median": 1.5, "least": 1.0, "most": 2.0}
    assert verls["mismatch"]["median"] == 0.02 and verls["entropy"]["median"] == 4.4
    table = list(lines(stats))
    assert "17.6 (17.6 to 22)" in table[2] and table[2].endswith("8.0 |")
    assert table[-1].startswith("- ours tuned over verl plain: 2.05 times")
    assert {line.count("|") for line in table[:4]} == {len(ours) + 4}


def test_metrics_of_verls_bypass_mode(tmp_path: Path) -> None:
    data = {
        name: value for name, value in VERLS.items() if name not in ("rollout_corr/logprob_abs_diff", "actor/entropy")
    }
    data |= {"actor/rollout_corr/logprob_abs_diff": 0.03, "actor/entropy_loss": 4.3}
    del data["timing_s/old_log_prob"]
    (tmp_path / "log").write_text(json.dumps({"step": 1, "data": data}) + '\n{"step": 2, "da')
    (step,) = read_verl(tmp_path / "log")
    assert (step.mismatch, step.entropy, step.phases["log-probs"]) == (0.03, 4.3, 0.0)


def test_other_work_and_failures_are_named(tmp_path: Path) -> None:
    _run(tmp_path, "verl-tuned-0", _verls(**{"perf/total_num_tokens": 170}), exit_code=124)
    variant = compare.read_variant("verl tuned", VARIANTS, WORKLOADS["dry-run"], tmp_path / "dry-run", 1)
    cut_off, other = variant.problems
    assert "verl-tuned-0 was cut off after 60 s" in cut_off and "line 39" in cut_off and "line 20" not in cut_off
    assert "step 3 has 170 tokens" in other and "expected 176" in other
    missing = compare.read_variant("ours tuned", VARIANTS, WORKLOADS["dry-run"], tmp_path / "dry-run", 1)
    assert missing.problems == ["no run has ended"]
    assert list(lines({"ours tuned": summary(VariantSteps("ours tuned", "", []), 1.0, None)}))[2].startswith("| ours")
    assert checked(read_ours(_written(tmp_path, _ours())), 176, 6.0) is None


def _written(directory: Path, records: list[dict[str, Any]]) -> Path:
    path = directory / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_logs_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_ours(tmp_path / "none")
    with pytest.raises(UserError, match="no train/step_time_ms"):
        read_ours(_written(tmp_path, [{"phase": "train", "step": 1}]))
    with pytest.raises(UserError, match="expected the lines of verl's file logger"):
        read_verl(_written(tmp_path, _ours()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--variants", "ours tuned,verl fast"], "'verl fast', expected names of ours tuned, verl tuned"),
        (["--verl", "nowhere"], "nowhere is no directory"),
        (["--verl", "."], "has no verl"),
        (["--workload", "dry-run", "--variants", "verl tuned"], "expected names of ours tuned"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--directory", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_any_name_of_the_stand_in_for_energon_is_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    energon = importlib.import_module("benchmarks.beside_verl.verl_path.megatron.energon")
    below = importlib.import_module(f"{energon.__name__}.flavors.webdataset")

    class Subclass(below.Dataset[int]): ...

    assert issubclass(Subclass, energon.Sample.__mro__[1])
    with pytest.raises(AttributeError):
        _ = energon.__wrapped__


def test_work_of_an_update() -> None:
    work = WORKLOADS["fixed"]
    recipe_file, *overrides = work.model
    create = load_recipe(Path(recipe_file), overrides).model.create
    assert create is not None
    flops = work.update_flops(model_spec(create.config))
    parameters = 8 * (8 * 3 * 2048 * 768 + 2048 * 128 + 2 * 2048 * 4096 + 2 * 2048 * 512) + 2048 * 151936
    attention = 8 * 32 * 2 * 128 * 2048
    assert flops == 3 * 2**20 * (2 * parameters + attention)


@pytest.mark.release
@pytest.mark.processes
@pytest.mark.skipif(VERL is None, reason="HYBRIDFLOW_TEST_VERL is not set to a folder with verl")
@pytest.mark.parametrize("variant", VARIANTS["verl"]["variants"])
def test_verl_composes_every_variant(variant: str, tmp_path: Path) -> None:
    options = compare._parser().parse_args(["--directory", str(tmp_path), "--workload", "long-tail"])
    command, environment = compare.run_of(
        options, VARIANTS, f"verl {variant}", tmp_path, tmp_path / "run", Path(str(VERL))
    )
    done = subprocess.run([*command, "--cfg", "job"], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    config = yaml.safe_load(done.stdout)
    assert config["data"]["max_response_length"] == 8192
    assert config["algorithm"]["rollout_correction"]["bypass_mode"] == (variant != "plain")


@pytest.mark.release
@pytest.mark.processes
@pytest.mark.skipif(VERL is None, reason="HYBRIDFLOW_TEST_VERL is not set to a folder with verl")
def test_verl_takes_the_changes(tmp_path: Path) -> None:
    make_chat_tokenizer(tmp_path)
    program = ROOT / "tests/support/verl_changes.py"
    environment = compare.verl_environment(Path(str(VERL)), tmp_path)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "prompt": 8,
        "response": 7,
        "sampling": {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 7},
        "bert_padding": "verl.utils.attention_utils",
        "mismatch": 0.5,
        "mismatch in bypass mode": 0.5,
    }

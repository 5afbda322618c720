"""The command as a user meets it: exit codes, and one clear line first on stderr."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybridflow.cli import main

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "launch/recipes/demo.yaml")


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["check", *arguments])
    return code, capsys.readouterr().err.splitlines()


# What some overrides need beside them for their own error to be the only one.
BESIDE = {
    "placement.rollout=cpu:0-2": ("rollout.engines=2",),
    "rollout.engine.tp=8": ("placement.rollout=cpu:0-7",),
    "model.create.config.moe_intermediate_size=97": ("rollout.engine.tp=2", "placement.rollout=cpu:0-1"),
    "model.create.config.num_experts=5": (
        "rollout.engine.tp=2",
        "rollout.engine.ep=2",
        "placement.rollout=cpu:0-1",
        "train.layout.ep=1",
    ),
}


def test_a_recipe_with_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", DEMO, "--track_metrics", "seed=7"]) == 0
    assert capsys.readouterr() == (f"{DEMO}: nothing wrong found\n", "")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "train.layout.tpp=2",
            "override train.layout.tpp=2: unknown key train.layout.tpp: did you mean train.layout.tp?",
        ),
        ("train.layout.tp=two", "override train.layout.tp=two: train.layout.tp = 'two': expected a whole number"),
        (
            "train.layout.tp=3",
            "train.layout on placement.actor: layout: tp*pp*cp = 3*1*1 = 3 does not divide the 2 ranks",
        ),
        ("train.layout.ep=8", "train.layout on placement.actor: layout: etp*ep = 1*8 = 8 does not divide"),
        ("placement.actor=gpu:0", "placement.actor: device map 'gpu:0': the kind is 'gpu', expected cpu, cuda or node"),
        ("placement.rollout=cpu:0-2", "placement.rollout: 3 devices for 2 engines"),
        ("rollout.sampling.max_new_tokens=64", "rollout.sampling.max_new_tokens=64 leaves no room for a prompt"),
        ("rollout.engine.context_length=8", "prompt"),
        ("rollout.engine.context_length=128", "rollout.engine.context_length=128, expected at most the model's 64"),
        ("rollout.engine.dp=2", "unknown key rollout.engine.dp: rollout.engine takes tp, ep, dtype"),
        (
            "rollout.engine.server_args={dp_size: 2}",
            "server_args.dp_size is not set here; set nothing: an engine is one",
        ),
        ("rollout.engine.tp=8", "rollout.engine.tp=8 does not divide the model's 4 attention heads"),
        (
            "model.create.config.moe_intermediate_size=97",
            "rollout.engine.tp=2 ep=1: tp/ep = 2 does not divide the experts' intermediate size 97",
        ),
        ("model.create.config.num_experts=5", "rollout.engine.ep=2 does not divide the model's 5 experts"),
        (
            "model.create.config.mlp_only_layers=[0]",
            "model: mlp_only_layers=[0]: SGLang builds experts in every layer of Qwen3MoeForCausalLM",
        ),
        ("model.create.config.decoder_sparse_step=2", "model: decoder_sparse_step=2: SGLang builds experts in every"),
        ("rollout.sampling.temperature=0", "sampling.temperature=0 samples nothing to learn from"),
        ("train.layout.cp=2", "cp=2: expected 1, because training does not cut sequences over ranks yet"),
        ("train.optimizer.precision_aware=true", "precision_aware=true needs Transformer Engine"),
        ("train.megatron={nonsense: 1}", "nonsense"),
        ("trainer.mini_batches=4096", "trainer.prompts_per_step * rollout.samples_per_prompt = 512, expected at least"),
        ("data.arithmetic.sft_size=0", "warmup: the data has no supervised examples"),
        ("name=.", "name"),
        ("model={path: /no/such/model}", "/no/such/model"),
        ("model.path=/no/such/model", "expected one of path"),
    ],
)
def test_what_check_finds(capsys: pytest.CaptureFixture[str], override: str, line: str) -> None:
    code, lines = check(capsys, DEMO, override, *BESIDE.get(override, ()))
    assert code == 2
    assert lines[0].startswith("hybridflow: ")
    assert line in lines[0]


def test_a_model_that_sglang_would_build_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    config = "{architectures: [LlamaForCausalLM], vocab_size: 32, hidden_size: 32, intermediate_size: 64, "
    config += "num_hidden_layers: 2, num_attention_heads: 4, max_position_embeddings: 64, "
    code, lines = check(
        capsys, DEMO, "train.layout.ep=1", f"model.create.config={config}attention_bias: true, mlp_bias: true}}"
    )
    assert (code, len(lines)) == (2, 1)
    assert "model: mlp_bias=true: SGLang builds LlamaForCausalLM without biases in its MLPs" in lines[0]
    code, lines = check(
        capsys,
        DEMO,
        *("train.layout.ep=1", "rollout.engine.tp=2", "rollout.engine.ep=2", "placement.rollout=cpu:0-1"),
        f"model.create.config={config}attention_bias: true}}",
    )
    assert (code, len(lines)) == (2, 1)
    assert "rollout.engine.ep=2: expected 1, because LlamaForCausalLM has no experts" in lines[0]


def test_a_reward_function_that_cannot_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = check(capsys, DEMO, 'reward.functions=[{name: mine, path: "no_such_module:reward"}]')
    assert code == 2
    assert "reward 'mine' (no_such_module:reward)" in lines[0]


def test_all_errors_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = check(capsys, DEMO, "placement.rollout=cuda:9999", "rollout.sampling.max_new_tokens=64")
    assert (code, len(lines)) == (2, 2)


@pytest.mark.parametrize("arguments", [[], ["train"], ["fly", DEMO], ["check", DEMO, "--nothing"]])
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


DRIVER = """
import os, sys, time
from pathlib import Path
from engine3d.layout import Layout
from hybridflow.devices import pool_devices
from hybridflow.placement import cluster_nodes, reserve, start_ray
from hybridflow.worker_group import WorkerGroup
from tests.hybridflow.group_workers import Failing

start_ray(cpu_slots=2)
pools = reserve(pool_devices({"two": "cpu:0-1"}, {}, cluster_nodes()))
group = WorkerGroup("two", Failing, pools["two"], Layout(dp=2))
print("children", os.environ["HYBRIDFLOW_RAY"], *group.start_child().result(), flush=True)
time.sleep(600)
"""


@pytest.mark.processes
def test_a_killed_driver_leaves_no_process() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    try:
        assert driver.stdout is not None
        words = driver.stdout.readline().split()
        assert words[:1] == ["children"]
        directory = words[1]
        grandchildren = [psutil.Process(int(pid)) for pid in words[2:]]
        started = [*psutil.Process(driver.pid).children(recursive=True), *grandchildren]
        assert any("raylet" in process.name() for process in started)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait(timeout=10)
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not [" ".join(process.cmdline()) for process in alive]
    deadline = time.monotonic() + 10
    while Path(directory).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(directory).exists()

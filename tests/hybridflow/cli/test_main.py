"""The command as a user meets it: exit codes, and one clear line first on stderr."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine3d.checkpoint import hf
from engine3d.checkpoint.manifest import MANIFEST
from engine3d.errors import EngineError
from hybridflow.cli.main import main
from hybridflow.config.initial_model import create_model, initial_spec
from hybridflow.config.recipe import load_recipe
from hybridflow.rundir.status.lock import hold
from tests.support import resumable
from tests.support.small_checkpoints import make_checkpoint, make_checkpoint_of_tensors

ROOT = Path(__file__).parents[3]
DEMO = str(ROOT / "launch/recipes/demo.yaml")


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["check", *arguments])
    return code, capsys.readouterr().err.splitlines()


def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("hybridflow")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "settings", "status {run}", "checkpoint list {run}"])
def test_a_command_whose_reader_is_gone_ends_without_a_word(words: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoints")
    (tmp_path / "recipe.yaml").write_text("name: small\n")
    (tmp_path / "logs").mkdir()
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hybridflow", *words.format(run=tmp_path).split()]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_a_command_whose_output_is_lost_says_so() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "hybridflow", "settings"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "hybridflow: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


# What some overrides need beside them for their own error to be the only one.
BESIDE = {
    "model.create.embedding_std=10": ("model.create.config.tie_word_embeddings=true",),
    "placement.rollout=cpu:0-2": ("rollout.engines=2",),
    "rollout.engine.tp=8": ("placement.rollout=cpu:0-7",),
    "model.create.config.moe_intermediate_size=97": ("rollout.engine.tp=2", "placement.rollout=cpu:0-1"),
    "model.create.config.num_experts=5": (
        "rollout.engine.tp=2",
        "rollout.engine.ep=2",
        "placement.rollout=cpu:0-1",
        "train.layout.ep=1",
    ),
    "evaluation.eval.sampling={top_p: 0.7}": ("evaluation.eval.temperature=0",),
    "evaluation.eval.sampling={min_p: 0.1}": ("rollout.engine.deterministic=true",),
    "train.sequence_parallel=false": ("train.layout={tp: 2}",),
    "algorithm={name: ppo}": ("critic.path=/no/such/critic",),
    "algorithm={kl_coef: 0.1, kl_guard: 0.1}": ("trainer.mini_batches=1",),
    "algorithm.name=kl_cov": ("trainer.mini_batches=1",),
    "data.arithmetic.eval_size=1": ("placement.rollout=cpu:0-1", "rollout.engines=2"),
    "placement.reward=cpu:0": ("reward=null", "reward_model.path=/no/such/scorer"),
}


def test_a_recipe_with_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", DEMO, "--track_metrics", "seed=7", f"run_dir={tmp_path}"]) == 0
    assert capsys.readouterr() == (f"{DEMO}: nothing wrong found\n", "")


@pytest.mark.slow
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
        (
            "placement.actor=gpu:0",
            "placement.actor: device map 'gpu:0': the kind is 'gpu', expected cpu, cuda, node",
        ),
        ("placement.rollout=cpu:0-2", "placement.rollout: 3 devices for 2 engines"),
        ("rollout.sampling.max_new_tokens=64", "rollout.sampling.max_new_tokens=64 leaves no room for a prompt"),
        ("rollout.engine.context_length=8", "prompt"),
        ("rollout.engine.max_total_tokens=17", "rollout.engine.max_total_tokens=17, expected at least 18: the longest"),
        ("rollout.engine.context_length=128", "rollout.engine.context_length=128, expected at most the model's 64"),
        (
            "rollout.engine.sizes=2",
            "unknown key rollout.engine.sizes: rollout.engine takes tp, ep, attention_dp, dtype",
        ),
        (
            "rollout.engine.server_args={dp_size: 2}",
            "server_args.dp_size is not set here; set attention_dp; several engines for several replicas",
        ),
        (
            "rollout.engine.server_args={enable_eplb: true}",
            "server_args.enable_eplb is refused: experts move in memory",
        ),
        ("rollout.engine.attention_backend=nonsense", "rollout.engine.attention_backend: 'nonsense' was not tried"),
        (
            "rollout.engine.attention_backend=fa3",
            "rollout.engine.attention_backend=fa3: on this device SGLang runs with torch_native alone",
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
        ("rollout.sampling.temperature=1e-9", "temperature is 1e-09, which SGLang takes for 0"),
        ("rollout.sampling.top_p=0.9", "sampling.top_p=0.9 draws tokens from another distribution than the policy's"),
        ("rollout.sampling.top_k=20", "expected -1, or evaluation.NAME.sampling.top_k for evaluation alone"),
        ("rollout.sampling.min_p=0.1", "sampling.min_p=0.1 draws tokens from another distribution"),
        ("rollout.sampling.repetition_penalty=1.1", "sampling.repetition_penalty=1.1 draws tokens from another"),
        ("rollout.sampling.presence_penalty=0.1", "sampling.presence_penalty=0.1 draws tokens from another"),
        ("rollout.sampling.frequency_penalty=0.1", "sampling.frequency_penalty=0.1 draws tokens from another"),
        ("rollout.sampling.stop=['']", "rollout.sampling.stop"),
        ("evaluation.eval.sampling.top_p=2", "evaluation.eval.sampling.top_p = 2: expected at most 1.0"),
        ("evaluation.eval.sampling={top_p: 0.7}", "evaluation.eval.sampling.top_p is set with temperature=0"),
        (
            "evaluation.eval.sampling={min_p: 0.1}",
            "evaluation.eval.sampling.min_p is set with rollout.engine.deterministic",
        ),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1 with algorithm.name=grpo, where a group of one"),
        ("algorithm.name=safe_rlhf", "learns from costs, expected cost.functions or cost_model.path"),
        ("placement.critic=cpu:1", "placement.critic is set, and there is no such role with algorithm.name=grpo"),
        ("critic.path=/no/such", "critic is set, and there is no such role with algorithm.name=grpo"),
        ("reference.path=/no/such", "reference is set, and there is no such role with algorithm.kl_coef=0"),
        ("algorithm={name: ppo}", "critic.path: model /no/such/critic: no such directory"),
        ("reward=null", "reward=null and no reward_model, expected at least one of them"),
        ("placement.reward=cpu:0", "placement.reward is set, and there is no such role with reward=null"),
        ("algorithm.gamma=0.9", "gamma"),
        ("algorithm={kl_coef: 0.1, kl_guard: 0.1}", "algorithm.kl_guard is set with one update a step"),
        ("algorithm.name=kl_cov", "algorithm.name=kl_cov with one update a step, of the very policy that made the"),
        (
            "algorithm.schedules.entropy_coef={shape: linear, to: -1, over: 5}",
            "algorithm: schedules: in step 6, entropy_coef is -1: input should be greater than or equal to 0",
        ),
        (
            "placement.reward=cpu:0-1",
            "placement.reward: 2 devices, expected one; reward.functions[].workers is how many",
        ),
        (
            "train.sequence_parallel=false",
            "train.layout on placement.actor: sequence_parallel=false with tp=2: expected true, because the model has",
        ),
        (
            "train={dtype: float32, packing: false, layout: {cp: 2}}",
            "train.packing=false with layout.cp=2: expected packing=true, because ranks share packed sequences",
        ),
        (
            "train={dtype: bfloat16, optimizer: {precision_aware: true}}",
            "precision_aware=true needs Transformer Engine",
        ),
        ("train.megatron={nonsense: 1}", "train.megatron: nonsense: it is none of the options that were tried"),
        ("train.megatron={num_layers: 2}", "train.megatron: num_layers: it is of the model, and SGLang would serve"),
        ("train.megatron={moe_router_fusion: true}", "train.megatron.moe_router_fusion=True needs Transformer Engine"),
        (
            "train.megatron={moe_router_bias_update_rate: 0.001}",
            "train.megatron.moe_router_bias_update_rate is set, and",
        ),
        ("train.recompute=selective", "train.recompute=selective needs Transformer Engine, which is absent here"),
        ("rollout.sampling.stop_token_ids=[5, 32]", "rollout.sampling.stop_token_ids: 32 is no token of the model"),
        (
            "data.arithmetic.eval_size=1",
            "evaluation.eval: 1 prompts, expected at least 2: a prompt for each rollout engine",
        ),
        ("placement.cluster=127.0.0.1:1", "placement.cluster=127.0.0.1:1: Connection refused, expected a running"),
        ("trainer.mini_batches=4096", "trainer.prompts_per_step * rollout.samples_per_prompt = 512, expected at least"),
        ("trainer.profile={steps: [0]}", "trainer.profile.steps.0 = 0: expected at least 1"),
        ("trainer.profile={steps: 2}", "trainer.profile.steps = 2: expected a list"),
        ("trainer.profile={steps: []}", "trainer.profile: steps=[] traces nothing, expected at least one step"),
        ("trainer.profile={steps: [2], micro_batches: 0}", "trainer.profile.micro_batches = 0: expected at least 1"),
        ("trainer.profile={steps: [2], rollout_steps: -1}", "trainer.profile.rollout_steps = -1: expected at least 0"),
        ("trainer.profile={micro_batches: 2}", "trainer.profile.steps is missing and has no default"),
        ("trainer.profile.steps=[2, 121]", "trainer: profile.steps has step 121, and steps=120; expected none after"),
        ("data.arithmetic.sft_size=0", "warmup: the data has no supervised examples"),
        ("name=.", "name"),
        ("model={path: /no/such/model}", "/no/such/model"),
        ("model.path=/no/such/model", "expected one of path"),
        ("model.create.embedding_std=0", "model.create.embedding_std"),
        ("model.create.embedding_std=10", "embedding_std: the table is the output layer too"),
    ],
)
def test_what_check_finds(capsys: pytest.CaptureFixture[str], override: str, line: str) -> None:
    code, lines = check(capsys, DEMO, override, *BESIDE.get(override, ()))
    assert code == 2
    assert lines[0].startswith("hybridflow: ")
    assert line in lines[0]


@pytest.mark.slow
def test_options_of_megatron_core_against_each_roles_own_layout(capsys: pytest.CaptureFixture[str]) -> None:
    gathering = "{moe_token_dispatcher_type: allgather, moe_aux_loss_coeff: 1e-3}"
    assert check(capsys, DEMO, f"train.megatron={gathering}", "train.packing=true") == (0, [])
    code, lines = check(capsys, DEMO, f"train.megatron={gathering}", "train.packing=true", "train.layout={pp: 2}")
    assert (code, len(lines)) == (2, 1)
    assert "train.megatron.moe_token_dispatcher_type=allgather with pp=2: expected pp=1, or alltoall" in lines[0]
    code, lines = check(
        capsys,
        DEMO,
        "algorithm={name: ppo, kl_coef: 0.1}",
        f"critic.train={{dtype: float32, layout: {{pp: 2}}, megatron: {gathering}}}",
    )
    assert (code, len(lines)) == (2, 1)
    assert "critic.train.megatron.moe_token_dispatcher_type=allgather with pp=2" in lines[0]
    code, lines = check(
        capsys,
        DEMO,
        "algorithm={name: ppo, kl_coef: 0.1}",
        "reference.train={dtype: float32, layout: {tp: 2}, megatron: {moe_z_loss_coeff: 0.001}}",
    )
    assert (code, len(lines)) == (2, 1)
    assert "reference.train.megatron.moe_z_loss_coeff changes what a model learns, and this one is not" in lines[0]


def test_a_model_that_sglang_would_build_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    config = "{architectures: [LlamaForCausalLM], model_type: llama, vocab_size: 32, hidden_size: 32, "
    config += "intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, max_position_embeddings: 64, "
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


@pytest.mark.slow
def test_a_model_with_one_weight_or_one_token_that_it_cannot_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = load_recipe(DEMO)
    create_model(recipe.model, tmp_path / "model", seed=1)
    of_model = ("model.create=null", f"model.path={tmp_path}/model")
    assert check(capsys, DEMO, *of_model) == (0, [])
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": torch.full_like(tensors["lm_head.weight"], torch.inf)}, weights)
    code, lines = check(capsys, DEMO, *of_model)
    assert (code, len(lines)) == (2, 1)
    assert f"tensor lm_head.weight in {weights}: element [0, 0] is nan or infinite, expected finite" in lines[0]

    save_file(tensors, weights)
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer_json = json.loads(tokenizer.read_text())
    tokenizer_json["model"]["vocab"]["+"] = 99  # as many tokens as before
    tokenizer.write_text(json.dumps(tokenizer_json))
    code, lines = check(capsys, DEMO, *of_model)
    assert (code, len(lines)) == (2, 1)
    vocabulary = initial_spec(recipe.model).vocab_size
    assert f"model: prompt 0 has token id 99 and the model's vocab_size is {vocabulary}; expected a" in lines[0]


def test_a_reward_function_that_cannot_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = check(capsys, DEMO, 'reward.functions=[{name: mine, path: "no_such_module:reward"}]')
    assert code == 2
    assert "reward 'mine' (no_such_module:reward)" in lines[0]


def test_all_errors_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = check(capsys, DEMO, "placement.rollout=cuda:3-0", "rollout.sampling.max_new_tokens=64")
    assert (code, len(lines)) == (2, 2)


def checkpoint(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], list[str]]:
    code = main(["checkpoint", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err.splitlines()


def test_a_whole_checkpoint_is_verified(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = resumable.make_checkpoint(resumable.a_recipe(tmp_path), 2)
    code, out, err = checkpoint(capsys, "verify", directory)
    assert (code, err, len(out)) == (0, [], 1)
    assert re.fullmatch(rf"{directory}: whole: \d+ files, [\d.]+ MB, read in [\d.]+ s", out[0])


def test_a_damaged_checkpoint_has_a_line_for_each_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path, roles=("actor", "critic"))
    (directory / "driver.json").unlink()
    file = directory / "critic" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[::-1])
    code, out, err = checkpoint(capsys, "verify", directory)
    assert (code, out, len(err)) == (1, [], 2)
    start = f"hybridflow: checkpoint {directory}: "
    tensors = re.compile(r"critic/__0_0\.distcp is damaged: .*; damaged with it: (\S+, ){2}\S+ and 3 more")
    assert tensors.fullmatch(err[0].removeprefix(start))
    assert err[1] == f"{start}driver.json is missing"


def test_a_checkpoint_is_inspected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = make_checkpoint_of_tensors(tmp_path)
    code, out, err = checkpoint(capsys, "inspect", directory)
    assert (code, err) == (0, [])
    assert out[0] == f"checkpoint {directory}"
    assert any("policy version 13" in line for line in out)


@pytest.mark.parametrize("where", ["checkpoints", "run/checkpoints", "disk"])
def test_the_newest_whole_checkpoint_is_found_and_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str
) -> None:
    root, run = tmp_path / where, tmp_path / "run"
    if where == "disk":
        run.mkdir()
        (run / "recipe.yaml").write_text(f"checkpoint: {{dir: {root}}}\n")
    paths = [make_checkpoint(root, step) for step in (1, 2, 3)]
    (paths[0] / MANIFEST).unlink()  # older: of no interest
    (paths[2] / "driver.json").unlink()
    code, out, _ = checkpoint(capsys, "inspect", root if where == "checkpoints" else run)
    assert code == 0
    assert out[:3] == [
        f"skipped {paths[2]}: driver.json is missing",
        f"newest whole checkpoint: {paths[1]}",
        f"checkpoint {paths[1]}",
    ]


def test_directories_that_are_no_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nowhere, partial = tmp_path / "nowhere", make_checkpoint(tmp_path / "run" / "checkpoints", 3)
    (partial / MANIFEST).unlink()
    unfinished = f"it has no {MANIFEST}: it is no checkpoint, or its save was not finished"
    expected = {
        nowhere: f"checkpoint: no such directory: {nowhere}",
        partial: f"checkpoint {partial}: {unfinished}",
        tmp_path: f"checkpoint: no whole checkpoint in {tmp_path}",
        tmp_path / "run": f"checkpoint: no whole checkpoint in {tmp_path}/run (step-00000003: {unfinished})",
    }
    for path, line in expected.items():
        for action in (["inspect", path], ["verify", path], ["export", path, tmp_path / "out"]):
            assert checkpoint(capsys, *action) == (2, [], [f"hybridflow: {line}"])


def test_export_and_import_are_told_what_was_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, out = make_checkpoint(tmp_path), tmp_path / "out"
    calls: list[object] = []

    def exported(*given: object, **named: object) -> hf.Exported:
        calls.append((*given, named))
        return hf.Exported("float32", 1_500_000)

    monkeypatch.setattr(hf, "export_checkpoint", exported)
    monkeypatch.setattr(hf, "import_checkpoint", lambda *given: calls.append(given))
    assert checkpoint(capsys, "export", directory, out) == (0, [f"exported the actor to {out}: float32, 1.50 MB"], [])
    options = ("--role", "critic", "--dtype", "float32", "--precision", "fp8", "--max-shard-gb", "0.5", "--no-verify")
    assert checkpoint(capsys, "export", *options, directory, out)[0] == 0
    assert checkpoint(capsys, "import", "model", out) == (0, [f"imported model into {out}"], [])
    exported_as_is = {
        "role": "actor",
        "dtype": None,
        "precision": None,
        "max_shard_bytes": 5e9,
        "verify": True,
        "base": None,
        "multi_token": True,
    }
    critic = {"role": "critic", "dtype": "float32", "precision": "fp8", "max_shard_bytes": 5e8, "verify": False}
    assert calls == [
        (directory, out, exported_as_is),
        (directory, out, exported_as_is | critic),
        (Path("model"), out),
    ]


def test_nothing_is_imported_where_a_run_saves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with hold(tmp_path, "checkpoint.dir"):
        assert main(["checkpoint", "import", str(tmp_path / "model"), str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"hybridflow: import OUT: a run in {tmp_path} is going on; choose another name or directory"


def test_a_failure_while_exporting(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path)

    def fail(error: Exception) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(hf, "export_checkpoint", lambda *_, **__: (_ for _ in ()).throw(error))
        return checkpoint(capsys, "export", directory, tmp_path / "out")

    assert fail(EngineError("the disk is full")) == (1, [], ["hybridflow: the disk is full"])
    code, _, err = fail(ValueError("surprise"))
    assert (code, err[0]) == (1, "hybridflow: internal error: ValueError: surprise")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["fly", DEMO],
        ["check", DEMO, "--nothing"],
        ["checkpoint"],
        ["checkpoint", "fly"],
        ["checkpoint", "verify"],
        ["checkpoint", "inspect", "here", "there"],
        ["checkpoint", "export", "here"],
        ["checkpoint", "export", "here", "there", "--dtype", "int8"],
        ["checkpoint", "export", "here", "there", "--precision", "int8"],
        ["checkpoint", "export", "here", "there", "--max-shard-gb", "0"],
        ["checkpoint", "export", "here", "there", "--max-shard-gb", "five"],
        ["--track_metrics", "checkpoint", "inspect", "here"],
        ["report"],
        ["report", "here", "there"],
        ["report", "here", "--out"],
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_each_command_has_a_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    helps = {}
    for command in ("", "train", "check", "checkpoint", "report", "status", "logs"):
        with pytest.raises(SystemExit) as caught:
            main([*filter(None, [command]), "--help"])
        assert caught.value.code == 0
        helps[command] = capsys.readouterr().out
        assert helps[command].startswith(f"usage: {f'hybridflow {command}'.strip()} [-h]")
    assert "--memory" in helps["check"] and "--memory" not in helps["train"]
    assert "--track_metrics" in helps["train"] and "resume=auto" in helps["train"]
    assert all(f"hybridflow {command}" in helps[""] for command in ("train", "check", "checkpoint export", "report"))


def test_an_option_of_check_is_none_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", DEMO, "--memory"])
    assert caught.value.code == 2
    line = "--memory: no such option; settings stand behind the recipe as key=value, such as seed=1"
    assert capsys.readouterr().err == f"hybridflow: {line} (see hybridflow train --help)\n"


def test_an_option_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", DEMO, "--role", "actor"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("hybridflow: --role: no such option; did you mean --roles?")
    assert main(["check", DEMO, "--roles", "train,rollout"]) == 2
    assert "--roles train,rollout of this machine, expected --nodes beside it" in capsys.readouterr().err


DRIVER = """
import os, sys, time
from pathlib import Path
from engine3d.layout import Layout
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.ray_session import start_ray
from hybridflow.cluster.ray.resource_pool import cluster_nodes, reserve
from hybridflow.workers.worker_group import WorkerGroup
from tests.support.group_workers import Failing

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
        driver.wait(timeout=120)
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not [" ".join(process.cmdline()) for process in alive]
    deadline = time.monotonic() + 120
    while Path(directory).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(directory).exists()


def test_check_prints_a_recipe_that_can_be_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = f"run_dir={tmp_path}"
    assert main(["check", DEMO, "--print", "seed=7", run_dir, "trainer.steps=3"]) == 0
    said = capsys.readouterr()
    assert "nothing wrong found" in said.err
    path = tmp_path / "resolved.yaml"
    path.write_text(said.out)
    assert load_recipe(path) == load_recipe(DEMO, ["seed=7", run_dir, "trainer.steps=3"])
    assert "learning rate" not in said.out and "min_lr: 0.0" in said.out  # with defaults
    assert main(["check", DEMO, "--print", "train.dtype=float8"]) == 2
    assert not capsys.readouterr().out

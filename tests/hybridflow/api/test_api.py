"""The public Python API: settings to recipes, arguments, and reward functions as files."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hybridflow
from engine3d.errors import DamagedCheckpointError, UserError
from hybridflow import DataFlow, PPOConfig, PPOTrainer, RLTrainer, TrainerConfig, get_ppo_config
from hybridflow.algorithms.dpo import DPOSettings
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.api import ppo_trainer
from hybridflow.api.input_files import InputFiles, Sources, importable_path
from hybridflow.api.ppo_trainer import to_learn
from hybridflow.api.recipe_builder import Given, make_recipe, run_directory
from hybridflow.api.rollout_batch import RolloutBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.rewards.builtin import length
from hybridflow.rewards.config import RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rollout.config import StreamConfig
from hybridflow.trainer.startup.run_setup import OpenRun, prepare
from tests.support.resumable import make_checkpoint

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "launch/recipes/demo.yaml"
MODEL = Path("/models/some")


def recipe_of(config: PPOConfig, *, gpus: int = 0, **given: Any) -> Recipe:
    if not given.keys() & {"prompts", "reward", "reward_model"}:
        given |= {"reward": "arithmetic"}
    return make_recipe(config, Given(model=MODEL, **{"prompts": Path("prompts.jsonl"), **given}), gpus=gpus)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def of_texts(generated_texts: list[str]) -> list[float]:
    return [float(len(text)) for text in generated_texts]


# Importing


@pytest.mark.slow
def test_importing_is_light_and_every_name_is_there() -> None:
    program = (
        "import sys, hybridflow\n"
        "assert not {'torch', 'ray', 'sglang', 'pydantic', 'transformers'} & set(sys.modules)\n"
        "assert hybridflow.__version__\n"
        "hybridflow.PPOConfig(batch_size=32)\n"
        "assert not {'torch', 'ray', 'sglang'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
    for name in hybridflow.__all__:
        assert getattr(hybridflow, name) is not None
        assert name in dir(hybridflow)
    with pytest.raises(AttributeError, match=r"module 'hybridflow' has no attribute 'Patience': its API is DataFl"):
        _ = hybridflow.Patience


def test_the_imports_of_published_guides_work() -> None:
    from hybridflow import trainer, utils
    from hybridflow.trainer import PPOTrainer as Stepwise  # type: ignore[attr-defined]
    from hybridflow.trainer import RLTrainer as Whole  # type: ignore[attr-defined]

    assert (Stepwise, Whole) == (PPOTrainer, RLTrainer)
    assert utils.is_flash_attn_available is hybridflow.is_flash_attn_available
    line = "hybridflow.trainer.init_distributed is a method of a trainer, expected PPOTrainer(config, model=..., "
    assert refusal(lambda: trainer.init_distributed(PPOConfig())).startswith(line)
    with pytest.raises(ImportError):
        from hybridflow.trainer.trainer import NoTrainer  # type: ignore[attr-defined]  # noqa: F401


# Settings to a recipe


def test_the_defaults_of_the_guides_become_a_recipe() -> None:
    recipe = recipe_of(get_ppo_config())
    assert recipe.algorithm.name == "ppo"
    assert recipe.algorithm.kl_coef == 0.1
    assert recipe.model.path == MODEL
    assert recipe.train.optimizer.lr == 1.5e-5
    assert recipe.train_config("critic").optimizer.lr == 1.5e-5
    trainer = recipe.trainer
    assert (trainer.prompts_per_step, trainer.mini_batches, trainer.epochs, trainer.steps) == (128, 8, 1, 100)
    assert recipe.rollout.samples_per_prompt == 1
    assert recipe.sets["eval"].settings.prompts == 64  # of those that it learns from
    assert recipe_of(get_ppo_config(), eval_prompts=Path("others.jsonl")).sets["eval"].settings.prompts is None
    assert recipe.directory == run_directory(get_ppo_config()) == Path("runs/ppo").absolute()


def test_every_setting_arrives() -> None:
    config = PPOConfig(
        algorithm="grpo", batch_size=24, mini_batch_size=6, epochs=3, lr=2e-4, kl_coef=0.0, max_steps=7,
        samples_per_prompt=5, max_new_tokens=9,
    )  # fmt: skip
    recipe = recipe_of(config)
    trainer = recipe.trainer
    assert (trainer.prompts_per_step, trainer.mini_batches, trainer.epochs, trainer.steps) == (24, 4, 3, 7)
    assert (recipe.algorithm.name, recipe.algorithm.kl_coef) == ("grpo", 0.0)
    assert (recipe.rollout.samples_per_prompt, recipe.rollout.sampling.max_new_tokens) == (5, 9)
    assert recipe.train.optimizer.lr == 2e-4
    assert recipe_of(PPOConfig(algorithm="grpo")).rollout.samples_per_prompt == 8
    for name, updates in (("gpg", 1), ("opo", 1), ("rloo", 8), ("pass_at_k", 8)):
        recipe = recipe_of(PPOConfig(algorithm=name))
        assert (recipe.rollout.samples_per_prompt, recipe.trainer.updates_per_step) == (8, updates)
    assert recipe_of(PPOConfig(algorithm="reinforce_plus_plus")).rollout.samples_per_prompt == 1


def test_settings_come_before_the_recipe_and_that_before_the_defaults() -> None:
    recipe = make_recipe(PPOConfig(recipe=DEMO, lr=0.5, batch_size=32), Given(), gpus=0)
    demo = load_recipe(DEMO)
    assert recipe.train.optimizer.lr == 0.5
    assert recipe.train.optimizer.beta2 == demo.train.optimizer.beta2
    assert recipe.algorithm.name == "ppo"  # which the demo leaves to the defaults
    assert recipe.model == demo.model
    assert (recipe.trainer.prompts_per_step, recipe.trainer.mini_batches) == (32, demo.trainer.mini_batches)
    assert recipe.trainer.steps == demo.trainer.steps
    assert recipe.rollout.sampling == demo.rollout.sampling
    assert (recipe.name, recipe.placement) == ("demo", demo.placement)
    sized = make_recipe(PPOConfig(recipe=DEMO, mini_batch_size=16), Given(), gpus=0)
    assert (sized.trainer.prompts_per_step, sized.trainer.mini_batches) == (64, 4)
    mapping = {"name": "mine", "train": {"layout": {"tp": 2}}}
    changed = recipe_of(PPOConfig(recipe=mapping, actor_device_mapping="cpu:0-1"))
    assert (changed.name, changed.train.layout.tp) == ("mine", 2)
    assert mapping == {"name": "mine", "train": {"layout": {"tp": 2}}}


def test_checkpoints_are_those_of_the_recipe() -> None:
    trainer = RLTrainer(checkpoint_config={"save_interval": 5, "keep_last_k": 2})
    recipe = recipe_of(trainer.config)
    assert (recipe.checkpoint.save_interval, recipe.checkpoint.keep_last_k, recipe.checkpoint.async_save) == (
        5,
        2,
        True,
    )
    config = PPOConfig(checkpoint_config={"async_save": False}, recipe={"checkpoint": {"save_interval": 3}})
    checkpoint = recipe_of(config).checkpoint
    assert (checkpoint.save_interval, checkpoint.async_save) == (3, False)
    wrong = PPOConfig(checkpoint_config={"save_intervall": 5})
    assert "unknown key checkpoint.save_intervall: did you mean checkpoint.save_interval?" in refusal(
        lambda: recipe_of(wrong)
    )


def test_placement() -> None:
    alone = recipe_of(PPOConfig())
    assert (alone.placement.actor, alone.placement.rollout) == ("cpu:0", "cpu:0")
    assert (alone.train.dtype, alone.rollout.engine.dtype) == ("float32", "float32")
    together = recipe_of(PPOConfig(), gpus=4)
    assert (together.placement.actor, together.placement.rollout) == ("cuda:0-3", "cuda:0-3")
    assert (together.train.dtype, together.rollout.engine.dtype) == ("bfloat16", "bfloat16")
    assert together.rollout.engine.mem_fraction_static == 0.3
    config = TrainerConfig(
        actor_device_mapping={"model": "cuda:0-1"},
        critic_device_mapping="cuda:2",
        reward_device_mapping={"model": "cuda:3"},
    )
    apart = recipe_of(config, gpus=8, reward_model=Path("/models/reward")).placement
    assert (apart.actor, apart.rollout, apart.critic) == ("cuda:0-1", "cuda:0-1", "cuda:2")
    assert (apart.reward_model, apart.reward) == ("cuda:3", None)
    functions = recipe_of(config, gpus=8).placement
    assert (functions.reward_model, functions.reward) == (None, "cuda:3")
    separate = recipe_of(PPOConfig(rollout_device_mapping="cuda:7"), gpus=8)
    assert (separate.placement.rollout, separate.rollout.engine.mem_fraction_static) == ("cuda:7", 0.7)


def test_asynchronous_rollout_is_a_stream_one_version_ahead() -> None:
    assert recipe_of(PPOConfig()).rollout.stream is None
    recipe = recipe_of(PPOConfig(async_rollout=True, rollout_device_mapping="cpu:1"))
    assert (recipe.rollout.stream, recipe.trainer.max_staleness) == (StreamConfig(), 1)
    overrides = {"trainer": {"max_staleness": 3}, "rollout": {"stream": {"on_new_weights": "resend"}}}
    recipe = recipe_of(PPOConfig(async_rollout=True, rollout_device_mapping="cpu:1", recipe=overrides))
    assert recipe.rollout.stream == StreamConfig(on_new_weights="resend")
    assert recipe.trainer.max_staleness == 3


def test_dynamic_batching_and_adaptive_sampling_have_the_names_of_guides() -> None:
    rows = [{"prompt_tokens": 64, "max_new_tokens": 128}]
    config = PPOConfig(
        async_rollout=True, use_dynamic_batching=True, adaptive_sampling=rows, rollout_device_mapping="cpu:1"
    )
    recipe = recipe_of(config)
    assert recipe.rollout.stream == StreamConfig(dynamic_batching=True)
    assert [row.max_new_tokens for row in recipe.rollout.adaptive_sampling] == [128]
    assert recipe_of(PPOConfig(use_dynamic_batching=False)).rollout.adaptive_sampling == ()
    with pytest.raises(UserError, match="get all prompts at once; expected async_rollout=true"):
        recipe_of(PPOConfig(use_dynamic_batching=True))


def test_steps_pass_over_all_prompts() -> None:
    config = PPOConfig(batch_size=8, mini_batch_size=8)
    prompts = Path("prompts.jsonl")
    given: dict[str, Any] = {"prompts": prompts, "number": 20, "reward": "arithmetic"}
    assert recipe_of(config, **given, passes=1).trainer.steps == 3
    assert recipe_of(config, **given, passes=2).trainer.steps == 5
    assert recipe_of(config, **given).trainer.steps == 100
    recipe = {"trainer": {"epochs_of_data": 2}}
    of_recipe = recipe_of(PPOConfig(batch_size=8, mini_batch_size=8, recipe=recipe), **given)
    assert of_recipe.for_prompts(20).trainer.steps == 5
    assert recipe_of(PPOConfig(max_steps=7, recipe=recipe), **given).for_prompts(20).trainer.steps == 7
    bounded = PPOConfig(batch_size=8, mini_batch_size=8, max_steps=4)
    assert recipe_of(bounded, **given, passes=2).trainer.steps == 4
    jsonl = recipe_of(config, **given, eval_prompts=Path("other.jsonl")).data.jsonl
    assert jsonl is not None
    assert (jsonl.train_path, jsonl.eval_path) == (prompts.absolute(), Path("other.jsonl").absolute())


def test_rewards() -> None:
    options = {"timeout_s": 5.0, "on_failure": "drop"}
    recipe = recipe_of(PPOConfig(reward_options=options), reward="mine:score", reward_name="score")
    assert recipe.reward is not None
    [function] = recipe.reward.functions
    assert (function.name, function.path, function.timeout_s, function.on_failure) == (
        "score", "mine:score", 5.0, "drop",
    )  # fmt: skip
    by_model = recipe_of(PPOConfig(), reward_model=Path("/models/reward"))
    assert by_model.reward is None
    assert by_model.reward_model is not None
    assert by_model.reward_model.path == Path("/models/reward")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: PPOConfig(batch_size=8), "mini_batch_size=16 does not divide batch_size=8; expected such as"),
        (lambda: PPOConfig(batch_size=0), "PPOConfig: batch_size = 0: expected at least 1"),
        (lambda: PPOConfig(batchsize=8), "PPOConfig: unknown key batchsize: did you mean batch_size?"),
        (lambda: PPOConfig(lr="fast"), "PPOConfig: lr = 'fast': expected a number"),
        (lambda: PPOConfig(algorithm="pppo"), f"(did you mean ppo?), expected {' or '.join(map(repr, ALGORITHMS))}"),
        (lambda: PPOConfig(actor_device_mapping={"model": "gpu:0"}), "the kind is 'gpu', expected cpu, cuda, node"),
        (lambda: PPOConfig(actor_device_mapping={"actor": "cuda:0"}), "{'actor': 'cuda:0'}, expected a device map"),
        (lambda: recipe_of(PPOConfig(recipe="no.yaml")), "no.yaml: no such file"),
        (lambda: recipe_of(PPOConfig(recipe={"trainer": {"stepz": 1}})), "unknown key trainer.stepz: did you mean"),
        (lambda: recipe_of(PPOConfig(recipe={"trainer": {"prompts_per_step": 7}})), "does not divide batch_size=7"),
        (
            lambda: recipe_of(PPOConfig(reward_options={"timeout_s": 1}), reward=None),
            "reward_options are of reward_fn, which",
        ),
        (
            lambda: recipe_of(PPOConfig(reward_options={"limit": 1}), reward="mine:score"),
            "unknown key reward.functions.0.limit",
        ),
        (
            lambda: recipe_of(PPOConfig(algorithm="gpg", mini_batch_size=64)),
            "trainer.mini_batches=2 and epochs=1 with algorithm.name=gpg, whose loss has no ratio",
        ),
        (lambda: recipe_of(PPOConfig(algorithm="kto")), "algorithm kto learns from responses that the data have, and"),
        (lambda: recipe_of(PPOConfig(algorithm="dpo")), "generates none; expected hybridflow train with a recipe such"),
        (
            lambda: recipe_of(PPOConfig(algorithm="dpo", kl_coef=0.1, recipe={"algorithm": {"pairs": "group"}})),
            "algorithm: kl_coef is set with name 'dpo', which does not use it",
        ),
        (
            lambda: recipe_of(PPOConfig(algorithm="grpo", critic_device_mapping="cpu:1")),
            "placement.critic is set, and there is no such role with algorithm.name=grpo",
        ),
        (lambda: recipe_of(PPOConfig(), prompts=Path("p"), number=1), "no reward, expected reward_fn=, reward_model="),
        (lambda: recipe_of(PPOConfig(), passes=1), "num_epochs counts passes over prompts, and none were given"),
        (lambda: recipe_of(PPOConfig(), prompts=None, reward="length"), "no prompts, expected train(prompts), PPOTrai"),
        (lambda: recipe_of(PPOConfig(), passes=0), "num_epochs=0, expected at least 1"),
        (
            lambda: recipe_of(PPOConfig(algorithm="dapo"), prompts=Path("p"), number=9, passes=1, reward="length"),
            "num_epochs=1 with algorithm.dynamic_sampling=true, where a step draws as many prompts as it needs; expe",
        ),
        (lambda: get_ppo_config("x.yaml"), "PPOConfig('x.yaml'): expected settings by name, such as recipe='x.yaml'"),
        (lambda: make_recipe(PPOConfig(), Given(), gpus=0), "no model, expected a HuggingFace directory as model="),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_give_one_line(call: Callable[[], Any], line: str) -> None:
    assert line in refusal(call)


def test_dpo_from_groups_has_a_recipe() -> None:
    recipe = recipe_of(PPOConfig(algorithm="dpo", recipe={"algorithm": {"pairs": "group", "beta": 0.3}}))
    assert recipe.algorithm == DPOSettings(pairs="group", beta=0.3)
    assert recipe.rollout.samples_per_prompt == 8 and "reference" in recipe.device_maps


# Arguments


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"model": "Qwen/Qwen3-8B"}, "model: no config.json in Qwen/Qwen3-8B, expected a HuggingFace directory"),
        ({"model": 3}, "model: a int, expected a HuggingFace directory or a loaded transformers model"),
        ({"model": MODEL, "model_name": MODEL}, "model and model_name: names of one argument, expected only model"),
        ({"reward_fn": 3}, "reward_fn: a int, expected a function of the generated texts"),
        ({"reward_model": "none"}, "reward_model: no config.json in none"),
        ({"tokenizer": "none"}, "tokenizer: one without a model"),
        ({"config": {"batch_size": 8}}, "config: a dict, expected PPOConfig(...)"),
        ({"algorithm": "dqn"}, "'dqn' is no algorithm"),
        ({"use_vllm": True}, "RLTrainer: unknown argument use_vllm: absent, because SGLang generates; leave it out"),
        ({"fsdp_config": {}}, "RLTrainer: unknown argument fsdp_config: absent, because Megatron-Core trains; recipe="),
        ({"batch_size": 8}, "RLTrainer: unknown argument batch_size: a setting, as config=PPOConfig(batch_size=...)"),
        ({"patience": 8}, "RLTrainer: unknown argument patience: RLTrainer takes model, algorithm, config, reward_fn,"),
    ],
)
def test_arguments_that_make_no_sense_give_one_line(arguments: dict[str, Any], line: str) -> None:
    assert line in refusal(lambda: RLTrainer(**arguments))


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        ("1+1=", "prompts: a str, expected a list of texts"),
        ([], "prompts: none, expected at least one"),
        (["1+1=", 3], "prompts[1]: '3', expected a text, or"),
        ([{"problem": "1+1="}], "prompts[0]: "),
        (
            [{"prompt": "1+1=", "solution": {2}}],
            "prompts[0]: \"{'prompt': '1+1=', 'solution': {2}}\", which JSON cannot",
        ),
        ([""], "expected a text that is not empty"),
    ],
)
def test_prompts_that_are_none_give_one_line_and_no_file(model: Path, tmp_path: Path, prompts: Any, line: str) -> None:
    trainer = RLTrainer(model, config=PPOConfig(recipe={"run_dir": str(tmp_path / "runs")}), reward_fn=length)
    assert line in refusal(lambda: trainer.train(prompts))
    assert not (tmp_path / "runs").exists()


def test_a_trainer_says_what_is_wrong_before_it_starts(model: Path, tmp_path: Path) -> None:
    config = PPOConfig(recipe={"run_dir": str(tmp_path / "runs")})
    trainer = PPOTrainer(config, model=model)
    line = "init_distributed: another config than the trainer's, expected the same or none"
    assert refusal(lambda: trainer.init_distributed(PPOConfig())) == line
    complete = RLTrainer(model, "grpo", config)
    complete.init_distributed(config)
    complete.init_distributed(complete.config)
    assert refusal(lambda: complete.init_distributed(PPOConfig())) == line
    trainer.close()
    trainer.close()
    assert refusal(trainer.rollout) == "the trainer is closed, expected a new one"


@pytest.mark.slow
def test_a_trainer_falls_back_to_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(DEMO, [f"run_dir={tmp_path}", "name=small", "checkpoint.save_interval=1"])
    run = prepare(recipe)
    run.lock.close()
    for step in (2, 4):
        make_checkpoint(recipe, step, run=run.identity)
    closed, tried = [], []

    @contextlib.contextmanager
    def start_trainer(opened: OpenRun) -> Iterator[Any]:
        assert opened.run.resumption is not None
        directory = opened.run.resumption.directory
        tried.append(directory.name)

        class OfRanks:
            phases = SimpleNamespace(enter=lambda _: None)
            checkpoints = SimpleNamespace(wait=lambda: None)

            def start(self) -> None:
                if directory.name == "step-00000004":  # as ranks find of a checkpoint that is too large to read before
                    raise DamagedCheckpointError(f"load of {directory}: rank 0: damaged")

        try:
            yield OfRanks()
        finally:
            closed.append(directory.name)

    monkeypatch.setattr(ppo_trainer, "start_trainer", start_trainer)
    recipe = load_recipe(DEMO, [f"run_dir={tmp_path}", "name=small", "checkpoint.save_interval=1", "resume=auto"])
    with PPOTrainer(PPOConfig(recipe=recipe.model_dump(mode="json"))):
        assert (tried, closed) == (["step-00000004", "step-00000002"], ["step-00000004"])
        assert (recipe.checkpoint_directory / "step-00000004.1").is_dir()
    assert closed == tried
    named = recipe.model_copy(update={"resume": make_checkpoint(recipe, 4, run=run.identity)})
    with pytest.raises(DamagedCheckpointError) as error:
        PPOTrainer(PPOConfig(recipe=named.model_dump(mode="json"))).init_distributed()
    assert error.value.checkpoint == recipe.checkpoint_directory / "step-00000004"


def test_without_prompts_nothing_is_trained_on(model: Path, tmp_path: Path) -> None:
    config = PPOConfig(recipe={"run_dir": str(tmp_path / "runs")})
    line = "no prompts, expected train(prompts), PPOTrainer(prompts=...), or data in the recipe"
    assert refusal(RLTrainer(model, config=config, reward_fn=length).train) == line
    assert refusal(PPOTrainer(config, model=model, reward_fn=length).rollout) == line
    assert not (tmp_path / "runs").exists()


# Files of a run


def test_nothing_of_a_run_is_replaced_where_another_of_its_name_is_refused(model: Path, tmp_path: Path) -> None:
    run = {"name": "mine", "run_dir": str(tmp_path), "overwrite": False}
    kept = tmp_path / "mine.inputs" / "prompts.jsonl"
    for directory in (tmp_path / "mine", kept.parent):
        directory.mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("name: mine\n")
    kept.write_text("kept")
    config = PPOConfig(recipe=run)
    for act in (RLTrainer(model, config=config, reward_fn=length).train, PPOTrainer(config, model=model).rollout):
        assert "mine has a run already" in refusal(act)
    assert kept.read_text() == "kept" and not (tmp_path / "mine.inputs.1").exists()


def test_a_batch_of_an_algorithm_with_one_update_is_one_mini_batch() -> None:
    assert PPOConfig(batch_size=24, algorithm="opo").batch_size == 24
    assert "does not divide batch_size=24" in refusal(lambda: PPOConfig(batch_size=24, algorithm="grpo"))


def test_prompts_and_reward_functions_become_files(model: Path, tmp_path: Path) -> None:
    files = InputFiles(tmp_path / "runs" / "mine")
    factor = 2.0
    sources = Sources(
        model=str(model), reward_fn=lambda generated_texts: [factor * len(text) for text in generated_texts]
    )
    given = sources.write(files, ["1+1=", {"prompt": "2+2=", "answer": [4.0], "hard": False}], ["3+3="], 2)
    assert given.prompts == tmp_path / "runs" / "mine.inputs" / "prompts.jsonl"
    lines = [json.loads(line) for line in given.prompts.read_text().splitlines()]
    assert lines == [{"prompt": "1+1=", "answer": ""}, {"prompt": "2+2=", "answer": [4.0], "hard": False}]
    assert given.eval_prompts is not None
    assert json.loads(given.eval_prompts.read_text()) == {"prompt": "3+3=", "answer": ""}
    assert (given.number, given.passes, given.model, given.reward_name) == (2, 2, model, "reward")
    assert values(given.reward) == [2.0, 4.0]
    other = InputFiles(tmp_path / "runs" / "mine")
    assert "is going on" in refusal(lambda: other.directory)
    files.close()
    assert list(other.directory.iterdir()) == [other.directory / ".lock"]
    assert (tmp_path / "runs" / "mine.inputs.1" / "prompts.jsonl").is_file()
    other.close()


def values(path: str | None, **settings: Any) -> list[float]:
    function = {"name": "mine", "path": path, **settings}
    with RewardFunctions(RewardConfig.model_validate({"functions": [function]})) as rewards:
        return rewards.evaluate(["a", "bb"], ["p", "q"], ["a", "x"]).total.tolist()


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, generated_texts: list[str], answers: list[str]) -> list[float]:
        return [self.weight * (text == answer) for text, answer in zip(generated_texts, answers, strict=True)]


def test_only_functions_that_others_can_import_keep_their_name() -> None:
    assert importable_path(length) == "hybridflow.rewards.builtin:length"
    assert importable_path(of_texts) == f"{__name__}:of_texts"
    assert importable_path(lambda texts: texts) is None
    assert importable_path(functools.partial(length)) is None
    assert importable_path(Weighted(1.0)) is None
    replaced = functools.wraps(length)(lambda texts: [0.0] * len(texts))
    assert importable_path(replaced) is None


@pytest.mark.slow
def test_any_callable_is_a_reward_with_the_limits_of_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    files = InputFiles(tmp_path / "mine")

    def written(function: Callable[..., Any]) -> str:
        path = Sources(reward_fn=function).write(files, None).reward
        assert path is not None
        return path

    assert values("length") == [1.0, 2.0]
    assert values(written(Weighted(3.0))) == [3.0, 0.0]
    assert values(written(functools.partial(length))) == [1.0, 2.0]
    hangs = written(lambda texts: __import__("time").sleep(600))
    assert "did not return the rewards of 2 samples within 1 s and was killed" in refusal(
        lambda: values(hangs, timeout_s=1.0)
    )
    fails = written(lambda texts: [1 / (len(text) - 1) for text in texts])
    assert values(fails, on_failure="value", failure_value=-1.0) == [-1.0, 1.0]
    assert refusal(lambda: values(f"{tmp_path}/no.pkl:")).endswith(f"file {tmp_path}/no.pkl does not exist")
    (tmp_path / "no.pkl").write_bytes(b"\x80\x04K\x03.")  # the number 3
    assert "holds 3 (int), expected a function" in refusal(lambda: values(f"{tmp_path}/no.pkl:"))
    lock = __import__("threading").Lock()
    sources = Sources(reward_fn=lambda texts: [lock.locked()] * len(texts))
    assert "reward_fn: reward cannot be sent to other processes" in refusal(lambda: sources.write(files, None))
    files.close()


def test_a_loaded_model_and_a_tokenizer_of_its_own_become_one_directory(tmp_path: Path) -> None:
    from hybridflow.data.tokenizer import load_tokenizer, make_character_tokenizer
    from tests.support.tiny_models import make_qwen3_moe

    loaded = make_qwen3_moe(tmp_path / "bare", seed=0)
    tokenizer = make_character_tokenizer("0123456789+=", tmp_path / "tokenizer")
    assert "tokenizer: none, expected one beside a loaded model" in refusal(lambda: Sources(model=loaded))
    for number, (given_model, given_tokenizer) in enumerate(
        [(loaded, tokenizer), (tmp_path / "bare", tokenizer), (tmp_path / "bare", str(tmp_path / "tokenizer"))]
    ):
        files = InputFiles(tmp_path / f"run-{number}")
        directory = Sources(model=given_model, tokenizer=given_tokenizer).write(files, None).model
        assert directory == tmp_path / f"run-{number}.inputs" / "model"
        assert load_tokenizer(directory).encode("1+1=") == tokenizer.encode("1+1=")
        written = (directory / "model.safetensors").read_bytes()
        assert written == (tmp_path / "bare" / "model.safetensors").read_bytes()
        files.close()
    assert not (tmp_path / "bare" / "tokenizer_config.json").exists()


# What to learn from


def rolled_out(first_sample: int, lengths: list[int]) -> RolloutBatch:
    """Responses of these lengths with rewards and advantages that tell samples apart."""
    count = len(lengths)
    batch = RolloutBatch.of(
        SampleBatch.from_generations(
            prompts=[[5, 6]] * count,
            responses=[[7] * length for length in lengths],
            logprobs=[[-1.0] * length for length in lengths],
            sample_ids=range(first_sample, first_sample + count),
            group_ids=range(count),
            prompt_indices=range(count),
            policy_versions=[1] * count,
            finish_reasons=["stop"] * count,
        ),
        0,
    )
    rewards = torch.arange(first_sample, first_sample + count).float()
    advantages = (10 * rewards)[:, None] * batch.response_mask
    return batch.replace(rewards=rewards, advantages=advantages, returns=advantages)


def test_advantages_are_estimated_anew_only_where_rewards_alone_were_changed() -> None:
    batches = [rolled_out(0, [2, 3]), rolled_out(2, [5, 1])]
    some = RolloutBatch.concatenate(batches).select([3, 0])
    narrow = RolloutBatch.concatenate([batches[0].select([1]), batches[0].select([0])])
    for kept in (some, narrow, batches[0].select([0])):
        assert to_learn(kept, batches, least=1) is kept
    assert some.rewards is not None and some.advantages is not None and narrow.rewards is not None
    rewarded = some.replace(rewards=some.rewards + 1)
    learned = to_learn(rewarded, batches, least=1)
    assert learned.advantages is None
    assert learned.returns is None
    assert learned.rewards is not None and torch.equal(learned.rewards, some.rewards + 1)
    both = rewarded.replace(advantages=2 * some.advantages)
    assert to_learn(both, batches, least=1) is both
    assert to_learn(some.replace(advantages=None), batches, least=1).returns is None
    rewarded_narrow = narrow.replace(rewards=narrow.rewards + 1)
    assert to_learn(rewarded_narrow, batches, least=1).advantages is None


def test_a_ppo_trainer_says_what_it_takes_before_anything_starts() -> None:
    line = refusal(lambda: PPOTrainer(PPOConfig(), "model", "reference", "tokenizer"))
    assert line.startswith(
        "PPOTrainer: 3 arguments without a name after the config, expected names: PPOTrainer(config, "
    )
    trainer = PPOTrainer(PPOConfig(), prompts=["1+1="], reward_fn=len)
    nothing: Any = [1]
    assert refusal(lambda: trainer.update(nothing)) == (
        "update: a list before any rollout(), expected what rollout() returned"
    )


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (PPOTrainer, "step", "here a step is update(rollout())"),
        (PPOTrainer, "fit", "here a complete run is RLTrainer(...).train(prompts)"),
        (RLTrainer, "fit", "here it is train(prompts)"),
        (DataFlow, "add_stage", "here it is add(stage)"),
        (DataFlow, "stages", "it has add, connect, run"),
    ],
)
def test_methods_of_other_trainers_lead_to_those_here(kind: type[Any], name: str, text: str) -> None:
    made = object.__new__(kind)
    assert not hasattr(made, name)
    with pytest.raises(AttributeError, match=re.escape(f"{kind.__name__} has no attribute {name!r}: {text}")):
        getattr(made, name)


def test_rollouts_that_make_no_sense_give_one_line() -> None:
    batches = [rolled_out(0, [2, 3])]
    [batch] = batches
    cases: list[tuple[Any, str]] = [
        ([1, 2], "update: a list, expected the rollouts that rollout() returned"),
        (batch.replace(rewards=None), "update: rollouts without rewards, expected replace(rewards=...) on them first"),
        (
            batch.select([0]),
            "update: 1 samples, expected at least 2, one for each data-parallel rank of each mini-batch",
        ),
        (rolled_out(1, [2, 3]), "update: sample 2 is of no rollout() since the last update, expected only such"),
        (
            batch.replace(rewards=torch.tensor([0.0, torch.nan])),
            "update: the reward of row 1 is nan, expected a finite number",
        ),
        (
            batch.replace(advantages=torch.full_like(batch.logprobs, torch.inf)),
            "update: the advantage of row 0, token 0 is inf, expected a finite number",
        ),
    ]
    for given, line in cases:
        assert refusal(partial(to_learn, given, batches, least=2)) == line

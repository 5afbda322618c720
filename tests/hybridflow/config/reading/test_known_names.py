"""Unknown keys: what other systems call a setting, slips of the fingers, and no guesses beyond them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow import PPOConfig
from hybridflow.config.reading.described_settings import all_settings
from hybridflow.config.reading.error_messages import _paths
from hybridflow.config.reading.known_names import API_NAMES, RECIPE_NAMES
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe

DEMO = "launch/recipes/demo.yaml"
SETTINGS = {".".join(path) for path in _paths(Recipe)} | {setting.path for setting in all_settings()}


def text_of_unknown(key: str, value: str = "1") -> str:
    with pytest.raises(SettingsError) as error:
        load_recipe(DEMO, [f"{key}={value}"])
    [line] = error.value.lines
    start = f"override {key}={value}: unknown key "
    assert line.startswith(start)
    name, _, text = line.removeprefix(start).partition(": ")
    assert key.startswith(name)
    return text


def named(text: str) -> list[str]:
    """The settings that a text says something is."""
    match = re.match(r"here it is ([\w.]+(?: and [\w.]+)*)(?=;|$| \()", text)
    return match[1].replace("evaluation.eval.", "evaluation.NAME.").split(" and ") if match else []


def test_every_name_leads_to_a_setting_or_says_that_there_is_none() -> None:
    added = {"trainer.epochs_of_data", "rollout.sampling.stop"} - SETTINGS
    for name, text in RECIPE_NAMES.items():
        settings = named(text)
        assert settings or text.startswith(("absent", "verl's; here", "NeMo-RL's; here", "prime-rl's; here")), (
            name,
            text,
        )
        assert set(settings) <= SETTINGS | added, (name, text)
        assert name not in settings, (name, text)
    for name, text in API_NAMES.items():
        settings = named(text)
        assert settings or text.startswith(("absent", "here ", "an argument of the trainer: ")), (name, text)
        assert set(settings) <= SETTINGS | added | PPOConfig.model_fields.keys() | {"config"}, (name, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("trainer.total_epochs", "here it is trainer.epochs_of_data; trainer.epochs are passes over each rollout"),
        ("reshard_mode", "absent: how weights get to the engines follows from placement"),
        ("async_rollout", "here it is rollout.stream and trainer.max_staleness; engines generate while"),
        ("rollout.async_rollout", "here it is rollout.stream and trainer.max_staleness"),
        ("data.train_batch_size", "here it is trainer.prompts_per_step"),
        (
            "data.train_files",
            "here it is data.files.train; a list of {path: ..., prompt: ..., answer: ...}, with data.s",
        ),
        ("data.prompt_key", "here it is data.files.train; each source has prompt, the name of a column"),
        ("data.max_prompt_length", "here it is data.files.max_prompt_tokens; data.overlong_prompts treats prompts"),
        ("data.max_response_length", "here it is rollout.sampling.max_new_tokens"),
        ("data.filter_overlong_prompts", "here it is data.overlong_prompts; drop"),
        ("data.truncation", "here it is data.overlong_prompts; drop, cut_left, cut_right, cut_middle, or refuse"),
        ("data.shuffle", "absent: prompts are always drawn in random order, by data.seed"),
        ("data.return_raw_chat", "absent: messages are always rendered"),
        ("data.apply_chat_template_kwargs", "here it is data.files.chat.arguments"),
        ("data.reward_fn_key", "absent: a reward function gets any column for which it has a parameter of that name"),
        ("data.custom_cls", "absent: columns are named by each source of data.files.train"),
        ("data.sampler", "here it is data.files.train and data.files.difficulty; each source has weight"),
        ("--prompt-data", "here it is data.files.train"),
        ("--input-key", "here it is data.files.train; each source has prompt"),
        ("--label-key", "here it is data.files.train; each source has answer"),
        ("--metadata-key", "absent: a reward function gets any column"),
        ("--apply-chat-template", "here it is data.files.chat.texts; user"),
        ("--apply-chat-template-kwargs", "here it is data.files.chat.arguments"),
        ("--rollout-shuffle", "absent: prompts are always drawn in random order"),
        ("rollout.rollout_max_prompt_len", "here it is data.files.max_prompt_tokens"),
        (
            "data.val_files",
            "here it is evaluation; {NAME: {data: {path: ...}}}; with data.source=jsonl also data.jsonl",
        ),
        ("trainer.test_freq", "here it is evaluation.eval.interval; evaluation.NAME has the same for another set"),
        ("trainer.val_before_train", "here it is evaluation.eval.before_train"),
        ("trainer.val_only", "absent: hybridflow evaluate measures a model without training"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "here it is evaluation.eval.samples; evaluation.NAME has"),
        ("n_samples_per_eval_prompt", "here it is evaluation.eval.samples"),
        ("eval_prompt_data", "here it is evaluation; {NAME: {data: {path: ...}}}"),
        ("trainer.eval_samples", "here it is evaluation.eval.samples; evaluation.NAME has the same"),
        ("trainer.eval_sampling", "here it is evaluation.eval.sampling; evaluation.NAME has the same"),
        ("trainer.eval_prompts", "here it is evaluation.eval.prompts; evaluation.NAME has the same"),
        ("trainer.eval_beside", "here it is trainer.async_evaluation"),
        ("train.one_step_experts", "here it is train.fused_experts"),
        ("reference.train.one_step_experts", "here it is train.fused_experts"),
        ("rollout.lend", "here it is rollout.lease"),
        ("rollout.lend_after_s", "here it is rollout.lease_after_s"),
        ("train.expert_copies", "here it is train.copy_engine_dispatcher"),
        ("train.expert_rows_ahead", "here it is train.predicted_expert_capacity"),
        ("use_vllm", "absent, because SGLang generates"),
        ("rollout.use_vllm", "absent, because SGLang generates"),
        ("fsdp_config", "absent, because Megatron-Core trains"),
        ("num_generations", "here it is rollout.samples_per_prompt"),
        ("beta", "here it is algorithm.kl_coef"),
        ("algorithm.adv_estimator", "here it is algorithm.name"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "here it is algorithm.name"),
        ("algorithm.tau_neg", "here it is algorithm.gate_temperature_negative"),
        ("kl_cov_ratio", "here it is algorithm.kl_cov_fraction"),
        ("max_ent_coef", "here it is algorithm.entropy_coef_max"),
        ("trainer.n_gpus_per_node", "absent, because placement assigns devices to roles"),
        ("rollout.n_samples_per_prompt", "did you mean rollout.samples_per_prompt?"),
        ("--num-rollout", "here it is trainer.steps"),
        ("init_kl_coef", "here it is algorithm.kl_coef"),
        ("rollout.max_turns", "here it is environment"),
        ("world_size", "absent, because placement assigns"),
        ("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.lr: here it is train.optimizer.lr"),
        ("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.n: here it is rollout.samples_per_prompt"),
        ("critic.optim.lr", "critic.optim.lr: here it is critic.train.optimizer.lr"),
        ("config.critic.optim.lr", "config.critic.optim.lr: here it is critic.train.optimizer.lr"),
        ("seq_len", "here it is rollout.engine.context_length"),
        ("train.seq_len", "here it is rollout.engine.context_length"),
        ("train.sequence_packing", "here it is train.packing"),
        ("adaptive_sampling", "here it is rollout.adaptive_sampling; rows of prompt_tokens and max_new_tokens"),
        ("rollout.engine.dp", "absent: dp follows from a role's devices and train.layout"),
        ("grpo.num_prompts_per_step", "grpo.num_prompts_per_step: here it is trainer.prompts_per_step"),
        ("policy.generation.backend", "policy.generation.backend: absent, because SGLang generates"),
        ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_min: here it is algorithm.clip_low"),
        ("orchestrator.rollouts_per_example", "here it is rollout.samples_per_prompt"),
        ("trainer.optim.lr", "here it is train.optimizer"),
        ("--n-samples-per-prompt", "here it is rollout.samples_per_prompt"),
        ("--micro_train_batch_size", "here it is train.micro_batch_tokens"),
        ("--value-clip", "here it is algorithm.value_clip"),
        # Settings of this project in another place.
        ("train.lr", "here it is train.optimizer.lr"),
        ("warmup.lr", "here it is warmup.optimizer.lr"),
        ("rollout.temperature", "here it is rollout.sampling.temperature"),
        # Slips of the fingers.
        ("train.layout.tpp", "did you mean train.layout.tp?"),
        ("algorithm.kl_coeff", "did you mean algorithm.kl_coef?"),
        ("trainer.stepz", "did you mean trainer.steps?"),
        ("train.optimizer.beta", "did you mean train.optimizer.beta"),
        # What nothing is known of.
        ("rollout.engine.patience", "rollout.engine takes tp, ep, "),
        ("trainer.patience", "trainer takes steps, "),
        ("reward_mix", "the top level takes name, "),
    ],
)
def test_what_is_told_of_an_unknown_key(key: str, text: str) -> None:
    assert text in text_of_unknown(key)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("algorithm=grpo", "algorithm = 'grpo': expected a group of settings, such as algorithm.name=grpo"),
        (
            "rollout.name=vllm",
            "unknown key rollout.name: absent, because SGLang generates; its settings are rollout.engine",
        ),
        ("algorithm=ppo", "algorithm = 'ppo': expected a group of settings, such as algorithm.name=ppo"),
        ("rollout.adaptive_sampling=true", "expected a list, each item with keys of prompt_tokens, max_new_tokens"),
        ("actor={strategy: fsdp}", "actor is no group of settings: here it is train; its model is model, its devices"),
        ("actor={strategy: fsdp}", "actor.strategy: absent, because Megatron-Core trains"),
        ("rollout.engine=vllm", "rollout.engine = 'vllm': absent, because SGLang generates"),
        ("placement=cuda:0", "expected a group of settings, such as placement.actor=cuda:0"),
        ("model=some/model", "expected a group of settings, such as model.path=some/model"),
        ("model.path=some/model", "both are set, and model.create=null removes create"),
        ("data.files.train[0].prompt=question", "expected the whole list, as in data.files.train=[...]"),
        (
            "data.files.train=mine.parquet",
            "expected a list, such as [{path: mine.parquet}], each item with keys of path",
        ),
        ("data.files.train=[]", "data.files.train = []: expected at least 1 item"),
        ("data.files.train=[mine.parquet]", "= 'mine.parquet': expected keys and values, such as {path: mine.parquet}"),
        ("algorithm.name=GRPO", "'GRPO' is no algorithm (did you mean grpo?), expected 'grpo' or "),
        ("algorithm.name=reinforce++", "(did you mean reinforce_plus_plus?)"),
    ],
)
def test_a_value_of_another_form_is_told_its_own(override: str, text: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_recipe(DEMO, [override])
    assert text in error.value.lines[0] and len(error.value.lines) == 1


def test_what_is_told_of_a_column_that_is_named_like_a_setting() -> None:
    with pytest.raises(SettingsError) as error:
        load_recipe(DEMO, ["reward_model.ground_truth=1"])
    assert "here it is data.files.train; of a source answer: reward_model.ground_truth" in error.value.lines[-1]


def test_a_whole_section_of_another_system_is_told_of_in_a_line(tmp_path: Path) -> None:
    text = Path(DEMO).read_text() + "\nactor_rollout_ref:\n  model: {path: x}\n  actor:\n    optim: {lr: 1e-6}\n"
    text += "    ppo_mini_batch_size: 4\n    grad_clip: 1.0\n    clip_ratio: 0.2\n  ref: &ref {log_prob: null}\n"
    (tmp_path / "verl.yaml").write_text(text)
    with pytest.raises(SettingsError) as error:
        load_recipe(tmp_path / "verl.yaml")
    [line] = error.value.lines
    assert line.count("here it is") == 3  # the first few
    assert "; actor_rollout_ref.model.path: here it is model.path; actor_rollout_ref.actor.optim.lr: here it is" in line


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("learning_rate", "here it is lr"),
        ("num_train_epochs", "here it is train(prompts, num_epochs=...)"),
        ("use_vllm", "absent, because SGLang generates; leave it out"),
        ("fsdp_config", "absent, because Megatron-Core trains"),
        ("gamma", "here it is algorithm.gamma of the recipe, as recipe={...}"),
        ("batchsize", "did you mean batch_size?"),
        ("patience", "the top level takes batch_size, "),
    ],
)
def test_what_is_told_of_an_unknown_setting_of_the_api(setting: str, text: str) -> None:
    with pytest.raises(SettingsError) as error:
        PPOConfig(**{setting: 1})
    [line] = error.value.lines
    assert line.startswith(f"PPOConfig: unknown key {setting}: {text}")


def test_the_former_name_of_train_on_leads_to_it() -> None:
    with pytest.raises(SettingsError) as error:
        load_recipe(DEMO, ["data.files.chat.learn=last"])
    assert error.value.lines[-1].endswith("unknown key data.files.chat.learn: here it is data.files.chat.train_on")

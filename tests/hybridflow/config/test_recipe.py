"""Settings of a run that depend on each other, or on the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.checkpoint.compatibility import changes, contradictions
from hybridflow.cli.main import main
from hybridflow.config.reading.yaml_loader import SettingsError, public_settings, settings_yaml
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from hybridflow.trainer.startup.run_setup import prepare
from tests.support.resumable import DEMO, a_recipe, make_checkpoint, refusal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "prompts", "steps"), [("1", 1000, 16), ("2", 1000, 32), ("0.5", 1000, 8), ("1", 64, 1), ("3", 65, 4)]
)
def test_passes_over_the_data_are_whole_steps(tmp_path: Path, passes: str, prompts: int, steps: int) -> None:
    recipe = load_recipe(DEMO, ["trainer.steps=null", f"trainer.epochs_of_data={passes}"])
    counted = recipe.for_prompts(prompts)
    assert counted.trainer.steps == steps == counted.phase_steps["train"]
    # What is written of the one or the other is read as the same recipe.
    for planned in (recipe, counted):
        (tmp_path / "recipe.yaml").write_text(settings_yaml(planned))
        assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert load_recipe(DEMO).for_prompts(prompts).trainer.steps == 120


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["trainer.epochs_of_data=2"],
            "trainer: epochs_of_data=2 and steps=120, expected one of them; trainer.steps=null",
        ),
        (["trainer.steps=null"], "trainer.steps = None: expected a whole number"),
        (["trainer.steps=null", "trainer.epochs_of_data=0"], "trainer.epochs_of_data = 0: expected more than 0"),
    ],
)
def test_a_run_has_one_length(overrides: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(DEMO, overrides)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.mtp={}"], "train.mtp trains the layer with which engines draft, and none does; expected"),
        (
            ["train.mtp={}", "rollout.engine={deterministic: false, draft_tokens: 1}", "reference.train={mtp: {}}"],
            "reference.train.mtp is set, and the layer that drafts is of the actor alone; expected null",
        ),
    ],
)
def test_a_layer_is_trained_where_an_actors_engines_draft(overrides: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(DEMO, ["algorithm.kl_coef=0.1", *overrides])
    assert line in str(caught.value)
    drafts = ["rollout.engine={deterministic: false, draft_tokens: 1}", "algorithm.kl_coef=0.1"]
    recipe = load_recipe(DEMO, ["train.mtp={lr: 0.1}", *drafts])
    assert recipe.train.mtp is not None and recipe.train_config("reference").mtp is None
    assert recipe.train.mtp.optimizer(recipe.train.optimizer).lr == 0.1


@pytest.mark.parametrize("setting", ["offload", "precision_aware"])
def test_a_warm_up_has_no_other_place_for_the_optimizers_state(setting: str) -> None:
    of_warmup, of_training = (
        f"warmup.optimizer.{setting}=true",
        ["train.dtype=bfloat16", f"train.optimizer.{setting}=true"],
    )
    with pytest.raises(SettingsError) as caught:
        load_recipe(DEMO, [of_warmup])
    [line] = caught.value.lines
    assert line.endswith(
        f"warmup.optimizer.{setting}=True with train.optimizer.{setting}=False, by which the state of both lies; "
        "expected none of its own"
    )
    assert load_recipe(DEMO, [*of_training, of_warmup]).warmup is not None


def test_a_warm_up_keeps_the_way_of_the_optimizers_state() -> None:
    both = [
        f"{of}.optimizer.{setting}=true" for of in ("train", "warmup") for setting in ("offload", "overlap_offload")
    ]
    assert load_recipe(DEMO, both).warmup is not None
    with pytest.raises(SettingsError, match=r"warmup\.optimizer\.overlap_offload=True with train\.optimizer\.overlap"):
        load_recipe(DEMO, both[:1] + both[2:])


@pytest.mark.parametrize("setting", ["offload", "precision_aware"])
def test_a_run_reads_its_recipe_again_wherever_the_optimizers_state_lies(tmp_path: Path, setting: str) -> None:
    recipe = load_recipe(DEMO, ["train.dtype=bfloat16", f"train.optimizer.{setting}=true"])
    (tmp_path / "recipe.yaml").write_text(settings_yaml(recipe))  # with every default, those of the warm-up too
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_a_traced_step_is_one_of_those_that_cover_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    passes = ["trainer.steps=null", "trainer.epochs_of_data=1"]
    assert main(["check", str(DEMO), *passes, "trainer.profile={steps: [16]}"]) == 0
    assert main(["check", str(DEMO), *passes, "trainer.profile={steps: [17]}"]) == 2
    assert "trainer: profile.steps has step 17, and steps=16" in capsys.readouterr().err


def lines_of(directory: Path, *prompts: str) -> str:
    path = directory / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": 1}) + "\n" for prompt in prompts))
    return f"data={{source: jsonl, jsonl: {{train_path: {path}, eval_path: {path}}}, overlong_prompts: POLICY}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("drop", "2 of 3 {} prompts have more than 4 tokens and are dropped (data.overlong_prompts=drop)"),
        ("cut_left", "2 of 3 {} prompts have more than 4 tokens and are cut, at their beginning ("),
        ("cut_right", "2 of 3 {} prompts have more than 4 tokens and are cut, at their end ("),
    ],
)
def test_prompts_without_room_are_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, said: str
) -> None:
    data = lines_of(tmp_path, "1+1=", "10+1=", "10+11=").replace("POLICY", policy)
    overrides = [data, "warmup=null", "rollout.engine.context_length=8", "evaluation.eval.prompts=null"]
    assert main(["check", str(DEMO), *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("training", "evaluation.eval"):
        assert [line.startswith("data: ") for line in lines if said.format(name) in line] == [True]
    run = prepare(load_recipe(DEMO, [*overrides, f"run_dir={tmp_path}"]))
    run.lock.close()
    assert max(map(len, run.train.tokens)) == 4
    assert (len(run.train), len(run.sets["eval"])) == ((1, 1) if policy == "drop" else (3, 3))


def test_prompts_without_room_are_refused_by_default_and_never_all_dropped(tmp_path: Path) -> None:
    overrides = ["warmup=null", "rollout.engine.context_length=8"]
    data = lines_of(tmp_path, "10+1=", "10+11=")
    with pytest.raises(UserError, match="has 5 tokens, expected 1 to 4"):
        check_recipe(load_recipe(DEMO, [*overrides, data.replace("POLICY", "refuse")]))
    with pytest.raises(UserError, match="overlong_prompts=drop leaves no training prompt: all 2 have more than 4"):
        check_recipe(load_recipe(DEMO, [*overrides, data.replace("POLICY", "drop")]))


@pytest.mark.slow
def test_what_rewards_cannot_do_with_the_data_is_found_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": [2], "level": 3}\n')
    (tmp_path / "mine.py").write_text("def score(texts, answers, level): return [0.0] * len(texts)\n")
    (tmp_path / "other.py").write_text("def score(texts, difficulty): return [0.0] * len(texts)\n")
    data = [f"data={{source: jsonl, jsonl: {{train_path: {path}, eval_path: {path}}}}}", "warmup=null"]
    assert main(["check", str(DEMO), *data]) == 2
    assert "reward arithmetic: an answer is '[2]' (list), expected text or whole numbers" in capsys.readouterr().err
    reward = f'reward.functions=[{{name: mine, path: "{tmp_path}/mine.py:score"}}]'
    assert main(["check", str(DEMO), *data, reward]) == 0
    assert main(["check", str(DEMO), *data, reward.replace("mine.py", "other.py")]) == 2
    expected = (
        "requires an argument 'difficulty', expected reward_fn(generated_texts) with optional prompts, answers and"
    )
    assert f"{expected} fields of the data (prompt, answer, level)" in capsys.readouterr().err


def test_older_checkpoints_refused_long_prompts(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    checkpoint = make_checkpoint(recipe, 2)
    saved = recipe.model_dump(mode="json")
    del saved["data"]["overlong_prompts"], saved["trainer"]["epochs_of_data"]
    inputs: dict[str, str] = {}
    assert contradictions(recipe, checkpoint / "model", ["actor"], saved, inputs) == []
    assert changes(public_settings(recipe), saved) == []
    other = a_recipe(tmp_path, "trainer.async_evaluation=true")
    assert changes(public_settings(other), saved) == []  # which changes no result
    [differs] = contradictions(
        a_recipe(tmp_path, "data.overlong_prompts=drop"), checkpoint / "model", [], saved, inputs
    )
    assert str(differs) == "data.overlong_prompts: refuse in the checkpoint, drop in the recipe"
    assert "data.overlong_prompts: " in refusal(a_recipe(tmp_path, "resume=auto", "data.overlong_prompts=drop"))[1]
    longer = a_recipe(tmp_path, "trainer.steps=null", "trainer.epochs_of_data=3")
    assert [str(change) for change in changes(public_settings(longer), saved)] == [
        "trainer.epochs_of_data: null in the checkpoint, 3.0 in the recipe",
        "trainer.steps: 120 in the checkpoint, nothing in the recipe",
    ]


def test_replay_of_the_engines_routes_makes_engines_return_them() -> None:
    assert not load_recipe(DEMO).has_routes
    assert not load_recipe(DEMO, ["train.routing_replay=update"]).has_routes
    for setting in ("train.routing_replay=rollout", "rollout.engine.routes=true"):
        assert load_recipe(DEMO, [setting]).has_routes
    with pytest.raises(SettingsError, match=r"rollout\.engine\.server_args\.chunked_prefill_size=-1 with routes=true"):
        load_recipe(DEMO, ["train.routing_replay=rollout", "rollout.engine.server_args={chunked_prefill_size: -1}"])


def test_the_horizon_of_an_adaptive_penalty_covers_replayed_samples() -> None:
    adaptive = ["algorithm.kl_controller=adaptive", "algorithm.kl_target=0.1"]
    recipe = DEMO.parent / "algorithms" / "pf_ppo.yaml"  # trains on 1,024 samples and half as many of earlier steps
    with pytest.raises(SettingsError, match=r"kl_horizon=307 with 1536 samples a step, .* expected above 307$"):
        load_recipe(recipe, [*adaptive, "algorithm.kl_horizon=307"])
    load_recipe(recipe, [*adaptive, "algorithm.kl_horizon=308"])
    load_recipe(recipe, [*adaptive, "algorithm.kl_horizon=206", "algorithm.replay_buffer_size=1"])

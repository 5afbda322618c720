"""Plan of `hybridflow evaluate` before anything starts: weights, sets, and directory of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine3d.checkpoint.hf import export_checkpoint
from engine3d.checkpoint.manifest import step_directory
from engine3d.errors import UserError
from hybridflow.checkpoint.set_results import Best, MeasuredSet
from hybridflow.cli.main import main
from hybridflow.config.actors import load_recipes
from hybridflow.config.initial_model import create_model
from hybridflow.config.reading.yaml_loader import settings_yaml
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.planning.data.evaluation_plan import EvaluationPlan, plan_evaluation
from hybridflow.trainer.replaying.plan import plan_replay
from tests.support.resumable import SMALL, a_recipe, make_checkpoint
from tests.support.runs import ROOT

FP8 = ROOT / "launch/recipes/fp8.yaml"
IPPO = ROOT / "launch/recipes/algorithms/ippo.yaml"


def rows_of_sums(directory: Path) -> Path:
    rows = directory / "sums.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": number + 1}) + "\n" for number in range(4)))
    return rows


def a_run(directory: Path, *overrides: str) -> Recipe:
    """Make a run with a checkpoint of its second step, and one set."""
    recipe = a_recipe(directory, f"evaluation.sums.data.path={rows_of_sums(directory)}", "trainer.steps=4", *overrides)
    make_checkpoint(recipe, 2)
    (recipe.directory / "recipe.yaml").write_text(settings_yaml(recipe))
    return recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Make the recipe of a run with checkpoints of two steps, of which the first is the best."""
    directory = tmp_path_factory.mktemp("evaluated")
    rows = rows_of_sums(directory)
    keep = "checkpoint.keep_best={metric: eval/sums/pass@1}"
    sets = [f"evaluation.{name}.data.path={rows}" for name in ("sums", "others")]
    recipe = a_recipe(directory, keep, *sets, "evaluation.sums.interval=1", "trainer.steps=4")
    for step in (2, 4):
        measured = MeasuredSet("a", "accuracy", step, 4, 1, {"pass@1": 1 / step})
        best = Best("eval/sums/pass@1", 2, 0.5, "a")
        make_checkpoint(recipe, step, last_measured={"sums": measured}, best=best)
    (recipe.directory / "recipe.yaml").write_text(settings_yaml(recipe))
    return recipe


def plan(recipe: Recipe, *sets: str, **settings: object) -> EvaluationPlan:
    return plan_evaluation(recipe.directory, sets, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_of_a_run_the_last_checkpoint_is_taken_or_the_best_or_a_step(recipe: Recipe) -> None:
    root = recipe.checkpoint_directory
    for requested, step in ((None, 4), ("last", 4), ("best", 2), ("2", 2)):
        planned = plan(recipe, "sums", checkpoint=requested)
        assert (planned.checkpoint, planned.step) == (step_directory(root, step), step)
        assert planned.directory == recipe.directory / "evaluate" / f"step-{step:08d}"
        assert planned.recipe.model.path == planned.checkpoint / "model"  # type: ignore[operator]
        assert list(planned.recipe.sets) == ["sums"] and not planned.recipe.trains
    assert list(plan(recipe).recipe.sets) == ["eval", "sums", "others"]
    assert plan(recipe, out=recipe.run_dir / "out").directory == recipe.run_dir / "out"


def test_an_evaluation_may_lack_the_figure_by_which_its_run_chose_the_best(tmp_path: Path) -> None:
    keep = "checkpoint.keep_best={metric: eval/sums/pass@4}"
    drawn = [f"evaluation.sums.{setting}" for setting in ("samples=4", "temperature=1", "interval=1")]
    recipe = a_run(tmp_path, keep, *drawn, "warmup=null")
    greedy = ["evaluation.sums.samples=1", "evaluation.sums.temperature=0"]
    planned = plan_evaluation(recipe.directory, [], greedy)
    assert planned.step == 2 and planned.recipe.sets["sums"].settings.samples == 1


def test_an_evaluation_without_training_may_draw_as_drafts_cannot(tmp_path: Path) -> None:
    rows = rows_of_sums(tmp_path)
    drafts, top_p = "rollout.engine.draft_tokens=2", "evaluation.sums.sampling={top_p: 0.9}"
    drawn = ["evaluation.sums.temperature=1", top_p]
    with pytest.raises(
        UserError, match=r"evaluation\.sums\.sampling\.top_p was not tried with rollout\.engine\.draft_to"
    ):
        a_recipe(tmp_path, f"evaluation.sums.data.path={rows}", drafts, *drawn)
    planned = plan_evaluation(a_run(tmp_path, drafts, "train.mtp={}").directory, ["sums"], drawn)
    assert planned.recipe.rollout.engine.draft_tokens == 0


def test_the_recipe_of_a_run_of_another_version_is_named(tmp_path: Path) -> None:
    recipe = a_run(tmp_path)
    kept = recipe.directory / "recipe.yaml"
    kept.write_text(kept.read_text().replace("trainer:\n", "trainer:\n  eval_samples: 2\n"))
    with pytest.raises(UserError) as refused:
        plan_evaluation(recipe.directory, ())
    key, what_to_do = str(refused.value).splitlines()
    assert "unknown key trainer.eval_samples: here it is evaluation.eval.samples" in key
    assert what_to_do == (
        f"{recipe.directory}: another version wrote its recipe; expected these keys as this version has them, or "
        "--recipe RECIPE"
    )
    with pytest.raises(UserError, match=r"has them$"):
        plan_replay(recipe.directory, 1)


@pytest.mark.slow
def test_an_actor_of_several_is_evaluated_by_its_own_recipe(tmp_path: Path) -> None:
    sets = ["evaluation.sums.data.path=" + str(rows_of_sums(tmp_path)), "checkpoint.save_interval=1"]
    recipe = load_recipes(IPPO, [f"run_dir={tmp_path}", *SMALL, *sets])["adder"]
    make_checkpoint(recipe, 2)
    (recipe.directory / "recipe.yaml").write_text(settings_yaml(recipe))
    planned = plan(recipe)
    assert (planned.recipe.actor, planned.step) == ("adder", 2)
    assert planned.directory == tmp_path / "ippo/adder/evaluate/step-00000002"


def test_a_model_is_measured_on_the_sets_of_a_recipe(recipe: Recipe, tmp_path: Path) -> None:
    create_model(recipe.model, tmp_path / "model", seed=1)
    kept = recipe.directory / "recipe.yaml"
    planned = plan_evaluation(tmp_path / "model", ["sums"], [f"run_dir={tmp_path}"], recipe=kept)
    assert (planned.checkpoint, planned.step, planned.recipe.model.path) == (None, 0, tmp_path / "model")
    assert planned.directory == tmp_path / "small-evaluate" and planned.weights == str(tmp_path / "model")
    with pytest.raises(UserError, match="is a HuggingFace directory, expected --recipe RECIPE, which has the sets"):
        plan_evaluation(tmp_path / "model", ["sums"])
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model"):
        plan_evaluation(tmp_path / "model", ["sums"], [f"run_dir={tmp_path}"], recipe=kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--set", "aime"], "--set aime: no such set, expected one of eval, sums, others"),
        (["--set", "sums", "--set", "sums"], "--set sums stands twice, expected each once"),
        (["--checkpoint", "3"], "--checkpoint 3: expected best, last, or a step of 2, 4"),
        (["--checkpoint", "newest"], "--checkpoint newest: expected best, last, or a step of 2, 4"),
        (["evaluation.sums.max_new_tokens=64"], "evaluation.sums: max_new_tokens=64 leaves no room for a prompt"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_line(
    recipe: Recipe, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(recipe.directory), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hybridflow: {line}") and len(error.splitlines()) == 1


def test_other_targets_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or directory; expected a recipe, a run, or a HuggingFace"):
        plan_evaluation(tmp_path / "none", [])
    with pytest.raises(UserError, match=r"has neither recipe\.yaml nor config\.json"):
        plan_evaluation(tmp_path, [])
    file, empty = tmp_path / "recipe.yaml", recipe.model_copy(update={"run_dir": tmp_path / "runs"})
    file.write_text(settings_yaml(empty))
    with pytest.raises(UserError, match=r"made with random weights, and .*/checkpoints has no checkpoint; expected"):
        plan_evaluation(file, [])
    empty.directory.mkdir(parents=True)
    (empty.directory / "recipe.yaml").write_text(settings_yaml(empty))
    with pytest.raises(UserError, match="has neither a whole checkpoint nor an exported model, expected one of them"):
        plan_evaluation(empty.directory, [])
    with pytest.raises(UserError, match="which is a recipe itself"):
        plan_evaluation(file, [], recipe=file)


def test_the_checkpoints_of_a_run_are_listed_with_their_values(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "list", str(recipe.directory)]) == 0
    first, last = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("step-00000002  step 2, saved ") and first.endswith("  eval/sums/pass@1 0.5  best")
    assert last.startswith("step-00000004  step 4, saved ") and last.endswith("  eval/sums/pass@1 0.25")


@pytest.mark.slow
def test_engines_load_files_in_the_precision_of_the_recipe_alone(tmp_path: Path) -> None:
    rows = f"evaluation.sums.data.path={rows_of_sums(tmp_path)}"
    recipe = load_recipe(FP8, [f"run_dir={tmp_path}", "name=small", *SMALL, rows])
    checkpoint = make_checkpoint(recipe, 2)
    kept = recipe.directory / "recipe.yaml"
    kept.write_text(settings_yaml(recipe))
    planned = plan(recipe, "sums")
    assert planned.checkpoint == checkpoint and planned.recipe.rollout.engine.precision == "fp8"
    export_checkpoint(checkpoint, tmp_path / "in_fp8", precision="fp8")
    export_checkpoint(checkpoint, tmp_path / "in_16_bits", dtype="bfloat16")

    def of(name: str, *overrides: str) -> EvaluationPlan:
        return plan_evaluation(tmp_path / name, ["sums"], [f"run_dir={tmp_path}", *overrides], recipe=kept)

    assert of("in_fp8").weights == str(tmp_path / "in_fp8")
    of("in_16_bits", "rollout.engine.precision=null")
    message = r"^model .*in_fp8: .*down_proj\.weight is in fp8, which engines of 16 bits load without its scales; exp"
    with pytest.raises(UserError, match=message):
        of("in_fp8", "rollout.engine.precision=null")
    with pytest.raises(UserError, match=r"^model .*in_16_bits: no tensor is in fp8, and engines with .*expected null"):
        of("in_16_bits")
    # A matrix of the export's that a rank of the engine would have a part of a block of.
    with pytest.raises(UserError, match=r"a rank has 64 rows of gate and up"):
        of("in_fp8", "rollout.engine.tp=2", "placement={actor: 'cpu:0-1', rollout: 'cpu:0-1'}")

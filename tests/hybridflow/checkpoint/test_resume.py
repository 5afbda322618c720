"""Resumption: the checkpoint that is taken, the lines on it, and the recipes that it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from engine3d.checkpoint.manifest import FORMAT, file_entry, find_checkpoints, read_manifest, write_manifest
from engine3d.errors import UserError
from hybridflow.checkpoint.manager import Checkpoints
from hybridflow.checkpoint.resume import find_resumption, inexact_because, seal_warmed_up
from hybridflow.config.initial_model import create_model
from hybridflow.config.recipe import Recipe
from hybridflow.config.run import CheckpointConfig
from hybridflow.metrics.logger import Metrics
from hybridflow.planning.checks.recipe import check_recipe
from hybridflow.rundir.kept_recipe import saved_to
from hybridflow.trainer.startup.run_setup import prepare
from tests.support.resumable import a_recipe, make_checkpoint, refusal


@pytest.mark.slow
def test_auto_takes_the_newest_whole_one_and_says_what_it_skipped(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    for step in (2, 4, 10):
        make_checkpoint(recipe, step)
    root = recipe.checkpoint_directory
    (root / "step-00000010" / "driver.json").unlink()
    (root / "step-00000012" / "actor").mkdir(parents=True)
    (root / "step-00000003").mkdir()  # older than what is taken: of no interest
    resumption, notes = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is not None and resumption.directory == root / "step-00000004"
    assert resumption.state is not None and resumption.state.sampler["position"] == 32
    assert resumption.role("actor") == root / "step-00000004" / "actor"
    skipped = [note for note in notes if "skipped" in note]
    assert len(skipped) == 2
    assert any("step-00000010" in note and "driver.json" in note for note in skipped), skipped
    assert any("step-00000012" in note for note in skipped)
    assert notes[-1] == f"resume: after step 4, from {root}/step-00000004"


def test_what_describes_a_checkpoint_is_read_before_it_is_taken(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    for step in (2, 4):
        make_checkpoint(recipe, step)
    root = recipe.checkpoint_directory
    tokenizer = root / "step-00000004" / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"="', '"~"'))  # of the same size
    assert len(find_checkpoints(root)[0]) == 2
    reason = "step-00000004: model/tokenizer.json is damaged: its checksum is not that of the manifest"
    resumption, notes = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is not None and resumption.directory == root / "step-00000002"
    assert notes[0] == f"resume: skipped {root}/{reason}"
    assert refusal(a_recipe(tmp_path, f"resume={root}/step-00000004")) == [
        f"resume: checkpoint {root}/{reason}; `hybridflow checkpoint verify {root}/step-00000004` says what is damaged"
    ]


@pytest.mark.slow
def test_a_damaged_shard_is_skipped_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of a large checkpoint are not read: the ranks that load them do that."""
    recipe = a_recipe(tmp_path)
    older, damaged = make_checkpoint(recipe, 2), make_checkpoint(recipe, 4)
    shard = damaged / "actor" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    reason = f"{damaged}: actor/__0_0.distcp is damaged: its checksum is not that of the manifest"
    resumption, notes = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is not None and resumption.directory == older
    assert notes == [f"resume: skipped {reason}", f"resume: after step 2, from {older}"]
    assert refusal(a_recipe(tmp_path, f"resume={damaged}"))[0].startswith(f"resume: checkpoint {reason}; ")
    taken, _ = find_resumption(a_recipe(tmp_path, "resume=auto", "checkpoint.verify=false"))
    assert taken is not None and taken.directory == damaged
    monkeypatch.setattr("hybridflow.checkpoint.resume.SMALL_BYTES", 1000)
    taken, _ = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert taken is not None and taken.directory == damaged


@pytest.mark.slow
def test_what_was_skipped_is_out_of_the_way_of_new_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = a_recipe(tmp_path)
    run = prepare(recipe)
    run.lock.close()
    for step in (2, 4):
        make_checkpoint(recipe, step, run=run.identity)
    root = recipe.checkpoint_directory
    damaged = root / "step-00000004"
    (damaged / "model" / "config.json").write_bytes(bytes((damaged / "model" / "config.json").stat().st_size))
    recipe = a_recipe(tmp_path, "resume=auto", "checkpoint.keep_last_k=1")
    run = prepare(recipe)
    assert run.resumption is not None and run.resumption.directory.name == "step-00000002"
    resumed = run.resumption.directory
    with (
        run.lock,
        Metrics(recipe.metrics, run.directory) as sinks,
        Checkpoints(recipe, run.model_directory, sinks, resumed),
    ):
        assert [path.name for path in find_checkpoints(root)[0]] == ["step-00000002"]
    assert (root / "step-00000004.1" / "manifest.json").is_file()
    assert f"checkpoint: {damaged} is damaged; now {damaged}.1\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fresh_start_leaves_nothing_that_is_not_sound_in_its_way(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, f"checkpoint.dir={tmp_path}/shared", "checkpoint.keep_last_k=1", "resume=auto")
    only = make_checkpoint(recipe, 100)
    driver = only / "driver.json"
    driver.write_bytes(bytes(driver.stat().st_size))
    (tmp_path / "shared" / "step-best").mkdir()  # no name of a checkpoint
    assert "another course of training (step-00000100)" in refusal(recipe.model_copy(update={"resume": "none"}))[0]
    assert refusal(recipe) == [
        f"resume=auto: no checkpoint in {tmp_path}/shared is whole (step-00000100: driver.json is damaged: its "
        "checksum is not that of the manifest); `hybridflow checkpoint verify` says what is damaged, resume=none "
        "starts afresh"
    ]
    # A save that was killed is no checkpoint, and no reason not to start.
    (only / "manifest.json").unlink()
    run = prepare(recipe)
    assert run.resumption is None
    with run.lock, Metrics(recipe.metrics, run.directory) as sinks, Checkpoints(recipe, run.model_directory, sinks):
        assert find_checkpoints(tmp_path / "shared") == ([], [])
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"step-best", ".lock"}


def test_what_a_newer_version_saved_is_not_passed_over(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    for step in (2, 4):
        make_checkpoint(recipe, step)
    manifest = recipe.checkpoint_directory / "step-00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 99'))
    [line] = refusal(a_recipe(tmp_path, "resume=auto"))
    assert line.startswith(f"checkpoint {manifest.parent}: manifest.json has format 99, this version reads {FORMAT}")


def test_auto_starts_afresh_where_there_is_none(tmp_path: Path) -> None:
    resumption, notes = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is None
    assert notes == [f"resume: no whole checkpoint in {tmp_path}/small/checkpoints; starting afresh"]


@pytest.mark.slow
def test_a_path_is_a_checkpoint_or_a_directory_of_them(tmp_path: Path) -> None:
    old = a_recipe(tmp_path)
    for step in (2, 4):
        make_checkpoint(old, step)
    root = old.checkpoint_directory
    for path, step in ((root, 4), (root / "step-00000002", 2)):
        resumption, _ = find_resumption(a_recipe(tmp_path, "name=other", f"resume={path}"))
        assert resumption is not None and resumption.state is not None and resumption.state.step == step
    (root / "step-00000004" / "manifest.json").unlink()
    [line] = refusal(a_recipe(tmp_path, f"resume={root}/step-00000004"))
    assert f"{root}/step-00000004: it has no manifest.json" in line
    assert "no such directory" in refusal(a_recipe(tmp_path, f"resume={tmp_path}/nowhere"))[0]
    assert "no whole checkpoint" in refusal(a_recipe(tmp_path, f"resume={tmp_path}"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("dir_override", ["checkpoint.dir=null", "checkpoint.dir={elsewhere}"])
def test_a_path_is_the_directory_of_a_run(tmp_path: Path, dir_override: str) -> None:
    elsewhere = dir_override.format(elsewhere=tmp_path / "elsewhere")
    recipe = a_recipe(tmp_path, elsewhere)
    run = prepare(recipe)
    run.lock.close()
    [line] = refusal(a_recipe(tmp_path, f"resume={run.directory}"))
    assert line.startswith(("resume: the run in", "resume: no whole checkpoint in"))
    for step in (2, 4):
        make_checkpoint(recipe, step, run=run.identity)
    for more in ((elsewhere,), ("name=other",)):
        resumption, notes = find_resumption(a_recipe(tmp_path, f"resume={run.directory}", *more))
        assert resumption is not None and resumption.state is not None and resumption.state.step == 4
        assert resumption.in_place == (more == (elsewhere,))
        assert notes[-1] == f"resume: after step 4, from {resumption.directory}" or "name" in notes[-1]


CONTRADICTIONS = {
    "seed=2": "seed: 1 in the checkpoint, 2 in the recipe",
    "model.create.config.hidden_size=48": "model.config.hidden_size: 96 in the checkpoint, 48 in the recipe",
    "model.create.config.rope_scaling={type: linear, factor: 2.0}": (
        'model.config.rope_scaling: nothing in the checkpoint, {"type": "linear", "factor": 2.0} in the recipe'
    ),
    "model.create.seed=5": "model.create.seed: null in the checkpoint, 5 in the recipe",
    "data.seed=3": "data.seed: 0 in the checkpoint, 3 in the recipe",
    "data.arithmetic.train_size=65": "data.arithmetic.train_size: 64 in the checkpoint, 65 in the recipe",
}


@pytest.mark.slow
@pytest.mark.parametrize("override", CONTRADICTIONS)
def test_another_run_is_refused_unless_the_difference_is_accepted(tmp_path: Path, override: str) -> None:
    checkpoint = make_checkpoint(a_recipe(tmp_path), 2)
    line = CONTRADICTIONS[override]
    lines = refusal(a_recipe(tmp_path, "resume=auto", override))
    assert lines == [
        f"resume: {checkpoint} is of another run than this recipe; checkpoint.accept takes what may differ",
        line,
    ]
    name = line.split(":")[0]
    for accepted in (name, name.split(".")[0]):
        resumption, _ = find_resumption(a_recipe(tmp_path, "resume=auto", override, f"checkpoint.accept=[{accepted}]"))
        assert resumption is not None
    others = "checkpoint.accept=[tokenizer, data.source, model.config.head_dim, model.create.dtype]"
    assert refusal(a_recipe(tmp_path, "resume=auto", override, others))[1:] == [line]


@pytest.mark.slow
def test_prompts_are_the_same_where_something_else_is_accepted(tmp_path: Path) -> None:
    make_checkpoint(a_recipe(tmp_path), 2)
    for override, same in (
        ("model.create.seed=5", True),
        ("seed=2", False),
        ("data.seed=3", False),
        ("data.arithmetic.train_size=65", False),
    ):
        name = override.partition("=")[0]
        resumption, _ = find_resumption(a_recipe(tmp_path, "resume=auto", override, f"checkpoint.accept=[{name}]"))
        assert resumption is not None and (resumption.accepted, resumption.has_same_prompts) == ((name,), same)
    resumption, _ = find_resumption(a_recipe(tmp_path, "resume=auto", "checkpoint.accept=[data]"))
    assert resumption is not None and (resumption.accepted, resumption.has_same_prompts) == ((), True)


def test_a_checkpoint_of_format_1_is_read(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(a_recipe(tmp_path), 2)
    driver = checkpoint / "driver.json"
    document = json.loads(driver.read_text())
    del document["algorithm"]
    driver.write_text(json.dumps(document))
    manifest = read_manifest(checkpoint)
    files = tuple(file_entry(checkpoint, checkpoint / entry.path) for entry in manifest.files)
    write_manifest(checkpoint, dataclasses.replace(manifest, files=files, format=1))
    resumption, _ = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is not None and resumption.manifest.format == 1
    assert resumption.state is not None and resumption.state.algorithm == {}


def test_all_differences_are_listed(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(a_recipe(tmp_path), 2)
    tokenizer = checkpoint / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"="', '"~"'))
    manifest = read_manifest(checkpoint)
    files = [file_entry(checkpoint, checkpoint / entry.path) for entry in manifest.files]
    write_manifest(checkpoint, dataclasses.replace(manifest, files=tuple(files)))
    overrides = ["resume=auto", "seed=2", "model.create.config.vocab_size=40", "trainer.steps=7"]
    lines = refusal(a_recipe(tmp_path, *overrides))
    assert [line.split(":")[0] for line in lines[1:]] == ["model.config.vocab_size", "tokenizer", "seed"]
    assert lines[2].count("tokenizer.json xxh3_128:") == 2


def test_other_changes_are_told_one_line_each(tmp_path: Path) -> None:
    make_checkpoint(a_recipe(tmp_path), 2)
    overrides = ["trainer.steps=7", "train.layout.ep=1", "checkpoint.keep_last_k=3", "reward.functions=[]"]
    _, notes = find_resumption(a_recipe(tmp_path, "resume=auto", *overrides[:3]))
    assert notes[1:] == [
        "resume: train.layout.ep: 2 in the checkpoint, 1 in the recipe",
        "resume: trainer.steps: 120 in the checkpoint, 7 in the recipe",
    ]


def test_data_are_their_content_wherever_it_lies(tmp_path: Path) -> None:
    def jsonl(path: Path, last: str) -> list[str]:
        path.mkdir(exist_ok=True)
        for name in ("train", "eval", "sft"):
            (path / name).write_text(f'{{"prompt": "1+1=", "answer": "2"}}\n{{"prompt": "2+2=", "answer": "{last}"}}\n')
        paths = ", ".join(f"{name}_path: {path}/{name}" for name in ("train", "eval", "sft"))
        return ["data.source=jsonl", f"data.jsonl={{{paths}}}"]

    first = jsonl(tmp_path / "one", "4")
    make_checkpoint(a_recipe(tmp_path, *first), 2)
    moved = a_recipe(tmp_path, "resume=auto", *jsonl(tmp_path / "two", "4"))
    assert find_resumption(moved)[0] is not None
    jsonl(tmp_path / "two", "5")
    lines = refusal(moved)
    assert [line.split(":")[0] for line in lines[1:]] == [f"data.jsonl.{n}_path" for n in ("train", "eval", "sft")]
    accepting = a_recipe(tmp_path, "resume=auto", *jsonl(tmp_path / "two", "5"), "checkpoint.accept=[data.jsonl]")
    assert find_resumption(accepting)[0] is not None


@pytest.mark.slow
def test_initial_weights_are_their_content_wherever_they_lie(tmp_path: Path) -> None:
    given = a_recipe(tmp_path)
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        create_model(given.model, tmp_path / name, seed=seed)

    def starting_with(name: str, *overrides: str) -> Recipe:
        return a_recipe(tmp_path, f"model={{path: {tmp_path}/{name}, create: null}}", *overrides)

    make_checkpoint(starting_with("one"), 2, model=tmp_path / "one")
    assert find_resumption(starting_with("same", "resume=auto"))[0] is not None
    [_, line] = refusal(starting_with("other", "resume=auto"))
    assert line.startswith("model.weights: sampled-sha256:")
    for name in ("model", "model.weights"):
        accepting = starting_with("other", "resume=auto", f"checkpoint.accept=[{name}]")
        assert find_resumption(accepting)[0] is not None


def test_a_checkpoint_of_weights_alone_is_a_start(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    checkpoint = make_checkpoint(recipe, 0, root=tmp_path / "imported")
    (checkpoint / "driver.json").unlink()
    manifest = read_manifest(checkpoint)
    actor = dataclasses.replace(manifest.roles["actor"], optimizer_step=None)
    files = tuple(entry for entry in manifest.files if entry.path != "driver.json")
    write_manifest(checkpoint, dataclasses.replace(manifest, roles={"actor": actor}, recipe={}, files=files))
    resumption, notes = find_resumption(a_recipe(tmp_path, f"resume={checkpoint}", "seed=9"))
    assert resumption is not None and resumption.state is None and not resumption.in_place
    assert notes == [f"resume: from the weights alone, from {checkpoint}"]
    assert refusal(a_recipe(tmp_path, f"resume={checkpoint}", "model.create.config.num_experts=8"))
    warm = "warmup={steps: 1, batch_size: 2}"
    with_warmup = (f"resume={checkpoint}", f"checkpoint.dir={checkpoint.parent}", "checkpoint.save_interval=1", warm)
    assert refusal(a_recipe(tmp_path, *with_warmup)) == [
        f"resume: {checkpoint} holds weights alone, and the checkpoint after the warm-up would have its name; expected "
        "another checkpoint.dir, or no warmup"
    ]
    assert find_resumption(a_recipe(tmp_path, f"resume={checkpoint}", warm))[0] is not None


@pytest.mark.slow
def test_the_reference_policy_of_a_warmed_up_run_is_what_was_written(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, "algorithm.kl_coef=0.1")
    checkpoint = make_checkpoint(recipe, 2)
    resumed = a_recipe(tmp_path, "algorithm.kl_coef=0.1", "resume=auto")
    assert refusal(resumed)[0].startswith(f"resume: next to {checkpoint} there is no warmed-up")
    warmed_up = checkpoint.parent / "warmed-up"
    create_model(recipe.model, warmed_up, seed=1)
    assert find_resumption(resumed)[0] is not None  # as older versions left it
    seal_warmed_up(warmed_up)
    assert find_resumption(resumed)[0] is not None
    weights = warmed_up / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert refusal(resumed) == [
        f"resume: {warmed_up}, the reference policy of {checkpoint.name}: model.safetensors is damaged: its checksum "
        "is not that of the manifest"
    ]
    assert find_resumption(resumed.model_copy(update={"checkpoint": CheckpointConfig(verify=False)}))[0] is not None


@pytest.mark.slow
def test_checkpoints_of_two_courses_do_not_share_a_directory(tmp_path: Path) -> None:
    shared = f"checkpoint.dir={tmp_path}/shared"
    recipe = a_recipe(tmp_path, shared)
    for step in (2, 4):
        make_checkpoint(recipe, step)
    first = tmp_path / "shared" / "step-00000002"
    assert "holds checkpoints of another course of training (step-00000004, step-00000002)" in refusal(recipe)[0]
    assert (
        "(step-00000004); remove them to resume from step-00000002"
        in refusal(a_recipe(tmp_path, shared, f"resume={first}"))[0]
    )
    assert find_resumption(a_recipe(tmp_path, shared, "resume=auto"))[0] is not None
    assert find_resumption(a_recipe(tmp_path, "name=other", f"resume={first}"))[0] is not None
    # Without checkpoints of its own a run may start from any.
    silent = a_recipe(tmp_path, shared, f"resume={first}", "checkpoint.save_interval=null")
    assert find_resumption(silent)[0] is not None


@pytest.mark.slow
def test_a_run_goes_on_in_its_own_directory(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    run = prepare(recipe)
    run.lock.close()
    weights = (run.model_directory / "model.safetensors").read_bytes()
    (run.directory / "metrics.jsonl").write_text("kept")
    for left_over in ("shards", "weights"):
        (run.directory / left_over).mkdir()
    make_checkpoint(recipe, 2, run=run.identity)
    (run.model_directory / "mark").write_text("not made again")

    again = prepare(a_recipe(tmp_path, "resume=auto"))
    again.lock.close()
    assert again.identity == run.identity and again.resumption is not None and again.resumption.in_place
    assert (run.directory / "metrics.jsonl").read_text() == "kept" and (run.model_directory / "mark").exists()
    assert not (run.directory / "shards").exists() and not (run.directory / "weights").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["small"]

    other = prepare(a_recipe(tmp_path, f"resume={recipe.checkpoint_directory}", "name=other"))
    other.lock.close()
    assert other.identity != run.identity and other.resumption is not None and not other.resumption.in_place
    assert (other.model_directory / "model.safetensors").read_bytes() == weights
    assert not (other.directory / "metrics.jsonl").exists()

    reseeded = prepare(
        a_recipe(
            tmp_path, f"resume={recipe.checkpoint_directory}", "name=reseeded", "seed=5", "checkpoint.accept=[seed]"
        )
    )
    reseeded.lock.close()
    assert (reseeded.model_directory / "model.safetensors").read_bytes() == weights

    # A checkpoint is not moved aside with the directory that it is in.
    (run.directory / ".run").write_text("another")
    with pytest.raises(UserError, match="is another run's, in this one's directory; choose another name"):
        prepare(a_recipe(tmp_path, "resume=auto"))

    # A fresh start moves the run aside, checkpoints and all.
    fresh = prepare(a_recipe(tmp_path, "overwrite=true"))
    fresh.lock.close()
    assert fresh.resumption is None and (tmp_path / "small.1" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.slow
def test_a_run_goes_on_from_its_newest_checkpoint_wherever_it_saves_from_then_on(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    run = prepare(recipe)
    run.lock.close()
    make_checkpoint(recipe, 2, run=run.identity)
    elsewhere = [tmp_path / "disk", tmp_path / "larger-disk"]
    for directory, step in zip(elsewhere, (2, 4), strict=True):
        again = prepare(a_recipe(tmp_path, "resume=auto", f"checkpoint.dir={directory}"))
        again.lock.close()
        assert again.resumption is not None and again.resumption.in_place
        assert again.resumption.state is not None and again.resumption.state.step == step
        make_checkpoint(recipe, step + 2, directory, run=run.identity)
    # Of the run's own directory nobody says that it is where the newest ones are.
    for more in (f"resume={run.directory}", "resume=auto"):
        resumption, notes = find_resumption(a_recipe(tmp_path, more, "checkpoint.save_interval=null"))
        assert resumption is not None and resumption.directory == elsewhere[1] / "step-00000006", notes
    assert saved_to(run.directory) == elsewhere[1]
    shutil.rmtree(elsewhere[1])  # it was in a directory that has been moved
    assert saved_to(run.directory) == run.directory / "checkpoints"
    (run.directory / "recipe.yaml").write_text("")  # it was killed while it wrote it
    resumption, _ = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is not None and resumption.state is not None and resumption.state.step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpoint.accept=[sed]", "checkpoint.accept: 'sed' is nothing that a recipe could contradict"),
        ("checkpoint.accept=[data.arithmetic.size]", "'data.arithmetic.size' is nothing"),
        ("checkpoint.dir={file}", "{file} is a file, expected a directory"),
        ("checkpoint.dir={file}/under", "{file} is a file, expected a directory"),
        ("resume={file}", "no such directory: {file}"),
    ],
)
def test_what_check_finds_of_checkpoints(tmp_path: Path, override: str, message: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError) as caught:
        check_recipe(a_recipe(tmp_path, override.replace("{file}", str(file))))
    assert len(str(caught.value).splitlines()) == 1
    assert message.replace("{file}", str(file)) in str(caught.value)


def test_settings_of_checkpoints_are_no_contradiction(tmp_path: Path) -> None:
    names = "[seed, tokenizer, model, model.config.rope_theta, data, data.arithmetic.eval_size, data.jsonl]"
    check_recipe(a_recipe(tmp_path, "checkpoint={save_interval: 1}", f"checkpoint.accept={names}"))
    assert list(tmp_path.iterdir()) == []  # a check makes nothing


def test_what_keeps_a_resume_from_being_exact_is_said(tmp_path: Path) -> None:
    def because(recipe: Recipe) -> list[str]:
        return inexact_because(recipe.train, recipe.rollout, recipe.functions)

    assert [reason.split("=")[0] for reason in because(a_recipe(tmp_path))] == ["rollout.engine.deterministic"]
    exact = a_recipe(tmp_path, "rollout.engine.deterministic=true")
    assert because(exact) == []
    cached = a_recipe(tmp_path, "rollout.engine.deterministic=true", "rollout.weights.flush_cache=false")
    assert [reason.split("=")[0] for reason in because(cached)] == ["rollout.weights.flush_cache"]

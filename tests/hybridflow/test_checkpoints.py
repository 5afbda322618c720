"""Saving beside training, with real ranks and real faults: a full disk, a directory that is gone, a file in the way."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine3d.checkpoint.manifest import find_checkpoints, read_manifest
from engine3d.checkpoint.verify import verify_checkpoint
from engine3d.errors import EngineError, UserError
from engine3d.platform import platform
from engine3d.reshard.shards import Place
from hybridflow.algorithms.aggregation import sequence_weights
from hybridflow.batch import RolloutBatch
from hybridflow.checkpoints import Checkpoints
from hybridflow.columns import COUNTED
from hybridflow.config import Recipe, load_recipe
from hybridflow.devices import pool_devices
from hybridflow.metrics import Metrics
from hybridflow.placement import cluster_nodes, release, reserve
from hybridflow.remote_batch import RemoteBatch
from hybridflow.roles.policy import PolicyWorker
from hybridflow.run import Run, prepare
from hybridflow.run_state import RandomState, RunState
from hybridflow.worker_group import WorkerGroup
from tests.hybridflow.runs import ROOT, SMALL, records

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Stage:
    """The actor of a run, and where the run is."""

    run: Run
    actor: WorkerGroup


@pytest.fixture(scope="module")
def stage(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """An actor of two ranks that has made one update."""
    directory = tmp_path_factory.mktemp("runs")
    recipe = a_recipe(directory)
    run = prepare(recipe)
    pools = reserve(pool_devices({"actor": "cpu:0-1"}, {}, cluster_nodes()))
    with WorkerGroup(
        "actor",
        PolicyWorker,
        pools["actor"],
        recipe.train.layout.layout(2),
        run.model_directory,
        recipe.train,
        trainable=True,
        seed=recipe.seed,
        places=[Place("node 0", f"cpu:{slot}") for slot in range(2)],
        log_dir=run.log_directory,
        environment=platform.training_environment(2),
    ) as actor:
        actor.start().result(300)
        batch = RemoteBatch.of(a_batch())
        weights = sequence_weights(batch.facts[COUNTED], "token-mean")
        actor.supervise(batch.with_facts(weights=weights)).result()
        yield Stage(run, actor)
    release(pools)
    run.lock.close()


def a_recipe(directory: Path, *overrides: str) -> Recipe:
    settings = [f"run_dir={directory}", *SMALL, "checkpoint.save_interval=1", *overrides]
    return load_recipe(ROOT / "launch/recipes/demo.yaml", settings)


def a_batch() -> RolloutBatch:
    return RolloutBatch.from_generations(
        prompts=[[5, 6, 7]] * 4,
        responses=[[8, 9, 2], [8, 2], [3, 3, 3], [4, 2]],
        logprobs=[[-1.0] * 3, [-1.0] * 2, [-1.0] * 3, [-1.0] * 2],
        sample_ids=range(4),
        group_ids=[0, 0, 1, 1],
        prompt_indices=[0, 0, 1, 1],
        policy_versions=[1] * 4,
        finish_reasons=["stop"] * 4,
        pad_token_id=0,
    )


def a_state(step: int) -> RunState:
    return RunState(
        step=step,
        policy_version=step + 1,
        samples_drawn=0,
        sampler={"count": 20, "seed": 1, "position": step},
        updates=step,
        steps_without_update=0,
        accuracy_before=0.0,
        accuracy_after=0.0,
        random=RandomState.capture(),
        run="test",
        inputs={},
        buffer=(a_batch(),),
    )


def checkpoints(stage: Stage, directory: Path, *overrides: str) -> Checkpoints:
    """Those of a run whose metrics go into `directory`."""
    recipe = a_recipe(directory, f"checkpoint.dir={directory}/checkpoints", *overrides)
    run = replace(stage.run, directory=directory)
    return Checkpoints(recipe, run, Metrics(recipe.metrics, directory))


def whole(directory: Path) -> list[str]:
    found, _ = find_checkpoints(directory / "checkpoints")
    for checkpoint in found:
        assert verify_checkpoint(checkpoint) == []
    return [checkpoint.name for checkpoint in found]


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_checkpoints_are_whole_and_the_oldest_go(stage: Stage, tmp_path: Path, async_save: str) -> None:
    overrides = ["checkpoint.keep_last_k=2", f"checkpoint.async_save={async_save}"]
    with checkpoints(stage, tmp_path, *overrides) as saving:
        for step in (1, 2, 3):  # each while the one before may be under way
            saving.save(stage.actor, a_state(step))
        saving.wait()
        saving.poll()
    assert whole(tmp_path) == ["step-00000003", "step-00000002"]
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    manifest = read_manifest(checkpoint)
    assert manifest.step == 3 and manifest.roles["actor"].optimizer_step == 1
    assert manifest.roles["actor"].world_size == 2 and manifest.recipe["name"] == "small"
    listed = {entry.path for entry in manifest.files}
    there = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert there - listed == {"manifest.json"}
    assert {"driver.json", "buffer-00000.safetensors", "model/config.json", "model/tokenizer.json"} < listed
    [batch] = RunState.read(checkpoint).buffer
    assert batch.responses() == a_batch().responses()
    logged = records(tmp_path)
    assert [(record["phase"], record["step"]) for record in logged] == [("checkpoint", step) for step in (1, 2, 3)]
    state_bytes = 12 * manifest.roles["actor"].parameters
    for record in logged:
        assert state_bytes <= record["checkpoint/written_bytes"] < 1.1 * state_bytes
        assert record["checkpoint/stall_ms"] > 0 and record["checkpoint/whole_after_sec"] > 0
        assert (record["checkpoint/host_bytes"] > 0) == (async_save == "true")


def _vanish(stage: Stage, root: Path) -> Any:
    root.rename(root.with_name("elsewhere"))
    return lambda: root.with_name("elsewhere").rename(root)


def _become_a_file(stage: Stage, root: Path) -> Any:
    restore = _vanish(stage, root)
    root.write_text("")

    def heal() -> None:
        root.unlink()
        restore()

    return heal


def _large_files(stage: Stage, root: Path) -> Any:
    """Ranks may not write large files: an error in the middle of a write, as on a full disk."""
    pids = [process.pid for process in stage.actor._processes]
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    def heal() -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return heal


def _full_disk(stage: Stage, root: Path) -> Any:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    return lambda: subprocess.run(["umount", root], check=True)


def _read_only(stage: Stage, root: Path) -> Any:
    if os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    root.chmod(0o500)
    return lambda: root.chmod(0o700)


FAULTS = {
    "the directory is gone": (_vanish, "No such file or directory"),
    "the directory is a file": (_become_a_file, "Not a directory"),
    "files may not grow": (_large_files, "File too large"),
    "the disk is full": (_full_disk, "No space left on device"),
    "it may not be written": (_read_only, "Permission denied"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_failed_save_is_told_in_a_line_and_costs_no_older_one(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str, on_failure: str
) -> None:
    root = tmp_path / "checkpoints"
    spoil, cause = FAULTS[fault]
    with checkpoints(stage, tmp_path, "checkpoint.keep_last_k=1", f"checkpoint.on_failure={on_failure}") as saving:
        saving.save(stage.actor, a_state(1))
        saving.wait()
        heal = spoil(stage, root)
        capfd.readouterr()
        try:
            line = f"the checkpoint of step 2 could not be saved in {root}/step-00000002: "
            if on_failure == "stop":
                with pytest.raises(EngineError) as caught:
                    saving.save(stage.actor, a_state(2))
                    saving.wait()
                told = str(caught.value)
            else:
                saving.save(stage.actor, a_state(2))
                saving.wait()
                [told] = capfd.readouterr().err.splitlines()
                told = told.removeprefix("hybridflow: ")
                assert told.endswith("; training goes on")
            assert told.startswith(line) and cause in told, told
        finally:
            heal()
        assert whole(tmp_path) == ["step-00000001"]
        assert not (root / "step-00000002").exists()
        saving.save(stage.actor, a_state(3))
        saving.wait()
    assert whole(tmp_path) == ["step-00000003"]
    failed = [record for record in records(tmp_path) if "checkpoint/failed" in record]
    assert [(record["step"], record["checkpoint/failed"]) for record in failed] == [(2, 1)]


def test_a_whole_checkpoint_is_never_replaced_and_another_is_moved_away(stage: Stage, tmp_path: Path) -> None:
    with checkpoints(stage, tmp_path) as saving:
        saving.save(stage.actor, a_state(1))
        saving.wait()
        saving.save(stage.actor, a_state(1))
        saving.wait()
    assert [record.get("checkpoint/failed") for record in records(tmp_path)] == [None, 1]
    assert whole(tmp_path) == ["step-00000001"]
    (tmp_path / "checkpoints" / "step-00000001" / "driver.json").unlink()
    with checkpoints(stage, tmp_path / "next", f"checkpoint.dir={tmp_path}/checkpoints") as saving:
        saving.save(stage.actor, a_state(1))
        saving.wait()
    assert whole(tmp_path) == ["step-00000001"]
    assert (tmp_path / "checkpoints" / "step-00000001.1" / "manifest.json").is_file()


def test_a_checkpoint_that_vanishes_while_it_is_written(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with checkpoints(stage, tmp_path) as saving:
        saving.save(stage.actor, a_state(1))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000001", ignore_errors=True)
        saving.wait()
        assert "the checkpoint of step 1 could not be saved" in capfd.readouterr().err
        saving.save(stage.actor, a_state(2))
        saving.wait()
    assert whole(tmp_path) == ["step-00000002"]


def test_a_run_that_ends_early_leaves_no_partial_checkpoint(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="a role failed"), checkpoints(stage, tmp_path) as saving:
        saving.save(stage.actor, a_state(1))
        saving.wait()
        saving.save(stage.actor, a_state(2))
        raise EngineError("a role failed")
    stage.actor.abandon_checkpoint().result()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]
    # What a killed one left goes when the next run starts; the directory is one run's at a time.
    (tmp_path / "checkpoints" / "step-00000002" / "actor").mkdir(parents=True)
    with checkpoints(stage, tmp_path / "next", f"checkpoint.dir={tmp_path}/checkpoints"):
        assert whole(tmp_path) == ["step-00000001"]
        assert not (tmp_path / "checkpoints" / "step-00000002").exists()
        with pytest.raises(UserError, match=r"checkpoint\.dir: a run in .* is going on"):
            checkpoints(stage, tmp_path / "third", f"checkpoint.dir={tmp_path}/checkpoints").__enter__()


def test_when_a_checkpoint_is_due(stage: Stage, tmp_path: Path) -> None:
    def due(*overrides: str) -> list[int]:
        recipe = a_recipe(tmp_path, *overrides)
        saving = Checkpoints(recipe, stage.run, Metrics(recipe.metrics, tmp_path / str(len(list(tmp_path.iterdir())))))
        return [step for step in range(8) if saving.due(step)]

    assert due("trainer.steps=7", "checkpoint.save_interval=3") == [0, 3, 6, 7]
    assert due("trainer.steps=7", "checkpoint.save_interval=3", "warmup=null") == [3, 6, 7]
    assert due("trainer.steps=7", "checkpoint.save_interval=null") == []

"""Saving beside training, with real ranks and real faults: a full disk, a directory that is gone, a file in the way."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine3d.checkpoint.manifest import RoleSummary, find_checkpoints, read_manifest
from engine3d.checkpoint.reading.verify import verify_checkpoint
from engine3d.checkpoint.writing.save import SaveStart
from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Location
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import LOSS_TOKENS
from hybridflow.checkpoint.driver_state import Measurements, RandomState, RunState
from hybridflow.checkpoint.manager import Checkpoints
from hybridflow.checkpoint.set_results import RESULTS, Best, MeasuredSet, read_best, value_of
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.processes.termination import Abandoned, Termination
from hybridflow.cluster.ray.resource_pool import cluster_nodes, release, reserve
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.metrics.logger import Metrics
from hybridflow.roles.model import CheckpointBegun, CheckpointFailure
from hybridflow.roles.policy import PolicyWorker
from hybridflow.rollout.buffered_groups import BufferedGroups
from hybridflow.trainer.startup.run_setup import Run, prepare
from hybridflow.workers.worker_group import RankError, WorkerGroup
from tests.support.runs import ROOT, SMALL, records

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Stage:
    """The trained roles of a run, and where the run is."""

    run: Run
    trained: dict[str, Any]

    def pids(self, role: str) -> list[int]:
        return [process.pid for process in self.trained[role].ranks.processes]


@pytest.fixture(scope="module")
def stage(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """An actor of two ranks that has made one update, and a critic of one rank that has made two."""
    directory = tmp_path_factory.mktemp("runs")
    recipe = a_recipe(directory)
    run = prepare(recipe)
    pools = reserve(pool_devices({"actor": "cpu:0-1", "critic": "cpu:2"}, {}, cluster_nodes()))

    def group(role: str, layout: Layout) -> Any:
        return WorkerGroup(
            role,
            PolicyWorker,
            pools[role],
            layout,
            run.model_directory,
            recipe.train,
            trainable=True,
            seed=recipe.seed,
            locations=[Location("node 0", f"cpu:{slot}") for slot in range(layout.world_size)],
            log_dir=run.log_directory,
            environment=platform.training_environment(layout.world_size),
        )

    with group("actor", recipe.train.layout.layout(2)) as actor, group("critic", Layout()) as critic:
        for starting in [actor.start(), critic.start()]:
            starting.result(300)
        batch = RemoteBatch.of(a_batch())
        weights = sequence_weights(batch.per_sample[LOSS_TOKENS], "token-mean")
        for updated in (actor, critic, critic):
            updated.supervise(batch.with_per_sample(weights=weights)).result()
        yield Stage(run, {"actor": actor, "critic": critic})
    release(pools)
    run.lock.close()


def a_recipe(directory: Path, *overrides: str) -> Recipe:
    settings = [f"run_dir={directory}", *SMALL, "checkpoint.save_interval=1", *overrides]
    return load_recipe(ROOT / "launch/recipes/demo.yaml", settings)


def a_batch() -> SampleBatch:
    return SampleBatch.from_generations(
        prompts=[[5, 6, 7]] * 4,
        responses=[[8, 9, 2], [8, 2], [3, 3, 3], [4, 2]],
        logprobs=[[-1.0] * 3, [-1.0] * 2, [-1.0] * 3, [-1.0] * 2],
        sample_ids=range(4),
        group_ids=[0, 0, 1, 1],
        prompt_indices=[0, 0, 1, 1],
        policy_versions=[1] * 4,
        finish_reasons=["stop"] * 4,
    )


def a_state(step: int) -> RunState:
    return RunState(
        step=step,
        policy_version=step + 1,
        samples_drawn=0,
        sampler={"count": 20, "seed": 1, "position": step},
        updates=step,
        steps_without_update=0,
        random=RandomState.capture(),
        run="test",
        inputs={},
        groups=BufferedGroups.of_batch(a_batch()),
        algorithm={"kl_controller": {"coefficient": 0.1 + step}},
    )


def checkpoints(stage: Stage, directory: Path, *overrides: str) -> Checkpoints:
    """The checkpoints of a run whose metrics go into `directory`."""
    recipe = a_recipe(directory, f"checkpoint.dir={directory}/checkpoints", *overrides)
    return Checkpoints(recipe, stage.run.model_directory, Metrics(recipe.metrics, directory))


def has_none_under_way(group: Any) -> bool:
    """True if no rank has a save to finish."""
    answers: list[object] = group.finish_checkpoint().result()
    return answers == [CheckpointFailure("no save is in flight")] * group.layout.world_size


def complete_checkpoints(directory: Path) -> list[str]:
    complete, _ = find_checkpoints(directory / "checkpoints")
    for checkpoint in complete:
        assert verify_checkpoint(checkpoint) == []
    return [checkpoint.name for checkpoint in complete]


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_checkpoints_are_whole_and_the_oldest_go(stage: Stage, tmp_path: Path, async_save: str) -> None:
    overrides = ["checkpoint.keep_last_k=2", f"checkpoint.async_save={async_save}"]
    with checkpoints(stage, tmp_path, *overrides) as saving:
        for step in (1, 2, 3):  # each while the one before may be under way
            saving.save(stage.trained, a_state(step))
        saving.wait()
        saving.poll()
    assert complete_checkpoints(tmp_path) == ["step-00000003", "step-00000002"]
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    manifest = read_manifest(checkpoint)
    assert manifest.step == 3 and manifest.recipe["name"] == "small"
    roles = {name: (role.world_size, role.layout, role.optimizer_step) for name, role in manifest.roles.items()}
    assert roles == {"actor": (2, "ep=2 dp=2", 1), "critic": (1, str(Layout()), 2)}
    listed = {entry.path for entry in manifest.files}
    there = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert there - listed == {"manifest.json"}
    assert {"driver.json", "groups-ended.safetensors", "model/config.json", "model/tokenizer.json"} < listed
    for role, files in {"actor": 2, "critic": 1}.items():
        ranks = {path.split("_")[2] for path in listed if path.startswith(f"{role}/__") and path.endswith(".distcp")}
        assert f"{role}/.metadata" in listed and len(ranks) == files
    state = RunState.read(checkpoint)
    assert state.groups is not None and state.groups.ended is not None
    assert state.groups.ended.responses() == a_batch().responses()
    assert state.algorithm == {"kl_controller": {"coefficient": 3.1}}
    logged = records(tmp_path)
    assert [(record["phase"], record["step"]) for record in logged] == [("checkpoint", step) for step in (1, 2, 3)]
    state_bytes = {name: 12 * role.parameters for name, role in manifest.roles.items()}
    for record in logged:
        written, on_host = record["checkpoint/written_bytes"], record["checkpoint/host_bytes"]
        assert sum(state_bytes.values()) <= written < 1.1 * sum(state_bytes.values())
        assert record["checkpoint/stall_ms"] > 0 and record["checkpoint/complete_after_sec"] > 0
        # The critic's only rank holds a copy of all of it, which is more than any of the actor's.
        assert state_bytes["critic"] <= on_host < 1.1 * state_bytes["critic"] if async_save == "true" else on_host == 0


def test_the_best_of_another_directory_keeps_none_of_this_one(stage: Stage, tmp_path: Path) -> None:
    """A run may be resumed under another name."""

    def measured(step: int, value: float) -> Measurements:
        return Measurements(last={"sums": MeasuredSet("beef", "accuracy", step, 12, 1, {"pass@1": value})})

    sets = ["evaluation.sums.data.path=sums.jsonl", "evaluation.sums.interval=1"]
    best = ["checkpoint.keep_best.metric=eval/sums/pass@1", "checkpoint.keep_last_k=1"]
    with checkpoints(stage, tmp_path, *sets, *best) as saving:
        saving.resume(Best("eval/sums/pass@1", 40, 0.8, "beef"))
        for step, value in ((41, 0.75), (42, 0.5), (43, 0.625)):
            saving.save(stage.trained, a_state(step).evaluated(measured(step, value), 9))
            saving.wait()
        assert complete_checkpoints(tmp_path) == ["step-00000043", "step-00000041"]
        saving.resume(saving.best)
        assert saving.best is not None and saving.best.step == 41


def test_what_is_measured_after_a_save_reaches_its_checkpoint(stage: Stage, tmp_path: Path) -> None:
    def measured(step: int, value: float) -> Measurements:
        return Measurements(last={"sums": MeasuredSet("beef", "accuracy", step, 12, 1, {"pass@1": value})})

    metric, root = "eval/sums/pass@1", tmp_path / "checkpoints"
    sets = ["evaluation.sums.data.path=sums.jsonl", "evaluation.sums.interval=1"]
    best = [f"checkpoint.keep_best.metric={metric}", "checkpoint.keep_last_k=1"]
    with checkpoints(stage, tmp_path, *sets, *best) as saving:
        saving.save(stage.trained, a_state(1).evaluated(measured(1, 0.5), 9))
        saving.wait()
        saving.save(stage.trained, replace(a_state(2), evaluation_due=True))
        saving.wait()
        assert complete_checkpoints(tmp_path) == [
            "step-00000002",
            "step-00000001",
        ]  # the best so far, and one that may be better
        recorded = read_best(root / "step-00000002")
        assert recorded is not None and recorded.step == 1 and value_of(root / "step-00000002", metric) is None
        saving.evaluated(2, measured(2, 0.75), 18)
        recorded = read_best(root / "step-00000002")
        assert recorded is not None and (recorded.step, recorded.value) == (2, 0.75) and recorded == saving.best
        assert value_of(root / "step-00000002", metric) == 0.75
        saving.save(stage.trained, replace(a_state(3), evaluation_due=True))
        saving.evaluated(3, measured(3, 0.25), 27)  # before the checkpoint is whole
        saving.wait()
    assert complete_checkpoints(tmp_path) == ["step-00000003", "step-00000002"]
    state = RunState.read(root / "step-00000003")
    assert (state.evaluation_due, state.samples_drawn, state.best) == (False, 27, recorded)
    assert state.measurements == measured(3, 0.25) and not (root / "step-00000003" / RESULTS).exists()


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
    return _limit_files(stage.pids("actor"))


def _large_files_of_the_critic(stage: Stage, root: Path) -> Any:
    return _limit_files(stage.pids("critic"))


def _limit_files(pids: list[int]) -> Any:
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    def heal() -> None:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return heal


def _busy_critic(stage: Stage, root: Path) -> Any:
    """The critic cannot begin: it saves already, into another directory."""
    other = root.with_name("other")
    other.mkdir()
    [begun] = stage.trained["critic"].begin_checkpoint(other, background=True).result()
    assert isinstance(begun, CheckpointBegun)
    return lambda: None


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
    "files of one role may not grow": (_large_files_of_the_critic, ": critic rank 0: "),
    "one role does not begin": (_busy_critic, "critic rank 0: save to {root}/step-00000002/critic: the one to "),
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
        saving.save(stage.trained, a_state(1))
        saving.wait()
        heal = spoil(stage, root)
        capfd.readouterr()
        try:
            line = f"the checkpoint of step 2 could not be saved in {root}/step-00000002: "
            if on_failure == "stop":
                with pytest.raises(EngineError) as caught:
                    saving.save(stage.trained, a_state(2))
                    saving.wait()
                error = str(caught.value)
            else:
                saving.save(stage.trained, a_state(2))
                saving.wait()
                [error] = capfd.readouterr().err.splitlines()
                error = error.removeprefix("hybridflow: ")
                assert error.endswith("; training continues")
            assert error.startswith(line) and cause.format(root=root) in error, error
        finally:
            heal()
        assert all(has_none_under_way(group) for group in stage.trained.values())
        assert complete_checkpoints(tmp_path) == ["step-00000001"]
        assert not (root / "step-00000002").exists()
        saving.save(stage.trained, a_state(3))
        saving.wait()
    assert complete_checkpoints(tmp_path) == ["step-00000003"]
    failed = [record for record in records(tmp_path) if "checkpoint/failed" in record]
    assert [(record["step"], record["checkpoint/failed"]) for record in failed] == [(2, 1)]


def test_a_whole_checkpoint_is_never_replaced_and_another_is_moved_away(stage: Stage, tmp_path: Path) -> None:
    with checkpoints(stage, tmp_path) as saving:
        saving.save(stage.trained, a_state(1))
        saving.wait()
        saving.save(stage.trained, a_state(1))
        saving.wait()
    assert [record.get("checkpoint/failed") for record in records(tmp_path)] == [None, 1]
    assert complete_checkpoints(tmp_path) == ["step-00000001"]
    (tmp_path / "checkpoints" / "step-00000001" / "driver.json").unlink()
    with checkpoints(stage, tmp_path / "next", f"checkpoint.dir={tmp_path}/checkpoints") as saving:
        saving.save(stage.trained, a_state(1))
        saving.wait()
    assert complete_checkpoints(tmp_path) == ["step-00000001"]
    assert (tmp_path / "checkpoints" / "step-00000001.1" / "manifest.json").is_file()


def test_a_checkpoint_that_vanishes_while_it_is_written(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with checkpoints(stage, tmp_path) as saving:
        saving.save(stage.trained, a_state(1))
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000001", ignore_errors=True)
        saving.wait()
        assert "the checkpoint of step 1 could not be saved" in capfd.readouterr().err
        saving.save(stage.trained, a_state(2))
        saving.wait()
    assert complete_checkpoints(tmp_path) == ["step-00000002"]


def test_a_run_that_ends_early_leaves_no_partial_checkpoint(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="a role failed"), checkpoints(stage, tmp_path) as saving:
        saving.save(stage.trained, a_state(1))
        saving.wait()
        saving.save(stage.trained, a_state(2))
        for group in stage.trained.values():  # as when their processes end
            group.abandon_checkpoint().result()
        raise EngineError("a role failed")
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]
    # What a killed one left goes when the next run starts; the directory is one run's at a time.
    (tmp_path / "checkpoints" / "step-00000002" / "actor").mkdir(parents=True)
    with checkpoints(stage, tmp_path / "next", f"checkpoint.dir={tmp_path}/checkpoints"):
        assert complete_checkpoints(tmp_path) == ["step-00000001"]
        assert not (tmp_path / "checkpoints" / "step-00000002").exists()
        with pytest.raises(UserError, match=r"checkpoint\.dir: a run in .* is going on"):
            checkpoints(stage, tmp_path / "third", f"checkpoint.dir={tmp_path}/checkpoints").__enter__()


class _Answers:
    """Answers of one rank, for which the caller waits as for those of a group."""

    def __init__(self, termination: Termination, answer: object) -> None:
        self._termination, self._answer = termination, answer

    def result(self) -> list[object]:
        with self._termination.waiting():
            return [self._answer]


class _OneRank:
    """A group whose rank ends a save once, as a worker does. A signal comes in the middle of that."""

    def __init__(self, termination: Termination) -> None:
        self._termination = termination
        self._in_flight = False

    def begin_checkpoint(self, directory: Path, *, background: bool) -> _Answers:
        self._in_flight = True
        summary = RoleSummary("tp1", 1, "float32", value_head=False, parameters=1, optimizer_step=1)
        return _Answers(self._termination, CheckpointBegun(SaveStart(0.0, 0, 0), summary))

    def checkpoint_written(self) -> _Answers:
        return _Answers(self._termination, True)

    def finish_checkpoint(self) -> _Answers:
        ended: object = [] if self._in_flight else CheckpointFailure("no save is in flight")
        if self._in_flight:
            os.kill(os.getpid(), signal.SIGTERM)
        self._in_flight = False
        return _Answers(self._termination, ended)

    def abandon_checkpoint(self) -> _Answers:
        return _Answers(self._termination, None)


def test_an_abandoned_step_completes_the_save_that_it_was_completing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_recipe(tmp_path / "runs", f"checkpoint.dir={tmp_path}/checkpoints")
    run, termination = prepare(recipe), Termination()
    monkeypatch.setattr("hybridflow.checkpoint.manager.termination", termination)
    saving = Checkpoints(recipe, run.model_directory, Metrics(recipe.metrics, tmp_path / "metrics"))
    with termination.handled(), saving:
        termination.begin()
        with termination.saves(20.0):
            saving.save({"actor": _OneRank(termination)}, a_state(1))  # type: ignore[dict-item]
            with pytest.raises(Abandoned), termination.abandonable():
                saving.poll()
                with termination.waiting():
                    pass
            assert termination.stop_requested
            saving.wait()
            assert saving.has(1)
            termination.settle()
    run.lock.close()


def test_no_role_waits_for_another_to_begin(stage: Stage, tmp_path: Path) -> None:
    actor = [psutil.Process(pid) for pid in stage.pids("actor")]
    critic = tmp_path / "checkpoints" / "step-00000001" / "critic"
    with checkpoints(stage, tmp_path) as saving, ThreadPoolExecutor(1) as thread:
        for rank in actor:
            rank.suspend()
        try:
            begun = thread.submit(saving.save, stage.trained, a_state(1))
            deadline = time.monotonic() + 30
            while not list(critic.glob("__0_*")) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert list(critic.glob("__0_*")) and not begun.done()
        finally:
            for rank in actor:
                rank.resume()
        begun.result(60)
        saving.wait()
    assert complete_checkpoints(tmp_path) == ["step-00000001"]


def test_when_a_checkpoint_is_due(stage: Stage, tmp_path: Path) -> None:
    def due(*overrides: str) -> list[int]:
        recipe = a_recipe(tmp_path, *overrides)
        metrics = Metrics(recipe.metrics, tmp_path / str(len(list(tmp_path.iterdir()))))
        saving = Checkpoints(recipe, stage.run.model_directory, metrics)
        return [step for step in range(8) if saving.due(step)]

    assert due("trainer.steps=7", "checkpoint.save_interval=3") == [0, 3, 6, 7]
    assert due("trainer.steps=7", "checkpoint.save_interval=3", "warmup=null") == [3, 6, 7]
    assert due("trainer.steps=7", "checkpoint.save_interval=null") == []


def test_a_role_that_dies_leaves_no_other_with_a_save_under_way(stage: Stage, tmp_path: Path) -> None:
    """The last test, since the critic is gone after it."""
    [rank] = [psutil.Process(pid) for pid in stage.pids("critic")]
    with checkpoints(stage, tmp_path) as saving:
        rank.kill()
        with pytest.raises(RankError, match="critic rank 0"):
            saving.save(stage.trained, a_state(1))
        assert has_none_under_way(stage.trained["actor"])
    assert list((tmp_path / "checkpoints").glob("step-*")) == []

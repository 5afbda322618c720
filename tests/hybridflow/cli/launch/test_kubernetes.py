"""`hybridflow launch kubernetes`, and the files of `launch/kubernetes/`, against the published schemas."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.cli.main import main
from hybridflow.cluster.devices.device_map import Node
from hybridflow.cluster.ray.cluster_nodes import ROLE_LABEL
from hybridflow.cluster.ray.stop_driver import is_driver
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.kubernetes import errors
from tests.support.runs import DEMO, ROOT

FILES = ROOT / "launch/kubernetes"
APART = ["placement.actor=role:train", "placement.rollout=role:rollout", "train.layout={}"]
GIVEN = ["--nodes", "4", "--gpus-per-node", "8", "--image", "registry.example/hf:1", "--claim", "shared"]
ROLES = ["--role", "train=2", "--role", "rollout=1", "--role", "reward=1"]


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return the output of the command."""
    assert main(["launch", "kubernetes", *words, "--dry-run"]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def objects(text: str) -> dict[str, dict[str, Any]]:
    """Return the objects by their kind."""
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of pods, the head's first."""
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def check_job(job: dict[str, Any], config_map: dict[str, Any], account: dict[str, Any]) -> None:
    """Check what KubeRay's operator refuses beyond the schema, and what a run needs of it."""
    assert errors(job) == [] and errors(config_map) == [] and errors(account) == []
    assert len(job["metadata"]["name"]) <= 47
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and spec["backoffLimit"] >= 0
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert spec["rayClusterSpec"]["rayVersion"] == f"{_ray_version()}"
    assert account["automountServiceAccountToken"] is False
    for group in groups(job):
        assert "labels" not in group["rayStartParams"]
        pod = group["template"]["spec"]
        container = pod["containers"][0]
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert volumes[mounts["/etc/hybridflow"]]["configMap"]["name"] == config_map["metadata"]["name"]
        assert "persistentVolumeClaim" in volumes[mounts[container["workingDir"]]]
        assert pod["terminationGracePeriodSeconds"] > int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    for group in groups(job)[1:]:
        assert group["minReplicas"] == group["maxReplicas"] == group["replicas"]


def _ray_version() -> str:
    import ray

    return str(ray.__version__)


def test_files_that_are_edited_by_hand() -> None:
    loaded = [yaml.safe_load(path.read_text()) for path in sorted(FILES.glob("*.yaml"))]
    by_kind = {manifest["kind"]: manifest for manifest in loaded}
    assert set(by_kind) == {"ServiceAccount", "ConfigMap", "RayJob"}
    check_job(by_kind["RayJob"], by_kind["ConfigMap"], by_kind["ServiceAccount"])
    job = by_kind["RayJob"]
    recipe = by_kind["ConfigMap"]["data"]["recipe.yaml"]
    assert job["spec"]["entrypoint"].split()[2] == "/etc/hybridflow/recipe.yaml"
    assert [group["labels"] for group in groups(job)] == [{ROLE_LABEL: role} for role in ("train", "train", "rollout")]
    assert "base: /workspace/hybridflow/launch/recipes/" in recipe


def test_the_recipe_of_the_files_fits_their_nodes(tmp_path: Path) -> None:
    config_map = yaml.safe_load((FILES / "recipe.yaml").read_text())
    path = tmp_path / "recipe.yaml"
    path.write_text(config_map["data"]["recipe.yaml"].replace("/workspace/hybridflow", str(ROOT)))
    nodes = [Node(f"node {index}", 8, 64, role) for index, role in enumerate(("train", "train", "rollout"))]
    check_recipe(load_recipe(path, [f"run_dir={tmp_path}"]), nodes, gpu_bytes=141 * 10**9, host_bytes=2 * 10**12)


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [DEMO, *GIVEN, *ROLES, "--namespace", "team", "--max-restarts", "7", "--cpu-slots", "16"]
    by_kind = objects(
        printed(capsys, *words, "name=My_Run", *APART, "checkpoint.on_stop_s=300", "checkpoint.save_interval=9")
    )
    job = by_kind["RayJob"]
    check_job(job, by_kind["ConfigMap"], by_kind["ServiceAccount"])
    assert {manifest["metadata"]["namespace"] for manifest in by_kind.values()} == {"team"}
    assert job["metadata"]["name"] == "hybridflow-my-run"
    assert job["spec"]["backoffLimit"] == 7
    assert job["spec"]["entrypoint"] == "hybridflow train /etc/hybridflow/recipe.yaml placement.cluster=auto --again"
    head, train, rollout, reward = groups(job)
    assert [(group["groupName"], group["replicas"]) for group in (train, rollout, reward)] == [
        ("train", 1),
        ("rollout", 1),
        ("reward", 1),
    ]
    assert [group["labels"][ROLE_LABEL] for group in (head, train, rollout, reward)] == [
        "train",
        "train",
        "rollout",
        "reward",
    ]
    gpus = [
        group["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for group in groups(job)
    ]
    assert gpus == ["8", "8", "8", None]
    for group in groups(job):
        assert group["rayStartParams"] == {"num-cpus": "16"}
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 300
        assert group["template"]["spec"]["containers"][0]["image"] == "registry.example/hf:1"
        claims = [volume.get("persistentVolumeClaim") for volume in group["template"]["spec"]["volumes"]]
        assert {"claimName": "shared"} in claims


def test_the_recipe_is_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    derived = tmp_path / "derived.yaml"
    derived.write_text(f"base: {DEMO}\nname: derived\ntrain: {{optimizer: {{lr: 1e-5}}}}\n")
    overrides = [*APART, 'reward.functions=[{name: a, path: "it\'s.py:score"}]', "seed=7"]
    by_kind = objects(printed(capsys, str(derived), *GIVEN, *ROLES, *overrides))
    copied = tmp_path / "copied.yaml"
    copied.write_text(by_kind["ConfigMap"]["data"]["recipe.yaml"])
    assert "base" not in yaml.safe_load(copied.read_text())
    assert load_recipe(copied) == load_recipe(derived, overrides)


def test_long_names_that_begin_alike_are_of_different_objects(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [objects(printed(capsys, DEMO, *GIVEN, f"name={'long-' * 9}{end}"))["RayJob"] for end in "ab"]
    names = [job["metadata"]["name"] for job in jobs]
    assert names[0] != names[1] and {len(name) for name in names} == {47}


def test_without_roles(capsys: pytest.CaptureFixture[str]) -> None:
    job = objects(printed(capsys, DEMO, *GIVEN))["RayJob"]
    head, workers = groups(job)
    assert "labels" not in head and "labels" not in workers
    assert (workers["groupName"], workers["replicas"]) == ("workers", 3)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["placement.cluster=10.0.0.1:6379"], "placement.cluster=10.0.0.1:6379: launch kubernetes makes a cluster for"),
        (["--role", "trainer=4"], "--role trainer=4: expected ROLE=N, where ROLE is one of train, rollout, reward"),
        (["--role", "train=3"], "--role train=3: 3 nodes, expected 4 (--nodes)"),
        (["placement.actor=role:train"], "placement.actor: device map role:train: no node has this role"),
        (
            ["placement.actor=cuda:31-32"],
            "placement.actor: device map cuda:31-32: there is no cuda:32, the cluster (4 ",
        ),
        (["--image", "a b"], "--image a b: expected such as registry.example/hybridflow:1"),
        (["--memory-per-node", "lots"], "--memory-per-node lots: expected such as 512Gi"),
        (["--partition", "gpu"], "--partition is an option of launch slurm; expected none of it with kubernetes"),
        (["--max-restarts", "-1"], "--max-restarts -1: expected at least 0"),
        (
            ["run_dir=/scratch"],
            "run_dir=/scratch is in each pod alone; expected a directory on the volume: relative, or",
        ),
        (["overwrite=true"], "overwrite=true: each start of the job's driver would begin again; expected another name"),
        (["network.preset=roce"], "network.preset=roce is set with placement.cluster, whose processes have the"),
        (
            ["model.create=null", "model.path=https://me:password@host/model"],
            "model.path is a secret, which whoever may read config maps would see",
        ),
    ],
)
def test_refused(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, DEMO, *GIVEN, *words, code=2)
    assert output.startswith(f"hybridflow: {line}"), output
    assert len(output.splitlines()) == 1


def test_options_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, DEMO, "--nodes", "1", code=2)
    assert output.startswith("hybridflow: launch kubernetes: --image is missing: expected such as registry.example/")


def kubectl(directory: Path, script: str) -> None:
    """A stand-in on PATH."""
    path = directory / "kubectl"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_objects_go_to_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["launch", "kubernetes", DEMO, *GIVEN]
    assert main(command) == 2
    assert "there is no kubectl on this host; --dry-run prints the objects" in capsys.readouterr().err
    kubectl(tmp_path, f'echo "$@" > {tmp_path}/words; /bin/cat > {tmp_path}/given; echo rayjob.ray.io/it created')
    assert main(command) == 0
    assert capsys.readouterr().out == "rayjob.ray.io/it created\n"
    assert (tmp_path / "words").read_text() == "apply -f -\n"
    assert (tmp_path / "given").read_text() == printed(capsys, DEMO, *GIVEN)
    kubectl(tmp_path, "echo 'error: no cluster' >&2; exit 1")
    assert main(command) == 2
    assert capsys.readouterr().err == "hybridflow: launch kubernetes: kubectl refuses: error: no cluster\n"


def test_the_schemas_find_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    job = objects(printed(capsys, DEMO, *GIVEN))["RayJob"]
    for change in (
        lambda job: job["spec"].update(backofLimit=1),
        lambda job: job["spec"].update(backoffLimit="three"),
        lambda job: job["spec"]["rayClusterSpec"]["authOptions"].update(mode="password"),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("template"),
        lambda job: groups(job)[1]["template"]["spec"]["containers"][0].update(imagePullPolice="Always"),
        lambda job: job["metadata"].update(nam="x"),
    ):
        wrong = json.loads(json.dumps(job))
        change(wrong)
        assert errors(wrong) != []


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ([sys.executable, "/usr/local/bin/hybridflow", "train", "recipe.yaml"], True),
        ([sys.executable, "-m", "hybridflow", "train", "recipe.yaml"], True),
        (["/bin/sh", "-c", "hybridflow train recipe.yaml"], False),
        ([sys.executable, "-m", "hybridflow", "logs", "train"], False),
        ([sys.executable, "/tmp/other", "train"], False),
        ([], False),
    ],
)
def test_which_process_is_a_driver(command: list[str], is_one: bool) -> None:
    assert is_driver(command) is is_one

"""The objects of a run on Kubernetes: those of `launch/kubernetes/`, filled in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hybridflow.cluster.devices.device_map import REWARD

Manifest = dict[str, Any]
NAME, RECIPE, DATA = "hybridflow", "/etc/hybridflow/recipe.yaml", "/data"
"""Name of the service account; paths in pods of the recipe and of the volume, in which they start."""
ROLE = "hybridflow.role"
GPU = "nvidia.com/gpu"
# Beyond the time to save: for the end of the ranks, and of the driver.
_END_S = 60


@dataclass(frozen=True)
class KubernetesRun:
    """A run on Kubernetes.

    Args:
        name: of its objects: at most 47 letters, digits and `-`.
        recipe: text of it, with its bases and overrides.
        overrides: that go onto the command line, and options: words without anything that a shell reads.
        roles: of each node, the first one Ray's head; None for anything.
        image: of the pods.
        claim: persistent volume claim that all pods see.
        gpus: of each node but those for rewards.
        cpus: cores of each node.
        memory: of each node, as Kubernetes writes it.
        shared_memory: of each node, and part of its memory.
        cpu_slots: of each node; one a core if None.
        restarts: after failures and pre-emption.
        save_s: that the run may take to save when it has to end.
        namespace: of all objects; that of kubectl if None.
    """

    name: str
    recipe: str
    overrides: Sequence[str]
    roles: Sequence[str | None]
    image: str
    claim: str
    gpus: int
    cpus: int
    memory: str
    shared_memory: str
    cpu_slots: int | None = None
    restarts: int = 0
    save_s: float = 0.0
    namespace: str | None = None


def manifests(texts: Sequence[str], run: KubernetesRun) -> list[Manifest]:
    """The objects of a run.

    Args:
        texts: the files of `launch/kubernetes/`.
        run: what they are filled in with.
    """
    loaded = [_loaded(text) for text in texts]
    for manifest in loaded:
        if run.namespace is not None:
            manifest["metadata"]["namespace"] = run.namespace
        if manifest["kind"] == "ConfigMap":
            manifest["metadata"]["name"] = _recipe_name(run)
            manifest["data"] = {"recipe.yaml": run.recipe}
        elif manifest["kind"] == "RayJob":
            _fill_job(manifest, run)
    return loaded


def as_yaml(objects: Sequence[Manifest]) -> str:
    """Objects as kubectl reads them; long texts stand as they are."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _loaded(text: str) -> Manifest:
    # By JSON: what an alias repeats becomes an object of its own.
    manifest: Manifest = json.loads(json.dumps(yaml.safe_load(text)))
    return manifest


def _recipe_name(run: KubernetesRun) -> str:
    return f"{run.name}-recipe"


def _fill_job(job: Manifest, run: KubernetesRun) -> None:
    job["metadata"]["name"] = run.name
    spec = job["spec"]
    spec["entrypoint"] = " ".join(["hybridflow", "train", RECIPE, *run.overrides])
    spec["backoffLimit"] = run.restarts
    spec["submitterPodTemplate"]["spec"]["containers"][0]["image"] = run.image
    cluster = spec["rayClusterSpec"]
    template = cluster["headGroupSpec"]["template"]
    cluster["headGroupSpec"] = _group(template, run, run.roles[0])
    others = Counter(run.roles[1:])
    cluster["workerGroupSpecs"] = [
        {"groupName": role or "workers", "replicas": count, "minReplicas": count, "maxReplicas": count}
        | _group(template, run, role)
        for role, count in others.items()
    ]


def _group(template: Manifest, run: KubernetesRun, role: str | None) -> Manifest:
    pod: Manifest = json.loads(json.dumps(template))
    spec = pod["spec"]
    end_s = round(run.save_s) + _END_S // 2
    spec["terminationGracePeriodSeconds"] = end_s + _END_S // 2
    container = spec["containers"][0]
    container["image"] = run.image
    gpus = {GPU: str(run.gpus)} if run.gpus and role != REWARD else {}
    amounts = {"cpu": str(run.cpus), "memory": run.memory} | gpus
    container["resources"] = {"requests": dict(amounts), "limits": dict(amounts)}
    container["lifecycle"]["preStop"]["exec"]["command"][-1] = str(end_s)
    for variable in container["env"]:
        if variable["name"] == "RAY_JOB_STOP_WAIT_TIME_S":
            variable["value"] = str(end_s)
    for volume in spec["volumes"]:
        match volume["name"]:
            case "shared-mem":
                volume["emptyDir"]["sizeLimit"] = run.shared_memory
            case "recipe":
                volume["configMap"]["name"] = _recipe_name(run)
            case "data":
                volume["persistentVolumeClaim"]["claimName"] = run.claim
    labels = {} if role is None else {"labels": {ROLE: role}}
    slots = {} if run.cpu_slots is None else {"num-cpus": str(run.cpu_slots)}
    return {**labels, "rayStartParams": slots, "template": pod}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)

"""Short runs of every algorithm on every kind of placement, and all figures of them that a reorganisation keeps.

A case is a recipe on top of one in `launch/recipes`. Most are trained by the command. Those of `OWN_LOOP` are stepped
by `PPOTrainer`, which also returns the columns of every rollout: log-probs, rewards, values, advantages, returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import safe_open

from tests.support.warm import warm_python

ROOT = Path(__file__).parents[2]
VALUES = Path(__file__).parent / "reference_values"
RECORD = "python -m tests.integration.record_reference_values"
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Tolerances of comparisons between processors."""
_LIMIT_S = 850.0
_SHOWN = 20
_DIGEST_CHARACTERS = 16

ONE_RANK = {"train": {"layout": {"ep": 1}}}
TENSOR_PARALLEL = {"train": {"layout": {"ep": 1, "tp": 2}}}
PIPELINE = {"train": {"layout": {"ep": 1, "pp": 2}}}

COMMON: dict[str, Any] = {
    "seed": 7,
    "train": {"optimizer": {"lr": 1.0e-3, "warmup_steps": 0}},
    "rollout": {"engine": {"deterministic": True}, "sampling": {"max_new_tokens": 5}, "samples_per_prompt": 4},
    "reward": {"functions": [{"name": "characters", "path": f"{ROOT}/tests/integration/reward.py:score"}]},
    "data": {"arithmetic": {"train_size": 10}},
    "warmup": {"steps": 2, "batch_size": 16},
    "trainer": {
        "steps": 3,
        "prompts_per_step": 4,
        "mini_batches": 2,
    },
    "evaluation": {"eval": {"before_train": False, "prompts": 8, "samples": 1}},
}
"""Settings of every case. The prompts begin a second epoch within step 3."""

OWN_LOOP = ("grpo-colocate", "ppo-colocate", "remax-colocate")

CASES: dict[str, dict[str, Any]] = {
    "grpo-colocate": {
        "base": "demo",
        **TENSOR_PARALLEL,
        "algorithm": {"name": "grpo", "kl_coef": 0.05, "entropy_coef": 0.01},
        "rollout": {"engine": {"tp": 2, "ep": 2}},
        "placement": {"actor": "cpu:0-1", "rollout": "cpu:0-1"},
    },
    "grpo-one-step-apart": {
        "base": "demo",
        "algorithm": {
            "name": "grpo",
            "kl_coef": 0.0,
            "normalise_advantages_by_std": False,
            "clip_high": 0.28,
            "dual_clip": 3.0,
            "loss_aggregation": "seq-mean-token-sum-norm",
            "loss_normalising_length": 5,
        },
        "placement": {"actor": "cpu:0-1", "rollout": "cpu:2-3"},
        "trainer": {"max_staleness": 1},
    },
    "ppo-colocate": {
        "base": "placement/colocate",
        **ONE_RANK,
        "critic": ONE_RANK,
        "algorithm": {"critic_warmup_steps": 1, "gamma": 0.9},
        "placement": {"pools": {"all": "cpu:0"}},
    },
    "ppo-split": {
        "base": "placement/split",
        **PIPELINE,
        "critic": TENSOR_PARALLEL,
        "algorithm": {"critic_warmup_steps": 0, "whiten_advantages": False, "loss_aggregation": "seq-mean-token-mean"},
        "trainer": {"epochs": 2},
    },
    "ppo-standalone": {
        "base": "placement/standalone",
        **ONE_RANK,
        "critic": ONE_RANK,
        "algorithm": {"critic_warmup_steps": 0, "kl_estimator": "k2"},
        "placement": {"pools": {"actor": "cpu:0", "reference": "cpu:1", "critic": "cpu:2", "rollout": "cpu:3"}},
    },
    "remax-colocate": {
        "base": "remax",
        "algorithm": {"kl_coef": 0.05},
        "placement": {"actor": "cpu:0-1", "rollout": "cpu:0-1"},
    },
    "remax-standalone": {
        "base": "remax",
        **ONE_RANK,
        "algorithm": {"kl_coef": 0.0},
        "placement": {"actor": "cpu:0", "rollout": "cpu:1"},
    },
    "safe_rlhf-colocate": {
        "base": "safe_rlhf",
        **ONE_RANK,
        "critic": ONE_RANK,
        "cost_critic": ONE_RANK,
        "algorithm": {"critic_warmup_steps": 0},
        "placement": {"actor": "cpu:0", "rollout": "cpu:0"},
    },
}


def run_case(name: str, directory: Path, **changes: Any) -> dict[str, Any]:
    """Run a case in a directory, with changes of its settings; what it found.

    Raises:
        AssertionError: it failed.
    """
    recipe = directory / f"{name}.yaml"
    content = merged(COMMON, CASES[name] | changes) | {"name": name, "run_dir": str(directory)}
    content["base"] = str(ROOT / f"launch/recipes/{content['base']}.yaml")
    recipe.write_text(yaml.safe_dump(content))
    run = directory / name
    if name in OWN_LOOP:
        arguments = ["tests.integration.own_loop", str(recipe), str(run)]
    else:
        arguments = ["hybridflow.cli", "train", str(recipe)]
    run_module(*arguments)
    values = run_figures(run)
    if name in OWN_LOOP:
        values["columns"] = json.loads((run / "columns.json").read_text())
    return values


def run_figures(run: Path) -> dict[str, Any]:
    """All figures of a run that are the same on every run: metrics, texts, and the exported model."""
    return {
        "metrics": _metrics(run / "metrics.jsonl"),
        "samples": _json_lines(run / "samples.jsonl"),
        "model": _model(run / "model"),
    }


def platform() -> dict[str, str]:
    """Return what the last bits of a sum of floats depend on: CPU capability, processor and versions of libraries."""
    versions = {name: version(name) for name in ("torch", "megatron-core", "sglang")}
    return versions | {"cpu": f"{torch.backends.cpu.get_cpu_capability()}, {_processor()}"}


def run_module(*arguments: str) -> None:
    """Run a Python module as a program of its own, with one thread a process.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        [warm_python(), "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def stored(name: str) -> dict[str, Any]:
    """Return the recorded values of a case: `platform` and `values`."""
    content: dict[str, Any] = json.loads((VALUES / f"{name}.json").read_text())
    return content


def expect_recorded(name: str, values: dict[str, Any]) -> None:
    """Check that the values of a case equal the recorded ones.

    Raises:
        AssertionError: it is not, or it is recorded with other versions.
    """
    recorded, here = stored(name), platform()
    of_versions = [
        {key: value for key, value in source.items() if key != "cpu"} for source in (recorded["platform"], here)
    ]
    assert of_versions[0] == of_versions[1], f"recorded with other versions; record the values anew by `{RECORD}`"
    expected = recorded["values"]
    if recorded["platform"]["cpu"] == here["cpu"]:
        lines = differences(values, expected)
    else:
        lines = differences(
            without_digests(values), without_digests(expected), relative=RELATIVE, absolute=ABSOLUTE
        )  # fmt: skip
    assert not lines, "\n".join([f"{len(lines)} values differ:", *lines[:_SHOWN]])


def store(name: str, values: dict[str, Any]) -> None:
    """Record a case. JSON has the shortest decimal of each float, which reads back as the same float."""
    (VALUES / f"{name}.json").parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in values.items()]
    content = f'{{"platform": {json.dumps(platform())},\n"values": {{\n' + ",\n".join(lines) + "}}\n"
    (VALUES / f"{name}.json").write_text(content)


def differences(actual: Any, expected: Any, *, relative: float = 0.0, absolute: float = 0.0, at: str = "") -> list[str]:
    """Return the differences between two trees of values, one line each; numbers bit for bit unless a tolerance is
    given.
    """
    if isinstance(actual, dict) and isinstance(expected, dict):
        lines = [f"{at}/{name}: only in one of the two" for name in sorted(actual.keys() ^ expected.keys())]
        pairs = [(actual[name], expected[name], name) for name in expected if name in actual]
    elif isinstance(actual, list) and isinstance(expected, list):
        lines = [] if len(actual) == len(expected) else [f"{at}: {len(actual)} values, expected {len(expected)}"]
        pairs = [(*pair, str(index)) for index, pair in enumerate(zip(actual, expected, strict=False))]
    else:
        same = actual == expected
        if not same and (relative or absolute) and _is_float(actual) and _is_float(expected):
            same = abs(actual - expected) <= absolute + relative * abs(expected)
        return [] if same else [f"{at}: {actual!r}, expected {expected!r}"]
    for one, other, name in pairs:
        lines += differences(one, other, relative=relative, absolute=absolute, at=f"{at}/{name}")
    return lines


def without_digests(values: dict[str, Any]) -> dict[str, Any]:
    """The values but for the digests of weights, of which only the norms may be compared with a tolerance."""
    return values | {"model": {name: norm for name, (_, norm) in values["model"].items()}}


def _is_float(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The other mapping over the base, key by key at every depth."""
    result = dict(base)
    for key, value in other.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if nested else value
    return result


def _metrics(path: Path) -> list[dict[str, Any]]:
    """All records but of checkpoints, without times, rates, memory and bytes."""
    return [
        {name: value for name, value in record.items() if not _varies(name)}
        for record in _json_lines(path)
        if record["phase"] != "checkpoint"
    ]


def _varies(name: str) -> bool:
    return name.endswith(("_ms", "_sec", "_mb", "_bytes", "mfu")) or name.startswith(("memory/", "device/"))


def _model(directory: Path) -> dict[str, list[Any]]:
    """Return a digest of the bytes and the norm of each exported tensor."""
    tensors: dict[str, list[Any]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                digest = hashlib.sha256(np.ascontiguousarray(tensor).tobytes()).hexdigest()[:_DIGEST_CHARACTERS]
                tensors[name] = [digest, float(np.linalg.norm(tensor.astype(np.float64)))]
    assert tensors, directory
    return tensors


def _processor() -> str:
    """Vendor, family and model: by these BLAS libraries choose their kernels."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = {name.strip(): value for name, _, value in (line.partition(":") for line in lines)}
    return " ".join(fields.get(name, "unknown").strip() for name in ("vendor_id", "cpu family", "model"))


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _lines(value: Any) -> str:
    """JSON with one element of a list or mapping a line, so that a difference is read by line."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "}"
    return "[\n" + ",\n".join(json.dumps(item) for item in value) + "]"

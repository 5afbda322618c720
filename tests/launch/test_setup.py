"""The set-up files: pins agree with each other, the script finds the right interpreter and says what is missing."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.image_requirements import canonical, missing

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "launch" / "setup.sh"


def pins(name: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip(" \\") for line in (ROOT / name).read_text().splitlines())
    lines = (line for line in lines if not line.startswith("--hash="))
    return {canonical(pin.partition("==")[0]): pin.partition("==")[2] for pin in lines if pin}


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_the_lock_holds_every_direct_pin(name: str) -> None:
    lock = pins("requirements.lock")
    assert all(lock[package] == version for package, version in pins(name).items())


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-dev.txt", "requirements-gpu.txt", "requirements-kubernetes.txt"]
)
def test_every_direct_dependency_has_a_reason(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        if "==" in line and not line.startswith("#"):
            assert above.startswith("# "), f"{name}: {line} has no comment above it"


def test_pins_are_exact_and_name_no_index() -> None:
    for file in ROOT.glob("requirements*.txt"):
        for line in file.read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                assert re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.+!-]+", line), f"{file.name}: {line}"


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-kubernetes.lock"])
def test_the_lock_has_a_hash_for_every_file_of_a_pin_and_names_no_index(name: str) -> None:
    lock = (ROOT / name).read_text()
    pin = r"[\w.-]+==[\w.+!-]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n(    # via .*\n|    # +.*\n)+"
    assert re.fullmatch(rf"({pin})+", lock)
    assert "/" not in lock.replace("-r requirements", "")


def test_what_kubernetes_adds_leaves_the_other_pins_as_they_are() -> None:
    lock, added = pins("requirements.lock"), pins("requirements-kubernetes.lock")
    assert {name: version for name, version in added.items() if name in lock and lock[name] != version} == {}
    assert pins("requirements-kubernetes.txt") == {"ray[default]": lock["ray"]} and added["ray"] == lock["ray"]


def test_everything_is_installed_by_its_hash() -> None:
    for file in (SETUP, ROOT / "Dockerfile"):
        commands = re.sub(r"\\\n\s*", "", file.read_text()).splitlines()
        installing = [line for line in commands if "pip install" in line and "--editable" not in line]
        assert installing and all("--require-hashes" in line for line in installing), file


def test_an_image_keeps_its_gpu_stack() -> None:
    names = ["torch==2.11.0", "ray==2.60.0", "numpy==2.3.5", "nvidia-nccl-cu13==2.28.9"]
    lock = "".join(
        f"{pin} \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n    # via\n    #   sglang\n" for pin in names
    )
    installed = {"torch": "2.11.0a0+nv26.03", "numpy": "2.3.5", "ray": "2.0.0"}
    assert missing(lock, installed) == ["ray==2.60.0 --hash=sha256:aa --hash=sha256:bb"]


def run_setup(path: Path, environment: dict[str, str], venv: Path) -> subprocess.CompletedProcess[str]:
    """The script with nothing on PATH but `path` and the system's own tools, and an empty home."""
    variables = {"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path)} | environment
    return subprocess.run([SETUP, venv], env=variables, capture_output=True, text=True, timeout=60)


def fake(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_says_in_one_line_that_python_is_missing(tmp_path: Path) -> None:
    for name in ("python3.12", "python3", "uv"):  # as a pyenv shim does that knows the command and refuses
        fake(tmp_path / name, "echo 'command not found' >&2; exit 127")
    result = run_setup(tmp_path, {}, tmp_path / "venv")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("set-up: no CPython 3.12 with venv found")


def test_refuses_a_named_python_that_is_not_312(tmp_path: Path) -> None:
    fake(tmp_path / "other", "exit 1")
    result = run_setup(tmp_path, {"PYTHON": str(tmp_path / "other")}, tmp_path / "venv")
    assert result.returncode == 1
    assert result.stderr == f"set-up: PYTHON={tmp_path}/other is not a CPython 3.12 with the venv module\n"


def test_finds_pyenvs_python_and_does_nothing_the_second_time(tmp_path: Path) -> None:
    for name in ("python3.12", "python3", "uv"):
        fake(tmp_path / name, "exit 127")
    # An interpreter that passes for a CPython 3.12 and whose venv has a python that installs nothing but says so.
    install = f'echo "$@" >> {tmp_path}/calls'
    fake(tmp_path / "installer", install)
    fake(
        tmp_path / ".pyenv/versions/3.12.9/bin/python",
        f'case "$*" in *"-m venv"*) mkdir -p "$4/bin"; cp {tmp_path}/installer "$4/bin/python";; esac',
    )
    first = run_setup(tmp_path, {}, tmp_path / "venv")
    assert first.returncode == 0, first.stderr
    calls = (tmp_path / "calls").read_text()
    assert "requirements.lock" in calls
    assert "--editable" in calls
    second = run_setup(tmp_path, {}, tmp_path / "venv")
    assert second.returncode == 0
    assert (second.stdout, (tmp_path / "calls").read_text()) == ("", calls)


def test_the_environment_in_use_was_made_from_the_lock() -> None:
    import importlib.metadata

    assert sys.version_info[:2] == (3, 12)
    different = {
        name: (version, installed_version)
        for name, version in pins("requirements.lock").items()
        if (installed_version := importlib.metadata.version(name)) != version
    }
    assert not different, f"installed differs from requirements.lock: {different}"
    assert os.access(SETUP, os.X_OK)

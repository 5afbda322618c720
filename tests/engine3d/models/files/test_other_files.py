"""Directories that people take for a HuggingFace model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.errors import UserError
from engine3d.models import check_weights, initialise_random, load_model_spec, model_spec
from tests.support.tiny_families import CONFIGS


def files(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}")
    return directory


def adapter(directory: Path) -> Path:
    files(directory, "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    return directory


NO_CONFIG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda at: at, r"has no config\.json \(it is empty\); expected a HuggingFace model directory"),
    "adapter": (adapter, r"has no config\.json \(it holds an adapter of Qwen/Qwen3-8B: merge it into its model first"),
    "cache": (
        lambda at: files(at, "refs/main", "snapshots/0a1b/config.json"),
        r"\(it is a model's folder of the Hub's cache: its files are in .*/snapshots/0a1b\)",
    ),
    "gguf": (lambda at: files(at, "m-Q4_K_M.gguf"), r"\(found m-Q4_K_M\.gguf: GGUF is not read\)"),
    "publisher": (
        lambda at: files(at, "params.json", "consolidated.00.pth"),
        r"\(found consolidated\.00\.pth: the publisher's own format is not read, take the HuggingFace one\)",
    ),
    "one level up": (lambda at: files(at, "merged/config.json"), r"\(its folder merged has\)"),
    "several": (lambda at: files(at, "b/config.json", "a/config.json"), r"\(its folders a, b have\)"),
    "other files": (lambda at: files(at, "notes.txt"), r"has no config\.json; expected a HuggingFace model directory"),
}


@pytest.mark.parametrize("kind", NO_CONFIG)
def test_directories_without_config_are_told_apart(tmp_path: Path, kind: str) -> None:
    make, message = NO_CONFIG[kind]
    with pytest.raises(UserError, match=rf"^model .*: .*{message}") as caught:
        load_model_spec(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"^model Qwen/Qwen3-8B: no such directory; .* first run hf download Qwen/Qwen3-8B"
    ):
        load_model_spec("Qwen/Qwen3-8B")
    with pytest.raises(UserError, match=r"no such directory; .* first run hf download Qwen/Qwen3-8B --local-dir"):
        load_model_spec(tmp_path / "Qwen/Qwen3-8B")  # as a recipe has it
    with pytest.raises(
        UserError, match=r"^model .*/absent: no such directory; expected one with a Hugg[a-zA-Z ]*config\.json$"
    ):
        load_model_spec(tmp_path / "absent")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(
        UserError, match=r"^model .*model\.gguf: is a GGUF file; expected a HuggingFace model directory"
    ):
        load_model_spec(tmp_path / "model.gguf")


def test_an_adapter_next_to_a_model_is_refused(tmp_path: Path) -> None:
    initialise_random(model_spec(CONFIGS["llama"]), tmp_path / "model", seed=1, dtype=torch.float32)
    adapter(tmp_path / "model")
    with pytest.raises(
        UserError, match=r"holds an adapter of Qwen/Qwen3-8B next to a model, and transformers would load"
    ):
        load_model_spec(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("pytorch_model.bin", r"; found pytorch_model\.bin, which is not read: load it with transformers and save"),
        ("model-00001-of-00002.safetensors", r"; found model-00001-of-00002\.safetensors$"),
        ("consolidated.safetensors", r"; found consolidated\.safetensors: the publisher's own format is not read"),
        ("m.gguf", r"; found m\.gguf: GGUF is not read"),
        ("README.md", "$"),
    ],
)
def test_directories_without_expected_weights(tmp_path: Path, name: str, form: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    (tmp_path / name).touch()
    spec: Any = load_model_spec(tmp_path)
    with pytest.raises(UserError, match=rf"has no weights; expected model\.safetensors or \S+\.json{form}"):
        check_weights(spec, tmp_path)

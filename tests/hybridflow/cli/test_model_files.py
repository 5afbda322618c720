"""Files of a model directory that `hybridflow check` refuses in one line, by name, before anything starts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import main
from hybridflow.config.initial_model import create_model
from hybridflow.config.recipe import load_recipe

DEMO = "launch/recipes/demo.yaml"
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "model.safetensors.index.json",
)


@pytest.fixture(scope="module")
def complete_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "whole"
    create_model(load_recipe(DEMO).model, directory, seed=0)
    return directory


@pytest.fixture
def model(complete_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete_model, tmp_path / "model"))


def refusal(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of `check`."""
    code = main(["check", DEMO, f"model={{path: {model}}}"])
    captured = capsys.readouterr()
    assert code == 2, captured
    (line,) = captured.err.splitlines()
    return line


def a_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def a_broken_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("../../blobs/0123")


def a_large_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1]", "expected a JSON object, found a list"),
        (b"5", "expected a JSON object, found a number"),
        (b"null", "expected a JSON object, found null"),
        (b"", "not valid JSON: it is empty"),
        (b'{"a": [1,', "not valid JSON: "),
        (b"\xef\xbb\xbf{}", "not valid JSON: it begins with a byte-order mark, expected UTF-8 without one"),
        (b'{"a": "\xff\xfe"}', "not a text file in UTF-8"),
        (a_pipe, "is a named pipe, expected a regular file"),
        (a_directory, "is a directory, expected a regular file"),
        (a_broken_link, "a link to a file that does not exist"),
        (a_large_file, "3,221,225,472 bytes, expected at most "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_file_that_is_no_json_object(
    model: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | Callable[[Path], None], reason: str
) -> None:
    if isinstance(content, bytes):
        (model / name).write_bytes(content)
    else:
        content(model / name)
    assert refusal(model, capsys).startswith(f"hybridflow: {model / name}: {reason}")


TOKEN = "expected the text of a token, an object with its content, or null, found"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("tokenizer.json", "added_tokens", None, "added_tokens: expected a list of objects with id and content, found"),
        ("tokenizer.json", "added_tokens", {"<eos>": 2}, "added_tokens: expected a list of objects with id and"),
        ("tokenizer.json", "model", [], "model: expected an object with vocab, found []"),
        ("tokenizer.json", "model", {"vocab": 5}, 'model: expected an object with vocab, found {"vocab": 5}'),
        ("tokenizer.json", "decoder", "x", 'decoder: expected an object with type, or null, found "x"'),
        ("tokenizer.json", "padding", 5, "the tokenizers library refuses it: "),
        ("tokenizer_config.json", "eos_token", 2, f"eos_token: {TOKEN} 2"),
        ("tokenizer_config.json", "added_tokens_decoder", [1], "added_tokens_decoder: expected objects with the"),
        ("tokenizer_config.json", "chat_template", 5, "chat_template: expected a text, a list of objects with name"),
        (
            "tokenizer_config.json",
            "model_max_length",
            "512",
            'model_max_length: expected a number or null, found "512"',
        ),
        ("tokenizer_config.json", "padding_side", "middle", 'padding_side: expected "left" or "right", found "middle"'),
        ("special_tokens_map.json", "eos_token", [2], f"eos_token: {TOKEN} [2]"),
        ("added_tokens.json", "<x>", "5", '<x>: expected the number of a token, found "5"'),
        ("generation_config.json", "eos_token_id", {}, "eos_token_id: expected the number of a token, a list of"),
        ("generation_config.json", "temperature", "1", 'temperature: expected a number or null, found "1"'),
        ("config.json", "eos_token_id", {}, "eos_token_id: expected the number of a token, a list of them, or null"),
        ("config.json", "bos_token_id", [1], "bos_token_id: expected the number of a token, or null, found [1]"),
        ("config.json", "dtype", "bf16", "dtype: expected bfloat16, float16, float32 or another of torch's"),
        ("config.json", "architectures", "Qwen3MoeForCausalLM", "architectures: expected a list of texts, found"),
        ("config.json", "num_hidden_layers", "2", "num_hidden_layers: expected a whole number of at least 1, found"),
        ("config.json", "hidden_act", None, "hidden_act: expected a text, found null"),
        ("config.json", "text_config", [], "text_config: expected an object, found []"),
    ],
)
def test_a_value_of_another_kind(
    model: Path, capsys: pytest.CaptureFixture[str], name: str, key: str, value: Any, reason: str
) -> None:
    path = model / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | {key: value}))
    assert refusal(model, capsys).startswith(f"hybridflow: {path}: {reason}")


@pytest.mark.parametrize("key", ["added_tokens", "model"])
def test_a_tokenizer_without_a_part(model: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    path = model / "tokenizer.json"
    values = json.loads(path.read_text())
    del values[key]
    path.write_text(json.dumps(values))
    assert refusal(model, capsys).startswith(f"hybridflow: {path}: has no {key}, expected a")


def test_a_template_that_is_no_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    assert refusal(model, capsys) == f"hybridflow: {model}/chat_template.jinja: not a text file in UTF-8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "not a safetensors file: its header is a list, expected an object"),
        (
            {"a": [1]},
            "damaged header: tensor a: expected dtype, a shape of whole numbers and two data_offsets, found [1]",
        ),
        ({"a": {"dtype": "F32", "shape": 4, "data_offsets": [0, 4]}}, "damaged header: tensor a: expected dtype, a"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "damaged header: tensor a: expected dtype, a shape of whole numbers"),
    ],
)
def test_a_header_of_another_kind(model: Path, capsys: pytest.CaptureFixture[str], header: object, reason: str) -> None:
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    assert refusal(model, capsys).startswith(f"hybridflow: {model}/model.safetensors: {reason}")

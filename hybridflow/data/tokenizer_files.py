"""Checks of the files of a HuggingFace tokenizer, with errors that name the file and the key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine3d.errors import shortened
from engine3d.input_files import MOST_LIST_BYTES, FileError, check_regular, read_json_object, read_text
from engine3d.models.files.weights import TOKENIZER_FILES

_LARGE = ("tokenizer.json", "vocab.json")
"""Parsed by the libraries alone, unless they fail."""
_MOST_BYTES = 512 << 20

type _Kind = tuple[Callable[[Any], bool], str]
"""A test of a value, and the name of those that pass it."""


def check_tokenizer_files(directory: Path) -> dict[str, Any]:
    """Check that the libraries can read the files: no pipes, no deep JSON, no values of other kinds.

    Returns:
        The values of tokenizer_config.json.

    Raises:
        UserError: names the file, and the key of a value.
    """
    for name in TOKENIZER_FILES:
        path = directory / name
        if not os.path.lexists(path):
            continue
        if path.suffix == ".json" and name not in _LARGE:
            _check_values(path, read_json_object(path, MOST_LIST_BYTES))
        elif path.suffix in (".jinja", ".txt"):
            read_text(path, MOST_LIST_BYTES)
        else:
            check_regular(path, _MOST_BYTES)
    return read_json_object(directory / "tokenizer_config.json", MOST_LIST_BYTES)


def check_vocabularies(directory: Path) -> None:
    """Find why the libraries could not load a tokenizer, in the large files that are only read for this.

    Raises:
        UserError: names the file, and the key of a value.
    """
    path = directory / "vocab.json"
    if path.exists() and not _is_object_of(_is_whole)(read_json_object(path, _MOST_BYTES)):
        raise FileError(path, "expected the number of each token by its text")
    path = directory / "tokenizer.json"
    if not path.exists():
        return
    values = read_json_object(path, _MOST_BYTES)
    for key in ("added_tokens", "model"):
        if key not in values:
            raise FileError(path, f"has no {key}, expected {_TOKENIZER[key][1]}")
    _check_kinds(path, values, _TOKENIZER)
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise FileError(path, f"the tokenizers library refuses it: {shortened(one_reason(error), 300)}") from None


def one_reason(error: Exception) -> str:
    """The words of a library's error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _check_values(path: Path, values: Mapping[str, Any]) -> None:
    if path.name == "added_tokens.json":
        _check_kinds(path, values, dict.fromkeys(values, (_is_whole, "the number of a token")))
    elif path.name == "generation_config.json":
        _check_kinds(path, values, _GENERATION)
    else:
        _check_kinds(path, values, _CONFIG)


def _check_kinds(path: Path, values: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    for key, (is_right, expected) in kinds.items():
        if key in values and not is_right(values[key]):
            raise FileError(path, f"{key}: expected {expected}, found {shortened(json.dumps(values[key]))}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _is_token(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, dict) and _is_text(value.get("content")))


def _is_numbered_token(value: Any) -> bool:
    return isinstance(value, dict) and _is_whole(value.get("id")) and _is_token(value)


def _is_list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_object_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))


def _any_of(*tests: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(test(value) for test in tests)


def _is_null(value: Any) -> bool:
    return value is None


def _is_named_template(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("name")) and _is_text(value.get("template"))


def _is_component(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and _is_text(value.get("type")))


def _is_vocabulary(value: Any) -> bool:
    vocabulary = value.get("vocab") if isinstance(value, dict) else None
    return isinstance(vocabulary, dict | list)


_TOKENS: _Kind = (
    _any_of(_is_null, _is_list_of(_is_token), _is_object_of(_is_token)),
    "a list of tokens, or tokens by their names",
)
_SIDE: _Kind = (lambda value: value in ("left", "right"), '"left" or "right"')
_ID: _Kind = (_any_of(_is_null, _is_whole, _is_list_of(_is_whole)), "the number of a token, a list of them, or null")
_NUMBER: _Kind = (_any_of(_is_null, _is_number), "a number or null")
_CONFIG: dict[str, _Kind] = {
    **{
        f"{name}_token": (_any_of(_is_null, _is_token), "the text of a token, an object with its content, or null")
        for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    },
    "additional_special_tokens": _TOKENS,
    "extra_special_tokens": _TOKENS,
    "added_tokens_decoder": (
        lambda value: _is_object_of(_is_token)(value) and all(number.isdecimal() for number in value),
        "objects with the content of tokens, by their numbers",
    ),
    "chat_template": (
        _any_of(_is_null, _is_text, _is_list_of(_is_named_template), _is_object_of(_is_text)),
        "a text, a list of objects with name and template, or null",
    ),
    "model_max_length": _NUMBER,
    "tokenizer_class": (_any_of(_is_null, _is_text), "the name of a class, or null"),
    "auto_map": (lambda value: isinstance(value, dict) or (isinstance(value, list) and len(value) > 1), "an object"),
    "padding_side": _SIDE,
    "truncation_side": _SIDE,
    "model_input_names": (_is_list_of(_is_text), "a list of names"),
}
_GENERATION: dict[str, _Kind] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _ID),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), _NUMBER),
    "do_sample": (_any_of(_is_null, lambda value: isinstance(value, bool)), "true, false or null"),
}
_TOKENIZER: dict[str, _Kind] = {
    "version": (_is_text, "a text"),
    "added_tokens": (_is_list_of(_is_numbered_token), "a list of objects with id and content"),
    "model": (_is_vocabulary, "an object with vocab"),
    **dict.fromkeys(
        ("normalizer", "pre_tokenizer", "post_processor", "decoder"), (_is_component, "an object with type, or null")
    ),
}

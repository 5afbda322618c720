"""Settings without their secrets, for all that leaves this process: recipe.yaml, manifests, W&B, messages.

A secret is known by the name of its setting, wherever it stands: whatever holds a password, credential or secret, or a
key or token of some access. Of a URL, the password.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"
"""Stands for a secret; no setting may have it as its value."""

_SECRET = re.compile(
    r"""(.*_)?(
        (api|access|account|admin|auth|deploy|encryption|master|private|secret|signing|ssh|storage|subscription)_?keys?
      | (access|admin|api|auth|bearer|deploy|github|hf|hub|id|refresh|secret|session|wandb|write)_?tokens?
      | secrets? | password | passwd | passphrase | pwd | credentials? | authorization | bearer | token | key
    )(_[0-9]+)?""",
    re.VERBOSE,
)
# As a string these are words of a vocabulary, or columns and files by name.
_NO_SECRET = re.compile(
    r"(.*_)?((bos|eos|pad|unk|sep|cls|mask|image|stop|think|prompt|answer|column|group|sort"
    r"|input|label|metadata|fused_query|reward_fn|tool|chosen|rejected)_)(token|key)"
)
# Linear in the length of the text: a run of these characters is looked at once.
_INNER_KEYS = re.compile(r"(?<![A-Za-z0-9_-])([A-Za-z0-9_-]++)[\"']?\s*+:")
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]+@")


def is_secret(name: object) -> bool:
    """True if the value of a setting of this name is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]", "_", str(name)).lower()
    return _SECRET.fullmatch(words) is not None and _NO_SECRET.fullmatch(words) is None


def redacted(value: Any, name: object = "") -> Any:
    """A value, as JSON has it, with every secret in it replaced; `name` is that of its setting."""
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: redacted(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", value) if isinstance(value, str) else value


def redacted_override(text: str) -> str:
    """A `dotted.key=value` to be shown."""
    name, equals, value = text.partition("=")
    last = name.strip().rpartition(".")[2]
    # Of a value that is itself a group of keys, any may be one.
    inner = _INNER_KEYS.findall(value)
    if equals and (is_secret(last) or any(map(is_secret, inner))):
        return f"{name}={REDACTED}"
    return str(redacted(text))


def redacted_keys(data: Any, key: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the keys of settings read from the output of `redacted`, which lack their secrets."""
    items: Any = ()
    if isinstance(data, Mapping):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    elif isinstance(data, str) and REDACTED in data:
        yield key
    for name, value in items:
        yield from redacted_keys(value, (*key, name))


def redacted_words(words: Sequence[str]) -> list[str]:
    """Words of a command line to be shown: overrides, and options with their values behind `=` or in the next word."""
    shown = []
    for before, word in itertools.pairwise(["", *words]):
        is_value = before.startswith("--") and "=" not in before and is_secret(before.removeprefix("--"))
        shown.append(REDACTED if is_value else redacted_override(word))
    return shown


@contextlib.contextmanager
def redacted_arguments() -> Iterator[None]:
    """Hide secrets from a library that keeps the command line, in the block."""
    before = sys.argv
    sys.argv = [before[0], *redacted_words(before[1:])] if before else before
    try:
        yield
    finally:
        sys.argv = before

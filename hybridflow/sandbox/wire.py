"""Programs and their results as JSON, between a remote sandbox and its server."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine3d.errors import shortened
from hybridflow.sandbox.program import ProgramLimits, SandboxProgram, SandboxResult, Verdict

MOST_BYTES = 64 << 20
"""Largest program and result."""
PATH = "/run"


def encode_program(program: SandboxProgram, limits: ProgramLimits) -> dict[str, Any]:
    """A program as JSON."""
    return {
        "command": list(program.command),
        "files": {name: _text(content) for name, content in program.files.items()},
        "stdin": _text(program.stdin),
        "limits": limits.model_dump(),
    }


def decode_program(content: Any) -> SandboxProgram:
    """The program that JSON is. Raises ValueError with one line for what is none."""
    if not isinstance(content, Mapping) or content.keys() != {"command", "files", "stdin", "limits"}:
        raise ValueError(f"{shortened(repr(content))}, expected command, files, stdin and limits")
    command, files = content["command"], content["files"]
    if not isinstance(command, list) or not isinstance(files, Mapping):
        raise ValueError("expected a list as command and an object as files")
    if not all(isinstance(word, str) for word in (*command, *files)):
        raise ValueError("expected a command and names of files that are texts")
    try:
        limits = ProgramLimits.model_validate(content["limits"])
    except ValidationError as error:
        raise ValueError(f"limits: {error.errors()[0]['msg']}") from None
    return SandboxProgram(
        tuple(command), {name: _bytes(text) for name, text in files.items()}, _bytes(content["stdin"]), limits
    )


def encode_result(result: SandboxResult) -> dict[str, Any]:
    """A result as JSON."""
    return {
        "verdict": result.verdict.value,
        "exit_code": result.exit_code,
        "stdout": _text(result.stdout),
        "stderr": _text(result.stderr),
        "seconds": result.seconds,
    }


def decode_result(content: Any) -> SandboxResult:
    """The result that JSON is. Raises ValueError with one line for what is none."""
    try:
        verdict, code, seconds = Verdict(content["verdict"]), content["exit_code"], float(content["seconds"])
        if code is not None and type(code) is not int:
            raise ValueError(code)
        return SandboxResult(verdict, code, _bytes(content["stdout"]), _bytes(content["stderr"]), seconds)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{shortened(repr(content))}, expected the result of a program") from None


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{shortened(repr(text))}, expected base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{shortened(repr(text))}, expected base64") from None

"""Bad input: a row of a table, and the place where its input is made."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.commands import ROOT, Commands

DIGITS = "9" * 5000
DEMO = ROOT / "launch/recipes/demo.yaml"


@dataclass(frozen=True)
class Place:
    """The directory of one case, and what cases copy from.

    Args:
        directory: empty at first.
        models: a directory with a whole model ("model"), a checkpoint ("checkpoints/step-00000012") and the directory
            of a finished run ("run").
        commands: makes what needs the stack.
    """

    directory: Path
    models: Path
    commands: Commands

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.directory / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def recipe(self, text: str = "", base: bool = True) -> Path:
        """The demo with `text` on top; or `text` alone."""
        return self.write("recipe.yaml", (f"base: {DEMO}\n" if base else "") + text)

    def check(self, text: str = "", *overrides: str, base: bool = True) -> list[object]:
        """The command that checks such a recipe."""
        return ["check", self.recipe(text, base), *overrides]

    def model(self, **files: str | bytes | None) -> Path:
        """A copy of the whole model with other files: `tokenizer_config__json=...`; None for none."""
        return self._copy("model", files)

    def config(self, **values: Any) -> Path:
        """A copy of the whole model with other values in its config.json."""
        config = json.loads((self.models / "model/config.json").read_text())
        return self.model(config__json=json.dumps(config | values))

    def check_model(self, model: Path, *overrides: str) -> list[object]:
        """The command that checks a recipe with such a model."""
        return self.check("", f"model={{path: {model}}}", *overrides)

    def check_config(self, **values: Any) -> list[object]:
        """The command that checks a recipe with values in the config of a model to be made."""
        return self.check("", *(f"model.create.config.{name}={json.dumps(value)}" for name, value in values.items()))

    def check_data(self, train: Path) -> list[object]:
        """The command that checks a recipe with such prompts."""
        good = self.write("good.jsonl", '{"prompt": "1+1=", "answer": 2}\n')
        files = f"{{train_path: {train}, eval_path: {good}, sft_path: {good}}}"
        return self.check("", "data.source=jsonl", f"data.jsonl={files}")

    def checkpoint(self, **files: str | bytes | None) -> Path:
        """A copy of the checkpoint with other files."""
        return self._copy("checkpoints/step-00000012", files)

    def _copy(self, name: str, files: Mapping[str, str | bytes | None]) -> Path:
        copied = self.directory / name
        shutil.copytree(self.models / name, copied)
        for file, content in files.items():
            path = copied / file.replace("__", ".")
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return copied

    def resumable(self) -> Path:
        """A checkpoint that the demo can go on after, but for the state of its roles."""
        return Path(shutil.copytree(self.models / "demo", self.directory / "demo")) / "step-00000001"

    def describe(self, checkpoint: Path) -> None:
        """Write a checkpoint's manifest again, from the files that are there now."""
        self.commands.call("tests.support.bad_input.place:describe", str(checkpoint))

    def run(self, **files: str | bytes) -> Path:
        """A run's directory with two metrics and such files."""
        directory = self.directory / "run"
        directory.mkdir()
        (directory / "metrics.jsonl").write_text('{"phase": "train", "step": 1, "reward/mean": 0.5}\n')
        for name, content in files.items():
            path = directory / name.replace("__", ".")
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return directory

    def pipe(self, path: Path) -> Path:
        """A named pipe in the place of a file: who opens it waits for ever."""
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path

    def device(self, path: Path) -> Path:
        """A link to a device without an end in the place of a file."""
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero")
        return path

    def sparse(self, path: Path, size: int, start: bytes = b"") -> Path:
        """A file of so many bytes, which are zero after the start and take no room."""
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            file.write(start)
            file.truncate(size)
        return path


def make(models: str) -> None:
    """Make what cases copy from, in a directory."""
    from hybridflow.config.initial_model import create_model
    from hybridflow.config.recipe import load_recipe
    from tests.support.resumable import make_checkpoint
    from tests.support.small_checkpoints import make_checkpoint_of_tensors

    create_model(load_recipe(DEMO).model, Path(models) / "model", seed=0)
    make_checkpoint_of_tensors(Path(models) / "checkpoints")
    make_checkpoint(load_recipe(DEMO), 1, Path(models) / "demo")


def describe(checkpoint: str) -> None:
    """Write the manifest anew, of the files that are there."""
    import dataclasses

    from engine3d.checkpoint.manifest import MANIFEST, file_entry, read_manifest, write_manifest

    directory = Path(checkpoint)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = tuple(file_entry(directory, path) for path in files)
    write_manifest(directory, dataclasses.replace(read_manifest(directory), files=entries))


def nested(opening: str, closing: str, depth: int) -> str:
    """A value inside so many others."""
    return opening * depth + "1" + closing * depth


def alias_bomb(levels: int = 12) -> str:
    """YAML of a few lines that stands for 10^levels values."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Case:
    """One bad input.

    Args:
        name: of the test.
        words: makes the input, and returns what stands after `hybridflow`.
        line: a regular expression that is found in the first line on stderr.
        code: the exit code.
        seconds: of processor time, without imports.
        gigabytes: resident memory of the largest process, libraries included.
        lines: most lines on stderr.
        stdout, environment, mounts, open_files, imported: see `Commands.run`; "HERE" in a mount is the directory.
    """

    name: str
    words: Callable[[Place], Sequence[object]]
    line: str
    code: int = 2
    seconds: float = 5.0
    gigabytes: float = 1.0
    lines: int = 1
    stdout: Literal["kept", "closed", "full"] = "kept"
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    open_files: int | None = None
    imported: bool = True

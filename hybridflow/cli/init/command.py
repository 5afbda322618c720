"""`hybridflow init`: writes a recipe, a reward and a README for a model and data of one's own."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from engine3d.errors import UserError, shortened
from engine3d.input_files import read_json_object
from engine3d.startup.imports import quick_imports
from hybridflow.cli.init.files import Data, Model, files_of_run

_LOOKED_AT = 100
"""Rows of a file by which its columns are known."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a new directory for the files")
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a HuggingFace directory; a tiny model with random weights if not given",
    )
    parser.add_argument(
        "--data", metavar="FILE", help="JSON lines, JSON, CSV, Parquet or Arrow; some sums are written if not given"
    )
    parser.add_argument("--prompt", metavar="COLUMN", help="of the data, where its name does not say so")
    parser.add_argument("--answer", metavar="COLUMN", help="of the data, where its name does not say so")


def run(parsed: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: the directory has files, or there is no such model or data; nothing is written then.
    """
    directory = parsed.directory
    if directory.is_file():
        raise UserError(f"init: {directory} is a file; expected a new directory, and data as --data {directory}")
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"init: {directory} is not empty; expected a new directory")
    for option in ("prompt", "answer"):
        if getattr(parsed, option) is not None and parsed.data is None:
            raise UserError(f"init: --{option} is a column of --data, expected both")
    model = _model(parsed.model) if parsed.model is not None else None
    data = _data(parsed.data, parsed.prompt, parsed.answer) if parsed.data is not None else None
    if data is not None and model is None and (others := data.beyond_ascii):
        raise UserError(
            f"init: {parsed.data} has characters such as {others!r}, and the tiny model reads ASCII alone; expected "
            "--model DIR"
        )
    files = files_of_run(directory.absolute(), model, data)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"init: cannot write to {directory}: {error.strerror}") from None
    print(f"wrote {', '.join(str(directory / name) for name in files)}")
    if data is not None:
        answers = f"answers: {data.columns.answer}" if data.columns.answer else "no answers"
        others = f"; other columns: {', '.join(data.columns.others)}" if data.columns.others else ""
        print(f"columns of {parsed.data}: prompts: {data.columns.prompt}; {answers}{others}")
    print(f"next: hybridflow train {shlex.quote(str(directory / 'recipe.yaml'))}")
    return 0


def _model(directory: Path) -> Model:
    """Raises UserError where it is no HuggingFace directory."""
    for file in ("config.json", "tokenizer_config.json"):
        if not (directory / file).exists():
            fetch = f"; hf download {directory} --local-dir {directory.name}" if _is_of_hub(str(directory)) else ""
            raise UserError(
                f"init: --model {directory}: no {file} there, expected a HuggingFace directory (nothing is downloaded"
                f"{fetch})"
            )
    context = read_json_object(directory / "config.json").get("max_position_embeddings")
    described = read_json_object(directory / "tokenizer_config.json")
    has_template = (directory / "chat_template.jinja").is_file() or "chat_template" in described
    return Model(directory.absolute(), has_template, context if isinstance(context, int) and context > 0 else None)


def _is_of_hub(name: str) -> bool:
    return _HUB.fullmatch(name) is not None and not Path(name).parent.exists()


def _data(given: str, prompt: str | None, answer: str | None) -> Data:
    """The file and its columns. Raises UserError where it cannot be read, or prompts are not found in it."""
    with quick_imports():
        from hybridflow.data.files.config import FileSource
        from hybridflow.data.files.formats.column_guess import guess_columns
        from hybridflow.data.files.formats.opening import default_cache, files_of, open_rows

    path = Path(given)
    if not path.exists() and _is_of_hub(given):
        raise UserError(
            f"init: --data {given}: no such file (nothing is downloaded; hf download {given} --repo-type dataset "
            f"--local-dir {path.name})"
        )
    if path.is_dir() and not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        files = sorted(str(file) for file in path.rglob("*") if file.suffix in (".parquet", ".jsonl", ".json", ".csv"))
        listed = f"one of its files: {shortened(', '.join(files), 300)}" if files else "a file"
        raise UserError(f"init: --data {given} is a directory, expected {listed}")
    source = FileSource(path=(given,))
    cache = default_cache()
    rows = open_rows(files_of(source, cache), cache)
    if not len(rows):
        raise UserError(f"init: --data {given} has no rows")
    first = rows.read(0, min(_LOOKED_AT, len(rows)))
    columns = guess_columns(first, given, prompt=prompt, answer=answer)
    beyond = next((sign for row in first for sign in f"{row}" if ord(sign) > 0x7E), "")
    return Data(source.path[0], columns, beyond)

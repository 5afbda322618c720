"""Commands that only read files, and which libraries they import for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from hybridflow.cli.main import _COMMANDS as COMMANDS
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.report.stored_texts import TextOf
from tests.support import resumable
from tests.support.small_checkpoints import make_checkpoint
from tests.support.stored_samples import make_run

pytestmark = pytest.mark.processes

HEAVY = ("matplotlib", "megatron", "pandas", "ray", "sglang", "sympy", "torch", "transformers")
_HELP = """
import contextlib, io, sys
from hybridflow.cli.main import main
for command in sys.argv[1:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([command, "--help"])
    print(command, *(name for name in {heavy!r} if name in sys.modules))
"""
RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
_RUN = """
import contextlib, io, json, os, sys, traceback
from hybridflow.cli.main import main
import hybridflow.cli.check, hybridflow.config.recipe
for command in json.loads(sys.argv[1]):
    if (process := os.fork()) > 0:
        os.waitpid(process, 0)
        continue
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                code = main(command.split())
            except SystemExit as error:
                code = error.code
        imported = sorted(name for name in {heavy!r} if name in sys.modules)
        print(json.dumps([command, code, imported, output.getvalue()]), flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
"""
READING = [
    "--help",
    "samples {run}",
    "status {run}",
    "logs {run}",
    "report {run}",
    "checkpoint list {run}",
    "checkpoint inspect {saved}",
    "checkpoint verify {saved}",
    "launch slurm --help",
    "launch slurm {recipes}/several-hosts.yaml --nodes 2 --dry-run",
    "settings train.optimizer",
]
CHECKED = ["demo", "ppo", "chat", "qwen3-30b-a3b-4xh200"]
CHECK = "check {recipes}/%s.yaml run_dir={runs}"
RESUMED = " ".join(["check {recipes}/demo.yaml run_dir={runs_of_saved} name=small resume={saved}", *resumable.SMALL])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a small run, with samples and the tokenizer of its model."""
    run = make_run(tmp_path_factory.mktemp("run"))
    make_checkpoint(run / "checkpoints")
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "actor-0.log").write_text("a line\n")
    records = ({"phase": "train", "step": step, "reward/mean": 0.5 * step} for step in (1, 2))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo's recipe."""
    return resumable.make_checkpoint(resumable.a_recipe(tmp_path_factory.mktemp("saved")), 2)


Commands = dict[str, tuple[list[str], str]]
"""The heavy libraries that a command imports, and its output."""


@pytest.fixture(scope="module")
def commands(run: Path, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Commands of the tests, forked from one interpreter that has imported the reader of recipes. All succeed."""
    paths = {"run": run, "saved": saved, "recipes": RECIPES, "runs": tmp_path_factory.mktemp("runs")}
    words = [*READING, *(CHECK % name for name in CHECKED), RESUMED]
    arguments = {text.format(**paths, runs_of_saved=saved.parents[2]): text for text in words}
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(heavy=HEAVY), json.dumps(list(arguments))],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
        check=True,
    )
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert [[command, code or 0] for command, code, *_ in ended] == [[command, 0] for command in arguments], done.stderr
    assert all(output for *_, output in ended)
    return {arguments[command]: (imported, output) for command, _, imported, output in ended}


@pytest.mark.parametrize("words", READING)
def test_a_command_that_reads_files_imports_no_library_of_models(words: str, commands: Commands) -> None:
    imported, _ = commands[words]
    assert imported == []


WITHOUT_CUDA = pytest.mark.skipif(find_library("cuda") is not None, reason="where CUDA is, torch looks for GPUs")


@WITHOUT_CUDA
@pytest.mark.parametrize("name", CHECKED)
def test_check_imports_transformers_alone_for_the_tokenizer(name: str, commands: Commands) -> None:
    imported, output = commands[CHECK % name]
    assert (imported, output.splitlines()[-1]) == (
        ["transformers"],
        f"{RECIPES / name}.yaml: nothing wrong found",
    )


@WITHOUT_CUDA
def test_check_of_a_resumption_imports_transformers_alone(saved: Path, commands: Commands) -> None:
    imported, output = commands[RESUMED]
    assert (imported, output.splitlines()[0]) == (["transformers"], f"resume: after step 2, from {saved}")


def test_help_of_every_command_imports_no_library_of_models() -> None:
    command = [sys.executable, "-c", _HELP.format(heavy=HEAVY), *COMMANDS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(COMMANDS)


def test_samples_are_decoded_without_transformers_as_with_it(run: Path) -> None:
    text_of, complete = TextOf.of_run(run), load_tokenizer(run / "initial")
    assert type(text_of.tokenizer).__module__.partition(".")[0] == "tokenizers"
    for text in ("<bos>12+3=15<eos><pad>", "", "a b  c\nd"):
        tokens = complete(text, add_special_tokens=False)["input_ids"]
        assert text_of(tokens) == complete.decode(tokens) == text


@pytest.mark.parametrize("setting", [{"tokenizer_class": "LlamaTokenizer"}, {"clean_up_tokenization_spaces": True}])
def test_a_tokenizer_that_decodes_in_a_way_of_its_own_is_transformers(setting: dict[str, object], run: Path) -> None:
    path = run / "initial" / "tokenizer_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | setting))
    try:
        assert type(TextOf.of_run(run).tokenizer).__module__.partition(".")[0] != "tokenizers"
    finally:
        path.write_text(before)

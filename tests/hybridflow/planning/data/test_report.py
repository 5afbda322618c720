"""Report of `hybridflow data` on a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import main

ROOT = Path(__file__).parents[4]
EXPECTED = """\
tokenizer: 103 tokens, with a chat template; prompts have room for 60 tokens

training: 3 prompts of 24 tokens
  train: 3 of 5 rows; dropped are
    1 with another level (where)
    1 with more than 60 tokens (data.overlong_prompts=drop)
  tokens: least 8, median 8, 95 % 8, 99 % 8, most 8
                  8          3 ########################################
  train:0, 8 tokens: '<|user|>1+1=?<|end|><|assistant|>'
    answer: '2'

supervised: 1 prompts of 6 tokens
  sft: 1 of 1 rows
  tokens: least 6, median 6, 95 % 6, 99 % 6, most 6
                  6          1 ########################################
  prompt 0, 6 tokens: '<|user|>1+1<|end|><|assistant|>'
    answer: '2<|end|><|user|>2<|end|><|assistant|>3<|end|>'
    learned, 2 tokens: '2<|end|>'
    read, 4 tokens: '<|user|>2<|end|><|assistant|>'
    learned, 2 tokens: '3<|end|>'

evaluation.easy: 1 prompts of 4 tokens
  train: 1 of 1 rows
  tokens: least 4, median 4, 95 % 4, 99 % 4, most 4
                  4          1 ########################################
  train:0, 4 tokens: '1+1='
    answer: '2'
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    def message(text: str, role: str = "user") -> dict[str, str]:
        return {"role": role, "content": text}

    rows = [{"prompt": [message(f"{number}+1=?")], "answer": number + 1, "level": 1} for number in range(1, 4)]
    rows += [rows[0] | {"level": 2}, rows[0] | {"prompt": [message("1" * 80)]}]
    said = [message("1+1"), message("2", "assistant"), message("2"), message("3", "assistant")]
    files: dict[str, list[dict[str, Any]]] = {
        "train": rows,
        "sft": [{"prompt": said}],
        "test": [{"prompt": "1+1=", "answer": 2}],
    }
    for name, some in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
base: {ROOT}/launch/recipes/demo.yaml
model: {{create: {{tokenizer: chat, config: {{vocab_size: 103}}}}}}
data:
  source: files
  overlong_prompts: drop
  files:
    train: [{{path: {tmp_path}/train.jsonl, where: {{level: 1}}}}]
    sft: [{{path: {tmp_path}/sft.jsonl}}]
    cache: {tmp_path}/cache
evaluation:
  eval: null
  easy: {{data: {{path: {tmp_path}/test.jsonl, name: train}}}}
""")
    return path


def test_all_phases_are_shown_with_what_is_dropped(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(recipe), "--show", "1"]) == 0
    shown, _, notes = capsys.readouterr().out.partition("\n\ndata: ")
    assert shown + "\n" == EXPECTED
    assert "2 of 5 training rows of train are dropped" in notes
    assert "without the tokenizer's chat template" in notes
    assert "sft is not read" not in notes


def test_supervised_rows_that_no_warm_up_reads_are_noted(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(recipe), "warmup=null"]) == 0
    assert "\ndata.files.sft is not read: warmup is null\n" in capsys.readouterr().out


def test_a_set_of_files_without_a_file_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe), "evaluation.eval.samples=4"]) == 2
    assert (
        "evaluation.eval.data is missing with data.source=files, which holds out no prompts; expected "
        "evaluation.eval.data.path, or evaluation.eval=null" in capsys.readouterr().err
    )


def test_a_wrong_row_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(recipe), "data.files.train=[{path: nowhere.jsonl}]"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "nowhere.jsonl: no such file" in line


def test_what_is_too_long_to_be_learned_is_said_once(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2" * 80}]
    with (recipe.parent / "sft.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": long}) + "\n")
    assert main(["data", str(recipe), "data.overlong_prompts=cut_left"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    assert len([line for line in lines if "1 of 2 supervised rows of sft are dropped" in line]) == 1
    assert not any("supervised prompts" in line for line in lines)

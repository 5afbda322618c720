"""`hybridflow samples`, on the store of a run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.cli.main import main
from hybridflow.cli.samples import marked
from tests.support.stored_samples import learned_from, make_run, samples_of, store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["samples", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def ids(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"  sample (\d+)  ", text)]


def test_the_newest_step_is_shown_with_texts_and_rewards(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, made, "--limit", 2)
    assert text.splitlines() == [
        "step 3  group 6  sample 24  reward 0.25 (exact 0.125, model 0.25)  advantage 0.125  4 tokens  stop  version 3"
        "  engine 1  24.00 s",
        "prompt   | 0+3=",
        "response | 3 a<eos>",
        "",
        "step 3  group 6  sample 25  reward 1 (exact 0.5, model 1)  advantage 0.875  4 tokens  length  version 3"
        "  engine 1  25.00 s",
        "prompt   | 0+3=",
        "response | 3 b<eos>",
        "",
        "2 of the 8 samples of step 3; --limit 8 shows all",
    ]
    assert ids(shown(capsys, made)) == list(range(24, 32))


def test_samples_are_chosen_by_step_reward_group_and_id(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ids(shown(capsys, made, "--step", 1)) == list(range(8, 16))
    assert ids(shown(capsys, made, "--reward-below", -0.5)) == [31, 23, 15]  # the newest step first
    assert ids(shown(capsys, made, "--reward-below", -0.5, "--limit", 2)) == [31, 23]
    assert ids(shown(capsys, made, "--reward-above", 0.25, "--reward-below", 2, "--step", 2)) == [17, 21, 22]
    assert ids(shown(capsys, made, "--group", 5)) == [20, 21, 22, 23]
    assert ids(shown(capsys, made, "--sample", 9)) == [9]


def test_a_group_is_shown_as_differences_to_its_best_response(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(capsys, made, "--group", 2, "--diff")
    assert text.startswith("prompt   | 0+1=\nbest      step 1  group 2  sample 9  reward 1 ")
    assert re.findall(r"^other .*  sample (\d+) ", text, re.MULTILINE) == ["8", "10", "11"]
    cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in text.splitlines() if line.startswith("│")]
    assert cells[:2] == [
        ["sample 9, reward 1", "sample 8, reward 0.25"],
        ["1 [-b-]<eos>", "1 {+a+}<eos>"],
    ]
    assert len(cells) == 6
    assert shown(capsys, made, "--diff", "--step", 1, "--limit", 1) == text
    assert shown(capsys, made, "--diff", "--step", 1).count("best      step 1") == 2
    assert "sample 15" in (both := shown(capsys, made, "--sample", 15, "--diff")) and "sample 12" in both


def test_texts_are_shown_as_they_are_and_obeyed_by_no_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(run, learned_from(4, samples_of([("1=", "a\n\x1bb")], [0.5])))
    assert shown(capsys, run).splitlines()[1:] == ["prompt   | 1=", "response | a", "         | \\x1bb<eos>"]
    assert "\x1b" not in shown(capsys, run, "--diff")


def test_without_a_tokenizer_tokens_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "initial")
    assert main(["samples", str(run), "--sample", "8"]) == 0
    out, err = capsys.readouterr()
    assert "prompt   | 3 13 4 14\n" in out
    assert err == (f"hybridflow: no tokenizer in {run}/initial or {run}/model; tokens are shown by their ids\n")


def test_what_is_not_there_is_told_in_one_line(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refusal(*arguments: object) -> str:
        assert main(["samples", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert not out
        [line] = err.splitlines()
        return line.removeprefix("hybridflow: ")

    samples = run / "samples"
    assert refusal(tmp_path / "no") == f"no such directory: {tmp_path}/no; expected that of a run, such as runs/demo"
    assert refusal(samples) == f"no recipe.yaml in {samples}; expected the directory of a run, such as runs/demo"
    assert refusal(run, "--step", 7) == f"no samples of step 7 in {samples}; there are those of 3 steps from 1 to 3"
    assert refusal(run, "--reward-below", -4, "--step", 2) == (
        f"no sample with a reward below -4 among those of step 2 in {samples}; rewards are from -2 to 2"
    )
    assert refusal(run, "--group", 99) == f"no sample with group 99 among those of steps 1 to 3 in {samples}"
    assert refusal(run, "--limit", 0) == "--limit 0: expected at least 1"
    assert refusal(run, "--reward-below", 0, "--reward-above", 0) == (
        "--reward-above 0 with --reward-below 0: no reward is both"
    )
    damaged = samples / "step-00000002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert refusal(run, "--step", 2).startswith(f"{damaged} holds no samples that can be read: Parquet magic bytes")
    pq.write_table(pa.table({"step": [2]}), damaged)
    assert refusal(run, "--step", 2) == f"{damaged} has no column sample_id, expected the samples of a step"
    damaged.unlink()
    damaged.mkdir()
    assert refusal(run, "--step", 2) == f"{damaged}: is a directory, expected a regular file"
    shutil.rmtree(samples)
    assert refusal(run) == f"no samples in {samples}; a run writes them after each step unless samples.store=false"
    with pytest.raises(SystemExit):
        main(["samples", str(run), "--reward-below", "nan"])
    assert "expected a number, found nan" in capsys.readouterr().err


def test_texts_of_very_many_words_are_compared_by_lines() -> None:
    one = "".join(f"line {number} of many\n" for number in range(3000))
    before, after = marked(one, one.replace("line 1500 ", "line x "))
    assert ("[-line 1500 of many\n-]", "red") in before and ("{+line x of many\n+}", "green") in after
    assert marked("a b", "a b") == ([("a b", "")], [("a b", "")])
    assert marked("", "a") == ([], [("{+a+}", "green")])

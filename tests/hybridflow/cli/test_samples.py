"""`hybridflow samples`, on the store of a run."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from engine3d.models import model_spec
from engine3d.models.experts.routes import RouteFormat
from engine3d.rollout.requests import BEGINS, GIVEN
from hybridflow.batch.sample_table import ByName
from hybridflow.cli.main import main
from hybridflow.cli.samples import marked
from hybridflow.report.stored_texts import read_stored
from tests.support import tiny_families
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
    return [int(sample) for sample in re.findall(r"  sample (\d+)  ", text)]


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


def test_an_episode_is_shown_turn_by_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = samples_of([("0+3=", "1 +2 =3"), ("0+3=", "3 a")], [1.0, 0.0], first=32)
    mask = torch.ones(len(batch.response_mask), dtype=torch.bool)
    mask[[1, 2, 4, 5]] = False
    store(run, learned_from(4, batch.replace(response_mask=mask)))
    lines = shown(capsys, run, "--step", 4).splitlines()
    assert "8 tokens, 4 of them not the policy's" in lines[0]
    assert lines[1:6] == ["prompt   | 0+3=", "policy   | 1", "observed |  +", "policy   | 2", "observed |  ="]
    assert lines[6] == "policy   | 3<eos>"
    assert lines[-1] == "response | 3 a<eos>"
    report = {text.sample.sample: text.response for text in read_stored(run)}
    assert report[32] == "policy: 1\nobserved:  +\npolicy: 2\nobserved:  =\npolicy: 3<eos>"
    assert report[33] == "3 a<eos>"


def test_the_branches_of_an_agents_episode_are_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = samples_of([("0+3=", "10+3=1+3")], [1.0], first=32)
    mask = torch.tensor([True, *[False] * 6, True, True])
    versions = torch.tensor([0, BEGINS, *[GIVEN] * 5, 0, 0])
    store(run, learned_from(4, batch.replace(response_mask=mask, token_versions=versions)))
    assert shown(capsys, run, "--step", 4).splitlines()[1:6] == [
        "prompt   | 0+3=",
        "policy   | 1",
        "  branch of sequence 1, after 5 tokens",
        "observed | +",
        "policy   | 3<eos>",
    ]
    branch = "    branch of sequence 1, after 5 tokens\n    observed: +\n    policy: 3<eos>"
    assert f"policy: 1\n{branch}" in [text.response for text in read_stored(run)]


def test_samples_are_chosen_by_step_reward_group_and_id(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ids(shown(capsys, made, "--step", 1)) == list(range(8, 16))
    assert ids(shown(capsys, made, "--reward-below", -0.5)) == [31, 23, 15]  # the newest step first
    assert ids(shown(capsys, made, "--reward-below", "-5e-1", "--limit", 2)) == [31, 23]
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


def test_verdicts_of_a_reward_are_shown_with_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = samples_of([("1+2=", "3"), ("1+2=", "3 a")], [1.0, 0.0])
    columns = {
        "code": [1.0, 0.0],
        "code/passed": [2.0, 0.0],
        "code/timeout": [0.0, 1.0],
        "code/program_s": [0.5, math.nan],
    }
    named = {f"reward/{name}": ByName(samples.sample_ids, torch.tensor(values)) for name, values in columns.items()}
    store(run, replace(learned_from(1, samples), by_name=named))
    text = shown(capsys, run, "--step", 1)
    assert "reward 1 (code 1: passed 2, program_s 0.5)" in text and "reward 0 (code 0: timeout 1)" in text


def test_texts_of_very_many_words_are_compared_by_lines() -> None:
    one = "".join(f"line {number} of many\n" for number in range(3000))
    before, after = marked(one, one.replace("line 1500 ", "line x "))
    assert ("[-line 1500 of many\n-]", "red") in before and ("{+line x of many\n+}", "green") in after
    assert marked("a b", "a b") == ([("a b", "")], [("a b", "")])
    assert marked("", "a") == ([], [("{+a+}", "green")])


def test_routes_are_checked_against_the_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*options: object) -> str:
        assert main(["samples", str(run), "--routes", *map(str, options)]) == 2
        return capsys.readouterr().err

    assert "its recipe names no model" in refused()
    config = tiny_families.CONFIGS["deepseek_v3"]
    (run / "recipe.yaml").write_text(yaml.safe_dump({"name": "small", "model": {"create": {"config": config}}}))
    assert "step 1 has no routes, expected those of a run with rollout.engine.routes=true" in refused("--step", 1)
    format = RouteFormat.of(model_spec(config).sizes)
    samples = samples_of([("1+2=", "3 a"), ("1+2=", "3")], [0.0, 1.0])
    experts = torch.arange(4, dtype=torch.uint8).repeat(len(samples.tokens), len(format.layers))
    experts[samples.sequence_lengths.cumsum(0) - 1] = format.missing
    experts[1] = format.missing
    store(run, learned_from(1, samples.replace(routes=experts)))
    tokens, columns = len(samples.tokens) - 2, 4 * len(format.layers)
    assert shown(capsys, run, "--routes", "--step", 1).strip() == (
        f"step 1  2 samples  {tokens} tokens with routes of {len(format.layers)} layers x 4 experts, "
        f"{1 / tokens:.2%} missing  {(tokens + 2) * columns / 1e6:.2f} MB"
    )
    for entry, error in ((8, "name expert 8, expected 0 to 7"), (1, "name expert 1 twice, expected 4 different ones")):
        wrong = experts.clone()
        wrong[int(samples.sequence_lengths[0]) + 2, 2] = entry
        store(run, learned_from(1, samples.replace(routes=wrong)))
        text = refused("--step", 1)
        assert "step 1, sample 1: routes of token 2, layer 1" in text and error in text
    store(run, learned_from(1, samples.replace(routes=experts[:, :3])))
    assert "step 1, sample 0: routes have shape" in refused("--step", 1)
    assert "--routes is of all samples of a step" in refused("--diff")

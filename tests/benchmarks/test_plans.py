"""Plans of large runs: one JSON object from shapes alone, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plans
from tests.benchmarks.test_reshard_plan import stand_in
from tests.support.tiny_families import MOE


def _model(directory: Path) -> str:
    (directory / "config.json").write_text(json.dumps(MOE))
    return str(directory)


def test_a_plan_says_layout_memory_and_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--colocated --gpus 8 --tokens 4096 --update-tokens 65536 --gpus-per-node 4 --train pp=2,vpp=2,cp=2,dp=2,ep=2"
    )
    arguments = ["--model", _model(tmp_path), *given.split(), "--rollout", "tp=2,ep=2,engines=4"]
    assert plans.main(arguments, stand_in) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["gpus"], plan["train"], plan["rollout"]) == (8, "pp=2 ep=2 cp=2 dp=2 vpp=2", "tp=2,ep=2,engines=4")
    assert plan["update"]["sequences"] == 16 and plan["update"]["micro_batches"] == 8
    assert plan["update"]["seconds"] == pytest.approx(sum(plan["update"]["seconds_of"].values()), abs=0.005)
    stages, heaviest = plan["memory"]["stages"], plan["memory"]["heaviest_stage"]
    assert len(stages) == 2 and sum(sum(stage["layers"]) for stage in stages) == MOE["num_hidden_layers"]
    assert plan["memory"]["bytes"] == stages[heaviest]["bytes"] == max(stage["bytes"] for stage in stages)
    transfer = plan["transfer"]
    assert transfer["bytes_moved"] + transfer["bytes_aliased"] == transfer["bytes_held"]
    assert 0 < transfer["max_rank_network_bytes"] <= transfer["max_rank_bytes"]
    assert plan["memory"]["fits"] and plan["engine"]["cache_tokens"] > 4096


def test_a_layout_is_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", _model(tmp_path), "--gpus", "2,4", "--tokens", "512,1024", "--update-tokens", "8192"]
    assert plans.main(arguments, stand_in) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(plan["gpus"], plan["tokens"]) for plan in made] == [(2, 512), (2, 1024), (4, 512), (4, 1024)]
    assert made[3]["rollout"] == "tp=1,ep=1,engines=2" and all(plan["memory"]["fits"] for plan in made)
    assert made[3]["transfer"]["bytes_same_node"] + made[3]["transfer"]["bytes_between_nodes"] > 0


def test_what_does_not_fit_is_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", _model(tmp_path), "--gpus", "2", "--tokens", "512,100000000"]
    assert plans.main(arguments, stand_in) == 0
    fits, refused = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "refused" not in fits and refused["refused"].startswith("1 GPUs of 141.0 GB: no layout fits 1 sequences")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8,0"], "plans.py: argument --gpus: expected whole numbers above 0, found '8,0'"),
        (["--network-gb-s", "-1"], "plans.py: --network-gb-s: expected a number above 0, found -1.0"),
        (["--train", "tp=2,dp=2"], "plans.py: --train: tp=2 dp=2 has 4 ranks, expected the trainer's 32 GPUs"),
        (
            ["--train", "pp=8,vpp=9"],
            "plans.py: layout: pp*vpp = 8*9 = 72 stages: expected at most",
        ),
        (
            ["--tokens", "10000000"],
            "plans.py: 32 GPUs of 141.0 GB: no layout fits 3 sequences of 10,000,000",
        ),
        (["--gpus", "16"], "plans.py: 8 GPUs for engines: expected at least 16, which an engine's weights need"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--model", "deepseek-v3", "--gpus", "64", "--tokens", "8192"]
    assert plans.main([*usual, *arguments], stand_in) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(message) and printed.err.count("\n") == 1

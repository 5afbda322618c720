"""The planning benchmark: figures from shapes alone, and one line for what cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import reshard
from benchmarks.reshard_plan import EngineRanks, Placement, Rollout, Tensors, named_model, parse_layout, plan_figures
from engine3d.layout import Layout
from engine3d.models import model_spec
from tests.support.tiny_families import MOE
from tests.support.worlds import engine_rank

PARAMETERS = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "llama-3-70b": 70_553_706_496,
}


def stand_in(hf_config: dict[str, Any], tensors: Tensors, tp: int, ep: int) -> EngineRanks:
    return [engine_rank(model_spec(hf_config), tp, ep, rank) for rank in range(tp)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models(name: str) -> None:
    assert named_model(name).parameter_count() == PARAMETERS[name]


def test_a_colocated_trainer_with_the_same_experts_moves_little() -> None:
    spec, layout, rollout = model_spec(MOE), Layout(ep=4, dp=4), Rollout(tp=4, ep=4)
    together = plan_figures(spec, layout, rollout, Placement(8, colocated=True), stand_in)
    apart = plan_figures(spec, layout, rollout, Placement(8, colocated=False), stand_in)
    assert together["bytes_held"] == apart["bytes_held"] == apart["bytes_between_nodes"]
    assert apart["bytes_aliased"] == 0 and together["bytes_between_nodes"] == 0
    # The experts and all else that is contiguous in both; columns of matrices and the router's rows move.
    assert together["bytes_aliased"] > 0.7 * together["bytes_held"]
    assert together["train_ranks"] == together["rollout_ranks"] == 4
    assert together["plan_seconds"] >= together["plan_seconds_of_plan"] >= 0


def test_places() -> None:
    placement = Placement(gpus_per_node=4, colocated=False)
    assert str(placement.trainer(5)) == "gpu 1 of node 1"
    assert str(placement.engine(0, trainer_ranks=6)) == "gpu 0 of node 2"
    assert Placement(4, colocated=True).engine(5, trainer_ranks=6) == placement.trainer(5)
    assert parse_layout("tp=2,etp=1,ep=4,dp=4,cp=1,pp=3") == Layout(tp=2, ep=4, dp=4, pp=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "gpt-2"],
            "reshard.py: --model: gpt-2 is neither a directory with a config.json nor one of "
            "deepseek-v3, kimi-k2, llama-3-70b, qwen3-235b-a22b, qwen3-30b-a3b",
        ),
        (["--train", "tp=3"], "reshard.py: layout: tp=3: expected a divisor of num_attention_heads=32"),
        (["--train", "ep=4"], "reshard.py: layout: etp*ep = 1*4 = 4 does not divide the tp*cp*dp = 1*1*1 = 1 ranks"),
        (["--train", "pp=49"], "reshard.py: layout: pp=49: expected at most num_hidden_layers=48"),
        (
            ["--train", "tp=two"],
            "reshard.py: --train: found 'tp=two', expected name=number with each name once, of tp, pp, vpp, ep,",
        ),
        (["--train", "tp=2,tp=4"], "reshard.py: --train: found 'tp=4', expected"),
        (
            ["--rollout", "pp=2"],
            "reshard.py: --rollout: found 'pp=2', expected name=number with each name once, of tp, ep",
        ),
        (
            ["--rollout", "tp=4,ep=3"],
            "reshard.py: --rollout: tp=4,ep=3,engines=1,hosts=1: expected numbers of at least 1",
        ),
        (["--precision", "fp8"], "reshard.py: --plan-only: plans weights in bfloat16; expected no --precision"),
        (["--rollout", "tp=4,hosts=2"], "reshard.py: --rollout: hosts with --plan-only, whose engines are where"),
        (["--rollout", "tp=8", "--colocated"], "reshard.py: --colocated: the engines' 8*1 = 8 ranks are more than"),
        (["--gpus-per-node", "0"], "reshard.py: --gpus-per-node: expected a whole number of at least 1, found 0"),
        (["--gpus-per-node", "many"], "reshard.py: argument --gpus-per-node: invalid int value: 'many'"),
        (["--fast"], "reshard.py: unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--plan-only", "--model", "qwen3-30b-a3b", "--train", "dp=4", "--rollout", "tp=4"]
    assert reshard.main([*usual, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message) and printed.err.count("\n") == 1


@pytest.mark.slow
def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """Plan with SGLang's own loader."""
    command = "--model qwen3-30b-a3b --train ep=4,dp=4,pp=3 --rollout tp=4,ep=4,engines=2 --plan-only"
    assert reshard.main(command.split()) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["model"] == "qwen3-30b-a3b" and stats["train"] == "pp=3 ep=4 dp=4"
    assert stats["rollout"] == "tp=4,ep=4,engines=2" and stats["versions"]["sglang"]
    # Two engines hold the model, and what is whole on each rank four times.
    assert 4.0 < stats["bytes_held"] / PARAMETERS["qwen3-30b-a3b"] < 4.1
    assert stats["bytes_moved"] == stats["bytes_needed"] == stats["bytes_held"]

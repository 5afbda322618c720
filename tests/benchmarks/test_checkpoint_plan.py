"""The checkpoint benchmark's plan: figures of published models, and one line for what cannot be planned."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint
from benchmarks.checkpoint_plan import plan_figures
from benchmarks.reshard_plan import named_model, parse_layout
from tests.support.warm import warm_python

RESULTS = Path(checkpoint.__file__).parent / "results" / "checkpoint"
CASES = {
    "llama-3-70b": ("tp=8,pp=4,dp=2", 64),
    "qwen3-235b-a22b": ("tp=4,pp=4,ep=8,dp=8", 128),
    "deepseek-v3": ("pp=16,ep=32,dp=32", 512),
}


@functools.cache
def _planned(name: str) -> dict[str, Any]:
    return plan_figures(named_model(name), parse_layout(CASES[name][0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_rank_has_more_to_do_than_its_share(name: str) -> None:
    _, ranks = CASES[name]
    sizes = _planned(name)
    assert sizes["ranks"] == ranks and sizes["nodes"] == ranks / 8
    assert sizes["bytes_written"] == sizes["state_bytes"] <= sizes["bytes_read"] < 1.001 * sizes["state_bytes"]
    assert sizes["state_bytes"] == pytest.approx(12 * sizes["parameters"], rel=1e-6)
    for share in ("written", "read", "host"):
        assert 0.999 < sizes[f"max_{share}_of_state"] <= 1
    # Stages differ in their layers and in the embeddings.
    assert sizes["state_bytes"] / ranks <= sizes["max_rank_bytes_written"] < 1.1 * sizes["state_bytes"] / ranks
    assert sizes["mean_rank_bytes_written"] == round(sizes["state_bytes"] / ranks)
    assert sizes["max_node_host_bytes"] <= 8 * sizes["max_rank_host_bytes"]
    assert sizes["files"] == 4 * ranks and sizes["max_rank_files"] == 4
    assert sizes["plan_seconds"] < 60
    _same_as_kept(name, sizes)


def _same_as_kept(name: str, sizes: dict[str, Any]) -> None:
    kept = json.loads((RESULTS / f"plan-{name}.json").read_text())
    assert {key: value for key, value in sizes.items() if key != "plan_seconds"}.items() <= kept.items()


@pytest.mark.slow
def test_bf16_moments_take_two_thirds() -> None:
    spec, layout = named_model("llama-3-70b"), parse_layout(CASES["llama-3-70b"][0])
    usual, aware = _planned("llama-3-70b"), plan_figures(spec, layout, precision_aware=True)
    for figure in ("state_bytes", "max_rank_bytes_written", "max_rank_bytes_read", "max_node_host_bytes"):
        assert 3 * aware[figure] == 2 * usual[figure]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-2"], "checkpoint.py: --model: gpt-2 is neither a directory with a config.json nor one of"),
        (["--train", "tp=3"], "checkpoint.py: layout: tp=3: expected a divisor of num_attention_heads=64"),
        (["--train", "ranks=8"], "checkpoint.py: --train: found 'ranks=8', expected name=number with each name once"),
        (["--gpus-per-node", "0"], "checkpoint.py: --gpus-per-node: expected a whole number of at least 1, found 0"),
        (["--threads", "0"], "checkpoint.py: --threads: expected a whole number of at least 1, found 0"),
        (["--fast"], "checkpoint.py: unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--plan-only", "--model", "llama-3-70b", "--train", "tp=8,pp=4,dp=2"]
    assert checkpoint.main([*usual, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message) and printed.err.count("\n") == 1


@pytest.mark.processes
def test_the_command_prints_one_json_object() -> None:
    command = "--plan-only --model llama-3-70b --train tp=8,pp=4,dp=2 --gpus-per-node 4 --threads 2"
    done = subprocess.run(
        [warm_python(), checkpoint.__file__, *command.split()], capture_output=True, text=True, timeout=400, check=True
    )
    sizes = json.loads(done.stdout)
    assert (sizes["model"], sizes["train"]) == ("llama-3-70b", "tp=8 pp=4 dp=2")
    assert sizes["nodes"] == 16 and sizes["files"] == 128 and sizes["versions"]["megatron-core"]

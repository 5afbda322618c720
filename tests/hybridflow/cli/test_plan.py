"""The command `hybridflow plan`: its table, the recipe that it writes, what-if, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cli import main

DEMO = "launch/recipes/demo.yaml"
LARGE = "launch/recipes/qwen3-30b-a3b-4xh200.yaml"
HERE = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(["plan", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.slow
def test_the_large_recipe_is_what_a_search_finds(capsys: pytest.CaptureFixture[str]) -> None:
    """The layout, engine and offloaded optimizer that were tuned by hand come first, with the measured seconds."""
    words = ("--gpus", "h200:4", "--prompt-tokens", "1024", "--explain", "--what-if", "link=800Gb")
    code, out, _ = _run(capsys, LARGE, *words)
    assert code == 0
    first = out[out.index("\n1. ") : out.index("\n2. ")]
    assert "1. colocated: " in first and "actor: ep=4 dp=4" in first and "optimizer offloaded" in first
    assert "rollout: 1 x (tp=4 ep=4 attention_dp=4)" in first and "next: " in first
    seconds = float(first.split("colocated: ")[1].split(" s a step")[0])
    assert seconds == pytest.approx(49.84, rel=0.15)  # benchmarks/results/h200-4gpu-30b/five-steps-run
    for text in ("KV cache of", "memory: rollout", "bottleneck: ", "MFU", "update of actor:", "grouped GEMMs"):
        assert text in out
    assert "what if link=800Gb: colocated" in out and "(+0%)" in out  # nothing crosses hosts


@pytest.mark.slow
def test_the_recipe_that_is_written_passes_the_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.yaml"
    words = ("--gpus", "cpu:2", "--count", "1", "--write", str(path), "--what-if", "staleness=1", "--what-if", "fp8")
    code, out, err = _run(capsys, DEMO, *words)
    assert (code, err) == (0, "") and f"{path}: the recipe of plan 1" in out
    assert "what if staleness=1: standalone" in out and "; rollout " in out
    assert "what if fp8: 2 GPUs for engines: no engine passes the checks, such as " in out
    assert main.main(["check", str(path)]) == 0
    code, _, err = _run(capsys, DEMO, "--gpus", "cpu:2", "--write", str(path))
    assert code == 2 and f"--write {path}: exists, expected a new file" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "safe_rlhf", "algorithms/dpo_online", "algorithms/rloo", "stream", "game"])
def test_a_written_recipe_of_any_algorithm_passes_the_checks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.yaml"
    code, _, err = _run(capsys, f"launch/recipes/{name}.yaml", "--gpus", "cpu:4", "--count", "1", "--write", str(path))
    assert (code, err) == (0, "")
    assert "placement:" in path.read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stream-lease", "plan: rollout.lease=true is not planned for; expected a recipe without"),
        ("algorithms/ippo", "plan with several actors: expected --actor with one of "),
    ],
)
def test_a_recipe_that_is_not_planned_for_is_refused_by_name(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, f"launch/recipes/{name}.yaml", "--gpus", "cpu:4")
    assert (code, out) == (2, "") and message in err


@pytest.mark.slow
def test_auto_is_resolved_into_the_recipe_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check", DEMO, "placement=auto", "--print"]) == 0
    printed = capsys.readouterr()
    line = next(line for line in printed.out.splitlines() if ": auto: " in line)
    assert line.startswith("placement: auto: ") and " s a step foreseen (" in line
    assert "\n  actor: cpu:0" in printed.out and "auto\n" not in printed.out.split("placement:\n")[1]

    assert main.main(["check", LARGE, "train.layout=auto", "--nodes", "1", "--gpus-per-node", "4", "--print"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("train.layout: auto: colocated, actor ")
    assert ", rollout 1 x (tp=4 ep=4 attention_dp=4); " in printed.out  # the recipe's own
    assert "micro_batch_tokens: 22550\n" in printed.out  # stays as it was


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "b300:8"], "--gpus b300:8: profile: b300; expected one of cpu, h100, h200, or a file of this form"),
        (["--gpus", "h200:0"], "--gpus h200:0: expected a kind and a number from 1 to 256, such as h200:8"),
        (["--nodes", "0"], "--nodes 0: expected a whole number of at least 1"),
        (["--link", "fast"], "--link fast: expected such as 400Gb"),
        (["--response-tokens", "2000"], "--response-tokens 2000: expected 1 to rollout.sampling.max_new_tokens=1024"),
        (["--what-if", "gold"], "--what-if gold: expected rollout-gpus=+N, fp8, staleness=N"),
        (["--count", "0"], "--count 0: expected at least 1"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0: expected 1 to 3072, what the context has for them"),
        (["--spread", "0.8"], "--spread 0.8: expected --response-tokens with it, the mean of the responses"),
        (["--response-tokens", "99", "--spread", "nan"], "--spread nan: expected a number from 0 to 3, such as 0.8"),
        (["--write", "/nowhere/a.yaml"], "--write /nowhere/a.yaml: no such directory, expected a new file in a"),
        (["--gpus", "h200:1"], "no layout fits 1,024 sequences of 2,048 tokens (such as train.copy_engine_dispatcher="),
        (["--gpus", "h200:2", "--gpu-gb", "40"], "actor: 2 GPUs of 40.0 GB: no layout fits 1,024 sequences of 2,048"),
        (
            ["--gpus", "h200:4", "--gpu-gb", "40"],
            "2,048 tokens (the least is 39.4 GB, with ",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, LARGE, "--prompt-tokens", "1024", *words)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1

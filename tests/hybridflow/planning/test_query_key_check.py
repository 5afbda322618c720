"""`train.fused_query_key` before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cli.main import main

DEMO = str(Path(__file__).parents[3] / "launch" / "recipes" / "demo.yaml")
SETTING, EVEN = "train.fused_query_key=true", "model.create.config.head_dim=32"


def test_a_model_with_norms_may_have_it() -> None:
    assert main(["check", DEMO, SETTING, EVEN]) == 0


@pytest.mark.parametrize(
    ("beside", "line"),
    [
        ((), "train.fused_query_key=true: head_dim=24 is no power of two, as the kernels need; expected false"),
        (
            (EVEN, "train.layout={tp: 2}", "model.create.config.num_key_value_heads=1"),
            "train.fused_query_key=true with tp=2: expected at most num_key_value_heads=1, or false",
        ),
    ],
)
def test_what_it_cannot_be_used_with(beside: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", DEMO, *beside]) == 0
    capsys.readouterr()
    assert main(["check", DEMO, SETTING, *beside]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1

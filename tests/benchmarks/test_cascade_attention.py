"""Refusals of the benchmark of decoding's attention."""

from __future__ import annotations

import pytest

from benchmarks import cascade_attention
from engine3d.platform import platform


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--responses", "8,x"], "--responses 8,x: expected whole numbers, such as 0,512"),
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
        (["--kv-heads", "0"], "--kv-heads 0: expected at least 1"),
        (["--heads", "6"], "--heads 6: expected a multiple of --kv-heads 4"),
        (["--requests", "12"], "--requests 12: expected a multiple of --samples 8"),
        ([], "this machine has no GPU, without which there is no FlashAttention-3"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not arguments and platform.gpus:
        pytest.skip("this machine has GPUs")
    assert cascade_attention.main(arguments) == 2
    assert capsys.readouterr().err == f"cascade_attention.py: {line}\n"

"""Refusals of the benchmark of exchanges between GPUs."""

from __future__ import annotations

import pytest

from benchmarks import peer_exchange
from engine3d.platform import platform


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tokens", "8,x"], "--tokens 8,x: expected whole numbers, such as 64,256"),
        (["--tokens", "0"], "--tokens 0: expected whole numbers, such as 64,256"),
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
        (["--tokens", "8,9000"], "--tokens 9000: 36864000 bytes of all ranks, of which 33554432 go by kernels"),
        ([], "this machine has 0 GPUs; expected two at least"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not arguments and platform.gpus:
        pytest.skip("this machine has GPUs")
    assert peer_exchange.main(arguments) == 2
    assert capsys.readouterr().err == f"peer_exchange.py: {line}\n"

"""Rates of copies between host memory and devices."""

from __future__ import annotations

import pytest
from torch.multiprocessing import ProcessRaisedException

from benchmarks import host_copies
from engine3d.platform import platform


@pytest.mark.processes
def test_all_devices_copy_both_ways_at_once() -> None:
    rates = host_copies.measured("page_locked", 2, 4, part_bytes=1 << 20)
    assert rates.keys() == {"in", "out", "both", "taken_s"}
    assert all(rates[way] > 0 for way in ("in", "out", "both"))


@pytest.mark.processes
def test_what_fails_in_one_of_them_is_told() -> None:
    with pytest.raises(ProcessRaisedException, match="KeyError: 'none such'"):
        host_copies.measured("none such", 1, 2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gb", "1"], "host_copies.py: --gb 1.0: expected at least 1.07, two chunks"),
        pytest.param(
            [],
            "host_copies.py: this machine has no GPU, whose copies are measured",
            marks=pytest.mark.skipif(platform.gpus > 0, reason="this machine has one"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert host_copies.main(arguments) == 2
    assert capsys.readouterr().err == f"{line}\n"

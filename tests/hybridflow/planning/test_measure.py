"""Measurement of this machine: rates of its kernels and exchanges, and the profile that they make."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from engine3d.errors import UserError
from hybridflow.cli import main
from hybridflow.planning.measure import rates as measure_rates
from hybridflow.planning.measure.kernels import ON_CPU, fitted_rates, measured_kernels
from hybridflow.planning.measure.links import measured_links
from hybridflow.planning.measure.machine import check_machine, profile_text
from hybridflow.planning.measure.rates import MeasuredRate
from hybridflow.planning.time.hardware import Hardware, load_profile, matching_profile, this_machine


def test_kernels_are_measured_under_the_names_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_rates, "_LEAST_S", 1e-3)
    monkeypatch.setattr(measure_rates, "ROUNDS", 1)
    tiny = replace(ON_CPU, tokens=64, widths=(16, 64), sequence=32, elements=2**12)
    rates = dict(measured_kernels(tiny, None))
    assert rates.keys() < {field.name for field in fields(Hardware)}
    assert all(rate.value >= 0 and rate.origin.startswith("measured, ") for rate in rates.values())
    assert rates["flops"].value > 1e6 and rates["attention"].value > 0


def test_rates_by_width_are_fitted() -> None:
    shares = {width: 0.78 * width / (width + 140) for width in (256, 1024, 4096)}
    assert fitted_rates(shares) == pytest.approx((0.78, 140))
    # An H200, whose first and narrowest multiplication was measured with low clocks.
    shares = {256: 0.0586, 512: 0.5411, 1024: 0.6178, 2048: 0.6914, 4096: 0.6597, 8192: 0.6954}
    linear, half = fitted_rates(shares)
    assert 0.7 < linear < 0.8 and 100 < half < 400
    assert fitted_rates({64: 0.9, 128: 0.8}) == (0.9, 0.0)  # narrower ones are not slower


@pytest.mark.processes
def test_exchanges_are_measured_between_ranks() -> None:
    rates = measured_links(2, 1 << 16)
    assert rates.keys() == {"message_s", "node_rate", "nccl_s", "nccl_small_rate"}
    assert all(rate.value > 0 and "gloo, 2 ranks" in rate.origin for rate in rates.values())


def test_a_profile_is_read_again_with_its_origins(tmp_path: Path) -> None:
    base = matching_profile(this_machine())
    assert base is not None
    path = tmp_path / "here.yaml"
    path.write_text(profile_text("here", base, {"flops": MeasuredRate(1.5e11, "measured, a test")}))
    profile = load_profile(str(path))
    assert profile.hardware == replace(base.hardware, flops=1.5e11) and profile.units == base.units
    assert profile.origins == base.origins | {"flops": "measured, a test"} and profile.machine == this_machine()
    check_machine(str(path), profile)
    with pytest.raises(UserError, match="measured with cores 999, this machine has "):
        check_machine("x.yaml", replace(profile, machine=profile.machine | {"cores": 999}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shipped profile is of this GPU")
def test_a_profile_of_another_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "there.yaml"
    path.write_text(profile_text("there", load_profile("h200"), {}).replace('"gpu": "cpu"', '"gpu": "NVIDIA H200"'))
    demo = "launch/recipes/demo.yaml"
    assert main.main(["plan", demo, "--profile", str(path)]) == 2
    line = capsys.readouterr().err
    assert f"--profile {path}: measured with gpu NVIDIA H200, this machine has cpu; expected" in line
    assert main.main(["plan", demo, "--profile", str(path), "--gpus", "h200:8"]) == 2
    assert "--gpus h200:8 of others: expected one" in capsys.readouterr().err
    assert main.main(["profile", str(path)]) == 2
    assert "expected a new file in a directory that exists" in capsys.readouterr().err
    assert main.main(["profile", str(tmp_path / "new.txt")]) == 2
    assert "expected a name that ends with .yaml" in capsys.readouterr().err

"""Measurement of this machine: rates of its kernels and exchanges, and the profile that they make."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.training.config import TrainConfig
from hybridflow.cli import main
from hybridflow.config.actors import load_one_recipe
from hybridflow.planning.measure import rates as measure_rates
from hybridflow.planning.measure.kernels import ON_CPU, fitted_rates, measured_kernels
from hybridflow.planning.measure.layers import layer_rates
from hybridflow.planning.measure.links import measured_links
from hybridflow.planning.measure.machine import check_machine, profile_text
from hybridflow.planning.measure.rates import MeasuredRate
from hybridflow.planning.time.hardware import Hardware, load_profile, matching_profile, this_machine
from hybridflow.planning.time.training import Batch, CostModel


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


def test_rates_of_layers_are_those_that_make_the_measured_seconds() -> None:
    hardware = replace(load_profile("cpu").hardware, passes=1.0)
    layers, few, many = 2, 16, 256
    passes = {}
    for name, layer_s in (("dense", 1e-3), ("sparse", 2e-3)):
        passes[f"{name} few"] = 0.05 + layers * layer_s
        passes[f"{name} apart"] = 0.05 + few * layers * layer_s
    passes["update few"], passes["update apart"] = 0.2, 0.2 + (few - 1) * layers * 2.5 * 2e-3
    passes["update many"] = passes["update few"] + (many - few) * 2e-4
    passes["update packed"] = passes["update many"] + many * layers * 2.5 * 3e-4
    split = {"few": 0.1, "apart": 0.1 + (few - 1) * layers * (2e-3 + 4 * 5e-4)}
    rates = {name: rate.value for name, rate in layer_rates(passes, split, hardware).items()}
    share = rates.pop("passes")
    expected = {"layer_s": 1e-3, "sparse_layer_s": 2e-3, "unfused_layer_s": 2e-3, "sequence_s": 3e-4}
    assert rates == pytest.approx(expected | {"backward": 1.5, "message_s": 5e-4})
    # With that share passes over the further sequences, without launches, take what was measured.
    create = load_one_recipe("launch/recipes/demo.yaml", []).model.create
    assert create is not None
    spec = model_spec(create.config)
    costs = CostModel(spec, replace(hardware, passes=share, backward=1.5))
    batches = (Batch(count, 8, count) for count in (many, few))
    more, less = (costs.passes(Layout(), TrainConfig(dtype="float32", packing=False), batch) for batch in batches)
    assert more.seconds - less.seconds == pytest.approx((many - few) * 2e-4)
    assert "message_s" not in layer_rates(passes, None, hardware)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="layers are measured on processors")
def test_a_measured_profile_plans_for_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "here.yaml")
    warnings = os.environ.get("PYTHONWARNINGS")
    assert main.main(["profile", path]) == 0
    assert os.environ.get("PYTHONWARNINGS") == warnings  # they are for its ranks alone
    assert "rates measured in" in capsys.readouterr().out
    profile = load_profile(path)
    measured = ("layer_s", "sparse_layer_s", "sequence_s", "message_s", "passes", "backward")
    assert all(profile.origins[name].startswith("measured, ") for name in measured)
    assert 0 < profile.hardware.passes <= 1 and 1e-4 < profile.hardware.layer_s < 1
    assert main.main(["plan", "launch/recipes/demo.yaml", "--profile", path]) == 0


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

"""Megatron-Core on a CPU, and packages that it and SGLang leave out there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_distributed


@pytest.mark.processes
def test_packages_that_are_installed_and_of_no_use_are_left_out(tmp_path: Path) -> None:
    """Packages for GPUs are left out of Megatron-Core, and slow ones of SGLang, with those that need them."""
    for package, source in (
        ("transformer_engine", "raise SystemExit('transformer_engine was imported')\n"),
        ("apex", "raise SystemExit('apex was imported')\n"),
        ("sklearn", "import scipy.sparse\n"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)
    program = (
        "from engine3d.platform.cpu import sglang\n"
        "assert sglang.activate() is not None\n"
        "import transformers.generation.candidate_generator\n"
        "from engine3d.platform.cpu.megatron import answer_for_cuda\n"
        "answer_for_cuda()\n"
        "from megatron.core.extensions.transformer_engine import HAVE_TE\n"
        "assert not HAVE_TE\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600, env=os.environ | {"PYTHONPATH": path})


def _mapped() -> None:
    from engine3d.platform.cpu.megatron import answer_for_cuda

    answer_for_cuda()
    tensor = torch.zeros(3, device="cuda")
    made = [tensor, tensor.to("cuda:0"), tensor.to(device="cuda"), tensor.cuda(), tensor.new_ones(2, device="cuda")]
    made += [torch.empty_like(tensor, device="cuda"), torch.nn.Linear(2, 2, device=torch.device("cuda", 0)).weight]
    assert {one.device.type for one in made} == {"cpu"}
    assert not torch.empty(2, pin_memory=True).is_pinned()
    assert tensor.type() == "torch.cuda.FloatTensor" and tensor.type(torch.float64).dtype == torch.float64
    with torch.device("meta"):
        assert torch.empty(3).device.type == torch.nn.Linear(2, 2).weight.device.type == "meta"


@pytest.mark.processes
def test_devices_and_names_of_types_are_mapped() -> None:
    run_distributed(_mapped, 1, timeout_s=120)

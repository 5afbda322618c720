"""Sums over a GPU's kernels in a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kernels
from benchmarks.kernels import Kernel, kind_of, summarise


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 4>(sglang::RankData*)", "communication"),
        ("fused_moe_kernel", "products of experts"),
        (
            "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute",
            "products of experts",
        ),
        ("nvjet_sm90_tst_128x192_64x5_2x1_v_badd_coopB_NTN", "other products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128", "attention"),
        ("void moe_align_block_size_kernel<int>(int const*)", "routing"),
        ("_permute_kernel", "routing"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "log-probs and sampling"),
        ("void transformer_engine::normalization::rmsnorm_bwd_general_kernel<float>", "norms and positions"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "norms and positions"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>", "element-wise and other"),
    ],
)
def test_kernels_are_of_a_kind_by_their_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kernels_that_overlap_count_once_as_busy_time() -> None:
    summary = summarise(
        [
            Kernel("nvjet_a", 1000, 3000),
            Kernel("ncclDevKernel_AllGather", 2000, 5000),  # 1 ms beside the product, 2 alone
            Kernel("nvjet_a", 2500, 2600),  # within the first
            Kernel("fused_moe_kernel", 7000, 8000),
        ]
    )
    assert (summary.span, summary.busy, summary.idle, summary.communication_alone) == (7, 5, 2, 2)
    assert summary.kinds == {
        "communication": (3, 1),
        "other products": (pytest.approx(2.1), 2),
        "products of experts": (1, 1),
    }
    assert list(summary.longest) == ["ncclDevKernel_AllGather", "nvjet_a", "fused_moe_kernel"]


def _trace(path: Path, events: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_times_are_reported_for_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"cat": "kernel", "name": "nvjet_a", "ts": 0.0, "dur": 3000.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 3000.0, "dur": 1000.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9e9},
        {"ph": "M", "name": "process_name"},
    ]
    path = _trace(tmp_path / "engine-TP-0.trace.json.gz", events)
    assert kernels.main([str(path), "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "  other products               1.500 ms   75.0%" in printed
    summary = json.loads(printed[printed.index("{") :])[path.name]
    assert (summary["steps"], summary["step_ms"], summary["idle_ms"]) == (2, 2.0, 0.0)
    assert summary["kinds"]["copies"] == {"ms": 0.5, "kernels": 0.5}


@pytest.mark.parametrize(
    ("events", "message"),
    [([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}], "no kernels of a GPU"), (None, "not a trace")],
)
def test_a_file_that_is_no_trace_of_a_gpu_is_refused(
    events: list[dict[str, Any]] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json.gz"
    if events is None:
        path.write_bytes(b"no archive")
    else:
        _trace(path, events)
    assert kernels.main([str(path)]) == 2
    line = capsys.readouterr().err
    assert message in line and str(path) in line and line.count("\n") == 1

"""GPU memory next to the tensors that are predicted one by one: rounded sizes, measured on H200 with NVML."""

from __future__ import annotations

from engine3d.layout import Layout

DRIVER_BYTES = 650 * 10**6
"""Memory of every GPU before a process uses it."""

CONTEXT_BYTES = 620 << 20
"""Memory of every process: CUDA's context, the loaded kernels, cuBLAS's workspace."""

MODEL_BYTES = 2400 * 10**6
"""Further memory of every model's process after its first step: kernels and workspaces of its libraries, and blocks
that PyTorch's allocator cannot free because something small is left in them.
"""

TRAINING_PROCESS_BYTES = 600 * 10**6
"""Memory of every model's process on a CPU next to its tensors: Python and the libraries. A demo run's, rounded up."""

ENGINE_PROCESSES_BYTES = 1500 * 10**6
"""The same for every rank of an engine: SGLang's processes, and the one that talks to them."""

CALL_PARSER_BYTES = 200 * 10**6
"""Memory for SGLang's parsers of tool calls in a process that has PyTorch and transformers. Measured: 171 MB."""
RUN_PROCESSES_BYTES = 1200 * 10**6
"""The same for the driver, the reward functions and Ray, which are on the first node."""

_COMMUNICATOR_BYTES = 484 << 20
"""NCCL's memory for each group of ranks that communicates."""

_PEER_BYTES = 640 << 20
"""NCCL's memory for each rank with which tokens are exchanged."""

_ENGINE_COMMUNICATION_BYTES = 1250 * 10**6
_GRAPH_BYTES_OF_A_LAYER = 720 * 10**3
_LOGITS = 5.8
"""Tensors as large as the float32 logits of all requests: of the largest CUDA graph, of sampling and its log-probs."""


def device_overhead(*, on_gpu: bool) -> int:
    """Bytes of a device that no process of a run takes."""
    return DRIVER_BYTES if on_gpu else 0


def model_overhead(layout: Layout, *, on_gpu: bool) -> int:
    """Bytes of a model's process on a rank next to its tensors."""
    return communicators(layout) + MODEL_BYTES + CONTEXT_BYTES if on_gpu else TRAINING_PROCESS_BYTES


def engine_overhead(*, on_gpu: bool) -> int:
    """Bytes of an engine's processes on a rank next to its tensors and its workspace."""
    return CONTEXT_BYTES if on_gpu else ENGINE_PROCESSES_BYTES


def communicators(layout: Layout) -> int:
    """Bytes that NCCL takes on a rank of a model.

    Megatron-Core makes several groups of the same ranks, and NCCL takes memory for each.
    """
    if layout.world_size == 1:
        return 0
    sizes = ((layout.dp * layout.cp, 2), (layout.cp, 1), (layout.tp, 2), (layout.pp, 2), (layout.ep * layout.etp, 3))
    groups = 1 + sum(count for size, count in sizes if size > 1)
    return groups * _COMMUNICATOR_BYTES + (layout.ep * layout.etp - 1) * _PEER_BYTES


def engine_workspace(*, requests: int, vocabulary: int, layers: int, graphs: int, tp: int) -> int:
    """Bytes that an engine takes on a rank next to weights and KV cache.

    Args:
        requests: that it runs at once.
        vocabulary: of the model.
        layers: of the model.
        graphs: batch sizes for which CUDA graphs are captured.
        tp: its tensor parallel size.
    """
    communication = _ENGINE_COMMUNICATION_BYTES if tp > 1 else 0
    return communication + graphs * layers * _GRAPH_BYTES_OF_A_LAYER + round(_LOGITS * requests * vocabulary * 4)

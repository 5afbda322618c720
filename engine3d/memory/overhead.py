"""What a process takes of a GPU beside the tensors that are foreseen one by one: rounded figures, measured on H200."""

from __future__ import annotations

CONTEXT_BYTES = 620 << 20
"""Of every process: CUDA's context, the kernels that were loaded, cuBLAS's workspace."""

"""Time of what takes a GPU some microseconds: many times in one CUDA graph, so that the start of it does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls, replayed once."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)

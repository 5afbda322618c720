"""Memory ledgers of many recipes whose engines are often the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine3d.memory import ServingBytes
from hybridflow.cluster.devices.device_map import Device
from hybridflow.planning.memory import estimate as memory_estimate


@contextmanager
def equal_engines_once() -> Iterator[None]:
    """Lay out the memory of equal engines once in the block. It takes most of the time of a ledger."""
    by_inputs: dict[str, dict[Device, ServingBytes]] = {}
    engines = memory_estimate._engines

    def of_equal_inputs(*inputs: Any) -> dict[Device, ServingBytes]:
        *settings, spec = inputs
        of_spec = (spec.hf_config, spec.sizes, spec.rope, spec.directory, spec.value_head, spec.expert_order)
        key = repr((settings, of_spec))
        if key not in by_inputs:
            by_inputs[key] = engines(*inputs)
        return by_inputs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_estimate, "_engines", of_equal_inputs)
        yield

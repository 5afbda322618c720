"""Memory ledgers of many recipes whose engines are often the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine3d.memory import ServingBytes
from engine3d.models import ModelSpec
from hybridflow.cluster.devices.device_map import Device
from hybridflow.planning.memory import estimate as memory_estimate
from hybridflow.rollout.config import RolloutRole


@contextmanager
def equal_engines_once() -> Iterator[None]:
    """Lay out the memory of equal engines once in the block. It takes most of the time of a ledger."""
    by_inputs: dict[str, dict[Device, ServingBytes]] = {}
    engines = memory_estimate._engines

    def of_equal_inputs(*inputs: Any) -> dict[Device, ServingBytes]:
        [spec] = [value for value in inputs if isinstance(value, ModelSpec)]
        settings = [_laid_out(value, spec) for value in inputs if value is not spec]
        of_spec = (spec.hf_config, spec.sizes, spec.rope, spec.directory, spec.value_head, spec.expert_order)
        key = repr((settings, of_spec, sorted(spec.unquantised)))
        if key not in by_inputs:
            by_inputs[key] = engines(*inputs)
        return by_inputs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_estimate, "_engines", of_equal_inputs)
        yield


def _laid_out(settings: Any, spec: ModelSpec) -> Any:
    """Settings of an engine without sizes of its cache, of which only states of gated delta nets are laid out."""
    if not isinstance(settings, RolloutRole) or spec.sizes.delta is not None:
        return settings
    sizes = {"max_total_tokens": None, "max_running_requests": 1}
    return settings.model_copy(update={"engine": settings.engine.model_copy(update=sizes)})

"""Precisions of the log-probs that `mismatch/` metrics compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compared_precisions(train: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Name the precisions of both sides: "trainer bfloat16, engines fp8, KV cache bfloat16".

    Args:
        train, engine: settings `train` and `rollout.engine`. Sides whose settings have no dtype are left out.
    """
    sides = {
        "trainer": train.get("precision") or train.get("dtype"),
        "engines": engine.get("precision") or engine.get("dtype"),
        "KV cache": engine.get("kv_cache_dtype") or engine.get("dtype"),
    }
    return ", ".join(f"{side} {precision}" for side, precision in sides.items() if precision)

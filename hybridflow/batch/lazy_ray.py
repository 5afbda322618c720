"""Ray, imported at its first use: `from hybridflow.batch.lazy_ray import ray` stands for `import ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import LazyModule

if TYPE_CHECKING:
    import ray as ray
    import ray.util.scheduling_strategies
else:
    ray = LazyModule("ray")

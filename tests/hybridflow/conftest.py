"""One Ray for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with eight CPU slots and no placement groups in use."""
    from hybridflow.cluster.ray_runtime import start_ray, stop_ray

    start_ray(cpu_slots=8)
    yield
    stop_ray()

"""Fixtures of several test modules: one Ray, and one real SGLang engine, since starting one takes most of a minute.

Imports are inside the fixtures, so that tests which need no engine do not wait for PyTorch and transformers.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine3d.rollout import RolloutEngine
    from tests.support.checkpoint_sender import CheckpointSender


def pytest_configure() -> None:
    """Restore Ctrl-C.

    Shells let what they start in the background ignore Ctrl-C, and so all its processes.
    """
    importlib.import_module("hybridflow")  # before Ray, which a test module may import first
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with eight CPU slots and no placement groups in use."""
    from hybridflow.cluster.ray.ray_session import start_ray, stop_ray
    from tests.support.warm import warm_starts

    with warm_starts():
        start_ray(cpu_slots=8)
    yield
    stop_ray()


@pytest.fixture(scope="session")
def tiny_model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two directories of one tiny Qwen3-MoE, with different random weights."""
    from tests.support.tiny_models import make_qwen3_moe

    directories = tuple(tmp_path_factory.mktemp("models") / f"qwen3-moe-{seed}" for seed in (0, 1))
    for seed, directory in enumerate(directories):
        make_qwen3_moe(directory, seed)
    return directories[0], directories[1]


@pytest.fixture(scope="session")
def shared_engine(tiny_model_dirs: tuple[Path, Path]) -> Iterator[RolloutEngine]:
    """The session's engine. Its weights are whatever the last test sent: use `engine` to have the first model's."""
    from engine3d.rollout import RolloutEngine
    from tests.support.tiny_rollout import WITH_ROUTES
    from tests.support.transfers import started

    with started([RolloutEngine(tiny_model_dirs[0], WITH_ROUTES)]) as [engine]:
        yield engine


@pytest.fixture(scope="session")
def checkpoints(shared_engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]) -> CheckpointSender:
    """A trainer that brings the session's engine to the weights of a directory."""
    from tests.support.checkpoint_sender import CheckpointSender

    return CheckpointSender(shared_engine, tiny_model_dirs[0])


@pytest.fixture
def engine(
    shared_engine: RolloutEngine, checkpoints: CheckpointSender, tiny_model_dirs: tuple[Path, Path]
) -> RolloutEngine:
    """The session's engine with the first tiny model's weights as version 0."""
    checkpoints.transfer(tiny_model_dirs[0], version=0)
    return shared_engine

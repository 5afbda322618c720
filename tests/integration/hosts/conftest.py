"""Three hosts that the tests of a module share, and services on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, hosts_or_skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts with a directory that all see; a test that breaks one makes hosts of its own."""
    with hosts_or_skip(3, shared=tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture(scope="module")
def hosts_with_sshd() -> Iterator[tuple[Hosts, Path]]:
    """Three hosts with sshd, and the configuration of a client."""
    with hosts_or_skip(3) as made:
        yield made, made.start_sshd()


@pytest.fixture(scope="module")
def hosts_with_slurm() -> Iterator[Hosts]:
    """Three hosts with Slurm."""
    with hosts_or_skip(3) as made:
        made.start_slurm()
        yield made

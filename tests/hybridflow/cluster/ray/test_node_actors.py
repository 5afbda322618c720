"""Nodes that do not answer as they should: their errors, and the logs of the others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.ray import node_actors
from hybridflow.cluster.ray.node_actor import NodeActor
from hybridflow.cluster.ray.node_actors import LogCopies, node_error

HOST = Host(1, "host-1", "10.0.0.11")
STACK = "The actor with name NodeActor failed to import on the worker.\n\nModuleNotFoundError: No module named 'x'\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RayTaskError("facts", "a stack", OSError("no such device")), "host-1 (10.0.0.11): no such device"),
        (ActorDiedError(), "host-1 (10.0.0.11): its process or its node is gone: "),
        (
            ActorDiedError(RayTaskError("__init__", STACK, RuntimeError(STACK))),
            "hosts: host-1 (10.0.0.11): ModuleNotFoundError: No module named 'x'; expected the driver's code, at the "
            "same paths",
        ),
    ],
)
def test_an_error_of_a_node_is_one_line(error: RayError, line: str) -> None:
    said = str(node_error(HOST, error))
    assert said.startswith(line) and "\n" not in said


class _Node(NodeActor):
    def pid(self) -> int:
        return os.getpid()


def _started(directory: Path) -> list[tuple[Host, Any, int]]:
    """Actors that read logs of `actor-1` in `node-1` and of `actor-2` in `node-2`, and their processes."""
    kind: Any = ray.remote(num_cpus=0)(_Node)
    actors = [kind.options(max_concurrency=4).remote("127.0.0.1") for _ in range(2)]
    given = [(directory / f"node-{index}", [f"actor-{index}"], False, False) for index in (1, 2)]
    ray.get([actor.open_logs.remote(*of_one) for actor, of_one in zip(actors, given, strict=True)], timeout=200)
    pids = ray.get([actor.pid.remote() for actor in actors], timeout=60)
    hosts = [Host(i, f"host-{i}", f"10.0.0.1{i}") for i in (1, 2)]
    return list(zip(hosts, actors, pids, strict=True))


@pytest.mark.processes
def test_logs_are_copied_to_their_end_while_another_node_does_not_answer(
    tmp_path: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_actors, "_LOOK_S", 5.0)
    text = "".join(f"line {number:06}\n" for number in range(60_000))
    (first, one, _), (second, other, pid) = _started(tmp_path)
    copies = LogCopies(tmp_path / "run", {first: one, second: other})
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(2.5)  # one that stands still has been asked
        (tmp_path / "node-1/logs/actor-1.log").write_text(text)
        copies.copy_all()
        assert (tmp_path / "run/logs/actor-1.log").read_text() == text
        assert list(copies.actors) == [first, second]
        os.kill(pid, signal.SIGKILL)
        copies.copy_all()
        assert list(copies.actors) == [first]
    finally:
        copies.close()
        for actor in (one, other):
            ray.kill(actor)

"""How the look at a node of an attached cluster ends where the node does not answer as it should."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from engine3d.errors import EngineError, UserError
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.runtime.attached_hosts import _Member

HOST = Host(1, "host-1", "10.0.0.11")


def asked(answer: Any, limit_s: float = 5.0) -> Any:
    """What comes of a question whose answer is a value, an exception, or None for none at all."""

    async def ask() -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        actor = SimpleNamespace(ask=SimpleNamespace(remote=lambda kind, fields: future))
        return await _Member(HOST, actor).ask("facts", limit_s)

    return asyncio.run(ask())


def test_an_answer() -> None:
    assert asked({"facts": {}}) == {"facts": {}}


def test_no_answer() -> None:
    with pytest.raises(EngineError, match=r"^host-1 \(10\.0\.0\.11\): no answer within 0\.1 s \(facts\)$"):
        asked(None, limit_s=0.1)


def test_an_action_that_fails() -> None:
    with pytest.raises(EngineError, match=r"^host-1 \(10\.0\.0\.11\): .*no such device$"):
        asked(RayTaskError("ask", "a stack", OSError("no such device")))


def test_a_node_that_is_gone() -> None:
    with pytest.raises(EngineError, match=r"^host-1 \(10\.0\.0\.11\): its process or its node is gone: "):
        asked(ActorDiedError())


def test_a_node_without_the_code() -> None:
    stack = (
        "The actor with name NodeAnswers failed to import on the worker.\n\nModuleNotFoundError: No module named 'x'\n"
    )
    with pytest.raises(UserError) as caught:
        asked(ActorDiedError(RayTaskError("__init__", stack, RuntimeError(stack))))
    line = "ModuleNotFoundError: No module named 'x'; expected the driver's code, at the same paths"
    assert str(caught.value) == f"hosts: host-1 (10.0.0.11): {line}"

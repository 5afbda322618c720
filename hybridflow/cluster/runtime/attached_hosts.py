"""The nodes of a Ray cluster that somebody else has started, looked at before a run as the hosts of a launch are.

An actor on every node answers what `check_hosts` asks. It has no device, and is gone when the nodes were looked at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine3d.cleaning import cleaning
from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.hosts.channel import Message
from hybridflow.cluster.hosts.checks.preflight import HostPreflight, PreflightPlan, check_hosts
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.hosts.run_token import new_token
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.runtime.cluster_nodes import ClusterNode
from hybridflow.cluster.runtime.ray_runtime import rank_environment
from hybridflow.errors.log import log

_SAY_EVERY_S = 10.0
_END_S = 10.0
_MISSING = re.compile(r"^\s*((?:ModuleNotFoundError|ImportError): .*)$", re.MULTILINE)


def check_nodes(
    nodes: Sequence[ClusterNode],
    plan: PreflightPlan,
    *,
    limits: LimitsConfig | None = None,
    with_table: bool = False,
) -> None:
    """Compare nodes of the cluster that this process is attached to, and have every pair try each other.

    Between nodes of which somebody holds a GPU, rates are measured by gloo: NCCL would need room on the first of each.

    Args:
        nodes: to look at, the driver's first.
        plan: what is looked at; the driver's directory of runs has to be the one that all see.
        limits: `gather_s` bounds the start of the actors.
        with_table: show the table of nodes also where nothing is wrong.

    Raises:
        UserError: something is wrong with which a run would fail; a line each.
        EngineError: a node does not answer.
    """
    token = new_token()
    hosts = _hosts(nodes, gpus_are_free=_gpus_are_free())
    members = [
        _Member(host, _start(node, host, plan, hosts[0].address, token))
        for node, host in zip(nodes, hosts, strict=True)
    ]
    limit_s = (limits or LimitsConfig()).gather_s
    try:
        _in_a_thread(_check(members, plan, limit_s, with_table))
    finally:
        with cleaning("hybridflow: actors that look at nodes"):
            for member in members:
                ray.kill(member.actor)


class NodeAnswers:
    """An actor on one node: answers what `check_hosts` asks there.

    Args:
        plan: of the check.
        host: the node.
        head: address of the first node.
        token: of the check.
    """

    def __init__(self, plan: PreflightPlan, host: Host, head: str, token: str) -> None:
        self._preflight = HostPreflight(plan, host, head, token)

    async def ask(self, kind: str, fields: Mapping[str, Any]) -> Message:
        """The answer to a question of `HostPreflight.actions`."""
        return await self._preflight.actions[kind](**fields) or {}


class _Member:
    """A node as `check_hosts` asks it."""

    def __init__(self, host: Host, actor: Any) -> None:
        self.host, self.actor = host, actor

    async def ask(self, kind: str, limit_s: float, **fields: Any) -> Message:
        """Ask its actor.

        Raises:
            UserError: the node cannot import what is to answer.
            EngineError: it cannot be done there, or there is no answer in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                answer: Message = await self.actor.ask.remote(kind, fields)
                return answer
        except RayError as error:  # perhaps a TimeoutError of the node as well
            raise _told(self.host, error) from None
        except TimeoutError:
            raise EngineError(f"{self.host}: no answer within {limit_s:g} s ({kind})") from None


def _told(host: Host, error: RayError) -> UserError | EngineError:
    """What comes of an error of Ray's, which may hold a stack of the node in its words."""
    if missing := _MISSING.findall(str(error)):
        return UserError(f"hosts: {host}: {missing[-1]}; expected the driver's code, at the same paths")
    if isinstance(error, RayTaskError):
        return EngineError(f"{host}: {first_line(error.cause)}")
    if isinstance(error, RayActorError):
        return EngineError(f"{host}: its process or its node is gone: {first_line(error)}")
    return EngineError(f"{host}: {first_line(error)}")


def _hosts(nodes: Sequence[ClusterNode], *, gpus_are_free: bool) -> list[Host]:
    """As `check_hosts` counts them. No interface: ranks on a cluster of others' find theirs by its environment."""
    return [
        Host(
            index=index,
            name=each.host_name or each.address,
            address=each.address,
            role=each.role,
            gpus=each.node.gpus if gpus_are_free else 0,
            cpu_slots=each.node.cpu_slots,
        )
        for index, each in enumerate(nodes)
    ]


def _gpus_are_free() -> bool:
    return ray.available_resources().get("GPU", 0) == ray.cluster_resources().get("GPU", 0)


def _start(node: ClusterNode, host: Host, plan: PreflightPlan, head: str, token: str) -> Any:
    # Settings of the network are the cluster's own, and the recipe is read by the driver alone.
    plan = dataclasses.replace(plan, recipe=None)
    actor: Any = ray.remote(num_cpus=0, max_restarts=0)(NodeAnswers)
    return actor.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        runtime_env={"env_vars": rank_environment(host.index)},
    ).remote(plan, host, head, token)


async def _check(members: Sequence[_Member], plan: PreflightPlan, limit_s: float, with_table: bool) -> None:
    await _until_there(members, limit_s)
    await check_hosts(members, plan, with_table=with_table)


async def _until_there(members: Sequence[_Member], limit_s: float) -> None:
    """Wait until every node has started its actor."""
    began = time.monotonic()
    asked = {asyncio.create_task(member.ask("clock", limit_s)): member for member in members}
    waiting = set(asked)
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=_SAY_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if waiting:
            missing = listed([str(asked[task].host) for task in waiting])
            log.info(
                f"waiting for {len(waiting)} of {len(members)} nodes, for {time.monotonic() - began:.0f} s: {missing}"
            )


def _in_a_thread(work: Coroutine[Any, Any, None]) -> None:
    """Run it while this thread is there for signals; a program of the user's may have an event loop of its own here."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(work))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="look at nodes", daemon=True)
    thread.start()
    result.result()
    thread.join(_END_S)

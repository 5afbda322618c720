"""The ranks of a run seen from its driver, on whatever host they are.

On this host the driver looks itself. On others it asks the launch's agents; where another's Ray cluster has no agents,
tasks of Ray's on their nodes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine3d.errors import EngineError
from hybridflow.cluster.hosts.driver_link import driver_link
from hybridflow.cluster.processes.rank_look import (
    RankLook,
    RankPlace,
    look_here,
    looks_from_json,
    write_stacks_here,
)
from hybridflow.cluster.runtime import ray_runtime

_LIMIT_S = 8.0
"""Of the answers of other hosts."""


def look_at(places: Sequence[RankPlace]) -> list[RankLook]:
    """Look at ranks; those are missing whose host does not answer."""
    if not places:
        return []
    here, others = _divided(places)
    looks = look_here(here)
    if others and (link := driver_link()) is not None:
        with contextlib.suppress(EngineError):
            for answer in link.ask_each("look", _LIMIT_S, places=[asdict(place) for place in others]):
                looks += looks_from_json(answer.get("looks", ()))
    elif others:
        for found in _by_tasks(look_here, others):
            looks += found
    return looks


def collect_stacks(places: Sequence[RankPlace], *, wake: bool) -> None:
    """Have ranks, and what they have started, write their stacks; where a host does not answer, without those there.

    Args:
        places: of the ranks.
        wake: let those go on that are stopped, which write nothing otherwise.
    """
    if not places:
        return
    here, others = _divided(places)
    write_stacks_here(here, wake)
    if others and (link := driver_link()) is not None:
        with contextlib.suppress(EngineError):
            link.ask_each("write_stacks", _LIMIT_S, places=[asdict(place) for place in others], wake=wake)
    elif others:
        _by_tasks(functools.partial(write_stacks_here, wake=wake), others)


def _divided(places: Sequence[RankPlace]) -> tuple[list[RankPlace], list[RankPlace]]:
    """Those on this host, and those on others."""
    own = ray.util.get_node_ip_address()
    return [place for place in places if place.address == own], [place for place in places if place.address != own]


def _by_tasks(work: Callable[[list[RankPlace]], Any], places: Sequence[RankPlace]) -> list[Any]:
    """What a function makes of the ranks of each node, there; without those nodes that do not answer."""
    if not ray_runtime.ray_answers():
        return []
    task: Any = ray.remote(num_cpus=0, max_retries=0)(work)
    asked = []
    for node in dict.fromkeys(place.node for place in places):
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        mine = [place for place in places if place.node == node]
        asked.append(task.options(scheduling_strategy=strategy).remote(mine))
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_LIMIT_S)
    found = []
    for each in ready:
        with contextlib.suppress(RayError):
            found.append(ray.get(each))
    return found

"""Actors of the nodes of this process's session, one each: asked for checks, looks at ranks, stacks and logs.

They are gone with the session. On its own node the driver looks at ranks itself.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine3d.errors import EngineError, UserError, first_line
from hybridflow.cluster.hosts.checks.facts import mark_directory, sees_mark
from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.processes.rank_look import RankLook, RankPlace, look_here, write_stacks_here
from hybridflow.cluster.ray import rank_logs, ray_session
from hybridflow.cluster.ray.node_actor import NodeActor
from hybridflow.errors.log import log

_LOOK_S = 8.0
"""Limit of looks at ranks, stacks, and logs that are awaited."""
_BEGIN_S = 30.0
_MARK_S = 10.0
_READ_EVERY_S = 1.0
_MOST_BEHIND = 4 << 20
"""Bytes of a log that wait to be read, at most; then some are left out."""
_MOST_BEHIND_AT_LAST = 1 << 20
_AT_ONCE = 16
_RAY_GONE = (RayError, RuntimeError, ConnectionError)
"""Errors of calls where Ray has ended, or the connection to it."""
_MISSING = re.compile(r"^\s*((?:ModuleNotFoundError|ImportError): .*)$", re.MULTILINE)


def start_actors(hosts: Sequence[Host], *, environments: bool = False) -> dict[Host, Any]:
    """Start an actor on each host.

    Args:
        hosts: with nodes of Ray's.
        environments: give them the environment of ranks of their host, for a network that they use.
    """
    kind: Any = ray.remote(num_cpus=0, max_restarts=0)(NodeActor)
    return {
        host: kind.options(
            max_concurrency=_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(host.node_id, soft=False),
            runtime_env={"env_vars": ray_session.rank_environment(host.index) if environments else {}},
        ).remote(host.address)
        for host in hosts
    }


def ask_all(
    actors: Mapping[Host, Any],
    ask: str | Callable[..., Any],
    limit_s: float,
    arguments: Sequence[Sequence[Any]] | None = None,
) -> list[Any]:
    """Call a function on nodes, or a method of their actors, at the same time; the answers in order.

    Args:
        actors: of the hosts.
        ask: the function, or the name of a method of `NodeActor`.
        limit_s: of all answers.
        arguments: of each call; none if None.

    Raises:
        UserError: a node cannot import what is to answer.
        EngineError: it cannot be done there, or there is no answer in time.
    """
    given = zip(actors.values(), arguments or [()] * len(actors), strict=True)
    refs = [_submit(actor, ask, *of_one) for actor, of_one in given]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s) if refs else ([], [])
    name, answered = ask if isinstance(ask, str) else ask.__name__, set(ready)
    return [_answer(host, name, limit_s, ref, ref in answered) for host, ref in zip(actors, refs, strict=True)]


def _submit(actor: Any, ask: str | Callable[..., Any], *arguments: Any) -> Any:
    return getattr(actor, ask).remote(*arguments) if isinstance(ask, str) else actor.call.remote(ask, *arguments)


def _answer(host: Host, name: str, limit_s: float, ref: Any, is_ready: bool) -> Any:
    if not is_ready:
        raise EngineError(f"{host}: no answer within {limit_s:g} s ({name})")
    try:
        return ray.get(ref)
    except RayError as error:
        raise node_error(host, error) from None


def node_error(host: Host, error: RayError) -> UserError | EngineError:
    """The error of a node, of Ray's, which may hold a stack of the node in its words."""
    if missing := _MISSING.findall(str(error)):
        return UserError(f"hosts: {host}: {missing[-1]}; expected the driver's code, at the same paths")
    if isinstance(error, RayTaskError):
        return EngineError(f"{host}: {first_line(error.cause)}")
    if isinstance(error, RayActorError):
        return EngineError(f"{host}: its process or its node is gone: {first_line(error)}")
    return EngineError(f"{host}: {first_line(error)}")


def look_at(locations: Sequence[RankPlace]) -> list[RankLook]:
    """Look at ranks; those of a node that does not answer are missing."""
    here, others = _divided(locations)
    return look_here(here) + [look for looks in _on_nodes(look_here, others) for look in looks]


def collect_stacks(locations: Sequence[RankPlace], *, wake: bool) -> None:
    """Ask ranks, and what they have started, for their stacks, but for those of a node that does not answer.

    Args:
        locations: of the ranks.
        wake: continue those that are stopped, which write nothing otherwise.
    """
    here, others = _divided(locations)
    write_stacks_here(here, wake)
    _on_nodes(write_stacks_here, others, wake)


def _divided(locations: Sequence[RankPlace]) -> tuple[list[RankPlace], list[RankPlace]]:
    """Ranks on this host, and those on others."""
    if not locations:
        return [], []
    own_address = ray.util.get_node_ip_address()
    return [location for location in locations if location.address == own_address], [
        location for location in locations if location.address != own_address
    ]


def _on_nodes(function: Callable[..., Any], locations: Sequence[RankPlace], *arguments: Any) -> list[Any]:
    """Answers of a function with the ranks of each node, without those of nodes that do not answer."""
    if not locations or not ray_session.ray_answers():
        return []
    known = ray_session.session_state().actors
    refs = []
    for node in dict.fromkeys(location.node for location in locations):
        of_node = [location for location in locations if location.node == node]
        if (actor := next((actor for host, actor in known.items() if host.node_id == node), None)) is None:
            started = start_actors([Host(0, of_node[0].address, of_node[0].address, node_id=node)])
            known |= started
            [actor] = started.values()
        refs.append(_submit(actor, function, of_node, *arguments))
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_LOOK_S)
    answers = []
    for ref in ready:
        with contextlib.suppress(RayError):
            answers.append(ray.get(ref))
    return answers


class LogCopies:
    """Copies in the run's directory here of logs that ranks write on nodes which do not see it.

    Args:
        run: the directory.
        actors: of these nodes.
    """

    def __init__(self, run: Path, actors: Mapping[Host, Any]) -> None:
        self._run, self._actors = run, dict(actors)
        self._pending: dict[Any, Host] = {}
        self._copying = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._copy_on, name="logs of nodes", daemon=True)
        self._thread.start()

    @property
    def actors(self) -> Mapping[Host, Any]:
        """Actors of nodes whose logs are copied now."""
        return dict(self._actors)

    def copy_all(self) -> None:
        """Copy all that ranks have written so far, but for a node that does not answer in time."""
        with self._copying, contextlib.suppress(*_RAY_GONE):
            deadline = time.monotonic() + _LOOK_S
            earlier = set(self._pending)
            self._request(list(self._actors), _MOST_BEHIND_AT_LAST)
            for ref, host, is_new in self._copied(deadline):
                if (is_new or ref in earlier) and time.monotonic() < deadline:
                    self._request([host], _MOST_BEHIND_AT_LAST)

    def close(self) -> None:
        """Copy no more. Idempotent."""
        self._closing.set()
        self._thread.join(_LOOK_S)

    def _copy_on(self) -> None:
        with contextlib.suppress(*_RAY_GONE):
            while not self._closing.wait(_READ_EVERY_S):
                with self._copying:
                    self._request(list(self._actors), _MOST_BEHIND)
                    # A node that does not answer keeps neither the others nor `copy_all` waiting.
                    for _ in self._copied(time.monotonic() + _READ_EVERY_S):
                        pass

    def _request(self, hosts: Iterable[Host], most_behind: int) -> None:
        """Ask nodes for new bytes, but for those that have not answered yet."""
        for host in set(hosts).difference(self._pending.values()):
            self._pending[self._actors[host].read_logs.remote(most_behind)] = host

    def _copied(self, deadline: float) -> Iterator[tuple[Any, Host, bool]]:
        """Copy answers as they come; the request, its node, and True if it had new bytes beside those of heartbeats."""
        while self._pending:
            ready, _ = ray.wait(list(self._pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            [ref] = ready
            host = self._pending.pop(ref)
            try:
                new = ray.get(ref)
                rank_logs.write(self._run, new)
            except RayError as error:
                del self._actors[host]
                if not isinstance(error, RayActorError):  # of a lost node the run itself says more
                    log.warning(f"logs are not copied any more: {node_error(host, error)}")
            except OSError as error:
                del self._actors[host]
                log.warning(f"logs of {host} are not copied any more: {error}")
            else:
                is_new = any(addition.data and not addition.file.endswith(".heartbeat") for addition in new)
                yield ref, host, is_new


def keep_logs(run: Path, processes: Mapping[int, Collection[str]], *, in_place: bool, private: bool) -> None:
    """Copy from now on what processes of nodes that do not see the run's directory write there.

    Before they are started.

    Args:
        run: the directory.
        processes: names of logs such as `actor-1`, by the number of the node.
        in_place: an earlier start of the run continues.
        private: the recipe's.

    Raises:
        EngineError: a node cannot write there.
    """
    state = ray_session.session_state()
    actors = {host: actor for host, actor in state.actors.items() if host.index in state.apart}
    if not actors:
        return
    if state.logs is not None:  # of an earlier run of this session
        state.logs.close()
    given = [(run, sorted(processes.get(host.index, ())), in_place, private) for host in actors]
    ask_all(actors, "open_logs", _BEGIN_S, given)
    state.logs = LogCopies(run, actors)


def copy_logs() -> None:
    """Copy all that ranks on other nodes have written so far."""
    logs = ray_session.session_state().logs
    if logs is not None and ray_session.is_complete():
        logs.copy_all()


def request_recordings(run: Path) -> None:
    """Ask ranks on nodes that do not see the run's directory for flight recordings of torch."""
    logs = ray_session.session_state().logs
    if logs is not None and ray_session.ray_answers():
        with contextlib.suppress(UserError, EngineError):
            ask_all(logs.actors, rank_logs.request_recordings, _MARK_S, [(run,)] * len(logs.actors))


def nodes_apart(directory: Path, setting: str) -> list[int]:
    """Nodes, of those that were checked, that see another directory at a path than the driver.

    Args:
        directory: or its nearest parent that is there.
        setting: that names it.

    Raises:
        UserError: nothing can be written there.
        EngineError: a node does not answer.
    """
    others = {host: actor for host, actor in ray_session.session_state().actors.items() if host.index}
    with mark_directory(directory, setting) as mark:
        seen = ask_all(others, sees_mark, _MARK_S, [(mark,)] * len(others))
    return [host.index for host, sees in zip(others, seen, strict=True) if not sees]

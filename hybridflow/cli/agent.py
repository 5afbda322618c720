"""`hybridflow agent`: one host's part of a run on several hosts. The launchers under `launch/` start it.

A launcher that reaches a host by a connection (`launch/ssh.sh`, `launch/slurm.sbatch`) holds the agent's standard input
open: the run's token, then signals; its end is the launcher's. There is no other way in that nobody else sees, and none
that is also left when the launcher is killed. `hybridflow token` makes the token.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine3d.errors import UserError, shortened
from engine3d.settings import Settings
from hybridflow.algorithms.own_files import own_source
from hybridflow.cluster.devices.device_map import ROLES
from hybridflow.cluster.hosts.agent import Agent, Assignment
from hybridflow.cluster.hosts.checks.facts import recipe_hash
from hybridflow.cluster.hosts.description import checked_role
from hybridflow.cluster.hosts.launch_plan import DOCTOR, LaunchPlan
from hybridflow.cluster.hosts.network.interfaces import all_interfaces, named
from hybridflow.cluster.hosts.network.network_settings import NetworkConfig
from hybridflow.cluster.hosts.run_token import TOKEN, default_file, find_token, needed, new_token, write_token
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.ray.ray_host import LOOPBACK
from hybridflow.config.reading.yaml_loader import apply_override, build_settings, parse_override, read_with_bases

MOST_HOSTS = 1 << 14
COMMANDS = ("train", DOCTOR)
"""Commands that a launch can run."""
_SIGNALS = {b"INT": signal.SIGINT, b"TERM": signal.SIGTERM, b"USR1": signal.SIGUSR1}


def take_part(assignment: Assignment, plan: LaunchPlan, announce: Callable[[int], object] | None = None) -> int:
    """Take part in a launch until it is over; the exit code.

    Args:
        assignment: of this host, as its launcher describes it.
        plan: of the launch, without the values of the recipe.
        announce: is called with the port at which host 0 listens, on host 0.

    Raises:
        UserError: this host cannot take part as it is.
    """
    _check(assignment, plan)
    limits, network, recipe = _settings(plan.words[1:])
    plan = replace(plan, recipe=recipe, network=network, limits=limits)
    interface = _one_interface(assignment.interface, network.interface)
    if plan.hosts == 1:
        token = find_token() or new_token()
        return Agent(replace(assignment, head=LOOPBACK, port=0, address=LOOPBACK, interface=None), plan, token).run(
            announce
        )
    token = needed(find_token())
    address = None
    if interface is not None:
        address = _address_of(interface, assignment.head)
        if assignment.index == 0:
            _check_head(assignment.head, interface, address)
    elif assignment.index == 0:
        address = _own_address(assignment.head)
    head = address if assignment.index == 0 and address is not None else assignment.head
    return Agent(replace(assignment, head=head, address=address, interface=interface), plan, token).run(announce)


def _check(assignment: Assignment, plan: LaunchPlan) -> None:
    """Refuse numbers and words that are none of a launch's."""
    if not 1 <= plan.hosts <= MOST_HOSTS:
        raise UserError(f"{plan.hosts} hosts: expected at least 1 and at most {MOST_HOSTS:,}")
    if not 0 <= assignment.index < plan.hosts:
        raise UserError(f"host {assignment.index} of {plan.hosts}: expected 0 to {plan.hosts - 1}")
    checked_role(assignment.role)
    if assignment.cpu_slots is not None and assignment.cpu_slots < 1:
        raise UserError(f"--cpu-slots {assignment.cpu_slots}: expected at least 1")
    if plan.restarts < 0:
        raise UserError(f"--max-restarts {plan.restarts}: expected at least 0")
    if not 0 <= plan.spares < plan.hosts:
        most = plan.hosts - 1
        raise UserError(f"--spares {plan.spares} of {plan.hosts} hosts: expected at least 0 and at most {most}")
    if plan.spares and not plan.restarts and not plan.is_doctor:
        raise UserError(f"--spares {plan.spares} without --max-restarts: a host that stands by would never be used")
    if not plan.words or plan.words[0] not in COMMANDS:
        given = shortened(plan.words[0]) if plan.words else "nothing"
        raise UserError(f"a launch runs one of {', '.join(COMMANDS)}, found {given}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hybridflow agent`."""
    parser.add_argument("--host", type=int, required=True, metavar="I", help="number of this host, from 0")
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="how many there are")
    parser.add_argument("--head", required=True, metavar="HOST:PORT", help="where host 0 listens")
    parser.add_argument("--interface", metavar="NAME", help="network interface of the cluster on this host")
    parser.add_argument("--role", choices=ROLES, help="what this host is for; anything if not said")
    parser.add_argument("--cpu-slots", type=int, metavar="N", help="CPU slots of this host (one a core)")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="starts after failures, with resume=auto (0)"
    )
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="the last N hosts stand by, each for one that is lost (0); the same on every host",
    )
    parser.add_argument(
        "--stdin", action="store_true", help="the token comes on standard input, whose end is the launcher's"
    )
    parser.add_argument("command", choices=COMMANDS, help="what host 0 runs once all hosts are there")
    parser.add_argument("recipe", metavar="RECIPE", help="the same file on every host")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for hybridflow train")
    parser.add_argument("--track_metrics", action="store_true", help="write metrics to JSONL, CSV and TensorBoard")
    parser.add_argument(
        "--again", action="store_true", help="continue the run if it has begun, as for hybridflow train"
    )


def run(parsed: argparse.Namespace) -> int:
    """The command."""
    if parsed.stdin:
        obey_standard_input()
    head, port = head_and_port(parsed.head)
    words = [
        parsed.command,
        parsed.recipe,
        *parsed.overrides,
        *(["--track_metrics"] if parsed.track_metrics else []),
        *(["--again"] if parsed.again else []),
    ]
    assignment = Assignment(
        parsed.host, head, port, interface=parsed.interface, role=parsed.role, cpu_slots=parsed.cpu_slots
    )
    return take_part(assignment, LaunchPlan(parsed.hosts, words, restarts=parsed.max_restarts, spares=parsed.spares))


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow token`."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=f"({default_file()})")


def token(parsed: argparse.Namespace) -> int:
    """Run `hybridflow token`.

    Raises:
        UserError: the file is there already, or cannot be written.
    """
    path = parsed.file or default_file()
    write_token(path)
    print(path)
    return 0


def head_and_port(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[address]:port".

    Raises:
        UserError: it is neither.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(f"host 0 at {shortened(text)!r}: expected HOST:PORT, such as host-0:29400 or [fd00::1]:29400")
    return host, int(port)


def obey_standard_input() -> None:
    """Take the run's token from the first line of standard input, as if it stood in the environment.

    Each later line is INT, TERM or USR1, which this process then gets; the end of input is TERM. Standard input is
    /dev/null from here on, for this process and all that it starts.

    Raises:
        UserError: standard input has ended before the token.
    """
    descriptor = os.dup(0)  # which no other process inherits
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    lines = _input_lines(descriptor)
    token = next(lines, None)
    if token is None:
        raise UserError("--stdin: standard input has ended; expected the run's token on its first line")
    os.environ[TOKEN] = token.decode("utf-8", "replace")

    def obey() -> None:
        for line in lines:
            if (number := _SIGNALS.get(line)) is not None:
                _send(number)
        _send(signal.SIGTERM)

    threading.Thread(target=obey, name="launcher", daemon=True).start()


def _send(number: signal.Signals) -> None:
    # To the main thread: one that waits in a system call is to wake up.
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _input_lines(descriptor: int) -> Iterator[bytes]:
    """Whole lines, without what ends them."""
    pending = b""
    while read := os.read(descriptor, 4096):
        *lines, pending = (pending + read).split(b"\n")
        yield from lines


def _settings(words: Sequence[str]) -> tuple[LimitsConfig, NetworkConfig, str]:
    """Read the recipe's limits and network, and its hash, before slow imports.

    Raises:
        UserError: there is no such recipe, or what it says of these is wrong.
    """
    paths = [word for word in words if "=" not in word and not word.startswith("-")]
    if len(paths) != 1:
        raise UserError(f"train: expected one recipe and settings such as seed=1, found {shortened(' '.join(words))!r}")
    data, locations = read_with_bases(Path(paths[0]))
    for word in words:
        if "=" in word and not word.startswith("-"):
            apply_override(data, parse_override(word))

    def section[S: Settings](name: str, kind: type[S]) -> S:
        within = {key[1:]: location for key, location in locations.items() if key[:1] == (name,)}
        return build_settings(kind, data.get(name) or {}, within, f"{paths[0]}: {name}")

    source = own_source(data)
    hash_ = recipe_hash(data if source is None else {**data, "algorithm's file": source})
    return section("limits", LimitsConfig), section("network", NetworkConfig), hash_


def _one_interface(given: str | None, of_recipe: str | None) -> str | None:
    """The interface that the launcher or the recipe names.

    Raises:
        UserError: they name two.
    """
    if given is not None and of_recipe is not None and given != of_recipe:
        raise UserError(f"--interface {given} and network.interface={of_recipe} are both given; expected one of them")
    return given or of_recipe


def _own_address(head: str) -> str:
    """The address of this host, which is the first one, by the name that the others know it by.

    Raises:
        UserError: the name does not resolve, or not to an address at which others reach this host.
    """
    try:
        infos = socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"{head} does not resolve on this host ({error.strerror})") from None
    reached = [info[4][0] for info in infos if not ipaddress.ip_address(str(info[4][0])).is_loopback]
    if not reached:
        raise UserError(
            f"{head} resolves to {infos[0][4][0]} on this host, which other hosts do not reach; name host 0 by an "
            "address of the cluster's network, or the interface (--interface)"
        )
    return str(reached[0])


def _check_head(head: str, interface: str, address: str) -> None:
    """Host 0 listens at its interface's address: the others must not be given that of another one.

    Raises:
        UserError: they are.
    """
    try:
        addresses_of_head = {str(info[4][0]) for info in socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)}
    except OSError:  # others may know the name
        return
    interfaces = all_interfaces()
    others = {
        name for name, addresses in interfaces.items() if addresses_of_head & set(addresses) and name != interface
    }
    reached = {resolved for resolved in addresses_of_head if not ipaddress.ip_address(resolved).is_loopback}
    if address not in addresses_of_head and reached and others:
        raise UserError(
            f"--interface {interface} ({address}): the others look for host 0 at {head}, which is "
            f"{', '.join(sorted(reached))} ({', '.join(sorted(others))}); expected --head {address} on all hosts"
        )


def _address_of(interface: str, head: str) -> str:
    """The address of this host on an interface of the cluster's network, of the family of the first host's.

    Raises:
        UserError: there is no such interface, it is down, or other hosts do not reach its address.
    """
    family = None
    with contextlib.suppress(OSError, ValueError):
        family = socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)[0][0]
    named_interface = named(interface, family)
    if ipaddress.ip_address(named_interface.address).is_loopback:
        raise UserError(
            f"--interface {named_interface}: other hosts do not reach it; expected one of the cluster's network"
        )
    return named_interface.address

"""Network interfaces of this host: which one reaches an address, and which addresses one has."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from engine3d.errors import UserError, shortened
from hybridflow.cluster.hosts.description import listed

_ANY_PORT = 9
"""Of a datagram socket that sends nothing."""
_MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface of this host and one of its addresses.

    Args:
        name: such as eth0.
        address: IPv4 or IPv6, in numbers.
    """

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def route_to(address: str) -> Interface:
    """The interface and source address by which the kernel reaches a host; no packet is sent.

    The interface is the one that has the source address: of an address of this host itself, the one that has it.

    Args:
        address: in numbers, or a host name.

    Raises:
        UserError: the name does not resolve, there is no route, or no interface has the source address.
    """
    try:
        found = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UserError(f"{shortened(address)} does not resolve on this host ({error.strerror})") from None
    why = "no address"
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as asking:
                asking.connect(where)
                source = str(asking.getsockname()[0])
        except OSError as error:
            why = error.strerror or str(error)
            continue
        if (name := interface_with(source)) is not None:
            return Interface(name, source)
        why = f"no interface has the source address {source}"
    raise UserError(f"no route from this host to {shortened(address)}: {why}; it has {_those_that_exist()}")


def named(name: str, family: socket.AddressFamily | None = None) -> Interface:
    """The interface of this name with its address in a family; IPv4 before IPv6 if None.

    An address of its link alone (fe80::, 169.254.) is none of them: it means another host on another link.

    Raises:
        UserError: there is none of this name, it is down, or it has no such address.
    """
    addresses = _addresses()
    if name not in addresses:
        raise UserError(f"no interface {shortened(name)!r} on this host; it has {_those_that_exist()}")
    if not psutil.net_if_stats()[name].isup:
        raise UserError(f"interface {name} is down or has no cable; this host has {_those_that_exist()}")
    for wanted in (socket.AF_INET, socket.AF_INET6) if family is None else (family,):
        for kind, address in addresses[name]:
            if kind == wanted and _is_known(address):
                return Interface(name, address)
    of = "" if family is None else f"{'IPv6' if family == socket.AF_INET6 else 'IPv4'} "
    raise UserError(f"interface {name} has no {of}address; this host has {_those_that_exist()}")


def all_interfaces() -> dict[str, list[str]]:
    """Addresses of every interface by its name, also of those that are down; without those of its link alone."""
    return {name: [address for _, address in found if _is_known(address)] for name, found in _addresses().items()}


def _addresses() -> dict[str, list[tuple[int, str]]]:
    """Families and addresses of every interface by its name."""
    families = (socket.AF_INET, socket.AF_INET6)
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in psutil.net_if_stats()}
    for name, addresses in psutil.net_if_addrs().items():
        ours = [(int(each.family), _without_scope(each.address)) for each in addresses if each.family in families]
        found[name] = [(each, address) for each, address in ours if address]
    return found


def interface_with(address: str) -> str | None:
    """The name of the interface that has an address."""
    scope = address.partition("%")[2]
    names = [name for name, found in _addresses().items() if _without_scope(address) in (each for _, each in found)]
    return scope if scope in names else next(iter(names), None)


def _those_that_exist() -> str:
    """Every interface with its addresses, in a line; those with addresses first."""
    found = sorted(all_interfaces().items(), key=lambda each: (not each[1], each[0] == "lo", each[0]))
    return listed([f"{name} ({', '.join(has) or 'no address'})" for name, has in found], _MOST_LISTED) or "none"


def _is_known(address: str) -> bool:
    """Whether an address means the same on every host."""
    return not ipaddress.ip_address(address).is_link_local


def _without_scope(address: str) -> str:
    return address.partition("%")[0]

"""Network interfaces of this host: which one reaches an address, and which addresses one has.

    python -m hybridflow.cluster.hosts.network.interfaces NAME

prints the address on an interface as `--head` takes it, an IPv6 address in brackets; for scripts of launchers.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from dataclasses import dataclass

import psutil

from engine3d.errors import UserError, shortened
from hybridflow.cluster.hosts.description import listed

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
    for of_family in (socket.AF_INET, socket.AF_INET6) if family is None else (family,):
        for kind, address in addresses[name]:
            if kind == of_family and _is_known(address):
                return Interface(name, address)
    of = "" if family is None else f"{'IPv6' if family == socket.AF_INET6 else 'IPv4'} "
    raise UserError(f"interface {name} has no {of}address; this host has {_those_that_exist()}")


def all_interfaces() -> dict[str, list[str]]:
    """Addresses of every interface by its name, also of those that are down; without those of its link alone."""
    return {
        name: [address for _, address in interfaces if _is_known(address)] for name, interfaces in _addresses().items()
    }


def _addresses() -> dict[str, list[tuple[int, str]]]:
    """Families and addresses of every interface by its name."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces: dict[str, list[tuple[int, str]]] = {name: [] for name in psutil.net_if_stats()}
    for name, addresses in psutil.net_if_addrs().items():
        ours = [(int(entry.family), _without_scope(entry.address)) for entry in addresses if entry.family in families]
        interfaces[name] = [(our, address) for our, address in ours if address]
    return interfaces


def interface_with(address: str) -> str | None:
    """The name of the interface that has an address."""
    scope = address.partition("%")[2]
    names = [
        name
        for name, interfaces in _addresses().items()
        if _without_scope(address) in (known for _, known in interfaces)
    ]
    return scope if scope in names else next(iter(names), None)


def _those_that_exist() -> str:
    """Every interface with its addresses, in a line; those with addresses first."""
    interfaces = sorted(
        all_interfaces().items(),
        key=lambda all_interface: (not all_interface[1], all_interface[0] == "lo", all_interface[0]),
    )
    return listed([f"{name} ({', '.join(has) or 'no address'})" for name, has in interfaces], _MOST_LISTED) or "none"


def _is_known(address: str) -> bool:
    """True if an address means the same on every host."""
    return not ipaddress.ip_address(address).is_link_local


def _without_scope(address: str) -> str:
    return address.partition("%")[0]


def main(name: str) -> int:
    """The command; its exit code, 2 where there is no such interface."""
    try:
        address = named(name).address
    except UserError as error:
        print(f"hybridflow: {error}", file=sys.stderr)
        return 2
    print(f"[{address}]" if ":" in address else address)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

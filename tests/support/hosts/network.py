"""The switch between hosts: a bridge in namespaces of its own, with one port a host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.support.hosts.namespaces import Namespaces

PREFIX = {"10.77.0.": 24, "192.168.77.": 24, "fd77::": 64}


def cluster_address(index: int, *, ipv6: bool) -> str:
    """Prefix of a host's address on `eth0`."""
    return f"fd77::{10 + index}" if ipv6 else f"10.77.0.{10 + index}"


def dead_end_address(index: int) -> str:
    """Prefix of a host's address on `eth1`: that of one network, and yet no other host is reached there."""
    return f"192.168.77.{10 + index}"


class Switch(Namespaces):
    """Plugs hosts in, and disturbs what goes through. A host is named by its name, as is its port."""

    def __init__(self) -> None:
        super().__init__({"name": "switch", "mounts": {"/run": "755"}, "kept": [], "etc_hosts": ""})

    def connect(self, hosts: Sequence[tuple[Namespaces, str]], *, dead_end: bool) -> None:
        """Give each host its `eth0` with an address, and an `eth1` that leads nowhere if `dead_end`."""
        lines = ["link add bridge type bridge", "link set bridge up"]
        for host, _ in hosts:
            lines += [f"link add {host.name} type veth peer name eth0 netns {host.pid}"]
            lines += [f"link set {host.name} master bridge up"]
            if dead_end:
                lines += [f"link add {host.name}-end type veth peer name eth1 netns {host.pid}"]
                lines += [f"link set {host.name}-end up"]
        _ip(self, lines)
        for index, (host, address) in enumerate(hosts):
            lines = ["link set lo up", "link set eth0 up", _add(address, "eth0")]
            lines += ["link set eth1 up", _add(dead_end_address(index), "eth1")] if dead_end else []
            _ip(host, lines)

    def set_link(self, name: str, state: str) -> None:
        """Take a host's cable out ("down") or put it in ("up")."""
        _ip(self, [f"link set {name} {state}"])

    def lose_packets(self, name: str, lost: bool) -> None:
        """Drop all packets to a host, silently; what it sends still arrives."""
        lose_sent(self, name, lost)


def lose_sent(where: Namespaces, interface: str, lost: bool) -> None:
    """Drop every packet that is sent out of an interface: its queue has room for none."""
    words = ["replace", "dev", interface, "root", "pfifo", "limit", "0"] if lost else ["del", "dev", interface, "root"]
    where.configure_network(["tc", "qdisc", *words])


def _add(address: str, interface: str) -> str:
    [bits] = [bits for prefix, bits in PREFIX.items() if address.startswith(prefix)]
    return f"addr add {address}/{bits} dev {interface}" + (" nodad" if ":" in address else "")


def _ip(where: Namespaces, lines: Iterable[str]) -> None:
    where.configure_network(["ip", "-batch", "-"], "".join(f"{line}\n" for line in lines))

"""The sockets on which the processes of a run listen: TCP, and UDP without a peer. From /proc alone."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

_LISTEN = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""State of a socket that takes what comes from anybody, by table of the kernel's."""


@dataclass(frozen=True, order=True, slots=True)
class Listener:
    """One listening socket of one process."""

    address: str
    port: int
    process: str
    """Name of the program and first words of its command line."""
    protocol: str = "tcp"

    @property
    def only_this_host(self) -> bool:
        """True if only processes of this host can connect."""
        address = ipaddress.ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def listeners(root: int) -> set[Listener]:
    """Listeners of a process and all its descendants."""
    try:
        first = psutil.Process(root)
        family = [first.pid, *(process.pid for process in first.children(recursive=True))]
    except psutil.NoSuchProcess:
        return set()
    return listeners_among(Path("/proc"), family, network=Path("/proc/net"))


def listeners_among(proc: Path, pids: Iterable[int], network: Path) -> set[Listener]:
    """Listeners of processes in one network namespace.

    Args:
        proc: a mounted procfs.
        pids: of the processes there.
        network: its `net` directory of that namespace.
    """
    listening = _listening(network)
    open_listeners = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in (proc / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:[") and (listener := listening.get(int(target[8:-1]))):
                        address, port, protocol = listener
                        open_listeners.add(Listener(address, port, command_line(proc, pid), protocol))
    return open_listeners


def command_line(proc: Path, pid: int) -> str:
    """The first words of a process's command line; "" if it is gone or a zombie."""
    with contextlib.suppress(OSError):
        words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        return " ".join(words[:6])[:200]
    return ""


def _listening(network: Path) -> dict[int, tuple[str, int, str]]:
    """Address, port and protocol of every listening socket of a network namespace, by inode."""
    by_inode = {}
    for table, listens in _LISTEN.items():
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (network / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == listens:
                    address, _, port = local.partition(":")
                    by_inode[int(rest[5])] = (_address(address), int(port, 16), table.removesuffix("6"))
    return by_inode


def _address(text: str) -> str:
    """An address as the kernel writes it: words of four bytes, each in the machine's order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))

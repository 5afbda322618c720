"""Rendezvous of processes before they have a process group: a `torch.distributed` store with an address.

file:///path        a file; for processes of one host. Nothing listens, and only who may open the file may join
tcp://host:port     torch's TCPStore; for processes of several hosts. It admits whoever reaches it
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:  # torch is slow to import, and a process may only have to know an address
    from torch.distributed import Store, TCPStore

PORTS_VARIABLE = "ENGINE3D_PORTS"
"""Environment variable with the ports in which servers of stores listen, as `29400-31399`; any port if not set."""
STORE_VARIABLE = "ENGINE3D_STORE"
"""Environment variable with the address at which the ranks of a world meet, where torchrun does not set one."""


def file_address(path: Path) -> str:
    """Return the address of the store in a file, which the first to join it creates."""
    return f"file://{path.absolute()}"


def tcp_address(host: str, port: int) -> str:
    """Return the address of a store that is served at a host and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen(host: str) -> socket.socket:
    """Return a socket for the server of a store, at an unused port of one address and of no other.

    Raises:
        OSError: no port of `PORTS_VARIABLE` is free, or the address is none of this host's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = os.environ.get(PORTS_VARIABLE, "0-0")
    first, last = map(int, ports.split("-"))
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no free port of {ports} ({PORTS_VARIABLE}) at {host}")


def serve(listening: socket.socket) -> TCPStore:
    """Serve a store on a socket, which is taken over, for as long as the returned object exists."""
    from torch.distributed import TCPStore

    host, port = listening.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join(address: str, timeout_s: float) -> Store:
    """Join the store at an address.

    Args:
        address: of a store.
        timeout_s: limit of the connection, and of every wait for a key, in seconds.

    Raises:
        ValueError: it is no such address.
        RuntimeError: nobody serves there, or the file cannot be opened.
    """
    location = urlsplit(address)
    timeout = timedelta(seconds=timeout_s)
    if location.scheme == "file":
        from torch.distributed import FileStore

        store: Store = FileStore(location.path)
        store.set_timeout(timeout)
        return store
    if location.scheme == "tcp" and location.hostname and location.port:
        from torch.distributed import TCPStore

        return TCPStore(location.hostname, location.port, timeout=timeout, wait_for_workers=False)
    raise ValueError(f"store {address}: expected file:///path or tcp://host:port")

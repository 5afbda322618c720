"""Where processes meet before they have a process group: a `torch.distributed` store with an address.

file:///path        a file; for processes of one host. Who may open the file may join, and nothing listens
tcp://host:port     a server; for processes of several hosts. It asks nobody who they are
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:  # torch is slow to import, and a process may only have to know an address
    from torch.distributed import Store, TCPStore

STORE_VARIABLE = "ENGINE3D_STORE"
"""The environment variable that has the address at which the ranks of a world meet, where torchrun does not say it."""


def file_address(path: Path) -> str:
    """The address of the store in a file, which the first to join it makes."""
    return f"file://{path.absolute()}"


def join(address: str, timeout_s: float) -> Store:
    """The store at an address.

    Args:
        address: of a store.
        timeout_s: limit of every wait for a key, in seconds.

    Raises:
        ValueError: it is no such address.
        RuntimeError: nobody serves there, or the file cannot be opened.
    """
    from torch.distributed import FileStore, TCPStore

    place = urlsplit(address)
    timeout = timedelta(seconds=timeout_s)
    if place.scheme == "file":
        store: Store = FileStore(place.path)
        store.set_timeout(timeout)
        return store
    if place.scheme == "tcp" and place.hostname and place.port:
        return TCPStore(place.hostname, place.port, is_master=False, timeout=timeout)
    raise ValueError(f"store {address}: expected file:///path or tcp://host:port")


def listen(host: str) -> socket.socket:
    """A socket for the server of a store, at an unused port of one address and of no other.

    torch's own server listens at all addresses of the machine, whatever host it is given.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)


def serve(listening: socket.socket) -> TCPStore:
    """The server of a store; it ends with the returned object. Takes the socket over."""
    from torch.distributed import TCPStore

    host, port = listening.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def tcp_address(host: str, port: int) -> str:
    """The address of a store that is served at a host and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

"""Where processes meet before they have a process group: a `torch.distributed` store with an address.

file:///path        a file; for processes of one host. Who may open the file may join, and nothing listens
tcp://host:port     a server; for processes of several hosts. Who has the run's key may join: see `KEY_VARIABLE`

torch's own TCPStore asks nobody who they are; this server and its clients have both ends prove that they have the key.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from engine3d.errors import UserError
from engine3d.run_files import open_own
from engine3d.stores.server import StoreServer as StoreServer

if TYPE_CHECKING:  # torch is slow to import, and a process may only have to know an address
    from torch.distributed import Store

STORE_VARIABLE = "ENGINE3D_STORE"
"""The environment variable that has the address at which the ranks of a world meet, where torchrun does not say it."""
KEY_VARIABLE = "ENGINE3D_STORE_KEY"
"""The environment variable that has the secret of all stores of a run. No address holds it, and no command line."""
KEY_FILE_VARIABLE = "ENGINE3D_STORE_KEY_FILE"
"""The one that names a file of this user's with it, in its place."""

_own_key: str | None = None


def new_key() -> str:
    """A new secret: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def keep_key(key: str | None = None) -> str:
    """Keep a run's secret for this process alone; what it starts does not inherit it. The secret.

    Args:
        key: the secret; the one that is known, or a new one, if None.
    """
    global _own_key
    _own_key = key or _known_key() or new_key()
    return _own_key


def write_key(path: Path) -> bool:
    """Write this process's secret into a new file, for `KEY_FILE_VARIABLE`; whether it has one."""
    if (key := _known_key()) is None:
        return False
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return True


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
        UserError: it has a server, and this process does not have the key of the run.
        RuntimeError: nobody serves there, or who does has another key; or the file cannot be opened.
    """
    place = urlsplit(address)
    timeout = timedelta(seconds=timeout_s)
    if place.scheme == "file":
        from torch.distributed import FileStore

        store: Store = FileStore(place.path)
        store.set_timeout(timeout)
        return store
    if place.scheme == "tcp" and place.hostname and place.port:
        from engine3d.stores.client import RemoteStore

        return RemoteStore(place.hostname, place.port, _key(address), timeout)
    raise ValueError(f"store {address}: expected file:///path or tcp://host:port")


def listen(host: str) -> socket.socket:
    """A socket for the server of a store, at an unused port of one address and of no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)


def serve(listening: socket.socket) -> StoreServer:
    """The server of a store, for those who have the key of this process's run. Takes the socket over.

    Raises:
        UserError: this process does not have the key.
    """
    return StoreServer(listening, _key(tcp_address(*listening.getsockname()[:2])))


def tcp_address(host: str, port: int) -> str:
    """The address of a store that is served at a host and port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _key(address: str) -> str:
    key = _known_key()
    if not key:
        raise UserError(f"store {address}: {KEY_VARIABLE} is not set; expected the same secret in every process")
    return key


def _known_key() -> str | None:
    if (key := _own_key or os.environ.get(KEY_VARIABLE)) or not (file := os.environ.get(KEY_FILE_VARIABLE)):
        return key or None
    with open_own(Path(file)) as opened:
        return opened.read().decode()

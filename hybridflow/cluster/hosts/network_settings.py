"""The network of a run: `network:` in a recipe, and what it means to NCCL, gloo and libfabric."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass

from engine3d.errors import UserError, shortened

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
_FIRST_PORT, _LAST_PORT = 1024, 65535


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports that servers of a run may listen on, both ends included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Of "29400" or "29400-29499".

        Raises:
            UserError: it is neither.
        """
        found = _PORTS.fullmatch(text.strip())
        if found is None:
            raise UserError(f"ports {shortened(text)!r}: expected one or a range, such as 29400 or 29400-29499")
        first, last = int(found[1]), int(found[2] or found[1])
        if not _FIRST_PORT <= first <= last <= _LAST_PORT:
            raise UserError(f"ports {text.strip()}: expected {_FIRST_PORT} to {_LAST_PORT}, the lower one first")
        return cls(first, last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def listen(self, address: str) -> socket.socket:
        """A socket that listens at the first free port.

        Args:
            address: of this host, in numbers or as a name.

        Raises:
            UserError: no port of the range is free, or the address is none of this host's.
        """
        family, where = _resolved(address)
        for port in range(self.first, self.last + 1):
            try:
                return socket.create_server((where, port), family=family, backlog=socket.SOMAXCONN)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise UserError(f"cannot listen at {address}:{port}: {error.strerror or error}") from None
        taken = f"port {self} is" if len(self) == 1 else f"all {len(self)} ports {self} are"
        raise UserError(f"network.ports: {taken} in use at {address}; expected one that is free")

    def free(self, address: str, most: int) -> int:
        """How many of the first `most` ports are free at an address of this host; "" for all of its IPv4 addresses.

        Raises:
            UserError: the address does not resolve.
        """
        family, where = _resolved(address) if address else (socket.AF_INET, "")
        return sum(
            _is_free(family, where, port) for port in range(self.first, min(self.last, self.first + most - 1) + 1)
        )


def _is_free(family: socket.AddressFamily, where: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as create_server
        try:
            trying.bind((where, port))
        except OSError:
            return False
    return True


def _resolved(address: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"{shortened(address)} does not resolve on this host ({error.strerror})") from None
    return found[0], str(found[4][0])

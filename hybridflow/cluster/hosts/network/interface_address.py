"""`python -m hybridflow.cluster.hosts.network.interface_address NAME`: this host's address on an interface.

As `--head` takes it, an IPv6 address in brackets; for scripts of launchers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine3d.errors import UserError
from hybridflow.cluster.hosts.network.interfaces import named


def main(words: Sequence[str]) -> int:
    """The command; its exit code, 2 where there is no such interface."""
    [name] = words
    try:
        address = named(name).address
    except UserError as error:
        print(f"hybridflow: {error}", file=sys.stderr)
        return 2
    print(f"[{address}]" if ":" in address else address)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

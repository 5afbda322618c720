"""Check of a Ray cluster's address, in seconds: Ray itself tries for up to two minutes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

from engine3d.errors import UserError

LIMIT_S = 15.0
"""Limit of Ray's answer, with the import of Ray."""
_CONNECT_LIMIT_S = 5.0

_ADDRESS = re.compile(
    r"(?P<client>ray://)?(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\s/:\[\]]+)):(?P<port>\d{1,5})", re.ASCII
)
# In a process of its own: Ray's client tries on in a thread of C++, and writes to stderr what it has tried.
_ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_REMEDY = "expected a running cluster, as of ray start --head; null starts Ray on this machine"


def check_cluster_answers(address: str, limit_s: float = LIMIT_S) -> None:
    """Connect to what `placement.cluster` names, and ask Ray's server for the cluster's identity.

    Args:
        address: "host:6379"; "ray://host:10001", where only the connection is tried; or "auto", for which Ray looks on
            this machine unless RAY_ADDRESS says more.
        limit_s: of the answer.

    Raises:
        UserError: it is no address, nobody listens there, or who listens does not answer as Ray does.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
        if address == "auto":
            return  # Ray finds it at once, or finds that there is none
    matched = _ADDRESS.fullmatch(address)
    if matched is None or not 0 < int(matched["port"]) < 2**16:
        raise UserError(
            f"placement.cluster={address}: no address, expected such as 10.0.0.1:6379, ray://10.0.0.1:10001 or auto; "
            "null starts Ray on this machine"
        )
    try:
        socket.create_connection((matched["six"] or matched["host"], int(matched["port"])), _CONNECT_LIMIT_S).close()
    except OSError as error:
        raise UserError(f"placement.cluster={address}: {error.strerror or error}, {_REMEDY}") from None
    if matched["client"] is None:
        _ask(address, limit_s)


def _ask(address: str, limit_s: float) -> None:
    command = [sys.executable, "-I", "-c", _ASK, address]
    try:
        answered = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"placement.cluster={address}: no answer within {limit_s:g} s, {_REMEDY}") from None
    if answered.returncode:
        reason = (answered.stderr.strip().splitlines() or [f"exit code {answered.returncode}"])[-1]
        raise UserError(f"placement.cluster={address}: {reason}, {_REMEDY}")

"""Check of a Ray cluster's address, in seconds: Ray itself tries for up to two minutes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.cluster.ray.ray_host import import_path
from hybridflow.cluster.ray.ray_node import LEFT_OUT

AUTO = "auto"
LIMIT_S = 60.0
"""Limit of Ray's answer, with the import of Ray."""
_CONNECT_LIMIT_S = 5.0

_ADDRESS = re.compile(
    r"(?P<client>ray://)?(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\s/:\[\]]+)):(?P<port>\d{1,5})", re.ASCII
)
# `ray status`, without libraries of Ray's command that take longer than its answer.
_STATUS = f"import sys; sys.modules.update(dict.fromkeys({LEFT_OUT})); from ray.scripts.scripts import main; main()"
_REMEDY = "expected a running cluster, as of ray start --head; null starts Ray on this machine"
_UNAUTHENTICATED = re.compile("AuthenticationError: |Token authentication is enabled but")
_STACK = "*** StackTrace"
_WRONG_TOKEN = (
    "this host has another token than the cluster, or none; expected RAY_AUTH_MODE=token, and the cluster's in the "
    "file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token"
)


def check_cluster_answers(address: str, limit_s: float = LIMIT_S, *, attaches: bool = False) -> None:
    """Connect to what `placement.cluster` names, and ask Ray's server for its status.

    Args:
        address: "host:6379"; "ray://host:10001", where only the connection is tried; or "auto", for which Ray looks on
            this machine unless RAY_ADDRESS says more.
        limit_s: of the answer.
        attaches: also ask a cluster that Ray looks for, which this process attaches to.

    Raises:
        UserError: it is no address, nobody listens there, or who listens does not answer as Ray does, or not without
            another token.
    """
    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or address
        if address == AUTO:
            if attaches:
                _ask(address, limit_s)
            return
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
    command = [sys.executable, "-P", "-c", _STATUS, "status", "--address", address]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(import_path())}
    if address == AUTO and _has_token():
        environment.setdefault("RAY_AUTH_MODE", "token")  # as `ray.init` does for it
    try:
        answered = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"placement.cluster={address}: no answer within {limit_s:g} s, {_REMEDY}") from None
    if answered.returncode:
        if _UNAUTHENTICATED.search(answered.stderr):
            raise UserError(f"placement.cluster={address}: {_WRONG_TOKEN}")
        lines = answered.stderr.partition(_STACK)[0].strip().splitlines()
        reason = lines[-1] if lines else f"exit code {answered.returncode}"
        raise UserError(f"placement.cluster={address}: {reason}, {_REMEDY}")


def _has_token() -> bool:
    """True if Ray finds a token on this host, right or wrong."""
    named = [name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)]
    return bool(named) or (Path.home() / ".ray/auth_token").exists()

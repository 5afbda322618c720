"""Whether Ray lets anybody in."""

from __future__ import annotations

import os

from engine3d.errors import UserError

AUTHENTICATION_MODE = "RAY_AUTH_MODE"


def check_authentication() -> None:
    """Refuse an environment in which Ray would let anybody in.

    Raises:
        UserError: it says so.
    """
    mode = os.environ.get(AUTHENTICATION_MODE)
    if mode is not None and mode.lower() == "disabled":
        raise UserError(
            f"{AUTHENTICATION_MODE}={mode} in the environment: whoever reaches Ray's ports could run code as "
            f"this user; unset it, or set {AUTHENTICATION_MODE}=token"
        )

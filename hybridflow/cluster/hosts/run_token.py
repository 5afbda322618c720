"""The secret of a run: whoever lacks it is not let in.

A launcher that has a way of its own to every host gives each the same new one (`launch/ssh.sh`, `launch/slurm.sbatch`).
Where nobody has, as under torchrun, the user puts one on every host: `hybridflow token` makes the file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from engine3d.errors import UserError
from engine3d.input_files import FileError, read_text

TOKEN = "HYBRIDFLOW_TOKEN"
"""Environment variable with the secret itself; it is taken out of the environment when it has been read."""
TOKEN_FILE = "HYBRIDFLOW_TOKEN_FILE"
"""Environment variable with the path of a file that holds it."""
_DEFAULT_FILE = Path(".config/hybridflow/token")
_LEAST = 32
_MOST = 4096


def default_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Path of the file: of the variable that names one, or in the home directory."""
    return Path(environment.get(TOKEN_FILE) or Path.home() / _DEFAULT_FILE)


def new_token() -> str:
    """A new one: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def write_token(path: Path) -> None:
    """Write a new one to a file that this user alone can read.

    Raises:
        UserError: there is a file already, or it cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{new_token()}\n")
    except FileExistsError:
        raise UserError(f"token: {path} is there already; remove it to have a new one") from None
    except OSError as error:
        raise UserError(f"token: cannot write {path}: {error.strerror}") from None


def find_token(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """The secret that the environment or the default file names; None if there is none.

    Raises:
        UserError: it is too short to be a secret, or in a file that others can read.
    """
    if (value := environment.pop(TOKEN, None)) is not None:
        return _checked(value, TOKEN)
    path = default_file(environment)
    if not environment.get(TOKEN_FILE) and not path.exists():
        return None
    return _checked(_read(path), str(path))


def derived(token: str, use: str) -> str:
    """Another secret, for one use of the run's: who learns it learns nothing of the others. 64 hexadecimal digits."""
    return hmac.new(token.encode(), use.encode(), hashlib.sha256).hexdigest()


def needed(token: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The secret, where several hosts need one.

    Raises:
        UserError: there is none; says how to make it.
    """
    if token is None:
        raise UserError(
            f"no token on this host: {TOKEN_FILE} is not set, and there is no {default_file()}; make one with "
            '"hybridflow token", and copy the file to every host'
        )
    return token


def _read(path: Path) -> str:
    try:
        text = read_text(path, _MOST)
        status = path.stat()
    except FileError as error:
        raise UserError(f"token: {error}") from None
    except OSError as error:
        raise UserError(f"token: {path}: {error.strerror}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"token: {path} has to be a file of this user's that no other can read (chmod 600)")
    return text


def _checked(value: str, where: str) -> str:
    value = value.strip()
    if len(value) < _LEAST or len(value.split()) != 1:
        raise UserError(f'token: {where} holds no secret, expected at least {_LEAST} characters, as "hybridflow token"')
    return value

"""Checks of the process and the machine of a run, before anything starts."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from engine3d.errors import UserError, amount, shortened

_OPEN_FILES = 1024
"""Ray's own processes have some hundreds, and say nothing useful when they get no more."""
_SHARED_MEMORY = Path("/dev/shm")
_KERNEL_CACHES = {"TRITON_CACHE_DIR": ".triton", "FLASHINFER_WORKSPACE_BASE": ".cache"}
"""Directories of compiled kernels below the home directory, by the variable that names another."""
_ROOM_BYTES = 1 << 20


def check_interpreter() -> None:
    """Refuse a Python that leaves assertions out.

    Raises:
        UserError: it does.
    """
    if sys.flags.optimize:
        raise UserError(
            f"PYTHONOPTIMIZE={sys.flags.optimize} (python -{'O' * sys.flags.optimize}) leaves out the assertions by "
            "which Megatron-Core and SGLang refuse what they cannot do; unset it"
        )


def check_open_files() -> None:
    """Raise the limit of open files of this process and its children to a run's needs.

    Raises:
        UserError: the limit cannot be raised that far.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        raise UserError(
            f"open files: {hard} at most (ulimit -Hn), expected at least {_OPEN_FILES:,}: Ray and SGLang open that many"
        )
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, hard))


def check_directories(*, kernels: bool) -> None:
    """Refuse a machine on which Ray, PyTorch and the compilers of kernels could not write what they must.

    Args:
        kernels: whether some may be compiled, as on a GPU.

    Raises:
        UserError: shared memory, the temporary directory or a cache of kernels cannot be written.
    """
    if kernels:
        for variable, below_home in _KERNEL_CACHES.items():
            check_writable(variable, Path(os.environ.get(variable) or Path.home() / below_home))
    check_writable("shared memory", _SHARED_MEMORY)
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:
        raise UserError(f"temporary directory: {error.strerror}; TMPDIR names another") from None
    check_writable("temporary directory", temporary)


def check_writable(what: str, directory: Path) -> None:
    """Check that files can be made in a directory that may have to be made first. The attempt leaves nothing.

    Args:
        what: the setting that names the directory.
        directory: it or its nearest parent that exists is tried.

    Raises:
        UserError: no file can be made there, or none of a megabyte.
    """
    try:
        there = _nearest(directory)
        if there.exists() and not there.is_dir():
            raise UserError(f"{what}: {there} is a file, expected a directory")
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        raise UserError(f"{what}: {shortened(str(directory), 200)} cannot be made: {error.strerror}") from None


def check_room(what: str, directory: Path, nbytes: int, of: str) -> None:
    """Check that a directory that may have to be made first has room.

    Args:
        what: the setting that names the directory.
        directory: it or its nearest parent.
        nbytes: to be written.
        of: what is written.

    Raises:
        UserError: it has less room.
    """
    free = shutil.disk_usage(_nearest(directory)).free
    if free < nbytes:
        raise UserError(f"{what}: {directory} has {amount(free)} free, expected {amount(nbytes)} for {of}")


def _nearest(directory: Path) -> Path:
    """A directory, or the nearest of its parents that is there."""
    return next(path for path in (directory, *directory.parents) if os.path.lexists(path))

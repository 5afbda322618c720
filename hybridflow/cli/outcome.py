"""How a command ends: its exit code, and what it says of an error."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

from engine3d.errors import EngineError, UserError, shortened, visible
from hybridflow.cli.last_words import last_words
from hybridflow.cluster.processes.termination import termination
from hybridflow.errors.rank_failure import Failure

OF_THE_SURROUNDINGS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG, errno.EMFILE, errno.ENFILE}
    | {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOMEM}
)
"""Errors of the system that say enough with the name of the file: nothing of this program is wrong."""


def guarded(work: Callable[[], int]) -> int:
    """Do what takes its time: a failure in it is told and makes the exit code 1."""
    try:
        return work()
    except UserError:
        raise
    except EngineError as error:
        return fail(error, 1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_SURROUNDINGS:
            return say(f"hybridflow: {told(error)}", 1)
        return say(f"hybridflow: internal error: {_one_line(error)}\n{traceback.format_exc()}", 1)


def fail(error: UserError | EngineError, code: int) -> int:
    """Print an error's lines, one each, and where a rank reported it, that rank's stack below."""
    failure = getattr(error, "failure", None)
    stack = f"\n{failure.stack}".rstrip() if failure and isinstance(error, EngineError) else ""
    lines = [*(f"hybridflow: {line}" for line in str(error).splitlines()), *getattr(error, "__notes__", ())]
    return say("\n".join(lines) + stack, code, failure)


def say(text: str, code: int, failure: Failure | None = None) -> int:
    """Print what a command ends with on stderr, unless it ends by a signal; the exit code.

    Args:
        text: that is said.
        code: the exit code.
        failure: of a rank, where it was one.
    """
    if termination.cause is None:  # by which all else came about
        if code == 1:
            last_words.note(text, failure)
        print(visible(text), file=sys.stderr, flush=True)
    return code


def told(error: OSError) -> str:
    """An error of the system with the name of the file, or of both where one becomes the other."""
    names = [shortened(os.fsdecode(name), 200) for name in (error.filename, error.filename2) if name is not None]
    return f"{' to '.join(names) or 'the operating system'}: {error.strerror}"


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return told(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")

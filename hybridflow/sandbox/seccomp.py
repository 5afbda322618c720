"""Filter of system calls: a program of the kernel's classic BPF.

Format: Linux, Documentation/userspace-api/seccomp_filter.rst. Filtered are the calls that a process without privileges
may make and that lead to other processes, to memory that no limit counts, to the network, or to parts of the kernel
with a history of holes.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_OR_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`. Arguments have 8 bytes each, the low half first."""
_NEW_NAMESPACES = 0x7E020000
"""The flags CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_AF_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they type into the terminal of whoever started the run."""
_X32 = 0x40000000
"""Bit of the system calls of the x32 interface, which are others by number."""


@dataclass(frozen=True)
class _Machine:
    """An architecture.

    Args:
        audit: its number in `linux/audit.h`.
        column: its place in `_DENIED`.
        clone, socket, socketpair, ioctl: numbers of calls of which some arguments are denied.
    """

    audit: int
    column: int
    clone: int
    socket: int
    socketpair: int
    ioctl: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, clone=56, socket=41, socketpair=53, ioctl=16),
    "aarch64": _Machine(0xC00000B7, 1, clone=220, socket=198, socketpair=199, ioctl=29),
}

_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # A program that slows itself down on a busy machine would have no verdict.
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    # Memory that is no process's.
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""Numbers of the calls that fail with EPERM, on x86_64 and aarch64."""

_ABSENT = {
    # Its flags are behind a pointer. The C library falls back to clone.
    "clone3": (435, 435),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
"""Numbers of the calls that fail with ENOSYS, as on a kernel without them."""


def filter_program(machine: str | None = None) -> bytes:
    """The filter of an architecture, by the name that `platform.machine` has for it; this machine's if None.

    Raises:
        ValueError: there is none for it.
    """
    name = platform.machine() if machine is None else machine
    if name not in _MACHINES:
        raise ValueError(f"no filter of system calls for {name}, expected {' or '.join(_MACHINES)}")
    found_machine = _MACHINES[name]
    code = [
        _instruction(_LOAD, value=_ARCHITECTURE),
        _instruction(_JUMP_EQUAL, 1, 0, found_machine.audit),
        _instruction(_RETURN, value=_KILL),
        _instruction(_LOAD, value=_NUMBER),
        _instruction(_JUMP_GREATER_OR_EQUAL, 0, 1, _X32),
        _instruction(_RETURN, value=_KILL),
    ]
    for table, number in ((_DENIED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            code += _if_call(numbers[found_machine.column], [_instruction(_RETURN, value=_ERRNO | number)])
    denied = _instruction(_RETURN, value=_ERRNO | errno.EPERM)
    allowed = _instruction(_RETURN, value=_ALLOW)
    code += _if_call(
        found_machine.clone, [_argument(0), _instruction(_JUMP_ANY_BIT, 0, 1, _NEW_NAMESPACES), denied, allowed]
    )
    for number in (found_machine.socket, found_machine.socketpair):
        code += _if_call(number, [_argument(0), _instruction(_JUMP_EQUAL, 1, 0, _AF_UNIX), denied, allowed])
    first, second = _TERMINAL_INPUT
    code += _if_call(
        found_machine.ioctl,
        [
            _argument(1),
            _instruction(_JUMP_EQUAL, 1, 0, first),
            _instruction(_JUMP_EQUAL, 0, 1, second),
            denied,
            allowed,
        ],
    )
    return b"".join([*code, allowed])


def _instruction(code: int, if_true: int = 0, if_false: int = 0, value: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    return _instruction(_LOAD, value=_ARGUMENTS + 8 * index)


def _if_call(number: int, then: list[bytes]) -> list[bytes]:
    """Instructions for one call, jumped over for others. The number of the call is loaded."""
    return [_instruction(_JUMP_EQUAL, 0, len(then), number), *then]

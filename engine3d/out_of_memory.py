"""Short form of the messages of torch and torch_memory_saver when a GPU's memory is full: its users and sizes."""

from __future__ import annotations

import re

OUT_OF_MEMORY = "GPU out of memory"

_SIZE = r"[\d.]+ (?:bytes|[KMG]iB)"
_USER = re.compile(rf"(?:Including non-PyTorch memory, )?([Pp]rocess \d+|this process) has ({_SIZE}) memory in use\. ")
_MESSAGE = re.compile(
    r"(?:[\w.]*OutOfMemoryError: )?CUDA out of memory\. "
    rf"Tried to allocate (?P<requested>{_SIZE})\. "
    rf"GPU \d+ has a total capacity of (?P<total>{_SIZE}) of which (?P<free>{_SIZE}) is free\. "
    rf"(?P<users>(?:{_USER.pattern})*)"
    rf"(?:{_SIZE} allowed; )?"
    rf"Of the allocated memory (?P<tensors>{_SIZE}) is allocated by PyTorch, "
    rf"(?:with {_SIZE} allocated in private pools \(e\.g\., CUDA Graphs\), )?"
    rf"and (?P<unused>{_SIZE}) is reserved by PyTorch but unallocated\."
    r"(?: If reserved but unallocated memory is large [^(]*\(https?://[^)]*\))?"
)


_NOT_RESUMED = re.compile(r"\[torch_memory_saver\.cpp\] cudaError error: 2 \(out of memory\) .*?func=resume line=\d+")
"""Last message of a process that cannot take released memory again."""


def in_short(text: str) -> str:
    """Shorten the message about a GPU's full memory in a line. Any other line is returned as it is."""
    not_resumed = f"{OUT_OF_MEMORY}: others use memory that the engine released and takes again (torch_memory_saver)"
    return _NOT_RESUMED.sub(not_resumed, _MESSAGE.sub(_short, text))


def _short(match: re.Match[str]) -> str:
    users = [f"{user[0].lower()}{user[1:]} has {size} in use" for user, size in _USER.findall(match["users"])]
    tensors = f"{match['tensors']} in tensors here, {match['unused']} reserved unused"
    return (
        f"{OUT_OF_MEMORY}: tried to allocate {match['requested']} with {match['free']} of {match['total']} free "
        f"({', '.join([*users, tensors])})"
    )

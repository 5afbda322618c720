"""What torch says where a GPU's memory is full, cut to who holds how much of it."""

from __future__ import annotations

import re

OUT_OF_MEMORY = "GPU out of memory"

_SIZE = r"[\d.]+ (?:bytes|[KMG]iB)"
_USER = re.compile(rf"(?:Including non-PyTorch memory, )?([Pp]rocess \d+|this process) has ({_SIZE}) memory in use\. ")
_TOLD = re.compile(
    r"(?:[\w.]*OutOfMemoryError: )?CUDA out of memory\. "
    rf"Tried to allocate (?P<wanted>{_SIZE})\. "
    rf"GPU \d+ has a total capacity of (?P<total>{_SIZE}) of which (?P<free>{_SIZE}) is free\. "
    rf"(?P<users>(?:{_USER.pattern})*)"
    rf"(?:{_SIZE} allowed; )?"
    rf"Of the allocated memory (?P<tensors>{_SIZE}) is allocated by PyTorch, "
    rf"(?:with {_SIZE} allocated in private pools \(e\.g\., CUDA Graphs\), )?"
    rf"and (?P<unused>{_SIZE}) is reserved by PyTorch but unallocated\."
    r"(?: If reserved but unallocated memory is large [^(]*\(https?://[^)]*\))?"
)


def in_short(text: str) -> str:
    """`text`, one line, with torch's account of a GPU's full memory in half as many words; any other is as it was."""
    return _TOLD.sub(_short, text)


def _short(told: re.Match[str]) -> str:
    users = [f"{user[0].lower()}{user[1:]} has {size} in use" for user, size in _USER.findall(told["users"])]
    tensors = f"{told['tensors']} in tensors here, {told['unused']} reserved unused"
    return (
        f"{OUT_OF_MEMORY}: tried to allocate {told['wanted']} with {told['free']} of {told['total']} free "
        f"({', '.join([*users, tensors])})"
    )

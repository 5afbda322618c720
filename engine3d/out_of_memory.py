"""What torch and torch_memory_saver say where a GPU's memory is full, in short: who holds how much of it."""

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


_NOT_RESUMED = re.compile(r"\[torch_memory_saver\.cpp\] cudaError error: 2 \(out of memory\) .*?func=resume line=\d+")
"""What ends a process that wants memory again which it has given back for a while."""


def in_short(text: str) -> str:
    """`text`, one line, with an account of a GPU's full memory in fewer words; any other is as it was."""
    told = f"{OUT_OF_MEMORY}: others hold what the engine gave back for a while and takes again (torch_memory_saver)"
    return _NOT_RESUMED.sub(told, _TOLD.sub(_short, text))


def _short(told: re.Match[str]) -> str:
    users = [f"{user[0].lower()}{user[1:]} has {size} in use" for user, size in _USER.findall(told["users"])]
    tensors = f"{told['tensors']} in tensors here, {told['unused']} reserved unused"
    return (
        f"{OUT_OF_MEMORY}: tried to allocate {told['wanted']} with {told['free']} of {told['total']} free "
        f"({', '.join([*users, tensors])})"
    )

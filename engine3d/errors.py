"""Two kinds of failure: what the user can put right, and what broke while running."""

from __future__ import annotations

from pathlib import Path

_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
"""Characters of names and values of files that a terminal would obey: controls, line ends, directions of text."""
_SHOWN, _BEFORE = 50, 16
"""Characters of excerpts, and how many of them are before a difference."""


LOST_RANKS = "it lost its ranks on another host"
"""Text in errors of a rollout engine on several hosts that died of the loss of ranks on another host."""


class UserError(Exception):
    """Bad input. The message is one line: what was wrong, where, and what would be right."""


class EngineError(RuntimeError):
    """An engine failed while running. The message names the engine, the phase and the cause."""


class DamagedCheckpointError(EngineError):
    """Bytes that were read of a checkpoint are not those that were saved. The message names the file."""

    checkpoint: Path | None = None
    """Directory of the checkpoint that no older one stands in for; None where that is not known."""


def first_line(error: BaseException) -> str:
    """First line of an error's message; its type where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def visible(text: str) -> str:
    """Text with each control character but tab and line end as `\\x..`, and each mark of a direction as
    `\\u....`."""
    return text.translate(_VISIBLE)


def first_difference(text: str, other: str) -> tuple[str, str]:
    """Excerpts of two texts at their first difference, as they stand in a message."""
    at = next((index for index, pair in enumerate(zip(text, other, strict=False)) if len(set(pair)) > 1), None)
    begin = max((min(len(text), len(other)) if at is None else at) - _BEFORE, 0)
    return repr(visible(text[begin : begin + _SHOWN])), repr(visible(other[begin : begin + _SHOWN]))


def one_line(text: str) -> str:
    """Text with each control character as `\\x..`, tab and line end included."""
    return visible(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def shortened(text: str, most: int = 60) -> str:
    """Text as it stands in a message: its beginning, where there is more of it than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def amount(nbytes: float, digits: int = 2) -> str:
    """Bytes as they stand in a message: in the largest unit of which there is at least one."""
    for exponent, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if nbytes >= 10**exponent:
            return f"{nbytes / 10**exponent:,.{digits}f} {unit}"
    return f"{nbytes:.0f} bytes"

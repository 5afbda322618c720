"""Texts that stand in data sets where an answer is missing, in lower case."""

from __future__ import annotations

NEVER_ANSWERS = frozenset(
    {"nan", "nat", "<na>", "n/a", "null", "unknown", "tbd"}
    | {"proof", "notfound", "not found", "not available", "see solution"}
)
"""Placeholders that answer no question of mathematics: no response is compared with them."""
PLACEHOLDERS = NEVER_ANSWERS | {"na", "none", "nil", "undefined", "missing", "no answer", "?", "-"}
"""All of them. Some are right answers to some questions, so that rows with them are counted and named, not dropped."""

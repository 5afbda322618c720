"""Environment variables of this process that hold for a time."""

from __future__ import annotations

import os
from collections.abc import Mapping


def exchange_variables(variables: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set environment variables, and return their values of before: a call with these restores them.

    Args:
        variables: values, or None for variables that are removed.
    """
    before = {name: os.environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before

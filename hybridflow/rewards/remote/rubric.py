"""Template of a judge's question: `prompt`, `response`, `answer` and the fields of the data by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

COLUMNS = {"prompt": "prompts", "answer": "answers"}
"""Columns by the names that a template has for one of their values. Fields of the data have one name for both."""
RESPONSE = "response"


class RubricError(Exception):
    """A template could not be filled in."""


class Rubric:
    """A template of jinja2, sandboxed: texts that are put in are never read as templates.

    Args:
        source: of the template.

    Raises:
        ValueError: it is no template.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            location = f" in line {line}" if line else ""
            raise ValueError(f"no template{location}: {' '.join(str(error).split())}") from None
        self.names = frozenset(meta.find_undeclared_variables(tree)) - environment.globals.keys()
        """Names that the template needs values for."""

    def render(self, values: Mapping[str, Any]) -> str:
        """Render the text with these values. Raises RubricError for what the template cannot do with them."""
        try:
            return self._template.render({name: values[name] for name in self.names})
        except Exception as error:  # of what the template calls, with whatever a field of the data is
            raise RubricError(
                f"had a rubric that could not be filled in: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from None

"""What a judge is asked, as a template: `prompt`, `response`, `answer` and the fields of the data by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

COLUMNS = {"prompt": "prompts", "answer": "answers"}
"""What a template calls a value of these columns; fields of the data have one name for both."""
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
            place = f" in line {line}" if line else ""
            raise ValueError(f"no template{place}: {' '.join(str(error).split())}") from None
        self.names = frozenset(meta.find_undeclared_variables(tree)) - environment.globals.keys()
        """What the template needs values of."""

    def render(self, values: Mapping[str, Any]) -> str:
        """The text, with these values. Raises RubricError for what the template cannot do with them."""
        try:
            return self._template.render({name: values[name] for name in self.names})
        except Exception as error:  # of what the template calls, with whatever a field of the data is
            raise RubricError(
                f"had a rubric that could not be filled in: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from None

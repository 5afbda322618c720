"""A HuggingFace `config.json`, read with errors that name the key, the value and what would be accepted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.errors import UserError


@dataclass(frozen=True)
class HFConfig:
    """The values of a `config.json` and where they come from.

    Args:
        values: the parsed JSON object.
        source: how errors name it.
    """

    values: dict[str, Any]
    source: str

    @classmethod
    def load(cls, directory: Path) -> HFConfig:
        """Read `directory/config.json`.

        Raises:
            UserError: no directory, no config.json, or one that is not a JSON object.
        """
        if not directory.is_dir():
            raise UserError(f"model {directory}: no such directory; expected one with a HuggingFace config.json")
        path = directory / "config.json"
        if not path.is_file():
            raise UserError(f"model {directory}: has no config.json; expected a HuggingFace model directory")
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}: expected a JSON object, found {type(values).__name__}")
        return cls(values, str(path))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any kind; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def require(self, key: str, accepted: tuple[Any, ...], default: Any = None) -> None:
        """Refuse every value but the accepted ones."""
        if self.get(key, default) not in accepted:
            raise self.error(key, " or ".join(json.dumps(value) for value in accepted))

    def error(self, key: str, expected: str) -> UserError:
        found = json.dumps(self.values[key]) if key in self.values else "nothing"
        return UserError(f"{self.source}: {key}: expected {expected}, found {found}")

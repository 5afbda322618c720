"""Columns of Arrow as values of JSON: texts that are stored as bytes, names of class labels, times and decimals."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from engine3d.errors import UserError
from engine3d.input_files import JsonError, parse_json

SAMPLE_ROWS = 16
"""Rows whose bytes decide if a column is of texts."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that rows have.

    Args:
        names: of columns that can be text.
        left_out: names of columns of bytes that are no text, such as pictures and sounds.
        features: of columns with class labels, as `datasets` describes them.
    """

    names: tuple[str, ...]
    left_out: tuple[str, ...]
    features: Mapping[str, Any]

    @classmethod
    def of(cls, schema: pa.Schema, sample: Callable[[str], pa.Array | pa.ChunkedArray]) -> Columns:
        """The columns of a schema.

        Args:
            schema: with the metadata of `datasets`, if there are any.
            sample: makes some values of a column.
        """
        left_out = [
            each.name for each in schema if is_binary(each.type) and not _are_texts(each.type, sample(each.name))
        ]
        names = tuple(name for name in schema.names if name not in left_out)
        features = _features(schema)
        return cls(names, tuple(left_out), {name: features[name] for name in names if _has_labels(features.get(name))})

    def row(self, values: Mapping[str, Any], place: Callable[[], str]) -> dict[str, Any]:
        """A row as JSON has it. Raises UserError for bytes that are no text."""
        found = {}
        for name, value in values.items():
            try:
                found[name] = plain(value)
            except UnicodeDecodeError:
                raise UserError(f"{place()}: column {name!r} has bytes that are no text in UTF-8") from None
            if name in self.features:
                found[name] = _with_names(found[name], self.features[name])
        return found


def is_binary(kind: pa.DataType) -> bool:
    """True if values of a type are bytes, or hold some."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return not isinstance(kind, pa.UuidType) and is_binary(kind.storage_type)
    if types.is_run_end_encoded(kind):
        return is_binary(kind.value_type)
    if types.is_struct(kind):
        return any(is_binary(field.type) for field in kind)
    if types.is_map(kind):
        return is_binary(kind.key_type) or is_binary(kind.item_type)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if any(each(kind) for each in lists) or types.is_dictionary(kind):
        return is_binary(kind.value_type)
    own = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(each(kind) for each in own)


def plain(value: Any) -> Any:
    """A value of Arrow as JSON has it: bytes, times and decimals as text, maps as objects, NaN as null.

    Raises:
        UnicodeDecodeError: bytes are no text in UTF-8.
    """
    if isinstance(value, float | np.floating):
        return None if math.isnan(value) else float(value)
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(each) for name, each in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(each, tuple) and len(each) == 2 for each in value):
            return {str(plain(name)): plain(each) for name, each in value}
        return [plain(each) for each in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    return str(value)


def _are_texts(kind: pa.DataType, values: pa.Array | pa.ChunkedArray) -> bool:
    """True if a column is of bytes, begins with some, and all of these are texts, as some programs write them."""
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)):
        return False
    found = [each for each in values.slice(0, SAMPLE_ROWS).to_pylist() if each is not None]
    try:
        return bool([each.decode("utf-8") for each in found])
    except UnicodeDecodeError:
        return False


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Description of the columns that `datasets` writes into a file; empty of other files."""
    try:
        described = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        return dict(described["info"]["features"])
    except (JsonError, KeyError, TypeError, ValueError):
        return {}


def _has_labels(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return ("names" in feature and feature.get("_type") == "ClassLabel") or any(map(_has_labels, feature.values()))
    return isinstance(feature, list) and any(map(_has_labels, feature))


def _with_names(value: Any, feature: Any) -> Any:
    """A value with names in place of the numbers of class labels; null for the number -1, which is none."""
    if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
        names = feature["names"]
        if not isinstance(value, int) or not isinstance(names, Sequence) or not -1 <= value < len(names):
            return value
        return None if value == -1 else names[value]
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else feature
        if isinstance(feature, Mapping) and "feature" in feature:
            inner = feature["feature"]
        return [_with_names(each, inner) for each in value]
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        fields = feature["feature"] if isinstance(feature.get("feature"), Mapping) else feature
        return {name: _with_names(each, fields.get(name)) for name, each in value.items()}
    return value

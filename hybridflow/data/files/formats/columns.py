"""Columns of Arrow as values of JSON: texts stored as bytes, class labels, short floats, times and decimals."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine3d.errors import UserError
from engine3d.input_files import JsonError, parse_json
from engine3d.startup.lazy_imports import pa

SAMPLE_ROWS = 16
"""Rows whose bytes decide if a column is of texts."""


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that rows have.

    Args:
        names: of columns that can be text.
        left_out: names of columns of bytes that are no text, such as pictures and sounds.
        features: of columns with class labels, as `datasets` describes them.
        short_floats: types of columns with floats of less than 64 bits.
    """

    names: tuple[str, ...]
    left_out: tuple[str, ...]
    features: Mapping[str, Any]
    short_floats: Mapping[str, pa.DataType]

    @classmethod
    def of(cls, schema: pa.Schema, sample: Callable[[str], pa.Array | pa.ChunkedArray]) -> TableColumns:
        """Return the columns of a schema.

        Args:
            schema: with the metadata of `datasets`, if there are any.
            sample: makes some values of a column.
        """
        left_out = [
            field.name for field in schema if is_binary(field.type) and not _are_texts(field.type, sample(field.name))
        ]
        names = tuple(name for name in schema.names if name not in left_out)
        features = _features(schema)
        return cls(
            names,
            tuple(left_out),
            {name: features[name] for name in names if _has_labels(features.get(name))},
            {field.name: field.type for field in schema if any(map(_is_short_float, _leaves(field.type)))},
        )

    def row(self, values: Mapping[str, Any], location: Callable[[], str]) -> dict[str, Any]:
        """Convert a row to JSON. Raises UserError for bytes that are no text."""
        converted = {}
        for name, value in values.items():
            try:
                converted[name] = plain(value)
            except UnicodeDecodeError:
                raise UserError(f"{location()}: column {name!r} has bytes that are no text in UTF-8") from None
            if name in self.short_floats:
                converted[name] = _with_decimals(converted[name], self.short_floats[name])
            if name in self.features:
                converted[name] = _with_names(converted[name], self.features[name])
        return converted


def is_binary(kind: pa.DataType) -> bool:
    """True if values of a type are bytes, or hold some."""
    return any(map(_are_bytes, _leaves(kind)))


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield the types that a type is made of."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        yield kind
    elif types.is_struct(kind):
        for field in kind:
            yield from _leaves(field.type)
    elif types.is_map(kind):
        yield from _leaves(kind.key_type)
        yield from _leaves(kind.item_type)
    elif _is_list(kind) or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        yield from _leaves(kind.value_type)
    else:
        yield kind


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(matches(kind) for matches in lists)


def _is_short_float(leaf: pa.DataType) -> bool:
    return pa.types.is_float16(leaf) or pa.types.is_float32(leaf)


def _are_bytes(leaf: pa.DataType) -> bool:
    if isinstance(leaf, pa.BaseExtensionType):
        return not isinstance(leaf, pa.UuidType) and is_binary(leaf.storage_type)
    return _may_be_texts(leaf) or pa.types.is_fixed_size_binary(leaf)


def _may_be_texts(leaf: pa.DataType) -> bool:
    return pa.types.is_binary(leaf) or pa.types.is_large_binary(leaf) or pa.types.is_binary_view(leaf)


def plain(value: Any) -> Any:
    """Convert a value of Arrow to one of JSON: bytes, times and decimals as text, maps as objects, NaN as null.

    Raises:
        UnicodeDecodeError: bytes are no text in UTF-8.
    """
    if isinstance(value, float | np.floating):
        return None if math.isnan(value) else float(value)
    if isinstance(value, str | int | bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(field_value) for name, field_value in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            return {str(plain(name)): plain(field_value) for name, field_value in value}
        return [plain(element) for element in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    return str(value)


def _with_decimals(value: Any, kind: pa.DataType) -> Any:
    """Replace floats of less than 64 bits in a value by the shortest decimals that stand for them: 0.1, and not
    0.10000000149."""
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    if isinstance(value, float) and _is_short_float(kind):
        return float(str(np.float16(value) if types.is_float16(kind) else np.float32(value)))
    if isinstance(value, list) and _is_list(kind):
        return [_with_decimals(element, kind.value_type) for element in value]
    if isinstance(value, Mapping) and types.is_map(kind):
        return {name: _with_decimals(element, kind.item_type) for name, element in value.items()}
    if isinstance(value, Mapping) and types.is_struct(kind):
        return {field.name: _with_decimals(value[field.name], field.type) for field in kind}
    return value


def _are_texts(kind: pa.DataType, values: pa.Array | pa.ChunkedArray) -> bool:
    """True if a column begins with bytes, at any depth, and all of these are texts, as some programs write them."""
    if not all(_may_be_texts(leaf) for leaf in _leaves(kind) if _are_bytes(leaf)):
        return False
    sample = values.slice(0, SAMPLE_ROWS).to_pylist()
    try:
        for value in sample:
            plain(value)
    except UnicodeDecodeError:
        return False
    return any(map(_has_bytes, sample))


def _has_bytes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes) or (isinstance(value, list | tuple) and any(map(_has_bytes, value)))


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Read the description of the columns that `datasets` writes into a file; empty of other files."""
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
    """Replace the numbers of class labels in a value by names; null for the number -1, which is none."""
    if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
        names = feature["names"]
        if not isinstance(value, int) or not isinstance(names, Sequence) or not -1 <= value < len(names):
            return value
        return None if value == -1 else names[value]
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else feature
        if isinstance(feature, Mapping) and "feature" in feature:
            inner = feature["feature"]
        return [_with_names(element, inner) for element in value]
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        fields = feature["feature"] if isinstance(feature.get("feature"), Mapping) else feature
        return {name: _with_names(field_value, fields.get(name)) for name, field_value in value.items()}
    return value

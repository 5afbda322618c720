"""Objects of Kubernetes against the schemas that its API server and KubeRay publish; unknown fields are errors."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parent / "kubernetes_schemas" / "schemas.json.gz"
KUBERAY = "1.7.0"


def errors(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object, one line an error: path and message."""
    invalid = _validator(manifest["kind"]).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in invalid]


@cache
def _validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(_closed(json.loads(gzip.decompress(SCHEMAS.read_bytes()))[kind]))


def _closed(schema: Any) -> Any:
    """A schema that knows no fields beside those that it names, as the API server prunes others."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: {key: _closed(property_schema) for key, property_schema in value.items()}
        if name == "properties"
        else _closed(value)
        for name, value in schema.items()
    }
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and not is_open:
        closed["additionalProperties"] = False
    return closed

"""Parts of a plain schema that no value can fill: they are cut out, so that a grammar never leads into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastdraft.constraints.keywords import Schema

__all__ = ["prune"]


def prune(schema: Schema, definitions: Mapping[str, Schema]) -> tuple[Schema, dict[str, Schema]]:
    """Cuts out what no finite value fills, such as a record that must hold another of its kind without end.

    Args:
        schema: A schema as `normalise` writes them.
        definitions: What its references name.

    Returns:
        The same schema and definitions without those parts; False where nothing is left.
    """
    living: set[str] = set()
    while grown := {name for name, body in definitions.items() if name not in living and _lives(body, living)}:
        living |= grown
    return _cut(schema, living), {name: _cut(body, living) for name, body in definitions.items() if name in living}


def _lives(schema: Schema, living: set[str]) -> bool:
    """Whether some value fills a schema, as far as those of the living definitions go."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return _name(schema) in living
    if "anyOf" in schema:
        return any(_lives(option, living) for option in schema["anyOf"])
    if schema.get("type") == "object":
        return all(_lives(schema["properties"][name], living) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        least = schema.get("minItems", 0)
        return all(_lives(item, living) for item in prefix[:least]) and (len(prefix) >= least or _lives(rest, living))
    return True


def _cut(schema: Schema, living: set[str]) -> Schema:
    if isinstance(schema, bool) or not _lives(schema, living):
        return schema is True
    kept: dict[str, Any] = dict(schema)
    if "anyOf" in schema:
        options = [option for option in (_cut(option, living) for option in schema["anyOf"]) if option is not False]
        return options[0] if len(options) == 1 else {"anyOf": options}
    for keyword in ("properties", "patternProperties"):
        if keyword in schema:
            values = {name: _cut(value, living) for name, value in schema[keyword].items()}
            is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
            kept[keyword] = {name: value for name, value in values.items() if value is not False or not is_closed}
    for keyword in ("additionalProperties", "items"):
        if keyword in schema:
            kept[keyword] = _cut(schema[keyword], living)
    if "prefixItems" in schema:
        items = [_cut(item, living) for item in schema["prefixItems"]]
        if False in items:  # no array is longer than what comes before
            kept["maxItems"] = min(items.index(False), schema.get("maxItems", len(items)))
            items = items[: items.index(False)]
            kept.pop("items", None)
        kept["prefixItems"] = items
    if kept.get("items") is False and "prefixItems" not in kept:
        kept["maxItems"] = 0
    return kept


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]

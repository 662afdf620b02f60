"""JSON schemas of Python types as pydantic reads them, told so that what fits the schema is read."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from fastdraft.constraints.formats import CLOCK, DATE, FORMATS, ZONE

__all__ = ["schema_of"]


def schema_of(adapter: TypeAdapter[Any], *, omit_defaults: bool) -> dict[str, Any]:
    """The schema of what a type reads from JSON.

    Args:
        adapter: The type's adapter.
        omit_defaults: Whether fields with a default may be left out.
    """
    schema = adapter.json_schema(schema_generator=_Reading if omit_defaults else _ReadingAll, mode="validation")
    told: dict[str, Any] = _with_formats(schema)
    return told


_MOST_DIGITS = 12

_KEYS = {
    "bool": "^(?:true|false)$",
    "int": "^-?(?:0|[1-9][0-9]*)$",
    "float": r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?$",
}


_HOST = r"(?:[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?\.)+[A-Za-z]{2,24}"
# What pydantic reads of formats that are its own, or that the standard means more widely.
_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "email": rf"[0-9A-Za-z_+-]+(?:\.[0-9A-Za-z_+-]+)*@{_HOST}",
        "ipv4network": f"{FORMATS['ipv4']}/32",
        "ipv6network": f"{FORMATS['ipv6']}/128",
        "ipv4interface": f"{FORMATS['ipv4']}/(?:[0-9]|[12][0-9]|3[0-2])",
        "ipv6interface": f"{FORMATS['ipv6']}/(?:[0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])",
        **{
            f"uuid{number}": f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{number}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"
            for number in range(1, 9)
        },
    }
)


def _with_formats(schema: Any, *, named: bool = False) -> Any:
    """A schema whose strings of those formats have the pattern instead; ``named`` for an object of schemas by name."""
    if isinstance(schema, list):
        return [_with_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {name: _with_formats(item) for name, item in schema.items()}
    made = {
        key: item
        if key in ("const", "default", "enum", "examples")
        else _with_formats(item, named=key in ("$defs", "properties", "patternProperties"))
        for key, item in schema.items()
    }
    if made.get("type") == "string" and made.get("format") in _FORMATS and "pattern" not in made:
        made["pattern"] = f"^(?:{_FORMATS[made.pop('format')]})$"
    return made


class _Reading(GenerateJsonSchema):
    def emit_warning(self, kind: Any, detail: str) -> None:
        """Silent: what is left out of a schema is never written."""

    def field_is_present(self, field: Any) -> bool:
        return super().field_is_present(field) and field.get("init") is not False

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        """A number; pydantic also reads strings, by a pattern that no grammar can follow."""
        bounds = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
        result: dict[str, Any] = {"type": "number"} | {
            name: _plain(schema[key]) for key, name in bounds.items() if key in schema
        }
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if digits is not None and places is None and digits <= _MOST_DIGITS:
            # So many before the point, and at most the rest behind it.
            result["anyOf"] = [
                {
                    "exclusiveMinimum": -(10**before),
                    "exclusiveMaximum": 10**before,
                    "multipleOf": _plain(Decimal(1).scaleb(before - digits)),
                }
                for before in range(digits + 1)
            ]
        elif digits is not None:
            end = 10 ** max(digits - (places or 0), 0)
            result["exclusiveMaximum"] = min(result.get("exclusiveMaximum", end), end)
            result["exclusiveMinimum"] = max(result.get("exclusiveMinimum", -end), -end)
        steps = [] if places is None else [_plain(Decimal(1).scaleb(-places))]
        steps += [_plain(schema["multiple_of"])] if "multiple_of" in schema else []
        if len(steps) > 1:
            return result | {"allOf": [{"multipleOf": step} for step in steps]}
        return result | ({"multipleOf": steps[0]} if steps else {})

    fraction_schema = decimal_schema

    def set_schema(self, schema: Any) -> dict[str, Any]:
        """Items may be written twice, where the set need not have several: it has them once."""
        return _repeatable(super().set_schema(schema))

    def frozenset_schema(self, schema: Any) -> dict[str, Any]:
        """As `set_schema`."""
        return _repeatable(super().frozenset_schema(schema))

    def datetime_schema(self, schema: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{DATE}T{CLOCK}{_zone(schema)}$"}

    def time_schema(self, schema: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{CLOCK}{_zone(schema)}$"}

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """With keys that can be read as what they are; in JSON all of them are strings."""
        names = _KEYS.get(schema.get("keys_schema", {}).get("type"))
        return super().dict_schema(schema) | ({"propertyNames": {"pattern": names}} if names else {})

    def url_schema(self, schema: Any) -> dict[str, Any]:
        """With the schemes and the host that pydantic asks for."""
        result = super().url_schema(schema)
        if schemes := schema.get("allowed_schemes"):
            del result["format"]
            path = r"(?::[1-9][0-9]{0,3})?(?:[/?#][!-~]*)?"
            result["pattern"] = f"^(?:{'|'.join(schemes)})://{FORMATS['hostname']}{path}$"
        return result


class _ReadingAll(_Reading):
    """Every field is written, so that what is left out is never by chance; keys that a TypedDict need not have may."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return field["type"] != "typed-dict-field" or super().field_is_required(field, total)


def _repeatable(schema: dict[str, Any]) -> dict[str, Any]:
    few = schema.get("minItems", 0) <= 1
    return {key: value for key, value in schema.items() if not (few and key == "uniqueItems")}


def _zone(schema: Any) -> str:
    """The time zone that a datetime or time takes: none, one, or either."""
    asked = schema.get("tz_constraint")
    return "" if asked == "naive" else f"(?:{ZONE})?" if asked is None else ZONE


def _plain(value: Any) -> int | float:
    return int(value) if value == int(value) else float(value)

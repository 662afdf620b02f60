"""The words of JSON Schema: what each may hold, where subschemas stand, and what makes no sense."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from fastdraft.errors import InvalidConstraintError

__all__ = [
    "IN_PLACE",
    "TYPES",
    "Path",
    "Schema",
    "check_keywords",
    "children",
    "constraints_of",
    "draft_of",
    "is_number",
    "refusal",
]

Schema: TypeAlias = bool | dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SCHEMA = _words(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames then "
    "unevaluatedItems unevaluatedProperties"
)
_SCHEMAS = _words("allOf anyOf oneOf prefixItems")
_NAMED_SCHEMAS = _words("$defs definitions dependentSchemas patternProperties properties")
_NUMBERS = _words("exclusiveMaximum exclusiveMinimum maximum minimum")
_COUNTS = _words("maxContains maxItems maxLength maxProperties minContains minItems minLength minProperties")
_TEXTS = _words("$anchor $dynamicAnchor $dynamicRef $id $ref $schema format id pattern")
_ANNOTATIONS = _words(
    "$anchor $comment $defs $dynamicAnchor $id $schema $vocabulary contentEncoding contentMediaType contentSchema "
    "default definitions deprecated description discriminator example examples id readOnly title writeOnly"
)
IN_PLACE = _words("allOf anyOf dependencies dependentSchemas else if not oneOf then")
"""Keywords whose subschemas judge the same value as the one they stand in."""

_SINCE = {"const": 6, "contains": 6, "propertyNames": 6, "else": 7, "if": 7, "then": 7}
_SINCE |= dict.fromkeys(_words("dependentRequired dependentSchemas maxContains minContains"), 2019)
_SINCE |= dict.fromkeys(_words("unevaluatedItems unevaluatedProperties"), 2019)
_SINCE |= {"$dynamicRef": 2020, "prefixItems": 2020}
_DRAFTS = {4: "draft-04", 6: "draft-06", 7: "draft-07", 2019: "draft/2019-09", 2020: "draft/2020-12"}
_UNTIL = {"additionalItems": 2019, "dependencies": 7}
_KNOWN = _SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | _NUMBERS | _COUNTS | _TEXTS
_KNOWN |= {"const", "dependencies", "dependentRequired", "enum", "multipleOf", "required", "type", "uniqueItems"}

_ORDERED = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
)


def refusal(keyword: str, pointer: str, problem: str, hint: str = "") -> InvalidConstraintError:
    """The error for a keyword that cannot be met: it says which, where, why and what to do."""
    return InvalidConstraintError(f"{keyword} at {pointer}: {problem}", hint=hint or "Change it, or leave it out.")


def draft_of(schema: Schema) -> int:
    """The draft that a schema is written in: 4, 6, 7, 2019 or 2020.

    Raises:
        InvalidConstraintError: ``$schema`` names none of them.
    """
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is None:
        return 2020
    for draft, name in _DRAFTS.items():
        if isinstance(named, str) and named.rstrip("#").endswith(f"//json-schema.org/{name}/schema"):
            return draft
    raise refusal(
        "$schema", "#", f"{named!r} is not a draft that can be enforced.", "Use draft 4, 6, 7, 2019-09 or 2020-12."
    )


def constraints_of(schema: dict[str, Any]) -> set[str]:
    """The keywords of a subschema that say something about values."""
    return {keyword for keyword in schema if keyword in _KNOWN and keyword not in _ANNOTATIONS}


def children(schema: Schema) -> Iterator[Path]:
    """Where subschemas stand in a schema, as paths from it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS or keyword == "dependencies":
            yield from ((keyword, name) for name, item in value.items() if not isinstance(item, list))
        elif keyword in _SCHEMAS or (keyword == "items" and isinstance(value, list)):
            yield from ((keyword, index) for index in range(len(value)))
        elif keyword in _SCHEMA:
            yield (keyword,)


def check_keywords(schema: Any, pointer: str, draft: int) -> None:
    """Refuses a subschema whose keywords are malformed, misspelt, of another draft or in contradiction.

    Raises:
        InvalidConstraintError: Names the keyword and its JSON pointer.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise refusal("schema", pointer, f"{_short(schema)} is not a schema, expected an object, true or false.")
    for keyword, value in schema.items():
        if not _SINCE.get(keyword, 0) <= draft <= _UNTIL.get(keyword, draft):
            raise refusal(
                keyword, pointer, f"it does not exist in draft {draft}, so it would be ignored.", _other(keyword)
            )
        for test, expected in _expectations(keyword, draft):
            if not test(value):
                raise refusal(keyword, pointer, f"it is {_short(value)}, expected {expected}.", _moved(keyword, value))
        if keyword == "$recursiveRef":
            raise refusal(
                keyword, pointer, "it leads where the way of validation says.", "Use $ref to the one you mean."
            )
        if keyword not in _KNOWN:
            _check_spelling(keyword, schema, pointer)
    _check_types(schema, pointer)
    for pattern in (*([schema["pattern"]] if "pattern" in schema else ()), *schema.get("patternProperties", ())):
        try:
            re.compile(pattern)
        except re.error as error:
            raise refusal(
                "pattern", pointer, f"{_short(pattern)} cannot be read: {error}.", "Write it as Python's re does."
            ) from error
    for low, high in _ORDERED:
        if low in schema and high in schema and schema[low] > schema[high]:
            raise refusal(
                low, pointer, f"{low} is {schema[low]}, more than {high}, which is {schema[high]}.", "No value fits."
            )
    for keyword in ("const", "enum"):
        for value in _numbers_in(schema.get(keyword)):
            if abs(value) > 2**53 and isinstance(value, int):
                raise refusal(
                    keyword, pointer, f"{value} is beyond 2**53, where JSON numbers are not exact.", "Use a string."
                )


def is_number(value: Any) -> bool:
    """Whether a value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _expectations(keyword: str, draft: int) -> Iterator[tuple[Callable[[Any], bool], str]]:
    """What a keyword's value must be: tests, each with its words."""
    if keyword in _SCHEMAS:
        yield lambda value: isinstance(value, list) and bool(value), "a list of schemas that is not empty"
    elif keyword in _NAMED_SCHEMAS or keyword in ("dependencies", "dependentRequired"):
        yield lambda value: isinstance(value, dict), "an object"
        if keyword == "dependentRequired":
            yield lambda value: all(_is_names(names) for names in value.values()), "an object of lists of names"
    elif keyword == "items" and draft < 2020:
        yield lambda value: isinstance(value, dict | bool | list), "a schema or a list of schemas"
    elif keyword in _SCHEMA:
        yield lambda value: isinstance(value, dict | bool), "a schema"
    elif keyword in ("exclusiveMaximum", "exclusiveMinimum") and draft == 4:
        yield lambda value: isinstance(value, bool), "true or false"
    elif keyword in _NUMBERS:
        yield is_number, "a number"
    elif keyword == "multipleOf":
        yield lambda value: is_number(value) and value > 0, "a number above 0"
    elif keyword in _COUNTS:
        yield lambda value: is_number(value) and value >= 0 and value == int(value), "an integer >= 0"
    elif keyword in _TEXTS and (keyword != "id" or draft == 4):
        yield lambda value: isinstance(value, str), "a string"
    elif keyword == "uniqueItems":
        yield lambda value: isinstance(value, bool), "true or false"
    elif keyword == "required":
        yield _is_names, "a list of names"
    elif keyword == "enum":
        yield lambda value: isinstance(value, list), "a list"
        yield bool, "at least one value; an empty enum allows nothing"
    elif keyword == "type":
        yield lambda value: isinstance(value, str) or (_is_names(value) and bool(value)), "a type or a list of types"


def _check_types(schema: dict[str, Any], pointer: str) -> None:
    named = schema.get("type", [])
    for name in [named] if isinstance(named, str) else named:
        if name not in TYPES:
            near = difflib.get_close_matches(name, TYPES, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known are: {', '.join(TYPES)}."
            raise refusal("type", pointer, f"{name!r} is not a JSON type.", hint)


def _check_spelling(keyword: str, schema: dict[str, Any], pointer: str) -> None:
    """Unknown keywords are annotations by the standard, but not those that miss a known one by a letter."""
    if keyword in _ANNOTATIONS or keyword.startswith("x-") or not keyword[:1].isalpha():
        return
    near = difflib.get_close_matches(keyword, _KNOWN - _ANNOTATIONS, n=1, cutoff=0.87)
    if near and near[0] not in schema:
        raise refusal(
            keyword,
            pointer,
            "it is no keyword, so it would be ignored.",
            f"Did you mean {near[0]!r}? An annotation of your own may start with 'x-'.",
        )


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(item)
    elif is_number(value):
        yield value


def _other(keyword: str) -> str:
    if keyword == "dependencies":
        return 'Use dependentRequired or dependentSchemas, or say "$schema": draft-07.'
    if keyword == "additionalItems":
        return 'Use prefixItems and items, or say "$schema": draft-07.'
    return 'Say "$schema": "https://json-schema.org/draft/2020-12/schema", or leave the keyword out.'


def _moved(keyword: str, value: Any) -> str:
    """The remedy for what was right in an older draft."""
    if keyword == "items" and isinstance(value, list):
        return 'Use prefixItems, or say "$schema": draft-07.'
    if keyword in ("exclusiveMaximum", "exclusiveMinimum") and isinstance(value, bool):
        return 'Write the bound itself, or say "$schema": draft-04.'
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

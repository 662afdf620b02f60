"""What cannot be enforced is refused by name: the keyword, where it stands, what to do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fastdraft import InvalidConstraintError
from fastdraft.constraints.schema import normalise

DRAFT4, DRAFT7 = ({"$schema": f"http://json-schema.org/draft-0{n}/schema#"} for n in (4, 7))

# A schema, the keyword, its pointer, and words of the message.
REFUSED: list[tuple[Any, str, str, str]] = [
    (False, "false", "#", "no value"),
    ({"type": "strnig"}, "type", "#", "'strnig'|'string'"),
    ({"properties": {"a/b": {"type": ["null", "int"]}}}, "type", "#/properties/a~1b", "'int'"),
    ({"$ref": "#/$defs/Missing"}, "$ref", "#", "Missing|nowhere"),
    ({"items": {"$ref": "#gone"}}, "$ref", "#/items", "#gone"),
    ({"not": {"$ref": "https://a.example/b.json"}}, "$ref", "#/not", "nothing is fetched|$defs"),
    ({"$ref": "#"}, "$ref", "#", "only to itself"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "$ref",
        "#/$defs/a",
        "itself",
    ),
    ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "$ref", "#", "only to itself"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "$ref", "#", "without end"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref", "#", "without end"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum", "#", "maximum|3|1"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength", "#", "maxLength|5|2"),
    ({"items": {"minItems": 5, "maxItems": 2}}, "minItems", "#/items", "maxItems"),
    ({"minProperties": 2, "maxProperties": 1}, "minProperties", "#", "maxProperties"),
    (
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        "minimum",
        "#",
        "no integer|exclusiveMaximum 2",
    ),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "minimum", "#", "no number"),
    ({"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 13}, "multipleOf", "#", "no multiple of 7"),
    ({"enum": []}, "enum", "#", "empty"),
    ({"type": "integer", "enum": ["a"]}, "enum", "#", "none of its values"),
    ({"items": {"type": "integer", "const": 3, "minimum": 5}}, "const", "#/items", "none of its values"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required", "#", "'a'"),
    (
        {"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False},
        "required",
        "#",
        "'a' is required",
    ),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "type", "#/allOf/1", "no value"),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "maxProperties", "#", "2 keys"),
    (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 2},
        "minProperties",
        "#",
        "1 keys",
    ),
    ({"not": {}}, "not", "#", "no value"),
    ({"const": 2**60}, "const", "#", "2**53"),
    ({"minLength": "5"}, "minLength", "#", "'5'|integer"),
    ({"minLength": 1.5}, "minLength", "#", "integer >= 0"),
    ({"pattern": "[a-"}, "pattern", "#", "'[a-'"),
    ({"patternProperties": {"(": {}}}, "pattern", "#", "'('"),
    ({"multipleOf": 0}, "multipleOf", "#", "above 0"),
    ({"required": True}, "required", "#", "a list of names"),
    ({"properties": []}, "properties", "#", "an object"),
    ({"anyOf": []}, "anyOf", "#", "not empty"),
    ({"anyOf": [{}, 3]}, "schema", "#/anyOf/1", "3 is not a schema"),
    ({"items": [{}]}, "items", "#", "prefixItems|draft-07"),
    ({"exclusiveMinimum": True, "minimum": 3}, "exclusiveMinimum", "#", "draft-04"),
    ({"dependencies": {"a": ["b"]}}, "dependencies", "#", "dependentRequired"),
    (DRAFT4 | {"if": {}, "then": {}}, "if", "#", "does not exist in draft 4"),
    (DRAFT7 | {"prefixItems": [{}]}, "prefixItems", "#", "draft 7"),
    ({"$schema": "https://a.example/meta"}, "$schema", "#", "https://a.example/meta"),
    ({"properties": {"a": {"maxLenght": 3}}}, "maxLenght", "#/properties/a", "'maxLength'"),
    ({"requried": ["a"]}, "requried", "#", "'required'"),
]


@pytest.mark.parametrize(("schema", "keyword", "pointer", "words"), REFUSED, ids=[f"{row[0]!s:.50}" for row in REFUSED])
def test_a_schema_is_refused_by_keyword_and_place(schema, keyword, pointer, words):
    started = time.perf_counter()
    with pytest.raises(InvalidConstraintError) as caught:
        normalise(schema)
    assert time.perf_counter() - started < 1
    message = str(caught.value)
    assert message.startswith(f"{keyword} at {pointer}: "), message
    assert caught.value.hint
    for word in words.split("|"):
        assert word in message


def test_a_choice_that_validation_makes_is_refused():
    anchors = {f"d{i}": {"$id": f"d{i}", "$dynamicAnchor": "node", "type": "integer"} for i in range(2)}
    with pytest.raises(InvalidConstraintError, match=r"\$dynamicRef at #/items"):
        normalise({"$id": "http://a.example/", "$defs": anchors, "items": {"$dynamicRef": "d0#node"}})


def test_what_is_not_json_is_refused():
    loop: dict[str, Any] = {}
    loop["items"] = loop
    for schema in ({"enum": [{1, 2}]}, {"const": float("nan")}, {"const": b"a"}, loop):
        with pytest.raises(InvalidConstraintError, match="not JSON"):
            normalise(schema)


def test_depth_is_refused_and_not_a_crash():
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(20_000):
        deep = {"items": deep}
    with pytest.raises(InvalidConstraintError, match="too deeply"):
        normalise(deep)


@pytest.mark.parametrize(
    "schema",
    [{"_format": "x"}, {"x-maxlength": 3}, {"formats": ["a"], "format": "date"}, {"example": 3}, {"unit": "m"}],
)
def test_annotations_of_ones_own_are_left_alone(schema):
    normalise(schema)

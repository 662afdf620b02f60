"""Schemas made plain: what the grammar gets, and what is left to validation."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest

from fastdraft import Constrained, InvalidConstraintError
from fastdraft.constraints.schema import normalise
from fastdraft.constraints.types import spec_of
from tests.byte_grammar import Grammar, write

CLOSED = {"additionalProperties": False}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


INT, STR, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}

# A schema, what it becomes, and the keywords left to validation.
PLAIN: list[tuple[str, Any, Any, set[str]]] = [
    ("annotations go", {"title": "T", "description": "d", "default": 3, "type": "integer"}, INT, set()),
    ("nothing is said", {"$comment": "c"}, {}, set()),
    ("objects close", obj(a=INT), obj(a=INT) | CLOSED, set()),
    ("said open", obj(a=INT) | {"additionalProperties": True}, obj(a=INT) | {"additionalProperties": True}, set()),
    (
        "others have a type",
        obj() | {"additionalProperties": INT},
        {"type": "object", "additionalProperties": INT},
        set(),
    ),
    ("nothing named stays open", {"type": "object"}, {"type": "object"}, set()),
    ("empty properties close", obj(), obj() | CLOSED, set()),
    ("required names close", {"type": "object", "required": ["a"]}, obj(a=True) | {"required": ["a"]} | CLOSED, set()),
    (
        "patterns close",
        {"type": "object", "patternProperties": {"^a": INT}},
        {"type": "object", "patternProperties": {"^a": INT}} | CLOSED,
        set(),
    ),
    (
        "allOf closes once",
        {"allOf": [obj(a=INT), obj(b=STR)], "required": ["b"]},
        obj(a=INT, b=STR) | {"required": ["b"]} | CLOSED,
        set(),
    ),
    (
        "limits join",
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
        INT | {"minimum": 3, "maximum": 9},
        set(),
    ),
    ("siblings of $ref", {"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": STR}}, STR | {"maxLength": 3}, set()),
    (
        "exclusive integers",
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
        INT | {"minimum": 1, "maximum": 8},
        set(),
    ),
    (
        "multiples join",
        {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
        INT | {"multipleOf": 12},
        set(),
    ),
    ("multiples of a half", {"type": "integer", "multipleOf": 0.5}, INT, set()),
    ("counts may be 2.0", {"type": "string", "maxLength": 2.0}, STR | {"maxLength": 2}, set()),
    (
        "types are told apart",
        {"maxLength": 3, "type": ["string", "null"]},
        {"anyOf": [NULL, STR | {"maxLength": 3}]},
        set(),
    ),
    ("types without limits", {"type": ["string", "null"]}, {"type": ["null", "string"]}, set()),
    ("numbers hold integers", {"allOf": [{"type": "number"}, INT]}, INT, set()),
    ("disjoint oneOf", {"oneOf": [INT, STR]}, {"anyOf": [INT, STR]}, set()),
    (
        "oneOf by a key",
        {"oneOf": [obj(k={"const": "a"}) | {"required": ["k"]}, obj(k={"const": "b"}, c=INT) | {"required": ["k"]}]},
        {
            "anyOf": [
                obj(k={"enum": ["a"]}) | {"required": ["k"]} | CLOSED,
                obj(k={"enum": ["b"]}, c=INT) | {"required": ["k"]} | CLOSED,
            ]
        },
        set(),
    ),
    (
        "overlapping oneOf",
        {"oneOf": [STR, {"type": "string", "maxLength": 3}]},
        STR,
        {"oneOf"},
    ),
    (
        "one of two keys",
        obj(a=INT, b=INT) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"anyOf": [obj(a=INT) | {"required": ["a"]} | CLOSED, obj(b=INT) | {"required": ["b"]} | CLOSED]},
        set(),
    ),
    ("an enum is filtered", {"enum": [1, "a", None, 2.5], "type": ["integer", "null"]}, {"enum": [1, None]}, set()),
    ("exactly", {"enum": ["a", "b", "ab"], "not": {"pattern": "b"}}, {"enum": ["a"]}, set()),
    ("not a type", {"not": {"type": ["object", "array", "null", "boolean"]}}, {"type": ["number", "string"]}, set()),
    ("not a key", obj(a=INT, b=INT) | {"not": {"required": ["a"]}}, obj(b=INT) | CLOSED, set()),
    ("not what cannot be denied", {"type": "integer", "not": {"multipleOf": 3}}, INT, {"not"}),
    (
        "if by a listed key",
        obj(k={"enum": ["a", "b"]}, v=INT)
        | {"required": ["k"], "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["v"]}},
        {
            "anyOf": [
                obj(k={"enum": ["a"]}, v=INT) | {"required": ["k", "v"]} | CLOSED,
                obj(k={"enum": ["b"]}, v=INT) | {"required": ["k"]} | CLOSED,
            ]
        },
        set(),
    ),
    (
        "if that cannot be denied",
        {"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}},
        {"anyOf": [INT | {"minimum": 3, "maximum": 5}, INT]},
        {"if"},
    ),
    (
        "a key asks for another",
        obj(a=INT, b=INT) | {"dependentRequired": {"a": ["b"]}},
        {"anyOf": [obj(b=INT) | CLOSED, obj(a=INT, b=INT) | {"required": ["a", "b"]} | CLOSED]},
        set(),
    ),
    (
        "a required key asks for another",
        obj(a=INT, b=INT) | {"required": ["a"], "dependentRequired": {"a": ["b"]}},
        obj(a=INT, b=INT) | {"required": ["a", "b"]} | CLOSED,
        set(),
    ),
    (
        "items are counted",
        {"type": "array", "contains": INT, "minContains": 2},
        {"type": "array", "minItems": 2},
        {"contains", "minContains"},
    ),
    ("nothing needs to be contained", {"type": "array", "contains": INT, "minContains": 0}, {"type": "array"}, set()),
    (
        "unique items",
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}},
        {"type": "array", "maxItems": 2, "items": {"enum": [1, 2]}},
        {"uniqueItems"},
    ),
    ("a pattern that looks ahead", {"type": "string", "pattern": "^(?!a)"}, STR, {"pattern"}),
    ("an unknown format", {"type": "string", "format": "semver"}, STR, {"format"}),
    ("unevaluated", {"allOf": [obj(a=INT)], "unevaluatedProperties": False}, obj(a=INT) | CLOSED, set()),
    (
        "unevaluated items",
        {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
        {"type": "array", "prefixItems": [INT], "items": False},
        set(),
    ),
    (
        "names by pattern",
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "patternProperties": {"^a": True}} | CLOSED,
        set(),
    ),
    (
        "names by list",
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        obj(a=INT, b=INT) | CLOSED,
        set(),
    ),
    (
        "disjoint patterns",
        {"type": "object", "patternProperties": {"^a": INT, "^b": STR}},
        {"type": "object", "patternProperties": {"^a": INT, "^b": STR}} | CLOSED,
        set(),
    ),
    (
        "patterns that may share keys",
        {"type": "object", "patternProperties": {"a": INT, "b": STR}},
        {"type": "object", "patternProperties": {"(?:a)|(?:b)": {"anyOf": [INT, STR]}}} | CLOSED,
        {"patternProperties"},
    ),
    ("a key with a pattern", obj(ab=INT) | {"patternProperties": {"^a": {"minimum": 3}}}, None, set()),
    (
        "one key at least",
        obj(a=INT, b=INT) | {"minProperties": 1},
        obj(a=INT, b=INT) | {"minProperties": 1} | CLOSED,
        set(),
    ),
    (
        "two keys that may be one",
        {"minProperties": 2, "type": "object"},
        {"type": "object", "minProperties": 2},
        {"minProperties"},
    ),
    (
        "two keys of three",
        obj(a=INT, b=INT, c=INT) | {"minProperties": 2},
        obj(a=INT, b=INT, c=INT) | CLOSED,
        {"minProperties"},
    ),
    ("more keys than are named", obj(a=INT) | {"minProperties": 2}, None, {"minProperties"}),
    (
        "an item that nothing fills",
        {"type": "array", "items": {"not": {}}},
        {"type": "array", "maxItems": 0, "items": False},
        set(),
    ),
    ("an optional part that nothing fills", obj(a=INT, b={"allOf": [INT, STR]}), obj(a=INT) | CLOSED, set()),
    ("a branch that nothing fills", {"anyOf": [INT, {"allOf": [INT, STR]}]}, INT, set()),
    (
        "draft 4",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
        },
        INT | {"minimum": 4},
        set(),
    ),
    (
        "draft 7",
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INT], "additionalItems": STR},
        {"type": "array", "prefixItems": [INT], "items": STR},
        set(),
    ),
    (
        "draft 7 ignores what stands beside $ref",
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"a": INT},
            "$ref": "#/definitions/a",
            "minimum": 3,
        },
        INT,
        set(),
    ),
]


@pytest.mark.parametrize(("schema", "plain", "checks"), [row[1:] for row in PLAIN], ids=[row[0] for row in PLAIN])
def test_a_schema_becomes_plain(schema, plain, checks):
    before = copy.deepcopy(schema)
    found = normalise(schema)
    assert schema == before
    if plain is not None:
        assert json.dumps(found.schema, sort_keys=True) == json.dumps(plain, sort_keys=True)
    assert set(found.checks) == checks
    Grammar(spec_of(Constrained(schema)))
    again = normalise(found.schema)
    assert again.schema == found.schema
    assert set(again.checks) <= checks


def test_keys_keep_the_order_of_their_declaration():
    base = {"$defs": {"base": obj(z=INT, y=INT)}}
    assert list(
        normalise(base | {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"a": INT, "z": {"minimum": 1}}}).schema[
            "properties"
        ]
    ) == ["z", "y", "a"]
    assert list(normalise(base | {"properties": {"a": INT}, "$ref": "#/$defs/base"}).schema["properties"]) == [
        "a",
        "z",
        "y",
    ]


def test_recursion_stays_a_reference():
    tree = obj(value=INT, left={"$ref": "#"}, right={"anyOf": [{"$ref": "#"}, NULL]})
    grammar = Grammar(spec_of(Constrained(tree)))
    assert grammar.writes('{"value":1,"left":{"left":{"right":null}},"right":{"value":2}}')
    both = {
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": obj(child={"$ref": "#/$defs/a"}, x=INT), "b": obj(child={"$ref": "#/$defs/b"}, y=INT)},
    }
    grammar = Grammar(spec_of(Constrained(both)))
    assert grammar.writes('{"child":{"child":{"x":1,"y":2},"x":1}}')
    assert not grammar.writes('{"child":{"z":1}}')


def test_references_find_their_targets():
    inner = {
        "$id": "http://a.example/b/",
        "$defs": {"x": {"$anchor": "here", "type": "integer"}, "y": {"$id": "c", "type": "null"}},
    }
    schema = {
        "$defs": {"inner": inner, "a/b~c%": STR},
        **obj(
            p={"$ref": "#/$defs/a~1b~0c%25"}, q={"$ref": "http://a.example/b/#here"}, r={"$ref": "http://a.example/b/c"}
        ),
    }
    assert normalise(schema).schema["properties"] == {"p": STR, "q": INT, "r": NULL}


def test_values_are_what_the_schema_allows_and_no_other():
    """Every small value: what is written is valid, and what is valid is written, but for objects, which close."""
    values: list[Any] = [None, True, 0, 3, 7, 2.5, "", "a", "ab", [], [0], [0, "a"], [3, 3], {}]
    values += [{"a": 0}, {"b": "a"}, {"a": 3, "b": "ab"}, {"a": "a"}, {"a": 0, "b": 0}]
    for name, schema, _, checks in PLAIN:
        spec = spec_of(Constrained(schema))
        grammar = Grammar(spec)
        for value in values:
            text = write(value)
            try:
                spec.parse(text)
                valid = True
            except ValueError:
                valid = False
            if grammar.writes(text):
                assert valid or checks, (name, text)
            elif valid and not isinstance(value, dict):
                raise AssertionError((name, text))


def test_a_large_schema_is_read_in_no_time():
    wide = obj(**{f"k{i}": {"anyOf": [obj(**{f"v{i}": STR}), NULL]} for i in range(500)})
    assert len(normalise(wide).schema["properties"]) == 500
    many = {"allOf": [{"anyOf": [obj(**{f"a{i}": INT}), obj(**{f"b{i}": INT})]} for i in range(40)]}
    found = normalise(many)
    assert "allOf" in found.checks or "anyOf" in found.checks


def test_alternatives_beyond_count_leave_their_keys_writable():
    letters = "ABCD"
    cases = [
        {
            "if": {"properties": {"k": {"const": letter}}, "required": ["k"]},
            "then": {"properties": {letter.lower(): {"type": "integer"}}, "required": [letter.lower()]},
        }
        for letter in letters
    ]
    schema = {"type": "object", "properties": {"k": {"enum": list(letters)}}, "required": ["k"], "allOf": cases}
    made = spec_of(Constrained(schema))
    grammar = Grammar(made)
    for letter in letters:
        text = f'{{"k":"{letter}","{letter.lower()}":1}}'
        assert grammar.writes(text), text
        assert made.parse(text)
    many = {"type": "object", "oneOf": [{"properties": {f"a{i}": INT}, "required": [f"a{i}"]} for i in range(65)]}
    assert Grammar(spec_of(Constrained(many))).writes('{"a64":1}')


def test_options_that_share_much_are_told_apart_at_once():
    """As pydantic writes a union of models with a common base, whose own tag comes last."""
    inner = {f"p{i}": {"type": "object", "properties": {"q": STR}, "required": ["q"]} for i in range(15)}
    payload = {"type": "object", "properties": inner, "required": list(inner)}
    options = [
        {
            "type": "object",
            "properties": {"payload": {"$ref": "#/$defs/payload"}, "kind": {"const": f"k{i}"}},
            "required": ["payload", "kind"],
        }
        for i in range(40)
    ]
    started = time.perf_counter()
    found = normalise({"oneOf": options, "$defs": {"payload": payload}})
    assert time.perf_counter() - started < 5
    assert found.checks == ()


def test_identifiers_and_names_mean_what_their_draft_says():
    plain = {"properties": {"a": {"id": "field-a", "$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
    assert Grammar(spec_of(Constrained(plain))).writes('{"a":3}')
    assert normalise({"type": "integer", "id": 7})
    old = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"a": {"$ref": "x.json"}},
        "definitions": {"x": {"id": "x.json", "type": "integer"}},
    }
    assert not Grammar(spec_of(Constrained(old))).writes('{"a":"b"}')
    with pytest.raises(InvalidConstraintError, match=r"\$recursiveRef"):
        normalise({"$schema": "https://json-schema.org/draft/2019-09/schema", "items": {"$recursiveRef": "#"}})
    assert normalise({"multipleOf": 10**400}).checks == ("multipleOf",)

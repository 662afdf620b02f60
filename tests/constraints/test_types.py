"""Output types: what each becomes, what its grammar writes, and what its texts mean."""

from __future__ import annotations

import dataclasses
import datetime as dt
import subprocess
import sys
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, Union
from uuid import UUID

import outlines.types
import pytest
from outlines.types import dsl
from pydantic import (
    UUID4,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    NaiveDatetime,
    ValidationError,
    conint,
    constr,
    create_model,
)
from typing_extensions import TypedDict

from fastdraft import ConfigError, Constrained, InvalidConstraintError, Json, describe
from fastdraft.constraints.types import Spec, as_constrained, spec_of
from tests.byte_grammar import Grammar


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: conint(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool


class Owner(BaseModel):
    pet: Annotated[Union[Cat, Dog], Field(discriminator="kind")]  # noqa: UP007


class Node(BaseModel):
    name: Literal["n"]
    children: list[Node] = Field(max_length=2)


class Price(BaseModel):
    price: Decimal = Field(max_digits=6, decimal_places=2)
    step: Annotated[int, Field(multiple_of=5, ge=0, le=20)]


class Empty(BaseModel):
    pass


class Free(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Settings(BaseModel):
    name: str
    size: int = 3
    tags: list[str] = Field(default_factory=list)


class Entry(TypedDict):
    key: str
    note: NotRequired[str]


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0
    norm: float = dataclasses.field(init=False, default=0.0)


def spec(output_type: Any, **options: Any) -> Spec:
    return spec_of(Constrained(output_type, **options))


# Of each type: a text and its value; texts that its grammar never writes.
WRITTEN: list[tuple[Any, str, Any, list[str]]] = [
    (int, "-12", -12, ["1.5", "01", '"1"', "true"]),
    (float, "1.5", 1.5, ['"1"', ".5", "NaN"]),
    (bool, "true", True, ["True", "1"]),
    (str, '"a"', "a", ["a"]),
    (None, "null", None, ["None", '""']),
    (type(None), "null", None, ["None"]),
    (Decimal, "1.50", Decimal("1.50"), ['"1.5"']),
    (dt.date, '"2024-02-29"', dt.date(2024, 2, 29), ['"2023-02-29"', '"2024-2-1"', '"0000-01-01"', '"2024-04-31"']),
    (dt.time, '"10:20:30"', dt.time(10, 20, 30), ['"10:20:60"', '"25:00:00"']),
    (dt.datetime, '"2024-05-01T10:00:00"', dt.datetime(2024, 5, 1, 10), ['"2024-05-01"', '"2024-05-01 10:00:00"']),
    (dt.timedelta, '"P1DT2H"', dt.timedelta(days=1, hours=2), ['"1 day"', '"P"']),
    (NaiveDatetime, '"2024-05-01T10:00:00"', dt.datetime(2024, 5, 1, 10), ['"2024-05-01T10:00:00Z"']),
    (
        AwareDatetime,
        '"2024-05-01T10:00:00Z"',
        dt.datetime(2024, 5, 1, 10, tzinfo=dt.UTC),
        ['"2024-05-01T10:00:00"'],
    ),
    (
        UUID,
        '"12345678-1234-1234-8123-123456789012"',
        UUID("12345678-1234-1234-8123-123456789012"),
        ['"12345678123412348123123456789012"'],
    ),
    (HttpUrl, '"https://a.example/b?c"', HttpUrl("https://a.example/b?c"), ['"ftp://a.example"', '"https://"']),
    (bytes, '"ab"', b"ab", []),
    (list[int], "[1,2]", [1, 2], ["[1, 2]", "[1,]", "1"]),
    (list[Colour], '["red"]', [Colour.RED], ['["green"]']),
    (tuple[int, str], '[1,"a"]', (1, "a"), ["[1]", '[1,"a",2]']),
    (tuple[int, ...], "[1,2]", (1, 2), ['["a"]']),
    (set[int], "[1,2]", {1, 2}, ['["a"]']),
    (dict[str, int], '{"a":1}', {"a": 1}, ['{"a":"b"}', "{a:1}"]),
    (dict[int, str], '{"-1":"a"}', {-1: "a"}, ['{"a":"a"}', '{-1:"a"}']),
    (dict[dt.date, int], '{"2024-01-01":1}', {dt.date(2024, 1, 1): 1}, ['{"2024":1}']),
    (dict[Colour, int], '{"red":1}', {Colour.RED: 1}, ['{"green":1}']),
    (dict[Annotated[str, Field(pattern="^a+$")], int], '{"aa":1}', {"aa": 1}, ['{"b":1}']),
    (Optional[int], "null", None, ['""']),  # noqa: UP045
    (int | str, '"a"', "a", ["null"]),
    (Any, '{"a":[null]}', {"a": [None]}, ["a"]),
    (Colour, "blue", Colour.BLUE, ['"blue"', "green"]),
    (Size, "2", Size.LARGE, ["3", "LARGE"]),
    (Literal["a", "b"], "b", "b", ['"b"', "c"]),
    (Literal[Colour.RED], "red", Colour.RED, ["blue"]),
    (Literal[1, "b", None, True], "true", True, ["2", "b"]),
    (Annotated[int, Field(ge=3, lt=5)], "4", 4, ["2", "5"]),
    (constr(min_length=2, max_length=3), '"日本"', "日本", ['"a"', '"abcd"']),
    (constr(pattern=r"\d-\d"), '"x1-2y"', "x1-2y", ['"12"']),
    (Owner, '{"pet":{"kind":"cat","lives":3}}', Owner(pet=Cat(kind="cat", lives=3)), ['{"pet":{"kind":"cat"}}']),
    (Owner, '{"pet":{"kind":"dog","good":true}}', Owner(pet=Dog(good=True)), ['{"pet":{"good":true}}']),
    (
        Node,
        '{"name":"n","children":[{"name":"n","children":[]}]}',
        Node(name="n", children=[Node(name="n", children=[])]),
        ['{"name":"n","children":[{},{},{}]}', '{"name":"n"}'],
    ),
    (
        Price,
        '{"price":-12.5,"step":15}',
        Price(price=Decimal("-12.5"), step=15),
        ['{"price":1.234,"step":15}', '{"price":10000,"step":15}', '{"price":1,"step":7}', '{"price":"1","step":0}'],
    ),
    (Empty, "{}", Empty(), ['{"a":1}']),
    (Free, '{"a":1,"b":2}', Free(a=1, b=2), ['{"b":2}']),
    (
        Settings,
        '{"name":"n","size":1,"tags":[]}',
        Settings(name="n", size=1),
        ['{"name":"n"}', '{"size":1,"name":"n"}'],
    ),
    (Entry, '{"key":"k"}', {"key": "k"}, ["{}", '{"key":"k","other":1}']),
    (Point, '{"x":1,"y":2}', Point(1, 2.0), ['{"x":1,"y":2,"norm":1}']),
    (Json(), '[1,{"a":null}]', [1, {"a": None}], ["nul", "[1,]"]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1}', {"a": 1}, ['{"b":1}', "[]"]),
    ({}, "3", 3, ["x"]),
    ({"type": "object"}, '{"a":1}', {"a": 1}, ["3"]),
    (["yes", "no"], "no", "no", ["maybe", '"no"']),
    (("日本語", 'say "hi"'), 'say "hi"', 'say "hi"', ["say"]),
    (outlines.types.Regex("^[A-Z]{2}$"), "AB", "AB", ["A", "ABC", "^AB$"]),
    (outlines.types.Regex("^a|b$"), "b", "b", ["ab", "^a"]),
    (outlines.types.CFG('start: "a" "b"+'), "abb", "abb", ["a"]),
    (outlines.types.Choice(["x", "y"]), "y", "y", ["z"]),
    (outlines.types.JsonSchema({"type": "integer"}), "3", 3, ["a"]),
    (dsl.either("a", "b"), "a", "a", ["c"]),
    (dsl.String("a.b") + dsl.Regex("[0-9]").exactly(2), "a.b12", "a.b12", ["axb12", "a.b1"]),
    (outlines.types.Choice([Size.SMALL, 7]), "7", "7", ["8"]),
]


@pytest.mark.parametrize(("output_type", "text", "value", "never"), WRITTEN, ids=lambda item: f"{item!s:.40}")
def test_a_type_is_written_and_read(output_type, text, value, never):
    found = spec(output_type)
    grammar = Grammar(found)
    assert grammar.writes(text)
    parsed = found.parse(text)
    assert parsed == value
    assert type(parsed) is type(value)
    assert [other for other in never if grammar.writes(other)] == []


def test_what_is_not_valid_is_refused_by_parse():
    for output_type in (int, ["a"], Colour, {"type": "integer"}, Json(), outlines.types.Regex("a+")):
        with pytest.raises(ValueError):
            spec(output_type).parse("x")
    with pytest.raises(ValidationError):
        spec(Cat).parse('{"kind":"cat","lives":10}')
    with pytest.raises(ValueError, match=r"\$\.a: 1 is not of type 'string'"):
        spec({"properties": {"a": {"type": "string"}}}).parse('{"a":1}')
    assert spec({"multipleOf": 0.01}).parse("0.14") == 0.14  # no multiple of it in floating point
    old = spec({"$schema": "https://json-schema.org/draft-07/schema", "items": [{"type": "null"}]})
    assert old.parse("[null,1]") == [None, 1]
    with pytest.raises(ValueError, match=r"\$\[0\]"):
        old.parse("[1]")
    with pytest.raises(ValueError, match="NaN"):
        spec(Json()).parse("NaN")


def test_fields_with_a_default_are_written_unless_they_may_be_left_out():
    all_of_it, lean = Grammar(spec(Settings)), Grammar(spec(Settings, omit_defaults=True))
    assert not all_of_it.writes('{"name":"n"}')
    assert lean.writes('{"name":"n"}')
    assert lean.writes('{"name":"n","tags":["a"]}')
    tagged = Grammar(spec(Owner, omit_defaults=True))
    assert not tagged.writes('{"pet":{"good":true}}')  # the tag has a default, and decides all the same
    assert tagged.writes('{"pet":{"kind":"dog","good":true}}')


def test_lengths_have_defaults_where_a_type_sets_none():
    class Bounded(BaseModel):
        free: str
        short: constr(max_length=2)
        when: dt.date
        items: list[int]

    grammar = Grammar(spec(Bounded, max_string=4, max_items=2))
    text = '{{"free":"{}","short":"ab","when":"2024-01-01","items":{}}}'
    assert grammar.writes(text.format("abcd", "[1,2]"))
    assert not grammar.writes(text.format("abcde", "[1,2]"))
    assert not grammar.writes(text.format("abcd", "[1,2,3]"))
    assert not Grammar(spec({"type": "string", "minLength": 6}, max_string=4)).writes('"abcde"')
    assert Grammar(spec({"type": "string", "minLength": 6}, max_string=4)).writes('"abcdef"')


def test_whitespace_is_written_only_where_it_is_asked_for():
    assert not Grammar(spec(list[int])).writes("[1, 2]")
    assert Grammar(spec(list[int], whitespace=True)).writes("[1, 2]")


def test_many_optional_fields_compile_at_once():
    fields = {f"f{i}": (Optional[Literal["v"]], None) for i in range(60)}  # noqa: UP045
    report = create_model("Report", **fields)
    grammar = Grammar(spec(report, omit_defaults=True))
    assert grammar.writes('{"f3":"v","f40":null}')
    assert not grammar.writes('{"f3":"v","f3":"v"}')


def test_what_only_parse_enforces_is_named():
    assert spec(set[int]).checks == ()
    assert spec(set[int]).parse("[1,1]") == {1}, "a set has once what was written twice"
    assert spec(list[int]).checks == ()
    assert spec({"not": {"pattern": "a"}}).checks == ("not",)


@pytest.mark.parametrize(
    ("output_type", "said"),
    [
        ("[0-9]+", "instance of str"),
        (3, "instance of int"),
        (True, "instance of bool"),
        (lambda text: text, "instance of function"),
        (print, "instance of builtin_function"),
        (Cat(kind="cat", lives=1), "instance of Cat"),
        (Point(1), "instance of Point"),
        (object(), "instance of object"),
        ({1, 2}, "instance of set"),
        (type("Odd", (), {}), "Odd"),
        (Literal, "Literal"),
        (list["Missing"], "Missing"),  # noqa: F821
        ([], "empty"),
        (["a", 1], "choice 1 is a int"),
        (Enum("None_", {}), "empty"),
    ],
)
def test_what_is_no_output_type_is_refused_with_what_is(output_type, said):
    with pytest.raises(InvalidConstraintError) as caught:
        spec(output_type)
    assert said in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(?=a)ab", "look-ahead at position 0"),
        ("a(?!b)", "look-ahead at position 1"),
        ("(?<=a)b", "look-behind"),
        (r"(a)\1", "a backreference at position 3"),
        (r"(?P<x>a)(?P=x)", "a backreference"),
        (r"\bword\b", "a word boundary"),
        ("(?>a)b", "an atomic group"),
        ("a++b", "a possessive repetition"),
        ("a^b", "^ after the start at position 1"),
        ("(a$|b)c", "$ before the end"),
        ("[a-", "'[a-'"),
        ("(", "'('"),
        ("(?x)a b", "a flag"),
    ],
)
def test_a_regular_expression_that_no_grammar_follows_is_refused_by_name(pattern, said):
    with pytest.raises(InvalidConstraintError) as caught:
        spec(outlines.types.Regex(pattern))
    assert said in str(caught.value)
    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\Aab\Z", "ab"),
        ("(^a|^b)c", "ac"),
        ("(?i)ab", "AB"),
        (r"[(^$]+\$\^", "(^$$^"),
        ("(?P<stop>a)b", "ab"),  # an engine reads this name as something else
        ("a{2}b{1,}?c", "aabbc"),
        ("🦊👩‍👩‍👧日本語ß", "🦊👩‍👩‍👧日本語ß"),
        (r"a\-b\ c\.", "a-b c."),
        ("", ""),
    ],
)
def test_a_regular_expression_is_written_whole(pattern, text):
    found = spec(outlines.types.Regex(pattern))
    assert Grammar(found).writes(text)
    assert not Grammar(found).writes(text + "!")
    assert found.parse(text) == text


def test_options_are_checked_where_they_are_made():
    for fields in (
        {"retries": -1},
        {"max_string": 0},
        {"max_items": True},
        {"after": ""},
        {"finish": "soon"},
        {"x": 1},
    ):
        with pytest.raises(ValidationError):
            Constrained(int, **fields)
    with pytest.raises(ValidationError, match="inside another"):
        Constrained(Constrained(int))
    assert as_constrained(int) == Constrained(int)
    assert as_constrained(kept := Constrained(int, retries=2)) is kept
    assert issubclass(InvalidConstraintError, ValueError) and issubclass(ConfigError, ValueError)


def test_a_whitespace_pattern_of_an_outlines_schema_is_not_ignored():
    with pytest.raises(InvalidConstraintError, match="whitespace_pattern"):
        spec(outlines.types.JsonSchema({"type": "integer"}, whitespace_pattern=" "))


def test_reading_a_type_loads_nothing_heavy():
    code = (
        "import sys; from fastdraft import Constrained; from fastdraft.constraints.types import spec_of; "
        "spec_of(Constrained(dict[str, list[int]])).parse('{}'); spec_of(Constrained({'type': 'object'})); "
        "print([n for n in ('torch', 'transformers', 'outlines', 'llguidance', 'jsonschema') if n in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("output_type", "said"),
    [
        (["yes", "no"], "one of these and nothing else:\nyes\nno"),
        (Json(), "Answer with JSON and nothing else."),
        ({"type": "integer", "description": "a year"}, '"description": "a year"'),
        (outlines.types.Regex("[0-9]{4}"), "[0-9]{4}"),
        (int, '{"type": "integer"}'),
        (Decimal, '"type": "number"'),  # as it is read, not as pydantic would write it
    ],
)
def test_words_for_a_prompt(output_type: Any, said: str) -> None:
    assert said in describe(output_type)
    with pytest.raises(InvalidConstraintError):
        describe(object())


class Tagged(BaseModel):
    tags: list[str] = Field(json_schema_extra={"uniqueItems": True})


def test_what_a_type_says_of_its_schema_alone_is_enforced_too():
    made = spec(Tagged)
    assert made.checks == ("uniqueItems",)
    assert made.parse('{"tags":["a","b"]}') == Tagged(tags=["a", "b"])
    with pytest.raises(ValueError, match="non-unique"):
        made.parse('{"tags":["a","a"]}')


def test_a_schema_inside_an_outlines_expression_is_refused():
    for term in (
        dsl.String("n: ") + dsl.JsonSchema({"type": "integer", "minimum": 3}),
        dsl.either(dsl.JsonSchema({"type": "integer"}), "none"),
    ):
        with pytest.raises(InvalidConstraintError, match="part of an outlines expression"):
            spec(term)


@pytest.mark.parametrize(
    ("output_type", "options", "said"),
    [
        (["a", "b"], {"max_string": 3}, "max_string"),
        (outlines.types.Regex("a"), {"whitespace": True}, "whitespace"),
        (outlines.types.Regex("a"), {"max_items": 3}, "max_items"),
        ({"type": "object"}, {"omit_defaults": True}, "omit_defaults"),
    ],
)
def test_an_option_that_does_nothing_is_refused(output_type, options, said):
    with pytest.raises(InvalidConstraintError, match=said):
        spec(output_type, **options)


def test_lengths_hold_all_the_way_down():
    grammar = Grammar(spec(Json(), max_string=3, max_items=2))
    for text in ('"abc"', "[1,2]", '{"abc":{"d":["x",null]}}', "12345", "{}", "[[],[]]"):
        assert grammar.writes(text), text
    for text in ('"abcd"', "[1,2,3]", '{"abcd":1}', '{"a":"abcd"}', '{"a":1,"b":2,"c":3}', '[["abcd"]]'):
        assert not grammar.writes(text), text
    names = Grammar(spec(dict[str, int], max_string=3, max_items=2))
    assert names.writes('{"abc":1,"d":2}')
    assert not names.writes('{"abcd":1}') and not names.writes('{"a":1,"b":2,"c":3}')


@pytest.mark.parametrize(
    ("kind", "legal", "illegal"),
    [
        (UUID4, '"0b7fa9a0-1c2d-4e3f-8a9b-0c1d2e3f4a5b"', '"0b7fa9a0-1c2d-1e3f-8a9b-0c1d2e3f4a5b"'),
        (IPv4Network, '"10.0.0.1/32"', '"10.0.0.1/8"'),
        (IPv4Interface, '"10.0.0.1/8"', '"10.0.0.1/33"'),
        (Annotated[Decimal, Field(max_digits=3)], "12.3", "12.34"),
        (Annotated[Decimal, Field(max_digits=3)], "0.123", "1234"),
    ],
)
def test_what_pydantic_reads_more_narrowly_is_written_so(kind, legal, illegal):
    made = spec(kind)
    grammar = Grammar(made)
    assert grammar.writes(legal) and made.parse(legal) is not None
    assert not grammar.writes(illegal)
    with pytest.raises(ValidationError):
        made.parse(illegal)

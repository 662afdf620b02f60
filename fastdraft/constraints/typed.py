"""What several subschemas say together of the values of one type, as one plain schema.

Each function takes the subschemas that hold for one place and returns a schema that says the same without them. What
the grammar cannot follow is left out and named, so that it is checked afterwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain
from typing import Any, Protocol

from fastdraft.constraints.formats import FORMATS
from fastdraft.constraints.keywords import Schema, constraints_of
from fastdraft.constraints.patterns import disjoint, find_flaw, is_bounded, searched
from fastdraft.constraints.references import Place

__all__ = [
    "Limits",
    "Reader",
    "Typed",
    "Unsatisfiable",
    "any_value",
    "array",
    "named",
    "number",
    "object_",
    "prefix_of",
    "string",
]

# Beyond these a grammar grows too large, or engines lose digits; validation sees to the rest.
_MOST_ITEMS = 2000
_MOST_LENGTH = 2**31 - 1
_MOST_BOUND = 10**18
_MOST_STEP = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths for strings and arrays that have none of their own; None leaves them open."""

    string: int | None = None
    items: int | None = None


class Reader(Protocol):
    """Reads the subschemas of inner places."""

    def at(self, places: Sequence[Place]) -> Schema:
        """What all subschemas say together of one place."""

    def fits(self, value: Any, place: Place) -> bool:
        """Whether a value is valid against a subschema."""

    def follow(self, place: Place) -> Place:
        """The subschema that a mere reference stands for."""


@dataclass(slots=True)
class Typed:
    """A schema of one type, and the keywords it leaves to validation."""

    schema: dict[str, Any]
    dropped: set[str] = field(default_factory=set)


class Unsatisfiable(Exception):
    """No value of the type has all that is asked of it."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(why)
        self.keyword = keyword


def number(places: Sequence[Place], *, integer: bool) -> Typed:
    """The numbers, or only the integers, that all subschemas allow."""
    typed = Typed({"type": "integer" if integer else "number"})
    low, open_low = max(_bounds(places, "minimum", "exclusiveMinimum"), default=(None, False))
    high, closed_high = min(
        ((value, not is_open) for value, is_open in _bounds(places, "maximum", "exclusiveMaximum")),
        default=(None, True),
    )
    step = _step(places)
    if integer:
        step = _common(step or Fraction(1), Fraction(1))
    first, last = low, high
    if step is not None:
        first = None if low is None else math.ceil(low / step) * step
        first = first + step if open_low and first == low and first is not None else first
        last = None if high is None else math.floor(high / step) * step
        last = last - step if not closed_high and last == high and last is not None else last
    is_empty_point = step is None and low == high and (open_low or not closed_high)
    if first is not None and last is not None and (first > last or is_empty_point):
        multiple = f"no multiple of {_plain(step)}" if step and step != 1 else f"no {typed.schema['type']}"
        raise Unsatisfiable("multipleOf" if step and step != 1 else "minimum", f"{multiple} {_between(places)}.")
    if integer:
        low, open_low, high, closed_high = first, False, last, True
    for value, keyword in (
        (low, "exclusiveMinimum" if open_low else "minimum"),
        (high, "maximum" if closed_high else "exclusiveMaximum"),
    ):
        if value is not None and abs(value) < _MOST_BOUND:
            typed.schema[keyword] = _plain(value)
        elif value is not None:
            typed.dropped.add(keyword)
    if step is not None and not (integer and step == 1):
        if _writes_step(step):
            typed.schema["multipleOf"] = _plain(step)
        else:
            typed.dropped.add("multipleOf")
    return typed


def string(places: Sequence[Place], limits: Limits) -> Typed:
    """The strings that all subschemas allow."""
    typed = Typed({"type": "string"})
    least, most = _range(places, "minLength", "maxLength")
    patterns: list[str] = []
    for place in places:
        if (pattern := place.schema.get("pattern")) is not None:
            if find_flaw(pattern):
                typed.dropped.add("pattern")
            else:
                patterns.append(searched(pattern))
        if (name := place.schema.get("format")) is not None:
            if name in FORMATS:
                patterns.append(f"^(?:{FORMATS[name]})$")
            else:
                typed.dropped.add("format")
    if most is None and limits.string is not None and not any(map(is_bounded, patterns)):
        most = max(limits.string, least)
    if most is not None and most > _MOST_LENGTH:
        most = None
        typed.dropped.add("maxLength")
    typed.schema |= _sizes(least, most, "minLength", "maxLength")
    patterns = list(dict.fromkeys(patterns))
    if patterns:
        typed.schema["pattern"] = patterns[0]
    if patterns[1:]:
        typed.schema["allOf"] = [{"type": "string", "pattern": pattern} for pattern in patterns[1:]]
    return typed


def array(places: Sequence[Place], reader: Reader, limits: Limits) -> Typed:
    """The arrays that all subschemas allow."""
    typed = Typed({"type": "array"})
    least, most = _range(places, "minItems", "maxItems")
    for place in places:
        if place.schema.get("uniqueItems") and most not in (0, 1):
            typed.dropped.add("uniqueItems")
        fewest = place.schema.get("minContains", 1)
        if "contains" in place.schema and (fewest or "maxContains" in place.schema):
            typed.dropped |= {"contains", "minContains", "maxContains"} & place.schema.keys()
            least = max(least, int(fewest))
    if most is not None and least > most:
        raise Unsatisfiable("contains", f"it needs {least} items, and maxItems is {most}.")
    fixed = max(len(prefix_of(place)) for place in places)
    prefix = [reader.at([item for place in places for item in _items(place, index)]) for index in range(fixed)]
    rest = reader.at([item for place in places for item in _items(place, len(prefix_of(place)))])
    if most is None and limits.items is not None and rest is not False:
        most = max(limits.items, least, fixed)
    if isinstance(rest, dict) and "enum" in rest and "uniqueItems" in typed.dropped and not fixed:
        most = min(most or len(rest["enum"]), len(rest["enum"]))  # no more without a repetition
    if most is not None and most > max(_MOST_ITEMS, fixed):
        most = None
        typed.dropped.add("maxItems")
    if least > _MOST_ITEMS:
        least = _MOST_ITEMS
        typed.dropped.add("minItems")
    typed.schema |= _sizes(least, most, "minItems", "maxItems")
    if prefix:
        typed.schema["prefixItems"] = prefix
    if rest is not True:
        typed.schema["items"] = rest
    return typed


def any_value(limits: Limits, itself: Schema) -> Schema:
    """Every value whose strings, keys, arrays and objects keep to some lengths.

    Args:
        limits: The lengths.
        itself: What stands for the values inside.
    """
    kinds: list[Schema] = [{"type": ["null", "boolean", "number"]}, {"type": "string"}, {"type": "array"}]
    holder: dict[str, Any] = {"type": "object", "additionalProperties": itself}
    if limits.string is not None:
        kinds[1] = {"type": "string", "maxLength": limits.string}
        holder |= {"patternProperties": {_at_most(limits.string): itself}, "additionalProperties": False}
    if limits.items is not None:
        kinds[2] = {"type": "array", "maxItems": limits.items}
        holder["maxProperties"] = limits.items
    assert isinstance(kinds[2], dict)
    kinds[2] = kinds[2] | {"items": itself}
    return {"anyOf": [*kinds, holder]}


def _at_most(length: int) -> str:
    """The pattern of keys of a length."""
    return rf"^[\s\S]{{0,{length}}}$"


def object_(
    places: Sequence[Place], absent: frozenset[str], reader: Reader, limits: Limits, *, partial: bool = False
) -> Typed:
    """The objects that all subschemas allow, without the keys that must be absent.

    An object is closed where a key is named and nothing is said of others.

    Args:
        places: The subschemas.
        absent: Keys that must not be there.
        reader: Reads what is inside.
        limits: For keys that no schema names, and for their number.
        partial: Whether subschemas that are left to validation may declare further keys.
    """
    typed = Typed({"type": "object"})

    def value(name: str) -> Schema:
        return reader.at([said for place in places for said in named(place, name)])

    required = list(dict.fromkeys(name for place in places for name in place.schema.get("required", ())))
    declared = dict.fromkeys(name for place in places for name in place.schema.get("properties", ()))
    properties = {name: value(name) for name in declared | dict.fromkeys(required)}
    least, most = _range(places, "minProperties", "maxProperties")
    patterns, is_exact = _patterns(places, reader)
    open_ = [place.child("additionalProperties") for place in places if "additionalProperties" in place.schema]
    others = reader.at(open_)
    is_named = bool(properties or patterns) or any("properties" in place.schema for place in places)
    if (
        not open_
        and is_named
        and not partial
        and (patterns or least <= sum(found is not False for found in properties.values()))
    ):
        others = False
    if not is_exact:
        typed.dropped.add("patternProperties")
    for rule in [reader.follow(place.child("propertyNames")) for place in places if "propertyNames" in place.schema]:
        absent |= {name for name in properties if not reader.fits(name, rule)}
        if others is not False or patterns:
            properties |= {name: value(name) for name in _listed(rule, properties, reader)}
        others, patterns, is_exact = _named_by(rule, others, patterns)
        if not is_exact:
            typed.dropped.add("propertyNames")
    if others is not False and not patterns and limits.string is not None:
        others, patterns = False, {_at_most(limits.string): others}
    # Optional keys cannot be counted beside free ones.
    is_countable = properties.keys() <= {*required}
    if most is None and limits.items is not None and is_countable and (others is not False or patterns):
        most = max(limits.items, least, len(required))
    if most == len(required):
        properties, others, patterns = {name: properties[name] for name in required}, False, {}
    properties |= dict.fromkeys(sorted(absent), False)
    for name in required:
        if properties[name] is False:
            is_denied = any(said.schema is False for place in places for said in named(place, name))
            why = f"{name!r} is required, and no value of it is allowed."
            raise Unsatisfiable("required" if is_denied else "properties", why)
    possible = {name: found for name, found in properties.items() if found is not False}
    is_open = others is not False or any(found is not False for found in patterns.values())
    if properties or (is_named and not is_open):
        typed.schema["properties"] = properties if is_open else possible
    if required:
        typed.schema["required"] = required
    if patterns and is_open:
        typed.schema["patternProperties"] = patterns
    if others is not True or typed.schema.keys() > {"type"}:
        typed.schema["additionalProperties"] = others
    _count(typed, least, most, len(required), len(possible), is_open)
    return typed


def named(place: Place, name: str) -> Iterator[Place]:
    """What a subschema says of the value of a key."""
    found = False
    if name in place.schema.get("properties", ()):
        yield place.child("properties", name)
        found = True
    for pattern in place.schema.get("patternProperties", ()):
        if re.search(pattern, name):
            yield place.child("patternProperties", pattern)
            found = True
    if not found and "additionalProperties" in place.schema:
        yield place.child("additionalProperties")


def _patterns(places: Sequence[Place], reader: Reader) -> tuple[dict[str, Schema], bool]:
    """The values of keys by pattern, and whether that is all that is asked of them.

    Engines want patterns that share no key; those that may are put together, and then each allows what the other does.
    """
    values: dict[str, Schema] = {}
    for pattern in dict.fromkeys(pattern for place in places for pattern in place.schema.get("patternProperties", ())):
        said = []
        for place in places:
            if pattern in place.schema.get("patternProperties", ()):
                said.append(place.child("patternProperties", pattern))
            elif "additionalProperties" in place.schema:
                said.append(place.child("additionalProperties"))
        values[pattern] = reader.at(said)
    kept = {searched(pattern): value for pattern, value in values.items() if not find_flaw(pattern)}
    groups: list[list[str]] = []
    for pattern in kept:
        met = [group for group in groups if any(not disjoint(pattern, other) for other in group)]
        groups = [group for group in groups if group not in met] + [[*chain.from_iterable(met), pattern]]
    merged = {
        "|".join(f"(?:{pattern})" for pattern in group) if len(group) > 1 else group[0]: _either(
            [kept[pattern] for pattern in group]
        )
        for group in groups
    }
    return merged, len(merged) == len(values)


def _named_by(rule: Place, others: Schema, patterns: dict[str, Schema]) -> tuple[Schema, dict[str, Schema], bool]:
    """What is left of the keys that no schema names when names have a rule, and whether that is the whole rule."""
    if others is False and not patterns:
        return others, patterns, True
    schema = rule.schema
    if schema is False or (isinstance(schema, dict) and {"enum", "const"} & schema.keys()):
        return False, {}, True  # those it lists are named by now
    if schema is True or not constraints_of(schema) - {"type"}:
        return others, patterns, True
    if not patterns and constraints_of(schema) <= {"type", "pattern", "format", "minLength", "maxLength"}:
        name = string([rule], Limits())
        if "pattern" in name.schema:
            is_all = not name.dropped and name.schema.keys() == {"type", "pattern"}
            return False, {name.schema["pattern"]: others}, is_all
        if not name.dropped:
            least, most = name.schema.get("minLength", 0), name.schema.get("maxLength", "")
            return False, {rf"^[\s\S]{{{least},{most}}}$": others}, True
    return others, patterns, False


def _listed(rule: Place, names: Container[str], reader: Reader) -> list[str]:
    """The names that a rule lists, but for those that are known already."""
    if not isinstance(rule.schema, dict):
        return []
    values = [rule.schema["const"]] if "const" in rule.schema else rule.schema.get("enum", ())
    return [value for value in values if isinstance(value, str) and value not in names and reader.fits(value, rule)]


def _count(typed: Typed, least: int, most: int | None, required: int, possible: int, is_open: bool) -> None:
    """Asks for a number of keys where an engine can count them, and where it is not met anyway."""
    if most is not None and required > most:
        raise Unsatisfiable("maxProperties", f"{required} keys are required, more than maxProperties, which is {most}.")
    if least > possible and not is_open:
        raise Unsatisfiable("minProperties", f"it is {least}, and {possible} keys are allowed.")
    sizes = {"minProperties": least} if least > required else {}
    if most is not None and (is_open or most < possible):
        sizes["maxProperties"] = most
    one = least - required <= 1 and most in (None, required + 1)
    if (possible == required and (most or 0) <= _MOST_ITEMS) or (one and not is_open):
        typed.schema |= sizes
        if is_open and least > required + 1:
            typed.dropped.add("minProperties")  # two of the free keys may be one, written twice
    else:
        typed.dropped |= sizes.keys()


def _either(values: Sequence[Schema]) -> Schema:
    allowed = [value for value in values if value is not False]
    if True in allowed or not allowed:
        return bool(allowed)
    return allowed[0] if len(allowed) == 1 else {"anyOf": allowed}


def prefix_of(place: Place) -> Sequence[Any]:
    """The items that a subschema tells one by one."""
    items = place.schema.get("items")
    found = items if isinstance(items, list) else place.schema.get("prefixItems", ())
    return found if isinstance(found, list) else ()


def _items(place: Place, index: int) -> Iterator[Place]:
    """What a subschema says of the item at an index."""
    is_old = isinstance(place.schema.get("items"), list)
    if index < len(prefix_of(place)):
        yield place.child("items" if is_old else "prefixItems", index)
    elif (rest := "additionalItems" if is_old else "items") in place.schema:
        yield place.child(rest)


def _range(places: Sequence[Place], low: str, high: str) -> tuple[int, int | None]:
    least = max((int(place.schema[low]) for place in places if low in place.schema), default=0)
    most = min((int(place.schema[high]) for place in places if high in place.schema), default=None)
    if most is not None and least > most:
        raise Unsatisfiable(low, f"{low} is {least}, more than {high}, which is {most}.")
    return least, most


def _sizes(least: int, most: int | None, low: str, high: str) -> dict[str, int]:
    return ({low: least} if least else {}) | ({} if most is None else {high: most})


def _bounds(places: Sequence[Place], closed: str, open_: str) -> Iterator[tuple[Fraction, bool]]:
    for place in places:
        is_open = place.schema.get(open_)
        if closed in place.schema:
            yield _exact(place.schema[closed]), is_open is True  # draft 4 says so beside the bound
        if is_open is not None and not isinstance(is_open, bool):
            yield _exact(is_open), True


def _between(places: Sequence[Place]) -> str:
    bounds = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return "has " + " and ".join(f"{name} {p.schema[name]}" for p in places for name in bounds if name in p.schema)


def _step(places: Sequence[Place]) -> Fraction | None:
    steps = [_exact(place.schema["multipleOf"]) for place in places if "multipleOf" in place.schema]
    step = steps.pop() if steps else None
    for other in steps:
        step = _common(step, other) if step is not None else other
    return step


def _common(first: Fraction, second: Fraction) -> Fraction:
    below = first.denominator * second.denominator
    return Fraction(math.lcm(first.numerator * second.denominator, second.numerator * first.denominator), below)


def _writes_step(step: Fraction) -> bool:
    """Whether engines read a step as it is: they scale it by ten, in floating point, until it is an integer."""
    if step > _MOST_STEP * 10**9:  # too large to be a float, perhaps
        return False
    value, scale = float(step), 0
    while value != int(value) and scale < 30:
        value *= 10
        scale += 1
    return value <= _MOST_STEP and Fraction(int(value), 10**scale) == step


def _exact(value: int | float) -> Fraction:
    return Fraction(str(value))


def _plain(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)

"""The ways to meet a subschema: what ``$ref`` and ``allOf`` bring together, times what ``anyOf`` and its like offer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdraft.constraints.jsonschema import Validation
from fastdraft.constraints.keywords import TYPES, constraints_of, refusal
from fastdraft.constraints.references import Place, References
from fastdraft.constraints.typed import named, prefix_of
from fastdraft.errors import InvalidConstraintError

__all__ = ["Alternatives", "Branch", "both", "is_made", "listed", "types_of"]

_MOST_ALTERNATIVES = 64
_DEEPEST_COMPARISON = 3
_MADE = "+"  # begins the pointers of subschemas that no document holds
_LISTING = ({"enum"}, {"const"}, {"enum", "type"}, {"const", "type"})


@dataclass(frozen=True, slots=True)
class Branch:
    """One way to meet a subschema: all of these places at once, read without what applies others to the same value.

    Attributes:
        places: The subschemas.
        absent: Keys that an object must not have.
        dropped: Keywords that would narrow it further.
        partial: Whether some of them declare keys that are not known here.
    """

    places: tuple[Place, ...] = ()
    absent: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    partial: bool = False

    def __and__(self, other: Branch) -> Branch:
        places = {place.pointer: place for place in (*self.places, *other.places)}
        absent, dropped = self.absent | other.absent, self.dropped | other.dropped
        return Branch(tuple(places.values()), absent, dropped, self.partial or other.partial)


class Alternatives:
    """Multiplies out what a document offers.

    Args:
        document: The schema.

    Attributes:
        references: Its places and references.
        reason: Why the last subschema that allows nothing does so.
    """

    def __init__(self, document: Any) -> None:
        self.references = References(document)
        self.reason: InvalidConstraintError | None = None
        self._validation = Validation(document)
        self._known: dict[str, list[Branch]] = {}
        self._told_apart: dict[tuple[tuple[str, ...], tuple[str, ...], int], bool] = {}

    def fits(self, value: Any, place: Place) -> bool:
        """Whether a value is valid against a subschema."""
        if is_made(place):
            denied = place.schema.get("not")
            return not isinstance(denied, Place) or not self.fits(value, denied)
        if isinstance(place.schema, dict) and constraints_of(place.schema) in _LISTING:  # no validator is needed
            if any(value is item or (isinstance(value, str) and value == item) for item in listed([place]) or ()):
                return bool(_kinds_of(value) & types_of([place]))
            if isinstance(value, str):
                return False
        return self._validation.fits(value, place.pointer)

    def of(self, place: Place) -> list[Branch]:
        """The ways to meet a subschema."""
        if isinstance(place.schema, bool):
            return [Branch()] if place.schema else []
        if place.pointer not in self._known:
            self._known[place.pointer] = self._expand(place)
        return self._known[place.pointer]

    def _expand(self, place: Place) -> list[Branch]:
        schema = place.schema
        if self.references.draft <= 7 and "$ref" in schema:
            return self.of(self.references.resolve(place))
        own = [Branch((place,))]
        branches = [Branch()] if "properties" in schema else own  # keys come in the order they are declared in
        for keyword in schema:
            ways = own if keyword == "properties" else self._apply(place, keyword)
            branches = both(branches, ways, keyword)
            if not branches:
                self.reason = refusal(keyword, place.pointer, "with it, no value is allowed.")
                return []
        if "unevaluatedProperties" in schema:
            branches = [branch & _unevaluated_properties(branch, place) for branch in branches]
        if "unevaluatedItems" in schema:
            branches = [branch & _unevaluated_items(branch, place) for branch in branches]
        return branches

    def _apply(self, place: Place, keyword: str) -> list[Branch]:
        """The ways to meet a keyword that applies further subschemas to the same value; of others, one way."""
        branches = [Branch()]
        value = place.schema[keyword]
        if keyword in ("$ref", "$dynamicRef"):
            branches = self.of(self.references.resolve(place, keyword))
        elif keyword == "allOf":
            for index in range(len(value)):
                branches = both(branches, self.of(place.child(keyword, index)), keyword)
        elif keyword == "anyOf":
            options = [place.child(keyword, index) for index in range(len(value))]
            branches = [branch for option in options for branch in self.of(option)]
        elif keyword == "oneOf":
            branches = self._one_of(place)
        elif keyword == "not":
            negation = self._negation(place.child(keyword))
            branches = [Branch(dropped=frozenset({"not"}))] if negation is None else negation
        elif keyword == "if" and place.schema.keys() & {"then", "else"}:
            condition = place.child(keyword)
            unmet = self._negation(condition)
            then, other = (
                self.of(place.child(name)) if name in place.schema else [Branch()] for name in ("then", "else")
            )
            branches = both(self.of(condition), then, keyword)
            branches += both([Branch(dropped=frozenset({"if"}))] if unmet is None else unmet, other, keyword)
        elif keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needed in value.items():
                names = [name, *needed] if isinstance(needed, list) else [name]
                given = [Branch((_made(place, f"{keyword}/{name}", {"required": names}),))]
                if not isinstance(needed, list):
                    given = both(given, self.of(place.child(keyword, name)), keyword)
                branches = both(branches, [Branch(absent=frozenset({name})), *given], keyword)
        return branches

    def _one_of(self, place: Place) -> list[Branch]:
        """Each option without the others, as far as these can be denied."""
        options = [place.child("oneOf", index) for index in range(len(place.schema["oneOf"]))]
        ways = [self.of(option) for option in options]
        if tag := _tag(place):
            present = [Branch((_made(place, "discriminator", {"required": [tag]}),))]
            ways = [both(present, way, "discriminator") for way in ways]
        branches = []
        for index, way in enumerate(ways):
            mine = way
            for other, option in enumerate(options):
                if other == index or self._disjoint(way, ways[other]):
                    continue
                negation = self._negation(option)
                mine = both(mine, [Branch(dropped=frozenset({"oneOf"}))] if negation is None else negation, "oneOf")
            branches += mine
        return branches

    def _negation(self, place: Place) -> list[Branch] | None:
        """The ways to fail a subschema; None where they cannot be written."""
        if isinstance(place.schema, bool):
            return [] if place.schema else [Branch()]
        branches: list[Branch] = []
        for keyword in place.schema:
            if keyword in constraints_of(place.schema):
                ways = self._denial(place, keyword)
                if ways is None:
                    return None
                branches += ways
        return branches

    def _denial(self, place: Place, keyword: str) -> list[Branch] | None:
        """The ways to fail one keyword."""
        value = place.schema[keyword]
        branches: list[Branch] = []
        if keyword == "$ref":
            return self._negation(self.references.resolve(place))
        if keyword == "not":
            return self.of(place.child(keyword))
        if keyword == "type":
            denied = types_of([place])
            if "integer" in denied and "number" not in denied:
                return None
            left = [name for name in TYPES if name not in denied]
            return [Branch((_made(place, "not/type", {"type": left}),))] if left else []
        if keyword == "required":
            return [Branch((_made(place, "not/object", {"type": "object"}),), frozenset({name})) for name in value]
        if keyword == "properties":
            for name in value:
                other = _made(place, f"not/{name}", {"not": place.child(keyword, name)})
                holder = {"type": "object", "required": [name], "properties": {name: other}}
                branches.append(Branch((_made(place, f"not/{name}/object", holder),)))
            return branches
        if keyword in ("allOf", "anyOf"):
            branches = [Branch()] if keyword == "anyOf" else []
            for index in range(len(value)):
                ways = self._negation(place.child(keyword, index))
                if ways is None:
                    return None
                branches = both(branches, ways, keyword) if keyword == "anyOf" else branches + ways
            return branches
        return None

    def exclusive(self, place: Place) -> bool:
        """Whether ``oneOf`` says no more than ``anyOf``, since no value meets two of its options."""
        ways = [self.of(place.child("oneOf", index)) for index in range(len(place.schema["oneOf"]))]
        if (tag := _tag(place)) and not all(tag in _required(branch.places) for way in ways for branch in way):
            return False
        return all(self._disjoint(way, other) for index, way in enumerate(ways) for other in ways[:index])

    def _disjoint(self, some: Sequence[Branch], others: Sequence[Branch], depth: int = 0) -> bool:
        """Whether types, listed values, or a key that one of them requires tell that no value meets both."""
        return all(self._apart(one, other, depth) for one in some for other in others)

    def _apart(self, one: Branch, other: Branch, depth: int) -> bool:
        common = types_of(one.places) & types_of(other.places)
        if not common:
            return True
        for listing, rest in ((one, other), (other, one)):
            if (values := listed(listing.places)) is not None:
                theirs = listed(rest.places)
                if theirs is not None and all(isinstance(value, str) for value in (*values, *theirs)):
                    return not set(values) & set(theirs)
                return not any(all(self.fits(value, place) for place in rest.places) for value in values)
        if common != {"object"} or depth == _DEEPEST_COMPARISON:
            return False
        names = _required((*one.places, *other.places))
        if not (one.absent | other.absent).isdisjoint(names):
            return True
        values = [([*_said(one, name)], [*_said(other, name)]) for name in names]
        # Options are mostly told apart by a key that lists its values: those are looked at first.
        values.sort(key=lambda sides: not all(map(_lists_strings, sides)))
        return any(self._differ(mine, theirs, depth + 1) for mine, theirs in values)

    def _differ(self, mine: Sequence[Place], theirs: Sequence[Place], depth: int) -> bool:
        """Whether no value of a key meets what both sides say of it."""
        key = tuple(place.pointer for place in mine), tuple(place.pointer for place in theirs), depth
        if key[0] == key[1]:
            return False
        if key not in self._told_apart:
            ways = []
            for side in (mine, theirs):
                way = [Branch()]
                for part in side:
                    way = both(way, self.of(part), "properties")
                ways.append(way)
            self._told_apart[key] = self._disjoint(ways[0], ways[1], depth)
        return self._told_apart[key]


def is_made(place: Place) -> bool:
    """Whether no document holds a subschema: it says a part of what another one says."""
    return place.pointer.startswith(_MADE)


def _made(place: Place, name: str, schema: dict[str, Any]) -> Place:
    return Place(schema, f"{_MADE}{place.pointer}/{name}", place.base)


def both(some: list[Branch], others: list[Branch], keyword: str) -> list[Branch]:
    """Every pair of ways; where there are too many, the second ones are left to validation."""
    if len(some) * len(others) > _MOST_ALTERNATIVES:
        return [replace(branch, dropped=branch.dropped | {keyword}, partial=True) for branch in some]
    return [branch & other for branch in some for other in others]


def types_of(places: Sequence[Place]) -> set[str]:
    """The types that all subschemas allow; who allows numbers allows integers."""
    kinds = set(TYPES)
    for place in places:
        given = place.schema.get("type", TYPES)
        allowed = {given} if isinstance(given, str) else set(given)
        kinds &= allowed | ({"integer"} if "number" in allowed else set())
    return kinds


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"string"} if isinstance(value, str) else {"array" if isinstance(value, list) else "object"}


def listed(places: Sequence[Place]) -> list[Any] | None:
    """The values that a subschema lists; None where none does."""
    for place in places:
        if "const" in place.schema:
            return [place.schema["const"]]
        if "enum" in place.schema:
            return list(place.schema["enum"])
    return None


def _said(branch: Branch, name: str) -> Iterator[Place]:
    """What a way to meet a subschema says of the value of a key."""
    return (part for place in branch.places for part in named(place, name))


def _lists_strings(places: Sequence[Place]) -> bool:
    values = listed([place for place in places if isinstance(place.schema, dict)])
    return values is not None and all(isinstance(value, str) for value in values)


def _required(places: Sequence[Place]) -> list[str]:
    return list(dict.fromkeys(name for place in places for name in place.schema.get("required", ())))


def _tag(place: Place) -> str | None:
    """The key that tells the options of ``oneOf`` apart, as OpenAPI says it; who reads them wants it there."""
    tag = place.schema.get("discriminator")
    name = tag.get("propertyName") if isinstance(tag, dict) else None
    return name if isinstance(name, str) else None


def _unevaluated_properties(branch: Branch, place: Place) -> Branch:
    """What ``unevaluatedProperties`` of a subschema says of the keys that this way to meet it leaves."""
    if any("additionalProperties" in part.schema for part in branch.places):
        return Branch()
    known: dict[str, Any] = {
        keyword: {name: True for part in branch.places for name in part.schema.get(keyword, ())}
        for keyword in ("properties", "patternProperties")
    }
    rest = known | {"additionalProperties": place.child("unevaluatedProperties")}
    return Branch((_made(place, "unevaluatedProperties", rest),), dropped=_unseen("unevaluatedProperties", place))


def _unevaluated_items(branch: Branch, place: Place) -> Branch:
    """What ``unevaluatedItems`` of a subschema says of the items that this way to meet it leaves."""
    rests = [part.schema.get("additionalItems", part.schema.get("items")) for part in branch.places]
    if any(isinstance(rest, dict | bool | Place) for rest in rests):
        return Branch()
    if any("contains" in part.schema for part in branch.places):
        return Branch(dropped=frozenset({"unevaluatedItems"}))
    fixed = [True] * max(len(prefix_of(part)) for part in branch.places)
    left = {"prefixItems": fixed, "items": place.child("unevaluatedItems")}
    return Branch((_made(place, "unevaluatedItems", left),), dropped=_unseen("unevaluatedItems", place))


def _unseen(keyword: str, place: Place) -> frozenset[str]:
    """What is known by way of ``not`` counts here as evaluated, and must not."""
    return frozenset({keyword} if "not" in place.schema else ())

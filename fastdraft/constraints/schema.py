"""JSON schemas made plain for grammar engines, with nothing lost on the way.

Each place in a value has to meet a set of subschemas: what ``$ref`` and ``allOf`` bring together, and one of the
alternatives that ``anyOf``, ``oneOf``, ``if`` and their like offer. `normalise` multiplies the alternatives out and
writes each as one schema of one type (`typed`), so that its result has ``type``, the limits of that type, ``anyOf``,
``enum`` and references to definitions, and nothing else. It allows at least the values that the schema allows, but
for keys that nobody declared; what else it cannot say is named in ``checks`` and left to validation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdraft.constraints.emptiness import prune
from fastdraft.constraints.jsonschema import Validation
from fastdraft.constraints.keywords import TYPES, Schema, constraints_of, refusal
from fastdraft.constraints.references import Place, References
from fastdraft.constraints.typed import Limits, Typed, Unsatisfiable, array, named, number, object_, prefix_of, string
from fastdraft.errors import InvalidConstraintError

__all__ = ["Normalised", "normalise", "plain_json"]

_MOST_ALTERNATIVES = 64
_MOST_PLACES = 20_000
_DEEPEST_COMPARISON = 3


@dataclass(frozen=True, slots=True)
class Normalised:
    """A schema that grammar engines take.

    Attributes:
        schema: Closed objects, keys in the order they were declared, no ``allOf`` but of patterns, no ``oneOf``.
        checks: Keywords that only validation enforces, sorted.
    """

    schema: dict[str, Any]
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Branch:
    """One way to meet a subschema: all of these places at once, read without what applies others to the same value.

    Attributes:
        places: The subschemas.
        absent: Keys that an object must not have.
        dropped: Keywords that would narrow it further.
    """

    places: tuple[Place, ...] = ()
    absent: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()

    def __and__(self, other: _Branch) -> _Branch:
        places = {place.pointer: place for place in (*self.places, *other.places)}
        return _Branch(tuple(places.values()), self.absent | other.absent, self.dropped | other.dropped)


def normalise(
    schema: Schema | Mapping[str, Any], *, max_string: int | None = None, max_items: int | None = None
) -> Normalised:
    """Makes a JSON schema plain.

    Args:
        schema: The schema; it is not changed.
        max_string: Length for strings that have no limit.
        max_items: Length for arrays that have none.

    Raises:
        InvalidConstraintError: The schema is malformed, contradicts itself, refers out of itself or cannot be enforced;
            names the keyword and its JSON pointer.
    """
    document = plain_json(schema)
    try:
        normaliser = _Normaliser(document, Limits(max_string, max_items))
        body = normaliser.at([normaliser.references.root])
        if body is False:
            raise normaliser.reason or refusal("schema", "#", "it allows no value.")
        body, definitions = prune(body, normaliser.definitions())
    except RecursionError:
        raise InvalidConstraintError("the schema is nested too deeply.", hint="Flatten it, or use $defs.") from None
    if body is False:
        raise refusal("$ref", "#", "every value has to hold another one, without end.", "Let one of them be absent or null.")
    result = {} if body is True else body
    return Normalised(result | ({"$defs": definitions} if definitions else {}), tuple(sorted(normaliser.checks)))


def plain_json(schema: Any) -> Any:
    """A copy of a schema with JSON's own types only.

    Raises:
        InvalidConstraintError: It holds something that JSON has not.
    """
    try:
        return json.loads(json.dumps(schema, default=_unwrap, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidConstraintError(f"the schema is not JSON: {error}.") from error
    except RecursionError:
        raise InvalidConstraintError("the schema is nested too deeply.", hint="Flatten it, or use $defs.") from None


def _unwrap(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


class _Normaliser:
    """Reads one document; is the `Reader` of `typed`."""

    def __init__(self, document: Any, limits: Limits) -> None:
        self.references = References(document)
        self.checks: set[str] = set()
        self.reason: InvalidConstraintError | None = None
        self._limits = limits
        self._validation = Validation(document)
        self._names: dict[tuple[str, ...], str] = {}
        self._taken: set[str] = set()
        self._bodies: dict[str, Schema] = {}
        self._used: set[str] = set()
        self._known: dict[str, list[_Branch]] = {}

    def definitions(self) -> dict[str, Schema]:
        """What the references written so far name."""
        return {name: body for name, body in self._bodies.items() if name in self._used}

    def fits(self, value: Any, place: Place) -> bool:
        if place.pointer.startswith(_MADE):
            denied = place.schema.get("not")
            return not isinstance(denied, Place) or not self.fits(value, denied)
        if isinstance(place.schema, dict) and constraints_of(place.schema) in _LISTING:  # no validator is needed
            if any(value is item or (isinstance(value, str) and value == item) for item in _listed([place]) or ()):
                return bool(_kinds_of(value) & _types([place]))
            if isinstance(value, str):
                return False
        return self._validation.fits(value, place.pointer)

    def follow(self, place: Place) -> Place:
        trail: tuple[str, ...] = ()
        while isinstance(place.schema, dict) and constraints_of(place.schema) == {"$ref"}:
            trail = _enter(place, trail)
            place = self.references.resolve(place)
        return place

    def at(self, places: Sequence[Place], trail: tuple[str, ...] = (), *, named: bool = False) -> Schema:
        """What all subschemas say together of one place in the value.

        A place that was met before becomes a reference to a definition; that is how recursion ends.

        Args:
            places: The subschemas.
            trail: Those that handed the same value on to these.
            named: Whether the schema itself refers to it, so that a definition is worth it at once.
        """
        places = list({place.pointer: place for place in places if place.schema is not True}.values())
        for place in places:
            _enter(place, trail)
            if place.schema is False:
                self.reason = refusal("false", place.pointer, "it allows no value.")
                return False
        if not places:
            return True
        key = tuple(place.pointer for place in places)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._new_name(key[0])
            body = self._bodies[name] = self._read(places, trail)
            if not named and name not in self._used:
                return body
        if name in self._bodies and _is_leaf(self._bodies[name]):
            return self._bodies[name]
        self._used.add(name)
        return {"$ref": f"#/$defs/{name}"}

    def _new_name(self, pointer: str) -> str:
        if len(self._taken) > _MOST_PLACES:
            raise refusal("schema", pointer, f"it has more than {_MOST_PLACES} places.", "Make it smaller.")
        name = re.sub(r"[^0-9A-Za-z_.-]", "_", pointer.rpartition("/")[2]) or "_"
        name = f"{name}.{len(self._taken)}" if name in self._taken else name
        self._taken.add(name)
        return name

    def _read(self, places: Sequence[Place], trail: tuple[str, ...]) -> Schema:
        if len(places) == 1 and (short := self._pass_on(places[0], trail)) is not None:
            return short
        branches = [_Branch()]
        for place in places:
            branches = _both(branches, self._branches(place, trail), "allOf")
        return _either([self._write(branch) for branch in branches])

    def _pass_on(self, place: Place, trail: tuple[str, ...]) -> Schema | None:
        """What a subschema says that only hands on to others, which then keep their own definitions."""
        keywords = constraints_of(place.schema)
        trail = _enter(place, trail)
        if keywords == {"$ref"} or (self.references.draft <= 7 and "$ref" in keywords):
            return self.at([self.references.resolve(place)], trail, named=True)
        if len(keywords) != 1 or not (only := keywords & {"allOf", "anyOf", "oneOf"}):
            return None
        keyword = only.pop()
        options = [place.child(keyword, index) for index in range(len(place.schema[keyword]))]
        if len(options) > 1 and (keyword == "allOf" or (keyword == "oneOf" and not self._all_disjoint(options, trail))):
            return None
        return _either([self.at([option], trail) for option in options])

    def _branches(self, place: Place, trail: tuple[str, ...]) -> list[_Branch]:
        """The ways to meet a subschema."""
        if isinstance(place.schema, bool):
            return [_Branch()] if place.schema else []
        inner = _enter(place, trail)
        if place.pointer not in self._known:
            self._known[place.pointer] = self._expand(place, inner)
        return self._known[place.pointer]

    def _expand(self, place: Place, trail: tuple[str, ...]) -> list[_Branch]:
        schema = place.schema
        if self.references.draft <= 7 and "$ref" in schema:
            return self._branches(self.references.resolve(place), trail)
        own = [_Branch((place,))]
        branches = [_Branch()] if "properties" in schema else own  # keys come in the order they are declared in
        for keyword in schema:
            ways = own if keyword == "properties" else self._apply(place, keyword, trail)
            branches = _both(branches, ways, keyword)
            if not branches:
                self.reason = refusal(keyword, place.pointer, "with it, no value is allowed.")
        if "unevaluatedProperties" in schema:
            branches = [branch & _unevaluated_properties(branch, place) for branch in branches]
        if "unevaluatedItems" in schema:
            branches = [branch & _unevaluated_items(branch, place) for branch in branches]
        return branches

    def _apply(self, place: Place, keyword: str, trail: tuple[str, ...]) -> list[_Branch]:
        """The ways to meet a keyword that applies further subschemas to the same value; of others, one way."""
        branches = [_Branch()]
        value = place.schema[keyword]
        if keyword in ("$ref", "$dynamicRef"):
            branches = self._branches(self.references.resolve(place, keyword), trail)
        elif keyword == "allOf":
            for index in range(len(value)):
                branches = _both(branches, self._branches(place.child(keyword, index), trail), keyword)
        elif keyword == "anyOf":
            options = [place.child(keyword, index) for index in range(len(value))]
            branches = [branch for option in options for branch in self._branches(option, trail)]
        elif keyword == "oneOf":
            branches = self._one_of(place, trail)
        elif keyword == "not":
            negation = self._negation(place.child(keyword), trail)
            branches = [_Branch(dropped=frozenset({"not"}))] if negation is None else negation
        elif keyword == "if" and place.schema.keys() & {"then", "else"}:
            condition = place.child(keyword)
            unmet = self._negation(condition, trail)
            then, other = (
                self._branches(place.child(name), trail) if name in place.schema else [_Branch()]
                for name in ("then", "else")
            )
            branches = _both(self._branches(condition, trail), then, keyword)
            branches += _both([_Branch(dropped=frozenset({"if"}))] if unmet is None else unmet, other, keyword)
        elif keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needed in value.items():
                names = [name, *needed] if isinstance(needed, list) else [name]
                given = [_Branch((_made(place, f"{keyword}/{name}", {"required": names}),))]
                if not isinstance(needed, list):
                    given = _both(given, self._branches(place.child(keyword, name), trail), keyword)
                branches = _both(branches, [_Branch(absent=frozenset({name})), *given], keyword)
        return branches

    def _one_of(self, place: Place, trail: tuple[str, ...]) -> list[_Branch]:
        """Each option without the others, as far as these can be denied."""
        options = [place.child("oneOf", index) for index in range(len(place.schema["oneOf"]))]
        ways = [self._branches(option, trail) for option in options]
        marker = place.schema.get("discriminator")
        if isinstance(marker, dict) and isinstance(marker.get("propertyName"), str):
            present = [_Branch((_made(place, "discriminator", {"required": [marker["propertyName"]]}),))]
            ways = [_both(present, way, "discriminator") for way in ways]
        branches = []
        for index, way in enumerate(ways):
            mine = way
            for other, option in enumerate(options):
                if other == index or self._disjoint(way, ways[other]):
                    continue
                negation = self._negation(option, trail)
                mine = _both(mine, [_Branch(dropped=frozenset({"oneOf"}))] if negation is None else negation, "oneOf")
            branches += mine
        return branches

    def _negation(self, place: Place, trail: tuple[str, ...]) -> list[_Branch] | None:
        """The ways to fail a subschema; None where they cannot be written."""
        if isinstance(place.schema, bool):
            return [] if place.schema else [_Branch()]
        trail = _enter(place, trail)
        branches: list[_Branch] = []
        for keyword in place.schema:
            if keyword in constraints_of(place.schema):
                ways = self._denial(place, keyword, trail)
                if ways is None:
                    return None
                branches += ways
        return branches

    def _denial(self, place: Place, keyword: str, trail: tuple[str, ...]) -> list[_Branch] | None:
        """The ways to fail one keyword."""
        value = place.schema[keyword]
        if keyword == "$ref":
            return self._negation(self.references.resolve(place), trail)
        if keyword == "not":
            return self._branches(place.child(keyword), trail)
        if keyword == "type":
            denied = _types([place])
            if "integer" in denied and "number" not in denied:
                return None
            left = [name for name in TYPES if name not in denied]
            return [_Branch((_made(place, "not/type", {"type": left}),))] if left else []
        if keyword == "required":
            return [_Branch((_made(place, "not/object", {"type": "object"}),), frozenset({name})) for name in value]
        if keyword == "properties":
            denials = [(name, _made(place, f"not/{name}", {"not": place.child(keyword, name)})) for name in value]
            objects = [{"type": "object", "required": [name], "properties": {name: part}} for name, part in denials]
            return [_Branch((_made(place, f"not/{o['required'][0]}/object", o),)) for o in objects]
        if keyword in ("allOf", "anyOf"):
            branches = [_Branch()] if keyword == "anyOf" else []
            for index in range(len(value)):
                ways = self._negation(place.child(keyword, index), trail)
                if ways is None:
                    return None
                branches = _both(branches, ways, keyword) if keyword == "anyOf" else branches + ways
            return branches
        return None

    def _all_disjoint(self, options: Sequence[Place], trail: tuple[str, ...]) -> bool:
        ways = [self._branches(option, trail) for option in options]
        return all(self._disjoint(way, other) for index, way in enumerate(ways) for other in ways[:index])

    def _disjoint(self, some: Sequence[_Branch], others: Sequence[_Branch], depth: int = 0) -> bool:
        """Whether provably no value meets both, by types, listed values, or a key that one of them requires."""
        return all(self._apart(one, other, depth) for one in some for other in others)

    def _apart(self, one: _Branch, other: _Branch, depth: int) -> bool:
        common = _types(one.places) & _types(other.places)
        if not common:
            return True
        for listing, rest in ((one, other), (other, one)):
            if (values := _listed(listing.places)) is not None:
                theirs = _listed(rest.places)
                if theirs is not None and all(isinstance(value, str) for value in (*values, *theirs)):
                    return not set(values) & set(theirs)
                return not any(all(self.fits(value, place) for place in rest.places) for value in values)
        if common != {"object"} or depth == _DEEPEST_COMPARISON:
            return False
        for name in dict.fromkeys(n for place in (*one.places, *other.places) for n in place.schema.get("required", ())):
            if name in one.absent | other.absent:
                return True
            ways = []
            for branch in (one, other):
                way = [_Branch()]
                for part in [part for place in branch.places for part in named(place, name)]:
                    way = _both(way, self._branches(part, ()), "properties")
                ways.append(way)
            if self._disjoint(*ways, depth + 1):
                return True
        return False

    def _write(self, branch: _Branch) -> Schema:
        """One way to meet a place, as a plain schema."""
        if not branch.places:
            self.checks |= branch.dropped
            return True
        kinds = _types(branch.places)
        options: list[Schema] = []
        listed = _listed(branch.places)
        for kind in ["enum"] if listed is not None else [name for name in TYPES if name in kinds]:
            if kind == "integer" and "number" in kinds:
                continue
            try:
                typed = self._typed(kind, branch, listed or [])
            except Unsatisfiable as error:
                own = [place for place in branch.places if not place.pointer.startswith(_MADE)]
                self.reason = refusal(error.keyword, own[-1].pointer if own else "#", str(error))
                if len(own) == 1 and (len(kinds) == 1 or kind == "enum"):  # nobody else has a part in it
                    raise self.reason from None
                continue
            options.append(typed.schema)
            self.checks |= typed.dropped | (branch.dropped if kind != "enum" else set())
        bare = [option["type"] for option in options if isinstance(option, dict) and option.keys() == {"type"}]
        if len(bare) == len(TYPES) - 1:
            return True
        rest = [option for option in options if isinstance(option, dict) and option.keys() != {"type"}]
        return _either([{"type": bare if len(bare) > 1 else bare[0]}, *rest] if bare else rest)

    def _typed(self, kind: str, branch: _Branch, listed: Sequence[Any]) -> Typed:
        places = branch.places
        if kind == "enum":
            return self._enumerated(places, listed)
        if kind in ("integer", "number"):
            return number(places, integer=kind == "integer")
        if kind == "string":
            return string(places, self._limits)
        if kind == "array":
            return array(places, self, self._limits)
        if kind == "object":
            return object_(places, branch.absent, self)
        return Typed({"type": kind})

    def _enumerated(self, places: Sequence[Place], values: Sequence[Any]) -> Typed:
        """The listed values that all subschemas allow; validation decides, so nothing is left to check."""
        kept = [value for value in values if all(self.fits(value, place) for place in places)]
        if not kept:
            raise Unsatisfiable("enum", "none of its values is allowed by the rest.")
        return Typed({"enum": list({json.dumps(value): value for value in kept}.values())})


_LISTING = ({"enum"}, {"const"}, {"enum", "type"}, {"const", "type"})
_MADE = "+"  # begins the pointers of subschemas that no document holds


def _made(place: Place, name: str, schema: dict[str, Any]) -> Place:
    """A subschema of our own, which says a part of what another one says."""
    return Place(schema, f"{_MADE}{place.pointer}/{name}", place.base)


def _enter(place: Place, trail: tuple[str, ...]) -> tuple[str, ...]:
    if place.pointer in trail:
        raise refusal("$ref", place.pointer, "it leads only to itself.", "Put a property or an item between.")
    return (*trail, place.pointer)


def _both(some: list[_Branch], others: list[_Branch], keyword: str) -> list[_Branch]:
    """Every pair of ways; where there are too many, the second ones are left to validation."""
    if len(some) * len(others) > _MOST_ALTERNATIVES:
        return [replace(branch, dropped=branch.dropped | {keyword}) for branch in some]
    return [branch & other for branch in some for other in others]


def _either(options: Sequence[Schema]) -> Schema:
    """Any of several schemas."""
    flat: dict[str, Schema] = {}
    for option in options:
        if option is True:
            return True
        for part in option["anyOf"] if isinstance(option, dict) and option.keys() == {"anyOf"} else [option]:
            if part is not False:
                flat.setdefault(json.dumps(part), part)
    return next(iter(flat.values()), False) if len(flat) < 2 else {"anyOf": list(flat.values())}


def _is_leaf(schema: Schema) -> bool:
    inner = {"additionalProperties", "anyOf", "items", "patternProperties", "prefixItems", "properties"}
    return isinstance(schema, bool) or not inner & schema.keys()


def _types(places: Sequence[Place]) -> set[str]:
    """The types that all subschemas allow; who allows numbers allows integers."""
    kinds = set(TYPES)
    for place in places:
        named = place.schema.get("type", TYPES)
        allowed = {named} if isinstance(named, str) else set(named)
        kinds &= allowed | ({"integer"} if "number" in allowed else set())
    return kinds


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"string"} if isinstance(value, str) else {"array" if isinstance(value, list) else "object"}


def _listed(places: Sequence[Place]) -> list[Any] | None:
    """The values that a subschema lists; None where none does."""
    for place in places:
        if "const" in place.schema:
            return [place.schema["const"]]
        if "enum" in place.schema:
            return list(place.schema["enum"])
    return None


def _unevaluated_properties(branch: _Branch, place: Place) -> _Branch:
    """What ``unevaluatedProperties`` of a subschema says of the keys that this way to meet it leaves."""
    if any("additionalProperties" in part.schema for part in branch.places):
        return _Branch()
    known: dict[str, Any] = {
        keyword: {name: True for part in branch.places for name in part.schema.get(keyword, ())}
        for keyword in ("properties", "patternProperties")
    }
    rest = known | {"additionalProperties": place.child("unevaluatedProperties")}
    return _Branch((_made(place, "unevaluatedProperties", rest),))


def _unevaluated_items(branch: _Branch, place: Place) -> _Branch:
    """What ``unevaluatedItems`` of a subschema says of the items that this way to meet it leaves."""
    if any(isinstance(part.schema.get("items"), dict | bool | Place) or "additionalItems" in part.schema for part in branch.places):
        return _Branch()
    if any("contains" in part.schema for part in branch.places):
        return _Branch(dropped=frozenset({"unevaluatedItems"}))
    fixed = [True] * max(len(prefix_of(part)) for part in branch.places)
    rest = {"prefixItems": fixed, "items": place.child("unevaluatedItems")}
    return _Branch((_made(place, "unevaluatedItems", rest),))

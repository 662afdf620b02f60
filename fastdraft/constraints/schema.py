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
from dataclasses import dataclass
from typing import Any

from fastdraft.constraints.alternatives import Alternatives, Branch, both, is_made, listed, types_of
from fastdraft.constraints.emptiness import prune
from fastdraft.constraints.keywords import TYPES, Schema, constraints_of, refusal
from fastdraft.constraints.references import Place
from fastdraft.constraints.typed import Limits, Typed, Unsatisfiable, any_value, array, number, object_, string
from fastdraft.errors import InvalidConstraintError

__all__ = ["Normalised", "normalise", "plain_json"]

_MOST_PLACES = 20_000
_ANY = "+any"  # no name that is made of a pointer


@dataclass(frozen=True, slots=True)
class Normalised:
    """A schema that grammar engines take.

    Attributes:
        schema: Closed objects, keys in the order they were declared, no ``allOf`` but of patterns, no ``oneOf``.
        checks: Keywords that only validation enforces, sorted.
    """

    schema: dict[str, Any]
    checks: tuple[str, ...] = ()


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
        body = normaliser.at([normaliser.ways.references.root])
        if body is False:
            raise normaliser.ways.reason or refusal("schema", "#", "it allows no value.")
        body, definitions = prune(body, normaliser.definitions())
    except RecursionError:
        raise InvalidConstraintError("the schema is nested too deeply.", hint="Flatten it, or use $defs.") from None
    if body is False:
        raise refusal("$ref", "#", "every value has to hold another one, without end.", "Let one be absent or null.")
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
        self.ways = Alternatives(document)
        self.checks: set[str] = set()
        self._limits = limits
        self._names: dict[tuple[str, ...], str] = {}
        self._taken: set[str] = set()
        self._bodies: dict[str, Schema] = {}
        self._used: set[str] = set()

    def definitions(self) -> dict[str, Schema]:
        """What the references written so far name."""
        return {name: body for name, body in self._bodies.items() if name in self._used}

    def fits(self, value: Any, place: Place) -> bool:
        return self.ways.fits(value, place)

    def follow(self, place: Place) -> Place:
        return self.ways.references.follow(place)

    def at(self, places: Sequence[Place], *, shared: bool = False) -> Schema:
        """What all subschemas say together of one place in the value.

        A place that was met before becomes a reference to a definition; that is how recursion ends.

        Args:
            places: The subschemas.
            shared: Whether the schema itself refers to it, so that a definition is worth it at once.
        """
        places = list({place.pointer: place for place in places if place.schema is not True}.values())
        for place in places:
            if place.schema is False:
                self.ways.reason = refusal("false", place.pointer, "it allows no value.")
                return False
        if not places:
            return self._anything()
        key = tuple(place.pointer for place in places)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._new_name(key[0])
            body = self._bodies[name] = self._read(places)
            if not shared and name not in self._used:
                return body
        if name in self._bodies and _is_leaf(self._bodies[name]):
            return self._bodies[name]
        self._used.add(name)
        return {"$ref": f"#/$defs/{name}"}

    def _anything(self) -> Schema:
        """Any value; where lengths are limited, one of such lengths, all the way down."""
        if self._limits == Limits():
            return True
        if _ANY not in self._bodies:
            self._bodies[_ANY] = True
            self._bodies[_ANY] = any_value(self._limits, {"$ref": f"#/$defs/{_ANY}"})
        self._used.add(_ANY)
        return {"$ref": f"#/$defs/{_ANY}"}

    def _new_name(self, pointer: str) -> str:
        if len(self._taken) > _MOST_PLACES:
            raise refusal("schema", pointer, f"it has more than {_MOST_PLACES} places.", "Make it smaller.")
        stem = name = re.sub(r"[^0-9A-Za-z_.-]", "_", pointer.rpartition("/")[2]) or "_"
        number = len(self._taken)
        while name in self._taken:
            name, number = f"{stem}.{number}", number + 1
        self._taken.add(name)
        return name

    def _read(self, places: Sequence[Place]) -> Schema:
        if len(places) == 1 and (short := self._pass_on(places[0])) is not None:
            return short
        branches = [Branch()]
        for place in places:
            branches = both(branches, self.ways.of(place), "allOf")
        return _either([self._write(branch) for branch in branches])

    def _pass_on(self, place: Place) -> Schema | None:
        """What a subschema says that only hands on to others, which then keep their own definitions."""
        keywords = constraints_of(place.schema)
        if keywords == {"$ref"} or (self.ways.references.draft <= 7 and "$ref" in keywords):
            return self.at([self.ways.references.resolve(place)], shared=True)
        if len(keywords) != 1 or not (only := keywords & {"allOf", "anyOf", "oneOf"}):
            return None
        keyword = only.pop()
        options = [place.child(keyword, index) for index in range(len(place.schema[keyword]))]
        if len(options) > 1 and (keyword == "allOf" or (keyword == "oneOf" and not self.ways.exclusive(place))):
            return None
        return _either([self.at([option]) for option in options])

    def _write(self, branch: Branch) -> Schema:
        """One way to meet a place, as a plain schema."""
        if not branch.places:
            self.checks |= branch.dropped
            return self._anything()
        kinds = types_of(branch.places)
        own = [place for place in branch.places if not is_made(place)]
        where = own[-1].pointer if own else "#"
        if not kinds:
            self.ways.reason = refusal("type", where, "no value has all types that are asked for.")
        options: list[Schema] = []
        values = listed(branch.places)
        for kind in ["enum"] if values is not None else [name for name in TYPES if name in kinds]:
            if kind == "integer" and "number" in kinds:
                continue
            try:
                typed = self._typed(kind, branch, values or [])
            except Unsatisfiable as error:
                self.ways.reason = refusal(error.keyword, where, str(error))
                is_alone = len(branch.places) == 1 and (len(kinds) == 1 or kind == "enum")
                if is_alone and error.keyword != "properties":  # it contradicts itself, not only what it holds
                    raise self.ways.reason from None
                continue
            options.append(typed.schema)
            self.checks |= typed.dropped | (branch.dropped if kind != "enum" else set())
        bare = [option["type"] for option in options if isinstance(option, dict) and option.keys() == {"type"}]
        if len(bare) == len(TYPES) - 1:
            return self._anything()
        rest = [option for option in options if isinstance(option, dict) and option.keys() != {"type"}]
        return _either([{"type": bare if len(bare) > 1 else bare[0]}, *rest] if bare else rest)

    def _typed(self, kind: str, branch: Branch, values: Sequence[Any]) -> Typed:
        places = branch.places
        if kind == "enum":
            return self._enumerated(places, values)
        if kind in ("integer", "number"):
            return number(places, integer=kind == "integer")
        if kind == "string":
            return string(places, self._limits)
        if kind == "array":
            return array(places, self, self._limits)
        if kind == "object":
            return object_(places, branch.absent, self, self._limits, partial=branch.partial)
        return Typed({"type": kind})

    def _enumerated(self, places: Sequence[Place], values: Sequence[Any]) -> Typed:
        """The listed values that all subschemas allow; validation decides, so nothing is left to check."""
        kept = [value for value in values if all(self.fits(value, place) for place in places)]
        if not kept:
            keyword = "const" if any("const" in place.schema for place in places) else "enum"
            raise Unsatisfiable(keyword, "none of its values is allowed by the rest.")
        return Typed({"enum": list({json.dumps(value): value for value in kept}.values())})


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

"""Where references lead inside one JSON schema: pointers, anchors and identifiers. Nothing is fetched."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from operator import getitem
from typing import Any
from urllib.parse import unquote, urljoin

from fastdraft.constraints.keywords import IN_PLACE, check_keywords, children, constraints_of, draft_of, refusal

__all__ = ["Place", "References"]


@dataclass(frozen=True, slots=True)
class Place:
    """A subschema, and where it stands.

    Attributes:
        schema: The subschema.
        pointer: Its JSON pointer from the root, such as ``#/properties/a``.
        base: The identifier that its references are relative to.
    """

    schema: Any
    pointer: str = "#"
    base: str = ""

    def child(self, *path: str | int) -> Place:
        """The subschema at a path from here."""
        schema, pointer, base = self.schema, self.pointer, self.base
        for step in path:
            schema = schema[step]
            if isinstance(schema, Place):  # made by us, it knows where it comes from
                return schema
            pointer += "/" + str(step).replace("~", "~0").replace("/", "~1")
            base = _base_of(schema, base)
        return Place(schema, pointer, base)


class References:
    """Every subschema of a document, and what its references mean.

    Args:
        schema: The document.

    Attributes:
        draft: The draft it is written in.
        root: The whole document.

    Raises:
        InvalidConstraintError: A malformed keyword, or a reference that leads nowhere in the document.
    """

    def __init__(self, schema: Any) -> None:
        self.draft = draft_of(schema)
        if self.draft == 4:
            schema = deepcopy(schema)
            _rename_identifier(schema)
        self.root = Place(schema, base=_base_of(schema, ""))
        self._resources = {"": self.root}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._dynamic: Counter[str] = Counter()
        self._seen: dict[str, Place] = {}
        self._add(self.root)
        self._refuse_loops()

    def resolve(self, place: Place, keyword: str = "$ref") -> Place:
        """The subschema that a reference names.

        Raises:
            InvalidConstraintError: There is none in the document.
        """
        reference = place.schema[keyword]
        join = place.base + reference if reference.startswith("#") else urljoin(place.base, reference)
        resource, _, fragment = join.partition("#")
        target = self._resources.get(resource)
        if target is None:
            raise refusal(
                keyword, place.pointer, f"{reference!r} leads out of the schema; nothing is fetched.", _BRING_IN
            )
        fragment = unquote(fragment)
        if fragment.startswith("/"):
            target = self._follow(target, fragment)
        elif fragment:
            target = self._anchors.get((resource, fragment))
        if target is None:
            raise refusal(keyword, place.pointer, f"{reference!r} leads nowhere.", "Point it at a part of the schema.")
        if keyword == "$dynamicRef" and target.schema is not True and target.schema is not False:
            name = target.schema.get("$dynamicAnchor")
            if name == fragment and self._dynamic[name] > 1:
                raise refusal(
                    keyword,
                    place.pointer,
                    f"{reference!r} has {self._dynamic[name]} anchors, chosen by the way that validation takes.",
                    "Use $ref to the one you mean.",
                )
        self._add(target)  # no keyword need lead there
        return target

    def follow(self, place: Place) -> Place:
        """The subschema that a mere reference stands for, at its end."""
        while isinstance(place.schema, dict) and constraints_of(place.schema) == {"$ref"}:
            place = self.resolve(place)
        return place

    def _follow(self, place: Place, pointer: str) -> Place | None:
        for step in pointer[1:].split("/"):
            name: str | int = step.replace("~1", "/").replace("~0", "~")
            try:
                place = place.child(int(name) if isinstance(place.schema, list) else name)
            except (KeyError, IndexError, TypeError, ValueError):
                return None
        return place

    def _refuse_loops(self) -> None:
        """Resolves every reference, and refuses those that lead back to where the same value is judged already."""
        applied: dict[str, list[str]] = {}
        while waiting := self._seen.keys() - applied.keys():  # a reference may lead to further ones
            for place in [place for pointer, place in self._seen.items() if pointer in waiting]:
                schema = place.schema if isinstance(place.schema, dict) else {}
                inner = [place.child(*path) for path in children(schema) if path[0] in IN_PLACE]
                inner += [self.resolve(place, keyword) for keyword in ("$ref", "$dynamicRef") if keyword in schema]
                applied[place.pointer] = [part.pointer for part in inner]
        try:
            TopologicalSorter(applied).prepare()
        except CycleError as error:
            loop = min(error.args[1])
            raise refusal("$ref", loop, "it leads only to itself.", "Put a property or an item between.") from None

    def _add(self, place: Place) -> None:
        """Checks a subschema and those in it, and files them under their names."""
        waiting = [place]
        while waiting:
            place = waiting.pop()
            if place.pointer in self._seen:
                continue
            check_keywords(place.schema, place.pointer, self.draft)
            self._seen[place.pointer] = place
            if not isinstance(place.schema, dict):
                continue
            draft_of(place.schema)  # a part may name another one, as long as it is known
            if (identifier := _identifier(place.schema)) is not None:
                if identifier.startswith("#"):  # how drafts 4 to 7 wrote an anchor
                    self._anchors[place.base, identifier[1:]] = place
                else:
                    self._resources[place.base] = place
            for keyword in ("$anchor", "$dynamicAnchor"):
                if keyword in place.schema:
                    self._anchors[place.base, place.schema[keyword]] = place
            if "$dynamicAnchor" in place.schema:
                self._dynamic[place.schema["$dynamicAnchor"]] += 1
            if self.draft == 4:
                for path in children(place.schema):
                    _rename_identifier(reduce(getitem, path, place.schema))
            waiting += [place.child(*path) for path in children(place.schema)]


_BRING_IN = "Copy its target into $defs and point there."


def _identifier(schema: Any) -> str | None:
    identifier = schema.get("$id") if isinstance(schema, dict) else None
    return identifier if isinstance(identifier, str) else None


def _rename_identifier(schema: Any) -> None:
    """Writes the identifier of a draft-4 subschema as later drafts do; elsewhere ``id`` says nothing."""
    if isinstance(schema, dict) and isinstance(schema.get("id"), str):
        schema["$id"] = schema.pop("id")


def _base_of(schema: Any, base: str) -> str:
    """The identifier that references in a subschema are relative to."""
    identifier = _identifier(schema)
    if identifier is None or identifier.startswith("#"):
        return base
    return urljoin(base, identifier).partition("#")[0]

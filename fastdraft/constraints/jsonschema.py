"""Validation of finished values against a JSON schema, by the jsonschema library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from fractions import Fraction
from functools import cached_property, reduce
from operator import getitem
from typing import Any

from fastdraft.constraints.formats import FORMATS
from fastdraft.constraints.keywords import children, draft_of, is_number

__all__ = ["Validation"]

_VALIDATORS = {
    4: "Draft4Validator",
    6: "Draft6Validator",
    7: "Draft7Validator",
    2019: "Draft201909Validator",
    2020: "Draft202012Validator",
}


class Validation:
    """Checks values against a schema or a part of it.

    The draft is the one that ``$schema`` names, else 2020-12. All formats of the standard are checked.

    Args:
        schema: A schema whose references all lead inside it.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def fits(self, value: Any, pointer: str = "#") -> bool:
        """Whether a value is valid against the subschema at a JSON pointer."""
        part = self._validator if pointer == "#" else self._validator.evolve(schema={"$ref": pointer})
        return bool(part.is_valid(value))

    def check(self, value: Any) -> Any:
        """Returns a value that is valid.

        Raises:
            ValueError: It is not; says where and why.
        """
        from jsonschema.exceptions import best_match

        if error := best_match(self._validator.iter_errors(value)):
            text = error.message if len(error.message) <= 200 else f"{error.message[:197]}..."
            raise ValueError(f"{error.json_path}: {text}")
        return value

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import FormatChecker, validators
        from jsonschema.exceptions import ValidationError

        def multiple(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
            """Exact, as the text is: in floating point 0.14 is no multiple of 0.01."""
            if is_number(value) and Fraction(str(value)) % Fraction(str(step)):
                yield ValidationError(f"{value!r} is not a multiple of {step!r}")

        formats = FormatChecker(formats=())
        for name, pattern in FORMATS.items():
            formats.checks(name)(_matcher(pattern))
        formats.checks("regex", raises=re.error)(lambda value: not isinstance(value, str) or bool(re.compile(value)))
        draft = getattr(validators, _VALIDATORS[draft_of(self._schema)])
        validator = validators.extend(draft, {"multipleOf": multiple})
        return validator(_without_draft(self._schema), format_checker=formats)


def _without_draft(schema: Any) -> Any:
    """A copy whose parts don't name their draft again, which would undo what is extended."""
    copied = deepcopy(schema)
    waiting = [copied]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            part.pop("$schema", None)
            waiting += [reduce(getitem, path, part) for path in children(part)]
    return copied


def _matcher(pattern: str) -> Any:
    matches = re.compile(pattern).fullmatch
    return lambda value: not isinstance(value, str) or matches(value) is not None

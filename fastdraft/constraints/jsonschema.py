"""Validation of finished values against a JSON schema, by the jsonschema library."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from fastdraft.constraints.formats import FORMATS

__all__ = ["Validation"]


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
        from jsonschema import Draft202012Validator, FormatChecker
        from jsonschema.validators import validator_for

        formats = FormatChecker(formats=())
        for name, pattern in FORMATS.items():
            formats.checks(name)(_matcher(pattern))
        formats.checks("regex", raises=re.error)(lambda value: not isinstance(value, str) or bool(re.compile(value)))
        return validator_for(self._schema, default=Draft202012Validator)(self._schema, format_checker=formats)


def _matcher(pattern: str) -> Any:
    matches = re.compile(pattern).fullmatch
    return lambda value: not isinstance(value, str) or matches(value) is not None

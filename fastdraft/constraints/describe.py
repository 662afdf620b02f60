"""Words for a prompt: a grammar makes a model write the right form, the prompt makes it write the right thing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from fastdraft.constrained import Json
from fastdraft.constraints.schema import plain_json
from fastdraft.constraints.types import as_constrained, spec_of

__all__ = ["describe"]


def describe(output_type: Any) -> str:
    """What a prompt may say of an output type; no call adds it by itself.

    Args:
        output_type: As in `Generator.generate`.

    Raises:
        InvalidConstraintError: It is none, or it cannot be enforced.
    """
    given = as_constrained(output_type)
    spec = spec_of(given)
    match spec.kind:
        case "json" if isinstance(given.type, Json):
            return "Answer with JSON and nothing else."
        case "json":
            schema = json.dumps(_schema(given.type), ensure_ascii=False)
            return f"Answer with JSON that follows this schema, and nothing else:\n{schema}"
        case "choice":
            return "Answer with one of these and nothing else:\n" + "\n".join(spec.source)
        case "regex":
            return f"Answer with a text that this regular expression matches, and nothing else:\n{spec.source}"
        case "lark":
            return f"Answer with a text of this Lark grammar, and nothing else:\n{spec.source}"
        case _:
            return ""  # compiled by another library, which knows


def _schema(given: Any) -> Any:
    """The schema as it was written: titles and descriptions tell the model what is meant."""
    if isinstance(given, Mapping):
        return plain_json(given)
    if type(given).__name__ == "JsonSchema":  # of outlines.types
        return json.loads(given.schema)
    return TypeAdapter(given).json_schema()

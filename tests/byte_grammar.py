"""llguidance over single bytes: whether a grammar writes a text, without a model or a tokenizer."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from fastdraft.constraints.types import Spec


class Grammar:
    """A compiled output type; raises ValueError where the engine refuses it."""

    def __init__(self, spec: Spec) -> None:
        matcher: Any = llguidance.LLMatcher
        if spec.kind == "json":
            text = matcher.grammar_from_json_schema(spec.source, defaults={"whitespace_flexible": spec.whitespace})
        elif spec.kind == "regex":
            text = matcher.grammar_from_regex(spec.source)
        elif spec.kind == "lark":
            text = matcher.grammar_from_lark(spec.source)
        else:
            text = matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in spec.source))
        self._matcher = matcher(llguidance.LLTokenizer("byte"), text, log_level=0)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def writes(self, text: str) -> bool:
        """Whether the grammar can write exactly this text."""
        data = list(text.encode())
        self._matcher.reset()
        if self._matcher.try_consume_tokens(data) < len(data):
            return False
        return bool(self._matcher.is_accepting())


def write(value: Any) -> str:
    """JSON as the grammars write it: compact."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def in_order(value: Any, schema: dict[str, Any]) -> Any:
    """A value with its keys in the order in which a plain schema declares them."""
    order: dict[str, int] = {}

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            for name in part.get("properties", ()):
                order.setdefault(name, len(order))
            for item in part.values():
                collect(item)
        elif isinstance(part, list):
            for item in part:
                collect(item)

    def sort(part: Any) -> Any:
        if isinstance(part, list):
            return [sort(item) for item in part]
        if not isinstance(part, dict):
            return part
        return {name: sort(part[name]) for name in sorted(part, key=lambda name: order.get(name, len(order)))}

    collect(schema)
    return sort(value)

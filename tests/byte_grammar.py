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
        self.matcher = matcher(llguidance.LLTokenizer("byte"), text, log_level=0)
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())

    def writes(self, text: str) -> bool:
        """Whether the grammar can write exactly this text."""
        data = list(text.encode())
        self.matcher.reset()
        if self.matcher.try_consume_tokens(data) < len(data):
            return False
        return bool(self.matcher.is_accepting())


def write(value: Any) -> str:
    """JSON as the grammars write it: compact."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def in_order(value: Any, schema: dict[str, Any]) -> Any:
    """A value with its keys in the order in which a plain schema declares them."""

    def options(part: Any, kind: str) -> list[dict[str, Any]]:
        if not isinstance(part, dict):
            return []
        if "$ref" in part:
            return options(schema["$defs"][part["$ref"].rpartition("/")[2]], kind)
        if "anyOf" in part:
            return [found for option in part["anyOf"] for found in options(option, kind)]
        return [part] if part.get("type") == kind else []

    def sort(value: Any, part: Any) -> Any:
        if isinstance(value, list):
            found = next(iter(options(part, "array")), {})
            prefix = found.get("prefixItems", [])
            return [sort(v, prefix[i] if i < len(prefix) else found.get("items")) for i, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        known: dict[str, Any] = {}
        if found_all := options(part, "object"):
            known = max((o.get("properties", {}) for o in found_all), key=lambda o: len(o.keys() & value.keys()))
        order = {name: index for index, name in enumerate(known)}
        names = sorted(value, key=lambda name: order.get(name, len(order)))
        rest = found_all[0].get("additionalProperties") if found_all else None
        return {name: sort(value[name], known.get(name, rest)) for name in names}

    return sort(value, schema)

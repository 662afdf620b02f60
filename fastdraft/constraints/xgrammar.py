"""Grammars by xgrammar, an extra: JSON schemas, regular expressions and choices.

It leaves out of a schema what it does not know, without a word; so a schema is read first, and refused where something
would be lost (measured with 0.2.9: limits beside a pattern, patterns that are searched for, fractions of multipleOf,
formats).

Shapes: W words of a packed mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastdraft.constraints.base import Forced
from fastdraft.errors import InvalidConstraintError, MissingDependencyError

if TYPE_CHECKING:
    from fastdraft.constraints.types import Spec

__all__ = ["Xgrammar", "XgrammarConstraint", "weakened"]

# What a plain schema consists of (`fastdraft.constraints.schema`), as far as xgrammar follows it.
_FOLLOWED = frozenset(
    {"type", "enum", "const", "anyOf", "$ref", "$defs", "title", "description", "default", "examples"}
    | {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
    | {"items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_FORMATS = frozenset({"date", "time", "uuid"})


class XgrammarConstraint:
    """One place in one text; see `fastdraft.constraints.base.Constraint`.

    Args:
        matcher: A ``GrammarMatcher`` of its own.
        words: Of a packed mask.
        banned: Ids that are no text, such as end-of-sequence and control tokens.
        spell: How the tokenizer writes a text, and the bytes of each token.
    """

    def __init__(
        self, matcher: Any, words: int, banned: Sequence[int], spell: Callable[[str], tuple[list[int], list[bytes]]]
    ) -> None:
        self._matcher = matcher
        self._banned = frozenset(banned)
        self._spell = spell
        self._own_W = torch.zeros(words, dtype=torch.int32)

    @property
    def finished(self) -> bool:
        """See the protocol."""
        return bool(self._matcher.is_completed())

    @property
    def exhausted(self) -> bool:
        """See the protocol."""
        if not self.finished:
            return False
        self.mask(self._own_W)
        return not bool(self._own_W.any())

    def mask(self, out_W: Tensor) -> None:
        """See the protocol."""
        self._matcher.fill_next_token_bitmask(out_W[None], 0)
        bytes_B = out_W.view(torch.uint8)
        for token in self._banned:
            bytes_B[token >> 3] &= 0xFF ^ (1 << (token & 7))

    def validate(self, tokens: Sequence[int]) -> int:
        """See the protocol."""
        count = 0
        while count < len(tokens) and tokens[count] not in self._banned and self._matcher.accept_token(tokens[count]):
            count += 1
        self.rollback(count)
        return count

    def advance(self, tokens: Sequence[int]) -> None:
        """See the protocol."""
        for token in tokens:
            moved = self._matcher.accept_token(token)
            assert moved, f"token {token} may not follow"

    def rollback(self, n: int) -> None:
        """See the protocol."""
        if n:
            self._matcher.rollback(n)

    def forced(self) -> Forced:
        """See the protocol; the last token of what must follow may be part of a longer one."""
        text: str = self._matcher.find_jump_forward_string()
        if not text:
            return Forced([])
        ids, spelled = self._spell(text)
        count = self.validate(ids[:-1])
        return Forced(ids[:count], text.encode()[len(b"".join(spelled[:count])) :])


class Xgrammar:
    """The engine for one tokenizer.

    Args:
        tokenizer: The target's.
        vocabulary: Usable ids.
        eos: End-of-sequence ids below ``vocabulary``.
        spellings: Gives the bytes of each token.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, eos: Sequence[int], spellings: Callable[[], Sequence[bytes]]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = eos
        self._spellings = spellings

    def compile(self, spec: Spec) -> Callable[[], XgrammarConstraint]:
        """What makes constraints at the beginning of a text.

        Args:
            spec: JSON, a regular expression or a choice.

        Raises:
            InvalidConstraintError: It cannot be compiled, or xgrammar would follow a part of it only.
            MissingDependencyError: xgrammar is not installed.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise MissingDependencyError(
                "backend='xgrammar' needs the package xgrammar, which is not installed.",
                hint="Run pip install 'fastdraft[xgrammar]', or leave backend out.",
            ) from error
        compiler = self._compiler
        try:
            if spec.kind == "json":
                if lost := next(weakened(spec.source), None):
                    keyword, pointer = lost
                    raise InvalidConstraintError(
                        f"{keyword} at {pointer} would not be followed by xgrammar.", hint="Leave backend out."
                    )
                compiled = compiler.compile_json_schema(
                    json.dumps(_bounded(spec.source)), any_whitespace=spec.whitespace, separators=(",", ":")
                )
            else:
                body = spec.source if spec.kind == "regex" else "|".join(map(re.escape, spec.source))
                compiled = compiler.compile_regex(body)
        except RuntimeError as error:
            raise InvalidConstraintError(
                f"{spec.label} cannot be compiled by xgrammar: {str(error).splitlines()[-1]}.",
                hint="Leave backend out.",
            ) from error
        words = -(-self._vocabulary // 32)
        return lambda: XgrammarConstraint(xgrammar.GrammarMatcher(compiled), words, self._banned, self._spell)

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        known = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=list(self._eos) or None
        )
        return xgrammar.GrammarCompiler(known, max_threads=1)

    @cached_property
    def _banned(self) -> tuple[int, ...]:
        """Tokens that are no text: xgrammar lets some of them into strings."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        control = {token for token, word in added.items() if word.special or re.fullmatch(r"<\|.*\|>", str(word))}
        return tuple(sorted(token for token in control | set(self._eos) if token < self._vocabulary))

    def _spell(self, text: str) -> tuple[list[int], list[bytes]]:
        ids = list(self._tokenizer(text, add_special_tokens=False).input_ids)
        spellings = self._bytes
        return ids, [spellings[token] for token in ids]

    @cached_property
    def _bytes(self) -> Sequence[bytes]:
        return self._spellings()


def _bounded(schema: Any) -> Any:
    """A schema with lengths of strings as patterns: under its own, xgrammar writes raw control characters."""
    if isinstance(schema, list):
        return [_bounded(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    if {"minLength", "maxLength"} & schema.keys() and "type" in schema:
        most = schema.get("maxLength", "")
        bounds = {"pattern": rf"^[^\x00-\x1f]{{{schema.get('minLength', 0)},{most}}}$"}
        return {key: value for key, value in schema.items() if key not in ("minLength", "maxLength")} | bounds
    found = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            found[key] = {name: _bounded(part) for name, part in value.items()}
        else:
            found[key] = value if key in ("enum", "const", "default", "examples") else _bounded(value)
    return found


def weakened(schema: Any, pointer: str = "#") -> Iterator[tuple[str, str]]:
    """What xgrammar would not follow: keywords and where they are.

    Args:
        schema: A plain schema, or one of its parts.
        pointer: Where the part is.
    """
    if not isinstance(schema, Mapping):
        return
    for keyword in schema:
        if keyword not in _FOLLOWED:
            yield keyword, f"{pointer}/{keyword}"
    pattern = schema.get("pattern")
    if pattern is not None and not (pattern.startswith("^") and pattern.endswith("$")):
        yield "pattern", f"{pointer}/pattern"
    for keyword in ("pattern", "format"):
        if keyword in schema and {"minLength", "maxLength", "pattern", "format"} & (schema.keys() - {keyword}):
            yield keyword, f"{pointer}/{keyword}"
    if "format" in schema and schema["format"] not in _FORMATS:
        yield "format", f"{pointer}/format"
    if not float(schema.get("multipleOf", 1)).is_integer():
        yield "multipleOf", f"{pointer}/multipleOf"
    if "$ref" in schema and schema.keys() - {"$ref", "$defs", "title", "description"}:
        yield "$ref", f"{pointer}/$ref"
    for keyword in ("properties", "$defs"):
        for name, part in schema.get(keyword, {}).items():
            yield from weakened(part, f"{pointer}/{keyword}/{name}")
    for keyword in ("anyOf", "prefixItems"):
        for at, part in enumerate(schema.get(keyword, ())):
            yield from weakened(part, f"{pointer}/{keyword}/{at}")
    for keyword in ("items", "additionalProperties"):
        yield from weakened(schema.get(keyword), f"{pointer}/{keyword}")

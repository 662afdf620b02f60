"""Grammars by llguidance: JSON schemas, regular expressions, Lark grammars; a millisecond to compile, whatever the
vocabulary, and exact: what it cannot enforce it refuses.

Shapes: W words of a packed mask.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastdraft.constraints.base import Forced
from fastdraft.errors import ConstraintDeadEndError, InvalidConstraintError, UnsupportedModelError

if TYPE_CHECKING:
    from fastdraft.constraints.types import Spec

__all__ = ["Llguidance", "LlguidanceConstraint"]


class LlguidanceConstraint:
    """One place in one text; see `fastdraft.constraints.base.Constraint`.

    Args:
        matcher: An ``LLMatcher`` of its own.
        eos: End-of-sequence ids, which the matcher counts among what may follow.
        spell: The bytes of tokens.
    """

    def __init__(self, matcher: Any, eos: Sequence[int], spell: Callable[[list[int]], bytes]) -> None:
        self._matcher = matcher
        self._eos = eos
        self._spell = spell

    @property
    def finished(self) -> bool:
        """See the protocol."""
        return bool(self._matcher.is_accepting())

    @property
    def exhausted(self) -> bool:
        """See the protocol."""
        return bool(self._matcher.is_stopped())

    def mask(self, out_W: Tensor) -> None:
        """See the protocol."""
        self._matcher.unsafe_compute_mask_ptr(out_W.data_ptr(), out_W.numel() * 4)
        self._check()
        bytes_B = out_W.view(torch.uint8)
        for end in self._eos:
            bytes_B[end >> 3] &= 0xFF ^ (1 << (end & 7))

    def validate(self, tokens: Sequence[int]) -> int:
        """See the protocol."""
        # The matcher counts its own ends where a text may end; what ends it is not ours to say.
        return int(self._matcher.validate_tokens([*takewhile(lambda token: token not in self._eos, tokens)]))

    def advance(self, tokens: Sequence[int]) -> None:
        """See the protocol."""
        moved = self._matcher.try_consume_tokens(list(tokens))
        self._check()
        assert moved == len(tokens), f"{len(tokens)} tokens may not follow, {moved} may"

    def rollback(self, n: int) -> None:
        """See the protocol."""
        self._matcher.rollback(n)
        self._check()

    def forced(self) -> Forced:
        """See the protocol."""
        tokens = list(self._matcher.compute_ff_tokens())
        return Forced(tokens, bytes(self._matcher.compute_ff_bytes())[len(self._spell(tokens)) :])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintDeadEndError(
                f"the grammar cannot go on: {_plain(self._matcher.get_error())}.", hint="Simplify the output type."
            )


class Llguidance:
    """The engine for one tokenizer. Safe from any thread; a constraint is not.

    Args:
        tokenizer: The target's.
        vocabulary: Usable ids; padded ones beyond are never legal.
        eos: End-of-sequence ids below ``vocabulary``.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = eos
        self._reading = threading.Lock()
        self._lexicon: Any = None

    def compile(self, spec: Spec) -> Callable[[], LlguidanceConstraint]:
        """What makes constraints at the beginning of a text.

        Raises:
            InvalidConstraintError: The grammar cannot be compiled, or accepts nothing.
        """
        import llguidance

        spell = self._words.decode_bytes
        matcher = llguidance.LLMatcher(self._words, _grammar(spec), log_level=0)
        if matcher.is_error():
            raise InvalidConstraintError(
                f"{spec.label} cannot be enforced: {_plain(matcher.get_error())}.",
                hint="Simplify it, or leave out what is named.",
            )
        first = LlguidanceConstraint(matcher.deep_copy(), self._eos, spell)
        allowed_W = torch.zeros(-(-self._vocabulary // 32), dtype=torch.int32)
        with contextlib.suppress(ConstraintDeadEndError):
            first.mask(allowed_W)
        if not first.finished and not allowed_W.any():
            raise InvalidConstraintError(
                f"{spec.label} accepts nothing that this tokenizer can write.", hint="Check where its text may begin."
            )
        return lambda: LlguidanceConstraint(matcher.deep_copy(), self._eos, spell)

    def spellings(self) -> list[bytes]:
        """The bytes that each usable token writes; of control tokens what stands for them."""
        words = self._words
        return [words.decode_bytes([token]) for token in range(self._vocabulary)]

    @property
    def _words(self) -> Any:
        """The tokenizer as llguidance reads it: seconds for a large vocabulary, so made once."""
        with self._reading:
            if self._lexicon is None:
                self._lexicon = self._read()
            return self._lexicon

    def _read(self) -> Any:
        import llguidance.hf

        ends = [*self._eos] or None
        try:
            words = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)
        except (ValueError, AttributeError, TypeError) as error:
            raise UnsupportedModelError(
                f"output_type needs a fast tokenizer; {type(self._tokenizer).__name__} cannot be read ({error}).",
                hint="Load the model with its tokenizer.json.",
            ) from error
        added = self._tokenizer.added_tokens_decoder
        texts = {token for token, word in added.items() if not word.special and token < self._vocabulary}
        if not any(words.is_special_token(token) for token in texts):
            return words
        wrapper = llguidance.TokenizerWrapper(_Reread(words, texts))
        return llguidance.LLTokenizer(wrapper, n_vocab=self._vocabulary, eos_token=ends)


class _Reread:
    """A tokenizer whose added tokens that are text, such as Qwen's ``<tool_call>``, are read as text.

    llguidance takes every added token for a control token, which no text can hold, and yet writes texts with them.

    Args:
        words: The tokenizer as llguidance reads it.
        texts: Added tokens that are text.
    """

    def __init__(self, words: Any, texts: Collection[int]) -> None:
        self._words = words
        ids = range(words.vocab_size)
        self.tokens = [words.decode_bytes([token]) for token in ids]
        self.special_token_ids = [token for token in ids if words.is_special_token(token) and token not in texts]
        self.eos_token_id = words.eos_token
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(self._words.tokenize_bytes(text))


def _grammar(spec: Spec) -> str:
    import llguidance

    if spec.after is not None:
        return _after(spec, spec.after)
    make = llguidance.LLMatcher
    match spec.kind:
        case "json":
            options: Any = {"whitespace_flexible": spec.whitespace}
            return str(make.grammar_from_json_schema(spec.source, defaults=options))
        case "regex":
            return str(make.grammar_from_regex(spec.source))
        case "lark":
            return str(make.grammar_from_lark(spec.source))
        case "llguidance":
            return str(spec.source)
        case _:
            return str(make.grammar_from_lark(f"start: {_any_of(spec.source)}"))


def _after(spec: Spec, trigger: str) -> str:
    """Any text up to a trigger, then the output, JSON after a little space; wherever tokens begin and end."""
    import llguidance

    match spec.kind:
        case "json":
            schema = {"x-guidance": {"whitespace_flexible": spec.whitespace}} | spec.source
            body = f"%json {json.dumps(schema)}"
        case "regex":
            escaped = re.sub(
                r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], spec.source, flags=re.DOTALL
            )
            body = f"/{escaped}/" if escaped else '""'
        case _:
            body = _any_of(spec.source)
    start = r"start: free /[ \n]{0,4}/ body" if spec.kind == "json" else "start: free body"
    lines = [start, f"free[suffix={json.dumps(trigger)}]: /(?s:.*)/", f"body: {body}"]
    return str(llguidance.LLMatcher.grammar_from_lark("\n".join(lines)))


def _any_of(texts: Sequence[str]) -> str:
    return " | ".join(map(json.dumps, texts))


def _plain(message: str) -> str:
    """The first line of what llguidance says; the rest quotes the grammar."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "no reason given").rstrip(".")

"""Regular expressions and choices by outlines_core: an automaton whose steps are the tokenizer's own tokens.

Compiling reads the whole vocabulary, a tenth of a second to seconds; its masks are ready-made. llguidance is the
default because it compiles in a millisecond and spells what is forced.

Shapes: W words of a packed mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastdraft.constraints.base import Forced
from fastdraft.errors import InvalidConstraintError

if TYPE_CHECKING:
    from fastdraft.constraints.types import Spec

__all__ = ["IndexConstraint", "OutlinesCore"]

_BACK = 1 << 16  # tokens that can be taken back
_RUN = 32  # tokens at most that are forced at once


class IndexConstraint:
    """One place in one text; see `fastdraft.constraints.base.Constraint`.

    Args:
        index: An ``outlines_core.Index``; shared.
        words: Of a packed mask.
        ends: Tokens that the index may count among what may follow, and that are none of its text.
    """

    def __init__(self, index: Any, words: int, ends: Sequence[int]) -> None:
        from outlines_core import Guide

        self._guide = Guide(index, _BACK)
        self._index = index
        self._ends = ends
        self._own_W = torch.zeros(words, dtype=torch.int32)

    @property
    def finished(self) -> bool:
        """See the protocol."""
        return bool(self._index.is_final_state(self._guide.get_state()))

    @property
    def exhausted(self) -> bool:
        """See the protocol."""
        if not self.finished:
            return False
        self.mask(self._own_W)
        return not bool(self._own_W.any())

    def mask(self, out_W: Tensor) -> None:
        """See the protocol."""
        self._guide.write_mask_into(out_W.data_ptr(), out_W.numel(), out_W.element_size())
        bytes_B = out_W.view(torch.uint8)
        for end in self._ends:
            bytes_B[end >> 3] &= 0xFF ^ (1 << (end & 7))

    def validate(self, tokens: Sequence[int]) -> int:
        """See the protocol."""
        state = self._guide.get_state()
        for count, token in enumerate(tokens):
            state = None if token in self._ends else self._index.get_next_state(state, token)
            if state is None:
                return count
        return len(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """See the protocol."""
        for token in tokens:
            self._guide.advance(token, return_tokens=False)

    def rollback(self, n: int) -> None:
        """See the protocol."""
        if n:
            self._guide.rollback_state(n)

    def forced(self) -> Forced:
        """See the protocol; here only where a single token may follow."""
        found: list[int] = []
        while len(found) < _RUN and not self.finished:
            only = self._only()
            if only is None:
                break
            self.advance([only])
            found.append(only)
        self.rollback(len(found))
        return Forced(found)

    def _only(self) -> int | None:
        """The token that must follow; None where there is a choice. The index would list thousands to tell."""
        self.mask(self._own_W)
        bytes_B = self._own_W.view(torch.uint8)
        places = bytes_B.nonzero()[:2, 0].tolist()
        value = int(bytes_B[places[0]]) if len(places) == 1 else 0
        return 8 * places[0] + value.bit_length() - 1 if value.bit_count() == 1 else None


class OutlinesCore:
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
        self._words = -(-vocabulary // 32)
        self._eos = eos
        self._spellings = spellings

    def compile(self, spec: Spec) -> Callable[[], IndexConstraint]:
        """What makes constraints at the beginning of a text.

        Args:
            spec: A regular expression or a choice.

        Raises:
            InvalidConstraintError: It cannot be compiled, or accepts nothing.
        """
        from outlines_core import Index

        body = spec.source if spec.kind == "regex" else "|".join(map(re.escape, spec.source))
        try:
            index = Index(rf"(?:{body})\z", self._lexicon)
        except (ValueError, RuntimeError) as error:
            raise InvalidConstraintError(
                f"{spec.label} cannot be compiled by outlines_core: {str(error).splitlines()[0]}.",
                hint="Leave backend out.",
            ) from error
        return lambda: IndexConstraint(index, self._words, self._eos)

    def lift(self, spec: Spec) -> IndexConstraint:
        """A constraint of an index that outlines compiled, for this model's tokenizer: an index does not say for which.

        Raises:
            InvalidConstraintError: It was compiled for another tokenizer.
        """
        constraint = IndexConstraint(spec.source, self._words, self._eos)
        allowed_W = torch.zeros(self._words, dtype=torch.int32)
        try:  # its masks are as wide as the vocabulary it was compiled for
            constraint.mask(allowed_W)
            beyond = int(allowed_W[-1]) >> (self._vocabulary % 32) if self._vocabulary % 32 else 0
        except ValueError:
            beyond = 1
        if beyond:
            raise InvalidConstraintError(
                f"{spec.label} is for another vocabulary than the model's {self._vocabulary} tokens.",
                hint="Build it with this model's tokenizer.",
            )
        return constraint

    @cached_property
    def _lexicon(self) -> Any:
        """Every ordinary token by its bytes; several may have the same."""
        from outlines_core import Vocabulary

        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        skipped = {token for token, word in added.items() if word.special} | set(self._eos)
        by_bytes: dict[bytes, list[int]] = {}
        for token, spelling in enumerate(self._spellings()):
            if token not in skipped and spelling:
                by_bytes.setdefault(spelling, []).append(token)
        return Vocabulary(next(iter(self._eos), self._vocabulary), by_bytes)

"""The shortest way to the end of a JSON text, for calls that may not run out of tokens before their value is whole.

What is steered depends on the place in the grammar and the tokens left there, never on the round or the draft, so a
call's law stays one law whatever drafts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastdraft.constraints.base import Constraint

__all__ = ["Closing"]

_NEAR = 48  # tokens beyond the shortest end from which on nothing long is begun any more
_SLACK = 4  # the longest way from the middle of a character: it may be begun, and three bytes be left to write
_END = frozenset('"]}')
_BEGIN = frozenset(",{[")
_STRUCTURE = _END | _BEGIN | {":", " "}
_LETTERS = ("a", "e", "o")  # all of them may follow: inside of a string


class Closing:
    """Which tokens end a JSON text soonest, for one tokenizer.

    Args:
        vocabulary: Its tokens as the tokenizer writes them; of those that JSON is built of, that is what they say.
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        ends = sorted((text for text in vocabulary if text and set(text) <= _END), key=lambda text: (-len(text), text))
        others = [text for text in ("0", "null", "true", "false", *_LETTERS, "1", "-") if text in vocabulary]
        self._soonest = [vocabulary[text] for text in [*ends, *others]]
        structure = (text for text in vocabulary if text and set(text) <= _STRUCTURE)
        self._structure = [(text.encode(), vocabulary[text]) for text in sorted(structure, key=lambda t: (-len(t), t))]
        self._begin = {
            text: token for text, token in vocabulary.items() if set(text) <= _STRUCTURE and set(text) & _BEGIN
        }
        self._words = max(vocabulary.values(), default=0) // 32 + 1
        self._letters = [vocabulary[text] for text in _LETTERS if text in vocabulary]

    def path(self, constraint: Constraint, most: int) -> list[int] | None:
        """Tokens from a place to where the text may end; None where ``most`` of them do not suffice, or none is known.

        Args:
            constraint: Is where it was afterwards.
            most: Tokens.
        """
        made: list[int] = []
        while not constraint.finished and len(made) <= most:
            tokens, rest = constraint.forced()
            step = tokens[: most + 1 - len(made)] or self._step(constraint, rest)
            if not step:
                break
            constraint.advance(step)
            made += step
        whole = constraint.finished and len(made) <= most
        if made:
            constraint.rollback(len(made))
        return made if whole else None

    def narrow(self, constraint: Constraint, mask_W: Tensor, left: int) -> None:
        """Takes from a mask what would leave too few tokens for the end.

        Args:
            constraint: At the place of the mask.
            mask_W: Packed; changed in place. Left as it is where no end can be reached any more.
            left: Tokens that may still be written, the next one included.
        """
        path = self.path(constraint, left)
        if path is None or len(path) + _NEAR < left:
            return
        if path and len(path) > left - _SLACK:
            mask_W.zero_()
            _allow(mask_W, path[0])
            return
        in_string = bool(self._letters) and all(_allows(mask_W, letter) for letter in self._letters)
        for text, token in self._begin.items():
            if _allows(mask_W, token) and (not in_string or text[0] == '"'):
                constraint.advance([token])
                if self.path(constraint, left - 2) is None:
                    _forbid(mask_W, token)
                constraint.rollback(1)

    def _step(self, constraint: Constraint, rest: bytes) -> list[int]:
        """One token: of what must follow as much as one holds, with an end behind it if there is one; else an end."""
        written = (token for text, token in self._structure if rest and _leads(text, rest))
        found = next((token for token in (*written, *self._soonest) if constraint.validate([token])), None)
        if found is None:  # such as the next byte of a character
            mask_W = torch.zeros(self._words, dtype=torch.int32)
            constraint.mask(mask_W)
            found = _first(mask_W)
        return [] if found is None else [found]


def _first(mask_W: Tensor) -> int | None:
    """The lowest token of a mask."""
    for byte, value in enumerate(mask_W.view(torch.uint8).tolist()):
        if value:
            return 8 * byte + (int(value) & -int(value)).bit_length() - 1
    return None


def _leads(text: bytes, rest: bytes) -> bool:
    """Whether a token writes some of what must follow, or all of it and then ends something."""
    return rest.startswith(text) or (text.startswith(rest) and set(text[len(rest) :].decode()) <= _END)


def _allows(mask_W: Tensor, token: int) -> bool:
    return bool(mask_W.view(torch.uint8)[token >> 3] >> (token & 7) & 1)


def _allow(mask_W: Tensor, token: int) -> None:
    mask_W.view(torch.uint8)[token >> 3] |= 1 << (token & 7)


def _forbid(mask_W: Tensor, token: int) -> None:
    mask_W.view(torch.uint8)[token >> 3] &= 0xFF ^ (1 << (token & 7))

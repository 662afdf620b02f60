"""Words with and without a space before them: a text has " Graz" where a value, behind its quote, has "Graz"."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["spaceless"]

_SPACES = ("\u0120", "\u2581")  # as byte-level and SentencePiece tokenizers write one


def spaceless(words: Mapping[str, int]) -> dict[int, int]:
    """For each token that is a word with a space before it, the word alone, where that is a token, too.

    Args:
        words: The tokenizer's vocabulary.
    """
    return {token: words[text[1:]] for text, token in words.items() if text[:1] in _SPACES and text[1:] in words}

"""Speculation for the draft model itself: tokens that one of its forwards may confirm several of.

A draft model repeats what stands in the text, too. What followed the longest match is fed behind its tokens, and as
long as it draws just these, further tokens need no further forward (cascaded drafting: Chen et al., "Cascade
Speculative Drafting", 2023). Each token is drawn from the model's own distribution all the same: guesses change what a
draft costs, never what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fastdraft.proposers.ngram import Lookup
from fastdraft.request import Request

__all__ = ["Guesses"]

_LONGEST = 4  # of a match
_MOST = 6  # guessed tokens at once
_ROW = 0.2  # seconds of a further row, as a share of a forward's
_START, _KEEP = 0.6, 0.95  # how often a guess is right, before anything was seen; weight of the past in that


class Guesses:
    """Looks tokens up in each request's own text.

    Args:
        spaceless: Gives `fastdraft.proposers.spaces.spaceless` of the tokenizer's vocabulary.
    """

    def __init__(self, spaceless: Callable[[], Mapping[int, int]]) -> None:
        self._spaceless = spaceless
        self._lookups: dict[Request, Lookup] = {}
        self._right = [_START] * (_LONGEST + 1)  # by the length of the match

    def guess(self, request: Request, drafted: Sequence[int], most: int) -> tuple[list[int], int]:
        """Tokens that may come next, and the length of the match that says so.

        Args:
            request: Whose committed tokens come first.
            drafted: Tokens behind these.
            most: Tokens that there is room for.
        """
        lookup = self._lookup(request)
        found = lookup.match(request.tokens, drafted) if most > 0 else None
        if found is None:
            return [], 0
        length = found[1]
        return lookup.draft(request.tokens, min(most, _worth(self._right[length])), drafted), length

    def learn(self, trials: Iterable[tuple[int, bool]]) -> None:
        """Takes in, of guesses that were put to the test, the length of the match and whether it was right."""
        for length, right in trials:
            self._right[length] = _KEEP * self._right[length] + (1 - _KEEP) * right

    def forget(self, request: Request) -> None:
        """Drops a request's index."""
        self._lookups.pop(request, None)

    def _lookup(self, request: Request) -> Lookup:
        if request not in self._lookups:
            if request.trail is None:
                self._lookups[request] = Lookup(2, _LONGEST)
            else:
                self._lookups[request] = Lookup(1, _LONGEST, self._spaceless())
        return self._lookups[request]


def _worth(right: float) -> int:
    """How many guesses give most tokens for a forward's seconds, where each is right so often."""
    best, most, tokens, reach = 1.0, 0, 1.0, 1.0
    for count in range(1, _MOST + 1):
        reach *= right
        tokens += reach
        if tokens / (1 + _ROW * count) > best:
            best, most = tokens / (1 + _ROW * count), count
    return most

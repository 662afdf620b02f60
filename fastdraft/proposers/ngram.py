"""What followed the longest recent match of the last tokens (Saxena 2023, prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fastdraft.config import NGram
from fastdraft.request import Request
from fastdraft.round import Draft

__all__ = ["NGramProposer"]


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a request ended last; grows with its tokens.

    Attributes:
        ends: For each n, n-gram -> position after its latest occurrence that something follows.
        seen: Tokens indexed so far.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    seen: int = 0


class NGramProposer:
    """Looks the last ``max`` .. ``min`` tokens up in prompt and output; the longest match wins, then the latest.

    Args:
        spec: Match lengths and name.
        device: Where drafts are wanted.
    """

    def __init__(self, spec: NGram, device: torch.device) -> None:
        self.name = spec.name
        self._min, self._max = spec.min, spec.max
        self._device = device
        self._indexes: dict[Request, _Index] = {}

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[Draft]:
        """Point-mass drafts; empty where nothing matches."""
        return [self._draft(request, gamma) for request, gamma in zip(requests, gammas, strict=True)]

    def _draft(self, request: Request, gamma: int) -> Draft:
        found = self._lookup(request) if gamma > 0 else None
        tokens = list(request.tokens)
        if found is not None:
            # A match that overlaps the end goes on into its own continuation: a loop is drafted whole.
            for i in range(gamma):
                tokens.append(tokens[found + i])
        ids = tokens[len(request.tokens) :]
        return Draft(torch.tensor(ids, dtype=torch.int64, device=self._device), (self.name,) * len(ids))

    def _lookup(self, request: Request) -> int | None:
        """The position after the best earlier match of the last tokens."""
        index = self._indexes.setdefault(request, _Index())
        tokens = request.tokens
        # An n-gram is entered once a token follows it, so the last tokens never match themselves.
        for end in range(max(index.seen, 1), len(tokens)):
            for n in range(self._min, min(self._max, end) + 1):
                index.ends[tuple(tokens[end - n : end])] = end
        index.seen = max(index.seen, len(tokens))
        for n in range(min(self._max, len(tokens) - 1), self._min - 1, -1):
            found = index.ends.get(tuple(tokens[-n:]))
            if found is not None:
                return found
        return None

    def observe(self, requests: Sequence[Request]) -> None:
        """Nothing to do: the index reads committed tokens only."""

    def forget(self, request: Request) -> None:
        """Drops the request's index."""
        self._indexes.pop(request, None)

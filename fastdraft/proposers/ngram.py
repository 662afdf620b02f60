"""What followed the longest recent match of the last tokens (Saxena 2023, prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fastdraft.config import NGram
from fastdraft.control.course import Offer
from fastdraft.proposers.base import Proposal
from fastdraft.request import Request
from fastdraft.round import FORCED, Draft, Plan

__all__ = ["Lookup", "NGramProposer"]

_LENGTHS = ("", "1", "2", "3", "4-5", "4-5", "6-7", "6-7", "8+")  # of a match: what is learnt of each by itself


class Lookup:
    """Looks the last tokens of one growing sequence up in it; the longest match wins, then the latest.

    Args:
        least: Shortest match.
        most: Longest match.
        same: For tokens that are looked up as another one, that one.
    """

    def __init__(self, least: int, most: int, same: Mapping[int, int] | None = None) -> None:
        self._min, self._max = least, most
        self._same = same or {}
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._seen = 0  # tokens indexed so far

    def match(self, tokens: Sequence[int], lead: Sequence[int] = ()) -> tuple[int, int] | None:
        """The position after the best earlier match of the last tokens, and its length.

        Args:
            tokens: Those of the last call, and any more.
            lead: What is taken to follow them this time.
        """
        # An n-gram is entered once a token follows it, so the last tokens never match themselves.
        for end in range(max(self._seen, 1), len(tokens)):
            before = self._named(tokens[max(0, end - self._max) : end])
            for n in range(self._min, len(before) + 1):
                self._ends[before[len(before) - n :]] = end
        self._seen = max(self._seen, len(tokens))
        last = self._named([*tokens[-self._max :], *lead][-self._max :])
        for n in range(min(self._max, len(tokens) + len(lead) - 1), self._min - 1, -1):
            found = self._ends.get(last[-n:])
            if found is not None:
                return found, n
        return None

    def _named(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._same.get(token, token) for token in tokens) if self._same else tuple(tokens)

    def draft(self, tokens: Sequence[int], gamma: int, lead: Sequence[int] = ()) -> list[int]:
        """What followed the best earlier match; empty where nothing matches.

        Args:
            tokens: Those of the last call, and any more.
            gamma: Tokens to draft.
            lead: What is taken to follow them this time.
        """
        found = self.match(tokens, lead) if gamma > 0 else None
        if found is None:
            return []
        # A match that overlaps the end goes on into its own continuation: a loop is drafted whole.
        longer = [*tokens, *lead]
        size = len(longer)
        for i in range(gamma):
            longer.append(longer[found[0] + i])
        return longer[size:]


class NGramProposer:
    """A `Lookup` for each request.

    Under a grammar, an answer's words come from a text that writes them otherwise: a value begins after a quote, where
    the text has a space. There a word is looked up as itself, with or without a space, and one word is enough to match.

    Args:
        spec: Match lengths and name.
        device: Where drafts are wanted.
        spaceless: Gives `fastdraft.proposers.spaces.spaceless` of the tokenizer's vocabulary.
    """

    def __init__(
        self, spec: NGram, device: torch.device, spaceless: Callable[[], Mapping[int, int]] = dict[int, int]
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._device = device
        self._spaceless = spaceless
        self._indexes: dict[Request, Lookup] = {}

    def offer(self, request: Request, lead: Sequence[int]) -> Offer:
        """As much as is wanted where something matches; the longer the match, the better."""
        found = self._lookup(request).match(request.tokens, lead)
        if found is None:
            return Offer(self.name, 0)
        return Offer(self.name, request.left, key=_LENGTHS[min(found[1], len(_LENGTHS) - 1)])

    def propose(self, requests: Sequence[Request], plans: Sequence[Plan], leads: Sequence[Sequence[int]]) -> Proposal:
        """Point-mass drafts, up to the first token that may not follow; empty where nothing matches."""
        asked = zip(requests, plans, leads, strict=True)
        return Proposal([self._draft(request, plan.gamma, lead) for request, plan, lead in asked])

    def _draft(self, request: Request, gamma: int, lead: Sequence[int]) -> Draft:
        lookup, trail = self._lookup(request), request.trail
        ids = lookup.draft(request.tokens, gamma, lead)
        sources = [self.name] * len(ids)
        if trail is not None:
            ids, sources = [], []
            while len(ids) < gamma:
                found = lookup.draft(request.tokens, gamma - len(ids), [*lead, *ids])
                found = found[: trail.allows(found)]
                trail.walk(found)
                forced = trail.forced()[: gamma - len(ids) - len(found)]
                trail.walk(forced)
                ids += [*found, *forced]
                sources += [self.name] * len(found) + [FORCED] * len(forced)
                if not found or trail.exhausted:
                    break
        return Draft(torch.tensor(ids, dtype=torch.int64, device=self._device), tuple(sources))

    def _lookup(self, request: Request) -> Lookup:
        if request not in self._indexes:
            spec = self._spec
            if request.trail is None:
                self._indexes[request] = Lookup(spec.min, spec.max)
            else:
                least = spec.min if "min" in spec.model_fields_set else 1
                self._indexes[request] = Lookup(least, spec.max, self._spaceless())
        return self._indexes[request]

    def observe(self, requests: Sequence[Request]) -> None:
        """Nothing to do: the index reads committed tokens only."""

    def forget(self, request: Request) -> None:
        """Drops the request's index."""
        self._indexes.pop(request, None)

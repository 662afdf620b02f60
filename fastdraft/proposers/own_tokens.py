"""The tokens of each call's own text that a cut draft head lacks: they are scored beside the frequent ones.

Shapes: B requests, K kept tokens, E further ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.models.frequent import Others
from fastdraft.request import Request

__all__ = ["Asked", "OwnTokens"]


class Asked(NamedTuple):
    """What a round's forwards score behind the kept tokens.

    Attributes:
        ids_E: The tokens of all requests together, ascending.
        foreign: For each request the columns that belong to others alone.
    """

    ids_E: Tensor
    foreign: Sequence[Sequence[int]]

    def mask(self, logits_BV: Tensor, requests: Sequence[int]) -> Tensor:
        """Takes from each request what belongs to others alone: what it drafts must not depend on who else runs.

        Args:
            logits_BV: A row a request; changed in place.
            requests: Which of those that were asked for.
        """
        first = logits_BV.shape[1] - len(self.ids_E)
        for row, request in enumerate(requests):
            if columns := self.foreign[request]:
                logits_BV[row, [first + column for column in columns]] = -torch.inf
        return logits_BV


@dataclass(slots=True)
class _Text:
    """One request's: how many of its tokens were read, and which of them the head lacks."""

    read: int = 0
    ids: set[int] = field(default_factory=set)


class OwnTokens:
    """Keeps them for each request, prompt and committed output; under a grammar also without the space before them.

    Args:
        others: What the head can be asked for.
        kept: The head's tokens.
        spaceless: Gives `fastdraft.proposers.spaces.spaceless` of the tokenizer's vocabulary.
    """

    def __init__(self, others: Others, kept: Sequence[int], spaceless: Callable[[], Mapping[int, int]]) -> None:
        self._others = others
        self._kept = frozenset(kept)
        self._spaceless = spaceless
        self._texts: dict[Request, _Text] = {}

    def ask(self, requests: Sequence[Request]) -> Asked:
        """Makes the head's forwards of a round score the tokens of its requests."""
        each = [self._read(request) for request in requests]
        ids = sorted(set().union(*each))
        self._others.ask(ids)
        foreign = [[i for i, token in enumerate(ids) if token not in mine] for mine in each]
        return Asked(self._others.ids_E, foreign)

    def _read(self, request: Request) -> set[int]:
        text = self._texts.setdefault(request, _Text())
        fresh, limit = request.tokens[text.read :], self._others.tokens
        if request.trail is not None:
            same = self._spaceless()
            fresh += [same[token] for token in fresh if token in same]
        text.ids.update(token for token in fresh if token < limit and token not in self._kept)
        text.read = len(request.tokens)
        return text.ids

    def forget(self, request: Request) -> None:
        """Drops a request's."""
        self._texts.pop(request, None)

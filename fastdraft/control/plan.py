"""Source and draft length of each request, chosen before anything is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from fastdraft.config import SamplingParams
from fastdraft.round import Plan

__all__ = ["Controller", "FixedController", "Offer"]


class Offer(NamedTuple):
    """A source as control sees it.

    Attributes:
        name: The source's name.
        model: Whether it runs a model; such a source costs time even where nothing is accepted.
    """

    name: str
    model: bool


class Controller(Protocol):
    """Chooses what is drafted."""

    def plan(self, params: SamplingParams, offers: Sequence[Offer], *, rounds: int, left: int) -> tuple[Plan, ...]:
        """Plans of one request by preference; empty is plain decoding.

        Args:
            params: The request's.
            offers: The generator's sources, in the user's order.
            rounds: Rounds the request has had.
            left: Tokens it may still generate.
        """
        ...


class FixedController:
    """The user's gamma, or a fixed one a kind of source; the first source that has a draft wins."""

    # A verify's rows cost little up to here on the machines measured; a model's drafts cost a forward each.
    auto: ClassVar = {True: 4, False: 8}

    def plan(self, params: SamplingParams, offers: Sequence[Offer], *, rounds: int, left: int) -> tuple[Plan, ...]:
        """See `Controller`."""
        plans = []
        for offer in offers:
            if params.source not in (None, offer.name):
                continue
            # Left to us, the first token does not wait for a draft model's prefill; an integer fixes every round.
            if offer.model and rounds == 0 and params.gamma == "auto":
                continue
            wanted = self.auto[offer.model] if params.gamma == "auto" else params.gamma
            gamma = min(wanted, left - 1)
            if gamma > 0:
                plans.append(Plan(offer.name, gamma))
        return tuple(plans)

"""What the engine asks of a draft source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fastdraft.control.costs import Forward
from fastdraft.control.course import Offer
from fastdraft.request import Request
from fastdraft.round import Draft, Plan

__all__ = ["Proposal", "Proposer"]


class Proposal(NamedTuple):
    """Drafts, one a request, and the forwards of the source's model that they took."""

    drafts: list[Draft]
    forwards: tuple[Forward, ...] = ()


class Proposer(Protocol):
    """A draft source.

    Attributes:
        name: How results and ``SamplingParams.source`` call it.
    """

    name: str

    def offer(self, request: Request, lead: Sequence[int]) -> Offer:
        """What could be drafted after a request's tokens and a lead; cheap, asked before each round."""
        ...

    def propose(self, requests: Sequence[Request], plans: Sequence[Plan], leads: Sequence[Sequence[int]]) -> Proposal:
        """Proposes at most ``plans[i].gamma`` tokens after each request's tokens; an empty draft where it has none.

        ``leads[i]`` are tokens that are drafted already in this round: the proposal goes on behind them. Where a
        request has a grammar, its trail was walked over them, and every proposed token must be one that may follow.

        What is proposed, and how much, depends only on committed tokens and past rounds; a drafted token is never
        exchanged for another. A source that lacks memory returns an empty draft and never refuses a request.
        """
        ...

    def observe(self, requests: Sequence[Request]) -> None:
        """Tells that a round's tokens were committed; the source drops what was not accepted."""
        ...

    def forget(self, request: Request) -> None:
        """Frees all that is held for a request; harmless for an unknown one."""
        ...

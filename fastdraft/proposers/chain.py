"""Several sources as one: the first that has a draft wins."""

from __future__ import annotations

from collections.abc import Sequence

from fastdraft.proposers.base import Proposer
from fastdraft.request import Request
from fastdraft.round import Draft, Plan

__all__ = ["Chain"]


class Chain:
    """Joins the drafts of one round.

    Args:
        sources: In order of preference.
    """

    def __init__(self, sources: Sequence[Proposer]) -> None:
        self.sources = tuple(sources)

    def propose(self, requests: Sequence[Request], plans: Sequence[Sequence[Plan]], empty: Draft) -> list[Draft]:
        """A draft for each request from the first of its planned sources that has one.

        Args:
            requests: The batch.
            plans: Each request's, by preference.
            empty: The draft of requests for which nothing was found.
        """
        drafts = [empty] * len(requests)
        for rank in range(max(map(len, plans), default=0)):
            for source in self.sources:
                ask = [
                    (i, plan[rank].gamma)
                    for i, plan in enumerate(plans)
                    if rank < len(plan) and plan[rank].source == source.name and not len(drafts[i])
                ]
                if ask:
                    found = source.propose([requests[i] for i, _ in ask], [gamma for _, gamma in ask])
                    for (i, _), draft in zip(ask, found, strict=True):
                        drafts[i] = draft
        return drafts

    def observe(self, requests: Sequence[Request]) -> None:
        """Tells every source."""
        for source in self.sources:
            source.observe(requests)

    def forget(self, request: Request) -> None:
        """Tells every source."""
        for source in self.sources:
            source.forget(request)

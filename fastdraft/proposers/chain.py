"""The sources of a generator as one: each request's draft comes from the source that was planned for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastdraft.control.costs import Forward
from fastdraft.control.course import Offer
from fastdraft.proposers.base import Proposer
from fastdraft.request import Request
from fastdraft.round import FORCED, Draft, Plan

__all__ = ["Chain", "Drafted"]


class Drafted(NamedTuple):
    """Every request's draft, and for each source that was asked its name, its forwards and its seconds."""

    drafts: list[Draft]
    spent: list[tuple[str, Sequence[Forward], float]]


class Chain:
    """Joins the drafts of one round.

    Args:
        sources: In the user's order.
    """

    def __init__(self, sources: Sequence[Proposer]) -> None:
        self.sources = tuple(sources)

    def offers(self, request: Request, lead: Sequence[int]) -> list[Offer]:
        """What each source that a request admits could draft for it behind a lead."""
        named = request.params.source
        return [source.offer(request, lead) for source in self.sources if named in (None, source.name)]

    def propose(
        self, requests: Sequence[Request], plans: Sequence[Plan], leads: Sequence[Sequence[int]], empty: Draft
    ) -> Drafted:
        """A draft for each request: what its grammar forces, then what its planned source has.

        Args:
            requests: The batch.
            plans: One a request.
            leads: The forced tokens, one sequence a request.
            empty: The draft of requests for which nothing was planned.
        """
        for request, lead in zip(requests, leads, strict=True):
            if request.trail is not None:
                request.trail.walk(lead)
        drafts = [empty] * len(requests)
        spent: list[tuple[str, Sequence[Forward], float]] = []
        for source in self.sources:
            mine = [i for i, plan in enumerate(plans) if plan.gamma and plan.source == source.name]
            if mine:
                started = time.perf_counter()
                found = source.propose([requests[i] for i in mine], [plans[i] for i in mine], [leads[i] for i in mine])
                spent.append((source.name, found.forwards, time.perf_counter() - started))
                for i, draft in zip(mine, found.drafts, strict=True):
                    drafts[i] = draft
        for i, (request, lead) in enumerate(zip(requests, leads, strict=True)):
            if request.trail is not None:
                request.trail.back()
            if lead:
                drafts[i] = _behind(lead, drafts[i])
        return Drafted(drafts, spent)

    def observe(self, requests: Sequence[Request]) -> None:
        """Tells every source."""
        for source in self.sources:
            source.observe(requests)

    def forget(self, request: Request) -> None:
        """Tells every source."""
        for source in self.sources:
            source.forget(request)


def _behind(lead: Sequence[int], draft: Draft) -> Draft:
    """A draft with forced tokens before it."""
    tokens_G = torch.cat([draft.tokens_G.new_tensor(lead), draft.tokens_G])
    sampled = tuple(i + len(lead) for i in draft.sampled)
    return Draft(tokens_G, (FORCED,) * len(lead) + draft.sources, draft.q_SV, sampled, draft.levels_L)

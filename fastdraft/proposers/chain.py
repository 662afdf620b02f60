"""The sources of a generator as one: each request's draft comes from the source that was planned for it.

A source that raises drafts nothing more for the requests it was asked for: these go on without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from fastdraft._log import get_logger
from fastdraft.control.costs import Forward
from fastdraft.control.course import Offer
from fastdraft.errors import is_device_fault
from fastdraft.proposers.base import Proposer
from fastdraft.request import Request
from fastdraft.round import FORCED, Draft, Plan

__all__ = ["Chain", "Drafted"]

_log = get_logger(__name__)


class Drafted(NamedTuple):
    """Every request's draft, and for each source that was asked its name, its forwards and its seconds."""

    drafts: list[Draft]
    spent: list[tuple[str, Sequence[Forward], float]]


class Chain:
    """Joins the drafts of one round.

    Args:
        sources: In the user's order.

    Attributes:
        failures: How often a source raised.
    """

    def __init__(self, sources: Sequence[Proposer]) -> None:
        self.sources = tuple(sources)
        self.failures = 0
        self._failed: dict[Request, set[Proposer]] = {}

    def offers(self, request: Request, lead: Sequence[int]) -> list[Offer]:
        """What each source that a request admits could draft for it behind a lead."""
        found = []
        for source in self._admitted(request):
            try:
                found.append(source.offer(request, lead))
            except Exception as error:
                self._drop(source, [request], error)
        return found

    def _admitted(self, request: Request) -> list[Proposer]:
        """The sources that may draft for a request, and did not fail it."""
        named, failed = request.params.source, self._failed.get(request, ())
        return [source for source in self.sources if named in (None, source.name) and source not in failed]

    def _drop(self, source: Proposer, requests: Sequence[Request], error: Exception) -> None:
        """Takes a source from requests; those that have no other know why they are not drafted for.

        Raises:
            Exception: The error, where the device is lost.
        """
        if is_device_fault(error):
            raise error
        self.failures += 1
        _log.warning("draft_failed", source=source.name, error=type(error).__name__, requests=len(requests))
        for request in requests:
            self._failed.setdefault(request, set()).add(source)
            with suppress(Exception):  # it is broken
                source.forget(request)
            if not self._admitted(request):
                request.speculation = f"off: {source.name} failed ({type(error).__name__})"

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
                asked = [requests[i] for i in mine]
                try:
                    found = source.propose(asked, [plans[i] for i in mine], [leads[i] for i in mine])
                except Exception as error:
                    self._drop(source, asked, error)
                    continue
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
            mine = [request for request in requests if source not in self._failed.get(request, ())]
            try:
                source.observe(mine)
            except Exception as error:
                self._drop(source, mine, error)

    def forget(self, request: Request) -> None:
        """Tells every source."""
        self._failed.pop(request, None)
        for source in self.sources:
            try:
                source.forget(request)
            except Exception as error:
                self._drop(source, [], error)


def _behind(lead: Sequence[int], draft: Draft) -> Draft:
    """A draft with forced tokens before it."""
    tokens_G = torch.cat([draft.tokens_G.new_tensor(lead), draft.tokens_G])
    sampled = tuple(i + len(lead) for i in draft.sampled)
    return Draft(tokens_G, (FORCED,) * len(lead) + draft.sources, draft.q_SV, sampled, draft.levels_L)

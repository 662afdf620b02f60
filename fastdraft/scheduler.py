"""Who runs in the next round, and with which blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastdraft.errors import CacheFullError
from fastdraft.models.runner import Runner
from fastdraft.request import Request
from fastdraft.round import PLAIN, Plan

__all__ = ["Limits", "Scheduler", "Work"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a round.

    Attributes:
        batch: Requests that run together.
        chunk: Prompt tokens fed in one round, over all requests.
    """

    batch: int
    chunk: int


class Work(NamedTuple):
    """One request's part of a round.

    Attributes:
        request: Running.
        feeds: Committed tokens it feeds.
        verifies: Whether they reach its end, so that a token follows; else this is a prefill chunk.
    """

    request: Request
    feeds: int
    verifies: bool


class Scheduler:
    """Waiting and running requests; first come, first served.

    Args:
        runner: The target; its pool decides who fits.
        limits: Bounds of a round.
    """

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prompt_tokens = 0
        self.prefix_hits = 0
        self._runner = runner

    def next(self) -> list[Work]:
        """Admits what fits and divides this round's prompt tokens, oldest first."""
        self._admit()
        budget = self.limits.chunk
        batch = []
        for request in self.running:
            assert request.table is not None
            todo = len(request.tokens) - request.table.length
            # A short tail rides along: a forward of its own would cost a decode step.
            count = todo if todo == 1 or todo <= budget + budget // 4 else budget
            if count > 0:
                batch.append(Work(request, count, count == todo))
                if todo > 1:
                    budget = max(0, budget - count)
        return batch

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.batch:
            request = self.waiting[0]
            table = self._runner.table()
            hit = table.adopt(request.tokens)
            # A first chunk and a round's drafts; what comes later may preempt.
            first = min(len(request.tokens), hit + self.limits.chunk)
            if self.running and table.missing(first) > self._runner.pool.free:
                table.release()
                return
            self.waiting.popleft()
            request.table = table
            if not request.tally.admitted:  # not again after preemption
                request.tally.admitted = True
                request.tally.prefix_tokens = hit
                self.prompt_tokens += len(request.prompt)
                self.prefix_hits += hit
            self.running.append(request)

    def reserve(self, batch: Sequence[Work], plans: Sequence[Plan]) -> tuple[list[Work], list[Plan]]:
        """Makes this round's positions writable; shortens drafts first, preempts the youngest last.

        Returns:
            The work and plans that remain.
        """
        kept: list[Work] = []
        kept_plans: list[Plan] = []
        for work, plan in zip(batch, plans, strict=True):
            table = work.request.table
            if table is None:  # preempted for an older one in this very round
                continue
            need = table.length + work.feeds
            while work.request.table is not None:
                try:
                    self._runner.reserve(table, need + plan.lead + plan.gamma)
                except CacheFullError:
                    if plan.gamma or plan.lead:
                        plan = PLAIN
                    elif len(self.running) > 1:
                        self.preempt(self.running[-1])  # itself, where it is the youngest
                    else:
                        raise
                else:
                    kept.append(work)
                    kept_plans.append(plan)
                    break
        return kept, kept_plans

    def preempt(self, request: Request) -> None:
        """Sends a request back to the head of the queue; its KV is computed again, its tokens stay."""
        self._release(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its blocks."""
        self._release(request)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        if request.table is not None:
            request.table.release()
            request.table = None

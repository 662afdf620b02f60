"""Who runs in the next round, and with which blocks.

Requests go by urgency: the earlier the sooner, and a level of priority counts as some seconds of waiting. So nobody
waits for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastdraft._log import get_logger
from fastdraft.errors import CacheFullError
from fastdraft.models.runner import Runner
from fastdraft.request import Request
from fastdraft.round import PLAIN, Plan

__all__ = ["Limits", "Scheduler", "Work"]

_log = get_logger(__name__)

_LEVEL = 5.0  # seconds of waiting that a level of priority counts as
_LONG = 128  # tokens that another request computes anyway, and that are worth waiting for
_STRIDE = 64  # tokens compared at once


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
    """Waiting and running requests, both by urgency.

    Args:
        runner: The target; its pool decides who fits.
        limits: Bounds of a round.
        relieve: Lets go of blocks that can be done without; whether there were any.
    """

    def __init__(self, runner: Runner, limits: Limits, relieve: Callable[[], bool]) -> None:
        self.limits = limits
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prompt_tokens = 0
        self.prefix_hits = 0
        self.preempted = 0
        self._most = limits.batch
        self._runner = runner
        self._relieve = relieve

    def add(self, request: Request) -> None:
        """Queues a request."""
        insort(self.waiting, request, key=_urgency)

    def next(self, chunk: int) -> list[Work]:
        """Admits what fits and divides this round's prompt tokens, the most urgent first.

        Args:
            chunk: Prompt tokens of the round.
        """
        self._admit()
        budget = chunk
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

    @property
    def decoding(self) -> bool:
        """Whether a running request waits for its next token only."""
        return any(not _prefills(request) for request in self.running)

    def _admit(self) -> None:
        if not self.running:
            self._most = self.limits.batch
        held = 0
        while held < len(self.waiting) and len(self.running) < self._most:
            request = self.waiting[held]
            table = self._runner.table()
            hit = table.adopt(request.tokens)
            if self._comes(request, hit):
                table.release()
                held += 1
                continue
            # A first chunk and a round's drafts; what comes later may preempt.
            first = min(len(request.tokens), hit + self.limits.chunk)
            if self.running and table.missing(first) > self._runner.pool.free:
                table.release()
                return
            del self.waiting[held]
            request.table = table
            if not request.tally.admitted:  # not again after preemption
                request.tally.admitted = True
                request.tally.prefix_tokens = hit
                self.prompt_tokens += len(request.prompt)
                self.prefix_hits += hit
            insort(self.running, request, key=_urgency)

    def _comes(self, request: Request, hit: int) -> bool:
        """Whether a running request is about to compute much of what this one begins with."""
        size = self._runner.pool.block_size
        for other in self.running:
            if _prefills(other):
                shared = min(_common(request.tokens, other.tokens), len(request.tokens) - 1) // size * size - hit
                if shared >= _LONG or (shared > 0 and 2 * shared >= len(request.tokens) - hit):
                    return True
        return False

    def reserve(self, batch: Sequence[Work], plans: Sequence[Plan]) -> tuple[list[Work], list[Plan]]:
        """Makes this round's positions writable; shortens drafts first, preempts the least urgent last.

        Returns:
            The work and plans that remain.
        """
        kept: list[Work] = []
        kept_plans: list[Plan] = []
        for work, plan in zip(batch, plans, strict=True):
            table = work.request.table
            if table is None:  # preempted for a more urgent one in this very round
                continue
            need = table.length + work.feeds
            while work.request.table is not None:
                try:
                    self._runner.reserve(table, need + plan.lead + plan.gamma)
                except CacheFullError:
                    if plan.gamma or plan.lead:
                        plan = PLAIN
                    elif len(self.running) > 1:
                        self.preempt(self.running[-1])  # itself, where it is the least urgent
                    elif not self._relieve():
                        raise
                else:
                    kept.append(work)
                    kept_plans.append(plan)
                    break
        return kept, kept_plans

    def preempt(self, request: Request) -> None:
        """Sends a request back to the queue; its KV is computed again, its tokens stay."""
        self._release(request)
        self.running.remove(request)
        self.add(request)
        self.preempted += 1
        _log.info("sequence_preempted", tokens=len(request.tokens), running=len(self.running))

    def shrink(self) -> None:
        """Lets half as many run together, until all have ended: the device is short of memory."""
        self._most = max(1, len(self.running) // 2)
        _log.warning("batch_halved", requests=self._most)
        while len(self.running) > self._most:
            self.preempt(self.running[-1])

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


def _urgency(request: Request) -> float:
    return request.tally.arrived - _LEVEL * request.priority


def _prefills(request: Request) -> bool:
    assert request.table is not None
    return len(request.tokens) - request.table.length > 1


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    most = min(len(one), len(other))
    alike = 0
    while alike < most and one[alike : alike + _STRIDE] == other[alike : alike + _STRIDE]:
        alike = min(most, alike + _STRIDE)
    return next((i for i in range(alike, most) if one[i] != other[i]), most)

"""A smaller model that shares the target's vocabulary.

Shapes: B requests still drafting, V vocabulary, K tokens the draft can propose, G drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastdraft.control.costs import Forward
from fastdraft.control.course import Offer
from fastdraft.control.gamma import EDGES
from fastdraft.errors import CacheFullError
from fastdraft.kv.table import Table
from fastdraft.models.runner import Feed, Runner
from fastdraft.proposers.base import Proposal
from fastdraft.request import Request
from fastdraft.round import Draft, Plan, Stop
from fastdraft.sampling import noise
from fastdraft.sampling.probs import History, probs, scores
from fastdraft.sampling.verify import choose, draw

__all__ = ["DraftModelProposer"]

_PACKED = 32  # lagging tokens that ride along in the batch's first draft forward; more would make it unboundedly large


@dataclass(slots=True)
class _Growing:
    """One request's draft while it is made.

    Attributes:
        tokens: A tensor each.
        q: The distribution of each, where it was drawn.
        levels: How sure the draft was of each, and of the position at which it stopped.
        reach: Estimated probability that all tokens so far are accepted.
    """

    tokens: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    levels: list[Tensor] = field(default_factory=list)
    reach: float = 1.0

    def goes_on(self, stop: Stop | None) -> bool:
        """Whether a further step is worth its forward."""
        return stop is None or self.reach >= stop.step[len(self.tokens)]


class DraftModelProposer:
    """Drafts a whole batch step by step, under each request's own penalties, temperature and truncation.

    Args:
        name: The source's name.
        runner: The draft model.
        context: Tokens the draft model was made for.
        vocabulary: Ids of the target's distributions; wider than the draft's own where that is padded.
        chunk: Tokens fed at once while catching up.
        kept: Ids of the tokens its output layer has; None for the first ones.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        *,
        context: int,
        vocabulary: int,
        chunk: int,
        kept: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self.runner = runner
        self._context = context
        self._vocabulary = vocabulary
        self._chunk = chunk
        self.kept = None if kept is None else tuple(kept)
        self._kept_K = None if kept is None else torch.tensor(kept, device=runner.device)
        self._tables: dict[Request, Table] = {}
        self._edges = torch.tensor(EDGES, device=runner.device)
        self._suspects: list[tuple[Sequence[Request], Tensor]] = []  # this round's forwards, and which were not finite

    def offer(self, request: Request) -> Offer:
        """What the draft's context leaves, and how far its KV is behind; nothing without free blocks."""
        table, length = self._table(request), len(request.tokens)
        room = table.missing(length) <= self.runner.pool.free
        most = max(0, self._context - length + 1) if room else 0
        return Offer(self.name, most, model=True, lag=length - table.length)

    def propose(self, requests: Sequence[Request], plans: Sequence[Plan]) -> Proposal:
        """Sampled drafts with their exact q; point masses at temperature 0."""
        found = [_Growing() for _ in requests]
        forwards: list[Forward] = []
        self._suspects.clear()  # those of a round that failed
        limits = [self._admit(r, plan.gamma) for r, plan in zip(requests, plans, strict=True)]
        active = self._catch_up(requests, limits, forwards)
        step = 0
        while active:
            asked = [requests[i] for i in active]
            scores_BK = self._scores(asked, [found[i].tokens for i in active], step, forwards)
            sure = self._sure(scores_BK, [found[i] for i in active], [plans[i].stop for i in active])
            if len(sure) < len(active):
                active = [active[row] for row in sure]
                if not active:
                    break
                scores_BK = scores_BK[sure]
            p_BV, chosen_B = self._draw([requests[i] for i in active], scores_BK, step)
            for row, i in enumerate(active):
                found[i].tokens.append(chosen_B[row : row + 1])
                if not requests[i].warp.greedy:
                    found[i].q.append(p_BV[row : row + 1])
            step += 1
            active = [i for i in active if step < limits[i] and found[i].goes_on(plans[i].stop)]
        return Proposal([self._join(growing) for growing in found], tuple(forwards))

    def _sure(self, scores_BK: Tensor, found: Sequence[_Growing], stops: Sequence[Stop | None]) -> list[int]:
        """Rows whose token is worth a verify; decided by the draft's confidence, before any token is drawn."""
        confidence_B = (scores_BK.amax(-1) - scores_BK.logsumexp(-1)).exp()
        level_B = torch.bucketize(confidence_B, self._edges.to(confidence_B.dtype), right=True)
        for row, growing in enumerate(found):
            growing.levels.append(level_B[row : row + 1])
        if not any(stops):
            return list(range(len(found)))
        sure = []
        for row, (growing, stop, level) in enumerate(zip(found, stops, level_B.tolist(), strict=True)):
            if stop is not None:
                growing.reach *= stop.accept[level]
            if stop is None or growing.reach >= stop.row[len(growing.tokens)]:
                sure.append(row)
        return sure

    def _join(self, growing: _Growing) -> Draft:
        levels_L = torch.cat(growing.levels) if growing.levels else None
        if not growing.tokens:
            return Draft(torch.zeros(0, dtype=torch.int64, device=self.runner.device), levels_L=levels_L)
        q_SV = torch.cat(growing.q) if growing.q else None
        size = len(growing.tokens)
        return Draft(torch.cat(growing.tokens), (self.name,) * size, q_SV, tuple(range(len(growing.q))), levels_L)

    def _table(self, request: Request) -> Table:
        table = self._tables.get(request)
        if table is None:
            table = self._tables[request] = self.runner.table()
            table.adopt(request.tokens)
        return table

    def _admit(self, request: Request, gamma: int) -> int:
        """How many tokens can be drafted: none without free blocks, none past the draft's context."""
        length = len(request.tokens)
        limit = min(gamma, self._context - length + 1)
        if limit <= 0:
            return 0
        try:
            self.runner.reserve(self._table(request), length + limit - 1)
        except CacheFullError:
            return 0
        return limit

    def _catch_up(self, requests: Sequence[Request], limits: Sequence[int], forwards: list[Forward]) -> list[int]:
        """Feeds what tables lack, at most one chunk a request and round; returns who can draft in this round.

        A long prompt is caught up with over several rounds, but at once where gamma is fixed: how much of it a reused
        prefix spares would else decide which rounds draft, and a seeded call would not repeat. Whether a request drafts
        depends on its own tokens alone: a budget shared with batch mates would make a lossy output's law depend on who
        else runs.
        """
        ready = []
        for i, request in enumerate(requests):
            if limits[i] <= 0:
                continue
            table = self._tables[request]
            lag = len(request.tokens) - table.length
            while lag > _PACKED:  # by itself, all but the token that the first draft is drawn after
                fed = min(lag - 1, self._chunk)
                forwards.append(Forward(fed, 0, table.length))
                self.runner.forward([Feed(request.tokens[table.length : table.length + fed])], [table], [0])
                lag -= fed
                if request.params.gamma == "auto":
                    break
            if lag <= _PACKED:
                ready.append(i)
        return ready

    def _scores(
        self, requests: Sequence[Request], drafted: Sequence[list[Tensor]], step: int, forwards: list[Forward]
    ) -> Tensor:
        """One forward of the batch: each request's scores of the next position, of the tokens that it can propose."""
        tables = [self._tables[r] for r in requests]
        if step == 0:
            feeds = [Feed(r.tokens[t.length :]) for r, t in zip(requests, tables, strict=True)]
        else:
            feeds = [Feed((), d[-1]) for d in drafted]
        forwards.append(Forward(sum(feed.size for feed in feeds), len(feeds), sum(t.length for t in tables)))
        logits_BV = self.runner.forward(feeds, tables, [1] * len(feeds)).logits_RV
        if self._kept_K is not None:
            every_BV = torch.full((len(feeds), self._vocabulary), -torch.inf, device=logits_BV.device)
            logits_BV = every_BV.index_copy_(1, self._kept_K, logits_BV.float())
        elif logits_BV.shape[1] < self._vocabulary:
            missing = self._vocabulary - logits_BV.shape[1]
            logits_BV = torch.nn.functional.pad(logits_BV.float(), (0, missing), value=-torch.inf)
        empty_G = torch.zeros(0, dtype=torch.int64, device=logits_BV.device)
        histories = [
            History(r.warp, r.prompt, r.generated, torch.cat(d) if d else empty_G, step, 1)
            for r, d in zip(requests, drafted, strict=True)
        ]
        scores_BK = scores(logits_BV, histories)
        if self._kept_K is not None:  # from here on among what it can say, perhaps a tenth of all
            scores_BK = scores_BK.index_select(1, self._kept_K)
        best_B1 = scores_BK.amax(-1, keepdim=True)
        sound_B1 = best_B1.isfinite()
        self._suspects.append((requests, (~sound_B1 & (best_B1 != -torch.inf))[:, 0]))
        # A broken draft guesses evenly: an exact q like any other, and no other request suffers.
        return torch.where(sound_B1, scores_BK, 0.0)

    def _draw(self, requests: Sequence[Request], scores_BK: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Distributions over all tokens, and tokens, of one position of each request."""
        warps = [r.warp for r in requests]
        if all(warp.greedy for warp in warps):
            return scores_BK, self._named(scores_BK.argmax(-1))  # a point mass needs no distribution
        lengths = [len(r.tokens) for r in requests]
        seeds = [r.seed for r in requests]
        u_B = noise.uniform(seeds, lengths, [step] * len(seeds), noise.DRAFT, scores_BK.device)
        p_BK = probs(scores_BK, warps)
        greedy_B = _flags(warp.greedy for warp in warps).to(p_BK.device)
        chosen_B = self._named(torch.where(greedy_B, p_BK.argmax(-1), draw(p_BK, u_B)))
        p_BV = p_BK
        if self._kept_K is not None:
            p_BV = p_BK.new_zeros(len(p_BK), self._vocabulary).index_copy_(1, self._kept_K, p_BK)
        coupled = [i for i, r in enumerate(requests) if r.params.invariant and not r.warp.greedy]
        if coupled:
            picked = choose(p_BV[coupled], [seeds[i] for i in coupled], [lengths[i] + step for i in coupled])
            chosen_B[coupled] = picked
        return p_BV, chosen_B

    def _named(self, chosen_B: Tensor) -> Tensor:
        """Token ids of columns."""
        return chosen_B if self._kept_K is None else self._kept_K[chosen_B]

    def observe(self, requests: Sequence[Request]) -> None:
        """Rolls back what was not accepted; shares full blocks of committed tokens.

        KV of a forward that was not finite is dropped: a later one would read it, and another request share it.
        """
        broken = self._broken()
        for request in requests:
            table = self._tables.get(request)
            if table is None:
                continue
            if request in broken:
                self._tables.pop(request).release()
                continue
            table.truncate(len(request.tokens) - 1)
            table.publish(request.tokens)

    def _broken(self) -> set[Request]:
        """Requests whose drafts of this round were not finite."""
        if not self._suspects:
            return set()
        flags = torch.cat([broken_B for _, broken_B in self._suspects]).tolist()
        asked = [request for requests, _ in self._suspects for request in requests]
        self._suspects.clear()
        return {request for request, flag in zip(asked, flags, strict=True) if flag}

    def forget(self, request: Request) -> None:
        """Gives the request's blocks back."""
        table = self._tables.pop(request, None)
        if table is not None:
            table.release()


def _flags(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.bool)  # type: ignore[call-overload]

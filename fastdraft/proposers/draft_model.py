"""A smaller model that shares the target's vocabulary.

Shapes: B requests still drafting, V vocabulary, K tokens that drafts of a step can propose, G drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fastdraft.control.costs import Forward
from fastdraft.control.course import Offer
from fastdraft.control.gamma import EDGES
from fastdraft.errors import CacheFullError
from fastdraft.kv.table import Table
from fastdraft.models.frequent import Others
from fastdraft.models.runner import Feed, Runner
from fastdraft.proposers.base import Proposal
from fastdraft.proposers.growing import Growing
from fastdraft.proposers.guesses import Guesses
from fastdraft.proposers.own_tokens import OwnTokens
from fastdraft.request import Request
from fastdraft.round import FORCED, Draft, Plan, Stop
from fastdraft.sampling import noise
from fastdraft.sampling.best import best
from fastdraft.sampling.mask import forbid
from fastdraft.sampling.probs import History, probs, scores
from fastdraft.sampling.verify import choose, draw

__all__ = ["DraftModelProposer"]

_PACKED = 32  # lagging tokens that ride along in the batch's first draft forward; more would make it unboundedly large


class DraftModelProposer:
    """Drafts a whole batch step by step, under each request's own penalties, temperature and truncation.

    Args:
        name: The source's name.
        runner: The draft model.
        context: Tokens the draft model was made for.
        vocabulary: Ids of the target's distributions; wider than the draft's own where that is padded.
        chunk: Tokens fed at once while catching up.
        kept: Ids of the tokens its output layer has; None for the first ones.
        others: What that layer can be asked for beside them: the tokens of a call's own text.
        guesses: Whether tokens that the text suggests are tried several at once; each is then compared on the host.
        spaceless: Gives `fastdraft.proposers.spaces.spaceless` of the tokenizer's vocabulary.
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
        others: Others | None = None,
        guesses: bool = False,
        spaceless: Callable[[], Mapping[int, int]] = dict[int, int],
    ) -> None:
        self.name = name
        self.runner = runner
        self.context = context
        self._vocabulary = vocabulary
        self._chunk = chunk
        self.kept = None if kept is None else tuple(kept)
        self._own = None if others is None or kept is None else OwnTokens(others, kept, spaceless)
        self._guesses = Guesses(spaceless) if guesses else None
        self._sayable_K = self._kept_K = None if kept is None else torch.tensor(kept, device=runner.device)
        self._tables: dict[Request, Table] = {}
        self._edges = torch.tensor(EDGES, device=runner.device)
        self._suspects: list[tuple[Sequence[Request], Tensor]] = []  # this round's forwards, and which were not finite

    def offer(self, request: Request, lead: Sequence[int]) -> Offer:
        """What the draft's context leaves, and how far its KV is behind; nothing without free blocks."""
        table, length = self._table(request), len(request.tokens) + len(lead)
        room = table.missing(length) <= self.runner.pool.free
        most = max(0, self.context - length + 1) if room else 0
        return Offer(self.name, most, model=True, lag=len(request.tokens) - table.length)

    def propose(self, requests: Sequence[Request], plans: Sequence[Plan], leads: Sequence[Sequence[int]]) -> Proposal:
        """Sampled drafts with their exact q; point masses at temperature 0, and where a grammar leaves no choice."""
        found = [Growing(list(lead)) for lead in leads]
        forwards: list[Forward] = []
        self._suspects.clear()  # those of a round that failed
        limits, active = [], []
        for i, (request, growing, plan) in enumerate(zip(requests, found, plans, strict=True)):
            limits.append(self._admit(request, len(growing.lead), plan.gamma))
            if limits[i] > 0 and self._catch_up(request, forwards):
                active.append(i)
        own = None if self._own is None else self._own.ask(requests)
        if self._kept_K is not None:
            self._sayable_K = self._kept_K if own is None else torch.cat([self._kept_K, own.ids_E])
        logits_RV = torch.zeros(0)
        while active:
            ready = [i for i in active if found[i].row is not None]
            if not ready:
                ready, mine = active, [found[i] for i in active]
                rooms = [limits[i] - len(found[i].tokens) - 1 for i in active]
                logits_RV = self._forward([requests[i] for i in active], mine, rooms, forwards)
            logits_BV = logits_RV[[found[i].row for i in ready]]
            if own is not None:
                logits_BV = own.mask(logits_BV, ready)
            scores_BK = self._scores([requests[i] for i in ready], [found[i] for i in ready], logits_BV)
            # Where a grammar allows nothing that the draft can say, its draft ends, whatever it would have drawn.
            going = list(range(len(ready)))
            if any(requests[i].trail is not None for i in ready):
                going = scores_BK.amax(-1).isfinite().nonzero()[:, 0].tolist()
            going = self._sure(scores_BK, going, [found[i] for i in ready], [plans[i].stop for i in ready])
            drawing = [ready[row] for row in going]
            if drawing:
                if len(going) < len(ready):
                    scores_BK = scores_BK[going]
                offsets = [found[i].offset for i in drawing]
                p_BV, chosen_B = self._draw([requests[i] for i in drawing], offsets, scores_BK)
                for row, i in enumerate(drawing):
                    q_1V = None if requests[i].warp.greedy else p_BV[row : row + 1]
                    found[i].add(chosen_B[row : row + 1], self.name, q_1V)
            on = {i for i in drawing if self._goes_on(requests[i], found[i], limits[i], plans[i].stop)}
            active = [i for i in active if i in on or i not in ready]
        if self._guesses is not None:
            self._guesses.learn(trial for growing in found for trial in growing.trials)
        return Proposal([self._join(growing) for growing in found], tuple(forwards))

    def _goes_on(self, request: Request, growing: Growing, limit: int, stop: Stop | None) -> bool:
        """Whether a request drafts another token; what its grammar forces after the last one is added first."""
        if request.trail is not None:
            request.trail.walk(growing.tokens[-1].tolist())
            forced = request.trail.forced()[: limit - len(growing.tokens)]
            request.trail.walk(forced)
            for token in forced:
                growing.add(torch.tensor([token], device=self.runner.device), FORCED, None)
            if request.trail.exhausted:
                return False
        return len(growing.tokens) < limit and growing.goes_on(stop)

    def _sure(
        self, scores_BK: Tensor, rows: Sequence[int], found: Sequence[Growing], stops: Sequence[Stop | None]
    ) -> list[int]:
        """Rows whose token is worth a verify; decided by the draft's confidence, before any token is drawn."""
        confidence_B = (scores_BK.amax(-1) - scores_BK.logsumexp(-1)).exp()
        level_B = torch.bucketize(confidence_B, self._edges.to(confidence_B.dtype), right=True)
        for row in rows:
            found[row].levels.append(level_B[row : row + 1])
        if not any(stops):
            return list(rows)
        sure = []
        levels = level_B.tolist()
        for row in rows:
            growing, stop = found[row], stops[row]
            if stop is not None:
                growing.reach *= stop.accept[levels[row]]
            if stop is None or growing.reach >= stop.row[len(growing.tokens)]:
                sure.append(row)
        return sure

    def _join(self, growing: Growing) -> Draft:
        levels_L = torch.cat(growing.levels) if growing.levels else None
        if not growing.tokens:
            return Draft(torch.zeros(0, dtype=torch.int64, device=self.runner.device), levels_L=levels_L)
        q_SV = torch.cat(growing.q) if growing.q else None
        return Draft(torch.cat(growing.tokens), tuple(growing.sources), q_SV, tuple(growing.sampled), levels_L)

    def _table(self, request: Request) -> Table:
        table = self._tables.get(request)
        if table is None:
            table = self._tables[request] = self.runner.table()
        if not table.blocks:  # others may have computed what it begins with meanwhile
            table.adopt(request.tokens)
        return table

    def _admit(self, request: Request, lead: int, gamma: int) -> int:
        """How many tokens can be drafted behind a lead: none without free blocks, past the context, after the end."""
        length = len(request.tokens) + lead
        limit = min(gamma, self.context - length + 1)
        if limit <= 0 or (request.trail is not None and request.trail.exhausted):
            return 0
        try:
            self.runner.reserve(self._table(request), length + limit - 1)
        except CacheFullError:
            return 0
        return limit

    def _catch_up(self, request: Request, forwards: list[Forward]) -> bool:
        """Feeds what a table lacks, at most one chunk a round; whether the request can draft in this round.

        A long prompt is caught up with over several rounds, but at once where gamma is fixed: how much of it a reused
        prefix spares would else decide which rounds draft, and a seeded call would not repeat. Whether a request drafts
        depends on its own tokens alone: a budget shared with batch mates would make a lossy output's law depend on who
        else runs. What one has fed, those after it share.
        """
        table = self._tables[request]
        lag = len(request.tokens) - table.length
        while lag > _PACKED:  # by itself, all but the token that the first draft is drawn after
            fed = min(lag - 1, self._chunk)
            forwards.append(Forward(fed, 0, table.length))
            feed = Feed(request.tokens[table.length : table.length + fed])
            broken_1 = ~self.runner.forward([feed], [table], [1]).logits_RV.amax(-1).isfinite()
            self._suspects.append(([request], broken_1))
            if not broken_1:
                table.publish(request.tokens)
            lag -= fed
            if request.params.gamma == "auto":
                break
        return lag <= _PACKED

    def _forward(
        self, requests: Sequence[Request], growing: Sequence[Growing], rooms: Sequence[int], forwards: list[Forward]
    ) -> Tensor:
        """One forward of the batch: each request's logits of the next position, and of those behind guessed tokens.

        Args:
            requests: Those that draft.
            growing: Their drafts; told which row is whose.
            rooms: Tokens that may be fed behind each one's own.
            forwards: What was run so far.
        """
        tables = [self._tables[r] for r in requests]
        feeds: list[Feed] = []
        keep: list[int] = []
        for request, table, one, room in zip(requests, tables, growing, rooms, strict=True):
            table.rewind(len(request.tokens) + one.fed)  # what was guessed and not drawn
            one.guessed, one.match = self._guess(request, one, room)
            behind_G = torch.tensor(one.guessed, dtype=torch.int64, device=self.runner.device)
            if one.tokens:
                feeds.append(Feed((), torch.cat([one.unfed(), behind_G])))
            else:
                feeds.append(Feed([*request.tokens[table.length :], *one.lead], behind_G if one.guessed else None))
                one.fed = len(one.lead)
            one.row = sum(keep)
            keep.append(1 + len(one.guessed))
        forwards.append(Forward(sum(feed.size for feed in feeds), sum(keep), sum(t.length for t in tables)))
        logits_RV = self.runner.forward(feeds, tables, keep).logits_RV
        broken_R = ~logits_RV.amax(-1).isfinite()
        if sum(keep) > len(keep):
            broken_R = torch.stack([mine.any() for mine in torch.split(broken_R, keep)])
        self._suspects.append((requests, broken_R))
        return logits_RV

    def _guess(self, request: Request, growing: Growing, room: int) -> tuple[list[int], int]:
        """Tokens that may follow, as far as a grammar allows them."""
        if self._guesses is None:
            return [], 0
        found, match = self._guesses.guess(request, self._drafted(growing).tolist(), room)
        return (found if request.trail is None else found[: request.trail.allows(found)]), match

    def _scores(self, requests: Sequence[Request], growing: Sequence[Growing], logits_BV: Tensor) -> Tensor:
        """Scores of the tokens that each request can propose at its next position."""
        if self._sayable_K is not None:
            every_BV = torch.full((len(requests), self._vocabulary), -torch.inf, device=logits_BV.device)
            logits_BV = every_BV.index_copy_(1, self._sayable_K, logits_BV.float())
        elif logits_BV.shape[1] < self._vocabulary:
            missing = self._vocabulary - logits_BV.shape[1]
            logits_BV = torch.nn.functional.pad(logits_BV.float(), (0, missing), value=-torch.inf)
        histories = [
            History(r.warp, r.prompt, r.generated, self._drafted(one), one.offset, 1)
            for r, one in zip(requests, growing, strict=True)
        ]
        scores_BV = scores(logits_BV, histories)
        scores_BK = self._sayable(scores_BV)
        sound_B1 = scores_BK.amax(-1, keepdim=True).isfinite()
        # A broken draft guesses evenly: an exact q like any other, and no other request suffers.
        ruled = [(row, r.trail, r) for row, r in enumerate(requests) if r.trail is not None]
        if not ruled:
            return torch.where(sound_B1, scores_BK, 0.0)
        bits_MW = torch.stack([trail.mask() for _, trail, _ in ruled])
        exact = [r.warp.greedy for *_, r in ruled]
        scores_BV = torch.where(sound_B1, scores_BV, 0.0)
        forbid(scores_BV, [row for row, *_ in ruled], bits_MW, exact=exact)
        return self._sayable(scores_BV)

    def _sayable(self, scores_BV: Tensor) -> Tensor:
        """Scores of the tokens it can propose, perhaps a tenth of all."""
        return scores_BV if self._sayable_K is None else scores_BV.index_select(1, self._sayable_K)

    def _drafted(self, growing: Growing) -> Tensor:
        """The round's drafted tokens so far."""
        lead = torch.tensor(growing.lead, dtype=torch.int64, device=self.runner.device)
        return torch.cat([lead, *growing.tokens])

    def _draw(self, requests: Sequence[Request], offsets: Sequence[int], scores_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Distributions over all tokens, and tokens, of one position of each request."""
        warps = [r.warp for r in requests]
        if all(warp.greedy for warp in warps):
            return scores_BK, self._named(best(scores_BK))  # a point mass needs no distribution
        lengths = [len(r.tokens) for r in requests]
        seeds = [r.seed for r in requests]
        u_B = noise.uniform(seeds, lengths, offsets, noise.DRAFT, scores_BK.device)
        p_BK = probs(scores_BK, warps)
        greedy_B = _flags(warp.greedy for warp in warps).to(p_BK.device)
        chosen_B = self._named(torch.where(greedy_B, p_BK.argmax(-1), draw(p_BK, u_B)))
        p_BV = p_BK
        if self._sayable_K is not None:
            p_BV = p_BK.new_zeros(len(p_BK), self._vocabulary).index_copy_(1, self._sayable_K, p_BK)
        coupled = [i for i, r in enumerate(requests) if r.params.invariant and not r.warp.greedy]
        if coupled:
            picked = choose(p_BV[coupled], [seeds[i] for i in coupled], [lengths[i] + offsets[i] for i in coupled])
            chosen_B[coupled] = picked
        return p_BV, chosen_B

    def _named(self, chosen_B: Tensor) -> Tensor:
        """Token ids of columns."""
        return chosen_B if self._sayable_K is None else self._sayable_K[chosen_B]

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
        if self._own is not None:
            self._own.forget(request)
        if self._guesses is not None:
            self._guesses.forget(request)
        table = self._tables.pop(request, None)
        if table is not None:
            table.release()


def _flags(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.bool)  # type: ignore[call-overload]

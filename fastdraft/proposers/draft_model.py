"""A smaller model that shares the target's vocabulary.

Shapes: B requests still drafting, V vocabulary, G drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdraft.errors import CacheFullError
from fastdraft.kv.table import Table
from fastdraft.models.runner import Feed, Runner
from fastdraft.request import Request
from fastdraft.round import Draft
from fastdraft.sampling import noise
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
    """

    def __init__(self, name: str, runner: Runner, *, context: int, vocabulary: int, chunk: int) -> None:
        self.name = name
        self.runner = runner
        self._context = context
        self._vocabulary = vocabulary
        self._chunk = chunk
        self._tables: dict[Request, Table] = {}

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[Draft]:
        """Sampled drafts with their exact q; point masses at temperature 0."""
        tokens: list[list[Tensor]] = [[] for _ in requests]
        q: list[list[Tensor]] = [[] for _ in requests]
        limits = [self._admit(r, g) for r, g in zip(requests, gammas, strict=True)]
        active = self._catch_up(requests, limits)
        step = 0
        while active:
            p_BV, chosen_B = self._step([requests[i] for i in active], [tokens[i] for i in active], step)
            for row, i in enumerate(active):
                tokens[i].append(chosen_B[row : row + 1])
                if not requests[i].warp.greedy:
                    q[i].append(p_BV[row : row + 1])
            step += 1
            active = [i for i in active if step < limits[i]]
        return [self._join(tokens[i], q[i]) for i in range(len(requests))]

    def _join(self, tokens: list[Tensor], q: list[Tensor]) -> Draft:
        if not tokens:
            return Draft(torch.zeros(0, dtype=torch.int64, device=self.runner.device))
        q_SV = torch.cat(q) if q else None
        return Draft(torch.cat(tokens), (self.name,) * len(tokens), q_SV, tuple(range(len(q))))

    def _admit(self, request: Request, gamma: int) -> int:
        """How many tokens can be drafted: none without free blocks, none past the draft's context."""
        length = len(request.tokens)
        limit = min(gamma, self._context - length + 1)
        if limit <= 0:
            return 0
        table = self._tables.get(request)
        if table is None:
            table = self._tables[request] = self.runner.table()
            table.adopt(request.tokens)
        try:
            self.runner.reserve(table, length + limit - 1)
        except CacheFullError:
            return 0
        return limit

    def _catch_up(self, requests: Sequence[Request], limits: Sequence[int]) -> list[int]:
        """Feeds what tables lack, at most one chunk a request and round; returns who can draft in this round.

        A long prompt is caught up with over several rounds. Whether a request drafts depends on its own tokens alone:
        a budget shared with batch mates would make a lossy output's law depend on who else runs.
        """
        ready = []
        for i, request in enumerate(requests):
            if limits[i] <= 0:
                continue
            table = self._tables[request]
            lag = len(request.tokens) - table.length
            if lag > _PACKED:  # by itself, all but the token that the first draft is drawn after
                fed = min(lag - 1, self._chunk)
                self.runner.forward([Feed(request.tokens[table.length : table.length + fed])], [table], [0])
                lag -= fed
            if lag <= _PACKED:
                ready.append(i)
        return ready

    def _step(self, requests: Sequence[Request], drafted: Sequence[list[Tensor]], step: int) -> tuple[Tensor, Tensor]:
        """One forward and one draw for the batch."""
        tables = [self._tables[r] for r in requests]
        if step == 0:
            feeds = [Feed(r.tokens[t.length :]) for r, t in zip(requests, tables, strict=True)]
        else:
            feeds = [Feed((), d[-1]) for d in drafted]
        logits_BV = self.runner.forward(feeds, tables, [1] * len(feeds)).logits_RV
        if logits_BV.shape[1] < self._vocabulary:
            missing = self._vocabulary - logits_BV.shape[1]
            logits_BV = torch.nn.functional.pad(logits_BV.float(), (0, missing), value=-torch.inf)
        warps = [r.warp for r in requests]
        empty_G = torch.zeros(0, dtype=torch.int64, device=logits_BV.device)
        histories = [
            History(r.warp, r.prompt, r.generated, torch.cat(d) if d else empty_G, step, 1)
            for r, d in zip(requests, drafted, strict=True)
        ]
        scores_BV = scores(logits_BV, histories)
        # A broken draft guesses evenly: an exact q like any other, and no other request suffers.
        scores_BV = torch.where(scores_BV.amax(-1, keepdim=True).isfinite(), scores_BV, 0.0)
        if all(warp.greedy for warp in warps):
            return scores_BV, scores_BV.argmax(-1)
        p_BV = probs(scores_BV, warps)
        lengths = [len(r.tokens) for r in requests]
        seeds = [r.seed for r in requests]
        u_B = noise.uniform(seeds, lengths, [step] * len(seeds), noise.DRAFT, p_BV.device)
        chosen_B = torch.where(
            _flags(r.warp.greedy for r in requests).to(p_BV.device), p_BV.argmax(-1), draw(p_BV, u_B)
        )
        coupled = [i for i, r in enumerate(requests) if r.params.invariant and not r.warp.greedy]
        if coupled:
            picked = choose(p_BV[coupled], [seeds[i] for i in coupled], [lengths[i] + step for i in coupled])
            chosen_B[coupled] = picked
        return p_BV, chosen_B

    def observe(self, requests: Sequence[Request]) -> None:
        """Rolls back what was not accepted; shares full blocks of committed tokens."""
        for request in requests:
            table = self._tables.get(request)
            if table is not None:
                table.truncate(len(request.tokens) - 1)
                table.publish(request.tokens)

    def forget(self, request: Request) -> None:
        """Gives the request's blocks back."""
        table = self._tables.pop(request, None)
        if table is not None:
            table.release()


def _flags(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.bool)  # type: ignore[call-overload]

"""One round over the batch: plan, reserve, draft, launch, verify, commit.

Prefill is this round with an empty KV; plain decoding is this round with an empty draft. There is no other loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft._log import get_logger
from fastdraft.commit import commit, end
from fastdraft.control.plan import Controller, Offer
from fastdraft.errors import FastDraftError, NumericalError, owned
from fastdraft.models.runner import Feed, Runner
from fastdraft.proposers.chain import Chain
from fastdraft.proposers.draft_model import DraftModelProposer
from fastdraft.request import Request
from fastdraft.results import TARGET, Chunk, Completion, FinishReason, Metrics, TokenLogprob
from fastdraft.round import Draft, Plan
from fastdraft.sampling.probs import History, logprobs, probs, scores
from fastdraft.sampling.verify import Trial, verify
from fastdraft.scheduler import Limits, Scheduler, Work
from fastdraft.trace import Trace, TracedRound

__all__ = ["Engine"]

_log = get_logger(__name__)


class _Spent(NamedTuple):
    """Seconds of a round."""

    draft: float
    target: float


class _Outcome(NamedTuple):
    """One request's part of a verdict, on the host."""

    drafted: tuple[int, ...]
    sources: tuple[str, ...]
    accepted: int
    following: int
    distortion_G: Tensor


class Engine:
    """The batch and its rounds; used by one thread.

    Args:
        runner: The target.
        chain: The draft sources.
        controller: Chooses what is drafted.
        limits: Bounds of a round.
    """

    def __init__(self, runner: Runner, chain: Chain, controller: Controller, limits: Limits) -> None:
        self.scheduler = Scheduler(runner, limits)
        self._runner = runner
        self._chain = chain
        self._controller = controller
        self._offers = [Offer(s.name, isinstance(s, DraftModelProposer)) for s in chain.sources]
        self._empty = Draft(torch.zeros(0, dtype=torch.int64, device=runner.device))

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.scheduler.running and not self.scheduler.waiting

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.scheduler.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        self._sweep()
        batch = self.scheduler.next()
        if not batch:
            return
        now = time.perf_counter()
        for work in batch:
            if work.request.tally.started is None:
                work.request.tally.started = now
        batch, plans = self.scheduler.reserve(batch, [self._plan(work) for work in batch])
        if not batch:
            return
        requests = [work.request for work in batch]
        before = time.perf_counter()
        drafts = self._chain.propose(requests, plans, self._empty)
        drafted = time.perf_counter()
        logits_RV = self._launch(batch, drafts)
        launched = time.perf_counter()
        self._settle(batch, drafts, logits_RV, _Spent(drafted - before, launched - drafted))

    def _plan(self, work: Work) -> tuple[Plan, ...]:
        if not work.verifies or not self._offers:
            return ()
        request = work.request
        return self._controller.plan(request.params, self._offers, rounds=request.tally.rounds, left=request.left)

    def _launch(self, batch: Sequence[Work], drafts: Sequence[Draft]) -> Tensor:
        """The target's forward over committed and drafted tokens; logits of the verified rows."""
        feeds, tables, keep = [], [], []
        for work, draft in zip(batch, drafts, strict=True):
            table = work.request.table
            assert table is not None
            tokens = work.request.tokens[table.length : table.length + work.feeds]
            feeds.append(Feed(tokens, draft.tokens_G if len(draft) else None))
            tables.append(table)
            keep.append(len(draft) + 1 if work.verifies else 0)
        return self._runner.forward(feeds, tables, keep).logits_RV

    def _settle(self, batch: Sequence[Work], drafts: Sequence[Draft], logits_RV: Tensor, spent: _Spent) -> None:
        """Verifies, commits, trims KV, and tells everyone who waits."""
        rounds = [(w.request, d) for w, d in zip(batch, drafts, strict=True) if w.verifies]
        for work in batch:
            work.request.tally.draft_seconds += spent.draft
            work.request.tally.target_seconds += spent.target
        if not rounds:
            return
        histories = [History(r.warp, r.prompt, r.generated, d.tokens_G, 0, len(d) + 1) for r, d in rounds]
        scores_RV = scores(logits_RV, histories)
        rounds, rows = self._drop_broken(rounds, logits_RV, scores_RV)
        if not rounds:
            return
        if len(rows) < len(scores_RV):
            logits_RV, scores_RV = logits_RV[rows], scores_RV[rows]
        p_RV = probs(scores_RV, [r.warp for r, d in rounds for _ in range(len(d) + 1)])
        verdict = verify(p_RV, scores_RV, [_trial(r, d) for r, d in rounds])
        # Token ids come to the host here.
        drafted_D = torch.cat([d.tokens_G for _, d in rounds])
        host = torch.cat([verdict.accepted_B, verdict.next_B, drafted_D]).tolist()
        accepted, following, ids = host[: len(rounds)], host[len(rounds) : 2 * len(rounds)], host[2 * len(rounds) :]
        row = 0
        for b, (request, draft) in enumerate(rounds):
            drafted = tuple(ids[row - b : row - b + len(draft)])
            rows_RV = logits_RV[row : row + len(draft) + 1]
            row += len(draft) + 1
            try:
                mine = _Outcome(drafted, draft.sources, accepted[b], following[b], verdict.distortion_BG[b])
                self._conclude(request, mine, rows_RV, spent)
            except Exception as error:  # what goes wrong with one request's text is its own
                self.fail(request, owned(error))
        self._chain.observe([r for r, _ in rounds if r.table is not None])

    def _drop_broken(
        self, rounds: list[tuple[Request, Draft]], logits_RV: Tensor, scores_RV: Tensor
    ) -> tuple[list[tuple[Request, Draft]], list[int]]:
        """Ends requests that have no finite best score; the rows of the others go on."""
        fine = torch.isfinite(scores_RV.amax(-1)).tolist()
        good: list[tuple[Request, Draft]] = []
        rows: list[int] = []
        first = 0
        for request, draft in rounds:
            mine = range(first, first + len(draft) + 1)
            first = mine.stop
            if all(fine[row] for row in mine):
                good.append((request, draft))
                rows += mine
            else:
                broken = not bool(torch.isfinite(logits_RV[mine.start : mine.stop].amax(-1)).all())
                self.fail(request, _numerical(request, broken))
        return good, rows

    def _conclude(self, request: Request, outcome: _Outcome, rows_RV: Tensor, spent: _Spent) -> None:
        """Commits; then KV, statistics, log-probabilities, trace, the chunk, and the end if this was it."""
        accepted, params = outcome.accepted, request.params
        tokens = (*outcome.drafted[:accepted], outcome.following)
        tokens = tokens[: commit(request, tokens)]
        assert request.table is not None
        request.table.truncate(len(request.tokens) - 1)
        request.table.publish(request.tokens)
        # Exact settings never distort; the sum is read only where there may be one.
        lost = 0.0 if params.exact else float(outcome.distortion_G[: len(tokens)].sum())
        request.tally.add(outcome.sources, min(len(tokens), accepted), params.alpha, lost)
        request.tally.arrive(len(tokens), time.perf_counter())
        found = None
        if request.logprobs is not None:
            found = _describe(request, rows_RV[: len(tokens)], tokens)
            request.logprobs += found
        origins = tuple(outcome.sources[i] if i < accepted else TARGET for i in range(len(tokens)))
        if request.rounds is not None:
            request.rounds.append(TracedRound(outcome.drafted, outcome.sources, accepted, tokens, origins, *spent))
        logged = None if found is None else tuple(found)
        request.emit(Chunk(request.text.take(), tokens, origins, logged, request.finish_reason))
        if request.finish_reason is not None:
            self._end(request)

    def _sweep(self) -> None:
        """Ends cancelled and late requests before they cost another round."""
        now = time.perf_counter()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.cancelled:
                self.stop(request, "cancelled")
            elif request.deadline is not None and now >= request.deadline:
                self.stop(request, "timeout")

    def stop(self, request: Request, reason: FinishReason) -> None:
        """Ends a request early; what it has is its completion."""
        end(request, reason)
        request.emit(Chunk(request.text.take(), finish_reason=reason))
        self._end(request)

    def fail(self, request: Request, error: FastDraftError) -> None:
        """Ends a request with an error."""
        self._forget(request)
        request.emit(error)

    def _end(self, request: Request) -> None:
        self._forget(request)
        request.emit(_completion(request))

    def _forget(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._chain.forget(request)

    def everyone(self) -> list[Request]:
        """Running and waiting requests."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    def forget_prefixes(self) -> None:
        """Drops reusable prefixes; what running requests hold stays."""
        for runner in (self._runner, *(s.runner for s in self._chain.sources if isinstance(s, DraftModelProposer))):
            runner.pool.clear_prefixes()

    def metrics(self) -> Metrics:
        """A snapshot."""
        pools = [s.runner.pool for s in self._chain.sources if isinstance(s, DraftModelProposer)]
        return Metrics(
            running=len(self.scheduler.running),
            queued=len(self.scheduler.waiting),
            free_blocks=self._runner.pool.free,
            total_blocks=self._runner.pool.blocks,
            draft_free_blocks=sum(pool.free for pool in pools),
            draft_total_blocks=sum(pool.blocks for pool in pools),
            prefix_hit_tokens=self.scheduler.prefix_hits,
            prompt_tokens=self.scheduler.prompt_tokens,
        )


def _numerical(request: Request, broken: bool) -> NumericalError:
    if broken:
        return NumericalError(
            f"{request.model} returned nan or infinite logits after {len(request.tokens)} tokens.",
            hint="Try another dtype, such as float32; float16 overflows on many models.",
        )
    return NumericalError(
        "logit_bias, penalties, min_tokens and stop ids leave no token with a finite score.",
        hint="Ban fewer tokens, or use smaller biases and penalties.",
    )


def _trial(request: Request, draft: Draft) -> Trial:
    params = request.params
    return Trial(
        draft,
        request.seed,
        len(request.tokens),
        greedy=request.warp.greedy,
        invariant=params.invariant,
        alpha=params.alpha,
        rule=params.acceptance_rule,
    )


def _describe(request: Request, rows_RV: Tensor, tokens: tuple[int, ...]) -> list[TokenLogprob]:
    """Log-probabilities of kept tokens under the target's own log-softmax."""
    top = request.params.logprobs or 0
    chosen_R, value_RK, id_RK = logprobs(rows_RV, torch.tensor(tokens, device=rows_RV.device), top)
    return [
        TokenLogprob(
            token,
            request.decode(token),
            value,
            tuple((i, request.decode(i), v) for v, i in zip(vs, ids, strict=True)),
        )
        for token, value, vs, ids in zip(tokens, chosen_R.tolist(), value_RK.tolist(), id_RK.tolist(), strict=True)
    ]


def _completion(request: Request) -> Completion[None]:
    assert request.finish_reason is not None
    speculation = request.speculation
    if speculation == "on" and not request.tally.drafted:
        speculation = "off: no source had a draft"
    stats = request.tally.freeze(len(request.tokens) - len(request.prompt), speculation)
    return Completion(
        text=request.text.text,
        token_ids=tuple(request.generated),
        parsed=None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        prompt_tokens=len(request.prompt),
        completion_tokens=len(request.tokens) - len(request.prompt),
        logprobs=request.logprobs,
        stats=stats,
        lossless=request.params.exact or not stats.draft_tokens,
        params=request.params,
        model=request.model,
        request_id=request.id,
        trace=None if request.rounds is None else Trace(tuple(request.rounds)),
    )

"""One round over the batch: plan, reserve, draft, launch, verify, commit.

Prefill is this round with an empty KV; plain decoding is this round with an empty draft. There is no other loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft._log import get_logger
from fastdraft.commit import commit, end
from fastdraft.constraints.filler import Filler
from fastdraft.control.costs import Forward
from fastdraft.control.course import Played, Turn
from fastdraft.control.load import Load
from fastdraft.control.plan import Controller, Spent
from fastdraft.control.portion import Portion
from fastdraft.errors import ConfigError, ConstraintDeadEndError, FastDraftError, owned
from fastdraft.launch import launch
from fastdraft.metrics import Meter, Metrics
from fastdraft.models.frequent import Frequencies
from fastdraft.models.gauge import find_gauge
from fastdraft.models.runner import Runner
from fastdraft.outcome import Outcome, Part, describe, outcomes, trial
from fastdraft.pins import Pins
from fastdraft.proposers.chain import Chain
from fastdraft.proposers.draft_model import DraftModelProposer
from fastdraft.request import Request
from fastdraft.results import TARGET, Chunk, FinishReason
from fastdraft.round import FORCED, PLAIN, Draft, Plan
from fastdraft.sampling.mask import forbid
from fastdraft.sampling.probs import History, probs, scores
from fastdraft.sampling.verify import verify
from fastdraft.scheduler import Limits, Scheduler, Work
from fastdraft.soundness import dead_end, divide
from fastdraft.trace import TracedRound

__all__ = ["Engine"]

_log = get_logger(__name__)


class _Seconds(NamedTuple):
    """What sources and target took in a round."""

    draft: float
    target: float


class Engine:
    """The batch and its rounds; used by one thread.

    Args:
        runner: The target.
        chain: The draft sources.
        controller: Chooses what is drafted.
        limits: Bounds of a round.
        frequencies: Where the tokens of finished requests are counted; None counts nothing.
    """

    def __init__(
        self,
        runner: Runner,
        chain: Chain,
        controller: Controller,
        limits: Limits,
        frequencies: Frequencies | None = None,
    ) -> None:
        self._runner = runner
        self._chain = chain
        contexts = {name: source.context for name, source in self.drafts.items()}
        self.pins = Pins(self.runners, contexts, limits.chunk)
        self.scheduler = Scheduler(runner, limits, self.pins.clear)
        self._controller = controller
        self._frequencies = frequencies
        self._load = Load(limits.batch)
        self._portion = Portion(limits.chunk)
        self._filler = Filler()
        self._meter = Meter()
        self._gauge = find_gauge(runner.device)
        self._empty = Draft(torch.zeros(0, dtype=torch.int64, device=runner.device))

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.scheduler.running and not self.scheduler.waiting

    def add(self, request: Request) -> None:
        """Queues a request."""
        if self.idle:
            self._load.rest()
            self._meter.rest()
        request.course = self._controller.start(request.params)
        request.course.constraint = None if request.spec is None else request.spec.kind
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        self._sweep()
        decoding = self.scheduler.decoding
        batch = self.scheduler.next(self._portion.size(decoding=decoding))
        if not batch:
            return
        started = time.perf_counter()
        for work in batch:
            if work.request.tally.started is None:
                work.request.tally.started = started
        planned, forced = self._plan(batch)
        batch, plans = self.scheduler.reserve(batch, planned)
        if not batch:
            return
        requests = [work.request for work in batch]
        leads = [forced[r][: p.lead] if p.lead else [] for r, p in zip(requests, plans, strict=True)]
        drafts, drafting = self._chain.propose(requests, plans, leads, self._empty)
        rounds = [Part(w.request, p, d) for w, p, d in zip(batch, plans, drafts, strict=True) if w.verifies]
        drafted = time.perf_counter()
        with self._filler.filling({r: (r.trail, d.tokens_G.tolist()) for r, _, d in rounds if r.trail}) as masks:
            launched = launch(self._runner, batch, drafts)
            computed = time.perf_counter()
        for request, error in launched.failed.items():
            self.fail(request, owned(error))
        rounds = [one for one in rounds if one.request not in launched.failed]
        spent = _Seconds(sum(seconds for *_, seconds in drafting), computed - drafted)
        for work in batch:
            work.request.tally.draft_seconds += spent.draft
            work.request.tally.target_seconds += spent.target
        self._meter.rounds += 1
        self._meter.split_rounds += len(launched.sizes) > 1 or bool(launched.failed)
        self._meter.draft_seconds += spent.draft
        self._meter.target_seconds += spent.target
        played = self._settle(rounds, launched.logits_RV, masks, spent) if rounds else []
        if launched.starved:
            self.scheduler.shrink()
        ended = time.perf_counter()
        if launched.sizes:
            size = Forward(*map(sum, zip(*launched.sizes, strict=True)))
            self._controller.observe(played, Spent(size, ended - drafted, drafting))
        self._load.push(started, ended, len(self.everyone()))
        fed = sum(work.feeds for work in batch if work.feeds > 1)
        self._portion.observe(fed, ended - started, decoding=decoding)

    def _plan(self, batch: Sequence[Work]) -> tuple[list[Plan], dict[Request, list[int]]]:
        """A plan for each request, none for prefill chunks; and the tokens that grammars force."""
        turns = {}
        forced: dict[Request, list[int]] = {}
        for i, work in enumerate(batch):
            request = work.request
            if not work.verifies or not self._set_alpha(request):
                continue
            assert request.course is not None
            drafts = request.params.gamma != 0
            lead = forced[request] = request.trail.forced() if drafts and request.trail is not None else []
            offers = self._chain.offers(request, lead) if drafts else []
            fresh = request.tally.rounds == 0
            turns[i] = Turn(request.course, offers, request.left, len(request.tokens), fresh, len(lead))
        plans = dict(zip(turns, self._controller.plan(list(turns.values())), strict=True))
        return [plans.get(i, PLAIN) for i in range(len(batch))], forced

    def _set_alpha(self, request: Request) -> bool:
        """Tells a call whose alpha follows load how loaded we are; False where its own gauge fails, which ends it."""
        assert request.course is not None
        leniency = request.course.leniency
        if leniency is None:
            return True
        try:
            if leniency.spec.utilisation is not None:
                leniency.load(_checked(leniency.spec.utilisation()))
            else:
                leniency.load(self._utilisation())
        except Exception as error:  # the user's own function
            self.fail(request, owned(error))
            return False
        return True

    def _utilisation(self) -> float:
        """The device's, or our own share where no driver tells."""
        if self._gauge is not None:
            try:
                return self._gauge()
            except Exception:  # whatever NVML says of a device that it could read before
                self._gauge = None
        return self._load.utilisation

    def _settle(
        self, rounds: list[Part], logits_RV: Tensor, masks: Mapping[Request, Tensor], spent: _Seconds
    ) -> list[Played]:
        """Verifies, commits, trims KV, and tells everyone who waits; returns what control learns from."""
        histories = [History(r.warp, r.prompt, r.generated, d.tokens_G, 0, len(d) + 1) for r, _, d in rounds]
        scores_RV = scores(logits_RV, histories)
        if any(one.request in masks for one in rounds):
            if scores_RV is logits_RV:  # which are asked for below
                scores_RV = scores_RV.clone()
            _constrain(rounds, masks, scores_RV)
        rounds, rows, sound, broken = divide(rounds, logits_RV, scores_RV)
        for request, error in broken:
            self.fail(request, error)
        if not rounds:
            return []
        if len(rows) < len(scores_RV):
            logits_RV, scores_RV = logits_RV[rows], scores_RV[rows]
        if any(count <= len(one.draft) for one, count in zip(rounds, sound, strict=True)):
            scores_RV = torch.where(scores_RV.amax(-1, keepdim=True).isfinite(), scores_RV, 0.0)
        p_RV = probs(scores_RV, [r.warp for r, _, d in rounds for _ in range(len(d) + 1)])
        verdict = verify(p_RV, scores_RV, [trial(r, d) for r, _, d in rounds])
        played = []
        row = 0
        for one, outcome, count in zip(rounds, outcomes(rounds, verdict), sound, strict=True):
            rows_RV = logits_RV[row : row + len(one.draft) + 1]
            row += len(one.draft) + 1
            dead = outcome.accepted >= count
            if dead:  # what was verified behind a row that allows nothing is not true
                outcome = outcome._replace(accepted=count)
            try:
                played.append(self._conclude(one, outcome, rows_RV, spent, dead=dead))
            except Exception as error:  # what goes wrong with one request's text is its own
                self.fail(one.request, owned(error))
        self._chain.observe([one.request for one in rounds if one.request.table is not None])
        return played

    def _conclude(self, one: Part, outcome: Outcome, rows_RV: Tensor, spent: _Seconds, *, dead: bool) -> Played:
        """Commits; then KV, statistics, log-probabilities, trace, the chunk, and the end if this was it.

        Where nothing may follow the accepted tokens, ``dead``, these stand alone: one of them may have ended the call.
        """
        request, accepted = one.request, outcome.accepted
        assert request.course is not None
        tokens = (*outcome.drafted[:accepted], *(() if dead else (outcome.following,)))
        tokens = tokens[: commit(request, tokens)]
        assert request.table is not None
        request.table.truncate(len(request.tokens) - 1)
        request.table.publish(request.tokens)
        # Exact settings never distort; the sum is read only where there may be one.
        lost = 0.0 if request.params.exact else float(outcome.distortion_G[: len(tokens)].sum())
        request.tally.add(outcome.sources, min(len(tokens), accepted), request.course.alpha, lost)
        first, waited = request.tally.arrive(len(tokens), time.perf_counter())
        self._meter.arrive(len(tokens), waited, first=first)
        found = None
        if request.logprobs is not None:
            found = describe(request, rows_RV[: len(tokens)], tokens)
            request.logprobs += found
        origins = tuple(outcome.sources[i] if i < accepted else TARGET for i in range(len(tokens)))
        if request.rounds is not None:
            request.rounds.append(TracedRound(outcome.drafted, outcome.sources, accepted, tokens, origins, *spent))
        logged = None if found is None else tuple(found)
        request.emit(Chunk(request.text.take(), tokens, origins, logged, request.finish_reason))
        done = request.finish_reason is not None
        if done:
            self._end(request)
        elif dead:
            self.fail(request, dead_end(request))
        forced, forced_kept = outcome.sources.count(FORCED), outcome.sources[:accepted].count(FORCED)
        return Played(
            request.course,
            one.plan,
            len(outcome.drafted) - forced,
            accepted - forced_kept,
            outcome.chances,
            outcome.levels,
            len(tokens),
            done,
            forced,
            forced_kept,
        )

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
        if isinstance(error, ConstraintDeadEndError):
            end(request, "stop")  # what it has is shown beside the error
        self._forget(request)
        request.emit(error)

    def _end(self, request: Request) -> None:
        self._forget(request)
        request.emit(request.completion())

    def _forget(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._chain.forget(request)
        tally, trail = request.tally, request.trail
        self._meter.finish(tally.drafted, tally.accepted, 0.0 if trail is None else trail.seconds, time.perf_counter())
        if self._frequencies is not None:
            self._frequencies.add(request.generated)

    def everyone(self) -> list[Request]:
        """Running and waiting requests."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    @property
    def drafts(self) -> dict[str, DraftModelProposer]:
        """The sources that run a model, by name."""
        return {s.name: s for s in self._chain.sources if isinstance(s, DraftModelProposer)}

    @property
    def runners(self) -> dict[str | None, Runner]:
        """The target's runner under None, each draft model's under the name of its source."""
        return {None: self._runner} | {name: source.runner for name, source in self.drafts.items()}

    def forget_prefixes(self) -> None:
        """Drops reusable prefixes; what running requests hold stays."""
        for runner in self.runners.values():
            runner.pool.clear_prefixes()

    def close(self) -> None:
        """Keeps what is to outlive the engine; nothing runs any more."""
        self._filler.close()
        if self._frequencies is not None:
            self._frequencies.save()

    def metrics(self) -> Metrics:
        """A snapshot."""
        pools = [source.runner.pool for source in self.drafts.values()]
        meter, scheduler = self._meter, self.scheduler
        return Metrics(
            running=len(scheduler.running),
            queued=len(scheduler.waiting),
            free_blocks=self._runner.pool.free,
            total_blocks=self._runner.pool.blocks,
            draft_free_blocks=sum(pool.free for pool in pools),
            draft_total_blocks=sum(pool.blocks for pool in pools),
            prefix_hit_tokens=scheduler.prefix_hits,
            prompt_tokens=scheduler.prompt_tokens,
            finished=meter.finished,
            rounds=meter.rounds,
            tokens=meter.tokens,
            by_source=meter.by_source,
            draft_seconds=meter.draft_seconds,
            target_seconds=meter.target_seconds,
            constraint_seconds=meter.constraint_seconds,
            preempted=scheduler.preempted,
            draft_failures=self._chain.failures,
            split_rounds=meter.split_rounds,
            time_to_first_token=meter.time_to_first_token,
            inter_token=meter.inter_token,
        )

    @property
    def retry_after(self) -> float:
        """Seconds until a call is likely to end and make room for another; read from any thread."""
        return self._meter.retry_after


def _constrain(rounds: Sequence[Part], masks: Mapping[Request, Tensor], scores_RV: Tensor) -> None:
    """Takes from the scores what each request's grammar forbids along its draft."""
    rows: list[int] = []
    exact: list[bool] = []
    first = 0
    for request, _, draft in rounds:
        count = len(draft) + 1
        if request in masks:
            rows += range(first, first + count)
            assert request.course is not None
            exact += [request.warp.greedy and request.course.alpha == 1] * count
        first += count
    wanted = torch.cat([masks[request] for request, *_ in rounds if request in masks])
    forbid(scores_RV, rows, wanted, exact=exact)


def _checked(utilisation: object) -> float:
    if isinstance(utilisation, int | float) and 0 <= utilisation <= 1:
        return float(utilisation)
    raise ConfigError(
        f"DynamicAlpha's utilisation returned {utilisation!r}, expected a number from 0 to 1.",
        hint="Return a share, such as 0.85 for 85 %.",
    )

"""One request's part of a round, as it goes into the verify and as it comes out.

Shapes: R rows of logits, G drafted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft.request import Request
from fastdraft.results import TokenLogprob
from fastdraft.round import FORCED, Draft, Plan, Verdict
from fastdraft.sampling.probs import logprobs
from fastdraft.sampling.verify import Trial

__all__ = ["Outcome", "Part", "describe", "outcomes", "trial"]


class Part(NamedTuple):
    """One request's part of a round that reaches the end of its tokens."""

    request: Request
    plan: Plan
    draft: Draft


class Outcome(NamedTuple):
    """One request's part of a verdict, on the host.

    Attributes:
        drafted: The drafted tokens.
        sources: The source of each.
        accepted: How many of them, from the first, are kept.
        following: The target's own token after them.
        distortion_G: Of each position; stays on the device.
        chances: How likely each reached position of the source itself was to be accepted; forced ones are not its.
        levels: How sure the source was of each of them, and of the one at which it stopped, if that was reached; empty
            where it doesn't say.
    """

    drafted: tuple[int, ...]
    sources: tuple[str, ...]
    accepted: int
    following: int
    distortion_G: Tensor
    chances: list[float]
    levels: list[int]


def outcomes(rounds: Sequence[Part], verdict: Verdict) -> Iterator[Outcome]:
    """Brings a verdict to the host, and divides it among the requests."""
    levels = [d.levels_L for _, _, d in rounds if d.levels_L is not None]
    packed = torch.cat([verdict.accepted_B, verdict.next_B, *(d.tokens_G for _, _, d in rounds), *levels]).tolist()
    chances = verdict.chance_BG.tolist()
    count = len(rounds)
    accepted, following, ids = packed[:count], packed[count : 2 * count], iter(packed[2 * count :])
    drafted = [tuple(islice(ids, len(d))) for _, _, d in rounds]
    for b, (_, _, draft) in enumerate(rounds):
        reached = min(accepted[b] + 1, len(draft))
        own = [i for i, source in enumerate(draft.sources[:reached]) if source != FORCED]
        sure = [] if draft.levels_L is None else list(islice(ids, len(draft.levels_L)))
        if accepted[b] < len(draft):
            sure = sure[: len(own)]
        yield Outcome(
            drafted[b],
            draft.sources,
            accepted[b],
            following[b],
            verdict.distortion_BG[b],
            [chances[b][i] for i in own],
            sure,
        )


def trial(request: Request, draft: Draft) -> Trial:
    """What the verify asks of a request; alpha is that of this round."""
    params = request.params
    assert request.course is not None
    return Trial(
        draft,
        request.seed,
        len(request.tokens),
        greedy=request.warp.greedy,
        invariant=params.invariant,
        alpha=request.course.alpha,
        rule=params.acceptance_rule,
    )


def describe(request: Request, rows_RV: Tensor, tokens: tuple[int, ...]) -> list[TokenLogprob]:
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

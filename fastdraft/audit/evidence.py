"""What finished tokens say about the distribution they were drawn from, given the logits of dense forwards.

Two statistics judge sampled tokens. Both hold for any draft, since what they ask is settled before a token is drawn:

- z. S_t are the tokens that the draft likes better than the target does. A verify that favours the draft, in whatever
  way, puts more of the output there than p_t(S_t) says. The terms are martingale differences, so z is about normal.
- The probability integral transform (Rosenblatt 1952), from the likeliest token down and at random within each token:
  even on (0, 1) if the tokens follow p. Kolmogorov and Smirnov's test finds what z does not ask for, such as a wrong
  temperature or truncation.

Probabilities are transformers' own: its logits processors in float64, not `fastdraft.sampling`.

Shapes: N tokens, V usable vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from fastdraft.audit.report import Difference, Sampled
from fastdraft.config import SamplingParams

__all__ = ["Rows", "critical", "differences", "join", "kolmogorov", "read", "tail", "weigh"]

CHUNK = 64  # rows of float64 probabilities in memory at once
MANY = 10.0  # the variance from which a sum of bounded terms is taken for normal


class Rows(NamedTuple):
    """What each token says.

    Attributes:
        inside_N: 1 where the token is in S_t.
        mass_N: p_t(S_t).
        draft_mass_N: q_t(S_t).
        transform_N: The token's place on (0, 1).
        outside_N: 1 where p gives the token no chance.
        impossible_N: 1 where that is so even with its logit raised by what rounding explains.
    """

    inside_N: Tensor
    mass_N: Tensor
    draft_mass_N: Tensor
    transform_N: Tensor
    outside_N: Tensor
    impossible_N: Tensor


def read(
    logits_NV: Tensor,
    draft_NV: Tensor | None,
    token_N: Tensor,
    guess_N: Tensor,
    uniform_N: Tensor,
    params: SamplingParams,
    reach: float,
) -> Rows:
    """Reads tokens one by one.

    Args:
        logits_NV: The target's, where each token was drawn.
        draft_NV: A draft model's at the same places; -inf where it has none. None without a draft model.
        token_N: The tokens that came out.
        guess_N: The token that a lookup had drafted there, a point mass; -1 where none had.
        uniform_N: float64 on (0, 1), drawn for this.
        params: Resolved, sampled, without penalties.
        reach: How far rounding may move a logit.
    """
    return join(
        [
            _read(
                logits_NV[some],
                None if draft_NV is None else draft_NV[some],
                token_N[some, None],
                guess_N[some, None],
                uniform_N[some],
                params,
                reach,
            )
            for some in _chunks(len(token_N))
        ]
    )


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(first, first + CHUNK) for first in range(0, rows, CHUNK))


def _read(
    logits_NV: Tensor,
    draft_NV: Tensor | None,
    token_N1: Tensor,
    guess_N1: Tensor,
    uniform_N: Tensor,
    params: SamplingParams,
    reach: float,
) -> Rows:
    p_NV = _law(logits_NV, params)
    q_NV = torch.zeros_like(p_NV) if draft_NV is None else _law(draft_NV, params).nan_to_num(0.0)
    guessed_N1 = guess_N1 >= 0
    point_NV = torch.zeros_like(p_NV).scatter(1, guess_N1.clamp(min=0), 1.0)
    q_NV = torch.where(guessed_N1, point_NV, q_NV)
    liked_NV = q_NV > p_NV
    p_N1 = p_NV.gather(1, token_N1)
    ids_V = torch.arange(p_NV.shape[1], device=p_NV.device)
    before_NV = (p_NV > p_N1) | ((p_NV == p_N1) & (ids_V < token_N1))
    transform_N = (p_NV * before_NV).sum(-1) + uniform_N * p_N1[:, 0]
    raised_NV = logits_NV.double().scatter_add(1, token_N1, torch.full_like(p_N1, reach))
    return Rows(
        liked_NV.gather(1, token_N1)[:, 0].double(),
        (p_NV * liked_NV).sum(-1),
        (q_NV * liked_NV).sum(-1),
        transform_N.clamp(max=1.0),
        (p_N1[:, 0] == 0).double(),
        (_law(raised_NV, params).gather(1, token_N1)[:, 0] == 0).double(),
    )


def _law(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """The sampled distribution in float64, by transformers' processors in transformers' order."""
    assert params.temperature and params.top_k is not None and params.top_p is not None and params.min_p is not None
    steps: list[theirs.LogitsProcessor] = [theirs.TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k:
        steps.append(theirs.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(theirs.TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0:
        steps.append(theirs.MinPLogitsWarper(float(params.min_p)))
    scores_NV = logits_NV.double()
    for step in steps:
        scores_NV = step(None, scores_NV)
    return scores_NV.softmax(-1)


def join(parts: Sequence[Rows]) -> Rows:
    """Rows one after the other."""
    return Rows(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def weigh(rows: Rows, rounding: float, level: float) -> Sampled:
    """Sums the evidence up.

    Args:
        rows: Of all tokens.
        rounding: How far off a log-probability of the sampled distribution may be, root mean square.
        level: Chance of a false alarm, for ``detectable``; each of the two statistics gets half of it.
    """
    variance = float((rows.mass_N * (1 - rows.mass_N)).sum())
    spread = math.sqrt(variance)
    found, expected = float(rows.inside_N.sum()), float(rows.mass_N.sum())
    # p(S) moves by at most p(S) (1 - p(S)) for each unit by which the logits of S and of the rest part.
    shift = rounding * variance
    z = draft_z = detectable = None
    if spread > 0:
        z = (found - expected) / spread
        drafted = float((rows.draft_mass_N - rows.mass_N).sum())
        draft_z = drafted / spread
        detectable = (critical(variance, level / 2) + shift) / drafted
    distance = _distance(rows.transform_N)
    return Sampled(
        z=z,
        z_p_value=tail(max(0.0, abs(found - expected) - shift), variance),
        found=int(found),
        expected=expected,
        variance=variance,
        draft_z=draft_z,
        detectable=detectable,
        rounding_z=rounding * spread,
        uniformity=distance,
        uniformity_p_value=kolmogorov(distance, len(rows.transform_N)),
        outside=int(rows.outside_N.sum()),
        impossible=int(rows.impossible_N.sum()),
    )


def tail(excess: float, variance: float) -> float:
    """Two-sided chance that a sum of martingale differences within 1 is this far from 0.

    Normal where the variance is that of many terms; else Freedman's inequality (1975), which always holds.
    """
    if excess == 0:
        return 1.0
    if variance >= MANY:
        return math.erfc(excess / math.sqrt(2 * variance))
    return min(1.0, 2 * math.exp(-(excess**2) / (2 * (variance + excess / 3))))


def critical(variance: float, level: float) -> float:
    """The excess whose `tail` is ``level``."""
    if variance >= MANY:
        return NormalDist().inv_cdf(1 - level / 2) * math.sqrt(variance)
    size = math.log(2 / level)
    return size / 3 + math.sqrt(size**2 / 9 + 2 * variance * size)


def _distance(transform_N: Tensor) -> float:
    """Kolmogorov and Smirnov's D between values on (0, 1) and the even distribution."""
    sorted_N = transform_N.sort().values
    count = len(sorted_N)
    step_N = torch.arange(count + 1, dtype=torch.float64, device=sorted_N.device) / count
    return max(float((step_N[1:] - sorted_N).max()), float((sorted_N - step_N[:-1]).max()))


def kolmogorov(distance: float, count: int) -> float:
    """Chance of a distance at least as large from ``count`` even values (Kolmogorov 1933, Stephens 1970)."""
    root = math.sqrt(count)
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:  # the series below converges slowly there, and the chance is 1 to twelve digits
        return 1.0
    terms = ((2 if k % 2 else -2) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))


def differences(logits_NV: Tensor, token_N: Tensor, reach: float, text: int) -> list[Difference]:
    """Greedy tokens of one text that are not the likeliest.

    Args:
        logits_NV: The target's, in its dtype.
        token_N: The tokens that came out.
        reach: How far apart two logits may be that rounding swaps.
        text: The text's number.
    """
    best_N, choice_N = logits_NV.max(-1)
    gap_N = best_N.double() - logits_NV.gather(1, token_N[:, None])[:, 0].double()
    # Two logits may be equal: then either token is the greedy one.
    found = []
    for position in (gap_N > 0).nonzero()[:, 0].tolist():
        gap, best = float(gap_N[position]), abs(float(best_N[position]))
        ulp = torch.finfo(logits_NV.dtype).eps * 2.0 ** math.floor(math.log2(best)) if best else gap
        token, expected = int(token_N[position]), int(choice_N[position])
        found.append(Difference(text, position, token, expected, gap, gap / ulp, gap <= reach))
    return found

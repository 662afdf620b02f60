"""Which drafted tokens are kept, and what comes after them, so that the output is distributed as the target's own.

Rejection (Leviathan et al. 2211.17192, Chen et al. 2302.01318): accept x with probability min(1, p(x) / (alpha q(x)));
at the first refusal draw from (p - q)+ normalised; after the last acceptance draw from p. Exact at alpha = 1 for any q
that is the distribution x was really drawn from; a deterministic proposal is a point mass, q(x) = 1.

Invariant: the token at a position is argmax(log p + Gumbel), with noise keyed by (seed, position, token), whatever was
drafted; a draft is kept while it equals it (the coupling of Daliri et al. 2408.07978).

Shapes: B requests, R packed rows (request b has len(draft b) + 1), D packed drafted positions, L lossy ones of them,
G the longest draft, V vocabulary, Q rows of all q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastdraft.round import Draft, Verdict
from fastdraft.sampling import noise
from fastdraft.sampling.best import best

__all__ = ["Trial", "choose", "draw", "verify"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One request's draft before the verify.

    Attributes:
        draft: What was proposed; its ``q_SV`` is exact.
        seed: 64-bit.
        length: Committed tokens at the round's start, prompt included.
        greedy: Temperature 0.
        invariant: Keep the target's own keyed samples (alpha must be 1).
        alpha: Acceptance leniency in (0, 1].
        rule: ``"lenience"``, or ``"threshold"`` (accept iff p / q >= alpha; not lossless even at 1).
    """

    draft: Draft
    seed: int
    length: int
    greedy: bool = False
    invariant: bool = False
    alpha: float = 1.0
    rule: Literal["lenience", "threshold"] = "lenience"

    @property
    def lossy(self) -> bool:
        return self.alpha < 1 or (self.rule == "threshold" and not self.greedy)


def draw(p_BV: Tensor, u_B: Tensor) -> Tensor:
    """Inverse-CDF samples of unnormalised rows; a token of weight 0 is never drawn.

    Args:
        p_BV: Non-negative weights, each row with a positive sum.
        u_B: float64 in (0, 1).
    """
    cdf_BV = p_BV.double().cumsum(-1)
    return torch.searchsorted(cdf_BV, (u_B * cdf_BV[:, -1])[:, None], right=True)[:, 0]


def choose(p_RV: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """argmax(log p + Gumbel(seed, position, token)) of each row; noise is made only where p > 0 if that is little.

    Args:
        p_RV: Distributions.
        seeds: One a row.
        positions: Absolute position of the token each row decides.

    Returns:
        int64 [R].
    """
    vocabulary = p_RV.shape[1]
    dense_R = (p_RV > 0).sum(-1) > vocabulary // 8
    choice_R = torch.zeros(p_RV.shape[0], dtype=torch.int64, device=p_RV.device)
    dense = dense_R.nonzero()[:, 0].tolist()
    if dense:
        gumbel_RV = noise.gumbel_rows([seeds[i] for i in dense], [positions[i] for i in dense], vocabulary, p_RV.device)
        choice_R[dense] = (p_RV[dense].double().log() + gumbel_RV).argmax(-1)
    if len(dense) < p_RV.shape[0]:
        row_N, id_N = (p_RV * ~dense_R[:, None]).nonzero(as_tuple=True)
        value_N = p_RV[row_N, id_N].double().log() + noise.gumbel(seeds, positions, row_N, id_N)
        best_R = value_N.new_full((p_RV.shape[0],), -torch.inf).scatter_reduce(0, row_N, value_N, "amax")
        won_N = value_N == best_R[row_N]
        first_R = torch.full_like(choice_R, vocabulary).scatter_reduce(0, row_N[won_N], id_N[won_N], "amin")
        choice_R = torch.where(dense_R, choice_R, first_R)
    return choice_R


class _Drafted(NamedTuple):
    """Every drafted position of the batch, packed.

    Attributes:
        request: Which request each belongs to.
        offset: Its place in that request's draft.
        token_D: The drafted token.
        row_D: The row of p that judges it.
        q_row_D: Its row of ``q_QV``; -1 for a point mass.
        q_QV: The distributions of all sampled positions.
        first_B: The first row of each request.
    """

    request: list[int]
    offset: list[int]
    token_D: Tensor
    row_D: Tensor
    q_row_D: Tensor
    q_QV: Tensor
    first_B: Tensor


def _pack(trials: Sequence[Trial], p_RV: Tensor) -> _Drafted:
    device = p_RV.device
    request: list[int] = []
    offset: list[int] = []
    rows: list[int] = []
    q_rows: list[int] = []
    first: list[int] = []
    tokens: list[Tensor] = []
    q_all: list[Tensor] = []
    row = q_row = 0
    for b, trial in enumerate(trials):
        size, sampled = len(trial.draft), trial.draft.sampled
        first.append(row)
        request += [b] * size
        offset += range(size)
        rows += range(row, row + size)
        place = {position: q_row + s for s, position in enumerate(sampled)}
        q_rows += [place.get(i, -1) for i in range(size)]
        if size:
            tokens.append(trial.draft.tokens_G)
        if trial.draft.q_SV is not None:
            q_all.append(trial.draft.q_SV.to(p_RV.dtype))
        row += size + 1
        q_row += len(sampled)
    return _Drafted(
        request,
        offset,
        torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64, device=device),
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(q_rows, dtype=torch.int64, device=device),
        torch.cat(q_all) if q_all else p_RV.new_zeros(0, p_RV.shape[1]),
        torch.tensor(first, device=device),
    )


def verify(p_RV: Tensor, scores_RV: Tensor, trials: Sequence[Trial]) -> Verdict:
    """Decides a round for the whole batch.

    Args:
        p_RV: The target's distributions; row i of a request is what follows its first i drafted tokens.
        scores_RV: The scores they came from; read at temperature 0 with alpha < 1 only.
        trials: One a request, in the order of the rows.

    Returns:
        Accepted tokens, next token, distortion (a value for each drafted position, zero after the first rejection), and
        how likely each position was to be accepted.
    """
    device = p_RV.device
    drafted = _pack(trials, p_RV)
    request_D = torch.tensor(drafted.request, dtype=torch.int64, device=device)
    offset_D = torch.tensor(drafted.offset, dtype=torch.int64, device=device)
    invariant_B = torch.tensor([t.invariant and not t.greedy for t in trials], device=device)
    greedy_B = torch.tensor([t.greedy for t in trials], device=device)
    choice_R = _choices(p_RV, trials)

    longest = max(len(t.draft) for t in trials)
    accept_BG = torch.zeros(len(trials), longest, dtype=torch.int64, device=device)
    chance_BG = torch.zeros(len(trials), longest, dtype=torch.float64, device=device)
    if longest:
        accept_D = _accept(p_RV, scores_RV, trials, drafted)
        accept_D = torch.where(invariant_B[request_D], drafted.token_D == choice_R[drafted.row_D], accept_D)
        accept_BG[request_D, offset_D] = accept_D.long()
        chance_BG[request_D, offset_D] = _chance(p_RV, trials, drafted, accept_D)
    accepted_B = accept_BG.cumprod(-1).sum(-1)

    last_B = drafted.first_B + accepted_B
    weights_BV = _residual(p_RV[last_B], trials, drafted, accepted_B)
    next_B = best(weights_BV)
    if not all(t.greedy or t.invariant for t in trials):
        seeds, lengths = [t.seed for t in trials], [t.length for t in trials]
        u_B = noise.uniform(seeds, lengths, [0] * len(trials), noise.RESIDUAL, device)
        next_B = torch.where(greedy_B, next_B, draw(weights_BV, u_B))
    next_B = torch.where(invariant_B, choice_R[last_B], next_B)

    distortion_BG = torch.zeros(len(trials), longest, dtype=torch.float64, device=device)
    lossy = [d for d, b in enumerate(drafted.request) if trials[b].lossy]
    if lossy:
        distortion_BG[request_D[lossy], offset_D[lossy]] = _distortion(p_RV, trials, drafted, lossy)
        place_G = torch.arange(longest, device=device)
        # At temperature 0 only a changed token that was kept counts; the rejected one was replaced by the argmax.
        counted_BG = torch.where(greedy_B[:, None], place_G < accepted_B[:, None], place_G <= accepted_B[:, None])
        distortion_BG *= counted_BG
    return Verdict(accepted_B, next_B, distortion_BG, chance_BG)


def _choices(p_RV: Tensor, trials: Sequence[Trial]) -> Tensor:
    """Invariant choices of the rows of invariant requests; 0 elsewhere."""
    choice_R = torch.zeros(p_RV.shape[0], dtype=torch.int64, device=p_RV.device)
    rows: list[int] = []
    seeds: list[int] = []
    positions: list[int] = []
    first = 0
    for trial in trials:
        size = len(trial.draft) + 1
        if trial.invariant and not trial.greedy:
            rows += range(first, first + size)
            seeds += [trial.seed] * size
            positions += range(trial.length, trial.length + size)
        first += size
    if rows:
        choice_R[rows] = choose(p_RV if len(rows) == len(p_RV) else p_RV[rows], seeds, positions)
    return choice_R


def _accept(p_RV: Tensor, scores_RV: Tensor, trials: Sequence[Trial], drafted: _Drafted) -> Tensor:
    """Whether each drafted token would be kept if those before it are."""
    mine = [trials[b] for b in drafted.request]
    token_D, row_D, q_row_D = drafted.token_D, drafted.row_D, drafted.q_row_D
    p_D = p_RV[row_D, token_D].double()
    q_D = torch.ones_like(p_D)
    if len(drafted.q_QV):
        q_D = torch.where(q_row_D >= 0, drafted.q_QV[q_row_D.clamp(min=0), token_D].double(), q_D)
    alpha_D = p_D.new_tensor([t.alpha for t in mine])
    if all(t.greedy for t in mine):
        u_D = torch.full_like(p_D, 0.5)  # p is 0 or 1: no chance is involved
    else:
        u_D = noise.uniform([t.seed for t in mine], [t.length for t in mine], drafted.offset, noise.ACCEPT, p_RV.device)
    accept_D = u_D * alpha_D * q_D < p_D
    threshold_D = torch.tensor([t.rule == "threshold" for t in mine], device=p_RV.device)
    accept_D = torch.where(threshold_D, (p_D >= alpha_D * q_D) & (p_D > 0), accept_D)
    strict_D = torch.tensor([t.greedy and t.alpha == 1 for t in mine], device=p_RV.device)
    accept_D = torch.where(strict_D, p_D > 0, accept_D)
    lenient = [d for d, t in enumerate(mine) if t.greedy and t.alpha < 1]
    if lenient:
        row, token = row_D[lenient], token_D[lenient]
        share = (scores_RV[row, token] - scores_RV[row].amax(-1)).double().exp()
        accept_D[lenient] = share >= alpha_D[lenient]
    return accept_D


def _chance(p_RV: Tensor, trials: Sequence[Trial], drafted: _Drafted, accept_D: Tensor) -> Tensor:
    """How likely each drafted position was to be accepted: the mass of min(q, p / alpha) under lenience.

    Where no chance is left once p is known (temperature 0, invariant, threshold), whether it was.
    """
    chance_D = accept_D.double()
    drawn = [
        d
        for d, b in enumerate(drafted.request)
        if not (trials[b].greedy or trials[b].invariant or trials[b].rule == "threshold")
    ]
    if drawn:
        row_N, q_row_N, token_N = drafted.row_D[drawn], drafted.q_row_D[drawn], drafted.token_D[drawn]
        alpha_N = p_RV.new_tensor([trials[drafted.request[d]].alpha for d in drawn])
        kept_N = (p_RV[row_N, token_N] / alpha_N).clamp(max=1)  # a point mass
        if len(drafted.q_QV):
            q_NV, p_NV = drafted.q_QV[q_row_N.clamp(min=0)], p_RV[row_N] / alpha_N[:, None]
            kept_N = torch.where(q_row_N >= 0, torch.minimum(q_NV, p_NV).sum(-1), kept_N)
        chance_D[drawn] = kept_N.double()
    return chance_D


def _residual(p_BV: Tensor, trials: Sequence[Trial], drafted: _Drafted, accepted_B: Tensor) -> Tensor:
    """Weights of the next token: (p - q)+ after a rejection (p where that underflows), p after full acceptance."""
    token_D, q_row_D = drafted.token_D, drafted.q_row_D
    if not len(token_D):
        return p_BV
    rejected_B = accepted_B < torch.tensor([len(t.draft) for t in trials], device=p_BV.device)
    # The drafted position that was refused; any in range where none was.
    start_B = drafted.first_B - torch.arange(len(trials), device=p_BV.device)
    place_B = (start_B + accepted_B).clamp(max=len(token_D) - 1)
    token_B1 = token_D[place_B][:, None]
    point_B1 = (rejected_B & (q_row_D[place_B] < 0))[:, None]
    rest_BV = p_BV.scatter(1, token_B1, p_BV.gather(1, token_B1).masked_fill(point_B1, 0))
    sampled = (rejected_B & (q_row_D[place_B] >= 0)).nonzero()[:, 0]
    if len(sampled):
        rest_BV[sampled] = (p_BV[sampled] - drafted.q_QV[q_row_D[place_B[sampled]]]).clamp(min=0)
    return torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)


def _distortion(p_RV: Tensor, trials: Sequence[Trial], drafted: _Drafted, lossy: list[int]) -> Tensor:
    """Total variation between what a position emits and p, for the lossy drafted positions.

    The emitted law is m = A + (1 - sum A) r with A = q times the acceptance probability and r the normalised residual;
    at temperature 0 it is 1 where the token is not the argmax, for each changed token that is kept.
    """
    mine = [trials[drafted.request[d]] for d in lossy]
    p_LV, token_L1 = p_RV[drafted.row_D[lossy]].double(), drafted.token_D[lossy][:, None]
    q_LV = torch.zeros_like(p_LV).scatter(1, token_L1, 1.0)
    row_L = drafted.q_row_D[lossy]
    if len(drafted.q_QV):
        q_LV = torch.where((row_L >= 0)[:, None], drafted.q_QV[row_L.clamp(min=0)].double(), q_LV)
    alpha_L1 = p_LV.new_tensor([t.alpha for t in mine])[:, None]
    threshold_L1 = torch.tensor([t.rule == "threshold" for t in mine], device=p_LV.device)[:, None]
    over_LV = q_LV * ((p_LV >= alpha_L1 * q_LV) & (p_LV > 0))
    kept_LV = torch.where(threshold_L1, over_LV, torch.minimum(q_LV, p_LV / alpha_L1))
    rest_LV = (p_LV - q_LV).clamp(min=0)
    total_L1 = rest_LV.sum(-1, keepdim=True)
    rest_LV = torch.where(total_L1 > 0, rest_LV / total_L1.clamp(min=1e-300), p_LV)
    emitted_LV = kept_LV + (1 - kept_LV.sum(-1, keepdim=True)) * rest_LV
    delta_L = 0.5 * (emitted_LV - p_LV).abs().sum(-1)
    greedy_L = torch.tensor([t.greedy for t in mine], device=p_LV.device)
    changed_L = (p_LV.gather(1, token_L1)[:, 0] == 0).double()
    return torch.where(greedy_L, changed_L, delta_L)

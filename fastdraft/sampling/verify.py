"""Which drafted tokens are kept, and what comes after them, so that the output is distributed as the target's own.

Rejection (Leviathan et al. 2211.17192, Chen et al. 2302.01318): accept x with probability min(1, p(x) / (alpha q(x)));
at the first refusal draw from (p - q)+ normalised; after the last acceptance draw from p. Exact at alpha = 1 for any q
that is the distribution x was really drawn from; a deterministic proposal is a point mass, q(x) = 1.

Invariant: the token at a position is argmax(log p + Gumbel), with noise keyed by (seed, position, token), whatever was
drafted; a draft is kept while it equals it (the coupling of Daliri et al. 2408.07978).

Shapes: B requests, R packed rows (request b has len(draft b) + 1), D packed drafted positions, G the longest draft,
V vocabulary, Q rows of all q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastdraft.round import Draft, Verdict
from fastdraft.sampling import noise

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


def verify(p_RV: Tensor, scores_RV: Tensor, trials: Sequence[Trial]) -> Verdict:
    """Decides a round for the whole batch.

    Args:
        p_RV: The target's distributions; row i of a request is what follows its first i drafted tokens.
        scores_RV: The scores they came from; read at temperature 0 with alpha < 1 only.
        trials: One a request, in the order of the rows.

    Returns:
        Accepted tokens, next token and distortion (a value for each drafted position, zero after the first rejection).
    """
    device = p_RV.device
    sizes = [len(t.draft) for t in trials]
    B, G = len(trials), max(sizes)
    first = [sum(sizes[:b]) + b for b in range(B)]
    first_B = torch.tensor(first, device=device)
    request = [b for b, size in enumerate(sizes) for _ in range(size)]
    offset = [i for size in sizes for i in range(size)]
    invariant_B = torch.tensor([t.invariant and not t.greedy for t in trials], device=device)
    greedy_B = torch.tensor([t.greedy for t in trials], device=device)
    choice_R = _choices(p_RV, trials, sizes, first)

    accepted_B = torch.zeros(B, dtype=torch.int64, device=device)
    q_QV, q_row_D, token_D, row_D = _drafted(trials, sizes, first, p_RV)
    request_D, offset_D = torch.tensor(request, device=device), torch.tensor(offset, device=device)
    if G:
        accept_D = _accept(p_RV, scores_RV, trials, request, offset, q_QV, q_row_D, token_D, row_D)
        accept_D = torch.where(invariant_B[request_D], token_D == choice_R[row_D], accept_D)
        accept_BG = torch.zeros(B, G, dtype=torch.int64, device=device)
        accept_BG[request_D, offset_D] = accept_D.long()
        accepted_B = accept_BG.cumprod(-1).sum(-1)

    last_B = first_B + accepted_B
    weights_BV = _residual(p_RV[last_B], trials, sizes, first, accepted_B, q_QV, q_row_D, token_D)
    next_B = weights_BV.argmax(-1)
    if not all(t.greedy or t.invariant for t in trials):
        u_B = noise.uniform([t.seed for t in trials], [t.length for t in trials], [0] * B, noise.RESIDUAL, device)
        next_B = torch.where(greedy_B, next_B, draw(weights_BV, u_B))
    next_B = torch.where(invariant_B, choice_R[last_B], next_B)

    distortion_BG = torch.zeros(B, G, dtype=torch.float64, device=device)
    if G and any(t.lossy for t in trials):
        lossy = [d for d, b in enumerate(request) if trials[b].lossy]
        delta_D = _distortion(p_RV, trials, request, q_QV, q_row_D, token_D, row_D, lossy)
        distortion_BG[request_D[lossy], offset_D[lossy]] = delta_D
        reached_BG = torch.arange(G, device=device) <= accepted_B[:, None]
        # At temperature 0 only a changed token that was kept counts; the rejected one was replaced by the argmax.
        kept_BG = torch.arange(G, device=device) < accepted_B[:, None]
        distortion_BG *= torch.where(greedy_B[:, None], kept_BG, reached_BG)
    return Verdict(accepted_B, next_B, distortion_BG)


def _choices(p_RV: Tensor, trials: Sequence[Trial], sizes: list[int], first: list[int]) -> Tensor:
    """Invariant choices of the rows of invariant requests; 0 elsewhere."""
    choice_R = torch.zeros(p_RV.shape[0], dtype=torch.int64, device=p_RV.device)
    rows: list[int] = []
    seeds: list[int] = []
    positions: list[int] = []
    for trial, size, start in zip(trials, sizes, first, strict=True):
        if trial.invariant and not trial.greedy:
            rows += range(start, start + size + 1)
            seeds += [trial.seed] * (size + 1)
            positions += range(trial.length, trial.length + size + 1)
    if rows:
        choice_R[rows] = choose(p_RV if len(rows) == len(p_RV) else p_RV[rows], seeds, positions)
    return choice_R


def _drafted(
    trials: Sequence[Trial], sizes: list[int], first: list[int], p_RV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All q rows; for each drafted position its q row (-1: point mass), its token and its row of p."""
    device = p_RV.device
    q_rows: list[int] = []
    q_all: list[Tensor] = []
    count = 0
    for trial, size in zip(trials, sizes, strict=True):
        mine = [-1] * size
        if trial.draft.q_SV is not None:
            for s, position in enumerate(trial.draft.sampled):
                mine[position] = count + s
            q_all.append(trial.draft.q_SV.to(p_RV.dtype))
            count += len(trial.draft.sampled)
        q_rows += mine
    q_QV = torch.cat(q_all) if q_all else p_RV.new_zeros(0, p_RV.shape[1])
    tokens = [t.draft.tokens_G for t in trials if len(t.draft)]
    token_D = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64, device=device)
    rows = [start + i for start, size in zip(first, sizes, strict=True) for i in range(size)]
    return (
        q_QV,
        torch.tensor(q_rows, dtype=torch.int64, device=device),
        token_D,
        torch.tensor(rows, device=device),
    )


def _accept(
    p_RV: Tensor,
    scores_RV: Tensor,
    trials: Sequence[Trial],
    request: list[int],
    offset: list[int],
    q_QV: Tensor,
    q_row_D: Tensor,
    token_D: Tensor,
    row_D: Tensor,
) -> Tensor:
    """Whether each drafted token would be kept if those before it are."""
    p_D = p_RV[row_D, token_D].double()
    q_D = torch.ones_like(p_D)
    sampled_D = q_row_D >= 0
    if len(q_QV):
        q_D = torch.where(sampled_D, q_QV[q_row_D.clamp(min=0), token_D].double(), q_D)
    alpha_D = p_D.new_tensor([trials[b].alpha for b in request])
    if all(trials[b].greedy for b in request):
        u_D = torch.full_like(p_D, 0.5)  # p is 0 or 1: no chance is involved
    else:
        seeds, lengths = [trials[b].seed for b in request], [trials[b].length for b in request]
        u_D = noise.uniform(seeds, lengths, offset, noise.ACCEPT, p_RV.device)
    accept_D = u_D * alpha_D * q_D < p_D
    threshold = [trials[b].rule == "threshold" for b in request]
    if any(threshold):
        over_D = (p_D >= alpha_D * q_D) & (p_D > 0)
        accept_D = torch.where(torch.tensor(threshold, device=p_RV.device), over_D, accept_D)
    lenient = [d for d, b in enumerate(request) if trials[b].greedy and trials[b].alpha < 1]
    if lenient:
        row, token = row_D[lenient], token_D[lenient]
        share = (scores_RV[row, token] - scores_RV[row].amax(-1)).double().exp()
        accept_D[lenient] = share >= alpha_D[lenient]
    strict = [d for d, b in enumerate(request) if trials[b].greedy and trials[b].alpha == 1]
    if strict:
        accept_D[strict] = p_D[strict] > 0
    return accept_D


def _residual(
    p_BV: Tensor,
    trials: Sequence[Trial],
    sizes: list[int],
    first: list[int],
    accepted_B: Tensor,
    q_QV: Tensor,
    q_row_D: Tensor,
    token_D: Tensor,
) -> Tensor:
    """Weights of the next token: (p - q)+ after a rejection (p where that underflows), p after full acceptance."""
    size_B = torch.tensor(sizes, device=p_BV.device)
    rejected_B = accepted_B < size_B
    if not len(token_D):
        return p_BV
    # The drafted position that was refused, anything in range where none was.
    start_B = torch.tensor([f - b for b, f in enumerate(first)], device=p_BV.device)
    place_B = (start_B + accepted_B).clamp(max=len(token_D) - 1)
    rest_BV = p_BV.clone()
    point_B = rejected_B & (q_row_D[place_B] < 0)
    rest_BV.scatter_(
        1,
        token_D[place_B][:, None],
        torch.where(point_B, 0.0, rest_BV.gather(1, token_D[place_B][:, None])[:, 0])[:, None],
    )
    sampled_B = (rejected_B & (q_row_D[place_B] >= 0)).nonzero()[:, 0]
    if len(sampled_B):
        rest_BV[sampled_B] = (p_BV[sampled_B] - q_QV[q_row_D[place_B[sampled_B]]]).clamp(min=0)
    empty_B1 = rest_BV.sum(-1, keepdim=True) <= 0
    return torch.where(empty_B1, p_BV, rest_BV)


def _distortion(
    p_RV: Tensor,
    trials: Sequence[Trial],
    request: list[int],
    q_QV: Tensor,
    q_row_D: Tensor,
    token_D: Tensor,
    row_D: Tensor,
    lossy: list[int],
) -> Tensor:
    """Total variation between what a position emits and p, for the lossy drafted positions.

    The emitted law is m = A + (1 - sum A) r with A = q times the acceptance probability and r the normalised residual;
    at temperature 0 it is 1 where the token is not the argmax, for each changed token that is kept.
    """
    p_LV, token_L = p_RV[row_D[lossy]].double(), token_D[lossy]
    q_LV = torch.zeros_like(p_LV).scatter_(1, token_L[:, None], 1.0)
    row_L = q_row_D[lossy]
    if len(q_QV):
        q_LV = torch.where((row_L >= 0)[:, None], q_QV[row_L.clamp(min=0)].double(), q_LV)
    alpha_L1 = p_LV.new_tensor([trials[request[d]].alpha for d in lossy])[:, None]
    threshold_L1 = torch.tensor([trials[request[d]].rule == "threshold" for d in lossy], device=p_LV.device)[:, None]
    over_LV = q_LV * ((p_LV >= alpha_L1 * q_LV) & (p_LV > 0))
    kept_LV = torch.where(threshold_L1, over_LV, torch.minimum(q_LV, p_LV / alpha_L1))
    rest_LV = (p_LV - q_LV).clamp(min=0)
    total_L1 = rest_LV.sum(-1, keepdim=True)
    rest_LV = torch.where(total_L1 > 0, rest_LV / total_L1.clamp(min=1e-300), p_LV)
    emitted_LV = kept_LV + (1 - kept_LV.sum(-1, keepdim=True)) * rest_LV
    delta_L = 0.5 * (emitted_LV - p_LV).abs().sum(-1)
    greedy_L = torch.tensor([trials[request[d]].greedy for d in lossy], device=p_LV.device)
    changed_L = (p_LV.gather(1, token_L[:, None])[:, 0] == 0).double()
    return torch.where(greedy_L, changed_L, delta_L)

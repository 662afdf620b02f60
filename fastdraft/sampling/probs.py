"""From a model's logits to the distribution that is sampled; the same for target and draft, speculative and plain.

Order, transformers' own: penalties and bias, bans, temperature, top_k, top_p over the renormalised rest,
min_p, softmax.

Shapes: R packed rows, V vocabulary, K candidates, G drafted tokens, U distinct tokens of a history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdraft.config import SamplingParams
from fastdraft.sampling.best import best

__all__ = ["History", "Warp", "logprobs", "probs", "scores"]

# Candidates of a partial top-k. A nucleus is nearly always smaller; where it is not, the row is sorted whole.
CANDIDATES = 1024
_TIES = 32


@dataclass(frozen=True, slots=True)
class Warp:
    """How one request shapes its distribution, compiled from its resolved parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ends: tuple[int, ...] = ()

    @classmethod
    def compile(cls, params: SamplingParams, eos: Sequence[int], vocabulary: int) -> Warp:
        """Compiles resolved parameters.

        Args:
            params: Every sampled field is set.
            eos: End-of-sequence ids of the model.
            vocabulary: Usable ids.
        """
        assert params.temperature is not None and params.top_k is not None and params.top_p is not None
        assert params.min_p is not None and params.repetition_penalty is not None
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        return cls(
            temperature=params.temperature,
            top_k=params.top_k if params.top_k < vocabulary else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias=tuple(sorted(params.logit_bias.items())),
            min_tokens=params.min_tokens,
            ends=tuple(sorted(t for t in ends if t < vocabulary)),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class History:
    """What came before each of one request's consecutive rows: row i sees ``draft_G[: first + i]``.

    Attributes:
        warp: How the request shapes its distribution.
        prompt: Prompt tokens.
        generated: Committed tokens after the prompt.
        draft_G: Drafted tokens of this round, int64 on the logits' device.
        first: Drafted tokens before the first row.
        rows: Rows of the packed matrix that belong to the request.
    """

    warp: Warp
    prompt: Sequence[int]
    generated: Sequence[int]
    draft_G: Tensor
    first: int
    rows: int


def scores(logits_RV: Tensor, histories: Sequence[History]) -> Tensor:
    """Logits with penalties, bias and bans: all that depends on history.

    Args:
        logits_RV: Raw logits, the histories' rows in order.
        histories: One a request; their rows sum to R.

    Returns:
        [R, V] in float32 or better; a new tensor wherever something changed.
    """
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    scores_RV = logits_RV.to(wide)
    row, owned = 0, scores_RV is not logits_RV
    for history in histories:
        warp = history.warp
        short = warp.min_tokens - len(history.generated) - history.first
        if warp.penalised or warp.bias or (short > 0 and warp.ends):
            if not owned:
                scores_RV, owned = scores_RV.clone(), True
            rows_RV = scores_RV[row : row + history.rows]
            if warp.penalised:
                _penalise(rows_RV, history)
            if warp.bias:
                ids, values = zip(*warp.bias, strict=True)
                index = torch.tensor(ids, device=rows_RV.device)
                rows_RV[:, index] += torch.tensor(values, dtype=wide, device=rows_RV.device)
            if short > 0 and warp.ends:
                rows_RV[:short, torch.tensor(warp.ends, device=rows_RV.device)] = -math.inf
        row += history.rows
    assert row == logits_RV.shape[0], (row, logits_RV.shape)
    return scores_RV


def _penalise(scores_RV: Tensor, history: History) -> None:
    """Applies the penalties in place, on the tokens of the history alone.

    Repetition counts prompt and generated tokens; presence and frequency count generated ones. Both count the drafted
    tokens before the row, so that a drafted position is penalised as it will be when it is committed.
    """
    warp, device = history.warp, scores_RV.device
    drafted = history.first + history.rows - 1
    known = torch.tensor([*history.prompt, *history.generated], dtype=torch.int64, device=device)
    id_U, where = torch.unique(torch.cat([known, history.draft_G[:drafted]]), return_inverse=True)
    prompt, generated = len(history.prompt), len(history.generated)
    seen_U = torch.zeros(len(id_U), dtype=scores_RV.dtype, device=device)
    seen_U[where[:prompt]] = 1
    count_U = torch.zeros_like(seen_U)
    count_U.index_add_(0, where[prompt : prompt + generated], torch.ones(generated, dtype=seen_U.dtype, device=device))
    count_RU = count_U.repeat(history.rows, 1)
    for i in range(drafted):
        count_RU[max(0, i + 1 - history.first) :, where[prompt + generated + i]] += 1
    old_RU = scores_RV[:, id_U]
    new_RU = old_RU
    if warp.repetition_penalty != 1:
        penalty = warp.repetition_penalty
        scaled_RU = torch.where(old_RU > 0, old_RU / penalty, old_RU * penalty)
        new_RU = torch.where((seen_U + count_RU) > 0, scaled_RU, old_RU)
    new_RU = new_RU - warp.frequency_penalty * count_RU - warp.presence_penalty * count_RU.clamp(max=1)
    scores_RV[:, id_U] = new_RU


def probs(scores_RV: Tensor, warps: Sequence[Warp]) -> Tensor:
    """The distribution each row is sampled from.

    Args:
        scores_RV: From `scores`.
        warps: One a row.

    Returns:
        [R, V] in the dtype of the scores; a row at temperature 0 is one-hot at its argmax.
    """
    if all(warp.greedy for warp in warps):
        return torch.zeros_like(scores_RV).scatter_(1, best(scores_RV)[:, None], 1)
    shifted_RV = scores_RV - scores_RV.amax(-1, keepdim=True)  # first, so that tiny temperatures don't overflow
    if any(not warp.greedy and warp.temperature != 1 for warp in warps):
        least = torch.finfo(shifted_RV.dtype).tiny  # a smaller one would be 0 in this dtype
        temperature = [1.0 if warp.greedy else max(warp.temperature, least) for warp in warps]
        shifted_RV = shifted_RV / shifted_RV.new_tensor(temperature)[:, None]
    truncated = [i for i, warp in enumerate(warps) if warp.truncates]
    plain = [i for i, warp in enumerate(warps) if not warp.truncates and not warp.greedy]
    if len(plain) == len(warps):
        return torch.softmax(shifted_RV, -1)
    p_RV = torch.zeros_like(shifted_RV)
    greedy = [i for i, warp in enumerate(warps) if warp.greedy]
    if greedy:
        p_RV[greedy, best(shifted_RV[greedy])] = 1
    if plain:
        p_RV[plain] = torch.softmax(shifted_RV[plain], -1)
    if truncated:
        rows = [warps[i] for i in truncated]
        whole = len(truncated) == len(warps)
        # A few more than top_k leave room for ties, and are found sooner than many.
        most = max(warp.top_k or CANDIDATES for warp in rows)
        candidates = min(CANDIDATES, most + _TIES)
        _truncate(p_RV, shifted_RV if whole else shifted_RV[truncated], truncated, rows, candidates)
    return p_RV


def _truncate(p_RV: Tensor, logits_RV: Tensor, rows: list[int], warps: Sequence[Warp], candidates: int) -> None:
    """Writes truncated distributions into rows of ``p_RV``; rows whose support may exceed the candidates sort whole."""
    vocabulary = logits_RV.shape[1]
    k = min(candidates, vocabulary)
    value_RK, id_RK = logits_RV.topk(k, dim=-1)
    limit = value_RK.new_tensor([w.top_k or vocabulary for w in warps]).long()
    # Ties with the k-th value stay, as in transformers.
    kth_R1 = value_RK.gather(1, (limit.clamp(max=k) - 1)[:, None])
    limited_R1 = (limit <= k)[:, None]
    keep_RK = (~limited_R1 | (value_RK >= kth_R1)) & (value_RK > -math.inf)
    tied_R = limited_R1[:, 0] & keep_RK[:, -1]  # perhaps with tokens beyond the candidates
    value64_RK = value_RK.double()
    total_R1 = torch.where(
        limited_R1,
        value64_RK.masked_fill(~keep_RK, -math.inf).logsumexp(-1, keepdim=True),
        logits_RV.logsumexp(-1, keepdim=True).double(),
    )
    mass_RK = (value64_RK - total_R1).exp()
    before_RK = mass_RK.cumsum(-1) - mass_RK
    top_p_R1 = before_RK.new_tensor([w.top_p for w in warps])[:, None]
    # A token stays while the likelier ones hold less than top_p, so the first always stays.
    keep_RK &= (before_RK < top_p_R1) | (top_p_R1 >= 1)
    min_p = [math.log(w.min_p) if w.min_p > 0 else -math.inf for w in warps]
    keep_RK &= value64_RK - value64_RK[:, :1] >= value64_RK.new_tensor(min_p)[:, None]
    keep_RK[:, 0] = True
    if k < vocabulary:
        # What may reach beyond the candidates: a kept last one, or a top_k whose mass they don't hold.
        open_R = (tied_R | keep_RK[:, -1] | ((limit > k) & (limit < vocabulary))).nonzero()[:, 0].tolist()
        if open_R:
            _truncate(p_RV, logits_RV[open_R], [rows[i] for i in open_R], [warps[i] for i in open_R], vocabulary)
            done = [i for i in range(len(rows)) if i not in set(open_R)]
            if not done:
                return
            rows, value_RK, id_RK, keep_RK = (
                [rows[i] for i in done],
                value_RK[done],
                id_RK[done],
                keep_RK[done],
            )
    index = torch.tensor(rows, device=p_RV.device)[:, None]
    p_RV[index, id_RK] = torch.softmax(value_RK.masked_fill(~keep_RK, -math.inf), -1)


def logprobs(logits_RV: Tensor, token_R: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own log-softmax, before everything above.

    Args:
        logits_RV: Raw logits.
        token_R: The token chosen at each row.
        top: How many of the likeliest to return; 0 for none.

    Returns:
        Log-probability of each token [R], log-probabilities [R, top] and ids [R, top] of the likeliest, best first.
    """
    wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)).log_softmax(-1)
    chosen_R = wide_RV.gather(1, token_R[:, None])[:, 0]
    value_RK, id_RK = wide_RV.topk(min(top, wide_RV.shape[1]), dim=-1)
    return chosen_R, value_RK, id_RK

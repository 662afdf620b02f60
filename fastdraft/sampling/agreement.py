"""How far a draft agrees with its target, read off both models' logits over the target's own output.

Shapes: T tokens of an output, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdraft.sampling.probs import History, Warp, probs, scores

__all__ = ["acceptance", "jaccard", "total_variation"]


def acceptance(target_TV: Tensor, draft_TV: Tensor, token_T: Tensor, prompt: Sequence[int], warp: Warp) -> list[float]:
    """The chance that a token drafted at each place is accepted, all before it being the output's own.

    Greedy: 1 where the draft's token is the output's, else 0. Sampled: the sum of min(p, q), which is what rejection
    sampling accepts at (Leviathan et al. 2023). Both under the penalties, temperature and truncation of the call.

    Args:
        target_TV: The target's logits where each token was drawn.
        draft_TV: The draft's at the same places; -inf where it has no such token.
        token_T: The output.
        prompt: Tokens before it, for penalties.
        warp: How the call shapes its distributions.
    """
    q_TV = _law(draft_TV, token_T, prompt, warp)
    if warp.greedy:
        return q_TV.gather(1, token_T[:, None])[:, 0].tolist()
    p_TV = _law(target_TV, token_T, prompt, warp)
    return torch.minimum(p_TV, q_TV).sum(-1).clamp(max=1.0).tolist()


def _law(logits_TV: Tensor, token_T: Tensor, prompt: Sequence[int], warp: Warp) -> Tensor:
    """The distribution each token is drawn from: the tokens before it are its history, as those of a draft are."""
    history = History(warp, prompt, (), token_T, 0, len(token_T))
    return probs(scores(logits_TV, [history]), [warp] * len(token_T))


def jaccard(target_TV: Tensor, draft_TV: Tensor, k: int = 5) -> list[float]:
    """At each place the tokens among both models' ``k`` likeliest, over those among either's."""
    a_TK, b_TK = (logits_TV.topk(min(k, logits_TV.shape[1]), -1).indices for logits_TV in (target_TV, draft_TV))
    both_T = (a_TK[:, :, None] == b_TK[:, None, :]).sum((1, 2))
    return (both_T / (2 * a_TK.shape[1] - both_T)).tolist()


def total_variation(target_TV: Tensor, draft_TV: Tensor) -> list[float]:
    """At each place half the summed difference of both models' own distributions, at temperature 1."""
    p_TV, q_TV = (logits_TV.float().softmax(-1) for logits_TV in (target_TV, draft_TV))
    return (0.5 * (p_TV - q_TV).abs().sum(-1)).tolist()

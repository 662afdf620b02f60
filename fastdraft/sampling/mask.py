"""Scores under a grammar: what may not follow has no chance.

Shapes: R packed rows, V vocabulary, M masked rows, W words of a packed mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["forbid"]


def forbid(scores_RV: Tensor, rows: Sequence[int], bits_MW: Tensor, *, exact: Sequence[bool]) -> Tensor:
    """Scores with minus infinity where a token may not follow.

    A row of which only the best token is looked at, and whose best token is legal, stays as it is: its mask would
    change nothing that anyone sees.

    Args:
        scores_RV: From `fastdraft.sampling.probs.scores`; left as it is.
        rows: The rows that are masked.
        bits_MW: Their masks, int32 on the CPU, a bit a token, lowest bit first.
        exact: For each of them whether it is greedy and only its best token counts.

    Returns:
        ``scores_RV`` itself where nothing changes, else a copy.
    """
    wanted = list(range(len(rows)))
    if any(exact):
        best_M = scores_RV[list(rows)].argmax(-1).cpu()
        byte_M = bits_MW.view(torch.uint8).gather(1, (best_M >> 3)[:, None])[:, 0]
        legal = ((byte_M >> (best_M & 7).to(torch.uint8)) & 1).tolist()
        wanted = [m for m in wanted if not (exact[m] and legal[m])]
    if not wanted:
        return scores_RV
    out_RV = scores_RV.clone()
    place = torch.tensor([rows[m] for m in wanted], device=scores_RV.device)
    legal_MV = _unpack(bits_MW[wanted].to(scores_RV.device), scores_RV.shape[1])
    out_RV[place] = scores_RV[place].masked_fill_(~legal_MV, -math.inf)
    return out_RV


def _unpack(bits_MW: Tensor, vocabulary: int) -> Tensor:
    """One boolean a token, [M, V]."""
    power_8 = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits_MW.device)
    return (bits_MW.view(torch.uint8)[:, :, None] & power_8).ne(0).flatten(1)[:, :vocabulary]

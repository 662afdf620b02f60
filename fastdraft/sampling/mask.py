"""Scores under a grammar: what may not follow has no chance.

Shapes: R packed rows, V vocabulary, M masked rows, W words of a packed mask, N values of a byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastdraft.sampling.best import best

__all__ = ["forbid"]


def forbid(scores_RV: Tensor, rows: Sequence[int], bits_MW: Tensor, *, exact: Sequence[bool]) -> None:
    """Writes minus infinity where a token may not follow.

    A row of which only the best token is looked at, and whose best token is legal, stays as it is: its mask would
    change nothing that anyone sees.

    Args:
        scores_RV: From `fastdraft.sampling.probs.scores`; changed in place.
        rows: The rows that are masked, each once.
        bits_MW: Their masks, int32 on the CPU, a bit a token, lowest bit first.
        exact: For each of them whether it is greedy and only its best token counts.
    """
    wanted = list(range(len(rows)))
    if any(exact):
        best_M = best(scores_RV if len(rows) == len(scores_RV) else scores_RV[list(rows)]).cpu()
        byte_M = bits_MW.view(torch.uint8).gather(1, (best_M >> 3)[:, None])[:, 0]
        legal = ((byte_M >> (best_M & 7).to(torch.uint8)) & 1).tolist()
        wanted = [m for m in wanted if not (exact[m] and legal[m])]
    if not wanted:
        return
    limit_MV = _limits(bits_MW[wanted].to(scores_RV.device), scores_RV)
    for m, limit_V in zip(wanted, limit_MV, strict=True):
        row_V = scores_RV[rows[m]]
        torch.minimum(row_V, limit_V, out=row_V)


def _limits(bits_MW: Tensor, scores_RV: Tensor) -> Tensor:
    """What scores may be at most, [M, V]: anything where the bit is set. Eight at a time, out of a table."""
    byte_8 = torch.arange(8, device=bits_MW.device)
    set_N8 = (torch.arange(256, device=bits_MW.device)[:, None] >> byte_8) & 1 == 1
    limit_N8 = torch.where(set_N8, math.inf, -math.inf).to(scores_RV.dtype)
    limit_MV = limit_N8.index_select(0, bits_MW.view(torch.uint8).flatten().int()).view(len(bits_MW), -1)
    return limit_MV[:, : scores_RV.shape[1]]

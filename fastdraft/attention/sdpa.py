"""Paged attention through torch's scaled_dot_product_attention, on any device.

The query heads that share a key/value head are packed into its rows, so keys and values are never repeated; a sequence
whose blocks are consecutive is read through a view, without a copy.

Shapes: T fed tokens, S slots, H query heads, N key/value heads, G query heads a key/value head, D head size,
L positions read, Q = G x rows packed queries of a key/value head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastdraft.attention.base import Span, Step

__all__ = ["SdpaAttention"]


class SdpaAttention:
    """The reference backend; see `fastdraft.attention.base.AttentionBackend`."""

    block_size = 16

    def attend(
        self,
        q_THD: Tensor,
        k_SND: Tensor,
        v_SND: Tensor,
        step: Step,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See the protocol."""
        heads, size = v_SND.shape[1], v_SND.shape[2]
        groups = q_THD.shape[1] // heads
        out_THD = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], size)
        for index, span in enumerate(step.spans):
            low = 0 if window is None else max(0, span.past - window + 1)
            k_NLD = _read(k_SND, span, low).transpose(0, 1)
            v_NLD = _read(v_SND, span, low).transpose(0, 1)
            rows_THD = q_THD[span.first : span.first + span.rows]
            if span.past == 0 and softcap is None and (window is None or span.rows <= window):
                out_THD[span.first : span.first + span.rows] = _first_chunk(rows_THD, k_NLD, v_NLD, scaling)
                continue
            q_NQD = rows_THD.unflatten(1, (heads, groups)).permute(1, 2, 0, 3).flatten(1, 2)
            key = (index, window)
            if key not in step.masks:
                step.masks[key] = _mask(span, low, window, groups, q_THD.device)
            out_NQD = _scores_to_values(q_NQD, k_NLD, v_NLD, step.masks[key], scaling, softcap)
            out_THD[span.first : span.first + span.rows] = (
                out_NQD.unflatten(1, (groups, span.rows)).permute(2, 0, 1, 3).flatten(1, 2)
            )
        return out_THD


def _read(pool_SND: Tensor, span: Span, low: int) -> Tensor:
    """Positions low .. past + rows - 1 of one sequence: a view where its blocks are consecutive."""
    high = span.past + span.rows
    if span.start is not None:
        return pool_SND[span.start + low : span.start + high]
    assert span.slots_L is not None
    return pool_SND.index_select(0, span.slots_L[low:high])


def _first_chunk(q_THD: Tensor, k_NLD: Tensor, v_NLD: Tensor, scaling: float) -> Tensor:
    """Queries and keys are the same positions: the kernel's own causal mask skips half the work."""
    q_HTD = q_THD.transpose(0, 1)
    gqa = q_HTD.shape[0] != k_NLD.shape[0]
    out = F.scaled_dot_product_attention(
        q_HTD[None], k_NLD[None], v_NLD[None], is_causal=q_HTD.shape[1] > 1, scale=scaling, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


def _mask(span: Span, low: int, window: int | None, groups: int, device: torch.device) -> Tensor | None:
    """True where a query may read, [Q, L]; None where it may read everything."""
    high = span.past + span.rows
    if span.rows == 1:
        return None
    query = torch.arange(span.past, high, device=device)[:, None]
    place = torch.arange(low, high, device=device)[None]
    allowed = place <= query
    if window is not None:
        allowed &= place > query - window
    return allowed.repeat(groups, 1)


def _scores_to_values(
    q_NQD: Tensor, k_NLD: Tensor, v_NLD: Tensor, mask_QL: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    if softcap is None:
        out = F.scaled_dot_product_attention(q_NQD[None], k_NLD[None], v_NLD[None], attn_mask=mask_QL, scale=scaling)
        return out[0]
    scores_NQL = torch.tanh(q_NQD @ k_NLD.mT * (scaling / softcap)) * softcap
    if mask_QL is not None:
        scores_NQL = scores_NQL.masked_fill(~mask_QL, -torch.inf)
    return torch.softmax(scores_NQL, -1, dtype=torch.float32).to(v_NLD.dtype) @ v_NLD

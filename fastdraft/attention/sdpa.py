"""Paged attention through torch's scaled_dot_product_attention, on any device.

The query heads that share a key/value head are packed into its rows, so keys and values are never repeated; a sequence
whose blocks are consecutive is read through a view, without a copy.

A token attends to the same bits whether it is fed alone or verified behind others. On a CPU the kernel's sums depend on
how many positions it reads, and on its rows where fewer than four are left for a tile; so a few rows are read in pieces
that end where a block ends, what lies beyond a row masked, and rows are filled up to a multiple of four.

Shapes: T fed tokens, S slots, H query heads, N key/value heads, G query heads a key/value head, D head size,
L positions read, R rows of a piece, Q = G x R packed queries of a key/value head, and those that fill them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastdraft.attention.base import Span, Step

__all__ = ["SdpaAttention"]

_FEW = 17  # committed rows that are read in pieces; more are a prompt's
_TILE = 4  # the kernel's products of fewer rows sum in another order


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
        heads = v_SND.shape[1]
        groups = q_THD.shape[1] // heads
        if window not in step.shared:
            step.shared[window] = [
                (piece, None if piece.whole and softcap is None else _mask(piece, window, groups, q_THD))
                for span in step.spans
                for piece in _pieces(span, window, self.block_size)
            ]
        out = []
        for piece, mask_QL in step.shared[window]:
            k_NLD, v_NLD = _read(k_SND, piece).transpose(0, 1), _read(v_SND, piece).transpose(0, 1)
            rows_RHD = q_THD[piece.first : piece.first + piece.rows]
            if mask_QL is None:
                out.append(_first_chunk(rows_RHD, k_NLD, v_NLD, scaling))
                continue
            q_NQD = rows_RHD.unflatten(1, (heads, groups)).permute(1, 2, 0, 3).flatten(1, 2)
            size = q_NQD.shape[1]
            if missing := len(mask_QL) - size:
                q_NQD = F.pad(q_NQD, (0, 0, 0, missing))
            out_NQD = _scores_to_values(q_NQD, k_NLD, v_NLD, mask_QL, scaling, softcap)[:, :size]
            out.append(out_NQD.unflatten(1, (groups, piece.rows)).permute(2, 0, 1, 3).flatten(1, 2))
        return out[0] if len(out) == 1 else torch.cat(out)


class _Piece(NamedTuple):
    """Rows of one sequence that read the same positions.

    Attributes:
        span: The sequence.
        first: The first packed row.
        rows: How many.
        past: Position of the first row.
        low, high: Positions that are read; those beyond a row are masked.
        whole: The rows are all positions there are, none out of a window.
    """

    span: Span
    first: int
    rows: int
    past: int
    low: int
    high: int
    whole: bool


def _pieces(span: Span, window: int | None, block: int) -> Iterator[_Piece]:
    """A few rows in pieces whose bounds do not depend on the rows beside them; more of a prompt as one piece."""
    position, end = span.past, span.past + span.rows
    rows = span.rows - span.drafted
    if rows > _FEW:
        low = 0 if window is None else max(0, position - window + 1)
        whole = position == 0 and (window is None or rows <= window)
        position += rows
        yield _Piece(span, span.first, rows, span.past, low, position, whole)
    while position < end:
        low, stop = 0, position // block * block + block
        if window is not None and (reach := position - window + 1) > 0:
            low = reach // block * block
            stop = min(stop, low + block + window - 1)  # the first position that reads from the next block on
        last = min(stop, end)
        high = position // block * block + block
        yield _Piece(span, span.first + position - span.past, last - position, position, low, high, False)
        position = last


def _read(pool_SND: Tensor, piece: _Piece) -> Tensor:
    """The piece's positions, whatever their last block holds beyond its rows: a view of consecutive blocks."""
    span = piece.span
    if span.start is not None:
        return pool_SND[span.start + piece.low : span.start + piece.high]
    assert span.slots_L is not None
    return pool_SND.index_select(0, span.slots_L[piece.low : piece.high])


def _first_chunk(q_THD: Tensor, k_NLD: Tensor, v_NLD: Tensor, scaling: float) -> Tensor:
    """Queries and keys are the same positions: the kernel's own causal mask skips half the work."""
    q_HTD = q_THD.transpose(0, 1)
    gqa = q_HTD.shape[0] != k_NLD.shape[0]
    out = F.scaled_dot_product_attention(
        q_HTD[None], k_NLD[None], v_NLD[None], is_causal=True, scale=scaling, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


def _mask(piece: _Piece, window: int | None, groups: int, like: Tensor) -> Tensor:
    """What is added to a piece's scores, [Q, L]: 0 where a query may read, else minus infinity."""
    query = torch.arange(piece.past, piece.past + piece.rows, device=like.device)[:, None]
    place = torch.arange(piece.low, piece.high, device=like.device)[None]
    denied = place > query
    if window is not None:
        denied |= place <= query - window
    mask_RL = torch.zeros(denied.shape, dtype=like.dtype, device=like.device).masked_fill_(denied, -torch.inf)
    return F.pad(mask_RL.repeat(groups, 1), (0, 0, 0, -groups * piece.rows % _TILE))


def _scores_to_values(
    q_NQD: Tensor, k_NLD: Tensor, v_NLD: Tensor, mask_QL: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    if softcap is None:
        out = F.scaled_dot_product_attention(q_NQD[None], k_NLD[None], v_NLD[None], attn_mask=mask_QL, scale=scaling)
        return out[0]
    scores_NQL = torch.tanh(q_NQD @ k_NLD.mT * (scaling / softcap)) * softcap + mask_QL
    return torch.softmax(scores_NQL, -1, dtype=torch.float32).to(v_NLD.dtype) @ v_NLD

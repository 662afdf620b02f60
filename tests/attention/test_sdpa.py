"""A token attends to the same bits fed alone and verified behind others; what lies beyond it in its block is masked."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastdraft.attention.base import make_step
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.kv.pool import BlockPool
from fastdraft.kv.table import Table

BLOCK = SdpaAttention.block_size


class Pool(NamedTuple):
    """A layer's keys and values, and a table over all of them."""

    k_SND: Tensor
    v_SND: Tensor
    table: Table


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _pool(blocks: int, heads: int, size: int, dtype: torch.dtype, scattered: bool = False) -> Pool:
    pool = BlockPool(blocks, BLOCK)
    table = Table(pool)
    table.reserve(blocks * BLOCK)
    if scattered:
        table.blocks.reverse()
    k_SND, v_SND = (_normal(seed, blocks * BLOCK, heads, size).to(dtype) for seed in (1, 2))
    return Pool(k_SND, v_SND, table)


def _attend(
    pool: Pool,
    q_THD: Tensor,
    past: int,
    window: int | None = None,
    softcap: float | None = None,
    drafted: int = 0,
) -> Tensor:
    pool.table.length = past
    step = make_step([pool.table], [len(q_THD)], [drafted], BLOCK, q_THD.device)
    return SdpaAttention().attend(q_THD, pool.k_SND, pool.v_SND, step, scaling=0.2, window=window, softcap=softcap)


@pytest.mark.parametrize("window", (None, 24, 300))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(
    ("heads", "groups", "size"), ((2, 6, 128), (2, 7, 64), (3, 3, 64), (4, 1, 64), (1, 1, 16), (2, 2, 16), (1, 8, 256))
)
def test_a_row_has_the_same_bits_alone(
    heads: int, groups: int, size: int, dtype: torch.dtype, window: int | None
) -> None:
    chosen = random.Random(0)
    pool = _pool(80, heads, size, dtype)
    for past in (0, 3, BLOCK - 1, 2 * BLOCK, 505, *(chosen.randrange(80 * BLOCK - 17) for _ in range(8))):
        for rows in (2, 5, 17):
            q_THD = _normal(past, rows, heads * groups, size).to(dtype)
            together = _attend(pool, q_THD, past, window)
            alone = torch.cat([_attend(pool, q_THD[i : i + 1], past + i, window) for i in range(rows)])
            assert torch.equal(together, alone), (past, rows)


@pytest.mark.parametrize("past", (0, 40))
@pytest.mark.parametrize("window", (None, 24))
def test_a_prompt_has_the_same_bits_with_a_draft_behind_it(past: int, window: int | None) -> None:
    pool = _pool(12, 2, 64, torch.bfloat16)
    q_THD = _normal(0, 97, 12, 64).bfloat16()
    together = _attend(pool, q_THD, past, window, drafted=8)
    assert torch.equal(together[:89], _attend(pool, q_THD[:89], past, window))
    for row in range(89, 97):
        assert torch.equal(together[row:][:1], _attend(pool, q_THD[row:][:1], past + row, window))


@pytest.mark.parametrize(("past", "rows", "drafted"), [(0, 21, 16), (40, 21, 20), (200, 30, 16)])
def test_few_rows_have_the_same_bits_before_a_long_draft(past: int, rows: int, drafted: int) -> None:
    pool = _pool(20, 2, 64, torch.bfloat16)
    q_THD = _normal(0, rows, 12, 64).bfloat16()
    together = _attend(pool, q_THD, past, drafted=drafted)
    for row in range(rows):
        assert torch.equal(together[row:][:1], _attend(pool, q_THD[row:][:1], past + row))


@pytest.mark.parametrize("scattered", (False, True))
@pytest.mark.parametrize("softcap", (None, 5.0))
@pytest.mark.parametrize("window", (None, 1, 7, 16, 17, 40))
def test_every_shape_is_exact_attention(window: int | None, softcap: float | None, scattered: bool) -> None:
    pool = _pool(8, 2, 16, torch.float64, scattered)
    order_L = torch.arange(8 * BLOCK).view(8, BLOCK)
    order_L = (order_L.flip(0) if scattered else order_L).flatten()
    k_LHD, v_LHD = (t[order_L].repeat_interleave(3, 1) for t in (pool.k_SND, pool.v_SND))
    for past in (0, 1, 15, 16, 40):
        for rows in (1, 2, 5, 16, 17, 18, 60):
            q_THD = _normal(past, rows, 6, 16).double()
            out = _attend(pool, q_THD, past, window, softcap)
            for row in range(rows):
                low = 0 if window is None else max(0, past + row - window + 1)
                seen = slice(low, past + row + 1)
                scores_HL = torch.einsum("hd,lhd->hl", q_THD[row], k_LHD[seen]) * 0.2
                if softcap is not None:
                    scores_HL = torch.tanh(scores_HL / softcap) * softcap
                expected = torch.einsum("hl,lhd->hd", scores_HL.softmax(-1), v_LHD[seen])
                # The softcap's softmax is float32's.
                assert torch.allclose(out[row], expected, atol=1e-12 if softcap is None else 1e-6), (past, rows, row)

"""Masks on scores: what may not follow has no chance; what changes nothing is left alone."""

from __future__ import annotations

import math

import pytest
import torch

from fastdraft.sampling.mask import forbid


def _bits(legal: list[list[int]], vocabulary: int) -> torch.Tensor:
    words = -(-vocabulary // 32)
    bits_MB = torch.zeros(len(legal), words * 4, dtype=torch.uint8)
    for row, ids in enumerate(legal):
        for token in ids:
            bits_MB[row, token >> 3] |= 1 << (token & 7)
    return bits_MB.view(torch.int32)


@pytest.mark.parametrize("vocabulary", [3, 32, 33, 100])
def test_only_legal_tokens_keep_their_scores(vocabulary: int) -> None:
    scores_RV = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    kept = scores_RV.clone()
    legal = [[0, vocabulary - 1], [1]]
    forbid(scores_RV, [1, 3], _bits(legal, vocabulary), exact=[False, False])
    assert torch.equal(scores_RV[[0, 2]], kept[[0, 2]])
    for row, ids in zip((1, 3), legal, strict=True):
        assert scores_RV[row].isfinite().nonzero()[:, 0].tolist() == sorted(set(ids))
        assert torch.equal(scores_RV[row, ids], kept[row, ids])


def test_a_greedy_row_whose_best_token_is_legal_is_left_alone() -> None:
    scores_RV = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0]])
    kept = scores_RV.clone()
    forbid(scores_RV, [0, 1], _bits([[1], [1, 2]], 3), exact=[True, True])
    assert torch.equal(scores_RV, kept)
    forbid(scores_RV, [0, 1], _bits([[0, 2], [1]], 3), exact=[True, True])
    assert scores_RV.argmax(-1).tolist() == [2, 1]
    assert scores_RV[0, 1] == -math.inf and torch.equal(scores_RV[1], kept[1])


def test_a_score_that_is_no_number_is_not_hidden_and_an_infinite_one_is_forbidden() -> None:
    scores_RV = torch.tensor([[math.nan, 1.0, 2.0], [math.inf, 1.0, -math.inf]])
    forbid(scores_RV, [0, 1], _bits([[1], [1, 2]], 3), exact=[False, False])
    assert scores_RV[0].isnan().tolist() == [True, False, False]
    assert scores_RV[1].tolist() == [-math.inf, 1.0, -math.inf]

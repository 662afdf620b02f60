"""The best token is argmax's, to the first of equals."""

from __future__ import annotations

import math

import pytest
import torch

from fastdraft.sampling.best import best


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 2047, 2048, 2049, 5000, 151_936])
def test_the_best_token_is_argmax(vocabulary: int) -> None:
    chance = torch.Generator().manual_seed(vocabulary)
    scores_RV = torch.randn(40, vocabulary, generator=chance)
    assert torch.equal(best(scores_RV), scores_RV.argmax(-1))
    coarse_RV = (scores_RV * 2).round()  # ties everywhere
    assert torch.equal(best(coarse_RV), coarse_RV.argmax(-1))
    for place in (0, vocabulary // 2, vocabulary - 1):
        coarse_RV[:, place] = 100.0
        assert torch.equal(best(coarse_RV), coarse_RV.argmax(-1))
    coarse_RV[:] = -math.inf
    assert torch.equal(best(coarse_RV), coarse_RV.argmax(-1))
    coarse_RV[:, vocabulary // 3] = math.nan
    assert torch.equal(best(coarse_RV), coarse_RV.argmax(-1))
    assert best(coarse_RV[:0]).tolist() == []

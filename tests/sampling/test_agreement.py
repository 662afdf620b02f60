"""Acceptance, similarity and distance against plain loops."""

from __future__ import annotations

import torch

from fastdraft import SamplingParams
from fastdraft.precedence import resolve_params
from fastdraft.sampling.agreement import acceptance, jaccard, total_variation
from fastdraft.sampling.probs import Warp

V = 12


def logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def warp(**fields: float) -> Warp:
    params = resolve_params(None, fields, defaults=SamplingParams(), model={})
    return Warp.compile(params, (), V)


def test_greedy_acceptance_is_a_match_with_the_output():
    target, draft = logits(6, 0), logits(6, 1)
    tokens = target.argmax(-1)
    tokens[2] = draft[2].argmax()  # the output decides, not the target's dense forward
    found = acceptance(target, draft, tokens, (1, 2), warp(temperature=0.0))
    assert found == [float(draft[i].argmax() == tokens[i]) for i in range(6)]
    assert 1.0 in found and 0.0 in found


def test_sampled_acceptance_is_the_overlap_under_the_call_s_own_shaping():
    target, draft, tokens = logits(4, 2), logits(4, 3), torch.tensor([3, 3, 5, 0])
    found = acceptance(target, draft, tokens, (7,), warp(temperature=0.5, top_k=4, repetition_penalty=1.5))
    for i in range(4):
        laws = []
        for row in (target[i].clone(), draft[i].clone()):
            for seen in {7, *tokens[:i].tolist()}:
                row[seen] = row[seen] / 1.5 if row[seen] > 0 else row[seen] * 1.5
            row = row / 0.5
            row[row < row.topk(4).values[-1]] = -torch.inf
            laws.append(row.softmax(-1))
        assert abs(found[i] - float(torch.minimum(*laws).sum())) < 1e-6


def test_a_draft_without_a_token_never_proposes_it():
    target, draft = logits(3, 4), logits(3, 5)
    draft[:, 6:] = -torch.inf
    tokens = torch.tensor([8, 8, 8])
    assert acceptance(target, draft, tokens, (1,), warp(temperature=0.0)) == [0.0] * 3
    sampled = acceptance(target, draft, tokens, (1,), warp(temperature=1.0))
    kept = target.softmax(-1)[:, :6].sum(-1).tolist()
    assert all(a <= k + 1e-6 for a, k in zip(sampled, kept, strict=True))


def test_jaccard_of_sets():
    target, draft = logits(5, 6), logits(5, 7)
    for k in (1, 5):
        for i, found in enumerate(jaccard(target, draft, k)):
            a, b = (set(x[i].topk(k).indices.tolist()) for x in (target, draft))
            assert abs(found - len(a & b) / len(a | b)) < 1e-6
    assert jaccard(target, target) == [1.0] * 5


def test_total_variation():
    target, draft = logits(3, 8), logits(3, 9)
    expected = [
        0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
        for p, q in zip(target.softmax(-1).tolist(), draft.softmax(-1).tolist(), strict=True)
    ]
    assert torch.allclose(torch.tensor(total_variation(target, draft)), torch.tensor(expected), atol=1e-6)
    assert max(total_variation(target, target)) < 1e-6

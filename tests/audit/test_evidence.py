"""The statistics of an audit, on laws that are known.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fastdraft import SamplingParams
from fastdraft.audit import Sampled
from fastdraft.audit.evidence import critical, differences, kolmogorov, read, tail, weigh

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def with_(**fields: Any) -> SamplingParams:
    return PLAIN.model_copy(update=fields)


def look(
    p: list[float], token: int, *, q: list[float] | None = None, guess: int = -1, uniform: float = 0.5, **fields: Any
) -> list[float]:
    """What one token says."""
    draft_NV = None if q is None else torch.tensor([q]).log()
    rows = read(
        torch.tensor([p]).log(),
        draft_NV,
        torch.tensor([token]),
        torch.tensor([guess]),
        torch.tensor([uniform], dtype=torch.float64),
        with_(**fields),
        reach=0.1,
    )
    return [float(column[0]) for column in rows]


def drawn(count: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of a target and a draft, tokens of the target at a temperature, and numbers for the transform."""
    generator = torch.Generator().manual_seed(1)
    logits_NV = 2 * torch.randn(count, 50, generator=generator)
    draft_NV = logits_NV + torch.randn(count, 50, generator=generator)
    token_N = torch.multinomial((logits_NV / temperature).softmax(-1), 1, generator=generator)[:, 0]
    return logits_NV, draft_NV, token_N, torch.rand(count, dtype=torch.float64, generator=generator)


def weighed(logits_NV: Tensor, draft_NV: Tensor | None, token_N: Tensor, uniform_N: Tensor, **fields: Any) -> Sampled:
    nothing_N = torch.full_like(token_N, -1)
    rows = read(logits_NV, draft_NV, token_N, nothing_N, uniform_N, with_(**fields), reach=1e-3)
    return weigh(rows, rounding=0.0, level=1e-3)


def test_a_token_is_read_against_what_the_draft_likes_better():
    inside, mass, draft_mass, *_ = look([0.5, 0.3, 0.2], 1, q=[0.2, 0.4, 0.4])
    assert (inside, mass, draft_mass) == pytest.approx((1, 0.5, 0.8))
    inside, mass, draft_mass, *_ = look([0.5, 0.3, 0.2], 0, q=[0.2, 0.4, 0.4])
    assert (inside, mass, draft_mass) == pytest.approx((0, 0.5, 0.8))


def test_a_lookup_s_guess_is_a_point_mass_whatever_the_draft_model_thinks():
    assert look([0.5, 0.3, 0.2], 2, q=[0.2, 0.4, 0.4], guess=2)[:3] == pytest.approx([1, 0.2, 1])
    assert look([0.5, 0.3, 0.2], 0, guess=2)[:3] == pytest.approx([0, 0.2, 1])


def test_without_a_draft_and_beyond_its_context_nothing_is_liked_better():
    assert look([0.5, 0.3, 0.2], 1)[:3] == [0, 0, 0]
    assert look([0.5, 0.3, 0.2], 1, q=[0.0, 0.0, 0.0])[:3] == [0, 0, 0]


def test_the_transform_starts_with_the_likeliest_token():
    assert look([0.3, 0.5, 0.2], 1, uniform=0.5)[3] == pytest.approx(0.25)
    assert look([0.3, 0.5, 0.2], 0, uniform=0.0)[3] == pytest.approx(0.5)
    assert look([0.3, 0.5, 0.2], 2, uniform=1.0)[3] == pytest.approx(1.0)
    assert look([0.25, 0.5, 0.25], 2, uniform=0.0)[3] == pytest.approx(0.75)  # of equal ones the lower id


@pytest.mark.parametrize(
    ("fields", "outside"),
    [({}, 0), ({"top_k": 1}, 1), ({"top_p": 0.55}, 1), ({"min_p": 0.9}, 1), ({"top_k": 2, "top_p": 0.9}, 0)],
)
def test_truncation_and_temperature_are_transformers_own(fields: dict[str, Any], outside: int):
    assert look([0.6, 0.3, 0.1], 1, **fields)[4] == outside


def test_a_token_just_outside_is_told_from_an_impossible_one():
    assert look([0.5, 0.48, 0.02], 1, top_k=1)[4:] == [1, 0]
    assert look([0.5, 0.40, 0.10], 1, top_k=1)[4:] == [1, 1]
    assert look([0.501, 0.3, 0.199], 1, top_p=0.5)[4:] == [1, 0]  # the likelier ones hold hardly more than top_p


def test_tokens_of_the_target_pass_and_those_of_the_draft_do_not():
    logits_NV, draft_NV, token_N, uniform_N = drawn(2000)
    ours = weighed(logits_NV, draft_NV, token_N, uniform_N)
    assert not ours.faults(1e-3)
    assert not ours.weakness
    generator = torch.Generator().manual_seed(2)
    theirs = torch.multinomial(draft_NV.softmax(-1), 1, generator=generator)[:, 0]
    drafted = weighed(logits_NV, draft_NV, theirs, uniform_N)
    assert drafted.z == pytest.approx(drafted.draft_z, rel=0.2)
    assert drafted.z_p_value < 1e-9


def test_about_the_detectable_share_is_detected():
    logits_NV, draft_NV, token_N, uniform_N = drawn(2000)
    share = weighed(logits_NV, draft_NV, token_N, uniform_N).detectable
    assert 0 < share < 0.5
    generator = torch.Generator().manual_seed(2)
    theirs = torch.multinomial(draft_NV.softmax(-1), 1, generator=generator)[:, 0]
    for times, noticed in ((0.3, False), (2.0, True)):
        swapped = torch.rand(2000, generator=generator) < times * share
        mixed = weighed(logits_NV, draft_NV, torch.where(swapped, theirs, token_N), uniform_N)
        assert (mixed.z_p_value < 5e-4) == noticed


def test_the_transform_finds_a_temperature_that_z_does_not_ask_for():
    hot = weighed(*drawn(2000, temperature=1.3))
    assert hot.uniformity_p_value < 1e-9
    as_promised = weighed(*drawn(2000, temperature=1.3), temperature=1.3)
    assert as_promised.uniformity_p_value > 1e-3


def test_rounding_is_taken_from_the_excess():
    logits_NV, draft_NV, token_N, uniform_N = drawn(2000)
    nothing_N = torch.full_like(token_N, -1)
    rows = read(logits_NV, draft_NV, token_N, nothing_N, uniform_N, PLAIN, reach=1e-3)
    exact, rough = weigh(rows, rounding=0.0, level=1e-3), weigh(rows, rounding=0.1, level=1e-3)
    assert rough.z == exact.z
    assert rough.rounding_z == pytest.approx(0.1 * math.sqrt(exact.variance))
    assert rough.z_p_value == pytest.approx(math.erfc(max(0, abs(exact.z) - rough.rounding_z) / math.sqrt(2)))
    assert rough.detectable > exact.detectable


@pytest.mark.parametrize("distance", [0.005, 0.02, 0.03, 0.05])
def test_kolmogorov_is_scipy_s(distance: float):
    assert kolmogorov(distance, 2000) == pytest.approx(stats.kstwo.sf(distance, 2000), rel=0.02)


def test_tails():
    assert tail(0.0, 0.0) == 1.0
    assert tail(30.0, 100.0) == pytest.approx(2 * stats.norm.sf(3.0))
    # Rare tokens: a chance of one in a hundred, found eight times in a hundred.
    assert tail(7.0, 0.99) >= 2 * stats.binom.sf(7, 100, 0.01)
    for variance in (0.0, 0.5, 9.0, 11.0, 400.0):
        assert tail(critical(variance, 1e-3), variance) == pytest.approx(1e-3)


def test_differences_are_measured_in_units_in_the_last_place():
    logits_NV = torch.tensor([[16.0, 15.875, 3.0], [16.0, 16.0, 3.0], [5.0, 1.0, 4.5]], dtype=torch.bfloat16)
    tie, wrong = differences(logits_NV, torch.tensor([1, 1, 1]), reach=0.2, text=4)
    assert (tie.text, tie.position, tie.token, tie.expected) == (4, 0, 1, 0)
    assert (tie.gap, tie.ulps, tie.near_tie) == (0.125, 1.0, True)
    assert (wrong.position, wrong.gap, wrong.ulps, wrong.near_tie) == (2, 4.0, 128.0, False)

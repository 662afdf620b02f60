"""Distributions: transformers' own processors are the reference, row by row and in their order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdraft import SamplingParams
from fastdraft.sampling import probs as module
from fastdraft.sampling.probs import History, Warp, logprobs, probs, scores
from tests.law import reference

repeatable = settings(derandomize=True, deadline=None, max_examples=150)

TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
)
WARPS = st.builds(
    Warp,
    temperature=st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0, 1.3, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, 59]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.05, 1e-9]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    bias=st.sampled_from([(), ((3, 2.5), (8, -math.inf)), ((0, -1.0),)]),
    min_tokens=st.sampled_from([0, 2, 4]),
    ends=st.sampled_from([(), (1,), (1, 9)]),
)


def random_logits(
    rows: int, vocabulary: int, *, seed: int = 0, spread: float = 3.0, dtype: Any = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64).mul(spread).to(dtype)


def history(
    warp: Warp, prompt: Any = (), generated: Any = (), draft: Any = (), first: int = 0, rows: int = 1
) -> History:
    return History(warp, prompt, generated, torch.tensor(draft, dtype=torch.int64), first, rows)


def assert_same_law(ours: Tensor, theirs: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(ours.double(), theirs, atol=atol, rtol=1e-9 if ours.dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("vocabulary", [60, 1024, 1025, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_equals_transformers(vocabulary: int, temperature: float, truncation: dict[str, Any]) -> None:
    warp = Warp(temperature=temperature, **truncation)
    logits_RV = random_logits(4, vocabulary)
    for ours, row in zip(probs(logits_RV, [warp] * 4), logits_RV, strict=True):
        assert_same_law(ours, reference(row, warp))


@repeatable
@given(WARPS, st.integers(0, 2**31), st.lists(st.integers(0, 59), max_size=6), st.lists(st.integers(0, 59), max_size=6))
def test_equals_transformers_with_everything_on(warp: Warp, seed: int, prompt: list[int], generated: list[int]) -> None:
    logits_1V = random_logits(1, 60, seed=seed)
    ours = probs(scores(logits_1V, [history(warp, prompt, generated)]), [warp])[0]
    assert_same_law(ours, reference(logits_1V[0], warp, prompt, generated))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_float32_or_better(dtype: torch.dtype) -> None:
    warp = Warp(temperature=0.8, top_p=0.9, repetition_penalty=1.2)
    logits_RV = random_logits(3, 200, dtype=dtype)
    before = logits_RV.clone()
    scores_RV = scores(logits_RV, [history(warp, [5, 6]) for _ in range(3)])
    p_RV = probs(scores_RV, [warp] * 3)
    assert scores_RV.dtype == p_RV.dtype == torch.float32
    assert torch.equal(logits_RV, before), "the model's logits were changed"
    for ours, row in zip(p_RV, logits_RV, strict=True):
        assert_same_law(ours, reference(row, warp, [5, 6]), atol=1e-6)


# The partial top-k.


@pytest.mark.parametrize("candidates", [1, 2, 8, 64, 255])
@pytest.mark.parametrize("truncation", TRUNCATIONS[1:], ids=str)
def test_the_partial_top_k_equals_sorting_the_whole_row(
    candidates: int, truncation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Peaked rows fit the candidates, flat ones don't: both lie in one batch.
    spread = torch.logspace(-2, 1.2, 12, dtype=torch.float64)[:, None]
    logits_RV = (random_logits(12, 256, spread=1.0) * spread)[torch.randperm(12, generator=torch.Generator())]
    warps = [Warp(**truncation)] * 12
    monkeypatch.setattr(module, "CANDIDATES", 256)
    whole_RV = probs(logits_RV, warps)
    monkeypatch.setattr(module, "CANDIDATES", candidates)
    assert torch.equal(probs(logits_RV, warps) > 0, whole_RV > 0)
    torch.testing.assert_close(probs(logits_RV, warps), whole_RV, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.95}, {"min_p": 1e-4}, {"top_k": 3000}, {"top_k": 2000, "top_p": 0.9}, {"top_k": 1500, "min_p": 0.01}],
    ids=str,
)
def test_a_nucleus_beyond_the_candidates_is_still_exact(truncation: dict[str, Any]) -> None:
    warp = Warp(temperature=1.1, **truncation)
    peaked, flat = random_logits(3, 4000, spread=6.0), random_logits(3, 4000, spread=0.3)
    logits_RV = torch.stack([row for pair in zip(peaked, flat, strict=True) for row in pair])
    p_RV = probs(logits_RV, [warp] * 6)
    assert ((p_RV[1::2] > 0).sum(-1) > module.CANDIDATES).all(), "the flat rows were meant to exceed the candidates"
    for ours, row in zip(p_RV, logits_RV, strict=True):
        assert_same_law(ours, reference(row, warp))


@pytest.mark.parametrize(("top_k", "top_p"), [(1100, 0.6), (1500, 0.7), (4999, 0.5)])
def test_top_p_counts_only_what_a_top_k_beyond_the_candidates_keeps(top_k: int, top_p: float) -> None:
    logits_1V = torch.linspace(0, -10, 5000, dtype=torch.float64)[None]
    warp = Warp(top_k=top_k, top_p=top_p)
    assert_same_law(probs(logits_1V, [warp])[0], reference(logits_1V[0], warp))


def test_a_flat_row_keeps_its_share_of_equal_tokens() -> None:
    p_1V = probs(torch.zeros(1, 4000), [Warp(top_p=0.5)])
    assert 2000 <= (p_1V > 0).sum() <= 2001
    assert p_1V.sum().item() == pytest.approx(1)


# Extremes.


@pytest.mark.parametrize("temperature", [1e-8, 1e-45, 1e-46, 5e-324])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_temperatures_become_greedy(temperature: float, truncation: dict[str, Any], dtype: torch.dtype) -> None:
    logits_RV = random_logits(4, 2000, dtype=dtype)
    p_RV = probs(logits_RV, [Warp(temperature=temperature, **truncation)] * 4)
    assert torch.equal(p_RV, probs(logits_RV, [Warp(temperature=0.0)] * 4))


def test_a_tiny_temperature_shares_between_equal_maxima() -> None:
    p_1V = probs(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), [Warp(temperature=1e-8)])
    assert p_1V.tolist() == [[0, 0.5, 0.5, 0]]


def test_a_huge_temperature_is_nearly_flat_and_exact() -> None:
    logits_RV = random_logits(3, 50)
    p_RV = probs(logits_RV, [Warp(temperature=100.0, top_p=0.9)] * 3)
    assert (p_RV > 0).sum(-1).min() >= 44
    for ours, row in zip(p_RV, logits_RV, strict=True):
        assert_same_law(ours, reference(row, Warp(temperature=100.0, top_p=0.9)))


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30])
def test_logits_of_any_size_give_a_distribution(scale: float) -> None:
    p_RV = probs(random_logits(3, 50, dtype=torch.float32) * scale, [Warp(temperature=0.7, top_p=0.9)] * 3)
    assert torch.isfinite(p_RV).all()
    torch.testing.assert_close(p_RV.sum(-1), torch.ones(3))


@pytest.mark.parametrize("vocabulary", [6, 1500])
def test_ties_with_the_last_of_top_k_stay_as_in_transformers(vocabulary: int) -> None:
    logits_1V = torch.full((1, vocabulary), -1.0)
    logits_1V[0, :5] = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    warp = Warp(top_k=2)
    ours = probs(logits_1V, [warp])[0]
    assert ours.nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert_same_law(ours, reference(logits_1V[0], warp), atol=1e-6)


def test_more_ties_than_candidates_stay_too() -> None:
    logits_1V = torch.zeros(1, 3000)
    logits_1V[0, 2999] = 1.0
    assert (probs(logits_1V, [Warp(top_k=5)]) > 0).sum() == 3000


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("ties", [10, 40, 200])
def test_a_nucleus_within_ties_beyond_the_candidates_counts_all_of_them(ties: int, top_p: float) -> None:
    """In bfloat16 many tokens share a score: the mass that top_p is a share of is that of all that top_k keeps."""
    logits_1V = torch.full((1, 3000), -9.0, dtype=torch.float64)
    logits_1V[0, 5::13][:ties] = 1.0
    logits_1V[0, 7] = 1.5
    warp = Warp(top_k=5, top_p=top_p)
    ours = probs(logits_1V, [warp])[0]
    theirs = reference(logits_1V[0], warp)
    assert (ours > 0).sum() == (theirs > 0).sum()  # which of the tied ones stay is anyone's choice
    assert torch.allclose(ours.sort().values, theirs.sort().values, atol=1e-9)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("vocabulary", [12, 2000])
def test_banned_tokens_have_no_chance_and_the_rest_is_renormalised(truncation: dict[str, Any], vocabulary: int) -> None:
    banned = ((0, -math.inf), (3, -math.inf), (11, -math.inf))
    warp = Warp(bias=banned, temperature=0.9, repetition_penalty=1.3, **truncation)
    logits_RV = random_logits(3, vocabulary)
    p_RV = probs(scores(logits_RV, [history(warp, [3, 4, 11], [0, 5]) for _ in range(3)]), [warp] * 3)
    assert (p_RV[:, [0, 3, 11]] == 0).all()
    for ours, row in zip(p_RV, logits_RV, strict=True):
        assert_same_law(ours, reference(row, warp, [3, 4, 11], [0, 5]))


@pytest.mark.parametrize(
    "warp", [Warp(), Warp(temperature=0.0), Warp(top_k=3), Warp(top_p=0.5), Warp(min_p=0.5)], ids=str
)
def test_a_single_legal_token_is_certain(warp: Warp) -> None:
    scores_1V = torch.full((1, 2000), -torch.inf)
    scores_1V[0, 1234] = -50.0
    p_1V = probs(scores_1V, [warp])
    assert p_1V[0, 1234] == 1 and p_1V.sum() == 1


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_rows_are_one_hot_at_the_first_maximum(tied: bool) -> None:
    logits_RV = random_logits(5, 40)
    if tied:
        logits_RV[:, [7, 30]] = 20.0
    p_RV = probs(logits_RV, [Warp(temperature=0.0, top_p=0.5)] * 5)
    assert torch.equal(p_RV, torch.nn.functional.one_hot(logits_RV.argmax(-1), 40).double())


# Batches.


@pytest.mark.parametrize("vocabulary", [61, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixed_batches_equal_single_rows_bit_for_bit(vocabulary: int, dtype: torch.dtype) -> None:
    warps = [Warp(temperature=t, **truncation) for t in (0.0, 0.6, 1.0) for truncation in TRUNCATIONS]
    warps += [Warp(temperature=0.8, repetition_penalty=1.2), Warp(min_tokens=3, ends=(2,)), Warp(bias=((4, 1.5),))]
    order = torch.randperm(len(warps), generator=torch.Generator().manual_seed(1)).tolist()
    warps = [warps[i] for i in order]
    spread = torch.logspace(-1, 1, len(warps), dtype=torch.float64)[:, None]
    logits_RV = (random_logits(len(warps), vocabulary, spread=1.0) * spread).to(dtype)
    histories = [history(warp, [1, 2], [4]) for warp in warps]
    together_RV = probs(scores(logits_RV, histories), warps)
    for i, warp in enumerate(warps):
        alone_1V = probs(scores(logits_RV[i : i + 1], [histories[i]]), [warp])
        assert torch.equal(alone_1V[0], together_RV[i]), warp


def test_scores_leaves_its_input_and_unpenalised_rows_alone() -> None:
    logits_RV = random_logits(3, 30)
    before = logits_RV.clone()
    histories = [history(Warp()), history(Warp(repetition_penalty=2.0), [3, 4]), history(Warp(), [5])]
    scores_RV = scores(logits_RV, histories)
    assert torch.equal(logits_RV, before)
    assert torch.equal(scores_RV[[0, 2]], before[[0, 2]])
    assert not torch.equal(scores_RV[1], before[1])


# Histories.

PENALTIES = st.builds(
    Warp,
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    bias=st.sampled_from([(), ((2, -1.0), (3, 4.0))]),
    min_tokens=st.integers(0, 6),
    ends=st.sampled_from([(), (1, 4)]),
)
TOKENS = st.lists(st.integers(0, 7), max_size=5)


@repeatable
@given(PENALTIES, st.integers(0, 2**31), TOKENS, TOKENS, TOKENS)
def test_a_drafted_position_is_scored_as_if_the_draft_were_committed(
    warp: Warp, seed: int, prompt: list[int], generated: list[int], draft: list[int]
) -> None:
    logits_RV = random_logits(len(draft) + 1, 8, seed=seed)
    drafted_RV = scores(logits_RV, [history(warp, prompt, generated, draft, 0, len(draft) + 1)])
    for i, logits_V in enumerate(logits_RV):
        committed_1V = scores(logits_V[None], [history(warp, prompt, [*generated, *draft[:i]])])
        assert torch.equal(drafted_RV[i], committed_1V[0])
        # A draft model asks for one row at a time.
        step_1V = scores(logits_V[None], [history(warp, prompt, generated, draft[:i], i, 1)])
        assert torch.equal(drafted_RV[i], step_1V[0])


def test_rejected_drafts_leave_no_trace() -> None:
    warp = Warp(repetition_penalty=1.4, frequency_penalty=0.5)
    logits_RV = random_logits(1, 8)
    plain = history(warp, [1, 2], [3])
    scores(random_logits(4, 8), [history(warp, plain.prompt, plain.generated, [5, 6, 7], 0, 4)])
    assert torch.equal(scores(logits_RV, [plain]), scores(logits_RV, [history(warp, [1, 2], [3])]))


def test_repetition_counts_the_prompt_and_presence_and_frequency_do_not() -> None:
    logits_1V = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    repeated = scores(logits_1V, [history(Warp(repetition_penalty=2.0), [0, 1], [2])])
    assert repeated.tolist() == [[1.0, -4.0, 1.0, -2.0, 2.0]]
    counted = scores(logits_1V, [history(Warp(presence_penalty=0.5, frequency_penalty=0.25), [0, 1, 4], [2, 2, 3])])
    assert counted.tolist() == [[2.0, -2.0, 1.0, -2.75, 2.0]]


def test_penalties_and_bias_add_up_in_order() -> None:
    warp = Warp(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, bias=((0, 10.0),))
    assert scores(torch.tensor([[4.0, 1.0]]), [history(warp, [], [0, 0])]).tolist() == [[11.0, 1.0]]  # 4/2-.5-2*.25+10


def test_ends_are_banned_until_min_tokens_are_reached_within_a_draft_too() -> None:
    warp = Warp(min_tokens=4, ends=(0, 2))
    scores_RV = scores(torch.zeros(5, 4), [history(warp, [1], [3, 3], [1, 3, 1, 3], 0, 5)])
    banned = torch.isinf(scores_RV)
    assert banned[:2, [0, 2]].all() and not banned[2:].any() and not banned[:, [1, 3]].any()


def test_compiling_keeps_what_params_say() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1, logit_bias={9: 1.0, 2: -1.0},
        min_tokens=3, stop_token_ids=(7,),
    )  # fmt: skip
    warp = Warp.compile(params, eos=(1, 99), vocabulary=50)
    assert (warp.temperature, warp.top_k, warp.top_p, warp.min_p, warp.repetition_penalty) == (0.7, 20, 0.9, 0.1, 1.1)
    assert warp.bias == ((2, -1.0), (9, 1.0))
    assert warp.min_tokens == 3 and warp.ends == (1, 7)  # 99 is no usable id
    assert Warp.compile(params.model_copy(update={"ignore_eos": True}), (1,), 50).ends == (7,)
    assert Warp.compile(params.model_copy(update={"top_k": 500}), (1,), 50).top_k == 0


def test_logprobs_are_the_models_own_log_softmax() -> None:
    logits_RV = random_logits(3, 30, dtype=torch.bfloat16)
    chosen_R, value_RK, id_RK = logprobs(logits_RV, torch.tensor([4, 0, 29]), 5)
    expected_RV = logits_RV.double().log_softmax(-1)
    torch.testing.assert_close(chosen_R.double(), expected_RV[range(3), [4, 0, 29]], atol=1e-5, rtol=0)
    torch.testing.assert_close(value_RK.double(), expected_RV.sort(descending=True).values[:, :5], atol=1e-5, rtol=0)
    torch.testing.assert_close(expected_RV.gather(1, id_RK), value_RK.double(), atol=1e-5, rtol=0)
    assert logprobs(logits_RV, torch.tensor([4, 0, 29]), 0)[1].shape == (3, 0)
    assert logprobs(logits_RV, torch.tensor([4, 0, 29]), 100)[1].shape == (3, 30)

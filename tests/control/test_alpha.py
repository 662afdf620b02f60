"""Leniency by load and acceptance: exact values, smoothing, bounds; and what the engine makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fastdraft import ConfigError, DraftModel, DynamicAlpha, Generator, NGram, SamplingParams
from fastdraft.control.alpha import Leniency, alpha_of
from fastdraft.control.load import Load
from tests import tiny
from tests.watch import within

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]


@pytest.mark.parametrize(
    ("utilisation", "acceptance", "alpha"),
    [
        (0.0, None, 0.5),
        (0.60, 0.65, 0.5),
        (0.60, 1.0, 0.5),
        (0.65, None, 0.45),
        (0.70, None, 0.40),
        (0.80, None, 0.30),
        (0.95, None, 0.30),
        (1.0, 1.0, 0.30),
        (0.0, 0.60, 0.53),
        (0.0, 0.50, 0.59),
        (0.0, 0.15, 0.80),
        (0.0, 0.0, 0.80),
        (0.70, 0.55, 0.46),
        (1.0, 0.0, 0.49),
    ],
)
def test_the_table_of_alpha(utilisation: float, acceptance: float | None, alpha: float) -> None:
    assert alpha_of(DynamicAlpha(), utilisation, acceptance) == pytest.approx(alpha, abs=1e-6)


def test_the_bounds_are_the_specs() -> None:
    spec = DynamicAlpha(base=0.7, low=0.65, high=0.72)
    assert alpha_of(spec, 1.0, None) == 0.65
    assert alpha_of(spec, 0.0, 0.0) == 0.72
    assert alpha_of(DynamicAlpha(base=0.6, low=0.1, high=1.0), 0.9, None) == pytest.approx(0.3)


def test_a_burst_is_smoothed() -> None:
    leniency = Leniency(DynamicAlpha(base=0.6, low=0.1, high=1.0))
    assert leniency.alpha == 0.6
    leniency.load(0.5)
    assert leniency.alpha == 0.6
    leniency.load(0.8)  # 0.8 * 0.8 + 0.2 * 0.5 = 0.74
    assert leniency.alpha == pytest.approx(0.46)
    leniency.load(0.5)  # 0.8 * 0.5 + 0.2 * 0.74 = 0.548
    assert leniency.alpha == 0.6


def test_only_recent_acceptance_counts() -> None:
    leniency = Leniency(DynamicAlpha())
    leniency.observe(0, 0)
    leniency.load(0.0)
    assert leniency.alpha == 0.5
    leniency.observe(4, 2)  # half: 15 points under 65 %
    leniency.load(0.0)
    assert leniency.alpha == pytest.approx(0.59)
    for _ in range(40):
        leniency.observe(4, 4)
    leniency.load(0.0)
    assert leniency.alpha == 0.5


def test_the_engine_is_as_loaded_as_its_places_are_wanted_while_it_is_busy() -> None:
    load = Load(4)
    assert load.utilisation == 0.0
    load.push(10.0, 11.0, 1)
    assert load.utilisation == 0.25
    load.push(11.0, 12.0, 8)  # waiting ones count
    assert load.utilisation == 1.0
    load.push(15.0, 16.0, 4)  # idle for 3 of 4 seconds
    assert load.utilisation == 0.25
    load.rest()
    assert load.utilisation == 0.0


@pytest.fixture(scope="module")
def generator() -> Any:
    target = tiny.model()
    draft = DraftModel(tiny.perturbed(target, 0.05))
    with Generator(target, [NGram(min=1), draft], tokenizer=tiny.tokenizer()) as made:
        yield made


def _utilisation(values: list[float]) -> Callable[[], float]:
    left = iter(values)
    return lambda: next(left, values[-1])


def test_every_round_reports_its_alpha_and_the_output_its_distortion(generator: Generator) -> None:
    spec = DynamicAlpha(utilisation=_utilisation([0.5, 0.9]))
    out = generator.generate(
        PROMPT, temperature=1.0, max_tokens=60, gamma=3, source="draft_model", alpha=spec, ignore_eos=True
    )
    assert len(out.stats.alphas) == out.stats.rounds
    assert all(0.3 <= alpha <= 0.8 for alpha in out.stats.alphas)
    assert out.stats.alphas[0] == 0.5 and len(set(out.stats.alphas)) > 1
    assert not out.lossless
    assert 0 < out.stats.distortion <= sum((1 - a) * 4 for a in out.stats.alphas)


def test_where_nothing_is_drafted_nothing_is_lost(generator: Generator) -> None:
    out = generator.generate(PROMPT, temperature=1.0, max_tokens=20, gamma=0, alpha=DynamicAlpha(), ignore_eos=True)
    assert out.lossless and out.stats.distortion == 0
    assert len(out.stats.alphas) == 20


def test_calls_of_a_batch_have_their_own(generator: Generator) -> None:
    specs = [DynamicAlpha(utilisation=lambda: 0.0), DynamicAlpha(utilisation=lambda: 1.0)]
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "gamma": 3, "ignore_eos": True}
    params = [*(SamplingParams(alpha=spec, **options) for spec in specs), SamplingParams(alpha=0.9, **options)]
    idle, busy, constant = generator.batch([PROMPT] * 3, params)
    assert min(idle.stats.alphas) >= 0.5
    assert max(busy.stats.alphas) <= 0.5
    assert set(constant.stats.alphas) == {0.9}


@pytest.mark.parametrize("answer", [1.5, -0.1, float("nan"), "busy", None])
def test_a_gauge_that_answers_nonsense_ends_its_call_alone(generator: Generator, answer: Any) -> None:
    stream = generator.stream(PROMPT, temperature=0, max_tokens=200, ignore_eos=True)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        generator.generate(PROMPT, max_tokens=8, alpha=DynamicAlpha(utilisation=lambda: answer))
    assert stream.completion.finish_reason == "length"


def test_a_gauge_may_ask_its_own_generator_what_runs(generator: Generator) -> None:
    spec = DynamicAlpha(utilisation=lambda: generator.metrics().running / 16)
    # Nothing drafted: a refused draft would raise alpha, and what is sampled here is not seeded.
    out = within(lambda: generator.generate(PROMPT, max_tokens=8, alpha=spec, gamma=0, ignore_eos=True))
    assert set(out.stats.alphas) == {0.5}


def test_a_gauge_that_generates_would_wait_for_itself(generator: Generator) -> None:
    spec = DynamicAlpha(utilisation=lambda: generator.generate(PROMPT, max_tokens=1).completion_tokens / 2)
    with pytest.raises(ConfigError, match="would wait for itself"):
        within(lambda: generator.generate(PROMPT, max_tokens=8, alpha=spec))


def test_a_gauge_that_raises_ends_its_call_with_its_error(generator: Generator) -> None:
    def broken() -> float:
        raise OSError("no such device")

    with pytest.raises(Exception, match="no such device"):
        generator.generate(PROMPT, max_tokens=8, alpha=DynamicAlpha(utilisation=broken))
    assert generator.generate(PROMPT, max_tokens=8, temperature=0).finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"base": 0.2}, "low <= base <= high"),
        ({"base": 0.9}, "low <= base <= high"),
        ({"low": 0.0}, "low"),
        ({"high": 1.2}, "high"),
    ],
)
def test_bounds_out_of_order_are_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DynamicAlpha(**fields)


def test_it_is_never_exact_and_never_invariant() -> None:
    params = SamplingParams(alpha=DynamicAlpha(base=1.0, high=1.0), seed=3)
    assert not params.exact and not params.invariant
    with pytest.raises(ValueError, match="alpha=1"):
        SamplingParams(alpha=DynamicAlpha(), verification="invariant")


def test_a_schema_and_json_leave_the_gauge_out() -> None:
    params = SamplingParams(alpha=DynamicAlpha(base=0.6, utilisation=lambda: 0.5))
    assert json.dumps(SamplingParams.model_json_schema())  # a function has none
    again = SamplingParams.model_validate_json(params.model_dump_json())
    assert again.alpha == DynamicAlpha(base=0.6)

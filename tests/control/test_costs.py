"""What was measured, and how real rounds correct it."""

from __future__ import annotations

import pytest

from fastdraft.control.costs import Costs, Curve, Forward, Measured

MEASURED = Measured(((1, 0.2), (2, 0.21), (4, 0.3), (8, 0.28), (16, 0.5)), ((64, 1.7),), 1e-5)


def test_between_points_the_line_after_the_last_its_slope() -> None:
    curve = Curve(MEASURED)
    assert curve.seconds(1) == pytest.approx(0.2)
    assert curve.seconds(3) == pytest.approx(0.255)
    assert curve.seconds(6) == pytest.approx(0.29)  # it need not rise
    assert curve.seconds(20) == pytest.approx(0.61)
    assert curve.seconds(1, context=1000) == pytest.approx(0.21)


def test_a_long_feed_has_points_of_its_own() -> None:
    curve = Curve(MEASURED)
    assert curve.feed(8) == curve.seconds(8)
    assert curve.feed(40) == pytest.approx(1.1)
    assert curve.feed(512) == pytest.approx(0.5 + (512 - 16) * 0.025)
    assert Curve(Measured(((1, 0.2), (2, 0.3)))).feed(11) == pytest.approx(1.2)
    assert Curve(Measured(((1, 0.2),))).feed(11) == pytest.approx(0.2)


def test_a_falling_last_slope_never_gives_costs_away() -> None:
    curve = Curve(Measured(((1, 0.2), (2, 0.1))))
    assert curve.seconds(50) == pytest.approx(0.02)


def test_one_hiccup_moves_little_and_a_lasting_change_is_followed() -> None:
    curve = Curve(MEASURED)
    for _ in range(20):
        curve.observe([Forward(4, 4)], 0.3)
    curve.observe([Forward(4, 4)], 3.0)
    assert curve.seconds(4) == pytest.approx(0.3, rel=0.05)
    for _ in range(60):
        curve.observe([Forward(4, 4)], 0.45)
    assert curve.seconds(4) == pytest.approx(0.45, rel=0.02)
    assert 0.2 < curve.seconds(1) < 0.3  # the whole machine may be slower, or these rows alone
    assert curve.feed(512) == pytest.approx(0.5 + (512 - 16) * 0.025)


def test_the_shape_is_learnt_where_it_was_not_measured() -> None:
    curve = Curve(MEASURED)
    real = {1: 0.2, 5: 0.6, 8: 0.28}
    for _ in range(200):
        for rows, seconds in real.items():
            curve.observe([Forward(rows, rows)], seconds)
    for rows, seconds in real.items():
        assert curve.seconds(rows) == pytest.approx(seconds, rel=0.05)


def test_feeds_and_single_rows_are_told_apart() -> None:
    curve = Curve(MEASURED)
    for _ in range(100):
        curve.observe([Forward(512, 1)], 6.45)
    assert curve.feed(512) == pytest.approx(6.45, rel=0.02)
    assert curve.seconds(4) == pytest.approx(0.3)


def test_several_forwards_are_judged_by_their_sum() -> None:
    curve = Curve(MEASURED)
    for _ in range(100):
        curve.observe([Forward(1, 1)] * 5, 0.5)
    assert curve.seconds(1) == pytest.approx(0.1, rel=0.02)


def test_kinds_of_sampling_are_learnt_apart_and_sources_without_a_model_cost_nothing() -> None:
    costs = Costs(MEASURED, {"small": Measured(((1, 0.02),), ((64, 0.4),))})
    for _ in range(100):
        costs.observe(None, [Forward(1, 1)], 0.4, "rejection")
        costs.observe("lookup", [], 0.4, "rejection")
    assert costs.verify(1, kind="rejection") == pytest.approx(0.4, rel=0.02)
    assert costs.verify(1, kind="greedy") == pytest.approx(0.2)
    assert costs.step("lookup", 1) == costs.catch_up("lookup", 500) == 0.0
    assert costs.step("small", 1) == pytest.approx(0.02)
    assert costs.catch_up("small", 1) == 0.0
    assert costs.catch_up("small", 64) == pytest.approx(0.38)


def test_json_brings_it_back() -> None:
    assert Measured.from_json(MEASURED.to_json()) == MEASURED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "null",
        '{"points": [], "prefill": [], "per_token": 0}',
        '{"points": [[1, 0.1]], "prefill": []}',
        '{"points": [[1, -0.1]], "prefill": [], "per_token": 0}',
        '{"points": [[1, NaN]], "prefill": [], "per_token": 0}',
        '{"points": [[2, 0.1], [1, 0.1]], "prefill": [], "per_token": 0}',
        '{"points": [[1, 0.1]], "prefill": [], "per_token": -1}',
        '{"points": "abc", "prefill": [], "per_token": 0}',
    ],
)
def test_what_is_not_a_measurement_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Measured.from_json(text)

"""Acceptance estimates: from reached positions only, decayed, a call's own beside its generator's."""

from __future__ import annotations

import random

import pytest

from fastdraft.control.gamma import MOST, Acceptance, Lean, expected_tokens


def test_expected_tokens() -> None:
    assert expected_tokens((0.5,), 0) == 1
    assert expected_tokens((0.5,), 3) == 1 + 0.5 + 0.25 + 0.125
    assert expected_tokens((0.5, 1.0), 3) == 1 + 0.5 + 0.5 + 0.5


def test_before_anything_was_seen_it_is_optimistic() -> None:
    acceptance = Acceptance()
    assert acceptance.curve == pytest.approx([0.75] * MOST)
    assert list(acceptance.table) == sorted(acceptance.table)


def test_positions_that_were_never_reached_say_nothing_of_themselves() -> None:
    """The first is right 3 times in 10, those behind it always: a rejection hides them, it does not count as one."""
    acceptance, rng = Acceptance(), random.Random(0)
    for _ in range(400):
        acceptance.observe([1.0, 1.0, 1.0, 1.0] if rng.random() < 0.3 else [0.0], [])
    assert acceptance.curve[0] == pytest.approx(0.3, abs=0.12)
    assert min(acceptance.curve[1:4]) > 0.9
    assert acceptance.curve[8] > 0.9  # like those before it


def test_chances_count_as_they_are() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe([0.6, 0.6], [])
    assert acceptance.curve[0] == pytest.approx(0.6, abs=0.01)


def test_the_past_fades() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe([1.0], [])
    for _ in range(300):
        acceptance.observe([0.0], [])
    assert acceptance.curve[0] < 0.05


def test_each_level_is_learnt_by_itself() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.observe([1.0], [9])
        acceptance.observe([0.0], [3])
    assert acceptance.table[9] > 0.95 and acceptance.table[3] < 0.05
    assert acceptance.table[5] == Acceptance().table[5]


def test_where_drafting_stopped_the_level_stands_in_for_the_verify() -> None:
    """Only sure positions are drafted; the estimate of a position is still that of all of them."""
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe([1.0], [9])
        acceptance.observe([0.0], [0])
    for _ in range(300):  # now the unsure ones are not drafted any more
        acceptance.observe([1.0], [9])
        acceptance.observe([], [0])
    assert acceptance.curve[0] == pytest.approx(0.5, abs=0.1)


def test_a_call_leans_away_from_its_generator_and_is_known_within_a_few_rounds() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe([0.9] * 4, [])
    lean = Lean()
    assert lean.shift(acceptance.curve) == acceptance.curve
    for _ in range(10):
        lean.observe([0.0], acceptance)
    assert lean.shift(acceptance.curve)[0] < 0.5
    assert acceptance.curve[0] == pytest.approx(0.9, abs=0.01)


def test_a_generators_only_call_does_not_count_twice() -> None:
    acceptance, lean = Acceptance(), Lean()
    for _ in range(300):
        acceptance.observe([0.4], [])
        lean.observe([0.4], acceptance)
    assert lean.shift(acceptance.curve)[0] == pytest.approx(0.4, abs=0.02)

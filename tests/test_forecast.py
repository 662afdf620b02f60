"""The forecast against hand-computed rounds, and against every way the rounds may go."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdraft.control.costs import Costs, Measured
from fastdraft.forecast import Overhead, Text, forecast, mean_rate, replay, round_seconds

# 10 s a verify and 1 s more a row; 2 s a draft step, 0.5 s more where it feeds two tokens.
TARGET = Measured(tuple((n, 10.0 + (n - 1)) for n in range(1, 18)))
DRAFT = Measured(((1, 2.0), (2, 2.5), (3, 3.0)))
COSTS = Costs(TARGET, {"small": DRAFT})


def drafted(*accepted: float) -> Text:
    """What a draft model would have done: one chance a token, the same wherever drafting begins."""
    return Text(5, tuple(accepted[n : n + 16] for n in range(len(accepted))))


def test_plain_decoding_is_one_verify_a_token():
    found = replay(drafted(1, 1, 1, 1), COSTS, 0, source="small", overhead=Overhead(3.0))
    assert (found.tokens, found.seconds, found.rounds) == (3, 3 * 13.0, 4)


def test_a_replay_by_hand():
    # Tokens 0..8, drafts of 2. Round 1 drafts 0, 1: both right, tokens 0 to 2 come; the draft lacks two tokens.
    # Round 2 drafts 3, 4: 3 is right, 4 wrong: 3 and 4 come. Round 3 drafts 5, 6: wrong at once, 5 comes.
    # Round 4 drafts 6, 7: both right, and 8 comes. That is the end.
    text = drafted(1, 1, 1, 1, 0, 0, 1, 1, 1)
    found = replay(text, COSTS, 2, source="small", overhead=Overhead(1.0))
    assert found.rounds == 4
    assert found.tokens == 6
    verify = 12.0 + 1.0
    assert found.seconds == pytest.approx((verify + 2.5 + 2.0) + (verify + 2.0 + 2.0) + (verify + 2.0 + 2.0))


def test_overheads_are_of_rounds_and_of_drafted_tokens():
    assert round_seconds(COSTS, "small", 0, 5, 2, Overhead(1.0, 0.25)) == 11.0
    assert round_seconds(COSTS, "small", 3, 5, 2, Overhead(1.0, 0.25)) == 13.0 + 1.0 + 3 * 2.25 + 0.5
    assert round_seconds(COSTS, "ngram", 3, 5) == 13.0


def test_a_draft_is_shortened_before_the_end():
    # The last round has one token left: nothing is drafted, and nothing is paid for a draft.
    found = replay(drafted(1, 1, 1, 1), COSTS, 2, source="small")
    assert (found.tokens, found.rounds) == (1, 2)
    assert found.seconds == 10.0


def test_a_source_without_a_model_pays_for_rows_alone():
    # It has a draft at the second token only, one token of which is right.
    text = Text(5, ((), (1.0, 0.0, 0.0), (), (), ()))
    found = replay(text, COSTS, 3, source="ngram")
    assert found.rounds == 4
    assert found.tokens == 4
    assert found.seconds == 13.0 + 10.0 + 10.0


@given(chances=st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0]), min_size=1, max_size=6), gamma=st.integers(0, 4))
def test_an_expected_replay_is_the_mean_of_all_certain_ones(chances: list[float], gamma: int):
    whole = replay(drafted(*chances), COSTS, gamma, source="small", overhead=Overhead(0.5, 0.1))
    seconds = tokens = rounds = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=len(chances)):
        weight = math.prod(c if o else 1 - c for c, o in zip(chances, outcome, strict=True))
        one = replay(drafted(*outcome), COSTS, gamma, source="small", overhead=Overhead(0.5, 0.1))
        seconds, tokens, rounds = (
            seconds + weight * one.seconds,
            tokens + weight * one.tokens,
            rounds + weight * one.rounds,
        )
    assert whole.seconds == pytest.approx(seconds)
    assert whole.tokens == pytest.approx(tokens)
    assert whole.rounds == pytest.approx(rounds)


def test_a_forecast_has_a_rate_for_each_length():
    texts = [drafted(*[1.0] * 20), drafted(*[1.0, 0.0] * 5)]
    rates = forecast(texts, COSTS, source="small", overhead=Overhead(1.0), most=4)
    assert [rate.gamma for rate in rates] == [0, 1, 2, 3, 4]
    assert rates[0].tokens_per_second == pytest.approx(1 / 11)
    assert rates[0].tokens_per_round == 1
    replays = [replay(text, COSTS, 3, source="small", overhead=Overhead(1.0)) for text in texts]
    expected = math.exp(sum(n * math.log(r.tokens / r.seconds) for n, r in zip((20, 10), replays, strict=True)) / 30)
    assert rates[3].tokens_per_second == pytest.approx(expected)
    assert rates[3].tokens_per_round == pytest.approx(30 / sum(r.rounds for r in replays))


def test_outputs_without_a_rate_don_t_count():
    assert mean_rate([None, 4.0], [100, 3]) == pytest.approx(4.0)
    assert mean_rate([2.0, 8.0], [1, 1]) == pytest.approx(4.0)
    assert mean_rate([None], [1]) is None
    one = drafted(1.0)
    assert [rate.tokens_per_second for rate in forecast([one], COSTS, source="small", most=1)] == [0.0, 0.0]

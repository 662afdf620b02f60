"""Source and draft length against worlds whose best is known: simulated, so that nothing depends on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from fastdraft.control.gamma import MOST, expected_tokens
from fastdraft.round import Plan
from tests.control.world import Call, Source, World, best_fixed, draft, play, play_batch


def line(slope: float) -> Callable[[int], float]:
    return lambda rows: 0.25 * (1 + slope * (rows - 1))


def steps(rows: int) -> float:
    """Kernels that change after 4 and after 8 rows."""
    return 0.25 * (1 + 0.05 * (rows - 1) + 0.3 * (rows > 4) + 0.2 * (rows > 8))


def quality(world: World, source: Source, calls: Sequence[Call]) -> float:
    """Expected tokens a second of what was planned, over that of the best constant length: free of luck."""
    plans = [plan for call in calls for plan in call.plans]
    tokens = sum(expected_tokens(source.accept, plan.gamma) for plan in plans)
    seconds = sum(world.verify(1 + plan.gamma) + plan.gamma * source.step for plan in plans)
    return tokens / seconds / best_fixed(world, source)[0]


@pytest.mark.parametrize("accept", [0.05, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99])
@pytest.mark.parametrize("step", [0.0, 0.02, 0.05, 0.1])
@pytest.mark.parametrize("slope", [0.03, 0.1, 0.3])
def test_gamma_is_within_5_percent_of_the_best_constant_one(accept: float, step: float, slope: float) -> None:
    source = Source("model" if step else "lookup", accept=(accept,), step=step)
    world = World(line(slope), [source], noise=0.1)
    controller = world.controller()
    play(world, controller, 400)
    gain = best_fixed(world, source)[0] * world.verify(1)
    # Where there is little to gain, whether to draft at all is what may be missed for a while.
    assert quality(world, source, [play(world, controller, 400) for _ in range(5)]) > (0.95 if gain > 1.1 else 0.92)


@pytest.mark.parametrize("accept", [0.5, 0.8, 0.95])
def test_row_counts_that_were_not_measured_are_learnt(accept: float) -> None:
    source = Source(accept=(accept,), step=0.02)
    world = World(steps, [source], noise=0.05)
    controller = world.controller()
    for _ in range(3):
        play(world, controller, 400)
    assert quality(world, source, [play(world, controller, 400) for _ in range(5)]) > 0.95


def test_costs_that_have_changed_since_they_were_measured_are_learnt() -> None:
    """The draft turns out to be ten times as dear as it was."""
    source = Source(accept=(0.8,), step=0.02)
    world = World(line(0.1), [source], noise=0.1)
    controller = world.controller()
    source.step = 0.2
    play(world, controller, 400)
    assert best_fixed(world, source)[1] == 0
    assert play(world, controller, 400).course.off


# How sure the draft is says where it errs: sure of most tokens, lost at a few.
UNEVEN = Source(
    accept=(0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99),
    weights=(0.1, 0.15, 0.1, 0.1, 0.1, 0.1, 0.05, 0.1, 0.1, 0.1),
    step=0.03,
    levels=True,
)


def test_stopping_within_a_round_beats_every_constant_length() -> None:
    world = World(line(0.1), [UNEVEN])
    controller = world.controller(stops=True)
    calls = [play(world, controller, 400) for _ in range(12)][2:]
    rate = sum(call.tokens for call in calls) / sum(call.seconds for call in calls)
    assert rate > 1.03 * best_fixed(world, UNEVEN)[0]
    assert len({drafted for call in calls for drafted in call.drafted}) > 4


def test_a_stop_sees_a_dear_row_and_what_lies_behind_it() -> None:
    even = Source(accept=(0.8,) * 10, weights=(0.0,) * 5 + (1.0,) + (0.0,) * 4, step=0.02, levels=True)
    world = World(steps, [even])
    controller = world.controller(stops=True)
    calls = [play(world, controller, 400) for _ in range(12)][2:]
    rate = sum(call.tokens for call in calls) / sum(call.seconds for call in calls)
    assert rate > 0.93 * best_fixed(world, even)[0]


def test_the_first_round_never_drafts_with_a_model() -> None:
    world = World(line(0.05), [Source(accept=(0.9,)), Source("lookup", accept=(0.1,), step=0.0)])
    for _ in range(3):
        call = play(world, world.controller(), 40)
        assert call.plans[0].source in ("", "lookup")
        assert "draft_model" in {plan.source for plan in call.plans}


def test_no_plan_goes_past_what_is_left() -> None:
    world = World(line(0.01), [Source("lookup", accept=(1.0,), step=0.0)])
    controller = world.controller()
    for tokens in range(1, 30):
        call = play(world, controller, tokens)
        left = tokens
        for plan, drafted in zip(call.plans, call.drafted, strict=True):
            assert plan.gamma <= left - 1
            left -= drafted + 1
        assert call.tokens == tokens


@pytest.mark.parametrize("gamma", [0, 1, 5, 24])
def test_an_integer_is_kept_whatever_comes_of_it(gamma: int) -> None:
    world = World(line(0.3), [Source(accept=(0.0,), step=0.2)])
    call = play(world, world.controller(stops=True), 40, gamma=gamma)
    assert [plan.gamma for plan in call.plans] == [min(gamma, MOST, left) for left in range(39, -1, -1)]
    assert all(plan.stop is None for plan in call.plans)
    assert not call.course.off


def test_the_better_source_wins_whatever_their_order() -> None:
    lookup, model = Source("lookup", accept=(0.2,), step=0.0), Source(accept=(0.9,), step=0.03)
    for sources in ([lookup, model], [model, lookup]):
        world = World(line(0.1), sources, noise=0.05)
        controller = world.controller()
        play(world, controller, 300)
        call = play(world, controller, 300)
        assert sum(plan.source == "draft_model" for plan in call.plans) > 0.9 * len(call.plans)
        lookup.accept = (0.9,)  # as good, and it costs nothing
        calls = [play(world, controller, 300) for _ in range(4)]
        assert sum(plan.source == "lookup" for plan in calls[-1].plans) > 0.9 * len(calls[-1].plans)
        lookup.accept = (0.2,)


def test_sources_compete_at_an_integer_gamma_too() -> None:
    world = World(line(0.1), [Source("lookup", accept=(0.1,), step=0.0), Source(accept=(0.95,), step=0.02)])
    controller = world.controller()
    play(world, controller, 200, gamma=4)
    call = play(world, controller, 200, gamma=4)
    assert sum(plan.source == "draft_model" for plan in call.plans) > 0.9 * len(call.plans)
    assert {plan.source for plan in play(world, controller, 200, gamma=4, source="lookup").plans[:-1]} == {"lookup"}


# Off: costs next to nothing, says so, and comes back.


@pytest.mark.parametrize(("step", "prompt"), [(0.0, 20), (0.02, 20), (0.05, 20), (0.15, 20), (0.05, 300)])
@pytest.mark.parametrize("slope", [0.03, 0.3])
def test_a_source_with_a_history_of_failing_costs_a_call_at_most_2_percent(
    step: float, prompt: int, slope: float
) -> None:
    source = Source("model" if step else "lookup", accept=(0.02,), step=step)
    world = World(line(slope), [source], noise=0.1)
    controller = world.controller()
    for _ in range(2):
        play(world, controller, 96, prompt=prompt)
    for _ in range(5):
        call = play(world, controller, 96, prompt=prompt)
        plain = call.tokens * world.verify(1)
        assert call.course.lost < 0.02 * plain
        assert call.course.off


def test_a_lookup_that_becomes_good_is_back_within_the_call() -> None:
    source = Source("lookup", accept=(0.02,), step=0.0)
    world = World(line(0.1), [source], noise=0.1)
    controller = world.controller()
    for _ in range(4):
        play(world, controller, 96)
    source.accept = [0.9]
    call = play(world, controller, 400)
    assert not call.course.off
    assert sum(call.drafted) > 2 * len(call.drafted)


def test_a_draft_model_that_becomes_good_is_back_within_a_few_calls() -> None:
    source = Source(accept=(0.02,), step=0.05)
    world = World(line(0.1), [source], noise=0.1)
    controller = world.controller()
    for _ in range(4):
        play(world, controller, 96, prompt=20)
    source.accept = (0.9,)
    calls = [play(world, controller, 96, prompt=20) for _ in range(8)]
    assert not calls[-1].course.off
    assert calls[-1].rate > 0.8 * best_fixed(world, source)[0]


def test_what_catching_up_costs_counts_against_what_is_still_to_come() -> None:
    """A long prompt before a short answer is not worth the draft's prefill; before a long answer it is."""
    source = Source(accept=(0.8,), step=0.05)
    world = World(line(0.05), [source])
    controller = world.controller()
    for _ in range(3):
        play(world, controller, 300)
    assert sum(play(world, controller, 12, prompt=1500).drafted) == 0
    assert sum(play(world, controller, 600, prompt=500).drafted) > 0


def test_a_batch_shares_its_rows() -> None:
    """Where each further row costs as much as a call's own, a batch has nothing to gain that one call has."""
    source = Source("lookup", accept=(0.7,), step=0.0)
    world = World(lambda rows: 0.2 + 0.002 * rows + (0.05 * (rows - 16) if rows > 16 else 0), [source])
    controller = world.controller()
    play(world, controller, 200)
    assert max(play(world, controller, 200).drafted) >= 4
    calls = play_batch(world, controller, [120] * 16)
    assert sum(sum(call.drafted[40:80]) for call in calls) / (16 * 40) < 1.5


def test_calls_of_different_temperature_don_t_mix() -> None:
    source = Source("lookup", accept=(0.02,), step=0.0)
    world = World(line(0.1), [source])
    controller = world.controller()
    for _ in range(3):
        play(world, controller, 96, temperature=1.5)
    source.accept = (0.9,)
    assert sum(play(world, controller, 96, temperature=0.0).drafted) > 100


def test_the_simulated_draft_is_what_it_says() -> None:
    world = World(line(0.1), [UNEVEN])
    drawn = [draft(world, UNEVEN, Plan("draft_model", 4)) for _ in range(4000)]
    share = sum(a * w for a, w in zip(UNEVEN.accept, UNEVEN.weights, strict=True))
    assert abs(sum(accepted for _, accepted, *_ in drawn) / 4000 + 1 - expected_tokens((share,), 4)) < 0.08

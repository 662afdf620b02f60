"""The doctor's figures against brute force, and its words against the figures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fastdraft import ConfigError, DraftModel, Generator, Model, NGram, VocabularyMismatchError
from fastdraft.control.costs import Costs
from fastdraft.doctor import Live, Report, examine
from fastdraft.doctor.verdict import WANTED
from fastdraft.forecast import Rate
from tests import tiny

PROMPTS = {"loop": [5, 6, 7, 8, 9] * 4, "other": [30, 40, 50, 60]}
TOKENS = 14
DAY = {"requests_per_day": 7200, "tokens_per_request": 101, "price_per_hour": 2.0}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.model(spread=2.0)


@pytest.fixture(scope="module")
def draft(target: Any) -> Any:
    return tiny.perturbed(target, 0.2)


@pytest.fixture(scope="module")
def report(target: Any, draft: Any) -> Report:
    options = {"tokens": TOKENS, "temperatures": (0.0, 0.7), "repeats": 1, "tokenizer": tiny.tokenizer()}
    return examine(target, DraftModel(draft, name="small"), PROMPTS, **options, **DAY)


@pytest.fixture(scope="module")
def copied(target: Any) -> Report:
    return examine(target, NGram(min=1), PROMPTS, tokens=TOKENS, temperatures=(), repeats=1, tokenizer=tiny.tokenizer())


def outputs(target: Any) -> list[list[int]]:
    return [tiny.greedy(target, prompt, TOKENS) for prompt in PROMPTS.values()]


def dense(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]


def matches(target: Any, draft: Any) -> list[list[bool]]:
    return [
        [int(row.argmax()) == token for row, token in zip(dense(draft, prompt, output), output, strict=True)]
        for prompt, output in zip(PROMPTS.values(), outputs(target), strict=True)
    ]


def test_greedy_acceptance_is_the_share_of_matches(report: Report, target: Any, draft: Any):
    right = matches(target, draft)
    greedy = report.acceptance[0]
    assert greedy.temperature == 0
    assert greedy.drafted == 1
    flat = [one for each in right for one in each]
    assert greedy.rate == pytest.approx(sum(flat) / len(flat))
    assert 0 < greedy.rate < 1  # or the pair would prove nothing
    for j, kept in enumerate(greedy.kept):
        starts = [all(each[n : n + j + 1]) for each in right for n in range(len(each) - j)]
        assert kept == pytest.approx(sum(starts) / len(starts))
    assert len(greedy.kept) == TOKENS


def test_sampled_acceptance_is_the_overlap_along_sampled_outputs(report: Report, target: Any, draft: Any):
    assert [one.temperature for one in report.acceptance] == [0.0, 0.7]
    with Generator(target, None, tokenizer=tiny.tokenizer()) as generator:
        overlaps = []
        for number, prompt in enumerate(PROMPTS.values()):
            options = {"temperature": 0.7, "seed": 1 + number, "max_tokens": TOKENS}
            output = generator.generate(prompt, **options).token_ids
            p, q = ((dense(model, prompt, output) / 0.7).softmax(-1) for model in (target, draft))
            overlaps += torch.minimum(p, q).sum(-1).tolist()
    assert report.acceptance[1].rate == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-4)


def test_similarity_and_distance_are_means_over_the_greedy_outputs(report: Report, target: Any, draft: Any):
    alike, apart = [], []
    for prompt, output in zip(PROMPTS.values(), outputs(target), strict=True):
        for a, b in zip(dense(target, prompt, output), dense(draft, prompt, output), strict=True):
            x, y = ({*row.topk(5).indices.tolist()} for row in (a, b))
            alike.append(len(x & y) / len(x | y))
            apart.append(0.5 * float((a.softmax(-1) - b.softmax(-1)).abs().sum()))
    assert report.jaccard == pytest.approx(sum(alike) / len(alike))
    assert report.total_variation == pytest.approx(sum(apart) / len(apart), abs=1e-5)


def test_speed_and_rollback_are_those_of_the_costs(report: Report):
    assert report.draft_costs is not None
    costs = Costs(report.target_costs, {"small": report.draft_costs})
    assert report.speed_ratio == pytest.approx(costs.step("small", 1) / costs.verify(1))
    gamma, plain = report.live[1].gamma, costs.verify(1)
    assert report.rollback == pytest.approx((gamma * costs.step("small", 1) + costs.verify(gamma + 1) - plain) / plain)


def test_the_forecast_replays_the_matches_over_the_costs(report: Report, target: Any, draft: Any):
    assert report.draft_costs is not None
    costs = Costs(report.target_costs, {"small": report.draft_costs})
    for gamma in (0, 1, 3, 16):
        logs, rounds = [], 0
        for prompt, right in zip(PROMPTS.values(), matches(target, draft), strict=True):
            n, seconds, first, lag = 0, 0.0, 0, 1
            while n < TOKENS:
                drafted = min(gamma, TOKENS - n - 1)
                context = len(prompt) + n
                spent = costs.verify(drafted + 1, context) + report.overhead.round
                if drafted:
                    spent += drafted * (costs.step("small", 1, context) + report.overhead.token)
                    spent += costs.catch_up("small", lag)
                kept = 0
                while kept < drafted and right[n + kept]:
                    kept += 1
                seconds += spent if n else 0.0
                first = first or kept + 1
                lag = 2 if drafted and kept == drafted else 1
                n += kept + 1
                rounds += 1
            if n > first:
                logs.append(math.log((n - first) / seconds))
        assert report.forecast[gamma].tokens_per_second == pytest.approx(math.exp(sum(logs) / len(logs)))
        assert report.forecast[gamma].tokens_per_round == pytest.approx(2 * TOKENS / rounds)
    best = max(report.forecast, key=lambda rate: rate.tokens_per_second)
    assert report.best == best.gamma
    assert len(report.forecast) == 17


def test_plain_and_the_best_length_run(report: Report):
    plain, drafting = report.live
    assert plain.gamma == 0
    assert 1 <= drafting.gamma <= 16
    for live in report.live:
        assert live.forecast == report.forecast[live.gamma].tokens_per_second
        assert live.measured > 0
        assert live.time_to_first_token > 0
        assert live.error == pytest.approx(live.forecast / live.measured - 1)
    assert report.speedup == pytest.approx(drafting.measured / plain.measured)


def test_a_lookup_is_replayed_over_the_output(copied: Report, target: Any):
    drafted, first = 0, 0
    for prompt, output in zip(PROMPTS.values(), outputs(target), strict=True):
        for n, token in enumerate(output):
            known = [*prompt, *output[:n]]
            guess = None
            for length in range(min(8, len(known) - 1), 0, -1):
                ends = [e for e in range(length, len(known)) if known[e - length : e] == known[-length:]]
                if ends:
                    guess = known[ends[-1]]
                    break
            drafted += guess is not None
            first += guess == token
    (greedy,) = copied.acceptance
    assert 0 < drafted < 2 * TOKENS
    assert greedy.drafted == drafted / (2 * TOKENS)
    assert greedy.rate == pytest.approx(first / drafted)
    assert (copied.jaccard, copied.total_variation, copied.pairing, copied.draft_costs) == (None,) * 4
    assert copied.speed_ratio == 0
    assert copied.ngram is None
    assert copied.draft == "ngram"


def test_positions_show_both_models_side_by_side(report: Report, copied: Report, target: Any, draft: Any):
    prompt, output = PROMPTS["loop"], outputs(target)[0]
    assert [position.text for position in report.positions] == [tiny.tokenizer().decode([t]) for t in output]
    rows = zip(report.positions, dense(target, prompt, output), dense(draft, prompt, output), output, strict=True)
    for position, a, b, token in rows:
        for guesses, row in ((position.target, a), (position.draft, b)):
            assert [guess.token_id for guess in guesses] == row.topk(5).indices.tolist()
            assert guesses[0].probability == pytest.approx(float(row.softmax(-1).max()), abs=1e-5)
        assert position.accepted == (int(b.argmax()) == token)
    assert all(len(position.target) == 5 and len(position.draft) <= 1 for position in copied.positions)
    assert any(position.draft for position in copied.positions)


def test_a_day_costs_what_its_hours_cost(report: Report):
    estimate = report.estimate
    assert estimate is not None
    for live, day in zip(report.live, (estimate.plain, estimate.speculative), strict=True):
        seconds = live.time_to_first_token + 100 / live.measured
        assert day.seconds_per_request == pytest.approx(seconds)
        assert day.hours == pytest.approx(2 * seconds)
        assert day.cost == pytest.approx(4 * seconds)
    assert estimate.saved == pytest.approx(estimate.plain.cost - estimate.speculative.cost)


def test_the_report_is_json_with_its_verdict(report: Report):
    read = json.loads(json.dumps(report.to_dict()))
    assert read["target"] == report.target
    assert read["prompts"] == ["loop", "other"]
    assert read["pairing"]["vocabulary"] == "assumed"
    assert read["speedup"] == report.speedup
    assert [live["error"] for live in read["live"]] == [live.error for live in report.live]
    assert read["estimate"]["saved"] == report.estimate.saved
    assert read["verdict"]["outcome"] in ("speculate", "little", "no")
    assert len(read["forecast"]) == 17


def test_a_loaded_pair_is_left_as_it_was(report: Report, target: Any, draft: Any):
    for model in (target, draft):
        assert model.config._attn_implementation != "fastdraft"
        assert not model.training


# the verdict


def judged(report: Report, speedup: float, **fields: Any) -> Any:
    """The verdict where drafting ran this much faster than plain, and as forecast."""
    plain, drafting = Live(0, 10.0, 10.0, 0.1), Live(4, 10.0 * speedup, 10.0 * speedup, 0.1)
    good = {
        "live": (plain, drafting),
        "speed_ratio": 0.1,
        "jaccard": 0.8,
        "rollback": 0.5,
        "acceptance": (dataclasses.replace(report.acceptance[0], rate=0.9, drafted=1.0),),
        "forecast": (Rate(0, 10.0, 1.0), Rate(4, 10.0 * speedup, 2.0)),
        "ngram": Rate(0, 10.0, 1.0),
        "pairing": None,
    }
    return dataclasses.replace(report, **(good | fields)).verdict


def test_the_outcome_follows_the_measured_speed_up(report: Report):
    for speedup, outcome in ((0.9, "no"), (1.0, "no"), (1.1, "little"), (WANTED.pays, "speculate"), (3.0, "speculate")):
        verdict = judged(report, speedup)
        assert verdict.outcome == outcome
        assert f"{speedup:.2f} times" in verdict.summary
    assert judged(report, 3.0).advice == ("Keep it as it is; gamma='auto' finds the length by itself.",)
    assert "draft=None" in judged(report, 0.9).advice[-1]


def test_a_forecast_that_is_off_is_not_kept_quiet(report: Report):
    live = Live(0, 10.0, 10.0, 0.1), Live(4, 20.0, 26.0, 0.1)
    assert any("-23%" in advice for advice in judged(report, 2.0, live=live).advice)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speed_ratio": 0.5}, "Quantise it, restrict its vocabulary"),
        ({"jaccard": 0.3}, "train it"),
        ({"rollback": 2.5}, "2.5 target steps"),
        ({"ngram": Rate(8, 40.0, 3.0)}, "NGram() instead"),
    ],
)
def test_what_falls_short_is_what_the_advice_is_about(report: Report, fields: dict[str, Any], said: str):
    (advice,) = judged(report, 2.0, **fields).advice
    assert said in advice


def test_a_low_agreement_and_other_ropes_are_told(report: Report):
    low = dataclasses.replace(report.acceptance[0], rate=0.2)
    assert "20% of the time" in judged(report, 2.0, acceptance=(low,)).advice[0]
    pairing = dataclasses.replace(report.pairing, notes=("rope bases differ: target 1, draft 2",))
    assert "rope bases differ" in judged(report, 2.0, pairing=pairing).advice[0]


def test_a_lookup_with_little_to_copy_wants_a_model(report: Report):
    rare = dataclasses.replace(report.acceptance[0], rate=0.9, drafted=0.1)
    (advice,) = judged(report, 1.5, draft_costs=None, acceptance=(rare,)).advice
    assert "Add a draft model" in advice


# what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": None}, "0 sources"),
        ({"draft": [NGram(), NGram(name="b")]}, "2 sources"),
        ({"prompts": []}, "empty"),
        ({"tokens": 1}, "tokens is 1"),
        ({"repeats": 0}, "repeats is 0"),
        ({"temperatures": (-1.0,)}, "temperatures holds -1.0"),
        ({"requests_per_day": 5}, "tokens_per_request and price_per_hour"),
        ({"requests_per_day": 5, "tokens_per_request": 0, "price_per_hour": 1}, "tokens_per_request is 0"),
        ({"requests_per_day": -5, "tokens_per_request": 9, "price_per_hour": 1}, "requests_per_day is -5"),
    ],
)
def test_what_cannot_be_examined_is_refused_before_anything_is_loaded(options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        examine("/there/is/no/such/model", **options)


def test_another_vocabulary_is_refused(target: Any, tmp_path: Any):
    folder = tmp_path / "foreign"
    tiny.model(vocabulary=300).save_pretrained(folder)
    tiny.letters(300).save_pretrained(folder)
    with pytest.raises(VocabularyMismatchError):
        examine(Model(target), str(folder), PROMPTS, tokenizer=tiny.tokenizer())


# drafts that are changed by the time they run


@pytest.mark.parametrize("given", ["borrowed", "folder"])
def test_a_restricted_vocabulary_is_read_as_it_runs(given: str, target: Any, draft: Any, tmp_path: Any):
    kept = tuple(range(0, tiny.VOCABULARY, 2))
    model: Any = draft
    if given == "folder":
        draft.save_pretrained(tmp_path)
        tiny.tokenizer().save_pretrained(tmp_path)
        model = Model(str(tmp_path), dtype="float32", quantization="none")
    source = DraftModel(model, vocabulary=kept)
    options = {"tokens": TOKENS, "temperatures": (0.7,), "repeats": 1, "tokenizer": tiny.tokenizer()}
    report = examine(target, source, PROMPTS, **options)
    assert report.vocabulary == len(kept)
    right = []
    for prompt, output in zip(PROMPTS.values(), outputs(target), strict=True):
        guesses = [2 * int(row[::2].argmax()) for row in dense(draft, prompt, output)]
        right += [guess == token for guess, token in zip(guesses, output, strict=True)]
    assert report.acceptance[0].rate == pytest.approx(sum(right) / len(right))
    assert all(guess.token_id % 2 == 0 for position in report.positions for guess in position.draft)
    assert 0 < report.acceptance[1].rate < 1


def test_a_rounded_draft_is_read_as_it_runs(target: Any, draft: Any, tmp_path: Any):
    draft.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    options = {"tokens": TOKENS, "temperatures": (), "repeats": 1, "tokenizer": tiny.tokenizer()}
    reports = [
        examine(target, DraftModel(Model(str(tmp_path), quantization=how)), PROMPTS, **options)
        for how in ("none", "int8")
    ]
    exact, rounded = (report.positions[0].draft[0].probability for report in reports)
    assert exact != rounded
    assert exact == pytest.approx(rounded, abs=0.1)

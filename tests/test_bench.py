"""Bench: what it runs, and that its figures are those of the runs."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tqdm
from pydantic_core import to_jsonable_python

from fastdraft import ConfigError, DraftModel, Generator, GeneratorConfig, MissingDependencyError, NGram
from fastdraft.bench import BenchReport, plot, run
from fastdraft.timing import Run, interleave
from tests import tiny

PROMPTS = {"loop": [5, 6, 7, 8, 9] * 4, "other": [30, 40, 50, 60]}


@pytest.fixture(scope="module")
def generator() -> Any:
    target = tiny.model()
    draft = DraftModel(tiny.perturbed(target, 0.3), name="small")
    with Generator(target, [NGram(), draft], tokenizer=tiny.tokenizer()) as made:
        yield made


@pytest.fixture(scope="module")
def report(generator: Generator) -> BenchReport:
    return run(generator, PROMPTS, tokens=12, gammas=(3, "auto"), repeats=2)


def test_without_a_bar_no_thread_is_left(generator: Generator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)  # another test's would stand for ours
    before = set(threading.enumerate())
    run(generator, PROMPTS, tokens=2, gammas=(2,), repeats=1)
    assert not [thread for thread in set(threading.enumerate()) - before if isinstance(thread, tqdm.TMonitor)]


def test_it_runs_plain_each_source_at_each_length_and_all_together(report: BenchReport):
    sides = {side.name: (side.source, side.gamma) for side in report.sides}
    assert list(sides.values()) == [
        (None, 0),
        ("ngram", 3),
        ("ngram", "auto"),
        ("small", 3),
        ("small", "auto"),
        (None, "auto"),
    ]
    assert report.plain.name == "plain"
    assert report.prompts == ("loop", "other")


def test_its_figures_are_those_of_the_calls(generator: Generator, report: BenchReport):
    for side in report.sides:
        options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "source": side.source, "gamma": side.gamma}
        if side.gamma == "auto" and side.source is not None:
            continue  # what it drafts depends on what it has learnt
        stats = [generator.generate(prompt, **options).stats for prompt in PROMPTS.values()]
        drafted, accepted = (sum(getattr(s, f"{what}_tokens") for s in stats) for what in ("draft", "accepted"))
        rounds = sum(s.rounds for s in stats)
        if isinstance(side.gamma, int):
            assert side.rounds == rounds
            assert side.acceptance_rate == (pytest.approx(accepted / drafted) if drafted else None)
            assert side.mean_acceptance_length == (pytest.approx(1 + accepted / rounds) if drafted else None)
        assert side.equal == 2
        assert report.same_tokens(side) is True
        assert side.tokens_per_second == pytest.approx(statistics.geometric_mean(r for r in side.rates if r))
        assert side.seconds > side.time_to_first_token > 0
    assert report.plain.ratio == 1.0
    assert report.plain.rounds == 24
    assert report.best.tokens_per_second == max(side.tokens_per_second for side in report.sides)


def test_every_call_computes_its_whole_prompt(generator: Generator, monkeypatch: pytest.MonkeyPatch):
    reused = []
    own = generator.generate

    def watched(*args: Any, **options: Any) -> Any:
        out = own(*args, **options)
        reused.append(out.stats.prefix_tokens)
        return out

    long = list(range(10, 60)) * 2
    watched(long, max_tokens=2)
    watched(long, max_tokens=2)
    assert reused[1] > 0
    monkeypatch.setattr(generator, "generate", watched)
    run(generator, [long], tokens=4, gammas=(2,), repeats=2)
    assert len(reused) > 4
    assert not any(reused[2:])


def test_sampled_tokens_are_compared_only_with_a_seed(generator: Generator):
    free = run(generator, PROMPTS, tokens=8, gammas=(2,), sources=["small"], repeats=1, temperature=1.0)
    assert {side.equal for side in free.sides} == {None}
    assert free.same_tokens(free.plain) is None
    seeded = run(generator, PROMPTS, tokens=8, gammas=(2,), sources=["small"], repeats=2, temperature=1.0, seed=7)
    assert [side.name for side in seeded.sides] == ["plain", "small 2"]
    assert {side.equal for side in seeded.sides} == {2}


def test_other_tokens_are_noticed(generator: Generator, monkeypatch: pytest.MonkeyPatch):
    own = generator.generate

    def changed(prompt: Any, **options: Any) -> Any:
        out = own(prompt, **options)
        spoiled = (0, *out.token_ids[1:])
        return dataclasses.replace(out, token_ids=spoiled) if options["gamma"] == 2 and len(prompt) == 4 else out

    monkeypatch.setattr(generator, "generate", changed)
    report = run(generator, PROMPTS, tokens=6, gammas=(2,), sources=["ngram"], repeats=1)
    assert [side.equal for side in report.sides] == [2, 1]
    assert report.same_tokens(report.sides[1]) is False


def test_a_config_is_built_and_closed_and_prompts_come_along():
    config = GeneratorConfig(target=tiny.model(context=1024), draft=None, tokenizer=tiny.tokenizer())
    report = run(config, tokens=2, repeats=1)
    assert report.prompts == ("code", "edit", "extraction", "document", "question")
    assert [side.name for side in report.sides] == ["plain"]


def test_sides_run_in_turns():
    order: list[str] = []

    def side(name: str) -> Any:
        return lambda: order.append(name) or Run((), 0.0, 0.0, None, 0)

    runs = interleave({"a": side("a"), "b": side("b")}, 2)
    assert order == ["a", "b"] * 3
    assert {name: len(got) for name, got in runs.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompts": []}, "empty"),
        ({"prompts": "text"}, "list of prompts"),
        ({"gammas": (0,)}, "gammas holds 0"),
        ({"gammas": (True,)}, "gammas holds True"),
        ({"sources": ["large"]}, "'ngram', 'small'"),
        ({"tokens": 0}, "tokens is 0"),
        ({"repeats": 0}, "repeats is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(generator: Generator, options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        run(generator, **({"prompts": PROMPTS} | options))


def test_the_report_is_json_and_a_picture(report: BenchReport, tmp_path: Path):
    read = json.loads(json.dumps(to_jsonable_python(report)))
    assert [side["name"] for side in read["sides"]] == [side.name for side in report.sides]
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="Name it such as"):
        plot(report, tmp_path / "rates.nonsense")


def test_without_matplotlib_it_says_what_to_install(
    report: BenchReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(MissingDependencyError, match=r"fastdraft\[plot\]"):
        plot(report, tmp_path / "rates.png")

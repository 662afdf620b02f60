"""Draft lengths that are left to the generator, through its public face: what it decides, and that the law stays.

Costs are given, not measured, and never corrected: what is decided depends on what was drafted alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fastdraft import DraftModel, Generator, NGram
from fastdraft.control.costs import Costs, Measured
from tests import tiny
from tests.law import PASS, SAMPLES, brisk, chi_square, joint
from tests.test_law import PROMPT, TOKENS, VOCABULARY, _law, _models

CHEAP = Measured(((1, 0.02), (16, 0.03)), ((64, 0.05),))
DEAR = Measured(((1, 2.0), (16, 3.0)), ((64, 5.0),))
TARGET = Measured(((1, 1.0), (16, 1.3)), ((64, 2.0),))
LONG = [(7 * i) % 300 + 3 for i in range(20)]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the costs of a draft model."""

    def give(draft: Measured) -> None:
        monkeypatch.setattr("fastdraft.build._costs", lambda *_: Costs(TARGET, {"draft_model": draft}))
        monkeypatch.setattr(Costs, "observe", lambda *_: None)

    return give


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny.model(context=512)
    return target, tiny.perturbed(target, 0.02)


@pytest.fixture
def made() -> Iterator[list[Generator]]:
    """Generators that are closed afterwards."""
    generators: list[Generator] = []
    yield generators
    for generator in generators:
        generator.close()


@pytest.mark.parametrize("verification", ["rejection", "invariant"])
def test_lengths_that_react_and_stop_leave_the_law_as_it_is(given: Any, verification: Any) -> None:
    given(CHEAP)
    target, draft = _models()
    with (
        brisk(),
        Generator(
            target,
            [NGram(min=1), DraftModel(draft)],
            tokenizer=tiny.letters(VOCABULARY),
            max_batch=96,
            max_queue=SAMPLES,
            kv_memory="32MiB",
        ) as generator,
    ):
        outs = generator.batch(
            [PROMPT], n=SAMPLES, max_tokens=TOKENS, temperature=1.0, seed=7, verification=verification
        )
    counts = np.zeros((VOCABULARY,) * TOKENS)
    np.add.at(counts, tuple(np.array([out.token_ids for out in outs]).T), 1)
    law = joint(_law(0, {"temperature": 1.0}), VOCABULARY, TOKENS)
    assert chi_square(counts, law) > PASS
    assert chi_square(counts.sum((2, 3)), law.sum((2, 3))) > PASS
    assert {len(gammas) and max(gammas) for gammas in (out.stats.gammas for out in outs)} >= {0, 1, 2}
    assert {name for out in outs for name in out.stats.by_source} == {"ngram", "draft_model"}
    assert 0 < sum(out.stats.accepted_tokens for out in outs) < sum(out.stats.draft_tokens for out in outs)


def test_a_cheap_draft_is_used_and_its_length_follows_its_confidence(
    given: Any, pair: tuple[Any, Any], made: list[Generator]
) -> None:
    given(CHEAP)
    target, draft = pair
    made.append(Generator(target, DraftModel(draft), tokenizer=tiny.tokenizer()))
    generator = made[0]
    plain = generator.generate(LONG, temperature=0, max_tokens=200, gamma=0, ignore_eos=True)
    for _ in range(2):
        out = generator.generate(LONG, temperature=0, max_tokens=200, ignore_eos=True)
        assert out.token_ids == plain.token_ids
    assert out.stats.speculation == "on"
    assert out.stats.gammas[0] == 0  # the first token does not wait for the draft's prefill
    assert len(set(out.stats.gammas)) > 4
    assert out.stats.rounds < 100


def test_a_dear_draft_is_switched_off_and_says_why(given: Any, pair: tuple[Any, Any], made: list[Generator]) -> None:
    given(DEAR)
    target, draft = pair
    made.append(Generator(target, DraftModel(draft), tokenizer=tiny.tokenizer()))
    generator = made[0]
    generator.generate(LONG, temperature=0, max_tokens=100, ignore_eos=True)
    out = generator.generate(LONG, temperature=0, max_tokens=100, ignore_eos=True)
    assert out.stats.speculation == "off: drafts cost more than they gain"
    assert out.stats.draft_tokens <= 2
    kept = generator.generate(LONG, temperature=0, max_tokens=30, gamma=3, ignore_eos=True)
    assert kept.stats.speculation == "on" and kept.stats.gammas[0] == 3
    metrics = generator.metrics()
    assert metrics.draft_free_blocks == metrics.draft_total_blocks


def test_hostile_text_is_left_alone_after_two_calls(given: Any, made: list[Generator]) -> None:
    given(CHEAP)
    target, stranger = tiny.model(context=512), tiny.model(seed=9, context=512)
    made.append(Generator(target, [NGram(), DraftModel(stranger)], tokenizer=tiny.tokenizer()))
    prompts = [[(i * i * (7 + call)) % 300 + 3 for i in range(60)] for call in range(4)]
    outs = [made[0].generate(prompt, temperature=0, max_tokens=100, ignore_eos=True) for prompt in prompts]
    assert outs[-1].stats.draft_tokens < 20
    assert outs[-1].stats.speculation.startswith("off: ")


def test_calls_that_share_a_batch_stop_each_at_its_own_place(
    given: Any, pair: tuple[Any, Any], made: list[Generator]
) -> None:
    given(CHEAP)
    target, draft = pair
    made.append(Generator(target, DraftModel(draft), tokenizer=tiny.tokenizer()))
    generator = made[0]
    prompts = [[(k * i) % 300 + 3 for i in range(20)] for k in (7, 11, 13)]
    plain = [generator.generate(p, temperature=0, max_tokens=100, gamma=0, ignore_eos=True).token_ids for p in prompts]
    generator.batch(prompts, temperature=0, max_tokens=100, ignore_eos=True)
    outs = generator.batch(prompts, temperature=0, max_tokens=100, ignore_eos=True)
    assert [out.token_ids for out in outs] == plain
    assert len({out.stats.gammas for out in outs}) == 3


def test_an_integer_gamma_and_one_source_depend_on_nothing_but_the_seed(
    pair: tuple[Any, Any], made: list[Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "seed": 3, "verification": "rejection"}
    options |= {"gamma": 3, "source": "draft_model", "ignore_eos": True}
    outs = []
    for costs in (CHEAP, DEAR):
        monkeypatch.setattr("fastdraft.build._costs", lambda *_, c=costs: Costs(TARGET, {"draft_model": c}))
        made.append(Generator(target, [NGram(min=1), DraftModel(draft)], tokenizer=tiny.tokenizer()))
        outs += [made[-1].generate(LONG, **options) for _ in range(2)]
    assert len({out.token_ids for out in outs}) == 1
    assert len({out.stats.gammas for out in outs}) == 1

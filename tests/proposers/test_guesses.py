"""A draft model that is fed what the text suggests: the same drafts, from fewer forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastdraft import Completion, Constrained, DraftModel, Generator, Json
from fastdraft.proposers.guesses import Guesses, _worth
from tests import tiny
from tests.watch import Forwards

TOKENIZER = tiny.tokenizer(merged=tiny.JSON)
PROMPTS = [
    TOKENIZER('{"name":"tea at ease","note":"tea at ease"},{"name":"tea at ease","note":"').input_ids,
    TOKENIZER("the sun rose, the sun set, the sun rose").input_ids,
]


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    target = tiny.model("llama", spread=2.0)
    with Generator(target, DraftModel(tiny.perturbed(target, 0.03)), tokenizer=TOKENIZER, kv_memory="4MiB") as made:
        yield made


def _run(generator: Generator, **options: Any) -> list[Completion[Any]]:
    return generator.batch(PROMPTS, gamma=6, source="draft_model", max_tokens=40, ignore_eos=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.9, "seed": 5, "verification": "rejection"},
        {"temperature": 0.7, "seed": 5, "verification": "rejection", "alpha": 0.6, "top_p": 0.9},
        {"temperature": 1.2, "seed": 5},
    ],
)
@pytest.mark.parametrize("output_type", [None, ["tea at ease", "tea at sea", "the sun"]])
def test_guesses_change_no_draft(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], output_type: Any
) -> None:
    options = options | {"output_type": output_type}
    with_guesses = _run(generator, **options)
    with monkeypatch.context() as patch:
        patch.setattr(Guesses, "guess", lambda *_: ([], 0))
        without = _run(generator, **options)
    for one, other in zip(with_guesses, without, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.draft_tokens == other.stats.draft_tokens > 0
        assert one.stats.accepted_per_position == other.stats.accepted_per_position
    metrics = generator.metrics()
    assert metrics.draft_free_blocks == metrics.draft_total_blocks


def test_what_was_guessed_and_not_drawn_leaves_no_trace_in_the_cache(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong guesses at every step: each draft is what a fresh prefill says."""
    monkeypatch.setattr(Guesses, "guess", lambda *args: ([5, 6, 7][: args[-1]], 1))
    wrong = _run(generator, temperature=0)
    monkeypatch.setattr(Guesses, "guess", lambda *_: ([], 0))
    generator.forget_prefixes()
    without = _run(generator, temperature=0)
    assert [out.stats.accepted_per_position for out in wrong] == [out.stats.accepted_per_position for out in without]


def test_under_a_grammar_only_what_it_allows_is_fed(generator: Generator) -> None:
    outs = _run(generator, temperature=0, output_type=Constrained(Json(), max_string=5, finish="close"))
    plain = generator.batch(
        PROMPTS,
        gamma=0,
        max_tokens=40,
        temperature=0,
        ignore_eos=True,
        output_type=Constrained(Json(), max_string=5, finish="close"),
    )
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]


def test_a_text_that_is_repeated_takes_fewer_forwards(
    smollm2: Any, smollm2_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The keeper climbs the ninety-three steps, lights the lamp and writes the weather into a blue book."
    ask = [{"role": "user", "content": f"Repeat this sentence word for word.\n\n{text}"}]
    counts = []
    with Generator(smollm2_path, DraftModel(smollm2)) as generator:
        for patched in (False, True):
            if patched:
                monkeypatch.setattr(Guesses, "guess", lambda *_: ([], 0))
            generator.forget_prefixes()
            with Forwards(smollm2) as seen:
                out = generator.generate(ask, temperature=0, max_tokens=24, gamma=8, source="draft_model")
            counts.append(seen.count)
    assert counts[0] < 0.7 * counts[1], (counts, out.text)


def test_the_surer_a_guess_the_more_are_tried() -> None:
    assert [_worth(right) for right in (0.0, 0.1, 0.5, 0.7, 0.99)] == sorted(map(_worth, (0.0, 0.1, 0.5, 0.7, 0.99)))
    assert _worth(0.1) == 0 and _worth(0.99) > 4

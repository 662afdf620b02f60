"""Faults end the call they are of: others go on, and a draft that fails costs speed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastdraft import Completion, DraftModel, EngineFailedError, Generator, NGram
from tests import tiny
from tests.watch import Breaks, settled, within

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18], [20]]
POISON = 4  # a token that nobody writes
OPTIONS: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 20,
    "ignore_eos": True,
    "logit_bias": {POISON: -float("inf")},
}


@pytest.fixture
def model() -> Any:
    return tiny.model(context=512)


@pytest.fixture
def draft(model: Any) -> Any:
    return tiny.perturbed(model, 0.1)


@contextmanager
def refused(model: Any, when: Any, error: type[BaseException] = RuntimeError) -> Iterator[list[int]]:
    """Every forward raises whose packed ids are such; yields the sizes of all forwards."""
    sizes: list[int] = []

    def check(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"][0].tolist()
        sizes.append(len(ids))
        if when(ids):
            raise error("boom")

    hook = model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield sizes
    finally:
        hook.remove()


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("place", range(3))
def test_a_forward_that_fails_for_one_request_ends_that_one(
    model: Any, draft: Any, tokenizer: Any, gamma: int, place: int
) -> None:
    with Generator(model, DraftModel(draft), tokenizer=tokenizer) as generator:
        alone = [generator.generate(prompt, gamma=gamma, **OPTIONS).token_ids for prompt in PROMPTS]
        prompts = [*PROMPTS[: 2 * place], [30, POISON, 31], *PROMPTS[2 * place :]]
        with refused(model, lambda ids: POISON in ids):
            outs = within(lambda: generator.batch(prompts, gamma=gamma, return_exceptions=True, **OPTIONS))
        sick = outs.pop(2 * place)
        assert isinstance(sick, EngineFailedError) and "boom" in str(sick)
        assert [out.token_ids for out in outs if isinstance(out, Completion)] == alone
        assert generator.metrics().split_rounds == 1
        settled(generator)


def test_a_forward_that_fails_once_ends_nobody_of_a_batch(model: Any, tokenizer: Any) -> None:
    with Generator(model, tokenizer=tokenizer) as generator:
        alone = [generator.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS]
        with Breaks(model, 5, lambda: RuntimeError("boom")):
            outs = within(lambda: generator.batch(PROMPTS, **OPTIONS))
        assert [out.token_ids for out in outs] == alone
        settled(generator)


def test_too_little_memory_halves_the_batch(model: Any, tokenizer: Any) -> None:
    with Generator(model, None, tokenizer=tokenizer) as generator:
        alone = [generator.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS]
        with refused(model, lambda ids: len(ids) > 2 and 3 not in ids, torch.OutOfMemoryError):
            with refused(model, lambda ids: False) as sizes:
                # The first forwards of a prompt are let through by its token 3.
                outs = within(lambda: generator.batch([[3, *prompt] for prompt in PROMPTS], **OPTIONS))
            assert all(isinstance(out, Completion) for out in outs)
            assert sizes[-1] <= 2
        assert generator.metrics().preempted > 0
        assert [generator.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS] == alone
        settled(generator)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("at", [1, 4])
def test_a_draft_that_fails_costs_speed_alone(model: Any, draft: Any, tokenizer: Any, at: int, others: bool) -> None:
    sources = [DraftModel(draft), NGram(min=1)] if others else DraftModel(draft)
    with Generator(model, sources, tokenizer=tokenizer) as generator:
        want = [tiny.greedy(model, prompt, 20) for prompt in PROMPTS]
        with Breaks(draft, at, lambda: RuntimeError("boom")):
            outs = within(lambda: generator.batch(PROMPTS, temperature=0, max_tokens=20, ignore_eos=True, gamma=4))
        assert [list(out.token_ids) for out in outs] == want
        failed = [out for out in outs if out.stats.speculation == "off: draft_model failed (RuntimeError)"]
        assert not failed if others else failed
        assert generator.metrics().draft_failures == 1
        again = generator.generate(PROMPTS[0], temperature=0, max_tokens=20, ignore_eos=True, gamma=4)
        assert again.stats.draft_tokens and again.stats.speculation == "on"  # another call tries anew
        settled(generator)


def test_a_draft_that_fails_under_a_grammar(model: Any, draft: Any, tokenizer: Any) -> None:
    kind = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "output_type": kind}
    with Generator(model, DraftModel(draft), tokenizer=tokenizer) as generator:
        want = generator.generate([5, 6, 7], gamma=0, **options)
        with Breaks(draft, 3, lambda: RuntimeError("boom")):
            out = within(lambda: generator.generate([5, 6, 7], gamma=3, **options))
        assert out.token_ids == want.token_ids and out.parsed == want.parsed
        settled(generator)

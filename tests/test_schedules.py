"""Calls that join and leave a batch at any round give what they give alone; urgent ones come sooner."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from fastdraft import Completion, ConfigError, DraftModel, Generator, NGram, OutputValidationError, SourceStats
from tests import tiny
from tests.watch import LIMIT, Gate, settled

CALLS = 32
KIND = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}


class Pair(NamedTuple):
    target: Any
    sources: list[Any]


@pytest.fixture(scope="module")
def pair() -> Pair:
    """In float64, where the rounding of differently shaped products can't flip a near-tie of noise."""
    target = tiny.model("llama", spread=2.0, dtype=torch.float64, context=512)
    draft = tiny.perturbed(target, 0.05)
    return Pair(target, [DraftModel(draft), NGram(min=1)])


def _generator(pair: Pair, **options: Any) -> Generator:
    words = tiny.tokenizer(merged=tiny.JSON)
    # Forty blocks: less than all want at once, so that some are preempted.
    budget = 40 * 16 * 2 * (2 * 2 * 8 * 8) * 2
    return Generator(pair.target, pair.sources, tokenizer=words, kv_memory=budget, **options)


def _call(number: int) -> tuple[list[int], dict[str, Any]]:
    """One of many different calls, each with one possible output."""
    chance = random.Random(number)
    shared = [(7 * i) % 300 + 3 for i in range(chance.choice([0, 0, 20, 40]))]
    prompt = [*shared, *(chance.randrange(3, 300) for _ in range(chance.randrange(1, 60)))]
    options: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 40),
        "gamma": chance.choice([0, 1, 3, 7, "auto"]),
        "source": chance.choice([None, "draft_model", "ngram"]),
        "seed": number,
        "temperature": chance.choice([0, 0.8, 1.3]),
    }
    match number % 4:
        case 1:
            options |= {"output_type": KIND, "max_tokens": 60}
        case 2:
            options |= {"stop": ["e", "th"], "top_p": 0.9, "repetition_penalty": 1.1}
        case 3:
            options |= {
                "frequency_penalty": 0.4,
                "min_tokens": min(5, options["max_tokens"]),
                "ignore_eos": chance.random() < 0.5,
            }
    return prompt, options


def _plain(outcome: Completion[Any] | BaseException) -> tuple[Any, ...]:
    if isinstance(outcome, OutputValidationError):
        outcome = outcome.completion
    assert isinstance(outcome, Completion), outcome
    return outcome.token_ids, outcome.text, outcome.finish_reason


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Iterator[list[tuple[Any, ...]]]:
    found = []
    with _generator(pair, max_batch=1) as generator:
        for number in range(CALLS):
            prompt, options = _call(number)
            (out,) = generator.batch([prompt], return_exceptions=True, **options)
            found.append(_plain(out))
    yield found


def _scheduled(pair: Pair, alone: list[tuple[Any, ...]], schedule: int) -> None:
    chance = random.Random(schedule)
    order = list(range(CALLS))
    chance.shuffle(order)
    with _generator(pair, max_batch=chance.choice([3, 8, 16])) as generator:

        def run(number: int, door: str, wait: float, leaves: int) -> None:
            prompt, options = _call(number)
            time.sleep(wait)
            if door == "async":
                try:
                    assert _plain(asyncio.run(generator.agenerate(prompt, **options))) == alone[number]
                except OutputValidationError as error:
                    assert _plain(error) == alone[number]
                return
            stream = generator.stream(prompt, priority=chance.randrange(3), **options)
            seen: list[int] = []
            try:
                for count, chunk in enumerate(stream):
                    seen += chunk.token_ids
                    if count == leaves:
                        stream.close()
            except OutputValidationError as error:
                assert _plain(error) == alone[number]
            if leaves >= 0:
                assert tuple(seen) == alone[number][0][: len(seen)]
            else:
                assert tuple(seen) == alone[number][0]

        with ThreadPoolExecutor(CALLS) as pool:
            jobs = [
                pool.submit(
                    run,
                    number,
                    chance.choice(["stream", "stream", "async"]),
                    chance.random() * 0.15,
                    chance.choice([-1, -1, -1, 0, 3]),
                )
                for number in order
            ]
            for job in jobs:
                job.result(LIMIT)
        settled(generator)


@pytest.mark.parametrize("schedule", range(20))
def test_a_batch_equals_single_calls(pair: Pair, alone: list[tuple[Any, ...]], schedule: int) -> None:
    _scheduled(pair, alone, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", range(20, 200))
def test_a_batch_equals_single_calls_on_many_schedules(pair: Pair, alone: list[tuple[Any, ...]], schedule: int) -> None:
    _scheduled(pair, alone, schedule)


def test_urgent_calls_come_sooner(pair: Pair) -> None:
    model = pair.target
    with Generator(model, None, tokenizer=tiny.tokenizer(), max_batch=1) as generator:
        ended: list[int] = []

        def run(stream: Any, priority: int) -> None:
            _ = stream.completion
            ended.append(priority)

        with Gate(model) as gate, ThreadPoolExecutor(8) as pool:
            first = generator.stream([5], max_tokens=2, ignore_eos=True)
            gate.wait()
            jobs = [
                pool.submit(run, generator.stream([6], priority=level, max_tokens=2, ignore_eos=True), level)
                for level in (0, -1, 2, 1, 2)
            ]
            gate.open()
            _ = first.completion
            for job in jobs:
                job.result(LIMIT)
        assert ended == [2, 2, 1, 0, -1]
        for level in (True, 1.5, "high"):
            with pytest.raises(ConfigError, match="priority"):
                generator.generate([5], priority=level)  # type: ignore[arg-type]


def test_metrics_tell_what_was_done(pair: Pair) -> None:
    with _generator(pair) as generator:
        before = generator.metrics()
        assert (before.finished, before.tokens, before.inter_token.p50) == (0, 0, None)
        prompts = [_call(number) for number in range(12)]
        outs = [generator.batch([prompt], return_exceptions=True, **options)[0] for prompt, options in prompts]
        found = generator.metrics()
        done = [out.completion if isinstance(out, OutputValidationError) else out for out in outs]
        stats = [out.stats for out in done if isinstance(out, Completion)]
        assert found.finished == 12 and found.tokens == sum(one.completion_tokens for one in stats)
        assert found.rounds >= sum(one.rounds for one in stats)
        for name in ("draft_model", "ngram", "forced"):
            mine = [one.by_source[name] for one in stats if name in one.by_source]
            all_of_it = found.by_source.get(name, SourceStats())
            assert all_of_it.draft_tokens == sum(one.draft_tokens for one in mine)
            assert all_of_it.accepted_tokens == sum(one.accepted_tokens for one in mine)
        assert found.by_source["draft_model"].accepted_tokens > 0
        assert found.constraint_seconds > 0 and found.draft_seconds > 0 and found.target_seconds > 0
        assert 0 < found.prefix_hit_rate < 1
        for spread in (found.time_to_first_token, found.inter_token):
            assert spread.p50 and spread.p95 and spread.p99
            assert 0 < spread.p50 <= spread.p95 <= spread.p99

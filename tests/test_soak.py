"""Thousands of calls, many of them cancelled, late, bad or hit by a fault: each ends as it should, and nothing stays.

``make soak`` runs 20,000 of them; the tests run 1,000.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil

from fastdraft import (
    ConfigError,
    DraftModel,
    EngineFailedError,
    FastDraftError,
    Generator,
    NGram,
    NumericalError,
    OutputValidationError,
    QueueFullError,
)
from tests import tiny
from tests.watch import settled, workers

CALLS = int(os.environ.get("SOAK", "1000"))
THREADS, TASKS = 16, 200
KINDS = 40  # different calls, each with one output


def _call(kind: int) -> tuple[list[int], dict[str, Any]]:
    chance = random.Random(kind)
    head = [(7 * i) % 300 + 3 for i in range(chance.choice([0, 17, 40]))]
    prompt = [*head, *(chance.randrange(3, 300) for _ in range(chance.randrange(1, 20)))]
    options: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 12),
        "gamma": chance.choice([0, 2, 5]),
        "source": chance.choice(["draft_model", "ngram"]),
        "seed": kind,
        "temperature": chance.choice([0, 1.1]),
    }
    if kind % 5 == 0:
        options |= {"output_type": {"enum": ["yes", "no", 12]}, "max_tokens": 12}
    return prompt, options


class Faults:
    """Now and then a forward of a model raises, or its logits are nan, while ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.count: Counter[str] = Counter()
        self._forwards = 0

    def before(self, module: Any, args: Any, kwargs: Any) -> None:
        self._forwards += self.on
        if self.on and self._forwards % 43 == 0:
            self.count["raised"] += 1
            raise RuntimeError("injected")

    def after(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if self.on and self._forwards % 89 == 0:
            self.count["nan"] += 1
            output.logits.fill_(float("nan"))
        return output


@contextmanager
def _injected(*models: Any) -> Iterator[list[Faults]]:
    every = [Faults() for _ in models]
    hooks = [m.register_forward_pre_hook(f.before, with_kwargs=True) for m, f in zip(models, every, strict=True)]
    hooks += [m.register_forward_hook(f.after, with_kwargs=True) for m, f in zip(models, every, strict=True)]
    try:
        yield every
    finally:
        for hook in hooks:
            hook.remove()


def _outcome(run: Any) -> tuple[str, tuple[int, ...]]:
    """How a call ended, and its tokens."""
    try:
        out = run()
    except OutputValidationError as error:
        out = error.completion
    except (EngineFailedError, NumericalError) as error:
        assert "injected" in str(error) or "nan" in str(error), error
        return "fault", ()
    return out.finish_reason, out.token_ids


def test_nothing_stays_of_thousands_of_calls() -> None:
    target = tiny.model("llama", spread=2.0)
    draft = tiny.perturbed(target, 0.05)
    threads, before = threading.active_count(), {*workers()}
    generator = Generator(
        target,
        [DraftModel(draft), NGram(min=1)],
        tokenizer=tiny.tokenizer(merged=tiny.JSON),
        kv_memory=60 * 16 * 2 * (2 * 2 * 8 * 4) * 2,
        max_batch=12,
        max_queue=400,
    )
    ended: Counter[str] = Counter()
    memory: list[int] = []
    numbers = iter(range(CALLS))
    lock = threading.Lock()
    with generator, _injected(target, draft) as faults:
        want = []
        for kind in range(KINDS):
            prompt, options = _call(kind)
            want.append(_outcome(lambda: generator.generate(prompt, **options)))  # noqa: B023
        for one in faults:
            one.on = True

        def judge(kind: int, outcome: tuple[str, tuple[int, ...]]) -> None:
            how, tokens = outcome
            with lock:
                ended[how] += 1
                if sum(ended.values()) % 50 == 0:
                    memory.append(psutil.Process().memory_info().rss)
            if how in ("cancelled", "timeout"):
                assert tokens == want[kind][1][: len(tokens)]
            elif how != "fault":
                assert outcome == want[kind]

        def refused(error: BaseException) -> None:
            assert isinstance(error, QueueFullError | ConfigError), error
            with lock:
                ended[type(error).__name__] += 1

        def work() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                chance = random.Random(number)
                kind = chance.randrange(KINDS)
                prompt, options = _call(kind)
                way = chance.random()
                try:
                    if way < 0.05:
                        generator.generate(prompt, temperature=-1)
                    elif way < 0.1:
                        judge(kind, _outcome(lambda: generator.generate(prompt, timeout=0.004, **options)))  # noqa: B023
                    elif way < 0.2:
                        stream = generator.stream(prompt, **options)
                        next(stream, None)
                        stream.close()
                        judge(kind, _outcome(lambda: stream.completion))  # noqa: B023
                    elif way < 0.25:
                        generator.stream(prompt, **options)  # dropped at once
                        with lock:
                            ended["dropped"] += 1
                    else:
                        judge(kind, _outcome(lambda: generator.generate(prompt, **options)))  # noqa: B023
                except FastDraftError as error:
                    refused(error)

        async def task(number: int) -> None:
            chance = random.Random(-number)
            kind = chance.randrange(KINDS)
            prompt, options = _call(kind)
            call = generator.agenerate(prompt, **options)
            try:
                if chance.random() < 0.2:
                    await asyncio.wait_for(call, chance.random() * 0.05)
                else:
                    out = await call
                    judge(kind, (out.finish_reason, out.token_ids))
            except TimeoutError:
                with lock:
                    ended["given up"] += 1
            except OutputValidationError as error:
                judge(kind, (error.completion.finish_reason, error.completion.token_ids))
            except (EngineFailedError, NumericalError):
                judge(kind, ("fault", ()))
            except FastDraftError as error:
                refused(error)

        async def tasks() -> None:
            while True:
                with lock:
                    mine = [number for number in (next(numbers, None) for _ in range(TASKS)) if number is not None]
                if not mine:
                    return
                await asyncio.gather(*(task(number) for number in mine))

        with ThreadPoolExecutor(THREADS + 1) as pool:
            jobs = [pool.submit(work) for _ in range(THREADS)] + [pool.submit(lambda: asyncio.run(tasks()))]
            for job in jobs:
                job.result()
        for one in faults:
            one.on = False
        gc.collect()
        settled(generator)
        for kind in range(KINDS):
            prompt, options = _call(kind)
            assert _outcome(lambda: generator.generate(prompt, **options)) == want[kind]  # noqa: B023
        settled(generator)
        found = generator.metrics()
        runners = [source.runner for source in generator._worker.ask(lambda engine: engine.drafts).values()]
        assert all(not source._tables for source in generator._worker.ask(lambda engine: engine.drafts).values())
        assert all(runner.pool.in_use == 0 for runner in runners)
    assert sum(ended.values()) == CALLS, ended
    assert all(one.count["raised"] and one.count["nan"] for one in faults)
    assert ended["cancelled"] and ended["ConfigError"] and ended["fault"]
    assert found.split_rounds and found.draft_failures
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {*workers()} <= before and threading.active_count() <= threads
    if CALLS >= 20_000:
        half = memory[len(memory) // 2]
        assert memory[-1] <= 1.02 * half, (half, memory[-1])

"""Threads, event loops, cancellation, failures, closing: nothing hangs, nothing leaks, others are unharmed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fastdraft import (
    Completion,
    DraftModel,
    EngineFailedError,
    Generator,
    GeneratorClosedError,
    NGram,
    NumericalError,
    QueueFullError,
    SamplingParams,
)
from tests import tiny
from tests.watch import LIMIT, Breaks, Forwards, Gate, expected, settled, within, workers

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [f"{word} is number {i}" for i, word in enumerate(["the", "rain", "in", "that", "land", "is", "not", "hot"])]
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = workers()
    yield
    gc.collect()
    assert {*workers()} <= {*before}  # of an earlier file's, some may end only now


@pytest.fixture(scope="module")
def words() -> Any:
    return tiny.tokenizer()


@pytest.fixture
def model() -> Any:
    return tiny.model(context=512)


@pytest.fixture
def draft(model: Any) -> Any:
    return tiny.perturbed(model, 0.3)


@pytest.fixture
def gen(model: Any, draft: Any, words: Any) -> Iterator[Generator]:
    with Generator(model, [DraftModel(draft), NGram()], tokenizer=words) as generator:
        yield generator


def works(generator: Generator, model: Any) -> None:
    """Asserts that nothing is left of earlier calls and the next one gives what it should."""
    settled(generator)
    assert generator.status == "ready"
    out = generator.generate([5, 6, 7], temperature=0, max_tokens=12, ignore_eos=True)
    assert list(out.token_ids) == tiny.greedy(model, [5, 6, 7], 12)


def mixed(index: int) -> dict[str, Any]:
    """The options of one of many different calls, each repeatable."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "gamma": 0},
        {"temperature": 0.8, "seed": 7 + index},
        {"temperature": 1.2, "top_p": 0.9, "seed": index, "frequency_penalty": 0.5},
        {"temperature": 0, "stop": ["e"], "logprobs": 2},
    ]
    return {"max_tokens": 20 + index % 7, **kinds[index % len(kinds)]}


def same(one: Completion[Any], other: Completion[Any]) -> bool:
    return (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)


# Many callers.


def test_eight_threads_with_mixed_calls(model, draft, words):
    jobs = [(PROMPTS[i % 8], mixed(i)) for i in range(40)]
    with Generator(model, draft, tokenizer=words) as generator:
        alone = [generator.generate(prompt, **options) for prompt, options in jobs]

    def run(number: int) -> Completion[Any]:
        prompt, options = jobs[number]
        match number % 4:
            case 0:
                return generator.generate(prompt, **options)
            case 1:
                with generator.stream(prompt, **options) as stream:
                    assert "".join(chunk.text for chunk in stream) == stream.completion.text
                    return stream.completion
            case 2:
                other = generator.batch([PROMPTS[number % 3], prompt], **options)
                return other[1]
            case _:
                return asyncio.run(generator.agenerate(prompt, **options))

    with Generator(model, draft, tokenizer=words) as generator:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(run, range(len(jobs)), timeout=LIMIT))
        assert [same(one, other) for one, other in zip(results, alone, strict=True)] == [True] * len(jobs)
        works(generator, model)


def test_more_calls_than_kv_holds(model, draft, words):
    """Some are preempted and computed again; all end as they would alone."""
    options: Any = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "gamma": 4}
    with Generator(model, draft, tokenizer=words, kv_memory=7 * 16 * 512) as generator:
        assert generator.metrics().total_blocks == 7
        outs = generator.batch(PROMPTS, **options)
        for prompt, out in zip(PROMPTS, outs, strict=True):
            assert list(out.token_ids) == expected(model, words, prompt, 60)
        works(generator, model)


def test_calls_with_one_request_id(gen, model, words):
    """An id is the user's name for a call: two calls may bear it at once."""
    options: Any = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "gamma": 4, "request_id": "mine"}
    streams = [gen.stream(prompt, **options) for prompt in PROMPTS[:3]]
    for prompt, stream in zip(PROMPTS, streams, strict=False):
        assert stream.completion.request_id == stream.request_id == "mine"
        assert list(stream.completion.token_ids) == expected(model, words, prompt, 40)
    works(gen, model)


def test_request_ids(gen):
    with gen.stream("hello", max_tokens=2) as stream:
        assert stream.completion.request_id == stream.request_id
    outs = gen.batch(["a", "b"], n=2, max_tokens=2)
    outs += gen.batch(["a", "b"], n=2, max_tokens=2, request_id="mine")
    outs.append(stream.completion)
    assert len({out.request_id for out in outs}) == len(outs)
    assert all(out.request_id.startswith("mine") for out in outs[4:8])


async def test_many_tasks_at_once(gen, model):
    jobs = [(PROMPTS[i % 8], mixed(i)) for i in range(24)]
    alone = [await gen.agenerate(prompt, **options) for prompt, options in jobs]
    results = await asyncio.gather(*(gen.agenerate(prompt, **options) for prompt, options in jobs))
    assert [same(one, other) for one, other in zip(results, alone, strict=True)] == [True] * len(jobs)
    batch = await gen.abatch([prompt for prompt, _ in jobs], [SamplingParams(**options) for _, options in jobs])
    assert [same(one, other) for one, other in zip(batch, alone, strict=True)] == [True] * len(jobs)
    await asyncio.to_thread(works, gen, model)


async def test_an_event_loop_goes_on_while_a_model_runs(gen, model):
    with Gate(model, after=2) as gate:
        task = asyncio.create_task(gen.agenerate("hello", **LONG))
        await asyncio.to_thread(gate.wait)  # the model stands still, this loop does not
        assert not task.done()
        gate.open()
        assert (await task).completion_tokens == 400


async def test_streams_of_one_loop_interleave(gen):
    alone = [await gen.agenerate(prompt, **mixed(2)) for prompt in PROMPTS]

    async def read(prompt: str) -> tuple[str, Completion[Any]]:
        async with gen.astream(prompt, **mixed(2)) as stream:
            texts = [chunk.text async for chunk in stream]
            return "".join(texts), await stream.result()

    for one, (text, out) in zip(alone, await asyncio.gather(*map(read, PROMPTS)), strict=True):
        assert text == out.text == one.text


def test_one_generator_for_several_loops(gen, model):
    for prompt in PROMPTS[:3]:
        out = asyncio.run(gen.agenerate(prompt, **mixed(0)))
        assert same(out, gen.generate(prompt, **mixed(0)))
    works(gen, model)


# Calls that are given up.


async def test_a_cancelled_task(gen, model):
    with Gate(model, after=2) as gate:
        task = asyncio.create_task(gen.agenerate("hello", **LONG))
        await asyncio.to_thread(gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await asyncio.to_thread(works, gen, model)


async def test_a_cancelled_batch(gen, model):
    with Gate(model, after=2) as gate:
        task = asyncio.create_task(gen.abatch(PROMPTS, **LONG))
        await asyncio.to_thread(gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        await asyncio.to_thread(works, gen, model)


async def test_wait_for_gives_up(gen, model):
    with Gate(model, after=2) as gate:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gen.agenerate("hello", **LONG), 0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                async for _ in gen.astream("hello", **LONG):
                    pass
        gate.open()
        await asyncio.to_thread(works, gen, model)


async def test_one_failing_task_of_a_group(gen, model):
    async def fail() -> None:
        async with gen.astream("hello", **LONG) as stream:
            await anext(stream)
            raise ValueError("mine")

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(gen.agenerate("hello", **LONG))
    await asyncio.to_thread(works, gen, model)


def test_a_loop_that_ends_before_its_calls(gen, model):
    kept = []

    async def leave() -> None:
        kept.append(gen.astream("hello", **LONG))
        kept.append(asyncio.ensure_future(gen.agenerate("hello", **LONG)))
        await asyncio.sleep(0)  # the task begins

    asyncio.run(leave())
    out = gen.generate([5, 6], temperature=0, max_tokens=5, ignore_eos=True)
    assert list(out.token_ids) == tiny.greedy(model, [5, 6], 5)
    kept[0].close()
    works(gen, model)


def test_a_closed_stream_takes_part_in_no_further_round(gen, model):
    with Gate(model, after=3) as gate:
        stream = gen.stream("hello", gamma=0, **LONG)
        gate.wait()
        stream.close()
        stream.close()
        gate.open()
        out = stream.completion
    assert out.finish_reason == "cancelled"
    assert gate.count == 4  # the one in progress was the last
    assert out.completion_tokens == 4
    assert [chunk.finish_reason for chunk in stream] == []
    works(gen, model)


def test_a_stream_closed_by_another_thread(gen, model):
    with Gate(model, after=3) as gate:
        stream = gen.stream("hello", gamma=0, **LONG)
        closer = threading.Thread(target=lambda: (gate.wait(), stream.close(), gate.open()))
        closer.start()
        chunks = within(lambda: list(stream))
        closer.join()
    assert chunks[-1].finish_reason == "cancelled"
    assert "".join(chunk.text for chunk in chunks) == stream.completion.text
    works(gen, model)


@pytest.mark.parametrize("iterated", [True, False])
def test_a_dropped_stream(gen, model, iterated):
    with Gate(model, after=3) as gate:
        stream = gen.stream("hello", gamma=0, **LONG)
        if iterated:
            next(stream)
        gate.wait()
        del stream
        gc.collect()
        gate.open()
        settled(gen)
    assert sum(len(fed) > 1 for fed in gate.fed) == 1  # it was in no round with the call that settles
    works(gen, model)


def test_leaving_the_block_closes_a_stream(gen, model):
    with Gate(model, after=3) as gate:
        with gen.stream("hello", gamma=0, **LONG) as stream:
            next(stream)
            gate.wait()
        gate.open()
        assert stream.completion.finish_reason == "cancelled"
    assert gate.count == 4
    works(gen, model)


async def test_leaving_the_block_closes_an_async_stream(gen, model):
    with Gate(model, after=3) as gate:
        async with gen.astream("hello", gamma=0, **LONG) as stream:
            await anext(stream)
            await asyncio.to_thread(gate.wait)
        await stream.aclose()
        gate.open()
        assert (await stream.result()).finish_reason == "cancelled"
    await asyncio.to_thread(works, gen, model)


def test_a_stream_keeps_its_generator_alive(model, words):
    generator = Generator(model, tokenizer=words)
    stream = generator.stream([5, 6, 7], temperature=0, max_tokens=12, ignore_eos=True)
    del generator
    gc.collect()
    assert list(stream.completion.token_ids) == tiny.greedy(model, [5, 6, 7], 12)
    del stream


def test_a_dropped_generator_ends_its_thread(model, words):
    before = workers()
    generator = Generator(model, tokenizer=words)
    generator.generate("hello", max_tokens=2)
    assert len(workers()) == len(before) + 1
    del generator
    gc.collect()
    assert workers() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_in_the_consumer(gen, model, error):
    with Gate(model, after=5) as gate:
        with pytest.raises(error), gen.stream("hello", gamma=0, **LONG) as stream:
            for count, _ in enumerate(stream, 1):
                if count == 3:
                    raise error
        gate.open()
        assert stream.completion.finish_reason == "cancelled"
    works(gen, model)


def test_an_interrupt_while_a_call_waits(gen, model, monkeypatch):
    """Ctrl-C in generate() cancels the call."""
    submitted = []

    class Interrupted:
        def get(self) -> Any:
            raise KeyboardInterrupt

        def put(self, event: Any) -> None:
            submitted.append(event)

    with Gate(model, after=1) as gate, monkeypatch.context() as patch:
        patch.setattr("queue.SimpleQueue", Interrupted)
        for call in (lambda: gen.generate("hello", **LONG), lambda: gen.batch(PROMPTS, **LONG)):
            with pytest.raises(KeyboardInterrupt):
                call()
        patch.undo()
        gate.open()
        works(gen, model)
    assert [event.finish_reason for event in submitted if isinstance(event, Completion)] == ["cancelled"] * 9


def test_fifty_abandoned_streams_leave_nothing(gen, model):
    works(gen, model)
    threads, memory = threading.active_count(), psutil.Process().memory_info().rss
    for number in range(50):
        stream = gen.stream([9, 8, 7], **LONG)
        if number % 3:
            next(stream)
        if number % 2:
            stream.close()
        del stream
    works(gen, model)
    assert threading.active_count() == threads
    assert psutil.Process().memory_info().rss - memory < 30e6


# Time.


def until(moment: float) -> Callable[[], None]:
    """A forward that takes until a moment has passed."""

    def wait() -> None:
        while (left := moment - time.perf_counter()) > 0:
            threading.Event().wait(left)

    return wait


class Slow(Forwards):
    """Makes the third forward take until some seconds from now have passed."""

    def __init__(self, model: Any, seconds: float) -> None:
        super().__init__(model)
        self._wait = until(time.perf_counter() + seconds)

    def begin(self) -> None:
        if self.count == 3:
            self._wait()


def test_a_timeout_ends_a_call_with_what_it_has(gen, model):
    usual = gen.generate("hello", temperature=0, gamma=0, max_tokens=10, ignore_eos=True)
    with Slow(model, 0.6):
        out = gen.generate("hello", temperature=0, gamma=0, max_tokens=400, ignore_eos=True, timeout=0.5)
    assert out.finish_reason == "timeout"
    assert out.completion_tokens <= 3
    assert out.token_ids == usual.token_ids[: out.completion_tokens]
    assert usual.text.startswith(out.text)
    works(gen, model)


def test_a_timeout_counts_the_queue(model, words):
    with Generator(model, tokenizer=words, max_batch=1) as generator:
        with Gate(model) as gate:
            first = generator.stream("hello", **LONG)
            gate.wait()
            late = generator.stream("hello", timeout=0.05, **LONG)
            until(time.perf_counter() + 0.06)()
            gate.open()
            out = late.completion
            assert (out.finish_reason, out.text, out.token_ids) == ("timeout", "", ())
            assert out.stats.time_to_first_token is None
            assert out.stats.queue_seconds >= 0.05
            first.close()
        works(generator, model)


def test_a_timeout_harms_nobody_else(gen, model, words):
    with Slow(model, 0.6):
        streams = [
            gen.stream(prompt, temperature=0, gamma=0, max_tokens=30, ignore_eos=True, timeout=timeout)
            for prompt, timeout in zip(PROMPTS, [None, 0.5, None, 0.5], strict=False)
        ]
        outs = [stream.completion for stream in streams]
    assert [out.finish_reason for out in outs] == ["length", "timeout", "length", "timeout"]
    for prompt, out in zip(PROMPTS, outs, strict=False):
        assert list(out.token_ids) == expected(model, words, prompt, 30)[: out.completion_tokens]
    works(gen, model)


def test_a_full_queue(model, words):
    with Generator(model, tokenizer=words, max_batch=1, max_queue=2) as generator:
        with Gate(model) as gate:
            options: Any = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
            running = generator.stream([5, 6, 7], **options)
            gate.wait()
            one = generator.stream([5, 6], **options)
            with pytest.raises(QueueFullError) as caught:
                generator.batch([[5], [6]], **options)  # one would fit: none is taken
            assert caught.value.retry_after > 0
            assert "max_queue is 2" in str(caught.value)
            two = generator.stream([5], **options)
            with pytest.raises(QueueFullError):
                generator.generate([7], **options)
            with pytest.raises(QueueFullError):
                asyncio.run(generator.agenerate([7], **options))
            gate.open()
            for stream, ids in ((running, [5, 6, 7]), (one, [5, 6]), (two, [5])):
                assert list(stream.completion.token_ids) == tiny.greedy(model, ids, 5)
        assert generator.metrics().prompt_tokens == 6  # the refused ones never came in
        works(generator, model)


# Failures.


def test_an_error_in_a_forward(gen, model):
    with Breaks(model, 5, lambda: RuntimeError("boom")):
        stream = gen.stream("hello", source="draft_model", gamma=2, **LONG)
        with pytest.raises(EngineFailedError, match="boom") as caught:
            within(lambda: list(stream), 5)
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineFailedError, match="boom"):
            _ = stream.completion
        assert list(stream) == []
    works(gen, model)


async def test_an_error_in_a_forward_reaches_a_task(gen, model):
    with Breaks(model, 5, lambda: RuntimeError("boom")):
        with pytest.raises(EngineFailedError, match="boom") as caught:
            await asyncio.wait_for(gen.agenerate("hello", **LONG), 5)
        assert isinstance(caught.value.__cause__, RuntimeError)
    await asyncio.to_thread(works, gen, model)


def test_an_error_spares_those_who_wait(model, words):
    with Generator(model, tokenizer=words, max_batch=1) as generator:
        with Breaks(model, 3, lambda: RuntimeError("boom")):
            streams = [generator.stream([5, 6, 7], temperature=0, max_tokens=12, ignore_eos=True) for _ in range(3)]
            with pytest.raises(EngineFailedError):
                within(lambda: streams[0].completion, 5)
            for stream in streams[1:]:
                out = within(lambda: stream.completion)  # noqa: B023
                assert list(out.token_ids) == tiny.greedy(model, [5, 6, 7], 12)
        works(generator, model)


class Stop(BaseException):
    """Not an Exception, as SystemExit and what test runners raise at their time limit."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Stop])
def test_an_error_that_is_no_exception(model, words, kind):
    generator = Generator(model, tokenizer=words)
    with Breaks(model, 3, lambda: kind("boom")):
        stream = generator.stream("hello", **LONG)
        with pytest.raises(EngineFailedError, match="boom") as caught:
            within(lambda: list(stream), 5)
        assert isinstance(caught.value.__cause__, kind)
    within(lambda: works(generator, model), 10)
    generator.close()


class AcceleratorError(RuntimeError):
    """By this name torch says that the device is lost."""


def test_a_lost_device_ends_every_call(model, words):
    generator = Generator(model, tokenizer=words, max_batch=1)
    with Breaks(model, 3, lambda: AcceleratorError("an illegal memory access was encountered")):
        streams = [generator.stream([5, 6, 7], **LONG) for _ in range(3)]
        for stream in streams:
            with pytest.raises(EngineFailedError, match="illegal memory access") as caught:
                within(lambda: list(stream), 5)  # noqa: B023
            assert isinstance(caught.value.__cause__, AcceleratorError)
    assert generator.status == "failed"
    for call in (lambda: generator.generate([5]), lambda: generator.stream([5]), generator.metrics):
        with pytest.raises(EngineFailedError, match=r"illegal memory access.*Build a new Generator"):
            within(call, 5)
    within(generator.close, 5)


POISON = 4  # a token that the self-check at construction does not read


@contextlib.contextmanager
def poisoned(model: Any) -> Iterator[None]:
    """Whoever reads one token gets nan from there on."""
    row = model.get_input_embeddings().weight.data[POISON]
    kept = row.clone()
    row.fill_(float("nan"))
    try:
        yield
    finally:
        row.copy_(kept)


@pytest.mark.parametrize("gamma", [0, 4])
def test_nan_ends_only_the_call_that_has_it(gen, model, words, gamma):
    clean = {POISON: -float("inf")}
    options: Any = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "gamma": gamma, "logit_bias": clean}
    prompts = [list(words(prompt)["input_ids"]) for prompt in PROMPTS[:4]]
    alone = [gen.generate(prompt, **options) for prompt in prompts]
    sick = [*prompts[2], POISON]
    with poisoned(model):
        outs = within(
            lambda: gen.batch([*prompts[:2], sick, *prompts[2:], [POISON]], return_exceptions=True, **options)
        )
    assert [isinstance(out, NumericalError) for out in outs] == [False, False, True, False, False, True]
    good = [out for out in outs if isinstance(out, Completion)]
    assert [out.token_ids for out in good] == [out.token_ids for out in alone]
    assert "nan" in str(outs[2])
    works(gen, model)
    # Nothing of it was kept for reuse.
    again = gen.generate(sick, **options)
    assert list(again.token_ids)[:5] == [t for t in tiny.greedy(model, sick, 5)]
    assert POISON not in again.token_ids


def test_a_draft_recovers_from_nan(model, draft, tokenizer):
    """What it computed of a broken forward is neither read again nor shared."""
    options: Any = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "gamma": 4}
    prompt = list(range(5, 45))
    with Generator(model, DraftModel(draft), tokenizer=tokenizer) as generator:
        good = generator.generate(prompt, **options)
        generator.forget_prefixes()
        hook = draft.register_forward_hook(_spoil_once(after=3), with_kwargs=True)
        try:
            shaken = within(lambda: generator.generate(prompt, **options))
        finally:
            hook.remove()
        assert shaken.token_ids == good.token_ids
        again = generator.generate(prompt, **options)
        assert again.stats.accepted_per_position == good.stats.accepted_per_position
        settled(generator)


def _spoil_once(after: int) -> Callable[..., Any]:
    """A hook that makes one forward's logits nan."""
    seen: list[int] = []

    def spoil(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append(1)
        if len(seen) == after:
            output.logits.fill_(float("nan"))
        return output

    return spoil


def test_nan_in_the_draft_is_never_emitted(gen, model, draft):
    """A broken draft costs speed, or ends the call by name; it never changes the text."""
    with poisoned(draft):
        prompt = [5, 6, POISON]
        try:
            out = within(lambda: gen.generate(prompt, temperature=0, max_tokens=20, ignore_eos=True, gamma=4))
        except NumericalError:
            pass
        else:
            assert list(out.token_ids) == tiny.greedy(model, prompt, 20)
    works(gen, model)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nan_everywhere(gen, model, temperature):
    def spoil(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        output.logits.fill_(float("nan"))
        return output

    hook = model.register_forward_hook(spoil, with_kwargs=True)
    try:
        with pytest.raises(NumericalError):
            within(lambda: gen.generate("hello", temperature=temperature, max_tokens=5))
    finally:
        hook.remove()
    works(gen, model)


# The end.


def test_close_lets_running_and_waiting_calls_finish(model, words):
    generator = Generator(model, tokenizer=words, max_batch=1)
    with Gate(model, after=1) as gate:
        streams = [generator.stream([5, 6, 7], temperature=0, max_tokens=12, ignore_eos=True) for _ in range(3)]
        gate.wait()
        closer = threading.Thread(target=generator.close)
        closer.start()
        opener = threading.Thread(target=gate.open)
        opener.start()
        for stream in streams:
            out = within(lambda: stream.completion)  # noqa: B023
            assert list(out.token_ids) == tiny.greedy(model, [5, 6, 7], 12)
        closer.join(LIMIT)
        opener.join()
    assert generator.status != "ready"
    with pytest.raises(GeneratorClosedError):
        generator.generate("hello")


def test_close_without_drain_cancels(model, words):
    generator = Generator(model, tokenizer=words, max_batch=2)
    with Gate(model, after=3) as gate:
        streams = [generator.stream([5, 6, 7], gamma=0, temperature=0, **LONG) for _ in range(5)]
        gate.wait()
        closing = threading.Event()

        def close() -> None:
            closing.set()
            generator.close(drain=False)

        closer = threading.Thread(target=close)
        closer.start()
        assert closing.wait(LIMIT)
        gate.open()
        outs = [within(lambda: stream.completion) for stream in streams]  # noqa: B023
        closer.join(LIMIT)
    assert [out.finish_reason for out in outs] == ["cancelled"] * 5
    usual = tiny.greedy(model, [5, 6, 7], 20)
    assert all(list(out.token_ids[:20]) == usual[: out.completion_tokens] for out in outs)
    assert [out.completion_tokens for out in outs[2:]] == [0, 0, 0]
    assert not closer.is_alive()


def test_close_gives_up_draining_after_its_timeout(model, words):
    generator = Generator(model, tokenizer=words)
    with Gate(model, after=1) as gate:
        stream = generator.stream("hello", **LONG)
        gate.wait()

        def begin() -> None:
            until(time.perf_counter() + 0.05)()
            gate.open()

        opener = threading.Thread(target=begin)
        opener.start()
        within(lambda: generator.close(timeout=0.01))
        opener.join()
    assert stream.completion.finish_reason == "cancelled"


@pytest.mark.parametrize("drain", [True, False])
def test_close_twice_and_from_many_threads(model, words, drain):
    generator = Generator(model, tokenizer=words)
    with Gate(model, after=1) as gate:
        stream = generator.stream("hello", **LONG)
        gate.wait()
        with ThreadPoolExecutor(4) as pool:
            closing = [pool.submit(generator.close, drain=drain) for _ in range(4)]
            gate.open()
            for one in closing:
                one.result(LIMIT)
    generator.close()
    generator.close(drain=False)
    assert stream.completion.finish_reason in ({"length"} if drain else {"cancelled", "length"})


def test_close_of_a_generator_that_was_never_used(model, words):
    generator = Generator(model, tokenizer=words)
    generator.close()
    generator.close()
    with pytest.raises(GeneratorClosedError):
        generator.stream("hello")


def test_close_while_other_threads_call(model, words):
    """Each call ends, with its whole text or with the error that names the reason."""
    usual = None
    with Generator(model, tokenizer=words) as fresh:
        usual = fresh.generate("hello", temperature=0, max_tokens=10).token_ids
    generator = Generator(model, tokenizer=words)
    begun = threading.Barrier(5)

    def call() -> int:
        begun.wait(LIMIT)
        for count in range(10_000):
            try:
                out = generator.generate("hello", temperature=0, max_tokens=10)
            except GeneratorClosedError:
                return count
            assert out.token_ids == usual
            assert generator_metrics(generator)
        raise AssertionError("it was never closed")

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call) for _ in range(4)]
        begun.wait(LIMIT)
        generator.generate("hello", max_tokens=3)
        generator.close()
        for one in calls:
            one.result(LIMIT)


def generator_metrics(generator: Generator) -> bool:
    """Whether metrics answer, or say that the generator is closed."""
    with contextlib.suppress(GeneratorClosedError):
        found = generator.metrics()
        assert 0 <= found.free_blocks <= found.total_blocks
        assert found.running + found.queued <= 5
    return True


def test_context_managers(model, words):
    with Generator(model, tokenizer=words) as generator:
        stream = generator.stream([5, 6, 7], temperature=0, max_tokens=12, ignore_eos=True)
    assert list(stream.completion.token_ids) == tiny.greedy(model, [5, 6, 7], 12)  # it was let finish
    with pytest.raises(ZeroDivisionError), Generator(model, tokenizer=words) as generator:
        stream = generator.stream("hello", **LONG)
        next(stream)
        raise ZeroDivisionError
    assert stream.completion.finish_reason == "cancelled"


async def test_async_context_managers(model, words):
    async with Generator(model, tokenizer=words) as generator:
        out = await generator.agenerate([5, 6, 7], temperature=0, max_tokens=12, ignore_eos=True)
        assert list(out.token_ids) == tiny.greedy(model, [5, 6, 7], 12)
        stream = generator.astream([5, 6, 7], temperature=0, max_tokens=12, ignore_eos=True)
    assert (await stream.result()).token_ids == out.token_ids
    await generator.aclose()
    with pytest.raises(GeneratorClosedError):
        generator.astream("hello")


def test_a_model_is_given_back_as_it_was(model, draft, words):
    def state(one: Any) -> Any:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in one.modules()]
        values = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        return one.config.to_dict(), one.config._attn_implementation, one.training, hooks, values

    before = [state(one) for one in (model, draft)]
    first = tiny.greedy(model, [5, 6, 7], 20)
    with Generator(model, draft, tokenizer=words) as generator:
        generator.batch(PROMPTS, max_tokens=10)
        assert tiny.greedy(model, [5, 6, 7], 20) == first  # it may be used meanwhile
    for (*settings, values), (*now, tensors) in zip(before, [state(one) for one in (model, draft)], strict=True):
        assert now == settings
        assert all(torch.equal(tensors[name], values[name]) for name in values)
    assert tiny.greedy(model, [5, 6, 7], 20) == first


def test_two_generators_over_one_model(model, words):
    options: Any = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    with Generator(model, tokenizer=words) as one, Generator(model, tokenizer=words) as other:
        streams = [generator.stream([5, 6, 7], **options) for generator in (one, other, one, other)]
        for stream in streams:
            assert list(stream.completion.token_ids) == tiny.greedy(model, [5, 6, 7], 20)
        one.close()
        works(other, model)


def test_close_frees_kv_and_weights(model, words, tmp_path):
    def held() -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        return sum(one.numel() * one.itemsize for one in tensors)

    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    before = held()
    generator = Generator(tmp_path, [DraftModel(tmp_path), NGram()], kv_memory="8MiB", max_batch=100)
    out = generator.generate("hello", max_tokens=4, ignore_eos=True)
    weights = sum(one.numel() * one.itemsize for one in model.parameters())
    assert held() - before > 7.5 * 2**20 + 2 * weights
    generator.close()
    assert held() - before < weights / 2
    assert out.completion_tokens == 4
    assert generator.status != "ready"  # it is still there, empty


# Whole processes.


def run_python(code: str, *arguments: str | Path, seconds: float = 120.0) -> str:
    """Runs code in a process of its own, from the repository root: what it prints; nothing may go to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


EXIT = """
import sys, time
from fastdraft import Generator
from tests import tiny

model = tiny.model(context=512)
generator = Generator(model, tiny.perturbed(model, 0.3), tokenizer=tiny.tokenizer())
stream = generator.stream("hello", max_tokens=400, ignore_eos=True)
next(stream)
print("leaving", flush=True)
match sys.argv[1]:
    case "end":
        pass
    case "thread":
        import threading
        threading.Thread(target=lambda: [chunk for chunk in stream]).start()
"""


@pytest.mark.parametrize("how", ["end", "thread"])
def test_the_interpreter_exits_without_close(how):
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", EXIT, how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n", process.communicate(timeout=20)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "", ""), time.monotonic() - began


FORK = """
import asyncio, faulthandler, os, sys, warnings
warnings.simplefilter("ignore")
from fastdraft import ForkedProcessError, Generator
from tests import tiny

generator = Generator(tiny.model(context=512), tokenizer=tiny.tokenizer())
if sys.argv[1] == "used":
    generator.generate("hello", max_tokens=2)
stream = generator.stream("hello", max_tokens=400, ignore_eos=True) if sys.argv[1] == "used" else None
process = os.fork()
if not process:
    faulthandler.dump_traceback_later(20, exit=True)

    async def astream():
        generator.astream("hello")

    calls = {
        "generate": lambda: generator.generate("hello"),
        "stream": lambda: generator.stream("hello"),
        "batch": lambda: generator.batch(["hello"]),
        "agenerate": lambda: asyncio.run(generator.agenerate("hello")),
        "astream": lambda: asyncio.run(astream()),
        "abatch": lambda: asyncio.run(generator.abatch(["hello"])),
        "metrics": lambda: generator.metrics(),
    }
    if stream is not None:
        calls["iterating"] = lambda: list(stream)
        calls["completion"] = lambda: stream.completion
    for name, call in calls.items():
        try:
            call()
        except ForkedProcessError as error:
            assert "fork" in str(error) and str(os.getppid()) in str(error), error
        else:
            print(name, "was not refused", flush=True)
    if stream is not None:
        stream.close()
    generator.close()
    print("child done", flush=True)
    sys.exit(0)
_, status = os.waitpid(process, 0)
print("child", os.waitstatus_to_exitcode(status))
print("parent", generator.generate("hello", max_tokens=2, ignore_eos=True).completion_tokens)
generator.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("used", ["used", "fresh"])
def test_a_forked_process_is_refused(used):
    assert run_python(FORK, used) == "child done\nchild 0\nparent 2\n"


GUEST = """
import asyncio, logging, os, random, signal, sys, threading, warnings
import numpy, structlog, torch, transformers
from tests import tiny

torch.set_num_threads(2)
random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
folder = sys.argv[1]


def state():
    loggers = {
        name: (found.level, list(found.handlers), found.propagate, found.disabled)
        for name, found in logging.root.manager.loggerDict.items()
        if isinstance(found, logging.Logger) and not name.startswith("fastdraft")
    }
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark),
        "sdp": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "random": (random.getstate(), tuple(numpy.random.get_state()[1]), tuple(torch.get_rng_state().tolist())),
        "root": (logging.root.level, list(logging.root.handlers), logging.raiseExceptions),
        "loggers": {name: found for name, found in loggers.items() if name in known},
        "transformers": (
            transformers.utils.logging.get_verbosity(),
            transformers.utils.logging.is_progress_bar_enabled(),
        ),
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "environment": dict(os.environ),
        "structlog": structlog.is_configured(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
        "streams": (sys.stdout, sys.stderr),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "switch": sys.getswitchinterval(),
        "recursion": sys.getrecursionlimit(),
        "threads now": [thread.name for thread in threading.enumerate()],
    }


known = {name for name in logging.root.manager.loggerDict}
before = state()
import fastdraft

with fastdraft.Generator(folder, [fastdraft.DraftModel(folder), fastdraft.NGram()]) as generator:
    generator.generate("hello", max_tokens=8, logprobs=2)
    generator.batch(["hello", "there"], max_tokens=8, temperature=0.8, top_p=0.9, frequency_penalty=0.3)
    generator.generate([{"role": "user", "content": "hi"}], max_tokens=4, stop=["e"], gamma=4)
    list(generator.stream("hello", max_tokens=8, seed=4))
    for bad in ("", [999]):
        try:
            generator.generate(bad)
        except fastdraft.ConfigError:
            pass
    asyncio.run(generator.agenerate("hello", max_tokens=8))
    next(generator.stream("hello", max_tokens=400))
after = state()
for name, value in before.items():
    if after[name] != value:
        print("changed:", name, "from", str(value)[:2000], "to", str(after[name])[:2000])
"""


def test_a_guest_changes_nothing_and_prints_nothing(model, words, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="5GB")
    words.save_pretrained(tmp_path)
    assert run_python(GUEST, tmp_path) == ""


class TestOnlyTheOwnerSuffers:
    """What goes wrong with one call, by its own settings or its own text, is not its mates' trouble."""

    PROMPTS = ([4, 5, 6], [(7 * i) % 300 + 3 for i in range(20)])

    @pytest.mark.parametrize(
        "options",
        [
            {"logit_bias": {4: 1e39}},
            {"presence_penalty": 1e39},
            {"frequency_penalty": -3e38},
            {"logit_bias": dict.fromkeys(range(320), float("-inf"))},
            {"min_tokens": 1, "stop_token_ids": list(range(320))},
        ],
        ids=["bias", "presence", "frequency", "all banned", "all stop"],
    )
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_settings_that_leave_no_finite_score(self, options: dict, temperature: float, tokenizer) -> None:
        model = tiny.model("llama")
        expected = tiny.greedy(model, self.PROMPTS[1], 24)
        with Generator(model, "auto", tokenizer=tokenizer) as generator:
            mate = generator.stream(self.PROMPTS[1], temperature=0, max_tokens=24, ignore_eos=True)
            try:
                out = generator.generate(self.PROMPTS[0], temperature=temperature, max_tokens=6, **options)
            except NumericalError as error:
                assert "finite" in str(error)
            else:  # a huge bias that float32 still holds simply wins
                assert all(0 <= token < 320 for token in out.token_ids)
            assert list(mate.completion.token_ids) == expected
            metrics = generator.metrics()
            assert metrics.free_blocks == metrics.total_blocks

    @pytest.mark.parametrize("seed", [None, 3])
    def test_a_draft_of_nans_costs_speed_alone(self, seed: int | None, tokenizer) -> None:
        model = tiny.model("llama")
        draft = tiny.perturbed(model, 0.02)
        with torch.no_grad():
            draft.model.embed_tokens.weight[319] = float("nan")
        options = {"temperature": 1.0, "max_tokens": 24, "gamma": 4, "ignore_eos": True, "seed": seed}
        with Generator(model, DraftModel(draft), tokenizer=tokenizer) as generator:
            outs = generator.batch([[5, 319, 6], [5, 7, 6]], **options)
            assert [out.completion_tokens for out in outs] == [24, 24]
            assert outs[1].stats.accepted_tokens > 0
            if seed is not None:
                plain = generator.batch([[5, 319, 6], [5, 7, 6]], **(options | {"gamma": 0}))
                assert [out.token_ids for out in outs] == [out.token_ids for out in plain]

    def test_two_readers_of_one_stream_both_get_the_end(self, tokenizer) -> None:
        with Generator(tiny.model("llama"), "auto", tokenizer=tokenizer) as generator:
            stream = generator.stream(self.PROMPTS[0], max_tokens=24, ignore_eos=True)
            outcomes: list = []
            readers = [threading.Thread(target=lambda: outcomes.append(stream.completion)) for _ in range(3)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join(30)
            assert len(outcomes) == 3 and outcomes[0] == outcomes[1] == outcomes[2]

    def test_a_preempted_prompt_is_counted_once(self, tokenizer) -> None:
        prompts = [[(t + s) % 300 + 3 for t in range(100)] for s in range(4)]
        memory = 16 * 16 * 256
        with Generator(tiny.model("llama"), None, tokenizer=tokenizer, kv_memory=memory) as generator:
            generator.batch(prompts, max_tokens=30, temperature=0, ignore_eos=True)
            assert generator.metrics().prompt_tokens == 400

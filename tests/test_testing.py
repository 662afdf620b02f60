"""ScriptedGenerator: the surface and the manners of Generator, without a model."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from fastdraft.config import SamplingParams
from fastdraft.errors import (
    ConfigError,
    EngineFailedError,
    GeneratorClosedError,
    InvalidConstraintError,
    OutputValidationError,
    QueueFullError,
)
from fastdraft.testing import ScriptedGenerator

ROOT = Path(__file__).resolve().parents[1]
TEXT = "The quick brown fox\njumps over  the lazy dog."
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


class Invoice(BaseModel):
    customer: str
    total: float


def join(chunks):
    return "".join(chunk.text for chunk in chunks)


# What is served


@pytest.mark.parametrize(
    ("replies", "prompt", "expected"),
    [
        ("always", "anything", "always"),
        (["first", "second"], "x", "first"),
        ({"x": "for x", "y": "for y"}, "y", "for y"),
        ({"Hello?": "Hi."}, CHAT, "Hi."),
        ({"ab": "parts"}, [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], "parts"),
        ({(1, 2): "ids"}, [1, 2], "ids"),
        (lambda prompt: prompt.upper(), "shout", "SHOUT"),
        (Invoice(customer="Ada", total=2), "x", '{"customer":"Ada","total":2.0}'),
        ([["a", None]], "x", '["a",null]'),
        ("", "x", ""),
    ],
)
def test_every_form_of_replies(replies, prompt, expected):
    completion = ScriptedGenerator(replies).generate(prompt)
    assert completion.text == expected
    assert completion.finish_reason == "stop"
    assert completion.stop_reason is None
    assert completion.parsed is None


def test_a_sequence_is_served_in_order_until_it_is_used_up():
    generator = ScriptedGenerator(["one", "two"])
    assert [generator.generate("x").text, generator.generate("x").text] == ["one", "two"]
    with pytest.raises(ConfigError, match="no reply left: 2 were served"):
        generator.generate("x")


def test_a_prompt_that_no_mapping_knows():
    with pytest.raises(ConfigError, match=r"no reply for 'z', expected one of \['x'\]"):
        ScriptedGenerator({"x": "y"}).generate("z")


def test_errors_come_at_their_call_and_take_no_reply():
    busy = QueueFullError("busy", retry_after=3)
    generator = ScriptedGenerator(["one", "two"], errors={1: busy})
    assert generator.generate("a").text == "one"
    with pytest.raises(QueueFullError) as raised:
        generator.stream("b")  # before the first chunk
    assert raised.value is busy
    assert generator.generate("b").text == "two"
    assert [call.prompt for call in generator.calls] == ["a", "b", "b"]


@pytest.mark.parametrize("error", [EngineFailedError("broken"), ZeroDivisionError()])
async def test_an_exception_as_reply_is_raised(error):
    generator = ScriptedGenerator([error, "fine", error])
    with pytest.raises(type(error)):
        generator.generate("x")
    assert (await generator.agenerate("x")).text == "fine"
    with pytest.raises(type(error)):
        generator.astream("x")


# Chunks, tokens, stops


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 1000])
async def test_chunks_join_to_the_completion(chunk_size):
    generator = ScriptedGenerator(TEXT, chunk_size=chunk_size)
    stream = generator.stream("x", logprobs=1, trace=True)
    chunks = list(stream)
    completion = stream.completion
    assert join(chunks) == completion.text == TEXT
    assert sum((chunk.token_ids for chunk in chunks), ()) == completion.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    if chunk_size:
        assert {len(chunk.text) for chunk in chunks[:-1]} <= {chunk_size}
    else:
        assert [len(chunk.token_ids) for chunk in chunks] == [1] * len(TEXT.split())
    assert completion.completion_tokens == len(completion.token_ids) == len(TEXT.split())
    assert [logprob.token_id for logprob in completion.logprobs] == list(completion.token_ids)
    assert completion.trace.origins == ("target",) * len(TEXT.split())
    assert stream.result() is completion

    astream = generator.astream("x", logprobs=1, trace=True)
    assert [chunk async for chunk in astream] == chunks
    assert (await astream.result()).token_ids == completion.token_ids


def test_token_ids_are_stable_across_calls_and_processes():
    ids = ScriptedGenerator("a b a").generate("x").token_ids
    assert ids == ScriptedGenerator("a b a c").generate("x", max_tokens=3).token_ids
    assert ids == (3904355907, 2011248169, 4008208275)
    assert ScriptedGenerator("ok").generate(ids).prompt_tokens == 3  # they can be a prompt


@pytest.mark.parametrize(
    ("options", "text", "tokens", "finish", "stop"),
    [
        ({"max_tokens": 3}, "The quick brown", 3, "length", None),
        ({"max_tokens": 9}, TEXT, 9, "stop", None),
        ({"stop": "fox"}, "The quick brown ", 4, "stop", "fox"),
        ({"stop": "k b"}, "The quic", 3, "stop", "k b"),
        ({"stop": ["dog", "quick", "the"]}, "The ", 2, "stop", "quick"),
        ({"stop": "quick", "max_tokens": 2}, "The ", 2, "stop", "quick"),
        ({"stop": "quick", "max_tokens": 1}, "The", 1, "length", None),
        ({"stop": ["e"], "min_tokens": 2}, "The quick brown fox\njumps ov", 6, "stop", "e"),
        ({"stop": "cat"}, TEXT, 9, "stop", None),
    ],
)
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 7])
def test_what_ends_a_reply(options, text, tokens, finish, stop, chunk_size):
    stream = ScriptedGenerator(TEXT, chunk_size=chunk_size).stream("x", **options)
    assert join(stream) == text
    completion = stream.completion
    assert completion.text == text
    assert completion.completion_tokens == len(completion.token_ids) == tokens
    assert (completion.finish_reason, completion.stop_reason) == (finish, stop)


async def test_a_timeout_falls_on_the_same_chunk_in_sync_and_async():
    generator = ScriptedGenerator(TEXT, delay=0.004)
    completion = generator.generate("x", timeout=0.015)
    assert (completion.text, completion.finish_reason) == ("The quick brown", "timeout")
    assert (await generator.agenerate("x", timeout=0.015)).text == "The quick brown"
    assert generator.generate("x", timeout=0.003).text == ""
    assert generator.generate("x", timeout=60).finish_reason == "stop"


async def test_delays_do_not_block_the_loop():
    generator = ScriptedGenerator("a b c d", delay=0.05)
    start = time.perf_counter()
    completions = await asyncio.gather(*(generator.agenerate("x") for _ in range(8)))
    assert time.perf_counter() - start < 1.2  # 0.2 where all wait at once, 1.6 one by one
    assert {completion.text for completion in completions} == {"a b c d"}


# Output types


@pytest.mark.parametrize("reply", [Invoice(customer="Ada", total=2), {"customer": "Ada", "total": 2}])
async def test_an_output_type_is_parsed(reply):
    generator = ScriptedGenerator([reply] * 4)
    expected = Invoice(customer="Ada", total=2)
    assert generator.generate("x", output_type=Invoice).parsed == expected
    assert (await generator.agenerate("x", output_type=Invoice)).parsed == expected
    assert generator.batch(["x"], output_type=Invoice)[0].parsed == expected
    assert json.loads(generator.generate("x", output_type={"type": "object"}).text) == expected.model_dump()
    assert ScriptedGenerator("[1, 2]").generate("x", output_type=list[int]).parsed == [1, 2]
    assert ScriptedGenerator([None]).generate("x", output_type=int | None).parsed is None


@pytest.mark.parametrize(
    ("reply", "output_type", "options", "cause"),
    [
        ('{"customer": "Ada"}', Invoice, {}, ValidationError),
        ("no JSON", {"type": "object"}, {}, json.JSONDecodeError),
        ('{"customer": "Ada", "total": 2}', Invoice, {"max_tokens": 2}, ValidationError),
    ],
)
async def test_an_invalid_value_is_the_same_error_everywhere(reply, output_type, options, cause):
    generator = ScriptedGenerator(reply)
    stream = generator.stream("x", output_type=output_type, **options)
    chunks = []
    with pytest.raises(OutputValidationError) as at_the_end:
        for chunk in stream:
            chunks.append(chunk)
    with pytest.raises(OutputValidationError) as of_the_stream:
        _ = stream.completion
    with pytest.raises(OutputValidationError) as of_generate:
        generator.generate("x", output_type=output_type, **options)
    with pytest.raises(OutputValidationError) as of_agenerate:
        await generator.agenerate("x", output_type=output_type, **options)
    (of_batch,) = generator.batch(["x"], output_type=output_type, return_exceptions=True, **options)
    errors = [raised.value for raised in (at_the_end, of_the_stream, of_generate, of_agenerate)]
    for error in [*errors, of_batch]:
        assert error.completion.text == join(chunks)
        assert error.completion.parsed is None
        assert error.completion.finish_reason == ("length" if options else "stop")
        assert isinstance(error.__cause__, cause)


@pytest.mark.parametrize("output_type", ["NotDefinedAnywhere", "no type", "list[Missing]", object(), threading.Lock])
def test_an_output_type_that_cannot_be_read(output_type):
    generator = ScriptedGenerator("1")
    with pytest.raises(InvalidConstraintError, match="cannot be read"):
        generator.generate("x", output_type=output_type)
    assert generator.calls == []


# Checks


@pytest.mark.parametrize("verb", ["generate", "stream", "astream"])
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x", {"max_new_tokens": 3}, "unknown parameter 'max_new_tokens'.*max_tokens"),
        ("x", {"temprature": 0}, "Did you mean 'temperature'"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"params": {"max_tokens": 3}}, "params is a dict"),
        ("x", {"timeout": 0}, "timeout is 0"),
        ("x", {"timeout": float("nan")}, "timeout is nan"),
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        (b"x", {}, "the prompt is"),
        (3, {}, "the prompt is"),
        ({"role": "user", "content": "x"}, {}, "the prompt is"),
        ([{"content": "x"}], {}, "no 'role'"),
        (["x"], {}, "expected a token id or a message"),
        ([1, -2], {}, "token id -2"),
        ([1, True], {}, r"prompt\[1\] is a bool"),
        ("\ud800", {}, "surrogate"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_call(verb, prompt, options, message):
    generator = ScriptedGenerator("y")
    with pytest.raises(ConfigError, match=message):
        getattr(generator, verb)(prompt, **options)
    assert generator.calls == []


@pytest.mark.parametrize("options", [{"chunk_size": 0}, {"delay": -1}, {"delay": float("nan")}])
def test_a_script_that_cannot_be_played(options):
    with pytest.raises(ConfigError, match="expected"):
        ScriptedGenerator("x", **options)


def test_calls_are_recorded_as_asked():
    generator = ScriptedGenerator("x")
    history = [dict(message) for message in CHAT]
    params = SamplingParams(temperature=0.5, stop="END")
    completion = generator.generate(
        history, params, max_tokens=7, output_type=None, template_options={"tools": []}, fold_system=True, trace=True
    )
    history.append({"role": "assistant", "content": "x"})
    (call,) = generator.calls
    assert call.prompt == CHAT  # a copy
    assert (call.params.temperature, call.params.stop, call.params.max_tokens) == (0.5, ("END",), 7)
    assert (call.template_options, call.fold_system, call.trace) == ({"tools": []}, True, True)
    assert completion.params == call.params
    assert completion.prompt_tokens == 3
    assert completion.lossless
    assert generator.metrics().prompt_tokens == 3
    assert generator.generate("x", request_id="mine").request_id == "mine"
    assert generator.stream("x").request_id == "scripted-2"


# Batches


@pytest.fixture(params=["batch", "abatch"])
def batch(request):
    """Calls `batch`, or `abatch` in a loop of its own."""

    def call(generator, *arguments, **options):
        result = getattr(generator, request.param)(*arguments, **options)
        return asyncio.run(result) if inspect.isawaitable(result) else result

    return call


def test_a_batch_is_in_order(batch):
    generator = ScriptedGenerator(str.upper)
    completions = batch(generator, ["a", "b"], n=2, request_id="r")
    assert [completion.text for completion in completions] == ["A", "A", "B", "B"]
    assert [completion.request_id for completion in completions] == ["r-0", "r-0-1", "r-1", "r-1-1"]
    assert [call.prompt for call in generator.calls] == ["a", "a", "b", "b"]
    assert batch(generator, []) == []


def test_a_batch_with_parameters_for_each_prompt(batch):
    generator = ScriptedGenerator("one two three")
    each = [SamplingParams(max_tokens=1), None]
    assert [done.text for done in batch(generator, ["a", "b"], each)] == ["one", "one two three"]
    assert [done.text for done in batch(generator, ["a", "b"], each[0])] == ["one", "one"]
    with pytest.raises(ConfigError, match="2 params for 1 prompts"):
        batch(generator, ["a"], each)


def test_a_batch_is_checked_before_any_of_it_runs(batch):
    generator = ScriptedGenerator("x")
    with pytest.raises(ConfigError, match="prompt 1 of the batch: the prompt is empty"):
        batch(generator, ["a", ""])
    assert generator.calls == []
    with pytest.raises(ConfigError, match="prompts is a str"):
        batch(generator, "abc")
    with pytest.raises(ConfigError, match="n is 0"):
        batch(generator, ["a"], n=0)


def test_a_batch_can_return_its_errors(batch):
    full = QueueFullError("busy")
    generator = ScriptedGenerator("x", errors={1: full})
    first, second, third = batch(generator, ["a", "b", ""], return_exceptions=True, progress=True)
    assert first.text == "x"
    assert second is full
    assert isinstance(third, ConfigError)
    with pytest.raises(QueueFullError):
        batch(ScriptedGenerator("x", errors={1: full}), ["a", "b"])
    with pytest.raises(ZeroDivisionError):  # what is not ours is not an outcome
        batch(ScriptedGenerator(ZeroDivisionError()), ["a"], return_exceptions=True)


# Closing


async def test_a_closed_stream_keeps_what_was_read():
    generator = ScriptedGenerator(TEXT)
    with generator.stream("x", output_type=Invoice) as stream:
        assert [next(stream).text, next(stream).text] == ["The", " quick"]
        assert generator.metrics().running == 1
    assert generator.metrics().running == 0
    stream.close()
    assert stream.completion.text == "The quick"
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.parsed is None
    assert list(stream) == []

    async with generator.astream("x") as astream:
        async for _ in astream:
            break
    await astream.aclose()
    completion = await astream.result()
    assert (completion.text, completion.finish_reason) == ("The", "cancelled")


def test_a_stream_that_has_ended_is_not_cancelled():
    with ScriptedGenerator(TEXT).stream("x") as stream:
        assert join(stream) == TEXT
    assert stream.completion.finish_reason == "stop"


def test_a_stream_can_be_closed_by_another_thread():
    stream = ScriptedGenerator("word " * 1000, delay=0.005).stream("x", max_tokens=1000)
    timer = threading.Timer(0.05, stream.close)
    timer.start()
    chunks = list(stream)
    timer.join()
    assert chunks[-1].finish_reason == "cancelled"
    assert 0 < stream.completion.completion_tokens < 100


async def test_a_cancelled_task_ends_its_call():
    generator = ScriptedGenerator(TEXT, delay=10)
    task = asyncio.create_task(generator.agenerate("x"))
    await asyncio.sleep(0)
    assert generator.metrics().running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert generator.metrics().running == 0


def test_after_close_calls_are_refused_and_open_streams_end():
    with ScriptedGenerator(TEXT) as generator:
        assert generator.status == "ready"
        stream = generator.stream("x")
    assert generator.status == "draining"
    assert join(stream) == TEXT
    for call in (generator.generate, generator.stream, generator.astream, lambda _: generator.batch([])):
        with pytest.raises(GeneratorClosedError):
            call("x")
    with pytest.raises(GeneratorClosedError):
        generator.metrics()
    generator.close()


async def test_close_without_drain_cancels():
    generator = ScriptedGenerator(TEXT)
    stream = generator.stream("x")
    next(stream)
    await generator.aclose(drain=False)
    assert stream.completion.finish_reason == "cancelled"
    with pytest.raises(ZeroDivisionError):
        async with ScriptedGenerator(TEXT) as other:
            stream = other.astream("x")
            raise ZeroDivisionError
    assert (await stream.result()).finish_reason == "cancelled"


def test_many_threads_share_one():
    generator = ScriptedGenerator([str(i) for i in range(400)], errors={7: QueueFullError("busy")})

    def ask(_):
        try:
            return generator.generate("x").text
        except QueueFullError:
            return "busy"

    with ThreadPoolExecutor(8) as pool:
        served = Counter(pool.map(ask, range(401)))
    assert served == Counter([*map(str, range(400)), "busy"])
    assert len(generator.calls) == 401


# The same face as Generator's


def test_it_has_the_surface_of_the_generator():
    from fastdraft.generator import Generator

    not_scripted = {"config", "from_config", "pairings", "plan", "tokenizer"}
    for name, member in inspect.getmembers(Generator):
        if name in not_scripted or (name.startswith("_") and name not in {"__enter__", "__aenter__"}):
            continue
        mine = inspect.getattr_static(ScriptedGenerator, name)
        assert type(mine) is type(member), name
        if not isinstance(member, property):
            assert inspect.signature(mine) == inspect.signature(member), name
            assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(member), name


def test_import_loads_no_model_library():
    code = """
import sys
from fastdraft.testing import ScriptedGenerator
assert ScriptedGenerator("Hi.").generate("x").text == "Hi."
print([name for name in ("torch", "transformers", "tokenizers", "numpy", "outlines") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")

"""A stand-in for `Generator` in users' tests: the same calls, scripted replies, no model and no torch."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
import threading
import weakref
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import PydanticUserError, TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic_core import PydanticSerializationError, to_json

from fastdraft.config import Prompt, SamplingParams, resolve_params
from fastdraft.errors import (
    ConfigError,
    FastDraftError,
    GeneratorClosedError,
    InvalidConstraintError,
    OutputValidationError,
)
from fastdraft.results import TARGET, Chunk, Completion, FinishReason, Metrics, Stats, TokenLogprob
from fastdraft.trace import Trace, TracedRound

__all__ = ["AsyncScriptedStream", "ScriptedCall", "ScriptedGenerator", "ScriptedStream"]

T_co = TypeVar("T_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What one call asked for: its prompt (a copy), its parameters as resolved, its other keywords."""

    prompt: Prompt
    params: SamplingParams
    output_type: Any = None
    template_options: Mapping[str, Any] | None = None
    fold_system: bool = False
    timeout: float | None = None
    request_id: str | None = None
    trace: bool = False


class _Reply(Generic[T_co]):
    """One answer under way, known whole beforehand; the two streams differ only in how they wait for it."""

    def __init__(self, call: ScriptedCall, text: str, chunk_size: int | None, delay: float) -> None:
        self._call = call
        steps, self._stop_reason = _steps(text, call, chunk_size, delay)
        self._steps = deque(steps)  # still to be read: a pause, and the chunk after it
        self._read: list[Chunk] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Cancels what has not been read; from any thread, any number of times."""
        with self._lock:
            self._steps.clear()
        self._closed.set()

    def _pause(self) -> float:
        with self._lock:
            return self._steps[0][0] if self._steps else 0.0

    def _take(self) -> Chunk | None:
        with self._lock:
            if self._steps:
                self._read.append(self._steps.popleft()[1])
                return self._read[-1]
        self._finish()  # a stream's end raises what the whole of it raises
        return None

    def _finish(self) -> Completion[Any]:
        call, chunks = self._call, self._read
        reason: FinishReason = (chunks[-1].finish_reason if chunks else None) or "cancelled"
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        rounds = [TracedRound((), (), 0, c.token_ids, c.origins, 0.0, 0.0) for c in chunks if c.token_ids]
        completion = Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tokens,
            parsed=None,
            finish_reason=reason,
            stop_reason=self._stop_reason if reason == "stop" else None,
            prompt_tokens=_read_prompt(call.prompt)[1],
            completion_tokens=len(tokens),
            logprobs=None if call.params.logprobs is None else [p for c in chunks for p in c.logprobs or ()],
            stats=Stats(rounds=len(rounds), completion_tokens=len(tokens), speculation="off: scripted"),
            lossless=True,
            params=call.params,
            model="scripted",
            request_id=call.request_id or "",
            trace=Trace(tuple(rounds)) if call.trace else None,
        )
        if reason == "cancelled":
            return completion
        try:
            return replace(completion, parsed=_parser(call.output_type)(completion.text))
        except ValueError as error:
            message = f"the reply ended with {reason!r} and is no valid value of the output type: {error}"
            raise OutputValidationError(message, completion=completion) from error


class ScriptedStream(_Reply[T_co]):
    """What `ScriptedGenerator.stream` returns: chunks one by one, then the whole."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        self._closed.wait(self._pause())  # a sleep that close() ends
        if (chunk := self._take()) is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def result(self) -> Completion[T_co]:
        """Reads what is left and returns the whole; `OutputValidationError` where it is not valid."""
        for _ in self:
            pass
        return self._finish()

    @property
    def completion(self) -> Completion[T_co]:
        """The same as `result()`."""
        return self.result()


class AsyncScriptedStream(_Reply[T_co]):
    """What `ScriptedGenerator.astream` returns: a `ScriptedStream` for ``async for`` and ``async with``."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        await asyncio.sleep(self._pause())
        if (chunk := self._take()) is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """`close()`, to be awaited."""
        self.close()

    async def result(self) -> Completion[T_co]:
        """Reads what is left and returns the whole; `OutputValidationError` where it is not valid."""
        async for _ in self:
            pass
        return self._finish()

    @property
    def completion(self) -> Completion[T_co]:
        """The whole of a stream that has ended; before that a `RuntimeError`."""
        if self._steps:
            raise RuntimeError("the stream has not ended; use `await stream.result()`")
        return self._finish()


R = TypeVar("R", bound=_Reply[Any])


def _spelled_out(verb: F) -> F:
    """Shows ``inspect`` and editors the keywords that a verb passes on, as `Generator` spells them."""
    shown = inspect.signature(verb)
    *own, rest = shown.parameters.values()
    options = list(inspect.signature(ScriptedCall).parameters.values())[2:]
    passed_on = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    overrides = rest.replace(name="overrides", annotation="Unpack[SamplingOverrides]")
    verb.__signature__ = shown.replace(parameters=[*own, *passed_on, overrides])  # type: ignore[attr-defined]
    return verb


class ScriptedGenerator:
    """Answers as `Generator` does, from a script; ``calls`` lists what was asked, one entry a completion.

    Prompts, parameters and output types are checked, and errors come, as from a `Generator`; a call that fails
    a check is not in ``calls``. A token is a word with the space before it; its id is made up but always the
    same. ``max_tokens``, ``min_tokens``, ``stop``, ``logprobs`` (all 0.0) and ``timeout`` act, the rest is only
    recorded. Time is counted in delays, so that a timeout always falls on the same chunk.

    Args:
        replies: One reply for every call; a sequence, served in order to the calls that ``errors`` spares; a
            mapping from the prompt's text (the last message's content; a tuple of token ids); or a function of
            the prompt. A reply is text, an exception to raise, or a value that pydantic can write as JSON.
        chunk_size: Characters a chunk; None is a token a chunk.
        delay: Seconds before each chunk.
        errors: Exceptions to raise, by index in ``calls``.
    """

    def __init__(
        self,
        replies: Any,
        *,
        chunk_size: int | None = None,
        delay: float = 0.0,
        errors: Mapping[int, BaseException] | None = None,
    ) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ConfigError(f"chunk_size is {chunk_size}, expected at least 1, or None.")
        if not 0 <= delay < float("inf"):
            raise ConfigError(f"delay is {delay}, expected seconds >= 0.")
        self.calls: list[ScriptedCall] = []
        self._replies, self._chunk_size, self._delay = replies, chunk_size, delay
        self._errors = dict(errors or {})
        self._turn = 0  # calls that took a reply
        self._closed = False
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[_Reply[Any]] = weakref.WeakSet()

    @_spelled_out
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **call: Any) -> Completion[Any]:
        """Serves a reply whole."""
        return self._start(ScriptedStream[Any], self._ask(prompt, params, call)).result()

    @_spelled_out
    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **call: Any) -> ScriptedStream[Any]:
        """Serves a reply in chunks; a scripted error comes here, before the first."""
        return self._start(ScriptedStream[Any], self._ask(prompt, params, call))

    @_spelled_out
    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **call: Any) -> Completion[Any]:
        """`generate`, to be awaited."""
        return await self.astream(prompt, params, **call).result()

    @_spelled_out
    def astream(self, prompt: Prompt, params: SamplingParams | None = None, **call: Any) -> AsyncScriptedStream[Any]:
        """`stream` for ``async for``."""
        return self._start(AsyncScriptedStream[Any], self._ask(prompt, params, call))

    @_spelled_out
    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool = False,
        progress: bool = False,
        **call: Any,
    ) -> list[Any]:
        """Serves ``n`` replies a prompt, one after the other; all prompts are checked before."""
        results: list[Any] = []
        for asked in self._ask_all(prompts, params, n, call):
            try:
                results.append(self._start(ScriptedStream[Any], asked).result())
            except FastDraftError as error:
                if not return_exceptions:
                    raise
                results.append(error)
        return results

    @_spelled_out
    async def abatch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool = False,
        progress: bool = False,
        **call: Any,
    ) -> list[Any]:
        """`batch` with all replies at once."""

        async def serve(asked: ScriptedCall) -> Completion[Any]:
            return await self._start(AsyncScriptedStream[Any], asked).result()

        calls = self._ask_all(prompts, params, n, call)
        results = await asyncio.gather(*map(serve, calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not (return_exceptions and isinstance(result, FastDraftError)):
                raise result
        return results

    @property
    def status(self) -> Literal["loading", "ready", "draining", "failed", "closed"]:
        """``"ready"``, then ``"closed"``."""
        return "closed" if self._closed else "ready"

    def metrics(self) -> Metrics:
        """How many streams are being read; no blocks, and every prompt's tokens."""
        with self._lock:
            running = sum(bool(stream._steps) for stream in self._streams)
            return Metrics(running, 0, 0, 0, 0, 0, 0, sum(_read_prompt(call.prompt)[1] for call in self.calls))

    def close(self, *, drain: bool = True, timeout: float | None = 30.0) -> None:
        """Refuses further calls; open streams can be read to their end, or are cancelled without ``drain``."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams if not drain else ():
            stream.close()

    async def aclose(self, *, drain: bool = True, timeout: float | None = 30.0) -> None:
        """`close()`, to be awaited."""
        self.close(drain=drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise GeneratorClosedError("the generator is closed.", hint="Make a new one.")

    def _ask(self, prompt: Any, params: Any, call: Mapping[str, Any]) -> ScriptedCall:
        """Checks a call."""
        self._refuse_closed()
        _read_prompt(prompt)
        options = {name: call[name] for name in ScriptedCall.__slots__[2:] if name in call}
        overrides = {name: value for name, value in call.items() if name not in options}
        resolved = resolve_params(params, overrides, defaults=SamplingParams(), model={})
        asked = ScriptedCall(copy.deepcopy(prompt), resolved, **options)  # a chat's history grows after the call
        if asked.timeout is not None and not asked.timeout >= 0:
            raise ConfigError(f"timeout is {asked.timeout}, expected seconds >= 0, or None.")
        _parser(asked.output_type)
        return asked

    def _ask_all(self, prompts: Any, params: Any, n: int, call: Mapping[str, Any]) -> list[ScriptedCall]:
        """Checks a batch before any of it runs; an error names its prompt."""
        self._refuse_closed()
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise ConfigError(f"prompts is a {type(prompts).__name__}, expected a sequence of prompts.")
        if not isinstance(n, int) or n < 1:
            raise ConfigError(f"n is {n!r}, expected an integer >= 1.")
        request_id = call.get("request_id")
        each = {"params": params, "output_type": call.get("output_type")}
        for name, value in each.items():
            if not isinstance(value, list | tuple):
                each[name] = [value] * len(prompts)
            elif len(value) != len(prompts):
                raise ConfigError(f"{len(value)} {name} for {len(prompts)} prompts, expected one, or one a prompt.")
        calls: list[ScriptedCall] = []
        for i, (prompt, own, kind) in enumerate(zip(prompts, *each.values(), strict=True)):
            try:
                asked = self._ask(prompt, own, {**call, "output_type": kind})
            except FastDraftError as error:
                error.args = (f"prompts[{i}]: {error}",)
                raise
            calls += [replace(asked, request_id=request_id and f"{request_id}-{i * n + k}") for k in range(n)]
        return calls

    def _start(self, kind: type[R], asked: ScriptedCall) -> R:
        """Records a call and takes its reply."""
        with self._lock:
            self._refuse_closed()
            index, turn = len(self.calls), self._turn
            self.calls.append(asked)
            self._turn += index not in self._errors
        if index in self._errors:
            reply = self._errors[index]
        else:  # outside the lock: a function may take its time
            reply = _choose(self._replies, asked.prompt, turn)
        if isinstance(reply, BaseException):
            raise reply.with_traceback(None)
        named = replace(asked, request_id=asked.request_id or f"scripted-{index}")
        stream = kind(named, _as_text(reply), self._chunk_size, self._delay)
        with self._lock:
            self._streams.add(stream)
        return stream


def _choose(replies: Any, prompt: Prompt, turn: int) -> Any:
    if isinstance(replies, Mapping):
        key = _read_prompt(prompt)[0]
        try:
            return replies[key]
        except KeyError:
            raise ConfigError(f"no reply for the prompt {key!r}, expected one of {list(replies)}.") from None
    if isinstance(replies, Sequence) and not isinstance(replies, str):
        if turn >= len(replies):
            raise ConfigError(f"no reply left: {len(replies)} were served.", hint="Script more replies.")
        return replies[turn]
    return replies(prompt) if callable(replies) else replies


def _as_text(reply: Any) -> str:
    try:
        return reply if isinstance(reply, str) else to_json(reply).decode()
    except PydanticSerializationError as error:
        what = type(reply).__name__
        raise ConfigError(f"a reply is a {what}, expected text, an exception or a JSON value.") from error


def _parser(output_type: Any) -> Callable[[str], Any]:
    if output_type is None:
        return lambda text: None
    if isinstance(output_type, Mapping):
        return json.loads
    try:
        return TypeAdapter(output_type).validate_json
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise InvalidConstraintError(f"output_type {output_type!r} has no JSON form: {error}") from error


def _read_prompt(prompt: Any) -> tuple[Any, int]:
    """Checks a prompt; returns what a mapping of replies knows it by, and its tokens."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise ConfigError(f"the prompt is a {type(prompt).__name__}, expected text, messages or token ids.")
    if not prompt:
        raise ConfigError("the prompt is empty, expected text, messages or token ids.")
    if isinstance(prompt, str):
        return prompt, len(_tokens(prompt))
    if all(type(item) is int and item >= 0 for item in prompt):
        return tuple(prompt), len(prompt)
    for i, item in enumerate(prompt):
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise ConfigError(f"prompt item {i} is {item!r:.80}, expected messages with a role, or token ids.")
    texts = [_content(message) for message in prompt]
    return texts[-1], sum(len(_tokens(text)) for text in texts)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _tokens(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+\Z", text)  # joined they are the text


def _steps(
    text: str, call: ScriptedCall, chunk_size: int | None, delay: float
) -> tuple[list[tuple[float, Chunk]], str | None]:
    """Ends a reply where it must, then cuts it into chunks and the pauses before them; and the stop string."""
    params, tokens = call.params, _tokens(text)
    ends = list(accumulate(map(len, tokens)))
    reason: FinishReason = "stop"
    shown, stop = len(text), None
    for count, (start, end) in enumerate(pairwise([0, *ends]), 1):
        found = [(at, s) for s in params.stop if (at := text.find(s, max(0, start - len(s) + 1), end)) >= 0]
        if found and count >= params.min_tokens:
            shown, stop = min(found)
        elif count == params.max_tokens < len(ends):
            shown, reason = end, "length"
        else:
            continue
        del tokens[count:], ends[count:]
        break
    bounds = [
        *(range(chunk_size, shown, chunk_size) if chunk_size else (e for e in ends if e < shown)),
        shown,
    ]
    steps: list[tuple[float, Chunk]] = []
    for i, (start, end) in enumerate(pairwise([0, *bounds])):
        if call.timeout is not None and (i + 1) * delay >= call.timeout:
            return [*steps, (max(0.0, call.timeout - i * delay), Chunk(finish_reason="timeout"))], None
        first, last = bisect_right(ends, start), len(ends) if end == shown else bisect_right(ends, end)
        ids = tuple(zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in tokens[first:last])
        logprobs = None
        if params.logprobs is not None:
            named = list(zip(ids, tokens[first:last], [0.0] * len(ids), strict=True))
            logprobs = tuple(TokenLogprob(*one, top=(one,) if params.logprobs else ()) for one in named)
        end_reason = reason if end == shown else None
        steps.append((delay, Chunk(text[start:end], ids, (TARGET,) * len(ids), logprobs, end_reason)))
    return steps, stop

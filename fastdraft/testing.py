"""A stand-in for `Generator` in users' tests: the same calls, scripted replies, no model and no torch."""

from __future__ import annotations

import asyncio
import copy
import re
import threading
import time
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from pydantic import TypeAdapter

from fastdraft.config import CallOptions, Prompt, SamplingParams
from fastdraft.constraints.tools import asked_spec, read_tools
from fastdraft.constraints.types import Spec, as_constrained, one_each, spec_of
from fastdraft.errors import ConfigError, FastDraftError, GeneratorClosedError
from fastdraft.metrics import Metrics
from fastdraft.precedence import resolve_params
from fastdraft.prompt.messages import check_ids, read_items, read_messages, refuse_surrogates
from fastdraft.results import TARGET, Chunk, Completion, FinishReason, Pin, Stats, TokenLogprob
from fastdraft.streams import AsyncStream, Stream
from fastdraft.text import StopMatcher
from fastdraft.trace import Trace, TracedRound

if TYPE_CHECKING:  # passes for a Generator with type checkers, so that it fits where one is asked for
    from fastdraft.generator import Generator as _Surface
    from fastdraft.worker import Status
else:
    _Surface = object

__all__ = ["ScriptedCall", "ScriptedGenerator"]

S = TypeVar("S")
_OWN = CallOptions.__annotations__.keys() - SamplingParams.model_fields.keys()  # what is not a parameter


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """What one call asked for: its prompt (a copy), its parameters as resolved, its other keywords."""

    prompt: Prompt
    params: SamplingParams
    output_type: Any = None
    template_options: Mapping[str, Any] | None = None
    fold_system: bool = False
    timeout: float | None = None
    priority: int = 0
    request_id: str | None = None
    trace: bool = False
    tools: Sequence[Any] = ()
    tool_choice: str | Mapping[str, Any] = "auto"

    def spec(self, *, wrapped: bool) -> Spec | None:
        """What its output must be."""
        return asked_spec(self.output_type, read_tools(self.tools), self.tool_choice, wrapped=wrapped)


class _Script:
    """One answer, known whole beforehand: it stands where a stream has its request and its queue of events."""

    def __init__(self, call: ScriptedCall, text: str, chunk_size: int | None, delay: float) -> None:
        self.id, self.cancelled = call.request_id or "", False
        self.spec = call.spec(wrapped="<tool_call>" in text)
        self.is_whole = True  # nobody knows of a script
        self._call = call
        self._steps, self._stop_reason = _cut(text, call, chunk_size, delay)
        self._read: list[Chunk] = []

    def get(self) -> Any:
        time.sleep(self._pause())
        return self._event()

    def put(self, event: Any) -> None:
        """An outcome that a stream puts back for its other readers: `get` gives it again by itself."""

    put_nowait = put

    @property
    def running(self) -> bool:
        return not (self.cancelled or (self._read and self._read[-1].finish_reason))

    def _pause(self) -> float:
        return self._steps[len(self._read)][0] if self.running else 0.0

    def _event(self) -> Chunk | Completion[Any] | BaseException:
        if self._read and self._read[-1].finish_reason:
            return self._outcome(self._read[-1].finish_reason)
        self._read.append(Chunk(finish_reason="cancelled") if self.cancelled else self._steps[len(self._read)][1])
        return self._read[-1]

    def _outcome(self, reason: FinishReason) -> Completion[Any]:
        call, chunks = self._call, self._read
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        rounds = [TracedRound((), (), 0, c.token_ids, c.origins, 0.0, 0.0) for c in chunks if c.token_ids]
        return Completion(
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
            request_id=self.id,
            trace=Trace(tuple(rounds)) if call.trace else None,
        )


class _AsyncScript(_Script):
    async def get(self) -> Any:
        await asyncio.sleep(self._pause())
        return self._event()


class ScriptedGenerator(_Surface):
    """Answers as `Generator` does, from a script; ``calls`` lists what was asked, one entry an answer.

    Prompts, parameters and output types are checked, and errors come, as from a `Generator`; a call that fails
    a check is not in ``calls``. A token is a word with the space before it; its id is made up, but always the
    same. ``max_tokens``, ``min_tokens``, ``stop``, ``logprobs`` (all 0.0) and ``timeout`` act, the rest is
    recorded; each reply is judged once, without ``retries``. Time is counted in delays, so that a timeout always
    falls on the same chunk.

    Args:
        replies: One reply for every call; a sequence, served in order to the calls that ``errors`` spares; a
            mapping from the prompt's text (the last message's content; a tuple of token ids); or a function
            of the prompt. A reply is text, an exception to raise, or a value that pydantic writes as JSON.
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
        self._scripts: weakref.WeakSet[_Script] = weakref.WeakSet()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Completion[Any]:
        """Serves a reply whole."""
        with self.stream(prompt, params, output_type=output_type, **options) as stream:
            return stream.completion

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Stream[Any]:
        """Serves a reply in chunks; scripted errors come here, before the first."""
        return self._serve(self._check(prompt, params, output_type, options), Stream[Any], _Script)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Completion[Any]:
        """`generate` for an event loop."""
        async with self.astream(prompt, params, output_type=output_type, **options) as stream:
            return await stream.result()

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> AsyncStream[Any]:
        """`stream` for an event loop."""
        return self._serve(self._check(prompt, params, output_type, options), AsyncStream[Any], _AsyncScript)

    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool = False,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Any]:
        """Serves ``n`` replies a prompt, one after the other; all prompts are checked before."""
        results: list[Any] = []
        for call in self._check_all(prompts, params, n, return_exceptions, output_type, options):
            try:
                with self._serve(call, Stream[Any], _Script) as stream:
                    results.append(stream.completion)
            except FastDraftError as error:
                if not return_exceptions:
                    raise
                results.append(error)
        return results

    async def abatch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        return_exceptions: bool = False,
        progress: bool = False,
        output_type: Any = None,
        **options: Unpack[CallOptions],
    ) -> list[Any]:
        """`batch` for an event loop."""
        results: list[Any] = []
        for call in self._check_all(prompts, params, n, return_exceptions, output_type, options):
            try:
                async with self._serve(call, AsyncStream[Any], _AsyncScript) as stream:
                    results.append(await stream.result())
            except FastDraftError as error:
                if not return_exceptions:
                    raise
                results.append(error)
        return results

    @property
    def status(self) -> Status:
        """``ready``, ``draining`` after `close`."""
        return "draining" if self._closed else "ready"

    def metrics(self) -> Metrics:
        """Streams that have not ended, and the prompts' tokens; there are no blocks."""
        with self._lock:
            self._refuse_closed()
            running = sum(script.running for script in self._scripts)
            tokens = sum(_read_prompt(call.prompt)[1] for call in self.calls)
            return Metrics(running=running, prompt_tokens=tokens)

    def pin(self, prefix: Prompt) -> Pin:
        """Nothing to keep: there is no KV."""
        with self._lock:
            self._refuse_closed()
        return Pin(_read_prompt(prefix)[1], lambda: None)

    def prepare(self, *, output_types: Sequence[Any] = (), prefixes: Sequence[Prompt] = ()) -> None:
        """Checks what it is given."""
        for output_type in output_types:
            spec_of(as_constrained(output_type))
        for prefix in prefixes:
            self.pin(prefix)

    def forget_prefixes(self) -> None:
        """Nothing to forget: there is no KV."""
        with self._lock:
            self._refuse_closed()

    def close(self, *, drain: bool = True, timeout: float | None = 30.0) -> None:
        """Refuses further calls. Open streams can be read to their end; without ``drain`` they are cancelled."""
        with self._lock:
            self._closed = True
            for script in self._scripts if not drain else ():
                script.cancelled = True

    async def aclose(self, *, drain: bool = True, timeout: float | None = 30.0) -> None:
        """`close` for an event loop."""
        self.close(drain=drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close(drain=error is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        self.close(drain=error is None)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise GeneratorClosedError("the generator is closed.", hint="Build a new one.")

    def _check(self, prompt: Any, params: Any, output_type: Any, options: Mapping[str, Any]) -> ScriptedCall:
        self._refuse_closed()
        own = {name: value for name, value in options.items() if name in _OWN}
        overrides = {name: value for name, value in options.items() if name not in _OWN}
        resolved = resolve_params(params, overrides, defaults=SamplingParams(), model={})
        _read_prompt(prompt)
        call = ScriptedCall(copy.deepcopy(prompt), resolved, output_type, **own)  # a chat's history grows later
        call.spec(wrapped=True)
        if call.timeout is not None and not call.timeout > 0:
            raise ConfigError(f"timeout is {call.timeout!r}, expected seconds > 0 or None.")
        return call

    def _check_all(
        self, prompts: Any, params: Any, n: int, keep: bool, output_type: Any, options: Mapping[str, Any]
    ) -> list[ScriptedCall | FastDraftError]:
        """A call, or its error where errors are returned, for each answer to each prompt."""
        self._refuse_closed()
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
            raise ConfigError(f"prompts is a {type(prompts).__name__}, expected a list of prompts.")
        if n < 1:
            raise ConfigError(f"n is {n}, expected at least 1.")
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(each)} params for {len(prompts)} prompts; pass one for all, or one a prompt.")
        calls: list[ScriptedCall | FastDraftError] = []
        types = one_each(output_type, len(prompts))
        for index, (prompt, mine, own) in enumerate(zip(prompts, each, types, strict=True)):
            try:
                call = self._check(prompt, mine, own, options)
            except FastDraftError as error:
                named = type(error)(f"prompt {index} of the batch: {error}")
                if not keep:
                    raise named from error
                calls += [named] * n
            else:
                name = f"{call.request_id}-{index}" if call.request_id and len(prompts) > 1 else call.request_id
                calls += [replace(call, request_id=name and name + (f"-{k}" if k else "")) for k in range(n)]
        return calls

    def _serve(self, call: ScriptedCall | FastDraftError, stream: Callable[..., S], kind: type[_Script]) -> S:
        """Takes the reply to a call, or raises what there is to raise."""
        if isinstance(call, FastDraftError):
            raise call
        with self._lock:
            self._refuse_closed()
            index, turn = len(self.calls), self._turn
            self.calls.append(call)
            failure = self._errors.get(index)
            self._turn += failure is None
        # Not under the lock: a function may take its time.
        reply = failure or _choose(self._replies, call.prompt, turn)
        if isinstance(reply, BaseException):
            raise reply.with_traceback(None)
        text = reply if isinstance(reply, str) else TypeAdapter(Any).dump_json(reply).decode()
        call = replace(call, request_id=call.request_id or f"scripted-{index}")
        script = kind(call, text, self._chunk_size, self._delay)
        with self._lock:
            self._scripts.add(script)
        return stream(script, self, script)


def _choose(replies: Any, prompt: Prompt, turn: int) -> Any:
    if isinstance(replies, Mapping):
        key = _read_prompt(prompt)[0]
        try:
            return replies[key]
        except KeyError:
            raise ConfigError(f"no reply for {key!r}, expected one of {list(replies)}.") from None
    if isinstance(replies, Sequence) and not isinstance(replies, str):
        if turn >= len(replies):
            raise ConfigError(f"no reply left: {len(replies)} were served.", hint="Script more replies.")
        return replies[turn]
    return replies(prompt) if callable(replies) else replies


def _read_prompt(prompt: Any) -> tuple[Any, int]:
    """Checks a prompt; returns what a mapping of replies knows it by, and its number of tokens."""
    if isinstance(prompt, str):
        refuse_surrogates(prompt, "the prompt")
        if not prompt:
            raise ConfigError("the prompt is empty: its text gives no tokens.", hint="Pass some text.")
        return prompt, len(_tokens(prompt))
    items = read_items(prompt)
    if not isinstance(items[0], Mapping):
        return check_ids(items, 2**32), len(items)
    contents = [message.get("content") or "" for message in read_messages(items, fold=False)]
    texts = ["".join(p if isinstance(p, str) else str(p.get("text", "")) for p in parts) for parts in contents]
    return texts[-1], sum(len(_tokens(text)) for text in texts)


def _tokens(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+\Z", text)  # joined they are the text


def _cut(
    text: str, call: ScriptedCall, chunk_size: int | None, delay: float
) -> tuple[list[tuple[float, Chunk]], str | None]:
    """Ends a reply where it must and cuts it into chunks, each after a pause; with the stop string met."""
    params, tokens, matcher = call.params, _tokens(text), StopMatcher(call.params.stop)
    ends = list(accumulate(map(len, tokens)))
    shown, stop = len(text), None
    reason: FinishReason = "stop"
    for count, (start, end) in enumerate(pairwise([0, *ends]), 1):
        if found := matcher.feed(text[start:end], match=count >= params.min_tokens):
            stop = found[1]
            shown = start + found[0] - len(stop)
        elif count == params.max_tokens < len(tokens):
            shown, reason = end, "length"
        else:
            continue
        del tokens[count:], ends[count:]
        break
    bounds = range(chunk_size, shown, chunk_size) if chunk_size else [end for end in ends if end < shown]
    steps: list[tuple[float, Chunk]] = []
    for i, (start, end) in enumerate(pairwise([0, *bounds, shown])):
        if call.timeout is not None and (i + 1) * delay >= call.timeout:
            steps.append((max(0.0, call.timeout - i * delay), Chunk(finish_reason="timeout")))
            break
        last = end == shown
        mine = tokens[bisect_right(ends, start) : len(ends) if last else bisect_right(ends, end)]
        ids = tuple(zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in mine)
        named = [(id_, token, 0.0) for id_, token in zip(ids, mine, strict=True)]
        top = [TokenLogprob(*one, top=(one,) if params.logprobs else ()) for one in named]
        logprobs = None if params.logprobs is None else tuple(top)
        chunk = Chunk(text[start:end], ids, (TARGET,) * len(ids), logprobs, reason if last else None)
        steps.append((delay, chunk))
    return steps, stop

"""What a call returns while it runs: a stream of chunks, for threads or for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pydantic import ValidationError

from fastdraft.errors import ConstraintDeadEndError, FastDraftError, ForkedProcessError, OutputValidationError
from fastdraft.request import Event, Request
from fastdraft.results import Chunk, Completion

__all__ = ["AsyncStream", "Stream"]

T = TypeVar("T")


def _cancel(request: Request) -> None:
    request.cancelled = True


class _Handle(Generic[T]):
    """What both streams share: the request, its outcome, and cancellation when closed or collected.

    Args:
        request: Submitted; its ``emit`` feeds the stream.
        owner: Kept alive as long as the stream is.
        again: Submits the call once more, for the try of that number, where its text was not valid.
    """

    def __init__(self, request: Request, owner: object, again: Callable[[Request, int], Request] | None = None) -> None:
        self._request = request
        self._owner = owner
        self._again = again
        self._tries = 0
        self._text = ""
        self._process = os.getpid()
        self._outcome: Completion[T] | BaseException | None = None
        # A stream nobody holds is a call nobody wants, also when it was never iterated.
        self._cancel = weakref.finalize(self, _cancel, request)

    @property
    def request_id(self) -> str:
        """The call's id."""
        return self._request.id

    def _check_process(self) -> None:
        """In a forked child nothing would ever arrive."""
        if os.getpid() != self._process:
            raise ForkedProcessError(
                f"this stream belongs to process {self._process} and is used in its fork {os.getpid()}.",
                hint="Build the generator in each process, after the fork.",
            )

    def _take(self, event: Event) -> Chunk | None:
        """A chunk to hand out, or None when the event is the outcome, or the end of a try of several."""
        if isinstance(event, Chunk):
            return event
        outcome = self._refuse(event) if isinstance(event, BaseException) else self._parse(event)
        if isinstance(outcome, OutputValidationError) and self._retries(outcome.completion):
            try:
                self._tries += 1
                request = self._again(self._request, self._tries)  # type: ignore[misc]
            except FastDraftError as error:  # closed, or too many calls wait
                error.__cause__, outcome = outcome, error
            else:
                self._cancel.detach()
                before, self._request = self._request, request
                self._cancel = weakref.finalize(self, _cancel, request)
                if before.cancelled:  # by another thread, meanwhile
                    self._cancel()
                return None
        self._outcome = outcome
        self._cancel.detach()
        return None

    def _refuse(self, error: BaseException) -> BaseException:
        """The error; where a grammar left nothing that may follow, as what it means for the output."""
        spec = self._request.spec
        if spec is None or not isinstance(error, ConstraintDeadEndError):
            return error
        completion = self._request.completion()
        count = completion.completion_tokens
        refusal = OutputValidationError(
            f"the output is no whole value of {spec.label}: nothing may follow its {count} tokens.",
            completion=completion,
            hint=error.hint,
        )
        refusal.__cause__ = error
        return refusal

    def _retries(self, completion: Completion[Any]) -> bool:
        """Whether there is another try: only of a text that came to its end."""
        spec = self._request.spec
        if self._again is None or spec is None or self._tries >= spec.retries or self._request.cancelled:
            return False
        trail = self._request.trail
        failed = trail is not None and trail.error is not None  # it would again
        return completion.finish_reason == "stop" and not failed

    def _parse(self, completion: Completion[Any]) -> Completion[Any] | BaseException:
        """The completion with its value, or the error; in the caller's thread, as validators are the caller's."""
        spec = self._request.spec
        if spec is None or completion.finish_reason == "cancelled":
            return completion
        try:
            # JSON says itself whether it is whole; other texts are only read where the grammar is at an end.
            if spec.kind != "json" and not spec.calls and not self._is_whole(completion):
                raise ValueError("the text is not whole")
            value = spec.read(completion.text)
        except Exception as error:
            refusal = OutputValidationError(
                _why(spec.label, completion, self._tries), completion=completion, hint=_remedy(completion, error)
            )
            refusal.__cause__ = error
            return refusal
        if not spec.calls:
            return replace(completion, parsed=value)
        return replace(completion, tool_calls=value, finish_reason="tool_calls") if value else completion

    def _is_whole(self, completion: Completion[Any]) -> bool:
        return self._request.is_whole and not isinstance(completion.stop_reason, str)  # which cut something off

    def _shown(self, chunk: Chunk) -> Chunk:
        """The chunk as it is handed out, with what can be read so far."""
        spec = self._request.spec
        if spec is None:
            return chunk
        self._text += chunk.text
        if spec.calls and chunk.finish_reason == "stop":
            with contextlib.suppress(ValueError):  # the outcome says it
                return replace(chunk, finish_reason="tool_calls") if spec.read(self._text) else chunk
        return replace(chunk, partial=spec.partial(self._text))

    def _result(self) -> Completion[T]:
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


def _why(label: str, completion: Completion[Any], tries: int) -> str:
    count, most = completion.completion_tokens, completion.params.max_tokens
    if completion.finish_reason == "length" and count >= most:
        return f"the output is no whole value of {label}: it was cut off by max_tokens={most}."
    if completion.finish_reason == "length":
        return f"the output is no whole value of {label}: the context was full after {count} tokens."
    if completion.finish_reason != "stop":
        return f"the output is no whole value of {label}: it ended by {completion.finish_reason} after {count} tokens."
    many = f"none of {tries + 1} outputs is a valid value of {label}."
    return many if tries else f"the output is no valid value of {label}."


def _remedy(completion: Completion[Any], error: Exception) -> str:
    if completion.finish_reason == "length":
        return "Raise max_tokens, or bound its strings and arrays."
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the value"
        return f"{place}: {first['msg']}."
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


class Stream(_Handle[T], Iterator[Chunk]):
    """An iterator of chunks. Leave the ``with`` block, `close` or drop it, and the call ends within one round."""

    def __init__(
        self,
        request: Request,
        owner: object,
        events: queue.SimpleQueue[Event],
        again: Callable[[Request, int], Request] | None = None,
    ) -> None:
        super().__init__(request, owner, again)
        self._events = events

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._outcome is None:
            self._check_process()
            chunk = self._next(self._events.get())
            if chunk is not None:
                return self._shown(chunk)
            self._result()  # an error is raised once here, then the stream is at its end
        raise StopIteration

    def _next(self, event: Event) -> Chunk | None:
        chunk = self._take(event)
        if self._outcome is not None:
            self._events.put(event)  # for whoever else waits on this stream
        return chunk

    @property
    def completion(self) -> Completion[T]:
        """The whole completion; waits for the end and drops chunks not yet read. Raises the call's error."""
        while self._outcome is None:
            self._check_process()
            self._next(self._events.get())
        return self._result()

    def result(self) -> Completion[T]:
        """The same as `completion`."""
        return self.completion

    def close(self) -> None:
        """Cancels the call if it still runs. Idempotent, from any thread."""
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncStream(_Handle[T], AsyncIterator[Chunk]):
    """The same for an event loop: the worker's thread hands events over, no step runs on the loop."""

    def __init__(
        self,
        request: Request,
        owner: object,
        events: asyncio.Queue[Event],
        again: Callable[[Request, int], Request] | None = None,
    ) -> None:
        super().__init__(request, owner, again)
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._outcome is None:
            self._check_process()
            chunk = self._next(await self._events.get())
            if chunk is not None:
                return self._shown(chunk)
            self._result()
        raise StopAsyncIteration

    def _next(self, event: Event) -> Chunk | None:
        chunk = self._take(event)
        if self._outcome is not None:
            self._events.put_nowait(event)  # for whoever else waits on this stream
        return chunk

    async def result(self) -> Completion[T]:
        """The whole completion; waits for the end and drops chunks not yet read. Raises the call's error."""
        while self._outcome is None:
            self._check_process()
            self._next(await self._events.get())
        return self._result()

    def close(self) -> None:
        """Cancels the call if it still runs. Idempotent, from any thread."""
        self._cancel()

    async def aclose(self) -> None:
        """The same as `close`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def async_emitter(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event]) -> Any:
    """An ``emit`` that crosses into a loop; events for a loop that has gone are dropped, with the call."""

    def emit(event: Event) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, event)

    return emit

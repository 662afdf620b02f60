"""The one thread that owns the engine; calls come in through a queue, results leave through each request's ``emit``."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, TypeAlias, TypeVar

from fastdraft._log import get_logger
from fastdraft.engine import Engine
from fastdraft.errors import (
    ConfigError,
    EngineFailedError,
    GeneratorClosedError,
    QueueFullError,
    is_device_fault,
    owned,
)
from fastdraft.metrics import Metrics
from fastdraft.request import Request

__all__ = ["Status", "Worker"]

_log = get_logger(__name__)

T = TypeVar("T")

Status: TypeAlias = Literal["loading", "ready", "draining", "failed"]


class Worker:
    """Runs rounds while there is work, sleeps while there is none.

    Args:
        engine: Touched by the worker's thread alone, from here on.
        max_queue: Requests that may wait.
    """

    def __init__(self, engine: Engine, max_queue: int) -> None:
        self._engine: Engine | None = engine
        self._max_queue = max_queue
        self._inbox: deque[Request] = deque()
        self._errands: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._closing: Literal["", "drain", "cancel"] = ""
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def status(self) -> Status:
        """``ready``, ``draining`` once `close` was called, ``failed`` after a device fault."""
        if self._broken is not None:
            return "failed"
        return "draining" if self._closing else "ready"

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests together, so that they start in the same round.

        Raises:
            GeneratorClosedError: After `close`.
            EngineFailedError: After a device fault.
            QueueFullError: Too many wait already; none of them is queued.
            ConfigError: The generator's own thread asks, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise ConfigError(
                "a call came from a function that the generator runs between its rounds, and would wait for itself.",
                hint="Such a function, as DynamicAlpha's utilisation, may read metrics() but not generate.",
            )
        with self._wake:
            self._check_open()
            waiting = len(self._inbox) + (0 if self._engine is None else len(self._engine.scheduler.waiting))
            if waiting + len(requests) > self._max_queue:
                raise QueueFullError(
                    f"{waiting} calls wait already and {len(requests)} more came; max_queue is {self._max_queue}.",
                    hint="Try again later, split the batch, or raise max_queue.",
                    retry_after=1.0 if self._engine is None else self._engine.retry_after,
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fastdraft-worker", daemon=True)
                self._thread.start()
            self._inbox.extend(requests)
            self._wake.notify()

    def _check_open(self) -> None:
        if self._broken is not None:
            raise EngineFailedError(
                f"the engine failed before: {self._broken}", hint="Build a new Generator."
            ) from self._broken
        if self._closing:
            raise GeneratorClosedError("the generator is closed.", hint="Build a new Generator.")

    def metrics(self) -> Metrics:
        """A snapshot, taken between rounds.

        Raises:
            GeneratorClosedError: After `close`.
        """
        return self.ask(Engine.metrics)

    def ask(self, question: Callable[[Engine], T]) -> T:
        """Runs a question on the engine's own thread, between rounds, and waits for its answer; there itself, at once.

        Raises:
            GeneratorClosedError: After `close`.
            EngineFailedError: After a device fault.
        """
        if threading.current_thread() is self._thread:
            assert self._engine is not None
            return question(self._engine)
        answer: Future[T] = Future()

        def errand(engine: Engine) -> None:
            try:
                answer.set_result(question(engine))
            except BaseException as error:  # the caller's, and no end of the thread
                answer.set_exception(error)

        with self._wake:
            self._check_open()
            if self._thread is None:
                assert self._engine is not None
                return question(self._engine)
            self._errands.append(errand)
            self._wake.notify()
        return answer.result()

    def close(self, *, drain: bool = True, timeout: float | None = 30.0) -> None:
        """Ends the thread; idempotent, from any thread.

        Args:
            drain: Let running and waiting calls finish first; else they end as cancelled.
            timeout: Seconds to drain; what is left then is cancelled.
        """
        if os.getpid() != self._process:  # a forked child has no worker, and the lock may be held for ever
            return
        with self._wake:
            self._closing = "drain" if drain and self._closing != "cancel" else "cancel"
            self._wake.notify()
            thread = self._thread
        if thread is None:
            self._engine = None
        elif thread is not threading.current_thread():
            thread.join(timeout if drain else None)
            if thread.is_alive():
                with self._wake:
                    self._closing = "cancel"
                thread.join()

    def _run(self) -> None:
        assert self._engine is not None
        engine = self._engine
        while True:
            with self._wake:
                while engine.idle and not (self._inbox or self._errands or self._closing):
                    self._wake.wait()
                while self._inbox:
                    engine.add(self._inbox.popleft())
                errands = [self._errands.popleft() for _ in range(len(self._errands))]
                if self._closing == "cancel" or (self._closing and engine.idle):
                    break
            for errand in errands:
                errand(engine)
            self._round(engine)
        for errand in errands:
            errand(engine)
        for request in engine.everyone():
            engine.stop(request, "cancelled")
        engine.close()
        self._engine = None

    def _round(self, engine: Engine) -> None:
        """One round; what it raises ends all running requests, or the waiting ones where none runs yet."""
        try:
            engine.step()
        except BaseException as error:  # also what is no Exception: a dead thread would leave every caller waiting
            for request in list(engine.scheduler.running or engine.scheduler.waiting):
                engine.fail(request, owned(error))
            if is_device_fault(error):
                self._broken = error
                for request in engine.everyone():
                    engine.fail(request, owned(error))
                with self._wake:
                    lost, self._inbox = list(self._inbox), deque()
                for request in lost:
                    request.emit(owned(error))
            _log.warning("round_failed", error=type(error).__name__)

"""Watching a generator from outside: hooks on a borrowed model count, hold and break its forwards.

A generator runs a view that shares its borrowed model's hooks, so what is registered on the model is seen by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from fastdraft import Generator
from tests import tiny

LIMIT = 60.0  # seconds after which a wait is called a hang


class Forwards:
    """Records the forwards of a model while the block runs.

    Attributes:
        fed: For each forward the ids it was fed, packed.
        positions: The positions of those ids.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.fed: list[list[int]] = []
        self.positions: list[list[int]] = []

    @property
    def count(self) -> int:
        """Forwards begun."""
        return len(self.fed)

    def _see(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.fed.append(kwargs["input_ids"][0].tolist())
        if "position_ids" in kwargs:  # the self-check at construction also runs the model's own forward
            self.positions.append(kwargs["position_ids"][0].tolist())
        self.begin()

    def begin(self) -> None:
        """Called at the start of every forward, on the thread that runs it."""

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_pre_hook(self._see, with_kwargs=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hook.remove()


class Gate(Forwards):
    """Holds a model's forwards, from the ``after``-th on, until it is opened; leaving the block opens it.

    Attributes:
        reached: Set once a forward waits.
    """

    def __init__(self, model: Any, after: int = 0) -> None:
        super().__init__(model)
        self._after = after
        self._open = threading.Event()
        self.reached = threading.Event()

    def begin(self) -> None:
        if self.count > self._after:
            self.reached.set()
            assert self._open.wait(LIMIT), "the gate was never opened"

    def wait(self) -> None:
        """Until a forward stands before the gate."""
        assert self.reached.wait(LIMIT), "no forward came"

    def open(self) -> None:
        """Lets all pass, now and later."""
        self._open.set()

    def __exit__(self, *error: Any) -> None:
        self.open()
        super().__exit__(*error)


class Breaks(Forwards):
    """Raises in a model's n-th forward.

    Args:
        model: The model.
        at: Which forward, from 1.
        error: Makes what is raised.
    """

    def __init__(self, model: Any, at: int, error: Callable[[], BaseException]) -> None:
        super().__init__(model)
        self._at = at
        self._error = error

    def begin(self) -> None:
        if self.count == self._at:
            raise self._error()


@contextmanager
def scripted(model: Any, tokens: list[int], *, start: int) -> Iterator[None]:
    """Makes a model certain: whatever it reads, the token at position ``start + i`` is ``tokens[i]``.

    Args:
        model: Its logits are replaced while the block runs.
        tokens: What follows the prompt; the last one is repeated.
        start: Length of the prompt.
    """

    def force(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        rows = kwargs["position_ids"][0, kwargs["logits_to_keep"]].tolist()
        output.logits.fill_(-1e4)
        for row, position in enumerate(rows):
            output.logits[0, row, tokens[min(position + 1 - start, len(tokens) - 1)]] = 0.0
        return output

    hook = model.register_forward_hook(force, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def settled(generator: Generator) -> None:
    """Asserts that nothing runs, nothing waits and every block is free; a round runs first and sweeps."""
    generator.generate([3], max_tokens=1)
    found = generator.metrics()
    assert (found.running, found.queued) == (0, 0)
    assert found.free_blocks == found.total_blocks
    assert found.draft_free_blocks == found.draft_total_blocks


def workers() -> list[threading.Thread]:
    """The worker threads of all generators of this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastdraft")]


def within(call: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """Runs a call in a thread of its own: its result or its error, or a failure where it hangs."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it hangs: not done after {seconds} s"
    if errors:
        raise errors[0]
    return results[0]


def expected(model: Any, tokenizer: Any, prompt: str, tokens: int) -> list[int]:
    """What transformers gives after a text, greedy."""
    return tiny.greedy(model, list(tokenizer(prompt)["input_ids"]), tokens)

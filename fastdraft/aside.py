"""Work in a thread that ends, and takes its OpenMP team with it. Torch-free.

OpenMP keeps a team for every thread that ever computed. With a second one beside a generator's worker there would be
more threads than cores, and libgomp then lets them sleep between kernels: a third of all speed.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["aside"]

T = TypeVar("T")


def aside(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises; it runs in the caller's context, and an interrupted caller does not wait."""
    outcome: Future[T] = Future()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_fulfil, outcome, work), name="fastdraft-aside", daemon=True).start()
    try:
        return outcome.result()
    finally:
        del outcome  # it holds an error, whose frames hold it and all that was loaded so far


def _fulfil(outcome: Future[T], work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # the caller's, whatever it is
        outcome.set_exception(error)
    finally:
        del outcome, work

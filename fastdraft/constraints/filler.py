"""Masks filled while the target runs: grammars release the interpreter's lock where they fill, and forwards do too.

Shapes: G drafted tokens, W words of a packed mask.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from fastdraft.constraints.trail import Trail

__all__ = ["Filler"]

K = TypeVar("K", bound=Hashable)


class Filler:
    """A thread of its own for masks, from the first grammar on."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    @contextmanager
    def filling(self, trails: Mapping[K, tuple[Trail, Sequence[int]]]) -> Iterator[dict[K, Tensor]]:
        """Fills the masks of trails along their drafts, while the block runs; nobody else may touch them meanwhile.

        Args:
            trails: Trails, each with the tokens of its draft.

        Yields:
            Empty; after the block the masks of each trail, int32 [G + 1, W] on the CPU.
        """
        masks: dict[K, Tensor] = {}
        if not trails:
            yield masks
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "fastdraft-masks")
        filled = self._threads.submit(lambda: {key: trail.masks(tokens) for key, (trail, tokens) in trails.items()})
        try:
            yield masks
        finally:
            masks |= filled.result()

    def close(self) -> None:
        """Ends the thread."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

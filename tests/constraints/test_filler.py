"""Masks are filled beside what the caller does meanwhile, and are there when it is done, whatever became of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from fastdraft.constraints.base import Forced
from fastdraft.constraints.filler import Filler
from fastdraft.constraints.trail import Trail
from tests import tiny


class Waiting:
    """Allows token 1 for ever; fills its mask once the caller's own work is under way."""

    finished = False
    exhausted = False

    def __init__(self, meanwhile: threading.Event) -> None:
        self.meanwhile = meanwhile

    def mask(self, out_W: torch.Tensor) -> None:
        assert self.meanwhile.wait(60), "the caller waits for the mask"
        out_W[0] = 0b10

    def validate(self, tokens: Sequence[int]) -> int:
        return len(tokens) if all(token == 1 for token in tokens) else 0

    def advance(self, tokens: Sequence[int]) -> None: ...

    def rollback(self, n: int) -> None: ...

    def forced(self) -> Forced:
        return Forced([])


@contextmanager
def _filler() -> Iterator[tuple[Filler, threading.Event, Trail]]:
    filler, meanwhile = Filler(), threading.Event()
    try:
        yield filler, meanwhile, Trail(lambda: Waiting(meanwhile), tiny.VOCABULARY, [])
    finally:
        meanwhile.set()
        filler.close()


def test_masks_are_filled_while_the_caller_works() -> None:
    with _filler() as (filler, meanwhile, trail):
        with filler.filling({0: (trail, [1, 1, 2]), 1: (trail, [])}) as masks:
            assert not masks
            meanwhile.set()
        first, second = masks[0], masks[1]
        assert first[:, 0].tolist() == [2, 2, 2, 2] and second[:, 0].tolist() == [2]


def test_what_the_caller_raises_leaves_no_trail_in_use() -> None:
    with _filler() as (filler, meanwhile, trail):
        with pytest.raises(RuntimeError, match="the forward"), filler.filling({0: (trail, [1])}) as masks:
            meanwhile.set()
            raise RuntimeError("the forward")
        assert len(masks) == 1
        assert trail.masks([1]).shape[0] == 2


def test_a_thread_only_where_there_are_masks_and_none_afterwards() -> None:
    before = threading.active_count()
    with _filler() as (filler, meanwhile, trail):
        with filler.filling({}) as masks:
            assert threading.active_count() == before
        assert masks == {}
        with filler.filling({0: (trail, [])}):
            meanwhile.set()
            assert threading.active_count() == before + 1
    assert threading.active_count() == before

"""A grammar along one request: at its committed tokens, and for a while beyond them over a draft.

Ends are the trail's own: the tokens that end a call (end-of-sequence, stop tokens) are legal exactly where the text may
end, whatever the grammar says of them.

Shapes: G drafted tokens, W words of a packed mask.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import takewhile
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastdraft.constraints.base import Constraint
from fastdraft.constraints.closing import Closing

__all__ = ["Trail"]

_FAR = 64  # forced tokens at once; no draft is longer

P = ParamSpec("P")
R = TypeVar("R")


def _timed(method: Callable[Concatenate[Trail, P], R]) -> Callable[Concatenate[Trail, P], R]:
    """Adds a method's time to the trail's seconds; methods that it calls are in it."""

    @wraps(method)
    def timed(trail: Trail, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if trail._is_timing:
            return method(trail, *args, **kwargs)
        trail._is_timing, started = True, time.perf_counter()
        try:
            return method(trail, *args, **kwargs)
        finally:
            trail.seconds += time.perf_counter() - started
            trail._is_timing = False

    return timed


class Trail:
    """Walks a constraint over drafts and back; only `commit` moves it for good.

    A constraint that raises at the committed tokens is not asked again: nothing may follow, and the error tells why.
    Where it raises over a draft, the draft may not go there; it is made anew, as nothing else may depend on drafts.

    Args:
        start: Makes the constraint, at the place where the output begins.
        vocabulary: Usable ids.
        ends: Tokens that end the call.
        closing: Steers to the end where tokens run out; None lets them.
        budget: Tokens the output may have.
        guesses: How bytes that must follow are likely to be written where several tokens can, before the text tells.

    Attributes:
        error: What the constraint raised.
        seconds: Spent here so far.
    """

    def __init__(
        self,
        start: Callable[[], Constraint],
        vocabulary: int,
        ends: Collection[int],
        *,
        closing: Closing | None = None,
        budget: int = 0,
        guesses: Mapping[bytes, int] = MappingProxyType({}),
    ) -> None:
        self._start = start
        self._constraint = start()
        self._committed: list[int] = []
        self._is_stuck = False  # over a draft
        self._closing = closing
        self._left = budget  # after what is committed
        self._habits = {written: Counter([token]) for written, token in guesses.items()}
        self._is_amid = False  # of bytes that must follow, and that were not written by one token
        self._words = -(-vocabulary // 32)
        self._ends = sorted(end for end in ends if end < vocabulary)
        self._walked: list[int] = []
        self._is_timing = False
        self._ended = False  # over a draft
        self.error: Exception | None = None
        self.seconds = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether the walk is over: it went over an end, or the text is complete and nothing but an end can follow."""
        return not self._is_silent and (self._ended or (self._constraint.exhausted and self._constraint.finished))

    @property
    def whole(self) -> bool:
        """Whether the text may end here."""
        return self.error is None and self._constraint.finished

    @_timed
    def mask(self) -> Tensor:
        """Which tokens may follow the walk: int32 [W], a bit a token, lowest bit first."""
        out_W = torch.zeros(self._words, dtype=torch.int32)
        if self._is_silent:
            return out_W
        with self._kept():
            finished = self._ended or self._constraint.finished
            if not self._ended:
                self._constraint.mask(out_W)
                if not finished:
                    self._steer(out_W)
            bytes_B = out_W.view(torch.uint8)
            for end in self._ends:
                place, bit = end >> 3, 1 << (end & 7)
                bytes_B[place] = (int(bytes_B[place]) | bit) if finished else (int(bytes_B[place]) & ~bit)
        return torch.zeros_like(out_W) if self._is_silent else out_W

    def _steer(self, out_W: Tensor) -> None:
        """Takes from a mask what would leave too few tokens for the end."""
        if self._closing is None:
            return
        kept_W = out_W.clone()
        try:
            self._closing.narrow(self._constraint, out_W, self._left - len(self._walked))
        except Exception:  # another library's, on the way to an end which nobody has to take
            out_W.copy_(kept_W)
            self._remake()

    @_timed
    def allows(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first, may follow the walk; an end is the last one."""
        if self._ended or self._is_silent:
            return 0
        size = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        legal = 0
        self._walked += tokens[:size]  # for a while
        with self._kept():
            legal = self._constraint.validate(tokens[:size])
            if legal == size and size < len(tokens):
                self._constraint.advance(tokens[:size])
                legal += self._constraint.finished
                self._constraint.rollback(size)
        del self._walked[len(self._walked) - size :]
        return 0 if self._is_silent else legal

    @_timed
    def forced(self) -> list[int]:
        """Tokens that spell what must follow the walk, up to one that is an end.

        What several tokens can write, such as the quotes and the colon behind a key, is taken to be written as it
        mostly was before in this text.
        """
        if self._ended or self._is_silent:
            return []
        found: list[int] = []
        start = len(self._walked)
        with self._kept():
            while len(found) < _FAR:
                tokens, rest = self._constraint.forced()
                step = [*takewhile(lambda token: token not in self._ends, tokens)]
                found += step
                if len(step) < len(tokens) or rest not in self._habits:
                    break
                self._onward(step)
                habit = self._habits[rest].most_common(1)[0][0]
                if not self._constraint.validate([habit]):
                    break
                found.append(habit)
                self._onward([habit])
            if len(self._walked) > start:
                self._constraint.rollback(len(self._walked) - start)
                del self._walked[start:]
        return [] if self._is_silent else found

    @_timed
    def walk(self, tokens: Sequence[int]) -> None:
        """Goes on over tokens that may follow; after an end it goes nowhere."""
        for token in tokens:
            if self._ended or self._is_silent:
                return
            if token in self._ends:
                self._ended = True
                return
            with self._kept():
                self._onward([token])

    def _onward(self, tokens: Sequence[int]) -> None:
        """Goes on over tokens that are not ends."""
        self._walked += tokens
        if tokens:
            self._constraint.advance(tokens)

    @_timed
    def back(self) -> None:
        """Returns to the committed tokens."""
        walked, self._walked, self._ended = len(self._walked), [], False
        with self._kept():
            if self._is_stuck:
                self._remake()
            elif walked and self.error is None:
                self._constraint.rollback(walked)
        self._is_stuck = False

    def _remake(self) -> None:
        """Makes the constraint anew, where the walk is: one that raised may have moved."""
        self._constraint = self._start()
        self._constraint.advance([*self._committed, *self._walked])

    @_timed
    def masks(self, tokens: Sequence[int]) -> Tensor:
        """The mask before each token and after the last, int32 [G + 1, W]; begins and ends at what is committed.

        Args:
            tokens: A draft. From its first illegal token on all masks are that token's: what comes behind it is never
                reached.
        """
        self.back()
        # Row by row: a large fill would start a team of threads for whichever thread this is.
        found_GW = torch.empty(len(tokens) + 1, self._words, dtype=torch.int32)
        found_GW[0] = self.mask()
        for i, token in enumerate(tokens):
            if not self.allows([token]):
                for row_W in found_GW[i + 1 :]:
                    row_W.copy_(found_GW[i])
                break
            self.walk([token])
            found_GW[i + 1] = self.mask()
        self.back()
        return found_GW

    @_timed
    def commit(self, token: int) -> None:
        """Moves on for good; an end moves nothing."""
        assert not self._walked and not self._ended, "a draft was left on the trail"
        self._left -= 1
        if token not in self._ends and self.error is None:
            self._committed.append(token)
            with self._kept():
                self._learn(token)
                self._constraint.advance([token])

    def _learn(self, token: int) -> None:
        """Notes how bytes that must follow are written; only from their first on, the rest would be a habit of none."""
        tokens, rest = self._constraint.forced()
        is_open = bool(rest) and not tokens
        if is_open and not self._is_amid:
            self._habits.setdefault(rest, Counter())[token] += 1
        self._is_amid = is_open

    @property
    def _is_silent(self) -> bool:
        """Whether the constraint raised, and is not asked any more."""
        return self._is_stuck or self.error is not None

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keeps what the constraint raises at the committed tokens; over a draft it only ends the walk."""
        try:
            yield
        except Exception as error:  # another library's, on whatever grammar a user wrote
            if self._walked:
                self._is_stuck = True
            else:
                self.error = self.error or error

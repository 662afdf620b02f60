"""A grammar along one request: at its committed tokens, and for a while beyond them over a draft.

Ends are the trail's own: the tokens that end a call (end-of-sequence, stop tokens) are legal exactly where the text may
end, whatever the grammar says of them.

Shapes: G drafted tokens, W words of a packed mask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fastdraft.constraints.base import Constraint
from fastdraft.constraints.closing import Closing

__all__ = ["Trail"]


class Trail:
    """Walks a constraint over drafts and back; only `commit` moves it for good.

    Args:
        constraint: At the place where the output begins; nobody else's.
        vocabulary: Usable ids.
        ends: Tokens that end the call.
        closing: Steers to the end where tokens run out; None lets them.
        budget: Tokens the output may have.

    Attributes:
        ended: Whether the walk went over an end.
    """

    def __init__(
        self,
        constraint: Constraint,
        vocabulary: int,
        ends: Collection[int],
        *,
        closing: Closing | None = None,
        budget: int = 0,
    ) -> None:
        self._constraint = constraint
        self._closing = closing
        self._left = budget  # after what is committed
        self._words = -(-vocabulary // 32)
        self._ends = sorted(end for end in ends if end < vocabulary)
        self._place_E = torch.tensor([end >> 3 for end in self._ends], dtype=torch.int64)
        self._bit_E = torch.tensor([1 << (end & 7) for end in self._ends], dtype=torch.uint8)
        self._walked = 0
        self.ended = False

    @property
    def done(self) -> bool:
        """Whether the committed text is complete and nothing, not even an end, can follow it."""
        return not self._walked and self._constraint.exhausted and not self._ends

    @property
    def whole(self) -> bool:
        """Whether the text may end here."""
        return self._constraint.finished

    def mask(self) -> Tensor:
        """Which tokens may follow the walk: int32 [W], a bit a token, lowest bit first."""
        out_W = torch.zeros(self._words, dtype=torch.int32)
        if not self.ended:
            self._constraint.mask(out_W)
            if self._closing is not None and not self._constraint.finished:
                self._closing.narrow(self._constraint, out_W, self._left - self._walked)
        finished = self.ended or self._constraint.finished
        bytes_B = out_W.view(torch.uint8)
        for place, bit in zip(self._place_E.tolist(), self._bit_E.tolist(), strict=True):
            bytes_B[place] = (int(bytes_B[place]) | bit) if finished else (int(bytes_B[place]) & ~bit)
        return out_W

    def allows(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first, may follow the walk; an end is the last one."""
        if self.ended:
            return 0
        size = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        legal = self._constraint.validate(tokens[:size])
        if legal < size or size == len(tokens):
            return legal
        self._constraint.advance(tokens[:size])
        finished = self._constraint.finished
        self._constraint.rollback(size)
        return size + finished

    def forced(self) -> list[int]:
        """Tokens that spell what must follow the walk; where nothing may follow, an end."""
        if self.ended:
            return []
        if self._constraint.exhausted:
            return self._ends[:1]
        return [token for token in self._constraint.forced() if token not in self._ends]

    def walk(self, tokens: Sequence[int]) -> None:
        """Goes on over tokens that may follow; after an end it goes nowhere."""
        for token in tokens:
            if self.ended:
                return
            if token in self._ends:
                self.ended = True
                return
            self._constraint.advance([token])
            self._walked += 1

    def back(self) -> None:
        """Returns to the committed tokens."""
        if self._walked:
            self._constraint.rollback(self._walked)
        self._walked, self.ended = 0, False

    def masks(self, tokens: Sequence[int]) -> Tensor:
        """The mask before each token and after the last, int32 [G + 1, W]; begins and ends at what is committed.

        Args:
            tokens: A draft. From its first illegal token on all masks are that token's: what comes behind it is never
                reached.
        """
        self.back()
        found = [self.mask()]
        for token in tokens:
            if self.allows([token]):
                self.walk([token])
                found.append(self.mask())
            else:
                found += [found[-1]] * (len(tokens) + 1 - len(found))
                break
        self.back()
        return torch.stack(found)

    def commit(self, token: int) -> None:
        """Moves on for good; an end moves nothing."""
        assert not self._walked and not self.ended, "a draft was left on the trail"
        self._left -= 1
        if token not in self._ends:
            self._constraint.advance([token])

"""What the engine asks of a compiled grammar: one place in one text.

Shapes: W words of a packed mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Constraint", "Forced"]


class Forced(NamedTuple):
    """What must follow.

    Attributes:
        tokens: As the tokenizer would write it, as far as that does not depend on what comes behind.
        rest: Bytes that must follow these, and may be part of several tokens; empty where there is a choice.
    """

    tokens: list[int]
    rest: bytes = b""


class Constraint(Protocol):
    """A grammar at some place of a text. What ends the text, an end-of-sequence token, is not its concern.

    Attributes:
        finished: Whether the text may end here.
        exhausted: Whether nothing may follow.
    """

    @property
    def finished(self) -> bool: ...

    @property
    def exhausted(self) -> bool: ...

    def mask(self, out_W: Tensor) -> None:
        """Writes which tokens may follow, a bit a token, lowest bit first.

        Args:
            out_W: int32, contiguous, on the CPU.
        """
        ...

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first, may follow; moves nothing."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Moves on over tokens that may follow."""
        ...

    def rollback(self, n: int) -> None:
        """Moves back over the last n tokens, exactly."""
        ...

    def forced(self) -> Forced:
        """What must follow, whatever the model says; empty where there is a choice."""
        ...

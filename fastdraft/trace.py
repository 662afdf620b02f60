"""A round-by-round record of one call, kept when ``trace=True``. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Trace", "TracedRound"]


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One round.

    Attributes:
        draft: The drafted tokens.
        sources: The source of each drafted token.
        accepted: How many of them, from the first, were accepted by the verify.
        tokens: The tokens kept in the output: accepted ones and the target's own, less what a stop trimmed.
        origins: For each kept token its source, or ``"target"``.
        draft_seconds: Time in draft sources in this round.
        target_seconds: Time in the target's forward in this round.
    """

    draft: tuple[int, ...]
    sources: tuple[str, ...]
    accepted: int
    tokens: tuple[int, ...]
    origins: tuple[str, ...]
    draft_seconds: float
    target_seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """All rounds of a call, prefill chunks left out."""

    rounds: tuple[TracedRound, ...]

    @property
    def origins(self) -> tuple[str, ...]:
        """The origin of every token of the output."""
        return tuple(origin for r in self.rounds for origin in r.origins)

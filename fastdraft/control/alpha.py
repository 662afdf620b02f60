"""Leniency that follows load and acceptance: one call's alpha, round by round. Torch-free."""

from __future__ import annotations

from fastdraft.config import DynamicAlpha

__all__ = ["Leniency", "alpha_of"]

BUSY, ACCEPTED = 0.60, 0.65  # utilisation above which, and acceptance under which, alpha moves
_PER_BUSY, _PER_REFUSED = 0.05 / 0.05, 0.03 / 0.05  # how far, for each point of the two
_NEW = 0.8  # of a smoothed utilisation, the share of its newest value
_KEEP = 0.8  # weight that a round's acceptance keeps when the next one comes


def alpha_of(spec: DynamicAlpha, utilisation: float, acceptance: float | None) -> float:
    """The alpha for a load and a recent acceptance.

    Args:
        spec: Where alpha starts, and its bounds.
        utilisation: 0 to 1, smoothed; every 5 points above 60 % lower alpha by 0.05.
        acceptance: Accepted over drafted tokens; every 5 points under 65 % raise alpha by 0.03. None where nothing was
            drafted yet.
    """
    alpha = spec.base - _PER_BUSY * max(0.0, utilisation - BUSY)
    if acceptance is not None:
        alpha += _PER_REFUSED * max(0.0, ACCEPTED - acceptance)
    return round(min(max(alpha, spec.low), spec.high), 6)


class Leniency:
    """One call's alpha, chosen before each round from past rounds.

    Args:
        spec: The call's.

    Attributes:
        spec: The call's.
        alpha: Of the next round.
    """

    def __init__(self, spec: DynamicAlpha) -> None:
        self.spec = spec
        self.alpha = alpha_of(spec, 0.0, None)
        self._utilisation: float | None = None
        self._drafted = self._accepted = 0.0

    def load(self, utilisation: float) -> None:
        """Takes in the load before a round, 0 to 1; smoothed, so that bursts don't shake alpha."""
        old = utilisation if self._utilisation is None else self._utilisation
        self._utilisation = _NEW * utilisation + (1 - _NEW) * old
        acceptance = self._accepted / self._drafted if self._drafted else None
        self.alpha = alpha_of(self.spec, self._utilisation, acceptance)

    def observe(self, drafted: int, accepted: int) -> None:
        """Takes in a round."""
        if drafted:
            self._drafted = self._drafted * _KEEP + drafted
            self._accepted = self._accepted * _KEEP + accepted

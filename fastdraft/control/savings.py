"""What probes may cost while a source does not pay, with exponential back-off. Torch-free."""

from __future__ import annotations

__all__ = ["Savings"]

_RATE = 0.01  # seconds saved for probes in each second of decoding
_FAILURES = 3  # after so many failed probes, the price rises no further: a source always comes back in the end
_BIG = 4.0  # a probe too dear for the call at hand must be saved for this many times over


class Savings:
    """A purse that fills with time and pays for probes of one source.

    Each probe that fails doubles what the next one takes, so that a source that never pays costs ever less.

    Attributes:
        seen: Positions of the source's drafts that were put to the test.
        lost: Seconds that the source has cost, over all calls, and not earned back since.
    """

    def __init__(self) -> None:
        self.seen = 0
        self.lost = 0.0
        self._balance = 0.0
        self._failures = 0

    def earn(self, seconds: float) -> None:
        """Puts a share of decoding time aside."""
        self._balance += _RATE * seconds

    def learn(self, seen: int, loss: float) -> None:
        """Takes in a round of the source: positions put to the test, seconds lost (negative: gained)."""
        self.seen += seen
        self.lost = max(0.0, self.lost + loss)

    def allow(self, cost: float, fits: bool) -> bool:
        """Whether a probe can be paid.

        Args:
            cost: Seconds it is expected to lose; not above 0 where it is expected to gain.
            fits: Whether the call at hand may lose that much.
        """
        return self._balance > max(cost, 0.0) * (2.0**self._failures if fits else _BIG)

    def spend(self, gained: float, accepted: bool) -> None:
        """Tells of a probe: the seconds it gained, and whether its token was accepted."""
        self._balance = max(0.0, gained)
        self._failures = 0 if accepted else min(self._failures + 1, _FAILURES)

    def clear(self) -> None:
        """The source pays: nothing needs saving, and the next probes are cheap."""
        self._balance, self._failures = 0.0, 0

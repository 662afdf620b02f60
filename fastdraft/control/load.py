"""How loaded the engine is, from what it tells after each round. Torch-free."""

from __future__ import annotations

__all__ = ["Load"]


class Load:
    """The share of time the engine is busy, times the share of its places that are wanted.

    An engine that serves one call is always busy; only calls that share it, or wait for it, make it loaded.

    Args:
        places: Requests that can run together.

    Attributes:
        utilisation: 0 to 1, of the last round.
    """

    def __init__(self, places: int) -> None:
        self.utilisation = 0.0
        self._places = places
        self._ended: float | None = None

    def rest(self) -> None:
        """Tells that nothing was left to do: the load of before is over."""
        self.utilisation = 0.0

    def push(self, started: float, ended: float, requests: int) -> None:
        """Tells of a round.

        Args:
            started: When it began, in seconds of any clock.
            ended: When it ended.
            requests: Running and waiting.
        """
        since = started if self._ended is None else min(self._ended, started)
        busy = (ended - started) / (ended - since) if ended > since else 1.0
        self._ended = ended
        self.utilisation = busy * min(1.0, requests / self._places)

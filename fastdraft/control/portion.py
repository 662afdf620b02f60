"""How many prompt tokens a round feeds beside requests that decode: these wait for them. Torch-free."""

from __future__ import annotations

__all__ = ["Portion"]

_ALLOWED = 2.5  # seconds of a round with prompt tokens, in those of one without
_LEAST, _FIRST = 16, 64  # prompt tokens; before anything was measured
_KEEP = 0.8  # weight of the rounds before


class Portion:
    """Learns from rounds what one without prompt tokens takes, and what each prompt token adds.

    Args:
        most: Prompt tokens of any round, such as where nothing decodes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._round: float | None = None
        self._token: float | None = None

    def size(self, *, decoding: bool) -> int:
        """Prompt tokens of the next round.

        Args:
            decoding: Whether it has requests that wait for their next token.
        """
        if not decoding:
            return self._most
        if self._round is None or not self._token:
            return min(_FIRST, self._most)
        return max(min(_LEAST, self._most), min(self._most, int((_ALLOWED - 1) * self._round / self._token)))

    def observe(self, fed: int, seconds: float, *, decoding: bool) -> None:
        """Takes in a round.

        Args:
            fed: Its prompt tokens.
            seconds: What it took.
            decoding: Whether it had requests that decode.
        """
        if not fed:
            self._round = seconds if self._round is None else _KEEP * self._round + (1 - _KEEP) * seconds
            return
        token = max(0.0, seconds - (self._round or 0.0) * decoding) / fed
        self._token = token if self._token is None else _KEEP * self._token + (1 - _KEEP) * token

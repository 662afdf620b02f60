"""How much of a draft will be accepted: from reached positions, decayed, with an optimistic prior. Torch-free.

    generator   Acceptance   a conditional acceptance for each position of a draft, and for each level of the draft's
                             own confidence; one for each kind of drafting (source, temperature, ...)
    request     Lean         how much better or worse this one call goes than that, in log-odds

A position counts only where all before it were accepted: what comes after a rejection was never put to the test. What
counts is the probability that the verify gave the token (1 - total variation of p and q where both are known), which
says more than whether it was then accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["EDGES", "MOST", "Acceptance", "Lean", "expected_tokens"]

MOST = 16  # tokens of a draft, where we choose

# Levels of confidence: the draft's largest probability, divided where it is nearly sure.
EDGES = (0.3, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995, 0.999)
_MIDDLES = (0.2, 0.4, 0.58, 0.73, 0.85, 0.93, 0.97, 0.99, 0.997, 1.0)

_OPTIMISM = 0.75  # acceptance before anything was seen
_PRIOR = 4.0  # what a prior weighs, in observations, before there are any; it fades as they come
_KEEP = 0.985  # weight that an observation keeps when the next one comes
_NEAR = 0.5  # weight that a position's observations have for the next position, and so on
_LEAN_PRIOR, _LEAN_KEEP = 8.0, 0.97
_LEAST = 0.002  # estimates stay between this and 1 less this: log-odds are finite, and nothing is ever ruled out


class Acceptance:
    """Conditional acceptance of one kind of drafting, over all calls of a generator."""

    def __init__(self) -> None:
        self._positions = [[0.0, 0.0] for _ in range(MOST)]  # weight, sum
        self._levels = [[0.0, 0.0] for _ in _MIDDLES]
        self._curve: tuple[float, ...] | None = None
        self._table: tuple[float, ...] | None = None

    @property
    def curve(self) -> tuple[float, ...]:
        """P(accept | reached) of each position; a position seldom reached is taken to be like those before it."""
        if self._curve is None:
            found = []
            near = _faded(self._positions[0][0])
            right = near * _OPTIMISM
            for weight, total in self._positions:
                prior = _faded(weight)
                found.append(_inside((total + prior * right / near) / (weight + prior)))
                near, right = _NEAR * near + weight, _NEAR * right + total
            self._curve = tuple(found)
        return self._curve

    @property
    def table(self) -> tuple[float, ...]:
        """P(accept | reached, level) of each level; before anything was seen, a little over the draft's confidence."""
        if self._table is None:
            self._table = tuple(
                _inside((total + _faded(weight) * (0.25 + 0.75 * middle)) / (weight + _faded(weight)))
                for (weight, total), middle in zip(self._levels, _MIDDLES, strict=True)
            )
        return self._table

    def observe(self, chances: Sequence[float], levels: Sequence[int]) -> None:
        """Takes in a round.

        Args:
            chances: Acceptance probability of each reached position, from the first.
            levels: The level of each, where the draft says how sure it was; else empty. One more than there are chances
                where drafting stopped at a position that would have been reached: it counts by its level.
        """
        chances = chances[:MOST]
        for cell, chance in zip(self._positions, chances, strict=False):
            _add(cell, chance)
        for level, chance in zip(levels, chances, strict=False):
            _add(self._levels[level], chance)
        if len(chances) < min(len(levels), MOST):
            _add(self._positions[len(chances)], self.table[levels[len(chances)]])
        self._curve = self._table = None


class Lean:
    """How far a call's acceptance of one source is off its generator's, as a shift in log-odds."""

    def __init__(self) -> None:
        self._weight = self._found = 0.0
        self._reached: dict[Acceptance, list[float]] = {}

    def shift(self, chances: Sequence[float]) -> tuple[float, ...]:
        """A generator's estimates as they are for this call."""
        if not self._weight:
            return tuple(chances)
        # Against what the generator knows by now, this call included: nothing counts twice.
        known = sum(
            weight * chance
            for acceptance, weights in self._reached.items()
            for weight, chance in zip(weights, acceptance.curve, strict=True)
        )
        middle = _inside(known / self._weight)
        found = _inside((self._found + _LEAN_PRIOR * middle) / (self._weight + _LEAN_PRIOR))
        odds = found * (1 - middle) / ((1 - found) * middle)
        return tuple(odds * a / (1 - a + odds * a) for a in chances)

    def observe(self, chances: Sequence[float], acceptance: Acceptance) -> None:
        """Takes in a round's reached positions, beside the generator's estimates of their kind."""
        keep = _LEAN_KEEP ** len(chances)
        self._weight, self._found = self._weight * keep, self._found * keep
        for weights in self._reached.values():
            weights[:] = [weight * keep for weight in weights]
        weights = self._reached.setdefault(acceptance, [0.0] * MOST)
        for i, chance in enumerate(chances[:MOST]):
            self._weight += 1
            self._found += chance
            weights[i] += 1


def expected_tokens(acceptance: Sequence[float], gamma: int) -> float:
    """Tokens of a round: 1 + a1 + a1 a2 + ...

    Args:
        acceptance: Conditional acceptance of each position; the last one holds for those beyond.
        gamma: Drafted tokens.
    """
    tokens = reach = 1.0
    for i in range(gamma):
        reach *= acceptance[min(i, len(acceptance) - 1)]
        tokens += reach
    return tokens


def _add(cell: list[float], value: float) -> None:
    cell[0] = cell[0] * _KEEP + 1
    cell[1] = cell[1] * _KEEP + value


def _faded(weight: float) -> float:
    """What a prior weighs beside observations of some weight."""
    return _PRIOR / (1 + weight / 16)


def _inside(value: float) -> float:
    return min(max(value, _LEAST), 1 - _LEAST) if math.isfinite(value) else _LEAST

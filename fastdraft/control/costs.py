"""What a forward costs: a few measured points a model, corrected by the rounds that are really run. Torch-free.

Seconds as a function of rows are no straight line, nor always rising: kernels change with the row count. Between two
measured points the line through them is taken, after the last one the last slope.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeAlias

__all__ = ["Costs", "Curve", "Forward", "Measured"]

Points: TypeAlias = tuple[tuple[int, float], ...]

_GAIN = 0.12  # of what a round was mispredicted by; a round of a shared machine says little by itself
_SHAPE = 1 / 2  # share of the gain that goes to the row count at hand, the rest shifts the whole curve
_NEAR = (1.0, 0.5, 0.25)  # what a row count's correction does to its neighbours, by distance
_MOST = 33  # row counts from here on share one correction
_CLIP, _FIRST_CLIP, _FIRST = 0.3, 1.5, 3  # a misprediction counts as at most e**_CLIP, more so in the first rounds


class Forward(NamedTuple):
    """The size of one forward: rows fed, rows whose logits were wanted, KV tokens read by all requests together."""

    rows: int
    kept: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What one model's forwards took on this machine.

    Attributes:
        points: (rows, seconds), ascending; the logits of every row were wanted.
        prefill: (rows, seconds) of longer feeds, ascending; the logits of the last row were wanted.
        per_token: Seconds that each KV token read adds to a forward.
    """

    points: Points
    prefill: Points = ()
    per_token: float = 0.0

    def __post_init__(self) -> None:
        rows = [n for n, _ in (*self.points, *self.prefill)]
        seconds = [s for _, s in (*self.points, *self.prefill)]
        if not self.points or rows != sorted(set(rows)) or not all(0 < s < math.inf for s in seconds):
            raise ValueError(f"points {self.points} and prefill {self.prefill} are no costs by ascending rows")
        if not 0 <= self.per_token < math.inf:
            raise ValueError(f"per_token is {self.per_token}, expected seconds >= 0")

    def least(self, other: Measured) -> Measured:
        """These figures, or those of ``other`` where they are faster at the same row count."""

        def faster(ours: Points, theirs: Points) -> Points:
            known = dict(theirs)
            return tuple((rows, min(seconds, known.get(rows, seconds))) for rows, seconds in ours)

        return Measured(faster(self.points, other.points), faster(self.prefill, other.prefill), self.per_token)

    def to_json(self) -> str:
        """As JSON, for the cache."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measured:
        """Reads `to_json`.

        Raises:
            ValueError: It is not what `to_json` writes.
        """
        try:
            found = json.loads(text)
            points, prefill = (
                tuple((int(rows), float(seconds)) for rows, seconds in found[name]) for name in ("points", "prefill")
            )
            return cls(points, prefill, float(found["per_token"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not measured costs: {error!r}") from error


class Curve:
    """One model's seconds under one kind of sampling: `Measured`, and how far real rounds are off it.

    The correction has a part for the whole curve (the machine is slower than it was) and one for each row count (its
    shape differs: kernels change between measured points, and sampling takes time by the row). Both are logarithms of
    a ratio, moved a little by each round.
    """

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self._last = measured.points[-1][0]
        self._joined = (*measured.points[-1:], *measured.prefill)
        self._shift = 0.0
        self._shape = [0.0] * (_MOST + 1)
        self._feed = 0.0  # the same for feeds longer than the last point
        self._seen = 0

    def seconds(self, rows: int, context: int = 0) -> float:
        """Seconds of a forward whose every row is wanted, with so many KV tokens read."""
        base = _interpolate(self.measured.points, rows)
        return (base + self.measured.per_token * context) * math.exp(self._shift + self._shape[min(rows, _MOST)])

    def feed(self, rows: int, context: int = 0) -> float:
        """Seconds of a forward over so many tokens, of which few are wanted: prefill, or catching up."""
        if rows <= self._last:
            return self.seconds(rows, context)
        base = _interpolate(self._joined, rows) if len(self._joined) > 1 else _interpolate(self.measured.points, rows)
        return (base + self.measured.per_token * context) * math.exp(self._feed)

    def observe(self, forwards: Sequence[Forward], seconds: float) -> None:
        """Takes in what forwards really took, all together."""
        expected = [self._expected(forward) for forward in forwards]
        total = sum(expected)
        if not (total > 0 and seconds > 0):
            return
        clip = _FIRST_CLIP if self._seen < _FIRST else _CLIP
        error = max(-clip, min(clip, math.log(seconds / total)))
        self._seen += 1
        gain = error * max(_GAIN, 1 / self._seen)
        for forward, part in zip(forwards, expected, strict=True):
            if self._is_feed(forward):
                self._feed += gain * part / total
            else:
                self._shift += gain * (1 - _SHAPE) * part / total
                at = min(forward.rows, _MOST)
                for rows in range(max(1, at - 2), min(_MOST, at + 2) + 1):
                    self._shape[rows] += gain * _SHAPE * _NEAR[abs(rows - at)] * part / total

    def _is_feed(self, forward: Forward) -> bool:
        return forward.kept < forward.rows and forward.rows > self._last

    def _expected(self, forward: Forward) -> float:
        price = self.feed if self._is_feed(forward) else self.seconds
        return price(forward.rows, forward.context)


class Costs:
    """What target and drafts cost, each under each kind of sampling.

    Args:
        target: The target's.
        drafts: Each draft model's by the name of its source; sources that run no model have none.
    """

    def __init__(self, target: Measured, drafts: Mapping[str, Measured]) -> None:
        self._target = target
        self._drafts = dict(drafts)
        self._curves: dict[tuple[str | None, str], Curve] = {}

    def verify(self, rows: int, context: int = 0, kind: str = "") -> float:
        """Seconds of the target over so many rows, and of what follows from them.

        Args:
            rows: Of all requests together.
            context: KV tokens of all requests together.
            kind: Of sampling; each is learnt by itself.
        """
        return self.curve(None, kind).seconds(rows, context)

    def step(self, source: str, rows: int, context: int = 0, kind: str = "") -> float:
        """Seconds of one step of a draft model, over so many requests; 0 for a source without a model."""
        return self.curve(source, kind).seconds(rows, context) if source in self._drafts else 0.0

    def catch_up(self, source: str, lag: int, kind: str = "") -> float:
        """Seconds that feeding a lag takes beyond the step that draws the first token."""
        if source not in self._drafts or lag <= 1:
            return 0.0
        curve = self.curve(source, kind)
        return max(0.0, curve.feed(lag) - curve.seconds(1))

    def curve(self, source: str | None, kind: str = "") -> Curve:
        """The curve of a source's model, or the target's (None)."""
        key = source, kind
        if key not in self._curves:
            self._curves[key] = Curve(self._target if source is None else self._drafts[source])
        return self._curves[key]

    def observe(self, source: str | None, forwards: Sequence[Forward], seconds: float, kind: str = "") -> None:
        """Takes in a real round's forwards of one model; sources without a model are ignored."""
        if source is None or source in self._drafts:
            self.curve(source, kind).observe(forwards, seconds)


def _interpolate(points: Points, rows: int) -> float:
    """The line between neighbours; the last slope beyond, the first value below. Never less than a tenth of a point."""
    if rows <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_right(points, rows, key=lambda point: point[0]), len(points) - 1)
    (n0, s0), (n1, s1) = points[right - 1], points[right]
    return max(s0 + (s1 - s0) * (rows - n0) / (n1 - n0), 0.1 * s0)

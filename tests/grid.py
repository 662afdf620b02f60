"""Oracle grids: CI runs a seeded pairwise selection, ``slow`` the whole grid."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def pairwise(axes: Sequence[Sequence[Any]], seed: int = 0) -> list[tuple[Any, ...]]:
    """A selection in which every pair of values of any two axes occurs together at least once (greedy, seeded)."""
    rng = random.Random(seed)
    open_pairs = {
        (i, a, j, b)
        for (i, axis), (j, other) in itertools.combinations(enumerate(axes), 2)
        for a in range(len(axis))
        for b in range(len(other))
    }
    chosen = []
    while open_pairs:
        i, a, j, b = rng.choice(sorted(open_pairs))
        best: tuple[int, tuple[int, ...]] | None = None
        for _ in range(20):
            row = [rng.randrange(len(axis)) for axis in axes]
            row[i], row[j] = a, b
            gain = sum((k, row[k], m, row[m]) in open_pairs for k, m in itertools.combinations(range(len(axes)), 2))
            if best is None or gain > best[0]:
                best = gain, tuple(row)
        assert best is not None
        picked = best[1]
        open_pairs -= {(k, picked[k], m, picked[m]) for k, m in itertools.combinations(range(len(axes)), 2)}
        chosen.append(tuple(axis[value] for axis, value in zip(axes, picked, strict=True)))
    return chosen


def whole(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Every combination."""
    return list(itertools.product(*axes))


def test_pairwise_covers_every_pair() -> None:
    axes = [range(5), "abc", (True, False)]
    rows = pairwise(axes)
    assert {(a, b) for a, b, _ in rows} == set(itertools.product(range(5), "abc"))
    assert {(a, c) for a, _, c in rows} == set(itertools.product(range(5), (True, False)))
    assert len(rows) < 30

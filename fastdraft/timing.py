"""Timed calls that can be compared.

Machines are shared and noisy: every side runs in one process, in turns (A B A B ...), figures are medians, and their
ratios are what to read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdraft.config import Prompt
from fastdraft.generator import Generator
from fastdraft.results import Completion

__all__ = ["Run", "interleave", "median", "time_call"]


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    Attributes:
        tokens: Generated ids.
        first: Seconds to the first token.
        total: Seconds to the last.
        rate: Decode rate: tokens after the first delivery over the time after it; None where there was only one.
        calls: Target forwards that gave tokens.
        drafted: Tokens proposed.
        accepted: Of these, tokens kept.
    """

    tokens: tuple[int, ...]
    first: float
    total: float
    rate: float | None
    calls: int
    drafted: int = 0
    accepted: int = 0


def time_call(generator: Generator, prompt: Prompt, **options: Any) -> Run:
    """One call from a cold start: no prefix is left from an earlier one.

    Args:
        generator: Nothing else runs in it.
        prompt: Any form of prompt.
        **options: Of `Generator.generate`.
    """
    generator.forget_prefixes()
    started = time.perf_counter()
    out: Completion[Any] = generator.generate(prompt, **options)
    total = time.perf_counter() - started
    stats = out.stats
    assert stats.time_to_first_token is not None
    drafted = stats.draft_tokens, stats.accepted_tokens
    return Run(out.token_ids, stats.time_to_first_token, total, stats.tokens_per_second, stats.rounds, *drafted)


def interleave(
    sides: Mapping[str, Callable[[], Run]],
    repeats: int,
    *,
    warm: bool = True,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, list[Run]]:
    """Runs all sides in turns.

    Args:
        sides: By name, in the order they run.
        repeats: Counted runs of each.
        warm: Run each once before, uncounted.
        tick: Called after each counted run.
    """
    for side in sides.values() if warm else ():
        side()
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            runs[name].append(side())
            tick()
    return runs


def median(values: Sequence[float]) -> float:
    """The middle of the values."""
    return statistics.median(values)

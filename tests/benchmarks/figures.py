"""Numbers from the raw runs of cpu.json: medians over turns, geometric means over prompts, then over groups."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.benchmarks.workloads import GROUPS


class Figures:
    """What the page shows of the results; None wherever something was not measured.

    Args:
        results: The content of cpu.json.
    """

    def __init__(self, results: Mapping[str, Any]) -> None:
        self._results = results

    def sides(self, name: str) -> list[str]:
        """The sides of a set that were measured, in order."""
        prompts = self._prompts(name)
        return list(prompts[0]["runs"]) if prompts else []

    def counts(self, name: str) -> dict[str, int]:
        """How many prompts of each group."""
        found = Counter(prompt["group"] for prompt in self._prompts(name))
        return {group: found[group] for group in GROUPS if found[group]}

    def mean(self, name: str, side: str, what: str, group: str | None = None, part: str = "greedy") -> float | None:
        """Geometric mean over prompts of the median of ``rate``, ``first`` or ``total``."""
        return geometric(median(prompt["runs"].get(side), what) for prompt in self._prompts(name, group, part))

    def rate(self, name: str, side: str) -> float | None:
        """Tokens a second over all prompts."""
        return self.mean(name, side, "rate")

    def ratio(self, name: str, side: str, other: str, group: str | None = None) -> float | None:
        """Decode rate over another side's, prompt by prompt, in one group; without a group the mean over groups."""
        if group is None:
            return geometric(self.ratio(name, side, other, one) for one in self.counts(name))
        rates = [
            [median(prompt["runs"].get(one), "rate") for one in (side, other)] for prompt in self._prompts(name, group)
        ]
        return geometric(mine / theirs for mine, theirs in rates if mine and theirs)

    def best(self, name: str, prefix: str) -> str | None:
        """The fastest of the sides whose names start so, over all groups."""
        sides = [side for side in self.sides(name) if side.startswith(prefix)]
        return max(sides, key=lambda side: self.rate(name, side) or 0.0, default=None)

    def tokens_a_call(self, name: str, side: str) -> float | None:
        """Tokens a target call, where calls are known."""
        runs = [prompt["runs"][side][0] for prompt in self._prompts(name)]
        calls = sum(run["calls"] for run in runs)
        return sum(run["tokens"] for run in runs) / calls if calls else None

    def difference(self, name: str, side: str) -> Mapping[str, Any] | None:
        """Whose tokens a side's must be, and on how many prompts they are."""
        found: Mapping[str, Any] | None = self._results.get(name, {}).get("differences", {}).get(side)
        return found

    def firsts(self, name: str) -> dict[str, float]:
        """Seconds to the first token after 512, by side."""
        found = self._results.get(name, {}).get("first", {})
        return {side: statistics.median(run["first"] for run in runs) for side, runs in found.items() if runs}

    def sooner(self, name: str, side: str, other: str) -> float | None:
        """How many times sooner one side's first token after 512 is than another's."""
        firsts = self.firsts(name)
        return firsts[other] / firsts[side] if side in firsts and other in firsts else None

    def sampled(self, name: str) -> dict[str, float]:
        """Tokens a second at a temperature, by side."""
        prompts = self._prompts(name, part="sampled")
        sides = list(prompts[0]["runs"]) if prompts else []
        rates = {side: self.mean(name, side, "rate", part="sampled") for side in sides}
        return {side: rate for side, rate in rates.items() if rate is not None}

    def sampled_over_greedy(self, name: str, side: str) -> float | None:
        """Decode rate at a temperature over the greedy one, on the same prompts."""
        mine, greedy = self.sampled(name).get(side), self.mean(name, side, "rate", "code")
        return mine / greedy if mine and greedy else None

    def section(self, name: str, key: str) -> float | None:
        """A number that another script saved."""
        value: float | None = self._results.get(name, {}).get(key)
        return value

    def _prompts(self, name: str, group: str | None = None, part: str = "greedy") -> Sequence[Mapping[str, Any]]:
        prompts = self._results.get(name, {}).get(part, [])
        return [prompt for prompt in prompts if group is None or prompt["group"] == group]


def median(runs: Sequence[Mapping[str, Any]] | None, what: str) -> float | None:
    """The median over turns; None where a run has no such figure."""
    values = [run[what] for run in runs or () if run[what] is not None]
    return statistics.median(values) if values else None


def geometric(values: Iterable[float | None]) -> float | None:
    """The geometric mean of what is known; None of nothing."""
    known = [value for value in values if value]
    return math.exp(statistics.fmean(map(math.log, known))) if known else None


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second of several calls together, from when each has its first to when the last has its last.

    Args:
        times: For each call when each of its tokens came.
    """
    start, end = max(one[0] for one in times), max(one[-1] for one in times)
    return sum(moment > start for one in times for moment in one) / (end - start)

"""The bars that fastdraft is held to on this pair, and how each is read from the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.figures import Figures
from tests.benchmarks.sides import BASE


@dataclass(frozen=True, slots=True)
class Demand:
    """One bar.

    Attributes:
        text: What it says.
        least: The value it asks for.
        value: What was measured; None where it was not.
    """

    text: str
    least: float
    value: Callable[[Figures], float | None]


def _over(name: str, side: str, other: str, group: str | None = None) -> Callable[[Figures], float | None]:
    return lambda figures: figures.ratio(name, side, other, group)


def _over_best(name: str, side: str, prefix: str, group: str | None = None) -> Callable[[Figures], float | None]:
    def value(figures: Figures) -> float | None:
        best = figures.best(name, prefix)
        return None if best is None else figures.ratio(name, side, best, group)

    return value


OURS, INT8 = "fastdraft auto", "fastdraft int8 auto"
LLAMA = ("llama.cpp Q4_K_M plain", "llama.cpp Q8_0 plain")

DEMANDS: tuple[Demand, ...] = (
    Demand("plain over transformers plain", 1.25, _over("bf16", "fastdraft plain", BASE)),
    Demand(
        "first token after 512, times sooner than transformers",
        1.1,
        lambda figures: figures.sooner("bf16", "fastdraft plain", BASE),
    ),
    *(
        Demand(f"speculative over transformers plain, {group}", least, _over("bf16", OURS, BASE, group))
        for group, least in (("code", 4.0), ("edit", 4.0), ("extraction", 4.0), ("rag", 2.8), ("qa", 2.0))
    ),
    Demand("speculative over transformers plain, all groups", 3.4, _over("bf16", OURS, BASE)),
    Demand("code at temperature 0.8 over greedy", 0.9, lambda figures: figures.sampled_over_greedy("bf16", OURS)),
    Demand(
        "over transformers' assisted generation at its best", 2.2, _over_best("bf16", OURS, "transformers assisted")
    ),
    Demand("int8 plain over transformers plain", 2.2, _over("quantised", "fastdraft int8 plain", BASE)),
    *(
        Demand(f"int8 speculative over transformers plain, {group}", 5.0, _over("quantised", INT8, BASE, group))
        for group in ("code", "edit", "extraction")
    ),
    Demand(
        "int8, first token after 512, times sooner than transformers",
        3.0,
        lambda figures: figures.sooner("quantised", "fastdraft int8 plain", BASE),
    ),
    *(
        Demand(f"int8 speculative over {side}, {group or 'all groups'}", least, _over("quantised", INT8, side, group))
        for side in LLAMA
        for group, least in (("code", 1.5), ("extraction", 1.5), (None, 1.2))
    ),
    Demand(
        "int8 plain over OpenVINO int8 plain",
        0.8,
        _over("quantised", "fastdraft int8 plain", "OpenVINO int8 plain"),
    ),
    *(
        Demand(
            f"int8 speculative over OpenVINO int8 with its draft at its best, {group}",
            1.2 if group in ("edit", "extraction") else 1.0,
            _over_best("quantised", INT8, "OpenVINO int8 draft", group),
        )
        for group in ("code", "edit", "extraction", "rag", "qa")
    ),
    Demand("top-1 agreement of int8 with bf16", 0.96, lambda figures: figures.section("quality", "agreement")),
    Demand("hostile text, over our own plain", 0.97, lambda figures: figures.section("hostile", "worst")),
    Demand("gamma auto over the best fixed gamma", 0.95, lambda figures: figures.section("gamma", "worst")),
)

"""What calls cost and what speculation gave, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from fastdraft.results import Completion, Stats

__all__ = ["decode_rate", "figures_table"]


def figures_table(columns: Mapping[str, Sequence[Completion[Any]]], *, show_header: bool = True) -> Table:
    """Makes a table with a column for each way of running a call.

    Args:
        columns: The column's heading, and the runs: the same call once or several times. Times are medians.
        show_header: Show the headings.
    """
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, show_header=show_header)
    table.add_column("")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    each = [_figures(runs) for runs in columns.values()]
    for label in each[0]:
        table.add_row(label, *(figures[label] for figures in each))
    return table


def decode_rate(runs: Sequence[Completion[Any]]) -> float | None:
    """The median of tokens after the first over the time after the first; None where there is no second token."""
    return _median([run.stats.tokens_per_second for run in runs])


def _figures(runs: Sequence[Completion[Any]]) -> dict[str, str]:
    first, stats = runs[0], runs[0].stats
    return {
        "tokens per second": _number(decode_rate(runs), ".1f"),
        "time to first token": _number(_median([run.stats.time_to_first_token for run in runs]), ".3f", " s"),
        "tokens": str(first.completion_tokens),
        "target calls": str(stats.rounds),
        "tokens per target call": _number(first.completion_tokens / stats.rounds if stats.rounds else None, ".2f"),
        "drafts accepted": _acceptance(stats),
    }


def _acceptance(stats: Stats) -> str:
    if stats.acceptance_rate is None:
        return "-"
    return f"{stats.acceptance_rate:.0%} ({stats.accepted_tokens} of {stats.draft_tokens})"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"

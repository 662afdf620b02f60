"""What benchmarks share: interleaved runs, medians, ratios, and a page with a table and a plot.

The machines are shared and noisy: sides run in turns (A B A B ...), and ratios of medians are what counts. Absolute
numbers are printed beside them.
"""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import fastdraft
from fastdraft.timing import Run, median

__all__ = [
    "Clock",
    "bars",
    "median",
    "run_transformers",
    "table",
    "write",
]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "benchmarks"


@dataclass(slots=True)
class Clock:
    """A transformers streamer that only looks at the clock."""

    started: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


def run_transformers(model: Any, ids: Sequence[int], tokens: int, **options: Any) -> Run:
    """``model.generate``, greedy and of exactly ``tokens`` tokens unless ``options`` say otherwise.

    Timed by a streamer; target calls are counted by a hook.
    """
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    clock = Clock()
    prompt = torch.tensor([list(ids)])
    settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0} | options
    started = time.perf_counter()
    try:
        # The streamer gets the prompt first; what follows are tokens.
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **settings)
    finally:
        hook.remove()
    times, counts = clock.times[1:], clock.counts[1:]
    after = sum(counts[1:])
    rate = after / (times[-1] - times[0]) if after else None
    return Run(tuple(out[0, len(ids) :].tolist()), times[0] - started, times[-1] - started, rate, len(calls))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def bars(name: str, title: str, labels: Sequence[str], values: Sequence[float], unit: str) -> str:
    """Writes a bar chart beside the page; returns its Markdown, or nothing where matplotlib is absent."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return ""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(labels) + 1.2))
    axes.barh(list(labels)[::-1], list(values)[::-1], color="#3f6fb5")
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.bar_label(axes.containers[0], fmt="%.2f", padding=3)
    figure.tight_layout()
    figure.savefig(PAGES / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return f"![{title}]({name}.svg)\n"


def write(name: str, title: str, body: str) -> None:
    """Writes docs/benchmarks/<name>.md with date, versions and command, and prints it."""
    where = f"{platform.machine()}, {torch.get_num_threads()} threads, {platform.python_implementation()} "
    where += platform.python_version()
    versions = f"fastdraft {fastdraft.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    command = " ".join(["python", "-m", f"tests.benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    page = f"# {title}\n\n{body.strip()}\n\n"
    page += f"Measured {datetime.date.today().isoformat()} with `{command}`: {versions}; {where}. "
    page += "Sides run in turns; figures are medians, ratios are what to read.\n"
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / f"{name}.md").write_text(page, "utf-8")
    print(page)

"""``fastdraft bench``: plain decoding against each source and draft length, on your own prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic_core import to_jsonable_python
from rich import box
from rich.console import Console
from rich.table import Table

from fastdraft.cli.models import DEFAULT_MODEL
from fastdraft.cli.named import Chat, Drafts, Prompts, Target, named_drafts, named_model
from fastdraft.config import make_config
from fastdraft.errors import ConfigError
from fastdraft.workload import read_prompts

if TYPE_CHECKING:
    from fastdraft.bench import BenchReport

__all__ = ["bench"]


def bench(
    target: Target = DEFAULT_MODEL,
    draft: Drafts = None,
    prompts: Prompts = None,
    chat: Chat = True,
    tokens: Annotated[int, typer.Option(help="New tokens of each run.")] = 96,
    gamma: Annotated[
        list[str] | None,
        typer.Option(help="A draft length or 'auto'; may be given again.", show_default="2 4 6 8 12 auto"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each side on each prompt.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled runs comparable.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Of target and draft; auto is as stored.")] = "auto",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the report here, as JSON.", show_default=False)
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the rates here, as PNG; needs matplotlib.", show_default=False)
    ] = None,
) -> None:
    """Measure a target and its drafts: plain, each source, each draft length, in turns; medians.

    Every run starts without a kept prefix and makes exactly as many tokens as asked.
    """
    from fastdraft.bench import GAMMAS, plot, run

    asked = None if prompts is None else read_prompts(prompts, chat=chat)
    lengths = GAMMAS if gamma is None else [_length(value) for value in gamma]
    _check_outputs(json_path, plot_path)
    report = run(
        make_config({"target": named_model(target), "draft": named_drafts(draft) or None, "dtype": dtype}),
        asked,
        tokens=tokens,
        gammas=lengths,
        repeats=repeats,
        temperature=temperature,
        seed=seed,
        progress=True,
    )
    _print(report, target)
    if json_path is not None:
        json_path.write_text(json.dumps(to_jsonable_python(report), indent=2) + "\n", "utf-8")
    if plot_path is not None:
        plot(report, plot_path)


def _check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Refuses before anything runs what could not be written at the end."""
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} names {path}, but {path.parent} is no folder.", hint="Make the folder first.")
    if plot_path is not None:
        from fastdraft.bench import check_plot

        check_plot(plot_path)


def _length(value: str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"gamma is {value!r}, expected an integer or 'auto'.") from None


def _print(report: BenchReport, target: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in ("tok/s", "ratio", "first, s", "all, s", "accepted", "tok/call", "equal"):
        table.add_column(heading, justify="right")
    for side in report.sides:
        table.add_row(
            side.name,
            _number(side.tokens_per_second, ".1f"),
            _number(side.ratio, ".2f"),
            f"{side.time_to_first_token:.3f}",
            f"{side.seconds:.2f}",
            _number(side.acceptance_rate, ".0%"),
            _number(side.mean_acceptance_length, ".2f"),
            "-" if side.equal is None else f"{side.equal} of {len(report.prompts)}",
            style="bold" if side is report.best else "",
        )
    console = Console()
    console.print(table)
    console.print(
        f"\n{target}: {len(report.prompts)} prompts, {report.tokens} tokens each, temperature {report.temperature:g}; "
        f"medians of {report.repeats} runs, in turns. tok/s: the tokens after the first over the time after it; ratio: "
        f"over plain; equal: prompts with plain's tokens.",
        style="dim",
        highlight=False,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"

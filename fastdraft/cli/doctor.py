"""``fastdraft doctor``: what a target and a draft give together, before they are deployed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastdraft.cli.models import DEFAULT_MODEL
from fastdraft.cli.named import Chat, Prompts, Target, named_draft, named_model
from fastdraft.errors import ConfigError
from fastdraft.workload import as_prompt, read_prompts

if TYPE_CHECKING:
    from fastdraft.doctor import Estimate, Guess, Position, Report

__all__ = ["doctor"]


def doctor(
    target: Target = DEFAULT_MODEL,
    draft: Annotated[str, typer.Option(help="'ngram', or a draft model in the forms of --target.")] = "ngram",
    prompts: Prompts = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Examine this prompt alone, and show both models' top five.", show_default=False),
    ] = None,
    chat: Chat = True,
    tokens: Annotated[int, typer.Option(help="New tokens of each answer at most.")] = 64,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Tell acceptance at this one too; may be given again.", show_default="0.8"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Live runs of each prompt.")] = 2,
    dtype: Annotated[str, typer.Option(help="Of target and draft; auto is as stored.")] = "auto",
    requests_per_day: Annotated[float | None, typer.Option(help="For a cost estimate.", show_default=False)] = None,
    tokens_per_request: Annotated[float | None, typer.Option(help="For a cost estimate.", show_default=False)] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of the machine.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Examine a target and a draft: do they fit, what will they give, and what to do.

    The target answers the prompts, the draft is judged along the answers, each draft length is forecast from measured
    costs, and the best one runs.
    """
    if prompt is not None and prompts is not None:
        raise ConfigError("--prompt and --prompts were both given.", hint="Give one of them.")
    source = named_draft(draft)
    if source is None:
        raise ConfigError("draft is 'none'; there is nothing to examine.", hint="Name a draft model, or 'ngram'.")
    asked = None if prompts is None else read_prompts(prompts, chat=chat)
    if prompt is not None:
        asked = {"prompt": as_prompt(prompt, chat=chat)}
    from fastdraft.doctor import examine

    report = examine(
        named_model(target),
        source,
        asked,
        tokens=tokens,
        temperatures=temperature or (0.8,),
        repeats=repeats,
        dtype=dtype,
        requests_per_day=requests_per_day,
        tokens_per_request=tokens_per_request,
        price_per_hour=price_per_hour,
        progress=True,
    )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
    else:
        _print(Console(highlight=False), report, target, draft, positions=prompt is not None)


def _print(console: Console, report: Report, target: str, draft: str, *, positions: bool) -> None:
    if positions:
        console.print(_side_by_side(report.positions))
    console.print(f"\n[bold]{target}[/] with [bold]{draft}[/]\n")
    console.print(_figures(report))
    console.print(_acceptance(report))
    console.print(_forecast(report))
    for live in report.live:
        name = "plain" if live.gamma == 0 else f"gamma {live.gamma}"
        console.print(
            f"Ran {name}: {live.measured:.1f} tok/s, {live.forecast:.1f} were forecast ({live.error:+.0%}); "
            f"first token after {live.time_to_first_token:.2f} s.",
            soft_wrap=True,
        )
    if report.estimate is not None:
        console.print(_estimate(report.estimate))
    verdict = report.verdict
    colour = {"speculate": "green", "little": "yellow", "no": "red"}[verdict.outcome]
    console.print(f"\n[bold {colour}]{verdict.summary}[/]")
    for advice in verdict.advice:
        console.print(f"- {advice}", markup=False, soft_wrap=True)


def _figures(report: Report) -> Table:
    from fastdraft.doctor.verdict import WANTED

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", "found", "wanted"):
        table.add_column(heading, justify="left" if not heading else "right")
    pairing = report.pairing
    if pairing is not None:
        table.add_row("vocabulary", f"{pairing.vocabulary}, {pairing.overlap:.1%} alike", "same or padded")
        for note in pairing.notes or ("agree",):
            table.add_row("rope and context", note, "agree")
    table.add_row(*_judged("draft step / target step", report.speed_ratio, most=WANTED.speed_ratio))
    if report.jaccard is not None and report.total_variation is not None:
        table.add_row(*_judged("top-5 similarity (Jaccard)", report.jaccard, least=WANTED.jaccard))
        table.add_row("mean total variation", f"{report.total_variation:.2f}", "")
    table.add_row(*_judged("rollback, target steps", report.rollback, most=WANTED.rollback))
    return table


def _judged(name: str, value: float, *, least: float | None = None, most: float | None = None) -> tuple[str, Text, str]:
    good = (least is None or value >= least) and (most is None or value <= most)
    wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
    return name, Text(f"{value:.2f}", style="green" if good else "red"), wanted


def _acceptance(report: Report) -> Table:
    table = Table(title="Drafted tokens accepted", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("temperature", no_wrap=True)
    shown = (1, 2, 3, 4, 6, 8, 12, 16)
    for heading in ("drafts", *(f"first {n}" if n == 1 else str(n) for n in shown)):
        table.add_column(heading, justify="right")
    for one in report.acceptance:
        kept = [f"{one.kept[n - 1]:.0%}" if n <= len(one.kept) else "-" for n in shown]
        table.add_row(f"{one.temperature:g}", f"{one.drafted:.0%}", *kept)
    return table


def _forecast(report: Report) -> Table:
    table = Table(title="Forecast", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("gamma", "tok/s", "over plain", "tok/call"):
        table.add_column(heading, justify="right")
    plain = report.forecast[0].tokens_per_second
    for rate in report.forecast:
        table.add_row(
            str(rate.gamma),
            f"{rate.tokens_per_second:.1f}",
            f"{rate.tokens_per_second / plain:.2f}",
            f"{rate.tokens_per_round:.2f}",
            style="bold" if rate.gamma == report.best else "",
        )
    return table


def _estimate(estimate: Estimate) -> Table:
    table = Table(title="A day", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "seconds a request", "machine hours", "cost"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, day in (("plain", estimate.plain), ("speculative", estimate.speculative)):
        table.add_row(name, f"{day.seconds_per_request:.2f}", f"{day.hours:.1f}", f"{day.cost:.2f}")
    table.add_row("saved", "", "", f"{estimate.saved:.2f}")
    return table


def _side_by_side(positions: Sequence[Position]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("", "token", "target", "draft"):
        table.add_column(heading)
    for number, position in enumerate(positions):
        table.add_row(
            str(number),
            Text(repr(position.text), style="green" if position.accepted else "red"),
            Text(_guesses(position.target)),
            Text(_guesses(position.draft)),
        )
    return table


def _guesses(guesses: Sequence[Guess]) -> str:
    return "  ".join(f"{guess.text!r} {guess.probability:.2f}" for guess in guesses)

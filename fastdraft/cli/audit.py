"""``fastdraft audit``: is the output of this pair, with these settings, still the target's own?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

import fastdraft
from fastdraft.cli.models import DEFAULT_MODEL
from fastdraft.cli.named import Chat, Drafts, Gamma, Prompts, Target, Temperature, named_drafts, named_model
from fastdraft.precedence import resolve_params
from fastdraft.workload import read_prompts

if TYPE_CHECKING:
    from fastdraft.audit import AuditReport, Difference, Sampled

__all__ = ["audit"]

COLOURS = {"no_evidence": "bold green", "inconclusive": "bold yellow", "lossy": "bold red"}
SHOWN = 10  # differing tokens of a greedy audit


def audit(
    target: Target = DEFAULT_MODEL,
    draft: Drafts = None,
    prompts: Prompts = None,
    chat: Chat = True,
    tokens: Annotated[int, typer.Option(help="Tokens to judge, about.")] = 2000,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a text at most.")] = 256,
    temperature: Temperature = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.", show_default="the model's own, else 0")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.", show_default="the model's own, else 1")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 is off.", show_default="the model's own, else 0")] = None,
    gamma: Gamma = None,
    alpha: Annotated[float | None, typer.Option(help="Below 1 is lossy, as the audit should find.")] = None,
    verification: Annotated[
        str | None, typer.Option(help="'rejection' or 'invariant'.", show_default="rejection")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other seeds give other texts.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="Of target and draft; auto is float32 for small models, else as stored.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Test whether a target with its drafts still writes as the target alone.

    Generates text with speculation, then compares it with what dense forwards of target and draft say about it. Ends
    with status 1 where the output is not the target's distribution. Takes minutes.
    """
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "gamma": gamma,
        "alpha": alpha,
        "verification": verification,
        "seed": seed,
    }
    given = {name: value for name, value in options.items() if value is not None}
    resolve_params(None, given, defaults=fastdraft.SamplingParams(), model={})  # refuses before anything is loaded
    asked = None if prompts is None else list(read_prompts(prompts, chat=chat).values())
    from fastdraft.audit import audit as run

    console = Console()
    sources = named_drafts(draft)
    report = run(
        named_model(target),
        sources or None,
        asked,
        params=fastdraft.SamplingParams(**given),
        tokens=tokens,
        dtype=dtype,
        progress=not as_json and console.is_terminal,
    )
    if as_json:
        typer.echo(report.to_json())
    else:
        _print(console, report, {"target": target, "draft": ", ".join(draft or ("ngram",)) if sources else "none"})
    if report.verdict == "lossy":
        raise typer.Exit(1)


def _print(console: Console, report: AuditReport, names: dict[str, str]) -> None:
    from fastdraft.audit import Sampled

    found = report.evidence
    rows = names | _run(report) | (_statistics(found) if isinstance(found, Sampled) else {})
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, show_header=False)
    for label, value in rows.items():
        table.add_row(label, value)
    console.print(table)
    if not isinstance(found, Sampled) and found.differences:
        console.print(_differences(found.differences[:SHOWN]))
    console.print(report.summary, style=COLOURS[report.verdict], highlight=False, markup=False)


def _run(report: AuditReport) -> dict[str, str]:
    accepted = f"{report.accepted_tokens / report.draft_tokens:.0%}" if report.draft_tokens else "none"
    return {
        "settings": f"{_settings(report.params)}, {report.dtype}",
        "judged": f"{report.tokens:,} tokens of {report.texts} texts",
        "drafted": f"{report.draft_tokens:,} tokens, {accepted} accepted",
        "rounding": f"{report.rounding:.1g} a log-probability (up to {report.rounding_limit:g} is explained)",
    }


def _settings(params: fastdraft.SamplingParams) -> str:
    names = ["temperature", "gamma", "seed"]
    off = {"top_k": 0, "top_p": 1, "min_p": 0, "alpha": 1, "acceptance_rule": "lenience"}
    names[1:1] = [name for name, value in off.items() if getattr(params, name) != value]
    said = ", ".join(f"{name} {getattr(params, name)}" for name in names)
    return said if params.temperature == 0 else f"{said}, {params.verification}"


def _statistics(found: Sampled) -> dict[str, str]:
    share = found.detectable
    return {
        "liked better by the draft": f"{found.found} tokens, {found.expected:.1f} expected",
        "z": f"{_number(found.z)} (p = {found.z_p_value:.2g}); rounding may move it by {found.rounding_z:.2g}",
        "z of the draft alone": _number(found.draft_z),
        "would show": f"{share:.1%} of the output unverified" if share is not None and share <= 1 else "nothing",
        "uniformity": f"D = {found.uniformity:.3f} (p = {found.uniformity_p_value:.2g})",
        "outside the truncation": f"{found.outside} tokens, {found.impossible} of them not by rounding",
    }


def _differences(differences: tuple[Difference, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("text", "position", "token", "likeliest", "gap", "ulps", ""):
        table.add_column(heading, justify="right")
    for d in differences:
        numbers = (d.text, d.position, d.token, d.expected)
        table.add_row(*map(str, numbers), f"{d.gap:.3g}", f"{d.ulps:.3g}", "near-tie" if d.near_tie else "wrong")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

"""``fastdraft generate``: one answer from any model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_jsonable_python
from rich.console import Console

import fastdraft
from fastdraft.cli.figures import figures_table
from fastdraft.cli.models import DEFAULT_MODEL
from fastdraft.cli.named import Chat, Gamma, Target, Temperature, named_draft, named_model
from fastdraft.precedence import resolve_params

if TYPE_CHECKING:
    from fastdraft import Chunk, Completion, Prompt

__all__ = ["generate"]


def generate(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from standard input.", show_default=False)],
    target: Target = DEFAULT_MODEL,
    draft: Annotated[str, typer.Option(help="'ngram', 'none', or a draft model in the forms of --target.")] = "ngram",
    chat: Chat = True,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 256,
    temperature: Temperature = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.", show_default=False)] = None,
    gamma: Gamma = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the answer; may be given again.", show_default=False)
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print what it cost to standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result at its end, as JSON.")] = False,
) -> None:
    """Generate one answer and print it as it comes."""
    asked = _prompt(prompt, chat=chat)
    options = _given(
        max_tokens=max_tokens, temperature=temperature, seed=seed, gamma=gamma, stop=tuple(stop) if stop else None
    )
    resolve_params(None, options, defaults=fastdraft.SamplingParams(), model={})  # refuses before anything is loaded
    with (
        fastdraft.Generator(named_model(target), draft=named_draft(draft)) as generator,
        generator.stream(asked, **options) as stream,
    ):
        if not as_json:
            _print_text(stream)
        completion = stream.completion
    if as_json:
        typer.echo(json.dumps(_as_json(completion), ensure_ascii=False, indent=2))
    if stats:
        _print_stats(completion)


def _prompt(text: str, *, chat: bool) -> Prompt:
    if text == "-":
        text = sys.stdin.read()
    return [{"role": "user", "content": text}] if chat else text


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _print_text(chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _as_json(completion: Completion[Any]) -> Mapping[str, Any]:
    """The result as plain values, with the two rates that `Stats` computes."""
    result: dict[str, Any] = to_jsonable_python(completion)
    stats = completion.stats
    result["stats"] |= {
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
    }
    return {name: value for name, value in result.items() if name not in {"parsed", "trace", "logprobs"}}


def _print_stats(completion: Completion[Any]) -> None:
    console = Console(stderr=True, highlight=False)
    console.print()
    console.print(figures_table({"": [completion]}, show_header=False))
    console.print(f"finished: {completion.finish_reason}; speculation: {completion.stats.speculation}")

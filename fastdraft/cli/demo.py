"""``fastdraft demo``: a real model answers with and without speculation, side by side."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import fastdraft
from fastdraft.cli.figures import decode_rate, figures_table
from fastdraft.cli.models import DEFAULT_MODEL
from fastdraft.models.catalogue import find
from fastdraft.models.store import load_path
from fastdraft.results import TARGET, Completion
from fastdraft.text import TextStream

if TYPE_CHECKING:
    from fastdraft import Generator

__all__ = ["demo"]

TASK = "Proofread this letter and return it in full."
LETTER = """\
Dear Zoë,

thank you for your order of 24 August. Your parcel with two blue lamps, one oak table and four chairs left our \
warehouse this morning and will arrive on Thursday between 9 and 12 o'clock. if nobody is at home, the driver will \
leave it with a neighbour.

The invoice of €248.50 is attached. Please pay it within 30 days.

Kind regards,
Maria Keller"""
PROMPT = [{"role": "user", "content": f"{TASK}\n\n{LETTER}"}]

COLOURS = {TARGET: "", "ngram": "bold green"}  # bold shows where colours are off
PAIRS = 3  # measured runs of each kind at most
ENOUGH = 12.0  # seconds after which no further pair is begun


def demo(
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens at most.")] = 160,
    gamma: Annotated[
        int | None, typer.Option(min=1, help="Drafted tokens a round.", show_default="the generator decides")
    ] = None,
) -> None:
    """Watch a real model answer with speculative decoding, and measure it against plain decoding.

    The model is SmolLM2-135M-Instruct, fetched into the cache the first time. The prompt asks for a text much like
    one it holds, which is where drafts copied from the prompt (NGram) do best.
    """
    console = Console()
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    plain_options = options | {"gamma": 0}
    if gamma is not None:
        options["gamma"] = gamma
    folder = load_path(DEFAULT_MODEL, progress=True)
    # In bfloat16 rows of other shapes round otherwise, and two tokens that are nearly tied could change places.
    with fastdraft.Generator(folder, draft=fastdraft.NGram(), dtype="float32") as generator:
        console.print(f"[bold]{find(DEFAULT_MODEL).title}[/], float32, greedy, drafts from NGram()\n", highlight=False)
        console.print("Prompt", style="bold")
        console.out(PROMPT[0]["content"], style="dim", highlight=False)
        warm_up = _show_answer(console, generator, options)
        plain, speculative = _measure(generator, plain_options, options)
    _report(console, plain, speculative)
    _prove(console, plain, [warm_up, *speculative])


def _show_answer(console: Console, generator: Generator, options: dict[str, Any]) -> Completion[Any]:
    """Prints an answer as it comes, each token in the colour of its origin."""
    console.print("\nAnswer", style="bold")
    text = TextStream(generator.tokenizer, ())
    counts: Counter[str] = Counter()
    with generator.stream(PROMPT, **options) as stream:
        for chunk in stream:
            for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
                counts[origin] += 1
                text.push(token)
                console.out(text.take(), style=COLOURS[origin], end="", highlight=False)
        text.finish()
        console.out(text.take(), highlight=False)
    for origin, style in COLOURS.items():
        words = "by the target itself" if origin == TARGET else f"drafted by {origin}, accepted by the target"
        console.out(f"\n{counts[origin]:4} tokens {words}", style=style, end="", highlight=False)
    console.print("\n")
    return stream.completion


def _measure(
    generator: Generator, plain_options: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Completion[Any]], list[Completion[Any]]]:
    """Runs both kinds in turn, so that what else the machine does falls on both."""
    plain: list[Completion[Any]] = []
    speculative: list[Completion[Any]] = []
    began = time.monotonic()
    while len(plain) < PAIRS and (not plain or time.monotonic() - began < ENOUGH):
        plain.append(generator.generate(PROMPT, **plain_options))
        speculative.append(generator.generate(PROMPT, **options))
    return plain, speculative


def _report(console: Console, plain: list[Completion[Any]], speculative: list[Completion[Any]]) -> None:
    console.print(figures_table({"plain": plain, "speculative": speculative}))
    before, after = decode_rate(plain), decode_rate(speculative)
    if before and after:
        console.print(
            f"Speculative decoding ran at [bold]{after / before:.2f} times[/] the plain rate.", highlight=False
        )
    runs = f"Medians of {len(plain)} runs" if len(plain) > 1 else "One run"
    console.print(
        f"{runs} of each, in turn, after the answer above. Tokens per second: those after the first over the time "
        f"after the first. {plain[0].stats.prefix_tokens} of the prompt's {plain[0].prompt_tokens} tokens were still "
        f"in the KV cache.",
        style="dim",
        highlight=False,
    )


def _prove(console: Console, plain: list[Completion[Any]], speculative: list[Completion[Any]]) -> None:
    """Compares the ids of every run.

    Raises:
        typer.Exit: They differ.
    """
    expected = plain[0].token_ids
    runs = [*plain, *speculative]
    if all(run.token_ids == expected for run in runs):
        console.print(
            f"\n[bold green]Equal:[/] all {len(runs)} runs gave the same {len(expected)} token ids.", highlight=False
        )
        return
    console.print("\n[bold red]Not equal:[/] speculation changed the token ids. Please report this.")
    raise typer.Exit(1)

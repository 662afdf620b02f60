"""What commands have in common: their options, and from what a user types to models and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

import fastdraft
from fastdraft.models.catalogue import CATALOGUE
from fastdraft.models.store import load_path

if TYPE_CHECKING:
    from fastdraft import DraftModel, NGram

__all__ = [
    *("Chat", "Drafts", "Gamma", "Prompts", "Target", "Temperature"),
    *("named_draft", "named_drafts", "named_model"),
]

Target: TypeAlias = Annotated[
    str, typer.Option(help="Hub id, folder, .gguf file, or a name that 'fastdraft models' lists.")
]
Drafts: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="'ngram' or a draft model; may be given again.", show_default="ngram")
]
Prompts: TypeAlias = Annotated[
    Path | None, typer.Option(help='One prompt a line, or .jsonl with "prompt".', show_default="five that come along")
]
Chat: TypeAlias = Annotated[bool, typer.Option("--chat/--raw", help="Through the model's chat template, or as it is.")]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option(help="0 is greedy.", show_default="the model's own, else 1")
]
Gamma: TypeAlias = Annotated[
    int | None, typer.Option(help="Drafted tokens a round.", show_default="the generator decides")
]


def named_model(name: str) -> str | Path:
    """A name that ``fastdraft models`` lists becomes its folder, fetched where it is missing; others stay."""
    return load_path(name, progress=True) if name.lower() in CATALOGUE else name


def named_drafts(names: Sequence[str] | None) -> list[DraftModel | NGram]:
    """Each once, n-grams where none is named; a second draft model is known by the name that was typed."""
    found: dict[str, DraftModel | NGram] = {}
    for name in names or ("ngram",):
        source = named_draft(name)
        if source is not None:
            taken = source.name in (other.name for other in found.values())
            found.setdefault(name, source.model_copy(update={"name": name}) if taken else source)
    return list(found.values())


def named_draft(name: str) -> DraftModel | NGram | None:
    """``none``, ``ngram``, or a draft model in the forms of a target."""
    match name:
        case "none":
            return None
        case "ngram":
            return fastdraft.NGram()
        case _:
            return fastdraft.DraftModel(named_model(name))

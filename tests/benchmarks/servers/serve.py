"""The loop of a peer's server: one JSON object a line in, one out.

In: ``{"ids": [...], "tokens": 96, "stop": [...]}``, the prompt's token ids, the most tokens to make, the ids that end a
run. Out: ``{"tokens": [...], "first": s, "total": s, "rate": tokens a second or null}``. The first line out is
``{"ready": {...}}`` with the versions that answer. What libraries print on stdout goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Deliver = Callable[[list[int]], None]
# ids, tokens at most, ids that end a run, and what to call with every batch of new tokens
Decode = Callable[[list[int], int, list[int], Deliver], None]


def serve(load: Callable[[], tuple[Decode, dict[str, str]]]) -> None:
    """Loads once, then answers until stdin ends.

    Args:
        load: Gives the function that decodes greedily, and the versions to report.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    decode, versions = load()
    print(json.dumps({"ready": versions}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _timed(decode, request["ids"], request["tokens"], request["stop"])
        print(json.dumps(answer), file=out, flush=True)


def _timed(decode: Decode, ids: list[int], most: int, stop: list[int]) -> dict[str, object]:
    tokens: list[int] = []
    times: list[float] = []
    counts: list[int] = []

    def deliver(batch: list[int]) -> None:
        times.append(time.perf_counter())
        counts.append(len(batch))
        tokens.extend(batch)

    started = time.perf_counter()
    decode(ids, most, stop, deliver)
    after = len(tokens) - counts[0]
    rate = after / (times[-1] - times[0]) if after else None
    return {"tokens": tokens, "first": times[0] - started, "total": times[-1] - started, "rate": rate}

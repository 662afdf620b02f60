"""Measures what a model's forwards take on this machine: once, and kept in the cache folder.

Only relations between figures are used, and real rounds correct them, so one pass is enough; where it is short there
are more, since short forwards suffer most from whatever else the machine does.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from fastdraft._log import get_logger
from fastdraft.control.costs import Measured
from fastdraft.kv.table import Table
from fastdraft.models.runner import Feed, Runner
from fastdraft.models.store import cache_dir

__all__ = ["load_or_measure", "measure"]

_log = get_logger(__name__)

_PREFILL = 64  # rows of the longer feed: enough to leave the range of the single rows, and short
_FAR = 512  # KV tokens before the rows that tell what reading KV takes
_PASSES = 3  # at most
_FASTER = 0.75  # of a figure: below it, what was measured then was measured on a busy machine


@torch.inference_mode()
def measure(runner: Runner, *, context: int, rows: Sequence[int] = (1, 2, 4, 8, 16), patience: float = 0.5) -> Measured:
    """Runs forwards over a scratch sequence, one for each row count, after one that warms up.

    The scratch table is given back and never published: nothing is left in the pool or among reusable prefixes. What
    does not fit into the pool or the context is left out.

    Args:
        runner: Idle.
        context: Tokens the model was made for.
        rows: Row counts, ascending, from 1.
        patience: Seconds after which no further pass begins; of several, the fastest counts.
    """
    table = runner.table()
    room = min(context, runner.pool.free * runner.pool.block_size)

    def forward(start: int, count: int, kept: int) -> float:
        runner.reserve(table, start + count)
        table.advance(start)  # what stands there is never looked at, only read
        seconds = _time(runner, table, count, kept)
        table.truncate(0)
        return seconds

    sizes = [(0, n, n) for n in rows if n <= room]
    if room >= _PREFILL:
        sizes.append((0, _PREFILL, 1))
    if room > _FAR:
        # Beside each other, and twice: their difference is small beside what a shared machine does to either.
        sizes += [(0, 1, 1), (_FAR, 1, 1)] * 2
    fastest: dict[tuple[int, int, int], float] = {}
    try:
        forward(0, 1, 1)
        started = time.perf_counter()
        for _ in range(_PASSES):
            for size in sizes:
                fastest[size] = min(forward(*size), fastest.get(size, math.inf))
            if time.perf_counter() - started > patience:
                break
    finally:
        table.release()
    points = tuple((n, fastest[0, n, n]) for n in rows if n <= room)
    prefill = ((_PREFILL, fastest[0, _PREFILL, 1]),) if room >= _PREFILL else ()
    slope = max(0.0, fastest[_FAR, 1, 1] - fastest[0, 1, 1]) / _FAR if room > _FAR else 0.0
    return Measured(points, prefill, slope)


def _time(runner: Runner, table: Table, count: int, kept: int) -> float:
    """Seconds of one forward, until a figure made from its logits is on the host."""
    _wait(runner.device)
    started = time.perf_counter()
    runner.forward([Feed([0] * count)], [table], [kept]).logits_RV.amax().item()
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_or_measure(runner: Runner, key: str, *, context: int) -> Measured:
    """What was measured before for a model on this machine, else what is measured now.

    A machine that was busy then would have drafting misjudged for ever: where one forward shows that it is faster now,
    everything is measured again, and of both the faster figures are kept.

    Args:
        runner: Idle.
        key: Names the model's weights and what they are held in; empty where they have no name, which is never cached.
        context: Tokens the model was made for.
    """
    if not key:
        return _measured(runner, key, context)
    path = _path(runner, key)
    known: Measured | None = None
    try:
        known = Measured.from_json(path.read_text("utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("costs_unreadable", path=str(path), error=type(error).__name__)
    if known is not None and not _is_faster(runner, known, context):
        return known
    found = _measured(runner, key, context)
    found = found if known is None else found.least(known)
    _write(path, found)
    return found


def _is_faster(runner: Runner, known: Measured, context: int) -> bool:
    """Whether a single row takes much less than it did."""
    rows, before = known.points[0]
    now = measure(runner, context=min(context, rows), rows=(rows,), patience=0).points
    return bool(now) and now[0][1] < _FASTER * before


def _measured(runner: Runner, key: str, context: int) -> Measured:
    started = time.perf_counter()
    found = measure(runner, context=context)
    _log.info("costs_measured", model=key, points=found.points, seconds=time.perf_counter() - started)
    return found


def _path(runner: Runner, key: str) -> Path:
    device = runner.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {torch.get_num_threads()}"
    parts = (key, name, torch.__version__)
    return cache_dir() / "costs" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


def _write(path: Path, found: Measured) -> None:
    """Whole or not at all; a folder that cannot be written costs a measurement each time, and nothing else."""
    draft = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(found.to_json(), "utf-8")
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        _log.warning("costs_not_kept", path=str(path), error=type(error).__name__)

"""The target's forward over a batch; where it raises, over its halves, so that a fault ends only the request it is of.

Shapes: R kept rows, V vocabulary, G drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastdraft._log import get_logger
from fastdraft.control.costs import Forward
from fastdraft.errors import is_device_fault
from fastdraft.models.runner import Feed, Runner
from fastdraft.request import Request
from fastdraft.round import Draft
from fastdraft.scheduler import Work

__all__ = ["Launched", "launch"]

_log = get_logger(__name__)


class Launched(NamedTuple):
    """What came of the forwards of a round.

    Attributes:
        sizes: Of each forward that went through.
        logits_RV: The verified rows of the requests that did not fail, packed in order.
        failed: What the others' forwards raised.
        starved: Whether the device was short of memory.
    """

    sizes: tuple[Forward, ...]
    logits_RV: Tensor
    failed: dict[Request, Exception]
    starved: bool = False


def launch(runner: Runner, works: Sequence[Work], drafts: Sequence[Draft], *, again: bool = False) -> Launched:
    """Feeds committed and drafted tokens; tables of requests that failed stay where they were.

    Args:
        runner: The target.
        works: At least one request's part of the round.
        drafts: One for each.
        again: Whether memory was freed for it already.

    Raises:
        Exception: The device is lost.
    """
    try:
        return _forward(runner, works, drafts)
    except Exception as error:
        if is_device_fault(error):
            raise
        starved = _is_starved(error)
        if starved:
            runner.relieve()
        if len(works) == 1:
            if starved and not again:
                return launch(runner, works, drafts, again=True)._replace(starved=True)
            none_RV = torch.zeros(0, runner.vocabulary, device=runner.device)
            return Launched((), none_RV, {works[0].request: error}, starved)
        _log.warning("forward_failed", error=type(error).__name__, requests=len(works))
        half = len(works) // 2
        parts = [launch(runner, works[part], drafts[part]) for part in (slice(half), slice(half, None))]
        rows = [part.logits_RV for part in parts if len(part.logits_RV)] or [parts[0].logits_RV]
        return Launched(
            tuple(size for part in parts for size in part.sizes),
            torch.cat(rows),
            parts[0].failed | parts[1].failed,
            starved or any(part.starved for part in parts),
        )


def _forward(runner: Runner, works: Sequence[Work], drafts: Sequence[Draft]) -> Launched:
    feeds, tables, keep = [], [], []
    for work, draft in zip(works, drafts, strict=True):
        table = work.request.table
        assert table is not None
        tokens = work.request.tokens[table.length : table.length + work.feeds]
        feeds.append(Feed(tokens, draft.tokens_G if len(draft) else None))
        tables.append(table)
        keep.append(len(draft) + 1 if work.verifies else 0)
    size = Forward(sum(feed.size for feed in feeds), sum(keep), sum(table.length for table in tables))
    return Launched((size,), runner.forward(feeds, tables, keep).logits_RV, {})


def _is_starved(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)

"""Prefixes that stay in KV: their blocks are held, so that no other prefix pushes them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fastdraft._log import get_logger
from fastdraft.errors import CacheFullError
from fastdraft.kv.table import Table
from fastdraft.models.runner import Feed, Runner

__all__ = ["Held", "Pins"]

_log = get_logger(__name__)

_SHARE = 2  # at most one block in so many is pinned


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One pinned prefix.

    Attributes:
        tokens: Its tokens.
        tables: What holds its full blocks, by model: None is the target, a source's name its draft model.
    """

    tokens: tuple[int, ...]
    tables: dict[str | None, Table] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that the target need not compute again."""
        return self.tables[None].length if None in self.tables else 0


class Pins:
    """What is pinned; used by the engine's thread.

    Args:
        runners: The target's under None, each draft model's under the name of its source.
        contexts: Tokens that each draft model was made for.
        chunk: Tokens computed at once.
    """

    def __init__(self, runners: Mapping[str | None, Runner], contexts: Mapping[str, int], chunk: int) -> None:
        self._runners = runners
        self._contexts = contexts
        self._chunk = chunk
        self._held: list[Held] = []

    def hold(self, tokens: Sequence[int]) -> Held:
        """Holds what is in KV of a prefix.

        Raises:
            CacheFullError: More than half of the blocks would be pinned.
        """
        held = Held(tuple(tokens))
        for name, runner in self._runners.items():
            table = runner.table()
            table.adopt([*tokens, 0])  # which leaves its last token out
            held.tables[name] = table
        blocks = {block for one in (*self._held, held) for block in one.tables[None].blocks}
        pool = self._runners[None].pool
        if len(blocks) > pool.blocks // _SHARE:
            self._free(held)
            raise CacheFullError(
                f"{len(blocks)} of {pool.blocks} KV blocks would be pinned; half of them must stay free.",
                hint="Pin less, release another prefix, or give the generator more kv_memory.",
            )
        self._held.append(held)
        return held

    @torch.inference_mode()
    def warm(self, held: Held) -> bool:
        """Computes one chunk more of what a draft model lacks; True where nothing is left to compute."""
        for name, runner in self._runners.items():
            if name is None or held not in self._held:
                continue
            table, size = held.tables[name], runner.pool.block_size
            whole = min(len(held.tokens), self._contexts[name]) // size * size
            fed = min(self._chunk, whole - table.length)
            if fed <= 0:
                continue
            try:
                runner.reserve(table, table.length + fed)
            except CacheFullError:  # drafts do without
                continue
            runner.forward([Feed(held.tokens[table.length : table.length + fed])], [table], [0])
            table.publish(held.tokens)
            return False
        return True

    def release(self, held: Held) -> None:
        """Lets go of a prefix; harmless where it was let go of before."""
        if held in self._held:
            self._held.remove(held)
            self._free(held)

    def clear(self) -> bool:
        """Lets go of all; whether there were any."""
        if not self._held:
            return False
        _log.warning("pins_released", prefixes=len(self._held))
        for held in [*self._held]:
            self.release(held)
        return True

    def _free(self, held: Held) -> None:
        for table in held.tables.values():
            table.release()

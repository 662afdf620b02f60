"""The blocks of one model's KV cache: who holds them, and which keep a prefix that can be used again.

A block is in one of three states:

    open      held by nobody, holds nothing of use
    held      refcount > 0; once published it is never written again
    idle      refcount 0, but published: kept for reuse until its place is needed, least recently used first

Attention reads a sequence without copying when its blocks have consecutive ids, so placement tries for that.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from fastdraft.errors import CacheFullError

__all__ = ["BlockPool"]

RUN = re.compile(rb"\x01+")


class Prefix(NamedTuple):
    """What a published block holds: its tokens, and the key of all tokens before them."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """Blocks of one model: who holds them, which hold reusable prefixes. No tensors, no locks.

    Args:
        blocks: Number of blocks.
        block_size: Tokens a block.
        space: What keeps the keys of this model (and adapter) apart from those of any other.

    Attributes:
        blocks: Number of blocks.
        block_size: Tokens a block.
        root: The parent key of first blocks.
    """

    __slots__ = (
        *("_idle", "_in_use", "_keys", "_open", "_opened", "_prefixes", "_refs"),
        *("block_size", "blocks", "root"),
    )

    def __init__(self, blocks: int, block_size: int, *, space: str = "") -> None:
        assert blocks > 0 and block_size > 0, (blocks, block_size)
        self.blocks = blocks
        self.block_size = block_size
        self.root = blake2b(space.encode(), digest_size=16).digest()
        self._refs = [0] * blocks
        self._in_use = 0
        self._open = bytearray(b"\x01" * blocks + b"\x00")  # 1: open; the last byte stops a walk past the end
        self._opened = blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._prefixes: dict[int, Prefix] = {}
        self._keys: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken now, idle prefixes included."""
        return self.blocks - self._in_use

    @property
    def in_use(self) -> int:
        """Blocks that somebody holds."""
        return self._in_use

    def refcount(self, block: int) -> int:
        """How many hold this block."""
        return self._refs[block]

    def writable(self, block: int) -> bool:
        """Whether its one holder may write to this block: nobody else reads it, now or later."""
        return self._refs[block] == 1 and block not in self._prefixes

    def take(self, n: int, after: int | None = None) -> list[int]:
        """Takes n blocks, each with refcount 1; idle prefixes make way only when open blocks do not suffice.

        Args:
            n: How many.
            after: The block that these continue; its successors are taken where they are open.

        Raises:
            CacheFullError: Fewer than n blocks are free; none is taken then.
        """
        if n > self.free:
            raise CacheFullError(
                f"{n} KV blocks were asked for, {self.free} of {self.blocks} are free.",
                hint="Try again when a running request has ended, or give the generator more kv_memory.",
            )
        if n > self._opened:
            # A little more than needed: blocks evicted together are mostly neighbours, so that the sequence
            # which fills the next blocks can stay in one piece although the pool is full of prefixes.
            self._evict(max(n - self._opened, self.blocks // 32))
        taken: list[int] = []
        while after is not None and len(taken) < n and self._open[after + 1]:
            after += 1
            self._hold(after)
            taken.append(after)
        if len(taken) < n:
            taken += self._place(n - len(taken))
        return taken

    def share(self, block: int) -> None:
        """Adds a holder to a block that is held or idle."""
        if self._refs[block] == 0:
            assert block in self._idle, f"block {block} is open: there is nothing to share"
            del self._idle[block]
            self._in_use += 1
        self._refs[block] += 1

    def give(self, block: int) -> None:
        """Takes a holder off a block; without any it becomes idle if it is published, else open."""
        assert self._refs[block] > 0, f"block {block} is given back more often than it was taken"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._in_use -= 1
            if block in self._prefixes:
                self._idle[block] = None
            else:
                self._free(block)

    def publish(self, block: int, parent: bytes, tokens: tuple[int, ...]) -> bytes:
        """Makes a full block findable by lookup(); from then on it is not written.

        When another block is published for the same tokens already, this one stays as it is.

        Args:
            block: A held block, full of verified tokens.
            parent: The key of the block before it, or ``root``.
            tokens: The tokens of this block.

        Returns:
            The key of the prefix that ends with this block, parent of the next one.
        """
        assert self._refs[block] > 0 and len(tokens) == self.block_size, (block, tokens)
        if known := self._prefixes.get(block):
            assert known.tokens == tokens, f"block {block} is published with other tokens"
            return known.key
        prefix = Prefix(_hash(parent, tokens), parent, tokens)
        holder = self._keys.get(prefix.key)
        if holder is None:
            self._keys[prefix.key] = block
            self._prefixes[block] = prefix
        elif self._prefixes[holder] != prefix:
            return prefix.key + b"!"  # a collision: no lookup leads here, so that holder's readers never do
        return prefix.key

    def lookup(self, parent: bytes, tokens: tuple[int, ...]) -> tuple[int, bytes] | None:
        """The block published for exactly these tokens after this parent, and its key; not yet shared."""
        prefix = Prefix(_hash(parent, tokens), parent, tokens)
        block = self._keys.get(prefix.key)
        if block is None or self._prefixes[block] != prefix:
            return None
        if block in self._idle:
            self._idle.move_to_end(block)
        return block, prefix.key

    def clear_prefixes(self) -> None:
        """Opens all idle blocks; what is published and held stays so."""
        self._evict(len(self._idle))

    def _evict(self, n: int) -> None:
        for _ in range(min(n, len(self._idle))):
            block, _ = self._idle.popitem(last=False)
            del self._keys[self._prefixes.pop(block).key]
            self._free(block)

    def _place(self, n: int) -> list[int]:
        """Takes n blocks in as few runs as it can: O(blocks), but only where a sequence starts or is cut off.

        A run is entered in the middle where the block before it is held, because its holder grows too.
        """
        taken: list[int] = []
        runs = [match.span() for match in RUN.finditer(self._open)]
        for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
            count = min(n - len(taken), end - start)
            if start and self._refs[start - 1]:
                start += (end - start - count) // 2
            taken += range(start, start + count)
            if len(taken) == n:
                break
        for block in taken:
            self._hold(block)
        return taken

    def _hold(self, block: int) -> None:
        self._open[block] = 0
        self._opened -= 1
        self._refs[block] = 1
        self._in_use += 1

    def _free(self, block: int) -> None:
        self._open[block] = 1
        self._opened += 1


def _hash(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

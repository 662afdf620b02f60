"""One reader's way through a pool: its blocks in order, and how many tokens of it are in KV.

    position     0        4        8        12       16        block_size 4
    blocks       [   7   ][   8   ][   9   ][   10  ]
    tokens       #################                             length 9
    published    #################                             the full blocks, once publish() was called
    reserved                      ................             written next: 9 and 10 are this reader's alone

What lies beyond ``length`` is stale, whatever is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastdraft.kv.pool import BlockPool

__all__ = ["Table"]


class Table:
    """One reader's blocks in a pool and ``length``, the number of its tokens in KV.

    Attributes:
        pool: Where the blocks come from.
        blocks: Block ids; position p lies in ``blocks[p // block_size]``.
        length: Tokens in KV.
    """

    __slots__ = ("_chain", "blocks", "length", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.length = 0
        self._chain: list[bytes] = []  # keys of the first full blocks, as far as they are known

    def adopt(self, tokens: Sequence[int]) -> int:
        """Shares the longest published prefix of tokens, but leaves at least one token to be fed.

        Args:
            tokens: What the empty table's request begins with.

        Returns:
            The new length; it ends inside the last shared block where all tokens were published.
        """
        assert not self.blocks and not self.length, "only an empty table adopts"
        size = self.pool.block_size
        hits: list[tuple[int, bytes]] = []
        parent = self.pool.root
        for start in range(0, min(len(tokens) - size + 1, len(tokens) - 1), size):
            hit = self.pool.lookup(parent, tuple(tokens[start : start + size]))
            if hit is None:
                break
            hits.append(hit)
            parent = hit[1]
        for block, _ in hits:  # after the last lookup: whatever raises there leaves nothing held
            self.pool.share(block)
            self.blocks.append(block)
        self.length = max(0, min(len(hits) * size, len(tokens) - 1))
        self._chain = [key for _, key in hits[: self.length // size]]
        return self.length

    def missing(self, length: int) -> int:
        """How many blocks reserve(length) would take, copies included."""
        return len(self._unwritable(length)) + self._absent(length)

    def reserve(self, length: int) -> list[tuple[int, int]]:
        """Makes the positions from ``self.length`` up to length writable, until the next fork().

        Args:
            length: The length that the next write may reach.

        Returns:
            Blocks to copy, (source, destination), before anything is written. Copies of several reservations
            are made in the order of the calls: a later one may read or take the blocks of an earlier one.

        Raises:
            CacheFullError: The pool has fewer free blocks than missing(length); the table is as it was.
        """
        replaced = self._unwritable(length)
        last = replaced[0] if replaced else len(self.blocks)
        after = self.blocks[last - 1] if last else None
        taken = self.pool.take(len(replaced) + self._absent(length), after)
        copies: list[tuple[int, int]] = []
        for i, block in zip(replaced, taken, strict=False):
            if i * self.pool.block_size < self.length:
                copies.append((self.blocks[i], block))
            self.pool.give(self.blocks[i])
            self.blocks[i] = block
        self.blocks += taken[len(replaced) :]
        return copies

    def advance(self, n: int) -> None:
        """Counts n positions as written; they must have been reserved."""
        assert n >= 0 and not self.missing(self.length + n), f"{n} positions were not reserved"
        self.length += n

    def truncate(self, n: int) -> None:
        """Forgets the tokens from position n on, and gives back the blocks that hold none of the others."""
        self.rewind(n)
        while len(self.blocks) > self._span(self.length):
            self.pool.give(self.blocks.pop())

    def rewind(self, n: int) -> None:
        """Forgets the tokens from position n on, and keeps their blocks for those that come instead."""
        assert n >= 0, n
        self.length = min(self.length, n)
        del self._chain[self.length // self.pool.block_size :]

    def publish(self, tokens: Sequence[int]) -> None:
        """Offers the full blocks below ``length`` for reuse.

        Args:
            tokens: The request's committed tokens, at least ``length`` of them; only new blocks' are read.
        """
        assert self.length <= len(tokens), f"{self.length} tokens in KV, but {len(tokens)} committed"
        size = self.pool.block_size
        for i in range(len(self._chain), self.length // size):
            parent = self._chain[-1] if i else self.pool.root
            held = tuple(tokens[i * size : (i + 1) * size])
            self._chain.append(self.pool.publish(self.blocks[i], parent, held))

    def fork(self) -> Table:
        """A second reader of the same tokens; their blocks are shared until one of the two writes there."""
        other = Table(self.pool)
        for block in self.blocks[: self._span(self.length)]:
            self.pool.share(block)
            other.blocks.append(block)
        other.length = self.length
        other._chain = self._chain.copy()
        return other

    def release(self) -> None:
        """Gives all blocks back; tail first, so that a prefix is evicted from its end. Idempotent."""
        self.length = 0
        self._chain.clear()
        while self.blocks:
            self.pool.give(self.blocks.pop())

    def _unwritable(self, length: int) -> list[int]:
        """Indices of the blocks that a write up to length would touch but must not."""
        if length <= self.length:
            return []
        touched = range(self.length // self.pool.block_size, min(self._span(length), len(self.blocks)))
        return [i for i in touched if not self.pool.writable(self.blocks[i])]

    def _absent(self, length: int) -> int:
        return max(0, self._span(length) - len(self.blocks))

    def _span(self, length: int) -> int:
        return -(-length // self.pool.block_size)

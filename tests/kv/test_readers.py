"""Several tables on one pool, in any order of calls, against a dense reference of every reader's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastdraft.errors import CacheFullError
from fastdraft.kv import pool as pool_module
from fastdraft.kv.pool import BlockPool
from fastdraft.kv.table import Table


@dataclass(eq=False)
class Reader:
    table: Table
    tokens: list[int]  # those in KV


TOKENS = st.lists(st.integers(0, 1), max_size=7)
PICK = st.integers(0, 99)
FEED = st.tuples(PICK, TOKENS, st.integers(0, 9))  # whose, what, how much of it is kept


class Readers(RuleBasedStateMachine):
    """Several tables on one pool; a slot of KV holds the whole history it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 3, space="test")
        self.slots: dict[int, list[tuple[int, ...]]] = {b: [()] * 3 for b in range(9)}
        self.readers: list[Reader] = []
        self.published: list[list[int]] = [[]]  # what a prompt may begin with

    def pick(self, index: int) -> Reader:
        if not self.readers:
            self.add(Reader(Table(self.pool), []))
        return self.readers[index % len(self.readers)]

    def add(self, reader: Reader) -> None:
        if len(self.readers) == 5:
            self.readers.pop(0).table.release()
        self.readers.append(reader)

    def write(self, feeds: list[tuple[Reader, list[int], int]]) -> None:
        """One round: all reserve, all copies, all writes, then a part of each is kept."""
        copies, fed = [], []
        for reader, tokens, kept in feeds:
            table, pool = reader.table, self.pool
            before = (list(table.blocks), table.length, pool.free, list(pool._refs))
            missing = table.missing(table.length + len(tokens))
            if missing > pool.free:
                with pytest.raises(CacheFullError):
                    table.reserve(table.length + len(tokens))
                assert before == (list(table.blocks), table.length, pool.free, list(pool._refs))
                continue
            new = table.reserve(table.length + len(tokens))
            assert table.missing(table.length + len(tokens)) == 0
            assert len(new) <= missing and len(set(table.blocks) - set(before[0])) == missing
            copies += new
            fed.append((reader, tokens, min(kept, len(tokens))))
        for source, destination in copies:
            self.slots[destination] = list(self.slots[source])
        for reader, tokens, _ in fed:
            for position in range(reader.table.length, reader.table.length + len(tokens)):
                block = reader.table.blocks[position // 3]
                assert self.pool.refcount(block) == 1 and block not in self.pool._prefixes
                history = (*reader.tokens, *tokens)[: position + 1]
                self.slots[block][position % 3] = history
        for reader, tokens, kept in fed:
            reader.table.advance(len(tokens))
            reader.tokens += tokens[:kept]
            reader.table.truncate(len(reader.tokens))

    @rule(index=PICK, cut=st.integers(0, 15), more=TOKENS, feed=st.booleans())
    def start(self, index: int, cut: int, more: list[int], feed: bool) -> None:
        prompt = self.published[index % len(self.published)][:cut] + more
        table = Table(self.pool)
        known, key = 0, self.pool.root
        while len(prompt) >= known + 3 and (hit := self.pool.lookup(key, tuple(prompt[known : known + 3]))):
            known, key = known + 3, hit[1]
        length = table.adopt(prompt)
        assert length == table.length == max(0, min(known, len(prompt) - 1))
        reader = Reader(table, prompt[:length])
        self.add(reader)
        if feed:
            self.write([(reader, prompt[length:], len(prompt))])

    @rule(data=st.lists(FEED, min_size=1, max_size=4), publish=st.booleans())
    def step(self, data: list[tuple[int, list[int], int]], publish: bool) -> None:
        feeds = {id(reader := self.pick(i)): (reader, tokens, kept) for i, tokens, kept in data}
        self.write(list(feeds.values()))
        for index in range(len(self.readers) if publish else 0):
            self.publish(index, [])

    @rule(index=PICK, n=st.integers(0, 15))
    def reserve_and_leave(self, index: int, n: int) -> None:
        table = self.pick(index).table
        if table.missing(table.length + n) <= self.pool.free:
            for source, destination in table.reserve(table.length + n):
                self.slots[destination] = list(self.slots[source])

    @rule(index=PICK, n=st.integers(0, 15))
    def truncate(self, index: int, n: int) -> None:
        reader = self.pick(index)
        reader.table.truncate(n)
        del reader.tokens[n:]
        assert len(reader.table.blocks) == -(-len(reader.tokens) // 3)

    @rule(index=PICK)
    def fork(self, index: int) -> None:
        reader = self.pick(index)
        self.add(Reader(reader.table.fork(), list(reader.tokens)))

    @rule(index=PICK, committed=TOKENS)
    def publish(self, index: int, committed: list[int]) -> None:
        reader = self.pick(index)
        first = not reader.table._chain
        reader.table.publish([*reader.tokens, *committed])
        again = Table(self.pool)
        found = again.adopt([*reader.tokens, 2])
        assert found == len(reader.tokens) // 3 * 3 or not first  # later, another's copy may have been evicted
        again.release()
        self.published.append(reader.tokens[: len(reader.tokens) // 3 * 3])

    @rule(index=PICK)
    def release(self, index: int) -> None:
        reader = self.pick(index)
        reader.table.release()
        self.readers.remove(reader)

    @rule()
    def clear_prefixes(self) -> None:
        self.pool.clear_prefixes()

    @invariant()
    def every_reader_reads_what_it_wrote(self) -> None:
        for reader in self.readers:
            assert reader.table.length == len(reader.tokens)
            for position in range(reader.table.length):
                block = reader.table.blocks[position // 3]
                assert self.slots[block][position % 3] == tuple(reader.tokens[: position + 1])

    @invariant()
    def every_block_is_counted(self) -> None:
        pool = self.pool
        held = [block for reader in self.readers for block in reader.table.blocks]
        assert all(pool.refcount(block) == held.count(block) for block in range(pool.blocks))
        assert pool.in_use == len(set(held))
        assert pool.free + pool.in_use == pool.blocks
        states = [(pool._open[b], b in pool._idle, pool.refcount(b) > 0) for b in range(pool.blocks)]
        assert all(sum(state) == 1 for state in states)
        assert pool._opened == sum(pool._open)
        for reader in self.readers:
            assert len(set(reader.table.blocks)) == len(reader.table.blocks)

    @invariant()
    def every_published_block_holds_what_it_is_known_for(self) -> None:
        pool = self.pool
        assert {prefix.key: block for block, prefix in pool._prefixes.items()} == pool._keys
        assert set(pool._idle) <= set(pool._prefixes)
        for block, prefix in pool._prefixes.items():
            history = self.slots[block][-1]
            assert history[-3:] == prefix.tokens
            assert self.slots[block] == [history[:-2], history[:-1], history]
            key = pool.root
            for start in range(0, len(history), 3):
                assert start + 3 < len(history) or key == prefix.parent
                key = pool_module._hash(key, history[start : start + 3])
            assert key == prefix.key

    def teardown(self) -> None:
        for reader in self.readers:
            reader.table.release()
        assert (self.pool.in_use, self.pool.free) == (0, self.pool.blocks)
        assert sorted(self.pool.take(self.pool.blocks)) == list(range(self.pool.blocks))


Readers.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestReaders = Readers.TestCase

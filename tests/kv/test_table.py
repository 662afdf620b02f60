"""Tables: adoption, reservation, rollback, forks, and any mixture of them against a dense reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastdraft.errors import CacheFullError
from fastdraft.kv import pool as pool_module
from fastdraft.kv.pool import BlockPool
from fastdraft.kv.table import Table


def grow(table: Table, n: int) -> list[tuple[int, int]]:
    """One round of n tokens."""
    copies = table.reserve(table.length + n)
    table.advance(n)
    return copies


def filled(pool: BlockPool, tokens: list[int]) -> Table:
    """A table that holds tokens and has published its full blocks."""
    table = Table(pool)
    grow(table, len(tokens))
    table.publish(tokens)
    return table


def test_reserve_takes_what_the_positions_need_and_truncate_gives_back_the_rest():
    pool = BlockPool(8, 4)
    table = Table(pool)
    assert table.missing(9) == 3
    assert table.reserve(9) == []
    assert (table.missing(9), table.missing(13), len(table.blocks), table.length) == (0, 1, 3, 0)
    table.advance(5)
    table.truncate(9)
    assert (table.length, len(table.blocks), pool.in_use) == (5, 2, 2)
    table.truncate(4)
    assert (table.length, len(table.blocks), pool.in_use) == (4, 1, 1)
    table.truncate(0)
    assert (table.length, table.blocks, pool.in_use) == (0, [], 0)


def test_reserving_what_is_written_already_is_nothing():
    table = filled(BlockPool(4, 4), [1, 2, 3, 4, 5])
    assert (table.missing(4), table.missing(5), table.reserve(3), table.reserve(5)) == (0, 0, [], [])


def test_only_reserved_positions_are_advanced():
    table = Table(BlockPool(4, 4))
    table.reserve(4)
    with pytest.raises(AssertionError):
        table.advance(5)
    with pytest.raises(AssertionError):
        table.advance(-1)


def test_release_is_idempotent_and_leaves_an_empty_table():
    pool = BlockPool(8, 2)
    table = filled(pool, [1, 2, 3, 4, 5])
    table.release()
    table.release()
    assert (table.length, table.blocks, pool.in_use, pool.free) == (0, [], 0, 8)
    assert table.adopt([1, 2, 3, 4, 5, 6]) == 4


def test_adopt_shares_the_longest_published_prefix():
    pool = BlockPool(16, 2)
    first = filled(pool, [1, 2, 3, 4, 5])
    second = Table(pool)
    assert second.adopt([1, 2, 3, 4, 5, 6, 7]) == 4
    assert second.blocks == first.blocks[:2]
    assert second.reserve(7) == []
    third = Table(pool)
    assert (third.adopt([1, 2, 4, 3, 5]), third.blocks) == (2, first.blocks[:1])
    assert Table(pool).adopt([3, 4, 5]) == 0
    assert Table(pool).adopt([]) == Table(pool).adopt([1]) == 0
    with pytest.raises(AssertionError):
        second.adopt([1, 2, 3])


def test_adopting_a_whole_prompt_leaves_one_token_and_copies_its_block():
    pool = BlockPool(8, 4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = filled(pool, prompt)
    second = Table(pool)
    assert second.adopt(prompt) == 7
    assert (second.missing(8), second.missing(9)) == (1, 2)
    ((source, destination),) = second.reserve(9)
    assert source == first.blocks[1] and destination == second.blocks[1] != source
    assert (len(second.blocks), pool.refcount(source), pool.in_use) == (3, 1, 4)
    second.advance(2)
    second.publish([*prompt, 9])
    assert pool.writable(destination)  # the prefix is there already
    second.release()
    first.release()
    assert Table(pool).adopt([*prompt, 9]) == 8


def test_blocks_of_one_token_are_adopted_without_the_last():
    pool = BlockPool(4, 1)
    first = filled(pool, [1, 2, 3])
    second = Table(pool)
    assert (second.adopt([1, 2, 3]), second.blocks) == (2, first.blocks[:2])


def test_adopt_that_fails_holds_nothing(monkeypatch):
    pool = BlockPool(8, 2)
    filled(pool, [1, 2, 3, 4]).release()
    table = Table(pool)
    with pytest.raises(TypeError):
        table.adopt([1, 2, "x", 4, 5])  # type: ignore[list-item]
    assert (table.length, table.blocks, pool.in_use) == (0, [], 0)


def test_a_full_pool_leaves_the_table_as_it_was():
    pool = BlockPool(3, 2)
    table = filled(pool, [1, 2, 3])
    other = table.fork()
    before = (list(table.blocks), table.length, pool.free)
    assert table.missing(6) == 2
    with pytest.raises(CacheFullError):
        table.reserve(6)
    assert (list(table.blocks), table.length, pool.free) == before
    other.release()
    assert table.reserve(6) == []


def test_a_fork_copies_only_what_both_write_and_only_once():
    pool = BlockPool(8, 4)
    table = filled(pool, [1, 2, 3, 4, 5])
    table.reserve(12)
    other = table.fork()
    assert other.blocks == table.blocks[:2]  # the third holds no token yet
    ((source, destination),) = grow(other, 1)
    assert (source, destination) == (table.blocks[1], other.blocks[1])
    assert grow(table, 1) == []
    assert table.blocks[0] == other.blocks[0]


def test_a_block_without_tokens_is_replaced_but_not_copied():
    pool = BlockPool(8, 2)
    table = filled(pool, [1, 2, 3, 4])
    old = table.blocks[1]
    table.length = 2  # as after truncate(), but with the published block still in place
    assert table.missing(4) == 1
    assert table.reserve(4) == []
    assert table.blocks[1] != old


def test_a_cut_into_a_published_block_is_copied_and_its_key_forgotten():
    pool = BlockPool(8, 2)
    table = filled(pool, [1, 2, 3, 4])
    table.truncate(3)
    source = table.blocks[1]
    assert table.reserve(4) == [(source, table.blocks[1])]
    table.advance(1)
    table.publish([1, 2, 3, 9, 9])
    assert Table(pool).adopt([1, 2, 3, 4, 0]) == 4
    other = Table(pool)
    assert (other.adopt([1, 2, 3, 9, 0]), other.blocks) == (4, table.blocks)


def test_publish_looks_at_new_blocks_only():
    class Tokens(list):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    seen: list[slice] = []
    table = Table(BlockPool(8, 2))
    grow(table, 5)
    table.publish(Tokens([1, 2, 3, 4, 5]))
    grow(table, 1)
    table.publish(Tokens([1, 2, 3, 4, 5, 6]))
    assert seen == [slice(0, 2), slice(2, 4), slice(4, 6)]
    with pytest.raises(AssertionError):
        table.publish([1, 2, 3])


def test_a_sole_sequence_gets_consecutive_blocks():
    table = Table(BlockPool(64, 4))
    while table.length < 256:
        copies = grow(table, 1)
        table.truncate(table.length - table.length % 3)  # rejected drafts
        grow(table, table.length % 2 + 1)
        assert not copies
        if table.length > 250:
            break
    assert table.blocks == list(range(len(table.blocks)))


def test_four_growing_sequences_keep_mostly_to_themselves():
    tables = [Table(BlockPool(256, 4))]
    tables += [Table(tables[0].pool) for _ in range(3)]
    for table in tables:
        grow(table, 20)
    for _ in range(180):
        for table in tables:
            grow(table, 1)
    steps = [b - a for table in tables for a, b in zip(table.blocks, table.blocks[1:], strict=False)]
    assert len(steps) == 4 * 49
    assert sum(step == 1 for step in steps) >= len(steps) - 4


@dataclass(eq=False)
class Reader:
    table: Table
    tokens: list[int]  # those in KV


TOKENS = st.lists(st.integers(0, 1), max_size=9)
PICK = st.integers(0, 99)


class Readers(RuleBasedStateMachine):
    """Several tables on one pool; a slot of KV holds the whole history it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, 3, space="test")
        self.slots: dict[int, list[tuple[int, ...]]] = {b: [()] * 3 for b in range(9)}
        self.readers: list[Reader] = []

    def pick(self, index: int) -> Reader:
        return self.readers[index % len(self.readers)]

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

    @precondition(lambda self: len(self.readers) < 5)
    @rule(prompt=TOKENS, feed=st.booleans())
    def start(self, prompt: list[int], feed: bool) -> None:
        table = Table(self.pool)
        known, key = 0, self.pool.root
        while len(prompt) >= known + 3 and (hit := self.pool.lookup(key, tuple(prompt[known : known + 3]))):
            known, key = known + 3, hit[1]
        length = table.adopt(prompt)
        assert length == table.length == max(0, min(known, len(prompt) - 1))
        reader = Reader(table, prompt[:length])
        self.readers.append(reader)
        if feed:
            self.write([(reader, prompt[length:], len(prompt))])

    @precondition(lambda self: self.readers)
    @rule(data=st.lists(st.tuples(PICK, TOKENS, st.integers(0, 9)), min_size=1, max_size=4))
    def step(self, data: list[tuple[int, list[int], int]]) -> None:
        chosen = {id(reader := self.pick(i)): (reader, tokens, kept) for i, tokens, kept in data}
        self.write(list(chosen.values()))

    @precondition(lambda self: self.readers)
    @rule(index=PICK, n=st.integers(0, 15))
    def reserve_and_leave(self, index: int, n: int) -> None:
        table = self.pick(index).table
        if table.missing(table.length + n) <= self.pool.free:
            for source, destination in table.reserve(table.length + n):
                self.slots[destination] = list(self.slots[source])

    @precondition(lambda self: self.readers)
    @rule(index=PICK, n=st.integers(0, 15))
    def truncate(self, index: int, n: int) -> None:
        reader = self.pick(index)
        reader.table.truncate(n)
        del reader.tokens[n:]
        assert len(reader.table.blocks) == -(-len(reader.tokens) // 3)

    @precondition(lambda self: 0 < len(self.readers) < 5)
    @rule(index=PICK)
    def fork(self, index: int) -> None:
        reader = self.pick(index)
        self.readers.append(Reader(reader.table.fork(), list(reader.tokens)))

    @precondition(lambda self: self.readers)
    @rule(index=PICK, committed=TOKENS)
    def publish(self, index: int, committed: list[int]) -> None:
        reader = self.pick(index)
        reader.table.publish([*reader.tokens, *committed])
        assert Table(self.pool).adopt([*reader.tokens, -1]) == 0 or self.pool.in_use

    @precondition(lambda self: self.readers)
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

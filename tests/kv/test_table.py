"""Tables: adoption, reservation, rollback, publication and forks."""

from __future__ import annotations

import pytest

from fastdraft.errors import CacheFullError
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
    grow(table, 2)
    table.publish([5, 6])
    table.release()
    assert table.adopt([5, 6, 7]) == 2
    table.release()
    assert table.adopt([1, 2, 3, 4, 5, 6]) == 4


def test_a_released_prefix_is_evicted_from_its_end():
    pool = BlockPool(4, 2)
    filled(pool, [1, 2, 3, 4, 5, 6, 7, 8]).release()
    for left in (6, 4, 2, 0):
        pool.take(1)
        table = Table(pool)
        assert table.adopt([1, 2, 3, 4, 5, 6, 7, 8, 9]) == left
        table.release()


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


def test_the_block_of_a_wholly_adopted_prompt_gets_its_key_from_what_is_written():
    pool = BlockPool(8, 2)
    filled(pool, [1, 2, 3, 4])
    table = Table(pool)
    assert table.adopt([1, 2, 3, 4]) == 3
    grow(table, 3)
    table.publish([1, 2, 3, 9, 5, 6])
    assert Table(pool).adopt([1, 2, 3, 9, 5, 6, 0]) == 6
    assert Table(pool).adopt([1, 2, 3, 4, 5, 6, 0]) == 4


def test_blocks_of_one_token_are_adopted_without_the_last():
    pool = BlockPool(4, 1)
    first = filled(pool, [1, 2, 3])
    second = Table(pool)
    assert (second.adopt([1, 2, 3]), second.blocks) == (2, first.blocks[:2])


def test_adopt_that_fails_holds_nothing():
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


def test_a_cut_fork_leaves_the_keys_of_the_first():
    pool = BlockPool(8, 2)
    table = filled(pool, [1, 2, 3, 4])
    other = table.fork()
    other.truncate(2)
    grow(other, 2)
    other.publish([1, 2, 5, 6])
    grow(table, 2)
    table.publish([1, 2, 3, 4, 7, 8])
    assert Table(pool).adopt([1, 2, 3, 4, 7, 8, 0]) == 6
    assert Table(pool).adopt([1, 2, 5, 6, 7, 8, 0]) == 4


def test_a_block_without_tokens_is_replaced_but_not_copied():
    pool = BlockPool(8, 2)
    table = filled(pool, [1, 2])
    table.reserve(4)
    old = table.blocks[1]
    pool.share(old)
    assert table.missing(4) == 1
    assert table.reserve(4) == []
    assert table.blocks[1] != old and pool.refcount(old) == 1


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
    table.fork().publish(Tokens([1, 2, 3, 4, 5, 6]))
    assert seen == [slice(0, 2), slice(2, 4), slice(4, 6)]
    with pytest.raises(AssertionError):
        table.publish([1, 2, 3])


def test_a_sole_sequence_gets_consecutive_blocks():
    table = Table(BlockPool(64, 4))
    while table.length < 250:
        assert grow(table, 6) == []
        table.truncate(table.length - 5 + table.length % 3)  # rejected drafts
    assert table.blocks == list(range(63))


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

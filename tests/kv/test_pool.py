"""The pool: refcounts, prefixes, eviction and placement."""

from __future__ import annotations

import pytest

from fastdraft.errors import CacheFullError
from fastdraft.kv import pool as pool_module
from fastdraft.kv.pool import BlockPool


def published(pool: BlockPool, *chunks: tuple[int, ...]) -> list[int]:
    """Takes a block for each chunk, publishes them as one chain and gives them back, tail first."""
    blocks = pool.take(len(chunks))
    key = pool.root
    for block, chunk in zip(blocks, chunks, strict=True):
        key = pool.publish(block, key, chunk)
    for block in reversed(blocks):
        pool.give(block)
    return blocks


def find(pool: BlockPool, *chunks: tuple[int, ...]) -> list[int]:
    """The published blocks of a chain, as far as it goes."""
    found, key = [], pool.root
    for chunk in chunks:
        hit = pool.lookup(key, chunk)
        if hit is None:
            break
        found.append(hit[0])
        key = hit[1]
    return found


def test_blocks_are_taken_shared_and_given():
    pool = BlockPool(4, 2)
    a, b = pool.take(2)
    pool.share(a)
    assert (pool.refcount(a), pool.refcount(b), pool.in_use, pool.free) == (2, 1, 2, 2)
    assert not pool.writable(a) and pool.writable(b)
    pool.give(a)
    assert pool.writable(a) and pool.in_use == 2
    pool.give(a)
    pool.give(b)
    assert (pool.in_use, pool.free) == (0, 4)
    assert not pool.writable(a)


def test_taking_none_is_nothing():
    pool = BlockPool(2, 2)
    pool.take(2)
    assert pool.take(0) == []


def test_too_many_are_refused_whole():
    pool = BlockPool(4, 2)
    pool.take(1)
    with pytest.raises(CacheFullError, match="4 KV blocks were asked for, 3 of 4 are free") as raised:
        pool.take(4)
    assert raised.value.hint
    assert (pool.in_use, pool.free) == (1, 3)
    assert len(pool.take(3)) == 3


def test_what_nobody_holds_cannot_be_given_shared_or_published():
    pool = BlockPool(2, 2)
    (block,) = pool.take(1)
    pool.give(block)
    with pytest.raises(AssertionError):
        pool.give(block)
    with pytest.raises(AssertionError):
        pool.share(block)
    with pytest.raises(AssertionError):
        pool.publish(block, pool.root, (1, 2))
    assert (pool.in_use, pool.free, pool.refcount(block)) == (0, 2, 0)


def test_only_full_blocks_are_published():
    pool = BlockPool(2, 2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError):
        pool.publish(block, pool.root, (1,))


def test_a_published_block_outlives_its_holder_and_is_revived():
    pool = BlockPool(4, 2)
    a, b = published(pool, (1, 2), (3, 4))
    assert (pool.in_use, pool.free) == (0, 4)
    assert find(pool, (1, 2), (3, 4), (5, 6)) == [a, b]
    assert find(pool, (3, 4)) == []  # not after this parent
    pool.share(a)
    assert (pool.in_use, pool.refcount(a)) == (1, 1)
    assert not pool.writable(a)
    pool.give(a)
    assert (pool.in_use, pool.free) == (0, 4)


def test_the_same_tokens_are_published_once():
    pool = BlockPool(4, 2)
    a, b = pool.take(2)
    key = pool.publish(a, pool.root, (1, 2))
    assert pool.publish(a, pool.root, (1, 2)) == key
    assert pool.publish(b, pool.root, (1, 2)) == key
    assert pool.lookup(pool.root, (1, 2)) == (a, key)
    assert not pool.writable(a) and pool.writable(b)
    with pytest.raises(AssertionError):
        pool.publish(a, pool.root, (1, 3))


def test_spaces_do_not_share_keys():
    assert len({BlockPool(1, 1, space=space).root for space in ("", "target", "target@adapter")}) == 3
    assert BlockPool(1, 1, space="target").root == BlockPool(9, 4, space="target").root


def test_large_and_negative_ids_have_keys():
    pool = BlockPool(2, 3)
    (block,) = published(pool, (-1, 0, 2**40))
    assert find(pool, (-1, 0, 2**40)) == [block]


def test_a_collision_is_told_apart_by_its_tokens(monkeypatch):
    monkeypatch.setattr(pool_module, "_hash", lambda parent, tokens: bytes([sum(tokens) % 256]) * 16)
    pool = BlockPool(4, 2)
    a, b, child = pool.take(3)
    key = pool.publish(a, pool.root, (1, 2))
    assert pool.lookup(pool.root, (2, 1)) is None
    other = pool.publish(b, pool.root, (2, 1))
    assert pool.writable(b)
    pool.publish(child, other, (7, 7))  # follows (2, 1): nobody who reads (1, 2) may come here
    assert find(pool, (1, 2), (7, 7)) == [a]
    assert find(pool, (2, 1), (7, 7)) == []
    assert pool.lookup(key, (7, 7)) is None


def test_open_blocks_go_before_prefixes_and_prefixes_before_failing():
    pool = BlockPool(6, 1)
    kept = published(pool, (1,), (2,), (3,))
    assert not set(pool.take(3)) & set(kept)
    assert pool.take(1) == kept[2:]  # the tail of the chain went idle first
    assert find(pool, (1,), (2,), (3,)) == kept[:2]
    assert sorted(pool.take(2)) == kept[:2]
    assert pool.free == 0


def test_the_least_recently_used_prefix_is_evicted():
    pool = BlockPool(3, 1)
    a, b, c = (published(pool, (token,))[0] for token in (1, 2, 3))
    pool.lookup(pool.root, (1,))
    pool.share(b)
    pool.give(b)
    assert [pool.take(1) for _ in range(3)] == [[c], [a], [b]]


def test_held_prefixes_are_never_evicted():
    pool = BlockPool(3, 1)
    a, b, c = (published(pool, (token,))[0] for token in (1, 2, 3))
    pool.share(a)
    assert sorted(pool.take(2)) == sorted((b, c))
    with pytest.raises(CacheFullError):
        pool.take(1)
    assert find(pool, (1,)) == [a]


def test_an_evicted_prefix_can_be_published_again():
    pool = BlockPool(1, 1)
    published(pool, (1,))
    (block,) = pool.take(1)
    assert pool.writable(block)
    pool.publish(block, pool.root, (1,))
    assert find(pool, (1,)) == [block]


def test_clear_prefixes_spares_what_is_held():
    pool = BlockPool(4, 1)
    a, b = published(pool, (1,), (2,))
    pool.share(a)
    pool.clear_prefixes()
    assert find(pool, (1,), (2,)) == [a]
    assert (pool.in_use, pool.free) == (1, 3)
    pool.give(a)
    pool.clear_prefixes()
    assert find(pool, (1,)) == []
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    assert pool.writable(a) and pool.writable(b)


def test_a_first_sequence_starts_at_the_front_and_goes_on():
    pool = BlockPool(16, 1)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2, after=2) == [3, 4]
    assert pool.take(11, after=4) == list(range(5, 16))


def test_a_second_sequence_leaves_room_to_the_first():
    pool = BlockPool(101, 1)
    pool.take(1)
    assert pool.take(20) == list(range(41, 61))
    assert pool.take(1, after=60) == [61]
    assert pool.take(1, after=0) == [1]


def test_a_sequence_that_is_cut_off_goes_on_in_the_largest_run():
    pool = BlockPool(10, 1)
    pool.take(10)
    for block in (1, 4, 5, 6, 7):
        pool.give(block)
    assert pool.take(1, after=8) == [5]
    assert pool.take(4, after=0) == [1, 6, 7, 4]
    assert pool.free == 0


def test_what_nobody_holds_needs_no_room_beside_it():
    pool = BlockPool(16, 1)
    published(pool, (1,), (2,))
    assert pool.take(3) == [2, 3, 4]


def test_sequences_stay_in_one_piece_in_a_pool_full_of_prefixes():
    pool = BlockPool(1024, 1)
    for first in range(0, 2048, 32):
        published(pool, *((first + i,) for i in range(32)))
    assert not pool._opened
    for _ in range(32):
        blocks = pool.take(8)
        for _ in range(16):
            blocks += pool.take(1, after=blocks[-1])
        assert blocks == list(range(blocks[0], blocks[0] + 24))
        for block in blocks:
            pool.give(block)

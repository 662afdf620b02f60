"""Keyed random numbers: the published Philox, uniform, and a function of their key alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fastdraft.sampling import noise
from fastdraft.sampling.noise import ACCEPT, DRAFT, GUMBEL, RESIDUAL, derive_seed, gumbel, gumbel_rows, uniform

CPU = torch.device("cpu")
MASK = 0xFFFFFFFF
WORD = st.integers(0, MASK)
SEED = st.integers(0, 2**64 - 1)
repeatable = settings(derandomize=True, deadline=None, max_examples=200)


def plain_philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper has it, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & MASK, (left >> 32) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def our_philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    return tuple(int(word) for word in noise.philox((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK, MASK, MASK, MASK), (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(counter: Sequence[int], key: Sequence[int], expected: tuple[int, ...]) -> None:
    assert our_philox(counter, key) == expected


@repeatable
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_equals_philox_in_plain_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert our_philox(counter, key) == plain_philox(counter, key)


@repeatable
@given(SEED, st.integers(0, 2**20), st.integers(0, 64), st.sampled_from([ACCEPT, RESIDUAL, DRAFT]))
def test_a_uniform_is_one_word_of_its_key(seed: int, length: int, offset: int, purpose: int) -> None:
    word = plain_philox((length, offset, purpose, 0), (seed & MASK, seed >> 32))[0]
    assert uniform([seed], [length], [offset], purpose, CPU).item() == (word + 0.5) / 2**32


@repeatable
@given(SEED, st.integers(0, 2**20), st.integers(0, 300_000))
def test_a_gumbel_is_one_word_of_seed_position_and_token(seed: int, position: int, token: int) -> None:
    word = plain_philox((token // 4, position, GUMBEL, 0), (seed & MASK, seed >> 32))[token % 4]
    expected = -np.log(-np.log((word + 0.5) / 2**32))
    assert gumbel([seed], [position], torch.tensor([0]), torch.tensor([token])).item() == pytest.approx(expected)


@repeatable
@given(st.lists(st.tuples(SEED, st.integers(0, 5000)), min_size=1, max_size=4), st.integers(1, 70))
def test_chosen_gumbels_equal_those_of_whole_rows(rows: list[tuple[int, int]], vocabulary: int) -> None:
    seeds, positions = zip(*rows, strict=True)
    whole = gumbel_rows(seeds, positions, vocabulary, CPU)
    assert whole.shape == (len(rows), vocabulary)
    row_N, id_N = torch.ones(len(rows), vocabulary).nonzero(as_tuple=True)
    assert torch.equal(gumbel(seeds, positions, row_N, id_N), whole.flatten())


def test_a_wider_vocabulary_keeps_the_noise_of_the_narrower() -> None:
    narrow, wide = (gumbel_rows([3, 4], [10, 11], vocabulary, CPU) for vocabulary in (301, 320))
    assert torch.equal(narrow, wide[:, :301])


def test_draws_do_not_depend_on_order_or_company() -> None:
    rng = np.random.default_rng(0)
    keys = [(int(s), int(n), int(o)) for s, n, o in rng.integers(0, 2**31, (200, 3))]
    seeds, lengths, offsets = zip(*keys, strict=True)
    together = uniform(seeds, lengths, offsets, DRAFT, CPU)
    order = rng.permutation(len(keys))
    shuffled = uniform(*([column[i] for i in order] for column in (seeds, lengths, offsets)), DRAFT, CPU)
    assert torch.equal(shuffled, together[torch.from_numpy(order)])
    alone = torch.cat([uniform([s], [n], [o], DRAFT, CPU) for s, n, o in keys])
    assert torch.equal(alone, together)


def _stream(count: int, purpose: int, *, seed: int = 1, offset: int = 0) -> np.ndarray:
    return uniform([seed] * count, range(count), [offset] * count, purpose, CPU).numpy()


def test_streams_of_different_keys_are_independent() -> None:
    count = 50_000
    streams = [_stream(count, purpose) for purpose in (ACCEPT, RESIDUAL, DRAFT)]
    streams += [
        _stream(count, ACCEPT, seed=2),
        _stream(count, ACCEPT, seed=1 + 2**32),
        _stream(count, ACCEPT, offset=1),
    ]
    streams += [np.roll(streams[0], 1)]  # neighbours of one stream
    correlation = np.corrcoef(streams)[np.triu_indices(len(streams), 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(count)
    # Equal parts of the unit square hold equal shares of two purposes' pairs.
    cells = np.histogram2d(streams[0], streams[2], bins=10, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(cells.ravel()).pvalue > 1e-4


@pytest.mark.parametrize("vary", ["length", "offset", "seed"])
def test_draws_are_uniform_along_every_part_of_the_key(vary: str) -> None:
    count = 50_000
    key = {"seed": [9] * count, "length": [40] * count, "offset": [2] * count, vary: list(range(count))}
    draws = uniform(key["seed"], key["length"], key["offset"], ACCEPT, CPU).numpy()
    assert stats.kstest(draws, "uniform").pvalue > 1e-4
    assert len(np.unique(draws)) > 0.999 * count


def test_gumbel_noise_is_gumbel_distributed() -> None:
    draws = gumbel_rows([5], [77], 50_000, CPU)[0].numpy()
    assert stats.kstest(draws, "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("word", [0, 1, 2**31, MASK - 1, MASK])
def test_even_extreme_words_stay_strictly_inside_the_unit_interval(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "philox", lambda counter, key: (torch.full((1, 1), word),) * 4)
    draw = uniform([0], [0], [0], ACCEPT, CPU).item()
    assert 0 < draw < 1
    assert draw * 2**32 - 0.5 == word
    assert torch.isfinite(gumbel_rows([0], [0], 4, CPU)).all()


@repeatable
@given(SEED, st.integers(1, 10_000))
def test_derived_seeds_are_seeds(seed: int, index: int) -> None:
    assert derive_seed(seed, 0) == seed
    derived = derive_seed(seed, index)
    assert 0 <= derived < 2**64
    assert derived not in (seed, derive_seed(seed, index + 1), derive_seed((seed + 1) % 2**64, index))


def test_derived_seeds_do_not_collide() -> None:
    seeds = [0, 1, 2, 3, 42, 2**32, 2**63, 2**64 - 1]
    derived = {derive_seed(seed, index) for seed in seeds for index in range(20_000)}
    assert len(derived) == len(seeds) * 20_000


def test_new_seeds_use_all_64_bits_and_differ() -> None:
    seeds = [noise.new_seed() for _ in range(200)]
    assert len(set(seeds)) == 200
    assert max(seeds).bit_length() > 56
    assert all(0 <= seed < 2**64 for seed in seeds)

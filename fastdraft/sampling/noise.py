"""Keyed random numbers: every draw is a pure function of its key, so nothing depends on order, batch or device.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in int64 tensor arithmetic; its
integers are equal on every device. The 64-bit seed is the key, the counter says which draw it is:

    uniform   (committed length at the round's start, offset in the round, purpose, 0)
    gumbel    (token id // 4, position, GUMBEL, 0), word token id % 4

Uniforms are keyed by the round's start, not by absolute position: a position may be drawn for again, and where a draft
length reacts to drafts that were dropped, the same number used twice would bias the output.

Shapes: B draws, N ids, V vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "ACCEPT",
    "DRAFT",
    "GUMBEL",
    "RESIDUAL",
    "derive_seed",
    "gumbel",
    "gumbel_rows",
    "new_seed",
    "philox",
    "uniform",
]

ACCEPT, RESIDUAL, DRAFT, GUMBEL = range(4)

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def new_seed() -> int:
    """A seed for a call that gave none; from the system, never from a global generator."""
    return secrets.randbits(64)


def derive_seed(seed: int, index: int) -> int:
    """f(seed, i) for the i-th sample of a prompt; f(seed, 0) = seed (splitmix64 of seed and index)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32-bit times a 32-bit number, in int64 without overflow."""
    high = (a * (b >> 16) + ((a * (b & 0xFFFF)) >> 16)) >> 16
    return high, (a * b) & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10.

    Args:
        counter: Four int64 tensors of 32-bit words that broadcast against each other.
        key: Two such tensors.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(_M0, c0)
        high1, low1 = _multiply(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def _key(seeds: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.tensor([[s & _MASK, s >> 32] for s in seeds], dtype=torch.int64, device=device).view(-1, 2)
    return words[:, 0], words[:, 1]


def _open_unit(words: Tensor) -> Tensor:
    """32-bit words as float64 in (0, 1)."""
    return (words.double() + 0.5) * 2.0**-32


def uniform(
    seeds: Sequence[int], lengths: Sequence[int], offsets: Sequence[int], purpose: int, device: torch.device
) -> Tensor:
    """One uniform a draw.

    Args:
        seeds: 64-bit seed of each draw's request.
        lengths: Committed length of the request at the round's start.
        offsets: Position of the draw in the round.
        purpose: `ACCEPT`, `RESIDUAL` or `DRAFT`; streams of different purposes are independent.

    Returns:
        float64 [B] in (0, 1).
    """
    length_B = torch.tensor(lengths, dtype=torch.int64, device=device)
    offset_B = torch.tensor(offsets, dtype=torch.int64, device=device)
    purpose_B = torch.full_like(length_B, purpose)
    return _open_unit(philox((length_B, offset_B, purpose_B, torch.zeros_like(length_B)), _key(seeds, device))[0])


def _to_gumbel(words: Tensor) -> Tensor:
    return -torch.log(-torch.log(_open_unit(words)))


def gumbel(seeds: Sequence[int], positions: Sequence[int], row_N: Tensor, id_N: Tensor) -> Tensor:
    """Gumbel noise of chosen tokens.

    Args:
        seeds: Seed of each row.
        positions: Absolute position of each row's token.
        row_N: Row of each wanted number.
        id_N: Token id of each wanted number.

    Returns:
        float64 [N], a function of (seed, position, token id) alone.
    """
    k0, k1 = _key(seeds, id_N.device)
    position = torch.tensor(positions, dtype=torch.int64, device=id_N.device)[row_N]
    purpose = torch.full_like(id_N, GUMBEL)
    words = torch.stack(philox((id_N >> 2, position, purpose, torch.zeros_like(id_N)), (k0[row_N], k1[row_N])))
    return _to_gumbel(words.gather(0, (id_N & 3)[None])[0])


def gumbel_rows(seeds: Sequence[int], positions: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """`gumbel` of a whole vocabulary: float64 [rows, V], four numbers a counter."""
    k0, k1 = _key(seeds, device)
    block = torch.arange((vocabulary + 3) // 4, dtype=torch.int64, device=device)[None]
    position = torch.tensor(positions, dtype=torch.int64, device=device)[:, None]
    purpose = torch.full_like(position, GUMBEL)
    words = philox((block, position, purpose, torch.zeros_like(position)), (k0[:, None], k1[:, None]))
    return _to_gumbel(torch.stack(words, -1).flatten(1)[:, :vocabulary])

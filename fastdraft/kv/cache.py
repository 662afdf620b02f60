"""The tensors behind a block pool, and the face of a transformers cache they show for one forward.

Shapes: S slots (blocks x block size), N key/value heads, D head size, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LayerShape", "PagedCache", "StepCache"]


class LayerShape(NamedTuple):
    """Key/value heads and head sizes of one layer."""

    heads: int
    key_size: int
    value_size: int


class PagedCache:
    """Keys and values of every layer, slot by slot.

    Args:
        layers: Shape of each layer.
        slots: Blocks times block size.
        block_size: Tokens a block.
        dtype: Of the model's keys and values.
        device: Of the model.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        slots: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Not zeroed: pages are touched when they are taken.
        self.keys = [torch.empty(slots, n, k, dtype=dtype, device=device) for n, k, _ in layers]
        self.values = [torch.empty(slots, n, v, dtype=dtype, device=device) for n, _, v in layers]
        self._block_size = block_size

    def write(self, layer: int, slots_T: Tensor, k_TND: Tensor, v_TND: Tensor) -> tuple[Tensor, Tensor]:
        """Puts a forward's keys and values into their slots; returns the layer's whole pool, which attention reads."""
        k_SND, v_SND = self.keys[layer], self.values[layer]
        k_SND.index_copy_(0, slots_T, k_TND)
        v_SND.index_copy_(0, slots_T, v_TND)
        return k_SND, v_SND

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination), before a write that may not touch the source."""
        size = self._block_size
        for source, destination in pairs:
            for pool_SND in (*self.keys, *self.values):
                pool_SND[destination * size : (destination + 1) * size] = pool_SND[source * size : (source + 1) * size]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks that were taken: a kernel may read, and mask, what lies behind the last token of a block."""
        if not blocks:
            return
        index_B = torch.tensor(blocks, device=self.keys[0].device)
        for pool_SND in (*self.keys, *self.values):
            pool_SND.view(-1, self._block_size, *pool_SND.shape[1:]).index_fill_(0, index_B, 0)


class StepCache:
    """A cache by the names transformers calls; ``update`` writes this forward's keys and values into the pool.

    Args:
        cache: The tensors.
        slots_T: The slot of each packed token.
    """

    is_compileable = False

    def __init__(self, cache: PagedCache, slots_T: Tensor) -> None:
        self._cache = cache
        self._slots_T = slots_T

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes [1, N, T, D] keys and values; returns the layer's whole pool, which only our attention reads."""
        return self._cache.write(layer_idx, self._slots_T, keys[0].transpose(0, 1), values[0].transpose(0, 1))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given explicitly."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0: masks are made from the step."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """No mask is made; the numbers are those of a forward without a past."""
        return query_length, 0

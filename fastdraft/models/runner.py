"""The one door to a model: packed, ragged, paged forwards.

Shapes: T fed tokens, R kept rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from fastdraft.attention.base import AttentionBackend, Step, make_step
from fastdraft.errors import UnsupportedModelError
from fastdraft.kv.cache import LayerShape, PagedCache, StepCache
from fastdraft.kv.pool import BlockPool
from fastdraft.kv.table import Table
from fastdraft.models.lean import lean_forward
from fastdraft.models.views import view
from fastdraft.round import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Feed", "Runner", "own_forward"]

ATTENTION = "fastdraft"

# Keywords that reach every attention function and change nothing for ours.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "is_causal",
        "layer_idx",
        "output_router_logits",
    }
)


class Feed(NamedTuple):
    """Tokens for one sequence: committed ones, then drafted ones that live on the device."""

    tokens: Sequence[int]
    draft_G: Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.tokens) + (0 if self.draft_G is None else len(self.draft_G))


class Runner:
    """A model with its pool and its tensors.

    Args:
        model: Left untouched; a view over its weights is run.
        vocabulary: Logits are cut to this many ids.
        layers: Key/value shape of each layer.
        blocks: Blocks of the pool.
        backend: The attention kernel; it owns the block size.
        space: Key space of reusable prefixes.

    Attributes:
        pool: The blocks.
        device: Of the model's weights.
        vocabulary: Ids that logits are for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocabulary: int,
        layers: Sequence[LayerShape],
        blocks: int,
        backend: AttentionBackend,
        space: str = "",
    ) -> None:
        AttentionInterface.register(ATTENTION, _attention)
        self.device = model.device
        self.pool = BlockPool(blocks, backend.block_size, space=space)
        self._model = view(model, ATTENTION)
        self._lean = lean_forward(self._model)
        self.vocabulary = vocabulary
        self._backend = backend
        self._cache = PagedCache(layers, blocks * backend.block_size, backend.block_size, model.dtype, model.device)
        self._cache_name = _cache_name(model)
        self._narrow = "logits_to_keep" in inspect.signature(model.forward).parameters

    def table(self) -> Table:
        """An empty table in this model's pool."""
        return Table(self.pool)

    def reserve(self, table: Table, length: int) -> None:
        """Makes positions up to ``length`` writable, copying shared blocks first; new blocks are zero.

        Raises:
            CacheFullError: The table is left as it was.
        """
        first = table.length // self._backend.block_size  # earlier blocks are full, and stay
        held = set(table.blocks[first:])
        copies = table.reserve(length)
        held.update(copy for _, copy in copies)
        self._cache.clear_blocks([block for block in table.blocks[first:] if block not in held])
        self._cache.copy_blocks(copies)

    def relieve(self) -> None:
        """Lets go of memory that nobody needs now: reusable prefixes, and what the allocator keeps."""
        self.pool.clear_prefixes()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forward(self, feeds: Sequence[Feed], tables: Sequence[Table], keep: Sequence[int]) -> Rows:
        """Runs the model once over all sequences and advances their tables.

        Args:
            feeds: Tokens of each sequence; those after its table's length.
            tables: Reserved up to ``length + feed.size``.
            keep: How many of each sequence's last rows are wanted.

        Returns:
            Logits of the kept rows, packed in order.
        """
        drafted = [feed.size - len(feed.tokens) for feed in feeds]
        step = make_step(tables, [feed.size for feed in feeds], drafted, self._backend.block_size, self.device)
        index_R = torch.tensor(
            [
                span.first + row
                for span, n in zip(step.spans, keep, strict=True)
                for row in range(span.rows - n, span.rows)
            ],
            dtype=torch.int64,
            device=self.device,
        )
        ids_T = _pack(feeds, self.device)
        if self._lean is not None and not self._lean.watched():
            logits_RV = self._lean(ids_T, index_R, self._cache, self._backend, step)
        else:
            logits_RV = self._whole(ids_T, index_R, step)
        for table, feed in zip(tables, feeds, strict=True):
            table.advance(feed.size)
        return Rows(logits_RV[:, : self.vocabulary])

    def _whole(self, ids_T: Tensor, index_R: Tensor, step: Step) -> Tensor:
        """The model's own forward, with our cache and attention."""
        given: dict[str, Any] = {self._cache_name: StepCache(self._cache, step.slots_T)}
        if self._narrow:
            given["logits_to_keep"] = index_R
        output = self._model(
            input_ids=ids_T[None],
            position_ids=step.positions_T[None],
            use_cache=True,
            fastdraft=(self._backend, step),
            **given,
        )
        logits_RV: Tensor = output.logits[0] if self._narrow else output.logits[0, index_R]
        return logits_RV


def _pack(feeds: Sequence[Feed], device: torch.device) -> Tensor:
    """One packed row of ids; drafted tokens never leave the device."""
    if all(feed.draft_G is None for feed in feeds):
        return torch.tensor([t for feed in feeds for t in feed.tokens], dtype=torch.int64, device=device)
    pieces = []
    for feed in feeds:
        pieces.append(torch.tensor(feed.tokens, dtype=torch.int64, device=device))
        if feed.draft_G is not None:
            pieces.append(feed.draft_G)
    return torch.cat(pieces)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    fastdraft: tuple[AttentionBackend, Step] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: [1, H, T, D] queries, the layer's pool as key and value."""
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, which paged attention does not know.",
            hint="Use another target, or file an issue that names the architecture.",
        )
    assert fastdraft is not None and attention_mask is None and dropout == 0.0
    backend, step = fastdraft
    q_THD = query[0].transpose(0, 1)
    out_THD = backend.attend(
        q_THD,
        key,
        value,
        step,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or None,
        softcap=softcap,
    )
    return out_THD[None], None


def _cache_name(model: PreTrainedModel) -> str:
    """What this transformers release calls the cache; it became ``cache`` in 5.24."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def own_forward(model: PreTrainedModel, ids: Sequence[int]) -> tuple[Tensor, list[LayerShape]]:
    """The model's own dense forward of one sequence: logits [T, V] and the key/value shape of each layer."""
    output = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=True)
    cache = output[_cache_name(model)]
    shapes = [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]
    return output.logits[0], shapes

"""What a forward tells attention: where each packed token is written, and what each sequence may read.

A batch is one packed row. The token axis of one forward, and who owns what:

    packed    | a a a a a | b | c c c |          T fed tokens; a Span is one sequence's stretch of it
    positions | 7 . . . 11| 93| 0 1 2 |          span.past, span.past + 1, ...
    slots     | slots_T: the pool row each fed token's key and value is written to

A sequence reads positions 0 .. past + rows - 1 of its own blocks; queries align to the end (bottom right). A backend
may read to the end of the last block and mask the rest: what lies there is finite.

Shapes: T fed tokens, S slots of the pool, H query heads, N key/value heads, D head size, L positions read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastdraft.kv.table import Table

__all__ = ["AttentionBackend", "Span", "Step", "make_step"]


class Span(NamedTuple):
    """One sequence in a forward.

    Attributes:
        first: Its first packed row.
        rows: Its fed tokens.
        drafted: How many of them, the last, are drafted.
        past: Its positions in KV before this forward.
        start: The slot of position 0 when its blocks are consecutive, else None.
        slots_L: The slot of each position when they are not, to the end of the last block; else None.
    """

    first: int
    rows: int
    drafted: int
    past: int
    start: int | None
    slots_L: Tensor | None


@dataclass(frozen=True, slots=True)
class Step:
    """The tables of one forward, handed through the model to every attention layer.

    Attributes:
        slots_T: Slot each packed token is written to.
        positions_T: Absolute position of each packed token.
        spans: One a sequence, in packed order.
        shared: The backend's own, by window: what the layers of a forward have in common.
    """

    slots_T: Tensor
    positions_T: Tensor
    spans: tuple[Span, ...]
    shared: dict[int | None, Any] = field(default_factory=dict)


class AttentionBackend(Protocol):
    """A kernel over paged KV.

    Attributes:
        block_size: Tokens a block.
    """

    block_size: int

    def attend(
        self,
        q_THD: Tensor,
        k_SND: Tensor,
        v_SND: Tensor,
        step: Step,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention of every span over its own positions.

        Args:
            q_THD: Queries, rotary embedding applied.
            k_SND: The layer's keys of the whole pool; this forward's are written already.
            v_SND: The layer's values.
            step: The tables.
            scaling: Multiplies the scores.
            window: A query at position i reads i - window + 1 .. i; None reads all.
            softcap: Scores become softcap * tanh(scores / softcap); None leaves them.

        Returns:
            [T, H, D].
        """
        ...


def make_step(
    tables: Sequence[Table], counts: Sequence[int], drafted: Sequence[int], block_size: int, device: torch.device
) -> Step:
    """Lays out one forward.

    Args:
        tables: One a sequence; positions up to ``length + count`` are reserved.
        counts: Tokens fed to each.
        drafted: How many of them are drafted.
        block_size: Tokens a block.
        device: Of the model.
    """
    slots: list[int] = []
    positions: list[int] = []
    spans = []
    for table, count, last in zip(tables, counts, drafted, strict=True):
        past, blocks = table.length, table.blocks
        fed = range(past, past + count)
        positions += fed
        used = blocks[: -(-(past + count) // block_size)]
        if all(block == used[0] + i for i, block in enumerate(used)):
            start, slots_L = used[0] * block_size, None
            slots += range(start + past, start + past + count)
        else:
            start = None
            block_L = torch.tensor(used, device=device)[:, None] * block_size
            slots_L = (block_L + torch.arange(block_size, device=device)).flatten()
            slots += [used[p // block_size] * block_size + p % block_size for p in fed]
        spans.append(Span(len(positions) - count, count, last, past, start, slots_L))
    return Step(
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        tuple(spans),
    )

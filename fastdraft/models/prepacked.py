"""bf16 linear layers on a CPU, their weights laid out once in the blocks that oneDNN's kernels read.

torch keeps plain weights and lays them out anew in every call; inductor's freezing uses the same two private operators
as we do, ``mkldnn::_reorder_linear_weight`` and ``mkldnn::_linear_pointwise``. They are named in this file alone.

Fewer than four rows are computed as four: that is faster, and it makes a row's result the same at every row count, so
that a token verified beside its neighbours gets the very numbers it would get alone. From two rows on these are also
``torch.nn.functional.linear``'s, bit by bit; its one-row kernel sums in another order.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastdraft._log import get_logger
from fastdraft.models.linears import FEW_ROWS, Site, fill_rows, replace

__all__ = ["PrepackedLinear", "prepack"]

_log = get_logger(__name__)

_HINT = 8  # rows the layout is chosen for: a round's verify


class PrepackedLinear(nn.Module):
    """``x @ weight.T + bias`` in bfloat16.

    Args:
        weight_NK: Not kept.
        bias_N: Or None.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self._weight: Any = torch.ops.mkldnn._reorder_linear_weight(weight_NK, _HINT)
        self._bias = bias_N

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, K] to [..., T, N]."""
        rows = x.shape[-2]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(fill_rows(x), self._weight, self._bias, "none", [], "")
        return y if rows >= FEW_ROWS else y[..., :rows, :]


def prepack(model: nn.Module, label: str) -> int:
    """Replaces the bf16 linear layers of a model on a CPU; each plain weight is let go before the next is packed.

    A layer whose shape fails the check (another result than ``torch.nn.functional.linear``, or no such operator in this
    torch) stays as it is, with the reason logged.

    Args:
        model: Ours to change.
        label: For the log.

    Returns:
        Layers that were replaced, joined siblings counted once.
    """
    verdicts: dict[tuple[int, ...], str] = {}

    def make(site: Site) -> nn.Module | None:
        first = site.layers[0].weight
        if first.device.type != "cpu" or first.dtype != torch.bfloat16:
            return None
        weight_NK, bias_N = site.weight(), site.bias()
        if verdicts.get(shape := tuple(weight_NK.shape)):
            return None
        try:
            made = PrepackedLinear(weight_NK, bias_N)
            if shape not in verdicts:
                verdicts[shape] = "" if _equal(made, weight_NK, bias_N) else "its results differ from a plain layer's"
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            verdicts[shape] = f"{type(error).__name__}: {error}"
        if verdicts[shape]:
            _log.warning("prepack_refused", model=label, shape=shape, reason=verdicts[shape])
            return None
        return made

    with torch.inference_mode():
        return replace(model, make)


def _equal(made: PrepackedLinear, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    """Whether a packed layer gives the plain layer's bits, at several row counts and at one row."""
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(9, weight_NK.shape[1], generator=generator).to(weight_NK.dtype)
    plain = nn.functional.linear
    same = all(torch.equal(made(x_TK[:rows]), plain(x_TK[:rows], weight_NK, bias_N)) for rows in (4, 9))
    return same and torch.equal(made(x_TK[:1]), made(x_TK)[:1])

"""Which kernels a model's linear layers run on: prepacked bf16, int8, int4, or int4 for few rows and int8 for many.

Shapes: T rows, K inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fastdraft._log import get_logger
from fastdraft.config import Model
from fastdraft.errors import ConfigError
from fastdraft.models.linears import Site, replace, sites
from fastdraft.models.prepacked import prepack
from fastdraft.models.quantised import Int4Linear, Int8Linear, MixedLinear, Rounding, round_int4, round_int8
from fastdraft.models.rounded import RoundedWeights, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Quantization", "fasten", "quantization_of"]

_log = get_logger(__name__)

Quantization: TypeAlias = Literal["auto", "int8", "int4", "none"]

_FEW = (1, 2, 4, 8)  # row counts at which int4 may beat int8
_CACHE = 1 << 26  # bytes that push a layer out of a processor's caches, as the model's other layers do
_MANY = 64


def quantization_of(spec: Model, *, draft: bool) -> Quantization:
    """What is asked of a model's weights: borrowed ones stay as they are, a draft's are rounded by default."""
    if spec.loaded and not spec.take:
        return "none"
    return spec.quantization or ("auto" if draft else "none")


@torch.inference_mode()
def fasten(model: PreTrainedModel, quantization: Quantization, *, label: str, source: str) -> str:
    """Puts the fastest kernels under a model that is ours to change.

    Args:
        model: Freshly loaded; changed in place, layer by layer, so that no weight is held twice for long.
        quantization: ``"auto"`` measures and takes int4 for few rows and int8 for many, or one of them for all; for
            drafts. ``"int8"`` and ``"int4"`` round as they say. ``"none"`` keeps the weights' values.
        label: For the log.
        source: Folder or hub id it came from; rounded weights are kept under its fingerprint. Empty keeps none.

    Returns:
        What runs: ``"int8"``, ``"int4"``, ``"int4 up to n rows, then int8"``, ``"prepacked"`` or ``"plain"``.

    Raises:
        ConfigError: A quantisation that this machine has no kernel for.
    """
    kernels = (
        _on_cpu(model, quantization, label, source) if model.device.type == "cpu" else _on_cuda(model, quantization)
    )
    _log.info("kernels_chosen", model=label, kernels=kernels)
    return kernels


def _on_cpu(model: PreTrainedModel, quantization: Quantization, label: str, source: str) -> str:
    _own_small_tensors(model)
    if next(sites(model), None) is None:
        return "plain"
    if quantization == "none":
        return "prepacked" if prepack(model, label) else "plain"
    try:  # on a layer of its own: what fails later is no missing kernel, and half a model is none
        few = _rows_for_int4(model) if quantization == "auto" else _try(quantization)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        if quantization != "auto":
            raise ConfigError(
                f"quantization={quantization!r} has no kernel on this machine ({error}).",
                hint="Leave quantization out.",
            ) from error
        _log.warning("quantization_unavailable", model=label, reason=str(error))
        return "prepacked" if prepack(model, label) else "plain"
    rounded = _quantise(model, few, fingerprint(model, source), fine=quantization == "int8")
    packed = prepack(model, label)  # shapes that int4 has no kernel for
    if not rounded:
        return "prepacked" if packed else "plain"
    return "int8" if not few else "int4" if few == _MANY else f"int4 up to {few} rows, then int8"


def _on_cuda(model: PreTrainedModel, quantization: Quantization) -> str:
    if quantization == "auto" or quantization == "none":
        return "plain"
    from fastdraft.models.torchao import quantise

    quantise(model, quantization)
    return f"{quantization} (torchao)"


def _own_small_tensors(model: nn.Module) -> None:
    """Copies what is neither a linear layer's nor an embedding's, so that mapped files can be let go shard by shard."""
    big = {id(p) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding) for p in (m.weight,)}
    for parameter in model.parameters():
        if id(parameter) not in big:
            parameter.data = parameter.data.clone()


def _quantise(model: PreTrainedModel, few: int, key: str | None, *, fine: bool) -> int:
    """Rounds every layer, or takes its rounded weights from the cache; ``fine`` spends time on accuracy.

    Returns:
        Layers that were rounded.
    """
    roundings: list[Rounding] = [*(["int4"] if few else []), *(["int8"] if few < _MANY else [])]  # type: ignore[list-item]
    makers: dict[Rounding, Callable[[Tensor], dict[str, Tensor] | None]] = {"int4": round_int4, "int8": round_int8}
    tokens = model.config.get_text_config().vocab_size
    with ExitStack() as stack:
        kept = {rounding: stack.enter_context(RoundedWeights(key, rounding).open()) for rounding in roundings}

        def is_head(site: Site) -> bool:
            return site.layers[0] is model.get_output_embeddings()

        def layer(site: Site, rounding: Rounding) -> nn.Module | None:
            # A head cut to some tokens is another layer than the one on disk.
            own = is_head(site) and len(site.layers[0].weight) != tokens
            rounded = None if own else kept[rounding].get(site.name)
            if rounded is None:
                rounded = makers[rounding](site.weight())
                if rounded is None:
                    return None
                if not own:
                    kept[rounding].put(site.name, rounded)
            if rounding == "int4":
                return Int4Linear(rounded, site.bias())
            return Int8Linear(rounded, site.bias(), fine=fine and (is_head(site) or _narrows(site)))

        def make(site: Site) -> nn.Module | None:
            few_rows = layer(site, "int4") if few else None
            # A head only ever sees the rows of a step.
            if few == _MANY or (few_rows is not None and is_head(site)):
                return few_rows
            many_rows = layer(site, "int8")
            if few_rows is None or many_rows is None:
                return many_rows
            return MixedLinear(few_rows, many_rows, few)  # type: ignore[arg-type]

        return replace(model, make)


def _try(rounding: Rounding) -> int:
    """Runs a small layer of the largest numbers once, and looks at the result; up to how many rows int4 is asked for.

    Raises:
        RuntimeError: No such kernel, or one that computes wrong: without VNNI, sums of two products may saturate.
    """
    weight_NK = torch.ones(64, 64, dtype=torch.bfloat16)
    layer: nn.Module = Int8Linear(round_int8(weight_NK), None)
    if rounding == "int4":
        rounded = round_int4(weight_NK)
        assert rounded is not None
        layer = Int4Linear(rounded, None)
    y_TN = layer(weight_NK[:1])
    if not torch.allclose(y_TN.float(), torch.tensor(64.0), rtol=0.01):
        raise RuntimeError(f"its {rounding} kernel computes {y_TN[0, 0].item():g} where 64 is right")
    return _MANY if rounding == "int4" else 0


def _narrows(site: Site) -> bool:
    """Whether a layer leads from a wide inner state back, as a feed-forward block's second does: there outliers are."""
    return site.layers[0].in_features > site.layers[0].out_features


def _rows_for_int4(model: nn.Module) -> int:
    """Up to how many rows int4 is faster than int8 on the widest layer: 0 is never, `_MANY` always."""
    site = max(
        sites(model), key=lambda s: sum(layer.weight.numel() for layer in s.layers if layer.out_features < 65536)
    )
    weight_NK = site.weight()
    rounded = round_int4(weight_NK)
    _try("int8")
    if rounded is None:
        return 0
    four, eight = Int4Linear(rounded, None), Int8Linear(round_int8(weight_NK), None)
    evict = torch.zeros(_CACHE, dtype=torch.uint8)

    def wins(rows: int) -> bool:
        x_TK = torch.ones(rows, weight_NK.shape[1], dtype=weight_NK.dtype)
        return _seconds(four, x_TK, evict) < _seconds(eight, x_TK, evict)

    if not wins(1):
        return 0
    if wins(_MANY):
        return _MANY
    return max(rows for rows in _FEW if rows == 1 or wins(rows))


def _seconds(layer: nn.Module, x_TK: Tensor, evict: Tensor) -> float:
    """The quickest of a few calls: others may be using the machine."""
    times = []
    for _ in range(6):
        evict.add_(1)
        started = time.perf_counter()
        layer(x_TK)
        times.append(time.perf_counter() - started)
    return min(times)

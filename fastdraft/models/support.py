"""Whether a model can be paged and rolled back exactly; asked once, at construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastdraft.attention.base import AttentionBackend
from fastdraft.errors import FastDraftError, UnsupportedModelError
from fastdraft.kv.cache import LayerShape
from fastdraft.models.runner import Feed, Runner, own_forward

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["context_of", "examine", "refuse_config"]

_LAYERS = frozenset({"full_attention", "sliding_attention"})


def context_of(config: PretrainedConfig) -> int:
    """Tokens a model was made for; ``longrope`` is capped at its original context.

    Longer sequences would switch a longrope model to other frequencies by the longest position of the whole call, so
    what one request reads would depend on its batch mates.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2**20
    for rope in _ropes(text):
        if rope.get("rope_type") == "longrope":
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return int(limit)


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The rope settings of a config: one, or one a layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or ([dict(rope)] if rope else [])


def refuse_config(config: PretrainedConfig, label: str) -> None:
    """Raises for what a config alone tells.

    Raises:
        UnsupportedModelError: With the reason.
    """
    text = config.get_text_config()
    reason = ""
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYERS)
    if others:
        reason = f"it has layers of kind {', '.join(others)}"
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(text)):
        reason = "its dynamic rope depends on the longest sequence of the whole batch"
    if reason:
        raise _unsupported(label, reason)


def examine(model: PreTrainedModel, label: str, backend: AttentionBackend, vocabulary: int) -> list[LayerShape]:
    """Checks a loaded model and compares paged logits with its own.

    A short and a long sequence run packed together, the long one in two chunks; their logits must be those of the
    model's own dense forward.

    Returns:
        The key/value shape of each layer.

    Raises:
        UnsupportedModelError: With the reason.
    """
    refuse_config(model.config, label)
    if not model.is_backend_compatible():
        raise _unsupported(label, f"{type(model).__name__} has no exchangeable attention function")
    if getattr(model, "_is_stateful", False):
        raise _unsupported(label, f"{type(model).__name__} keeps a recurrent state")
    context = context_of(model.config)
    long = [(7 * i + 3) % vocabulary for i in range(min(40, context))]
    short = [(5 * i + 1) % vocabulary for i in range(min(5, context))]
    with torch.inference_mode():
        try:
            own_short, shapes = own_forward(model, short)
            own_long, _ = own_forward(model, long)
        except (AttributeError, TypeError, KeyError) as error:
            raise _unsupported(label, f"its own forward returns no plain key/value cache ({error})") from error
        try:
            paged = _paged(model, shapes, backend, vocabulary, long, short)
        except (FastDraftError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each architecture fails in its own way
            raise _unsupported(label, f"its paged forward fails ({type(error).__name__}: {error})") from error
        own = torch.cat([own_long[:, :vocabulary], own_short[:, :vocabulary]])
    gap = (own.double() - paged.double()).abs().max().item()
    scale = own.double().std().item() + 1e-12
    if not gap <= _tolerance(model.dtype) * scale:
        raise _unsupported(label, f"paged logits differ from its own by {gap:.3g} where their spread is {scale:.3g}")
    return shapes


def _paged(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    backend: AttentionBackend,
    vocabulary: int,
    long: list[int],
    short: list[int],
) -> Tensor:
    """Logits of both sequences through a small pool of their own, long first."""
    blocks = sum(-(-len(ids) // backend.block_size) for ids in (long, short))
    runner = Runner(model, vocabulary=vocabulary, layers=shapes, blocks=blocks, backend=backend)
    tables = [runner.table(), runner.table()]
    half = len(long) // 2
    for table, ids in zip(tables, (long, short), strict=True):
        runner.reserve(table, len(ids))
    first = runner.forward([Feed(long[:half])], tables[:1], [half]).logits_RV if half else None
    rest = runner.forward([Feed(long[half:]), Feed(short)], tables, [len(long) - half, len(short)]).logits_RV
    return rest if first is None else torch.cat([first, rest])


def _tolerance(dtype: torch.dtype) -> float:
    """Largest gap in units of the logits' spread: kernels of other shapes round differently."""
    return {torch.float64: 1e-6, torch.float32: 1e-2}.get(dtype, 0.35)


def _unsupported(label: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{label} cannot be paged and rolled back: {reason}.",
        hint="Use a decoder-only transformer with full or sliding-window attention, such as Llama, Qwen or Gemma 3.",
    )

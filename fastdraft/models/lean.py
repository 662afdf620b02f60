"""The same forward in fewer calls: decoder layers of the Llama family without transformers' own machinery.

A small model on a CPU spends as long between its products as in them: on module calls, keyword passing, head
transposes and queries and keys turned one after the other. Here a layer is what its arithmetic needs, operation by
operation in the order transformers has, so every bit of the logits is the same. Any other architecture, and a model
somebody watches through hooks or replaced forwards, runs as transformers wrote it.

Shapes: T fed tokens, R kept rows, C hidden size, H query heads, N key/value heads, P = H + N, D head size,
I inner size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastdraft.attention.base import AttentionBackend, Step
from fastdraft.kv.cache import PagedCache
from fastdraft.models.linears import joined_product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LeanForward", "lean_forward"]

# Whose layers are: norm, attention, add, norm, gated feed-forward, add; and nothing before or after them but
# embedding, norm and output layer.
_FAMILY = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}


def lean_forward(model: PreTrainedModel) -> LeanForward | None:
    """A lean forward over a model's modules, or None where it would not be the same."""
    kind = type(model)
    known = f"{kind.__module__}.{kind.__qualname__}" in _FAMILY and not model.training
    replaced = any("forward" in vars(module) for module in model.modules())
    return LeanForward(model) if known and not replaced else None


class LeanForward:
    """A model's forward over packed rows.

    Args:
        model: Of a known class; its modules are read, not changed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.base_model
        self._embed, self._rotary = body.embed_tokens, body.rotary_emb
        self._layers = [_Layer(layer) for layer in body.layers]
        self._norm = _norm(body.norm)
        self._head: Any = model.get_output_embeddings()
        self._hooks = [
            hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]

    def watched(self) -> bool:
        """Whether somebody's hooks want to see the modules' own calls."""
        return any(self._hooks)

    def __call__(
        self, ids_T: Tensor, index_R: Tensor, cache: PagedCache, backend: AttentionBackend, step: Step
    ) -> Tensor:
        """Writes the tokens' keys and values; returns the logits [R, V] of rows ``index_R``."""
        x_TC = self._embed(ids_T)
        cos_1TD, sin_1TD = self._rotary(x_TC[None], step.positions_T[None])
        low, high = sin_1TD[0].chunk(2, -1)
        turn = cos_1TD[0][:, None], torch.cat((-low, high), -1)[:, None]
        for layer in self._layers:
            x_TC = layer(x_TC, turn, cache, backend, step)
        logits_RV: Tensor = self._head(self._norm(x_TC[index_R]))
        return logits_RV


class _Layer:
    """One decoder layer.

    Args:
        layer: transformers' own.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._first, self._second = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._qkv = joined_product(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = joined_product(mlp.gate_proj, mlp.up_proj)
        self._out, self._down, self._act = attention.o_proj, mlp.down_proj, mlp.act_fn
        normed = hasattr(attention, "q_norm")
        self._q_norm = _norm(attention.q_norm) if normed else None
        self._k_norm = _norm(attention.k_norm) if normed else None
        self._index, self._size, self._scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self._groups = attention.num_key_value_groups
        # Mistral's attention asks its config, the Qwens' have their own, Llama's has none, whatever its config says.
        windowed = attention.config if type(attention).__name__ == "MistralAttention" else attention
        self._window: int | None = getattr(windowed, "sliding_window", None) or None

    def __call__(
        self,
        x_TC: Tensor,
        turn: tuple[Tensor, Tensor],
        cache: PagedCache,
        backend: AttentionBackend,
        step: Step,
    ) -> Tensor:
        size, (cos_T1D, sin_T1D) = self._size, turn
        all_TXD = self._qkv(self._first(x_TC)).unflatten(-1, (-1, size))
        heads = all_TXD.shape[1] // (self._groups + 2)
        queries, both = heads * self._groups, heads * (self._groups + 1)
        qk_TPD, v_TND = all_TXD[:, :both], all_TXD[:, both:]
        if self._q_norm is not None and self._k_norm is not None:
            qk_TPD = torch.cat((self._q_norm(qk_TPD[:, :queries]), self._k_norm(qk_TPD[:, queries:])), 1)
        # The halves' signs are in the sine: half turned, the first half is negative.
        turned_TPD = (qk_TPD * cos_T1D).add_(qk_TPD.roll(size // 2, -1).mul_(sin_T1D))
        k_SND, v_SND = cache.write(self._index, step.slots_T, turned_TPD[:, queries:], v_TND)
        read_THD = backend.attend(
            turned_TPD[:, :queries], k_SND, v_SND, step, scaling=self._scaling, window=self._window, softcap=None
        )
        x_TC = x_TC + self._out(read_THD.flatten(1))
        gate_TI, up_TI = self._gate_up(self._second(x_TC)).chunk(2, -1)
        y_TC: Tensor = x_TC + self._down(self._act(gate_TI).mul_(up_TI))
        return y_TC


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """A root-mean-square norm as one operation and a product, where that gives the module's bits; else the module."""
    weight_C, eps = module.weight, module.variance_epsilon

    def normed(x: Tensor) -> Tensor:
        return F.rms_norm(x, weight_C.shape, None, eps) * weight_C

    generator = torch.Generator().manual_seed(0)
    like = torch.randn(3, *weight_C.shape, generator=generator).to(weight_C)
    with torch.inference_mode():
        own: Callable[[Tensor], Tensor] = module
        return normed if torch.equal(normed(like), own(like)) else own

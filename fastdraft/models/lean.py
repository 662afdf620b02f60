"""The same forward in fewer calls: decoder layers of the Llama family without transformers' own machinery.

A small model on a CPU spends much of its time between its products: on module calls, keyword passing, head transposes,
and queries and keys rotated one after the other. Here a layer is what its arithmetic needs, operation by operation in
the order transformers has, so every bit of the logits is the same. Any other architecture or device, and a model that
somebody patched or watches through hooks, runs as transformers wrote it.

Shapes: T fed tokens, R kept rows, C hidden size, H query heads, N key/value heads, P = H + N, D head size,
I inner size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastdraft._log import get_logger
from fastdraft.attention.base import AttentionBackend, Step
from fastdraft.kv.cache import PagedCache
from fastdraft.models.linears import joined_product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LeanForward", "lean_forward"]

_log = get_logger(__name__)

# Whose layers are: norm, attention, add, norm, gated feed-forward, add; and nothing before or after them but
# embedding, norm and output layer. Mistral's attention asks its config for a window, the Qwens' have their own, Llama's
# has none, whatever its config says.
_WINDOW: dict[str, Callable[[Any], int | None]] = {
    "Llama": lambda attention: None,
    "Mistral": lambda attention: attention.config.sliding_window,
    "Qwen2": lambda attention: attention.sliding_window,
    "Qwen3": lambda attention: attention.sliding_window,
}


def lean_forward(model: PreTrainedModel) -> LeanForward | None:
    """A lean forward over a model's modules, or None where it would not be the same."""
    kind = type(model)
    family = kind.__name__.removesuffix("ForCausalLM")
    home = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    if family not in _WINDOW or kind.__module__ != home or model.training or model.device.type != "cpu":
        return None
    try:
        if all(_is_genuine(module, family, home) for module in _parts(model)):
            return LeanForward(model, _WINDOW[family])
    except AttributeError as error:  # another release of transformers has other names
        _log.info("lean_forward_refused", model=kind.__name__, reason=str(error))
    return None


def _parts(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """The modules that a lean forward does not call, and what transformers calls their classes."""
    body: Any = model.base_model
    yield from ((model, "ForCausalLM"), (body, "Model"), (body.norm, "RMSNorm"))
    for layer in body.layers:
        yield from ((layer, "DecoderLayer"), (layer.self_attn, "Attention"), (layer.mlp, "MLP"))
        yield from ((layer.input_layernorm, "RMSNorm"), (layer.post_attention_layernorm, "RMSNorm"))


def _is_genuine(part: tuple[nn.Module, str], family: str, home: str) -> bool:
    """Whether a module is what transformers made, and nobody put another forward in its place."""
    module, name = part
    kind = type(module)
    rotation = sys.modules[home].apply_rotary_pos_emb
    mine = kind.__name__ == family + name and kind.__module__ == kind.forward.__module__ == rotation.__module__ == home
    return mine and "forward" not in vars(module)


class LeanForward:
    """A model's forward over packed rows.

    Args:
        model: Of a known family; its modules are read, not changed.
        window: Of an attention module.
    """

    def __init__(self, model: PreTrainedModel, window: Callable[[Any], int | None]) -> None:
        body: Any = model.base_model
        self._embed, self._rotary = body.embed_tokens, body.rotary_emb
        self._layers = [_Layer(layer, window) for layer in body.layers[: body.config.num_hidden_layers]]
        self._norm = _norm(body.norm)
        self._head: Any = model.get_output_embeddings()
        everywhere = nn.modules.module
        self._hooks = [everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks]
        for module in model.modules():
            self._hooks += [module._forward_pre_hooks, module._forward_hooks]

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
        rotation = _Rotation(cos_1TD[0][:, None], torch.cat((-low, high), -1)[:, None])
        for layer in self._layers:
            x_TC = layer(x_TC, rotation, cache, backend, step)
        logits_RV: Tensor = self._head(self._norm(x_TC[index_R]))
        return logits_RV


class _Rotation(NamedTuple):
    """Rotary embedding of each packed token, for all heads, [T, 1, D].

    Attributes:
        cos_T1D: Cosines.
        sin_T1D: Sines, negative in the first half: there, what is turned in from the other half is subtracted.
    """

    cos_T1D: Tensor
    sin_T1D: Tensor


class _Layer:
    """One decoder layer.

    Args:
        layer: transformers' own.
        window: Of its attention.
    """

    def __init__(self, layer: Any, window: Callable[[Any], int | None]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._qkv = _beside(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _halves(mlp.gate_proj, mlp.up_proj)
        self._out, self._down, self._act = attention.o_proj, mlp.down_proj, mlp.act_fn
        normed = hasattr(attention, "q_norm")
        self._qk_norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if normed else None
        self._index, self._size, self._scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self._groups = attention.num_key_value_groups
        self._window = window(attention) or None

    def __call__(
        self, x_TC: Tensor, rotation: _Rotation, cache: PagedCache, backend: AttentionBackend, step: Step
    ) -> Tensor:
        before_attention, before_mlp = self._norms
        q_THD, k_TND, v_TND = self._rotated(before_attention(x_TC), rotation)
        k_SND, v_SND = cache.write(self._index, step.slots_T, k_TND, v_TND)
        read_THD = backend.attend(q_THD, k_SND, v_SND, step, scaling=self._scaling, window=self._window, softcap=None)
        x_TC = x_TC + self._out(read_THD.flatten(1))
        gate_TI, up_TI = self._gate_up(before_mlp(x_TC))
        y_TC: Tensor = x_TC + self._down(self._act(gate_TI) * up_TI)
        return y_TC

    def _rotated(self, x_TC: Tensor, rotation: _Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, both rotated, and values."""
        size = self._size
        all_TXD = self._qkv(x_TC).unflatten(-1, (-1, size))
        heads = all_TXD.shape[1] // (self._groups + 2)
        queries, both = heads * self._groups, heads * (self._groups + 1)
        qk_TPD, v_TND = all_TXD[:, :both], all_TXD[:, both:]
        if self._qk_norms is not None:
            norm_q, norm_k = self._qk_norms
            qk_TPD = torch.cat((norm_q(qk_TPD[:, :queries]), norm_k(qk_TPD[:, queries:])), 1)
        turned_TPD = (qk_TPD * rotation.cos_T1D).add_(qk_TPD.roll(size // 2, -1).mul_(rotation.sin_T1D))
        return turned_TPD[:, :queries], turned_TPD[:, queries:], v_TND


def _beside(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    """The outputs of layers of one input beside each other."""
    return joined_product(*layers) or (lambda x: torch.cat([layer(x) for layer in layers], -1))


def _halves(gate: nn.Module, up: nn.Module) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The outputs of two layers of one input; laid out as transformers has them, as activations round by layout."""
    product = joined_product(gate, up)
    if product is None:
        return lambda x: (gate(x), up(x))
    return lambda x: product(x).chunk(2, -1)


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """A root-mean-square norm as one operation and a product, where that gives the module's bits; else the module."""
    # The dictionary, not the weight: one that is loaded later is seen.
    weights: dict[str, Tensor] = module._parameters
    shape, eps = module.weight.shape, module.variance_epsilon

    def normed(x: Tensor) -> Tensor:
        return F.rms_norm(x, shape, None, eps) * weights["weight"]

    generator = torch.Generator().manual_seed(0)
    like = torch.randn(3, *shape, generator=generator, device="cpu").to(module.weight)
    own: Callable[[Tensor], Tensor] = module
    with torch.inference_mode():
        same = torch.equal(normed(like), module.forward(like))  # nobody's hooks hear of it
    return normed if same else own

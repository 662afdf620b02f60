"""What a configuration takes: weights, KV, and how many blocks the budget gives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers

from fastdraft.attention.base import AttentionBackend
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.config import DraftModel, GeneratorConfig, Model, parse_bytes
from fastdraft.errors import ConfigError
from fastdraft.kv.cache import LayerShape
from fastdraft.models.kernels import Quantization, quantization_of
from fastdraft.models.loading import load_config, pick_device, torch_dtype
from fastdraft.models.support import context_of, refuse_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["MemoryPlan", "ModelPlan", "context_limit", "kv_blocks", "plan_memory", "token_bytes"]

# Bytes of a linear layer's weight once it is rounded; int4 with scale and zero of each group of 64, auto may hold both.
_BYTES: dict[Quantization, float | None] = {"none": None, "int8": 1.0, "int4": 0.5 + 4 / 64, "auto": 1.5 + 4 / 64}


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's memory.

    Attributes:
        model: ``id@revision``.
        weight_bytes: Parameters as they are held: rounded where that is asked for, or usual for a draft on a CPU.
        kv_bytes_per_token: Keys and values of all layers.
    """

    model: str
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a configuration needs, from config files alone.

    Attributes:
        target: The target.
        drafts: The draft models.
        kv_bytes: KV memory of target and drafts together.
        kv_tokens: Tokens it holds, over all requests.
        context: Tokens one request can have.
    """

    target: ModelPlan
    drafts: tuple[ModelPlan, ...]
    kv_bytes: int
    kv_tokens: int
    context: int

    @property
    def total_bytes(self) -> int:
        """Weights and KV."""
        return self.kv_bytes + sum(m.weight_bytes for m in (self.target, *self.drafts))


def context_limit(config: GeneratorConfig, model: PretrainedConfig) -> int:
    """Tokens one request can have.

    Raises:
        ConfigError: More than the model was made for.
    """
    own = context_of(model)
    if config.max_context is not None and config.max_context > own:
        raise ConfigError(
            f"max_context is {config.max_context}, but {config.target.label} was made for {own} tokens.",
            hint=f"Pass at most {own}.",
        )
    return config.max_context or own


def token_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return sum(n * (k + v) for n, k, v in layers) * dtype.itemsize


def kv_blocks(
    config: GeneratorConfig,
    per_token: Sequence[int],
    backend: AttentionBackend,
    context: int,
    device: torch.device,
) -> int:
    """Blocks of each pool: one budget, every model gets the same number of tokens.

    Raises:
        ConfigError: A budget under two blocks.
    """
    budget = _budget(config, device)
    block_bytes = sum(per_token) * backend.block_size
    # More than every running request's whole context can't be used, beyond one of reusable prefixes.
    most = (config.max_batch + 1) * (-(-context // backend.block_size) + 1)
    blocks = min(budget // block_bytes, most)
    if blocks < 2:
        raise ConfigError(
            f"kv_memory is {config.kv_memory!r} ({budget} bytes), but two blocks of {backend.block_size} tokens for "
            f"{len(per_token)} model(s) need {2 * block_bytes} bytes.",
            hint="Raise kv_memory.",
        )
    return blocks


def _budget(config: GeneratorConfig, device: torch.device) -> int:
    if config.kv_memory != "auto":
        return parse_bytes(config.kv_memory)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.85)
    return min(2 * 2**30, _free_memory() // 4)


def _free_memory() -> int:
    """Bytes the system could give without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def plan_memory(config: GeneratorConfig) -> MemoryPlan:
    """Weights, KV bytes and tokens of a configuration, without loading weights.

    Raises:
        ModelLoadError: A config that is missing or broken.
        UnsupportedModelError: What the config alone rules out.
    """
    specs = [config.target, *(source.model for source in config.draft if isinstance(source, DraftModel))]
    configs = [load_config(spec) for spec in specs]
    for spec, found in zip(specs, configs, strict=True):
        refuse_config(found, spec.label)
    device = pick_device(config.target.device or config.device)
    plans = [
        _plan_model(spec, found, config.dtype, _rounded(quantization_of(spec, draft=i > 0), device))
        for i, (spec, found) in enumerate(zip(specs, configs, strict=True))
    ]
    backend = SdpaAttention()
    context = context_limit(config, configs[0])
    per_token = [plan.kv_bytes_per_token for plan in plans]
    blocks = kv_blocks(config, per_token, backend, context, device)
    tokens = blocks * backend.block_size
    return MemoryPlan(plans[0], tuple(plans[1:]), tokens * sum(per_token), tokens, context)


def _rounded(quantization: Quantization, device: torch.device) -> float | None:
    """Bytes of a rounded weight; None where weights are held as they are, as on CUDA with "auto"."""
    return None if quantization == "auto" and device.type != "cpu" else _BYTES[quantization]


def _plan_model(spec: Model, config: PretrainedConfig, dtype: str, rounded: float | None) -> ModelPlan:
    wanted = torch_dtype(spec.dtype or dtype)
    held = wanted if isinstance(wanted, torch.dtype) else getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for p in model.parameters()) * held.itemsize
    if rounded is not None:
        embeddings = model.get_input_embeddings().weight
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                # An output layer that shares the embeddings' weights gets rounded ones of its own.
                plain = 0 if layer.weight is embeddings else held.itemsize
                weights += int(layer.weight.numel() * (rounded - plain))
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelPlan(spec.label, weights, text.num_hidden_layers * heads * size * 2 * held.itemsize)

"""A second body over the same weights, so that a borrowed model is never changed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["view"]


def view(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Copies a model's modules but not its tensors, with configs of its own that name another attention function.

    The original keeps its attention setting and may be used at the same time, also by another view; hooks, weights and
    buffers are shared.

    Args:
        model: Left as it is.
        attention: Name registered with transformers' ``AttentionInterface``.
    """
    configs: dict[int, Any] = {}
    modules: dict[int, nn.Module] = {}

    def own_config(config: PretrainedConfig) -> PretrainedConfig:
        if id(config) not in configs:
            configs[id(config)] = mine = copy.deepcopy(config)
            mine._attn_implementation = attention
        found: PretrainedConfig = configs[id(config)]
        return found

    def own_module(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        mine = modules[id(module)] = module.__class__.__new__(module.__class__)
        mine.__dict__ = dict(module.__dict__)
        mine.__dict__["_modules"] = {
            name: None if child is None else own_module(child) for name, child in module._modules.items()
        }
        for name, value in module.__dict__.items():
            if isinstance(value, PretrainedConfig):
                mine.__dict__[name] = own_config(value)
        return mine

    return own_module(model)  # type: ignore[return-value]

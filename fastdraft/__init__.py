"""fastdraft: exact speculative decoding inside a Python process.

``Generator`` bundles a target model and a draft source; its output keeps the target's own distribution.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastdraft.config import (
    CallOptions,
    DraftModel,
    DynamicAlpha,
    GeneratorConfig,
    Model,
    NGram,
    Prompt,
    SamplingOverrides,
    SamplingParams,
)
from fastdraft.constrained import Constrained, Json
from fastdraft.errors import (
    CacheFullError,
    ConfigError,
    ConstraintDeadEndError,
    EngineFailedError,
    FastDraftError,
    ForkedProcessError,
    GeneratorClosedError,
    InvalidConstraintError,
    MissingDependencyError,
    ModelLoadError,
    NumericalError,
    OutputValidationError,
    PromptTooLongError,
    QueueFullError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from fastdraft.metrics import Metrics, Spread
from fastdraft.results import Chunk, Completion, Pin, SourceStats, Stats, TokenLogprob, ToolCall
from fastdraft.trace import Trace, TracedRound

if TYPE_CHECKING:
    from fastdraft.constraints.describe import describe
    from fastdraft.generator import Generator
    from fastdraft.memory import MemoryPlan, ModelPlan
    from fastdraft.models.pairing import Pairing
    from fastdraft.streams import AsyncStream, Stream

__version__ = "0.1.0"

# What needs torch is loaded when it is first used, so that importing fastdraft costs nothing.
_LAZY = {
    "AsyncStream": "fastdraft.streams",
    "Generator": "fastdraft.generator",
    "MemoryPlan": "fastdraft.memory",
    "ModelPlan": "fastdraft.memory",
    "Pairing": "fastdraft.models.pairing",
    "Stream": "fastdraft.streams",
    "describe": "fastdraft.constraints.describe",
}

__all__ = [
    "AsyncStream",
    "CacheFullError",
    "CallOptions",
    "Chunk",
    "Completion",
    "ConfigError",
    "Constrained",
    "ConstraintDeadEndError",
    "DraftModel",
    "DynamicAlpha",
    "EngineFailedError",
    "FastDraftError",
    "ForkedProcessError",
    "Generator",
    "GeneratorClosedError",
    "GeneratorConfig",
    "InvalidConstraintError",
    "Json",
    "MemoryPlan",
    "Metrics",
    "MissingDependencyError",
    "Model",
    "ModelLoadError",
    "ModelPlan",
    "NGram",
    "NumericalError",
    "OutputValidationError",
    "Pairing",
    "Pin",
    "Prompt",
    "PromptTooLongError",
    "QueueFullError",
    "SamplingOverrides",
    "SamplingParams",
    "SourceStats",
    "Spread",
    "Stats",
    "Stream",
    "TokenLogprob",
    "ToolCall",
    "Trace",
    "TracedRound",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "describe",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

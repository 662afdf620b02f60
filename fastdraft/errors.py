"""Every error fastdraft raises on purpose.

FastDraftError
├── ConfigError(ValueError)             a parameter or prompt that cannot be used
├── ModelLoadError(ValueError)          weights or tokenizer that cannot be read
├── UnsupportedModelError(ValueError)   a model that cannot be paged or rolled back
├── VocabularyMismatchError(ValueError) target and draft speak different tokens
├── InvalidConstraintError(ValueError)  an output type that cannot be enforced
├── PromptTooLongError(ValueError)      does not fit the context, or can never fit the KV cache
├── OutputValidationError(ValueError)   the finished text is not a valid value
├── CacheFullError(RuntimeError)        no free KV block for now
├── QueueFullError(RuntimeError)        too many calls are waiting
├── ConstraintDeadEndError(RuntimeError) no legal next token
├── NumericalError(RuntimeError)        nan or inf logits
├── ForkedProcessError(RuntimeError)    used in a child of the process that built it
├── EngineFailedError(RuntimeError)     a step failed, or the device did
├── GeneratorClosedError(RuntimeError)  used after close()
└── MissingDependencyError(ImportError) an extra that is not installed

The second base lets ``except ValueError`` and ``except RuntimeError`` work as users expect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastdraft.results import Completion

__all__ = [
    "CacheFullError",
    "ConfigError",
    "ConstraintDeadEndError",
    "EngineFailedError",
    "FastDraftError",
    "ForkedProcessError",
    "GeneratorClosedError",
    "InvalidConstraintError",
    "MissingDependencyError",
    "ModelLoadError",
    "NumericalError",
    "OutputValidationError",
    "PromptTooLongError",
    "QueueFullError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "is_device_fault",
    "owned",
]


class FastDraftError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: What came and what was expected.
        hint: What to do about it; appended to the message.
    """

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip() if hint else message)
        self.hint = hint


class ConfigError(FastDraftError, ValueError):
    """A parameter, option or prompt that cannot be used; raised before any model runs."""


class ModelLoadError(FastDraftError, ValueError):
    """Weights, config or tokenizer that cannot be found or read."""


class UnsupportedModelError(FastDraftError, ValueError):
    """A model whose cache cannot be paged and rolled back exactly."""


class VocabularyMismatchError(FastDraftError, ValueError):
    """Target and draft do not share a vocabulary."""


class InvalidConstraintError(FastDraftError, ValueError):
    """An output type that cannot be enforced."""


class PromptTooLongError(FastDraftError, ValueError):
    """A prompt longer than the context, or than the KV cache can ever hold."""


class OutputValidationError(FastDraftError, ValueError):
    """The call ended without a valid value of its output type.

    Attributes:
        completion: The completion as far as it came; its ``parsed`` is None.
    """

    def __init__(self, message: str = "", *, completion: Completion[Any], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.completion = completion


class CacheFullError(FastDraftError, RuntimeError):
    """No free KV block for now; a later try may succeed."""


class QueueFullError(FastDraftError, RuntimeError):
    """Too many calls are waiting already.

    Attributes:
        retry_after: Seconds after which a new try is worth it.
    """

    def __init__(self, message: str = "", *, retry_after: float = 1.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class ConstraintDeadEndError(FastDraftError, RuntimeError):
    """The grammar leaves no legal next token."""


class NumericalError(FastDraftError, RuntimeError):
    """The model returned nan or infinite logits."""


class ForkedProcessError(FastDraftError, RuntimeError):
    """A generator was used in a forked child of the process that built it."""


class EngineFailedError(FastDraftError, RuntimeError):
    """A step of the engine failed; ``__cause__`` holds what was raised."""


class GeneratorClosedError(FastDraftError, RuntimeError):
    """The generator was used after ``close()``."""


def owned(error: BaseException) -> FastDraftError:
    """What a caller gets for an error: ours as it is, anything else as the cause of an `EngineFailedError`."""
    if isinstance(error, FastDraftError):
        return error
    wrapped = EngineFailedError(f"a round failed: {type(error).__name__}: {error}", hint="Its cause is attached.")
    wrapped.__cause__ = error
    return wrapped


def is_device_fault(error: BaseException) -> bool:
    """Whether the device itself is lost, so that no later round can work."""
    return type(error).__name__ == "AcceleratorError" or "device-side assert" in str(error)


class MissingDependencyError(FastDraftError, ImportError):
    """A feature needs an extra that is not installed."""

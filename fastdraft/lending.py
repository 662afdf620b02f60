"""Models loaded once, to be read by themselves and lent to a generator at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from fastdraft.aside import aside
from fastdraft.config import DraftModel, GeneratorConfig, Model
from fastdraft.models.loading import Loaded, load_model

__all__ = ["lend", "load_models"]


def load_models(config: GeneratorConfig, *, progress: bool = False) -> list[Loaded]:
    """The target, then the draft models, as a generator would load them; aside, as `fastdraft.aside` says.

    Raises:
        ModelLoadError: Files that are missing or broken.
        ConfigError: Options that cannot be met.
    """
    specs = [config.target, *(source.model for source in config.draft if isinstance(source, DraftModel))]

    def load() -> list[Loaded]:
        return [load_model(spec, device=config.device, dtype=config.dtype, progress=progress) for spec in specs]

    return aside(load)


def lend(config: GeneratorConfig, models: Sequence[Loaded], *, take: bool = False) -> GeneratorConfig:
    """The same with models in memory, which a generator borrows and leaves as they are.

    Args:
        config: What they were loaded from.
        models: Of `load_models`.
        take: Hand those over that came from files or were handed over: the generator then gives them the kernels and
            the quantisation that the config asks for, and who reads them reads that.
    """
    left = iter(models)

    def lent(spec: Model) -> Model:
        ours = take and (not spec.loaded or spec.take)
        return Model(
            next(left).model,
            take=ours,
            quantization=spec.quantization if ours else None,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
        )

    target = lent(config.target)
    draft = tuple(
        source.model_copy(update={"model": lent(source.model)}) if isinstance(source, DraftModel) else source
        for source in config.draft
    )
    return config.model_copy(update={"target": target, "draft": draft, "device": "auto", "dtype": "auto"})

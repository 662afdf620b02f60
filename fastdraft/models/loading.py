"""From what a user named to a model and its tokenizer, with plain errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from fastdraft.config import Model
from fastdraft.errors import ConfigError, FastDraftError, ModelLoadError
from fastdraft.models import gguf
from fastdraft.models.support import refuse_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Loaded", "load_config", "load_model", "load_tokenizer", "pick_device", "torch_dtype"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory.

    Attributes:
        model: In evaluation mode.
        label: ``id@revision``.
        source: Folder or hub id its tokenizer can be read from; empty for a model without one.
        eos: End-of-sequence ids of its generation config; empty where it names none.
        sampling: Sampling fields its generation config sets, under our names.
    """

    model: PreTrainedModel
    label: str
    source: str
    eos: tuple[int, ...]
    sampling: Mapping[str, Any]


def pick_device(device: str) -> torch.device:
    """The device a name means; ``"auto"`` is CUDA where there is one.

    Raises:
        ConfigError: Not a device of this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
        torch.empty(0, device=picked)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device is {device!r}, which is not usable here: {error}", hint="Try 'auto' or 'cpu'."
        ) from error
    return picked


def _device(name: str) -> torch.device | str:
    """A named device, index included; ``"auto"`` stays."""
    if name == "auto":
        return name
    return torch.empty(0, device=pick_device(name)).device


def torch_dtype(name: str) -> torch.dtype | str:
    """``"auto"``, or the torch dtype of a name.

    Raises:
        ConfigError: Not a floating-point dtype.
    """
    if name == "auto":
        return name
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {name!r}, expected 'auto', 'float32', 'bfloat16', 'float16' or 'float64'.")
    return dtype


def _resolve(spec: Model, progress: bool) -> str:
    """A folder or hub id that transformers can read; converts a GGUF file once."""
    name = str(spec.id)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"{name} does not exist.", hint="Pass the path of an existing .gguf file.")
        return str(gguf.convert(path, progress=progress))
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or path.exists()
    if looks_local and not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ModelLoadError(f"{name} {what}.", hint="Pass a hub id, a folder with config.json, or a .gguf file.")
    return str(path) if looks_local else name


@contextmanager
def _plain_errors(label: str, part: str) -> Iterator[None]:
    """Whatever a third party raises while reading files becomes one `ModelLoadError`."""
    try:
        yield
    except FastDraftError:
        raise
    except Exception as error:  # transformers, safetensors and tokenizers each have their own kinds
        text = str(error).strip().splitlines()
        raise ModelLoadError(
            f"{part} of {label} could not be loaded: {type(error).__name__}: {text[0] if text else ''}",
            hint="Check the id or path, and that its files are whole (a truncated download is the usual cause).",
        ) from error


@contextmanager
def quiet(progress: bool) -> Iterator[None]:
    """transformers' own bars and advice, off while it loads, and its switches put back as they were."""
    with gguf.TURN:  # transformers' switches are one to a process: whoever moves them takes turns
        yield from _quiet(progress)


def _quiet(progress: bool) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]

    def bar(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Not a disabled bar: tqdm starts its monitor thread all the same.
        return (make if progress else transformers.utils.logging.EmptyTqdm)(*args, **kwargs)

    previous = transformers.utils.logging.set_tqdm_hook(bar)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        transformers.utils.logging.set_tqdm_hook(previous)


def load_config(spec: Model, *, progress: bool = False) -> PretrainedConfig:
    """The config alone, from files or from a loaded model."""
    if spec.loaded:
        borrowed: PretrainedConfig = spec.id.config
        return borrowed
    with _plain_errors(spec.label, "The config"), quiet(progress):
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            _resolve(spec, progress), revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    return config


def load_model(spec: Model, *, device: str, dtype: str, progress: bool = False) -> Loaded:
    """Loads a model, or borrows a loaded one.

    Args:
        spec: Its own device and dtype win over the generator's.
        device: The generator's.
        dtype: The generator's.
        progress: Show transformers' progress bars.

    Raises:
        ModelLoadError: Files that are missing or broken.
        ConfigError: A loaded model together with options that would change it.
    """
    if spec.loaded:
        return _adopt(spec, device, dtype) if spec.take else _borrow(spec, device, dtype)
    wanted = torch_dtype(spec.dtype or dtype)
    target = pick_device(spec.device or device)
    source = _resolve(spec, progress)
    refuse_config(load_config(spec, progress=progress), spec.label)
    # Weights that a checkpoint lacks are drawn from the global generator, which is the user's.
    with _plain_errors(spec.label, "The weights"), quiet(progress), torch.random.fork_rng(devices=[]):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            dtype=wanted,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
            **spec.kwargs,
        )
        model: PreTrainedModel = loaded[0]
        if lacking := sorted(loaded[1]["missing_keys"]):
            raise ModelLoadError(
                f"the weights of {spec.label} lack {len(lacking)} of the model's tensors, such as {lacking[0]}.",
                hint="They would be random numbers; fetch the checkpoint again.",
            )
        if "device_map" not in spec.kwargs:
            model.to(target)  # type: ignore[arg-type]  # transformers wraps nn.Module.to without its types
    model.eval()
    return _describe(model, spec.label, source)


def _given(spec: Model) -> PreTrainedModel:
    model = spec.id
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"a {type(model).__name__} was given as a model, expected a transformers PreTrainedModel, an id or a path."
        )
    return model


def _adopt(spec: Model, device: str, dtype: str) -> Loaded:
    """A model handed over with ``take=True``: moved and converted as asked."""
    model = _given(spec)
    wanted = torch_dtype(spec.dtype or dtype)
    if isinstance(wanted, torch.dtype):
        model.to(wanted)  # type: ignore[arg-type]  # transformers wraps nn.Module.to without its types
    asked = spec.device or device
    if asked != "auto":
        model.to(pick_device(asked))  # type: ignore[arg-type]
    model.eval()
    return _describe(model, spec.label, getattr(model, "name_or_path", "") or "")


def _borrow(spec: Model, device: str, dtype: str) -> Loaded:
    model = _given(spec)
    for option, wanted, actual in (
        ("dtype", torch_dtype(spec.dtype or dtype), model.dtype),
        ("device", _device(spec.device or device), model.device),
    ):
        if wanted not in ("auto", actual):
            raise ConfigError(
                f"{option}={wanted} was asked for a loaded model that has {actual}; a loaded model is not changed.",
                hint=f"Leave {option} out, or hand the model over with take=True.",
            )
    if model.training:
        raise ConfigError(
            "the loaded model is in training mode, where dropout is random.", hint="Call model.eval() first."
        )
    return _describe(model, spec.label, getattr(model, "name_or_path", "") or "")


def _describe(model: PreTrainedModel, label: str, source: str) -> Loaded:
    generation = getattr(model, "generation_config", None)
    fields = generation.to_diff_dict() if generation is not None else {}
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    sampling = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    return Loaded(model, label, source, ids, sampling)


def load_tokenizer(given: Any, loaded: Loaded, spec: Model) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the model's own.

    Raises:
        ModelLoadError: It cannot be read.
        ConfigError: A loaded model whose tokenizer is unknown.
    """
    if given is not None and not isinstance(given, str | os.PathLike):
        if not callable(getattr(given, "decode", None)):
            raise ConfigError(
                f"tokenizer is a {type(given).__name__}, expected a transformers tokenizer, an id or a folder."
            )
        return given  # type: ignore[no-any-return]
    source = os.fspath(given) if given is not None else loaded.source
    if not source:
        raise ConfigError(
            f"the tokenizer of the loaded {loaded.label} is not known.",
            hint="Pass tokenizer= beside the model.",
        )
    with _plain_errors(source, "The tokenizer"), quiet(progress=False):
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            source,
            revision=spec.revision if given is None else None,
            trust_remote_code=spec.trust_remote_code,
        )
    return tokenizer

"""Whose parameter wins: the call's keywords, its ``params``, the generator's defaults, the model's own. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fastdraft.config import CallOptions, SamplingParams, first_problem
from fastdraft.errors import ConfigError

__all__ = ["check_names", "resolve_params"]

# What other libraries call our parameters; each gets its own remedy in the error.
_FOREIGN_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "do_sample": "temperature (0 is greedy)",
    "temp": "temperature",
    "num_speculative_tokens": "gamma",
    "num_assistant_tokens": "gamma",
    "num_draft_tokens": "gamma",
    "prompt_lookup_num_tokens": "gamma, with draft=NGram()",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "assistant_model": "Generator(target, draft=...)",
    "response_format": "output_type",
    "guided_json": "output_type",
    "num_return_sequences": "batch(prompts, n=...)",
}


def resolve_params(
    params: SamplingParams | None,
    overrides: Mapping[str, Any],
    *,
    defaults: SamplingParams,
    model: Mapping[str, Any],
) -> SamplingParams:
    """Merges one call's parameters: overrides, then ``params``, then ``defaults``, then the model's own.

    Args:
        params: The call's parameters, or None.
        overrides: The call's keywords.
        defaults: The generator's parameters.
        model: Fields of the model's ``generation_config`` under our names.

    Raises:
        ConfigError: A field that does not exist, or a value that cannot be used.
    """
    check_names(overrides)
    if params is not None and not isinstance(params, SamplingParams):
        raise ConfigError(
            f"params is a {type(params).__name__}, expected SamplingParams.",
            hint="Pass SamplingParams(...) or keywords such as temperature=0.",
        )
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    fields |= {k: v for k, v in model.items() if v is not None}
    for layer in (defaults, params):
        if layer is not None:
            fields |= {k: getattr(layer, k) for k in layer.model_fields_set if not _unset(k, getattr(layer, k))}
    fields |= {k: v for k, v in overrides.items() if not _unset(k, v)}
    try:
        return SamplingParams.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from error


def check_names(overrides: Mapping[str, Any]) -> None:
    """Refuses keywords that are no field of `SamplingParams`.

    Raises:
        ConfigError: Names the nearest of ours.
    """
    for name in overrides:
        if name not in SamplingParams.model_fields:
            raise ConfigError(f"unknown parameter {name!r}.", hint=_nearest(name))


def _unset(name: str, value: Any) -> bool:
    """None means "from the layer below", but for the fields in which it says something."""
    return value is None and name not in {"seed", "logprobs", "source"}


def _nearest(name: str) -> str:
    if name in _FOREIGN_NAMES:
        return f"Here it is called {_FOREIGN_NAMES[name]}."
    known = sorted(CallOptions.__annotations__)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else f"Known are: {', '.join(known)}."

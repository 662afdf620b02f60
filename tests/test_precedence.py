"""Whose parameter wins."""

from __future__ import annotations

from typing import Any

import pytest

from fastdraft import ConfigError, SamplingParams
from fastdraft.precedence import resolve_params

DEFAULTS = SamplingParams(max_tokens=50, top_k=5)
MODEL = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


def _resolve(params: SamplingParams | None = None, **overrides: Any) -> SamplingParams:
    return resolve_params(params, overrides, defaults=DEFAULTS, model=MODEL)


def test_overrides_then_params_then_defaults_then_the_models_own() -> None:
    found = _resolve(SamplingParams(top_k=3, max_tokens=9), max_tokens=7)
    assert (found.max_tokens, found.top_k, found.top_p, found.temperature) == (7, 3, 0.8, 0.7)
    assert (_resolve().max_tokens, _resolve().top_k) == (50, 5)


def test_none_leaves_a_parameter_to_the_layer_below() -> None:
    found = _resolve(max_tokens=None, stop=None, stop_token_ids=None, logit_bias=None, top_k=None)
    assert (found.max_tokens, found.stop, found.stop_token_ids, found.top_k) == (50, (), (), 5)


def test_a_misspelt_keyword_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        _resolve(max_new_tokens=3)
    with pytest.raises(ConfigError, match="temperature"):
        _resolve(temprature=3)

"""Prepacked layers give a plain layer's bits, and a row's bits are the same in every company."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from fastdraft import Generator
from fastdraft.models.prepacked import PrepackedLinear, prepack
from tests import tiny

SHAPES = ((64, 64), (320, 64), (64, 128), (48, 32), (7, 33), (1, 64), (256, 640))  # outputs, inputs


def packs() -> bool:
    """Whether this machine packs a plain layer."""
    try:
        return replaced(layer(64, 64)) == 1
    except (RuntimeError, AttributeError):
        return False


def layer(outputs: int, inputs: int, *, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(outputs + inputs)
        return nn.Sequential(nn.Linear(inputs, outputs, bias=bias)).to(dtype).requires_grad_(False)


def replaced(module: nn.Module) -> int:
    return prepack(module, "test")


def rows(count: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, count, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


needs_kernels = pytest.mark.skipif(not packs(), reason="this machine packs nothing")


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_are_those_of_a_plain_layer_from_two_rows_on(outputs: int, inputs: int, bias: bool) -> None:
    module = layer(outputs, inputs, bias=bias)
    xs = [rows(count, inputs, seed) for seed, count in enumerate((2, 3, 4, 5, 8, 9, 17))]
    with torch.inference_mode():
        expected = [module(x) for x in xs]
        if not replaced(module):
            pytest.skip("a shape this machine refuses")
        assert all(torch.equal(module(x), want) for x, want in zip(xs, expected, strict=True))


@needs_kernels
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_rows_bits_are_the_same_alone_and_in_every_company(outputs: int, inputs: int) -> None:
    module = layer(outputs, inputs)
    if not replaced(module):
        pytest.skip("a shape this machine refuses")
    mine = rows(1, inputs)
    with torch.inference_mode():
        alone = module(mine)
        assert alone.shape == (1, 1, outputs)
        for count in range(2, 10):
            for place in (0, count - 1):
                company = rows(count, inputs, seed=count)
                company[:, place] = mine[:, 0]
                assert torch.equal(module(company)[:, place], alone[:, 0]), (count, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_only_bfloat16_is_packed(dtype: torch.dtype) -> None:
    module = layer(64, 64, dtype=dtype)
    before = module[0]  # type: ignore[index]
    assert replaced(module) == 0
    assert module[0] is before  # type: ignore[index]


class Wrong(PrepackedLinear):
    """Right at one row, wrong at nine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x.shape[-2] == 9)


class Missing(PrepackedLinear):
    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


@needs_kernels
@pytest.mark.parametrize(("broken", "why"), [(Wrong, "differ from a plain layer's"), (Missing, "no attribute")])
def test_a_layer_that_fails_its_check_stays_and_the_log_says_why(
    broken: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fastdraft.models.prepacked.PrepackedLinear", broken)
    module = nn.Sequential(*(child for _ in range(3) for child in layer(64, 64).children()))
    x = rows(3, 64)
    with torch.inference_mode(), caplog.at_level(logging.INFO, logger="fastdraft"):
        expected = module(x)
        assert replaced(module) == 0
        assert torch.equal(module(x), expected)
    assert all(type(child) is nn.Linear for child in module)
    (record,) = caplog.records  # once for a shape, not for each layer
    assert (record.message, record.model, record.shape) == ("prepack_refused", "test", (64, 64))  # type: ignore[attr-defined]
    assert why in record.reason  # type: ignore[attr-defined]


def test_a_borrowed_model_is_left_as_it_is(tokenizer: Any) -> None:
    model = tiny.model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=True)

    def state() -> Any:
        return [type(m) for m in model.modules()], {n: (p.data_ptr(), p.clone()) for n, p in model.named_parameters()}

    kinds, before = state()
    with Generator(model, model, tokenizer=tokenizer) as generator:
        generator.generate([5, 6, 7], max_tokens=8, temperature=0, gamma=2, ignore_eos=True)
        assert state()[0] == kinds
    kinds_after, after = state()
    assert kinds_after == kinds
    assert before.keys() == after.keys()
    for name, (place, values) in before.items():
        assert after[name][0] == place
        assert torch.equal(after[name][1], values)

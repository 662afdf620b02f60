"""Rounded layers: near what they stand for, and a row never depends on its batch mates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastdraft.models import quantised
from fastdraft.models.quantised import GROUP, Int4Linear, Int8Linear, MixedLinear, round_int4, round_int8

SHAPES = ((64, 64), (320, 128), (48, 192))  # outputs, inputs
DTYPES = (torch.bfloat16, torch.float32)
# What the output's own dtype rounds away, beside rounding of weights and rows.
ULP = {torch.bfloat16: 2.0**-8, torch.float32: 1e-6}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int8(weight: Tensor, bias: Tensor | None = None, *, fine: bool = False) -> Int8Linear:
    return Int8Linear(round_int8(weight), bias, fine=fine)


def int4(weight: Tensor, bias: Tensor | None = None) -> Int4Linear:
    rounded = round_int4(weight)
    assert rounded is not None
    return Int4Linear(rounded, bias)


MAKERS = {"int8": int8, "int4": int4}


def dequantised(rounded: dict[str, Tensor]) -> Tensor:
    """What 4-bit weights stand for, digit by digit: (digit - 8) * scale + zero."""
    outputs, halves = rounded["weight"].shape
    weight = torch.empty(outputs, 2 * halves)
    weight[:, ::2] = (rounded["weight"] >> 4).float()
    weight[:, 1::2] = (rounded["weight"] & 15).float()
    scale, zero = rounded["scales"].float().unbind(-1)  # [groups, outputs]
    group = torch.arange(2 * halves) // GROUP
    return (weight - 8) * scale.T[:, group] + zero.T[:, group]


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (7, 33), (1, 64)])
def test_int8_is_as_near_as_its_steps_allow(
    outputs: int, inputs: int, dtype: torch.dtype, bias: bool, fine: bool
) -> None:
    weight, x = normal(outputs, inputs, seed=1, dtype=dtype), normal(1, 9, inputs, seed=2, dtype=dtype)
    offset = normal(outputs, seed=3, dtype=dtype) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    y = int8(weight, offset, fine=fine)(x)
    assert y.shape == exact.shape and y.dtype == dtype
    # Half a step of each row times all weights, and half a step of each weight times all of the row, and both.
    row_step, weight_step = x.double().abs().amax(-1) / 127, weight.double().abs().amax(1) / 127
    if fine:
        row_step /= 254
    bound = (
        row_step[..., None] / 2 * weight.double().abs().sum(1)
        + weight_step / 2 * x.double().abs().sum(-1)[..., None]
        + row_step[..., None] * weight_step * inputs / 4
    )
    assert ((y.double() - exact).abs() <= bound + ULP[dtype] * exact.abs() + 1e-5).all()
    assert (y.double() - exact).pow(2).mean() < (0.015 * exact).pow(2).mean()


def test_a_second_digit_keeps_what_an_outlier_would_round_away() -> None:
    weight, x = normal(64, 128), normal(1, 6, 128, seed=2)
    x[..., 5] = 300.0
    weight[:, 5] = 0  # the outlier itself says nothing
    weight = round_int8(weight)["weight"].float()  # exact in 8 bits, so that only the rows are rounded
    exact = torch.nn.functional.linear(x, weight)
    coarse, fine = ((int8(weight, fine=digits)(x) - exact).norm() / exact.norm() for digits in (False, True))
    assert coarse > 0.5
    assert fine < coarse / 100


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int4_is_the_product_with_its_dequantised_weights(
    outputs: int, inputs: int, dtype: torch.dtype, bias: bool
) -> None:
    weight = normal(outputs, inputs, seed=1, dtype=dtype)
    x = normal(1, 9, inputs, seed=2, dtype=torch.bfloat16).to(dtype)  # its rows are taken in bfloat16
    offset = normal(outputs, seed=3, dtype=dtype) if bias else None
    rounded = round_int4(weight)
    assert rounded is not None
    exact = torch.nn.functional.linear(x.float(), dequantised(rounded), None if offset is None else offset.float())
    y = Int4Linear(rounded, offset)(x)
    assert y.shape == exact.shape and y.dtype == dtype
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


def test_int4_rounds_to_the_nearest_of_sixteen_values() -> None:
    weight = normal(64, 128)
    rounded = round_int4(weight)
    assert rounded is not None
    assert rounded["weight"].shape == (64, 64) and rounded["weight"].dtype == torch.uint8
    assert rounded["scales"].shape == (2, 64, 2) and rounded["scales"].dtype == torch.bfloat16
    near = dequantised(rounded)
    values = near.view(64, 2, GROUP)
    assert max(len(group.unique()) for row in values for group in row) <= 16
    scale = rounded["scales"][..., 0].float().T[:, :, None]
    # Half a step, but for the few that a narrower range clips.
    off = (weight.view(64, 2, GROUP) - values).abs() > scale * 0.51
    assert off.float().mean() < 0.05
    # Never worse than the plain range from least to greatest.
    groups = weight.view(64, 2, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    assert (near.view_as(groups) - groups).pow(2).sum() <= 1.02 * (plain - groups).pow(2).sum()


@pytest.mark.parametrize("rounding", MAKERS)
def test_extremes_are_kept(rounding: str) -> None:
    """A constant row, a row of zeros and a row with one large weight."""
    weight = torch.zeros(16, 64)
    weight[1], weight[2, 5], weight[3] = 0.5, 100.0, -1e-3
    x = normal(1, 2, 64, dtype=torch.bfloat16)
    y = MAKERS[rounding](weight)(x)
    exact = torch.nn.functional.linear(x.float(), weight)
    assert y.isfinite().all()
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
    silent = MAKERS[rounding](weight)(torch.zeros(1, 3, 64, dtype=torch.bfloat16))
    torch.testing.assert_close(silent, torch.zeros_like(silent), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fine", [False, True])
def test_what_is_not_finite_stays_in_its_row(fine: bool) -> None:
    x, layer = normal(1, 5, 64), int8(normal(64, 64, seed=1), fine=fine)
    clean = layer(x)
    x[0, 2, 7] = torch.nan
    y = layer(x)
    assert not y[0, 2].isfinite().any()
    assert torch.equal(y[0, [0, 1, 3, 4]], clean[0, [0, 1, 3, 4]])


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_an_int4_rows_bits_are_the_same_alone_and_in_every_company(outputs: int, inputs: int) -> None:
    layer = int4(normal(outputs, inputs, seed=1), normal(outputs, seed=3))
    mine = normal(1, 1, inputs, seed=2, dtype=torch.bfloat16)
    alone = layer(mine)
    for count in (2, 3, 4, 5, 8, 9, 16, 33, 64):
        company = normal(1, count, inputs, seed=count, dtype=torch.bfloat16)
        company[:, -1] = mine[:, 0]
        assert torch.equal(layer(company)[:, -1], alone[:, 0]), count


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (7, 33)])
def test_an_int8_rows_bits_are_the_same_alone_and_in_every_company(
    outputs: int, inputs: int, dtype: torch.dtype, fine: bool
) -> None:
    layer = int8(normal(outputs, inputs, seed=1, dtype=dtype), normal(outputs, seed=3, dtype=dtype), fine=fine)
    mine = normal(1, 1, inputs, seed=2, dtype=dtype)
    alone = layer(mine)
    for count in (2, 3, 4, 5, 8, 9, 16, 33, 64, 100):
        for place in (0, count - 1):
            # Mates a thousand times larger: one scale for all rows would leave nothing of mine.
            company = normal(1, count, inputs, seed=count, dtype=dtype) * 1000
            company[:, place] = mine[:, 0]
            assert torch.equal(layer(company)[:, place], alone[:, 0]), (count, place)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (64, 33), (40, 64), (7, 64)])
def test_int4_leaves_shapes_it_has_no_kernel_for(outputs: int, inputs: int) -> None:
    assert round_int4(normal(outputs, inputs)) is None


@pytest.mark.parametrize("round_", [round_int4, round_int8])
def test_slices_change_nothing(round_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = normal(208, 64), normal(1, 3, 64, dtype=torch.bfloat16)
    whole = round_(weight)
    expected = (Int4Linear if round_ is round_int4 else Int8Linear)(whole, None)(x)
    monkeypatch.setattr(quantised, "_SLICE", 64 * 64)  # 64 rows, 64, 64 and 16
    sliced = round_(weight)
    assert whole.keys() == sliced.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, sliced[name]), name
    assert torch.equal((Int4Linear if round_ is round_int4 else Int8Linear)(sliced, None)(x), expected)


def test_mixed_layers_are_int4_for_few_rows_and_int8_for_many() -> None:
    weight = normal(64, 64)
    few, many = int4(weight), int8(weight)
    mixed = MixedLinear(few, many, 4)
    for count in range(1, 8):
        x = normal(1, count, 64, seed=count, dtype=torch.bfloat16)
        assert torch.equal(mixed(x), (few if count <= 4 else many)(x))
        assert not torch.equal(few(x), many(x))

"""Linear layers with int8 or int4 weights.

int8: each output's weights have a scale; each row of the input is rounded to 8 bits with a scale of its own, so a row's
result never depends on its batch mates (one scale for all rows, as ``quantize_dynamic`` takes it, would let drafted
tokens change the target's logits). Activations are *unsigned* with zero point 128: oneDNN computes signed ones with its
reference kernel, hundreds of times slower.

int4: weights alone, scale and zero for each group of inputs; of a few clipped ranges the best by squared error.

Shapes: T rows, K inputs, N outputs, C groups of inputs, G inputs of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fastdraft.models.linears import fill_rows

__all__ = ["GROUP", "Int4Linear", "Int8Linear", "MixedLinear", "Rounded", "Rounding", "round_int4", "round_int8"]

Rounded: TypeAlias = Mapping[str, Tensor]
Rounding: TypeAlias = Literal["int8", "int4"]

GROUP = 64  # inputs that share a scale: at 32, scales are a fifth of all bytes read
_SLICE = 1 << 23  # weights rounded at once: bounds what a whole vocabulary's layer takes while it is made
_ZERO, _TOP = 128, 127.0
_STEPS = 126.0  # of a row: its scale, in bfloat16, may be a little too small
_MIDDLE = _ZERO + 0.5  # the cast to uint8 cuts: half up
_FINER = 254  # the second digit's steps in one of the first: what is left over is at most half a step


def _by_slices(weight_NK: Tensor, make: Callable[[Tensor], dict[str, Tensor]], **axes: int) -> dict[str, Tensor]:
    """``make`` over blocks of rows, its tensors joined along axis 0, or the one named."""
    rows = max(64, _SLICE // weight_NK.shape[1] // 64 * 64)
    parts = [make(weight_NK[first : first + rows].float()) for first in range(0, len(weight_NK), rows)]
    return {name: torch.cat([part[name] for part in parts], axes.get(name, 0)) for name in parts[0]}


def round_int8(weight_NK: Tensor) -> dict[str, Tensor]:
    """Rounds weights to 8 bits, a scale for each output.

    Returns:
        ``weight`` int8 [N, K] and ``scale`` float32 [N].
    """

    def make(wide_NK: Tensor) -> dict[str, Tensor]:
        scale_N = wide_NK.abs().amax(1).clamp_(min=1e-12) / _TOP
        return {"weight": (wide_NK / scale_N[:, None]).round_().to(torch.int8), "scale": scale_N}

    return _by_slices(weight_NK, make)


def _round_rows(x: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """Rows in 8-bit steps of their own size.

    Args:
        x: [..., T, K].
        digits: One, or two: of what the first leaves over, a `_FINER`-th of a step each, as T rows more.

    Returns:
        uint8 [..., digits * T, K] with `_ZERO` for zero, and the steps, [..., T, 1]: bfloat16 for rows that are, whose
        products may then stay in it, else float32.
    """
    wide = x.dtype if x.dtype is torch.bfloat16 else torch.float32
    scale_T1 = x.abs().amax(-1, keepdim=True).to(wide).mul_(1 / _STEPS).clamp_(min=torch.finfo(wide).tiny)
    steps_TK = x.to(torch.float32, copy=True).mul_(1 / scale_T1.float()).add_(_MIDDLE)
    digit_TK = steps_TK.to(torch.uint8)
    if digits == 2:
        # What was cut off is between 0 and 1; half of it is nothing.
        second_TK = steps_TK.sub_(digit_TK).mul_(_FINER).add_(_MIDDLE - _FINER / 2).to(torch.uint8)
        digit_TK = torch.cat([digit_TK, second_TK], -2)
    return digit_TK, scale_T1


class Int8Linear(nn.Module):
    """``x @ weight.T + bias`` with 8-bit weights and rows.

    Args:
        rounded: What `round_int8` gave.
        bias_N: Or None.
        fine: Give each row a second 8-bit digit for what the first leaves over, as one more row of the same product:
            for inputs with outliers, beside which one digit would round all others away.
    """

    def __init__(self, rounded: Rounded, bias_N: Tensor | None, *, fine: bool = False) -> None:
        super().__init__()
        self._weight: Any = torch.ops.onednn.qlinear_prepack(rounded["weight"], None)
        self._scale_N = rounded["scale"].clone()
        self._zero_N = torch.zeros(len(self._scale_N), dtype=torch.int32)
        self._bias_N = None if bias_N is None else bias_N.float()
        self._fine = fine

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, K] to [..., T, N]."""
        rows = x.shape[-2]
        digits_TK, scale_T1 = _round_rows(x, 2 if self._fine else 1)
        # Where no sum follows, written at half the width: a quarter of the time of many rows.
        bare = x.dtype is torch.bfloat16 and self._bias_N is None and not self._fine
        y_TN = self._product(digits_TK, torch.bfloat16 if bare else torch.float32)
        if self._fine:
            y_TN = y_TN[..., :rows, :].add_(y_TN[..., rows : 2 * rows, :], alpha=1 / _FINER)
        y_TN = y_TN[..., :rows, :]
        y_TN *= scale_T1.to(y_TN.dtype)
        if self._bias_N is not None:
            y_TN += self._bias_N
        return y_TN.to(x.dtype)

    def _product(self, digit_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """Integers, exactly, then scaled by output; of rows that were added for speed there is a result too."""
        y_TN: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            fill_rows(digit_TK),
            1.0,
            _ZERO,
            self._weight,
            self._scale_N,
            self._zero_N,
            None,
            1.0,
            0,
            dtype,
            "none",
            [],
            "",
        )
        return y_TN


def round_int4(weight_NK: Tensor) -> dict[str, Tensor] | None:
    """Rounds weights to 4 bits, scale and zero for each group of `GROUP` inputs.

    Returns:
        ``weight`` uint8 [N, K/2], even inputs in the high half, and ``scales`` bfloat16 [C, N, 2]; None where `GROUP`
        does not divide K or 16 does not divide N.
    """
    if weight_NK.shape[1] % GROUP or weight_NK.shape[0] % 16:
        return None
    return _by_slices(weight_NK, _int4_rows, scales=1)


def _int4_rows(wide_NK: Tensor) -> dict[str, Tensor]:
    wide_NCG = wide_NK.unflatten(1, (-1, GROUP))
    low_NC1, high_NC1 = wide_NCG.amin(-1, keepdim=True), wide_NCG.amax(-1, keepdim=True)
    middle_NC1, half_NC1 = (low_NC1 + high_NC1) / 2, (high_NC1 - low_NC1) / 2
    best_NC1 = torch.full_like(low_NC1, torch.inf)
    scale_NC1, zero_NC1 = torch.zeros_like(low_NC1), torch.zeros_like(low_NC1)
    for share in (1.0, 0.92, 0.84):  # a narrower range clips a few weights and rounds the rest finer
        # In bfloat16, as the kernel reads them: value = (digit - 8) * scale + zero.
        step_NC1 = (half_NC1 * share * (2 / 15)).clamp(min=1e-12).bfloat16().float()
        origin_NC1 = (middle_NC1 - half_NC1 * share + 8 * step_NC1).bfloat16().float()
        error_NCG = _digits(wide_NCG, step_NC1, origin_NC1).sub_(8).mul_(step_NC1).add_(origin_NC1).sub_(wide_NCG)
        error_NC1 = error_NCG.square_().sum(-1, keepdim=True)
        better_NC1 = error_NC1 < best_NC1
        best_NC1 = torch.where(better_NC1, error_NC1, best_NC1)
        scale_NC1 = torch.where(better_NC1, step_NC1, scale_NC1)
        zero_NC1 = torch.where(better_NC1, origin_NC1, zero_NC1)
    digit_NK = _digits(wide_NCG, scale_NC1, zero_NC1).to(torch.uint8).flatten(1)
    return {
        "weight": digit_NK[:, ::2] << 4 | digit_NK[:, 1::2],
        "scales": torch.cat([scale_NC1, zero_NC1], -1).transpose(0, 1).bfloat16().contiguous(),
    }


def _digits(wide_NCG: Tensor, scale_NC1: Tensor, zero_NC1: Tensor) -> Tensor:
    return ((wide_NCG - zero_NC1) / scale_NC1).add_(8).round_().clamp_(0, 15)


class Int4Linear(nn.Module):
    """``x @ weight.T + bias`` with 4-bit weights.

    Args:
        rounded: What `round_int4` gave.
        bias_N: Or None.
    """

    def __init__(self, rounded: Rounded, bias_N: Tensor | None) -> None:
        super().__init__()

        def pack(pairs_NK: Tensor) -> dict[str, Tensor]:
            digit_NK = torch.stack([pairs_NK.int() >> 4, pairs_NK.int() & 15], -1).flatten(1)
            return {"packed": torch.ops.aten._convert_weight_to_int4pack_for_cpu(digit_NK, 1)}

        self._weight = _by_slices(rounded["weight"], pack)["packed"]
        self._scales_CN2 = rounded["scales"].clone()
        self._bias_N = bias_N
        self._outputs = len(self._weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, K] to [..., T, N]."""
        x_TK = x.flatten(0, -2).to(torch.bfloat16)
        y_TN = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TK, self._weight, GROUP, self._scales_CN2).to(x.dtype)
        if self._bias_N is not None:
            y_TN += self._bias_N
        out: Tensor = y_TN.view(*x.shape[:-1], self._outputs)
        return out


class MixedLinear(nn.Module):
    """int4 for few rows, where reading weights is all, and int8 for many, where arithmetic is; for drafts alone.

    Args:
        few: Used for at most ``most`` rows.
        many: Used beyond.
        most: Rows.
    """

    def __init__(self, few: Int4Linear, many: Int8Linear, most: int) -> None:
        super().__init__()
        self._few, self._many, self._most = few, many, most

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, K] to [..., T, N]."""
        made: Tensor = (self._few if x.shape[:-1].numel() <= self._most else self._many)(x)
        return made

"""How busy a device is, where its driver tells."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["find_gauge"]


def find_gauge(device: torch.device) -> Callable[[], float] | None:
    """A function that reads a GPU's utilisation, 0 to 1, from NVML; None for other devices, and without NVML."""
    if device.type != "cuda":
        return None

    def read() -> float:
        return float(torch.cuda.utilization(device)) / 100

    try:
        read()
    except Exception:  # no nvidia-ml-py, or whatever NVML says of a device it cannot read
        return None
    return read

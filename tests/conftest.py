"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdraft.models import store
from tests import tiny


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, converted into the cache once."""
    return store.load_path("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Any:
    """The model itself in float32, shared and never changed."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tiny byte-level tokenizer."""
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of public workloads and cases; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the shared folder is absent")
    return folder


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    """We are a guest: no test may find torch's global switches moved."""
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    state = torch.get_rng_state()
    yield
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == dtype
    assert torch.is_grad_enabled() == grad
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"

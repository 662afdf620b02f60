"""The lean forward gives the bits of transformers' own, and steps aside where somebody watches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastdraft import Generator, NGram
from fastdraft.attention.sdpa import SdpaAttention
from fastdraft.models.kernels import fasten
from fastdraft.models.lean import lean_forward
from fastdraft.models.runner import Feed, Runner, own_forward
from tests import tiny

FAMILY = {
    "llama": {"attention_bias": True, "mlp_bias": True, "sliding_window": 8},  # which Llama's attention never reads
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
}
LONG, SHORT = [(7 * i) % 300 + 3 for i in range(45)], [9, 8, 7]


def _logits(runner: Runner) -> list[torch.Tensor]:
    """A prompt in two chunks beside another, then rows 1 and 6 with drafted ones among them."""
    long, short = runner.table(), runner.table()
    runner.reserve(long, 64)
    runner.reserve(short, 16)
    with torch.inference_mode():
        return [
            runner.forward([Feed(LONG[:20])], [long], [3]).logits_RV,
            runner.forward([Feed(LONG[20:]), Feed(SHORT)], [long, short], [1, 3]).logits_RV,
            runner.forward([Feed([5], torch.tensor([6, 7, 8, 9, 10])), Feed([4])], [long, short], [6, 1]).logits_RV,
        ]


def _runner(model: Any) -> Runner:
    with torch.no_grad():
        layers = own_forward(model, [1, 2])[1]
    return Runner(model, vocabulary=tiny.VOCABULARY, layers=layers, blocks=16, backend=SdpaAttention())


@pytest.mark.parametrize("form", ["plain", "none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", sorted(FAMILY))
def test_the_same_bits(architecture: str, dtype: torch.dtype, form: Any) -> None:
    model = tiny.model(architecture, dtype=dtype, **tiny.WIDE | FAMILY[architecture])
    if form != "plain":
        fasten(model, form, label="a", source="")
    lean = _logits(_runner(model))
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    whole = _logits(_runner(model))
    handle.remove()
    assert all(torch.equal(one, other) for one, other in zip(lean, whole, strict=True))


def test_hooks_are_called_also_those_that_come_later(tokenizer: Any) -> None:
    model = tiny.model("qwen2")
    seen: list[int] = []
    with Generator(model, NGram(), tokenizer=tokenizer) as generator:
        expected = generator.generate(LONG, temperature=0, max_tokens=8, ignore_eos=True)
        handle = model.model.layers[1].self_attn.register_forward_hook(lambda *_: seen.append(1))
        watched = generator.generate(LONG, temperature=0, max_tokens=8, ignore_eos=True)
        handle.remove()
        calls = len(seen)
        generator.generate(LONG, temperature=0, max_tokens=8, ignore_eos=True)
    assert watched.token_ids == expected.token_ids and calls == len(seen) > 0


def test_what_is_not_of_the_family_runs_as_it_is() -> None:
    assert lean_forward(tiny.model("gemma3_text")) is None and lean_forward(tiny.model("gpt2")) is None
    model = tiny.model("llama")
    assert lean_forward(model) is not None
    assert lean_forward(model.train()) is None
    other = tiny.model("llama")
    other.model.layers[0].mlp.forward = lambda x: x
    assert lean_forward(other) is None


def test_a_class_of_its_own_may_do_anything_in_its_forward() -> None:
    model = tiny.model("llama")

    class Own(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = Own
    assert lean_forward(model) is None

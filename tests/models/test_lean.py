"""The lean forward gives the bits of transformers' own, and steps aside where somebody watches."""

from __future__ import annotations

import sys
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


ODD = {"intermediate_size": 43}  # activations of a row do not fill vectors
ROPE = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}


@pytest.mark.parametrize(
    ("dtype", "form", "fields"),
    [
        (torch.float32, "plain", {}),
        (torch.float32, "plain", ODD | ROPE),
        (torch.float32, "int8", tiny.WIDE),
        (torch.float16, "plain", ODD),
        (torch.bfloat16, "plain", ODD),
        (torch.bfloat16, "plain", tiny.WIDE | ROPE),
        (torch.bfloat16, "none", tiny.WIDE),
        (torch.bfloat16, "int8", tiny.WIDE),
    ],
)
@pytest.mark.parametrize("architecture", sorted(FAMILY))
def test_the_same_bits(architecture: str, dtype: torch.dtype, form: Any, fields: Any) -> None:
    model = tiny.model(architecture, dtype=dtype, **FAMILY[architecture] | fields)
    if form != "plain":
        fasten(model, form, label="a", source="")
    lean, calls = _calls(model)
    assert calls == 0, "its modules were called"
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    whole, calls = _calls(model)
    handle.remove()
    assert calls == 3
    assert all(torch.equal(one, other) for one, other in zip(lean, whole, strict=True))


def _calls(model: Any) -> tuple[list[torch.Tensor], int]:
    """The logits, and how often transformers' own forward ran for them."""
    runner = _runner(model)
    called: list[int] = []
    own = type(model).forward

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return own(self, *args, **kwargs)

    runner._model.forward = count.__get__(runner._model)
    return _logits(runner), len(called)


@pytest.mark.parametrize("module", ["model.layers.0.mlp", "model.norm", "lm_head", None])
def test_hooks_are_called_also_those_that_come_later(tokenizer: Any, module: str | None) -> None:
    model = tiny.model("qwen2")
    seen: list[torch.Size] = []

    def hook(_: Any, given: Any, made: Any) -> None:
        if module is not None or isinstance(made, torch.Tensor):
            seen.append(given[0].shape)

    def register() -> Any:
        if module is None:
            return torch.nn.modules.module.register_module_forward_hook(hook)
        return model.get_submodule(module).register_forward_hook(hook)

    with Generator(model, NGram(), tokenizer=tokenizer) as generator:
        runner = generator._worker._engine._runner
        expected = generator.generate(LONG, temperature=0, max_tokens=8, ignore_eos=True)
        assert not runner._lean.watched()
        handle = register()
        watched = generator.generate(LONG, temperature=0, max_tokens=8, ignore_eos=True)
        assert watched.token_ids == expected.token_ids and seen
        handle.remove()
        seen.clear()
        again = generator.generate(LONG, temperature=0, max_tokens=8, ignore_eos=True)
        assert again.token_ids == expected.token_ids and not seen and not runner._lean.watched()


def test_building_calls_no_hook() -> None:
    model = tiny.model("qwen3")
    seen: list[int] = []
    handles = [module.register_forward_hook(lambda *_: seen.append(1)) for module in model.modules()]
    assert lean_forward(model) is not None and not seen
    for handle in handles:
        handle.remove()


def test_fewer_layers_than_there_are() -> None:
    model = tiny.model("llama")
    model.config.num_hidden_layers = 1
    lean, calls = _calls(model)
    assert calls == 0
    with torch.no_grad():
        whole = model(torch.tensor([LONG[:20]])).logits[0, -3:]
    assert torch.allclose(lean[0], whole, atol=1e-4)


def test_what_is_not_of_the_family_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lean_forward(tiny.model("gemma3_text")) is None and lean_forward(tiny.model("gpt2")) is None
    model = tiny.model("llama")
    assert lean_forward(model) is not None
    assert lean_forward(model.train()) is None
    model.eval()
    modeling = sys.modules[type(model).__module__]
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
        assert lean_forward(model) is None
    with monkeypatch.context() as patch:
        patch.setattr(modeling.LlamaMLP, "forward", lambda self, x: x)
        assert lean_forward(model) is None
    with monkeypatch.context() as patch:
        patch.delattr(model.model.layers[0].self_attn, "scaling")  # as if it had another name
        assert lean_forward(model) is None
    model.model.layers[0].mlp.forward = lambda x: x
    assert lean_forward(model) is None


@pytest.mark.parametrize("path", ["", "model", "model.layers.1", "model.layers.1.mlp", "model.norm"])
def test_a_class_of_its_own_may_do_anything_in_its_forward(path: str) -> None:
    model = tiny.model("llama")
    part = model.get_submodule(path)
    part.__class__ = type("Own", (type(part),), {})
    assert lean_forward(model) is None


def test_a_weight_that_is_loaded_later_is_seen() -> None:
    model, other = tiny.model("llama"), tiny.model("llama", seed=1)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    runner = _runner(model)
    before = _logits(runner)
    model.load_state_dict(other.state_dict(), assign=True)
    after, fresh = _logits(runner), _logits(_runner(other))
    assert not torch.equal(before[0], after[0]) and torch.equal(after[0], fresh[0])

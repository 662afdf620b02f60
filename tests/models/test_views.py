"""A borrowed model is never changed, and stays usable while a generator runs over its weights."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch

from fastdraft import Generator, NGram
from fastdraft.models.views import view
from tests import tiny

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]


def _fingerprint(model: Any) -> tuple[str, dict[str, Any], set[str]]:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest(), model.config.to_dict(), {name for name, _ in model.named_modules()}


def test_the_original_is_untouched_while_borrowed_and_after(tokenizer: Any) -> None:
    model = tiny.model("llama", tie_word_embeddings=True)
    before, implementation = _fingerprint(model), model.config._attn_implementation
    expected = tiny.greedy(model, PROMPT, 16)
    generator = Generator(model, [NGram(), model], tokenizer=tokenizer)
    assert model.config._attn_implementation == implementation
    out = generator.generate(PROMPT, temperature=0, max_tokens=16, gamma=4, ignore_eos=True)
    assert list(out.token_ids) == expected == tiny.greedy(model, PROMPT, 16)
    generator.close()
    assert _fingerprint(model) == before
    assert model.config._attn_implementation == implementation
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_two_generators_and_the_owner_use_one_model_at_once(tokenizer: Any) -> None:
    model = tiny.model("qwen2")
    expected = tiny.greedy(model, PROMPT, 32)
    outcomes: list[list[int]] = []

    def ours() -> None:
        with Generator(model, "auto", tokenizer=tokenizer) as generator:
            for _ in range(5):
                out = generator.generate(PROMPT, temperature=0, max_tokens=32, ignore_eos=True)
                outcomes.append(list(out.token_ids))

    def theirs() -> None:
        for _ in range(5):
            outcomes.append(tiny.greedy(model, PROMPT, 32))

    threads = [threading.Thread(target=work) for work in (ours, ours, theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [expected] * 15


def test_a_view_shares_tensors_and_owns_its_configs() -> None:
    model = tiny.model("gemma3_text")
    seen = view(model, "eager")
    assert [p.data_ptr() for p in seen.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert seen.config is not model.config
    assert seen.model.layers[0].self_attn.config is seen.config
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.allclose(seen(ids).logits, model(ids).logits, atol=1e-5)
        model.lm_head.weight.mul_(2)  # a change of the weights is seen by both
        assert torch.allclose(seen(ids).logits, model(ids).logits, atol=1e-5)

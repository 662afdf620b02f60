"""Which kernels run, through the door a user has: `Model(quantization=)`."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fastdraft import ConfigError, DraftModel, Generator, Model, NGram
from fastdraft.models.kernels import fasten
from fastdraft.models.prepacked import PrepackedLinear
from fastdraft.models.quantised import Int8Linear
from tests import tiny
from tests.test_greedy import ARCHITECTURES

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]
TOKENS = 16
MIXED = tuple(f"int4 up to {rows} rows, then int8" for rows in (1, 2, 4, 8))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def saved(path: Path, architecture: str = "llama", dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    wide = {"n_embd": 64} if architecture == "gpt2" else tiny.WIDE
    return tiny.save(path / architecture, tiny.model(architecture, dtype=dtype, **wide | fields), tiny.tokenizer())


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def greedy(generator: Generator, **options: Any) -> tuple[int, ...]:
    options = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True} | options
    return generator.generate(PROMPT, **options).token_ids


def chosen(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """What the log says runs, by model."""
    records = [record for record in caplog.records if record.message == "kernels_chosen"]
    return {record.model: record.kernels for record in records}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("quantization", "runs"),
    [
        (None, ("prepacked",)),
        ("none", ("prepacked",)),
        ("int8", ("int8",)),
        ("int4", ("int4",)),
    ],
)
def test_the_log_says_what_runs_on_a_target(
    quantization: Any, runs: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path)
    with (
        caplog.at_level(logging.INFO, logger="fastdraft"),
        Generator(Model(str(folder), quantization=quantization), None) as generator,
    ):
        assert len(set(greedy(generator))) > 3
    (kernels,) = chosen(caplog).values()
    assert kernels in runs


def test_a_draft_is_quantised_unless_asked_otherwise_and_its_target_never(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = saved(tmp_path / "target"), saved(tmp_path / "draft")
    for spec, runs in (
        (DraftModel(str(draft)), ("int8", "int4", *MIXED)),
        (DraftModel(Model(str(draft), quantization="none")), ("prepacked",)),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="fastdraft"), Generator(str(target), spec) as generator:
            assert greedy(generator, gamma=3) == greedy(generator, gamma=0)
        assert chosen(caplog)[str(target)] == "prepacked"
        assert chosen(caplog)[str(draft)] in runs


def test_a_borrowed_model_runs_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenizer: Any) -> None:
    model = load(saved(tmp_path))
    kinds = [type(module) for module in model.modules()]
    with caplog.at_level(logging.INFO, logger="fastdraft"), Generator(model, model, tokenizer=tokenizer) as generator:
        greedy(generator, gamma=2)
    assert not chosen(caplog)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_plain_weights_are_gone_and_the_embedding_stays(quantization: Any, tie: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, tie_word_embeddings=tie)
    model, plain = load(folder), load(folder)
    ours = weakref.WeakSet(module for module in model.modules() if isinstance(module, nn.Linear))
    weights = [weakref.ref(layer.weight) for layer in ours]
    head = weakref.ref(model.lm_head.weight)
    assert len(weights) == 15
    fasten(model, quantization, label="test", source="")
    gc.collect()
    assert not list(ours)
    alive = [weight() for weight in weights if weight() is not None]
    assert alive == ([model.get_input_embeddings().weight] if tie else [])
    assert (head() is not None) == tie
    ids = torch.tensor([PROMPT])
    assert torch.equal(model.get_input_embeddings()(ids), plain.get_input_embeddings()(ids))
    with torch.inference_mode():
        ours_TV, theirs_TV = model(ids).logits[0].float(), plain(ids).logits[0].float()
    off = (ours_TV - theirs_TV).norm() / theirs_TV.norm()
    assert off < {"none": 0.01, "int8": 0.1, "int4": 0.6}[quantization]
    if quantization == "none":
        assert torch.equal(ours_TV, theirs_TV)


def test_small_tensors_are_no_longer_those_of_the_file(tmp_path: Path) -> None:
    """A mapped file is let go only when nothing points into it."""
    model = load(saved(tmp_path, "qwen2"))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    values = {name: p.clone() for name, p in model.named_parameters()}
    fasten(model, "none", label="test", source="")
    left = dict(model.named_parameters())
    assert [name for name in left if left[name].data_ptr() == before[name]] == ["model.embed_tokens.weight"]
    assert all(torch.equal(p, values[name]) for name, p in left.items())


# Every way a model's code may use its layers: fused projections, caps, scales, layers that are no nn.Linear.
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_runs_prepacked_as_it_ran_plain(architecture: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, architecture)
    model, plain = load(folder), load(folder)
    assert fasten(model, "none", label="test", source="") == "prepacked"
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_runs_quantised(architecture: str, quantization: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path, architecture)
    model, plain = load(folder), load(folder)
    fasten(model, quantization, label="test", source="")
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        ours_TV, theirs_TV = model(ids).logits[0].float(), plain(ids).logits[0].float()
    assert not torch.equal(ours_TV, theirs_TV)
    assert (ours_TV - theirs_TV).norm() / theirs_TV.norm() < {"int8": 0.15, "int4": 0.9}[quantization]


def test_layers_that_int4_has_no_kernel_for_are_prepacked(tmp_path: Path) -> None:
    """Down projections here have 72 inputs, which groups of 64 do not divide."""
    folder = saved(tmp_path, intermediate_size=72)
    model, plain = load(folder), load(folder)
    assert fasten(model, "int4", label="test", source="") == "int4"
    assert isinstance(model.model.layers[0].mlp.down_proj, PrepackedLinear)
    down, theirs = model.model.layers[0].mlp.down_proj, plain.model.layers[0].mlp.down_proj
    x = torch.randn(1, 5, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(down(x), theirs(x))


def test_where_no_layer_has_an_int4_kernel_the_model_is_prepacked(tmp_path: Path) -> None:
    model = load(saved(tmp_path, hidden_size=32, intermediate_size=72, head_dim=8))
    assert fasten(model, "int4", label="test", source="") == "prepacked"


def test_a_kernel_that_computes_wrong_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's does where pairs of products saturate."""
    product = Int8Linear._product
    monkeypatch.setattr(Int8Linear, "_product", lambda self, digit_TK, dtype: product(self, digit_TK, dtype) / 2)
    with pytest.raises(ConfigError, match="computes 32 where 64 is right"):
        Generator(Model(str(saved(tmp_path)), quantization="int8"), None)


def _absent(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("could not run 'onednn::qlinear_prepack'")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_machine_without_kernels_refuses_what_was_asked(
    quantization: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in ("Int8Linear", "Int4Linear"):
        monkeypatch.setattr(f"fastdraft.models.kernels.{layer}", _absent)
    with pytest.raises(ConfigError, match=f"{quantization}.*qlinear_prepack.*Leave quantization out"):
        Generator(Model(str(saved(tmp_path)), quantization=quantization), None)


def test_a_machine_without_kernels_runs_drafts_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for layer in ("Int8Linear", "Int4Linear"):
        monkeypatch.setattr(f"fastdraft.models.kernels.{layer}", _absent)
    folder = saved(tmp_path)
    with caplog.at_level(logging.INFO, logger="fastdraft"), Generator(str(folder), str(folder)) as generator:
        assert greedy(generator, gamma=3) == greedy(generator, gamma=0)
    (said,) = [record for record in caplog.records if record.message == "quantization_unavailable"]
    assert "qlinear_prepack" in said.reason  # type: ignore[attr-defined]
    assert chosen(caplog) == {str(folder): "prepacked"}


def test_float32_that_is_not_quantised_runs_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tmp_path, dtype=torch.float32)
    with caplog.at_level(logging.INFO, logger="fastdraft"), Generator(str(folder), None) as generator:
        assert list(greedy(generator)) == tiny.greedy(load(folder), PROMPT, TOKENS)
    assert chosen(caplog) == {str(folder): "plain"}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_verified_tokens_have_the_bits_of_plain_ones(architecture: str, quantization: Any, tmp_path: Path) -> None:
    """Not only the same tokens: the same log-probabilities, in bfloat16, whatever was drafted beside them."""
    folder = saved(tmp_path, architecture)
    draft = DraftModel(tiny.perturbed(load(folder).float(), 0.03))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "logprobs": 2, "ignore_eos": True}
    with Generator(Model(str(folder), quantization=quantization), [NGram(min=1), draft], dtype="auto") as generator:
        for prompt in (PROMPT, PROMPT[:5]):
            outs = []
            for gamma in (0, 1, 4, 9, 16, 20, "auto"):
                generator.forget_prefixes()
                outs.append(generator.generate(prompt, gamma=gamma, **options))
            for out in outs[1:]:
                assert out.token_ids == outs[0].token_ids
                assert out.logprobs == outs[0].logprobs
    assert any(0 < out.stats.accepted_tokens < out.stats.draft_tokens for out in outs)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_targets_rows_never_depend_on_their_number(quantization: Any, tmp_path: Path) -> None:
    """Beside the linear layers only attention and norms run, on float32 copies of the same rows."""
    model = load(saved(tmp_path))
    fasten(model, quantization, label="test", source="")
    mine = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer = model.model.layers[0]
    with torch.inference_mode():
        for module in (layer.self_attn.o_proj, layer.mlp, model.lm_head):
            alone = module(mine)
            for count in range(2, 10):
                company = torch.randn(1, count, 64, generator=torch.Generator().manual_seed(count)).bfloat16()
                company[:, -1] = mine[:, 0]
                assert torch.equal(module(company)[:, -1], alone[:, 0])

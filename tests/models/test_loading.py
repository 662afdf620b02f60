"""Loading in every form, and what a loaded model keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fastdraft import ConfigError, DraftModel, Generator, GeneratorConfig, Model, ModelLoadError, NGram
from tests import tiny

PROMPT = [(7 * i) % 300 + 3 for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved")
    model = tiny.model("llama")
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1, eos_token_id=[0, 2]
    )
    model.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return str(path)


def test_forms_of_a_target_agree(folder: str) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = tiny.greedy(loaded, PROMPT, 16)
    forms: list[Any] = [folder, Path(folder), Model(folder), loaded, Model(loaded), Model(loaded, take=True)]
    for form in forms:
        with Generator(form, None) as generator:
            out = generator.generate(PROMPT, temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=1.0)
            assert list(out.token_ids) == expected
            assert folder in out.model


def test_the_generation_config_gives_defaults_that_calls_undo(folder: str) -> None:
    with Generator(folder, None, defaults={"temperature": 0.5}) as generator:  # type: ignore[arg-type]
        params = generator.generate(PROMPT, max_tokens=1).params
        assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.5, 20, 0.8, 1.1)
        undone = generator.generate(PROMPT, max_tokens=1, top_k=0, top_p=1, repetition_penalty=1).params
        assert (undone.top_k, undone.top_p, undone.repetition_penalty) == (0, 1.0, 1.0)
        eos = generator.generate(PROMPT, logit_bias={2: 1e4}, temperature=0)
        assert eos.token_ids == (2,) and eos.finish_reason == "stop" and eos.text == ""


def test_dtype_is_applied_to_files_and_refused_for_borrowed_models(folder: str) -> None:
    with Generator(folder, None, dtype="bfloat16") as generator:
        assert generator.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).completion_tokens == 4
    loaded = tiny.model("llama")
    with pytest.raises(ConfigError, match="not changed"):
        Generator(Model(loaded, dtype="bfloat16"), None, tokenizer=folder)
    assert loaded.dtype == torch.float32
    with Generator(Model(loaded, dtype="float64", take=True), None, tokenizer=folder):
        assert loaded.dtype == torch.float64


def test_a_config_is_one_value(folder: str) -> None:
    config = GeneratorConfig(target=folder, draft=[NGram(min=3, name="lookup"), folder], kv_memory="8MiB")
    again = GeneratorConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert [source.kind for source in config.draft] == ["ngram", "draft_model"]
    with Generator.from_config(again) as generator:
        out = generator.generate(PROMPT, max_tokens=4, temperature=0, source="lookup", ignore_eos=True)
        assert out.completion_tokens == 4
        assert generator.config == config


def test_the_plan_agrees_with_what_is_built(folder: str) -> None:
    draft = DraftModel(Model(folder, quantization="none"))
    config = GeneratorConfig(target=folder, draft=draft, kv_memory="1MiB")
    plan = Generator.plan(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = sum(p.numel() for p in model.parameters()) * 4
    assert plan.target.weight_bytes == weights == plan.drafts[0].weight_bytes
    assert plan.target.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, float32
    assert plan.kv_bytes <= 2**20
    assert plan.total_bytes == 2 * weights + plan.kv_bytes
    with Generator.from_config(config) as generator:
        metrics = generator.metrics()
        assert metrics.total_blocks * 16 == plan.kv_tokens == metrics.draft_total_blocks * 16


def test_the_plan_counts_weights_as_they_are_held(folder: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = sum(p.numel() for p in model.parameters()) * 4
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))

    def held(quantization: Any) -> int:
        return Generator.plan(GeneratorConfig(target=Model(folder, quantization=quantization), draft=None)).total_bytes

    plain = held("none")
    assert plain - held("int8") == 3 * linear
    assert plain - held("int4") == pytest.approx((4 - 0.5625) * linear, abs=32)
    (draft,) = Generator.plan(GeneratorConfig(target=folder, draft=folder)).drafts
    assert weights - draft.weight_bytes == pytest.approx((4 - 1.5625) * linear, abs=32)  # the most "auto" may take
    (borrowed,) = Generator.plan(GeneratorConfig(target=folder, draft=model, tokenizer=folder)).drafts
    assert borrowed.weight_bytes == weights


def test_one_budget_is_split_by_bytes_a_token(folder: str) -> None:
    small = tiny.model("llama", num_hidden_layers=1)
    with Generator(folder, small, kv_memory=48 * 16 * 256) as generator:
        # Two layers and one: two thirds and one third of the bytes, the same number of tokens.
        metrics = generator.metrics()
        assert metrics.total_blocks == metrics.draft_total_blocks == 32


def test_closing_frees_models_and_kv(folder: str) -> None:
    import gc
    import weakref

    generator = Generator(folder, "auto")
    generator.generate(PROMPT, max_tokens=4)
    runner = weakref.ref(generator._worker._engine._runner)  # type: ignore[union-attr]
    generator.close()
    gc.collect()
    assert runner() is None


def test_loading_leaves_transformers_as_it_was(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    log = transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    Generator(folder, folder).close()
    with pytest.raises(ModelLoadError):
        Generator(folder + "/nowhere/at/all")
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")

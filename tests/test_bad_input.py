"""What cannot be used is refused by name, with the way out, before any model runs; and the generator goes on."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastdraft import (
    ConfigError,
    DraftModel,
    FastDraftError,
    Generator,
    GeneratorClosedError,
    GeneratorConfig,
    InvalidConstraintError,
    Model,
    ModelLoadError,
    NGram,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from fastdraft.models import store
from tests import tiny, vocabularies
from tests.watch import Forwards, expected, settled

NAN, INF = float("nan"), float("inf")
GOOD = "in the end"


async def astream(generator: Generator, prompt: Any, **options: Any) -> Any:
    return generator.astream(prompt, **options)


# Every way into a generator; the batches carry a good prompt first.
DOORS: dict[str, Callable[..., Any]] = {
    "generate": lambda g, prompt, **options: g.generate(prompt, **options),
    "stream": lambda g, prompt, **options: g.stream(prompt, **options),
    "batch": lambda g, prompt, **options: g.batch([GOOD, prompt], **options),
    "agenerate": lambda g, prompt, **options: asyncio.run(g.agenerate(prompt, **options)),
    "astream": lambda g, prompt, **options: asyncio.run(astream(g, prompt, **options)),
    "abatch": lambda g, prompt, **options: asyncio.run(g.abatch([GOOD, prompt], **options)),
}
doors = pytest.mark.parametrize("door", DOORS)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model()


@pytest.fixture(scope="module")
def words() -> Any:
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def gen(model: Any, words: Any) -> Iterator[Generator]:
    with Generator(model, [DraftModel(tiny.perturbed(model, 0.3)), NGram()], tokenizer=words) as generator:
        yield generator


@pytest.fixture(scope="module")
def usual(model: Any, words: Any) -> tuple[int, ...]:
    return tuple(expected(model, words, GOOD, 8))


def refused(
    generator: Generator, model: Any, call: Callable[[], Any], error: type[FastDraftError], *said: str
) -> FastDraftError:
    """Asserts that a call is refused before a forward, with everything that must be said, and something to do."""
    with Forwards(model) as seen, pytest.raises(error) as caught:
        call()
    assert seen.count == 0
    message = str(caught.value)
    for part in said:
        assert part in message, message
    assert len(message) < 700, "a message is no dump"
    metrics = generator.metrics()
    assert (metrics.running, metrics.queued) == (0, 0)
    return caught.value


def works(generator: Generator, usual: tuple[int, ...]) -> None:
    out = generator.generate(GOOD, temperature=0, max_tokens=8, ignore_eos=True)
    assert out.token_ids == usual
    assert out.text == generator.tokenizer.decode(list(usual)).rstrip("\ufffd")


# Each: what is passed, the error, and what its message says: the value, and the way out.
PROMPTS: dict[str, tuple[Any, type[FastDraftError], tuple[str, ...]]] = {
    "empty": ("", ConfigError, ("prompt", "empty", "Pass some text")),
    "no messages": ([], ConfigError, ("empty", "messages", "Pass a string")),
    "surrogate": ("ab\ud800", ConfigError, ("surrogate", "U+D800", "index 2", "encode")),
    "surrogate in a message": (
        [{"role": "user", "content": "\udfff"}],
        ConfigError,
        ("messages[0]['content']", "U+DFFF", "index 0", "encode"),
    ),
    "longer than the context": ([5] * 257, PromptTooLongError, ("257", "256", "Shorten")),
    "None": (None, ConfigError, ("NoneType", "string")),
    "number": (42, ConfigError, ("int", "string")),
    "bytes": (b"in the end", ConfigError, ("bytes", "string")),
    "set": ({1, 2}, ConfigError, ("set", "string")),
    "object": (object(), ConfigError, ("object", "string")),
    "a message without its list": ({"role": "user", "content": "x"}, ConfigError, ("dict", "list")),
    "no role": ([{"content": "x"}], ConfigError, ("messages[0]", "role", "user")),
    "no content": ([{"role": "user"}], ConfigError, ("messages[0]", "content", "empty string")),
    "content of bytes": ([{"role": "user", "content": b"x"}], ConfigError, ("bytes", "text")),
    "a message that is none": ([{"role": "user", "content": "x"}, "x"], ConfigError, ("messages[1]", "str")),
    "strings in a list": (["a", "b"], ConfigError, ("prompt[0]", "str", "batch()")),
    "id above the vocabulary": ([5, 320], ConfigError, ("prompt[1]", "320", "319", "tokenizer")),
    "id below zero": ([-1], ConfigError, ("prompt[0]", "-1", "0 to 319")),
    "floats": ([1.5], ConfigError, ("prompt[0]", "float", "token id")),
    "booleans": ([True], ConfigError, ("prompt[0]", "bool", "token id")),
    "lists of ids": ([[1, 2]], ConfigError, ("prompt[0]", "list", "batch()")),
    "a batch of ids as a tensor": (torch.tensor([[1, 2]]), ConfigError, ("prompt[0]", "list", "batch()")),
}

OPTIONS: dict[str, tuple[dict[str, Any], type[FastDraftError], tuple[str, ...]]] = {
    "max_tokens 0": ({"max_tokens": 0}, ConfigError, ("max_tokens", "0", "greater than or equal to 1")),
    "max_tokens -1": ({"max_tokens": -1}, ConfigError, ("max_tokens", "-1", "greater than or equal to 1")),
    "max_tokens 2.5": ({"max_tokens": 2.5}, ConfigError, ("max_tokens", "2.5", "integer")),
    "max_tokens True": ({"max_tokens": True}, ConfigError, ("max_tokens", "True")),
    "gamma True": ({"gamma": True}, ConfigError, ("gamma", "True")),
    "min_tokens": ({"min_tokens": 9, "max_tokens": 8}, ConfigError, ("min_tokens", "9", "max_tokens 8")),
    "temperature -0.1": ({"temperature": -0.1}, ConfigError, ("temperature", "-0.1", "equal to 0")),
    "temperature nan": ({"temperature": NAN}, ConfigError, ("temperature", "nan", "finite")),
    "temperature inf": ({"temperature": INF}, ConfigError, ("temperature", "inf", "finite")),
    "temperature text": ({"temperature": "hot"}, ConfigError, ("temperature", "hot", "number")),
    "top_p 0": ({"top_p": 0}, ConfigError, ("top_p", "0", "greater than 0")),
    "top_p 1.5": ({"top_p": 1.5}, ConfigError, ("top_p", "1.5", "equal to 1")),
    "top_p nan": ({"top_p": NAN}, ConfigError, ("top_p", "nan")),
    "top_k -1": ({"top_k": -1}, ConfigError, ("top_k", "-1", "equal to 0")),
    "min_p nan": ({"min_p": NAN}, ConfigError, ("min_p", "nan")),
    "min_p 2": ({"min_p": 2}, ConfigError, ("min_p", "2", "equal to 1")),
    "repetition_penalty 0": ({"repetition_penalty": 0}, ConfigError, ("repetition_penalty", "0", "greater than 0")),
    "frequency_penalty nan": ({"frequency_penalty": NAN}, ConfigError, ("frequency_penalty", "nan", "finite")),
    "alpha 0": ({"alpha": 0}, ConfigError, ("alpha", "0", "greater than 0")),
    "alpha 1.5": ({"alpha": 1.5}, ConfigError, ("alpha", "1.5", "equal to 1")),
    "alpha nan": ({"alpha": NAN}, ConfigError, ("alpha", "nan")),
    "invariant and lossy": ({"alpha": 0.5, "verification": "invariant"}, ConfigError, ("invariant", "0.5", "alpha=1")),
    "gamma -1": ({"gamma": -1}, ConfigError, ("gamma", "-1", "'auto'", ">= 0")),
    "gamma text": ({"gamma": "some"}, ConfigError, ("gamma", "some", "'auto'")),
    "seed -1": ({"seed": -1}, ConfigError, ("seed", "-1", "equal to 0")),
    "misspelt": ({"temprature": 0.5}, ConfigError, ("temprature", "'temperature'")),
    "misspelt call keyword": ({"tiemout": 1}, ConfigError, ("tiemout", "'timeout'")),
    "max_new_tokens": ({"max_new_tokens": 8}, ConfigError, ("max_new_tokens", "max_tokens")),
    "do_sample": ({"do_sample": True}, ConfigError, ("do_sample", "temperature")),
    "num_speculative_tokens": ({"num_speculative_tokens": 4}, ConfigError, ("num_speculative_tokens", "gamma")),
    "logit_bias above": ({"logit_bias": {320: 1.0}}, ConfigError, ("logit_bias", "320", "319")),
    "logit_bias below": ({"logit_bias": {-1: 1.0}}, ConfigError, ("logit_bias", "-1", "319")),
    "logit_bias nan": ({"logit_bias": {7: NAN}}, ConfigError, ("logit_bias", "7", "nan", "number")),
    "stop_token_ids": ({"stop_token_ids": [320]}, ConfigError, ("stop_token_ids", "320", "319")),
    "stop empty": ({"stop": ""}, ConfigError, ("stop", "''", "leave it out")),
    "stop with an empty one": ({"stop": ["a", ""]}, ConfigError, ("stop", "''", "leave it out")),
    "17 stop strings": ({"stop": [f"<{i}>" for i in range(17)]}, ConfigError, ("stop", "17", "16")),
    "stop of numbers": ({"stop": [5]}, ConfigError, ("stop", "5", "string")),
    "logprobs -1": ({"logprobs": -1}, ConfigError, ("logprobs", "-1", "equal to 0")),
    "source": ({"source": "nowhere"}, ConfigError, ("source", "nowhere", "'draft_model'", "'ngram'")),
    "timeout 0": ({"timeout": 0}, ConfigError, ("timeout", "0", "> 0")),
    "timeout nan": ({"timeout": NAN}, ConfigError, ("timeout", "nan", "> 0")),
    "timeout text": ({"timeout": "soon"}, ConfigError, ("timeout", "soon", "> 0")),
    "request_id": ({"request_id": ""}, ConfigError, ("request_id", "''", "non-empty")),
    "template_options for text": ({"template_options": {"a": 1}}, ConfigError, ("template_options", "messages")),
    "params of a dict": ({"params": {"max_tokens": 4}}, ConfigError, ("params", "dict", "SamplingParams(...)")),
    "output_type": ({"output_type": object()}, InvalidConstraintError, ("output_type", "object", "Pass a type")),
    "tools": ({"tools": "weather"}, ConfigError, ("tools", "str", "a list of tools")),
    "tool_choice": ({"tool_choice": "required"}, ConfigError, ("tool_choice", "'required'", "no tools")),
}


@doors
@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_that_cannot_be_used(gen, model, usual, door, name):
    prompt, error, said = PROMPTS[name]
    place = ("prompt 1 of the batch",) if "batch" in door else ()
    refused(gen, model, lambda: DOORS[door](gen, prompt), error, *said, *place)
    works(gen, usual)


@doors
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_cannot_be_used(gen, model, usual, door, name):
    options, error, said = OPTIONS[name]
    refused(gen, model, lambda: DOORS[door](gen, "hello", **options), error, *said)
    works(gen, usual)


def test_sampling_params_alone_raise_what_pydantic_raises():
    for name, value in (("max_tokens", 0), ("temperature", NAN), ("top_p", 0), ("alpha", 2), ("gamma", -1)):
        with pytest.raises(pydantic.ValidationError, match=name):
            SamplingParams(**{name: value})
    with pytest.raises(pydantic.ValidationError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams.model_construct(temperature=-1.0),
        SamplingParams(max_tokens=8).model_copy(update={"temperature": -1.0}),
    ],
    ids=["constructed", "copied"],
)
def test_params_that_skipped_their_checks_are_checked_by_the_call(gen, model, usual, params):
    refused(gen, model, lambda: gen.generate("hello", params), ConfigError, "temperature", "-1.0")
    works(gen, usual)


@pytest.mark.parametrize("door", ["batch", "abatch"])
def test_a_batch_names_the_bad_params(gen, model, usual, door):
    call = {
        "batch": lambda params: gen.batch([GOOD] * 2, params),
        "abatch": lambda params: asyncio.run(gen.abatch([GOOD] * 2, params)),
    }[door]
    bad = [SamplingParams(), SamplingParams(logit_bias={999: 1.0})]
    refused(gen, model, lambda: call(bad), ConfigError, "prompt 1 of the batch", "999")
    refused(gen, model, lambda: call([SamplingParams()] * 3), ConfigError, "3 params", "2 prompts")
    refused(gen, model, lambda: call(5), ConfigError, "params", "int", "SamplingParams")
    works(gen, usual)


@pytest.mark.parametrize("door", ["batch", "abatch"])
@pytest.mark.parametrize("n", [0, -1, 1.5, "2"], ids=repr)
def test_a_batch_of_no_samples(gen, model, usual, door, n):
    call = {"batch": lambda: gen.batch([GOOD], n=n), "abatch": lambda: asyncio.run(gen.abatch([GOOD], n=n))}[door]
    refused(gen, model, call, ConfigError, "n ", str(n), "1")
    works(gen, usual)


@pytest.mark.parametrize("prompts", ["in the end", b"in", None, 5, {"a": "b"}, {"a"}], ids=repr)
def test_a_batch_that_is_no_list(gen, model, usual, prompts):
    refused(gen, model, lambda: gen.batch(prompts), ConfigError, type(prompts).__name__, "list of prompts")
    works(gen, usual)


@pytest.mark.parametrize("door", ["batch", "abatch"])
def test_a_batch_gives_errors_in_their_places(gen, usual, door):
    options: Any = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_exceptions": True}
    prompts = [GOOD, "", GOOD, [999]]
    call = {
        "batch": lambda: gen.batch(prompts, **options),
        "abatch": lambda: asyncio.run(gen.abatch(prompts, **options)),
    }[door]
    first, empty, second, unknown = call()
    assert first.token_ids == second.token_ids == usual
    assert isinstance(empty, ConfigError)
    assert "prompt 1" in str(empty)
    assert isinstance(unknown, ConfigError)
    assert "999" in str(unknown)
    settled(gen)


def test_an_empty_batch_is_an_empty_list(gen):
    assert gen.batch([]) == []
    assert asyncio.run(gen.abatch([])) == []


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 321},
        {"top_k": 10**9},
        {"temperature": 1e-8},
        {"temperature": 100},
        {"logprobs": 1000},
        {"min_tokens": 8},
        {"stop": [f"<{i}>" for i in range(16)]},
        {"max_tokens": 10**12, "stop_token_ids": list(range(320))},
        {"seed": 2**64 - 1},
        {"logit_bias": {5: -INF}},
        {"request_id": "x" * 1000},
    ],
    ids=lambda options: " ".join(options),
)
@doors
def test_an_unusual_option_that_works(gen, door, options):
    out = DOORS[door](gen, "hello", **{"max_tokens": 8, **options})
    if door == "stream":
        assert "".join(chunk.text for chunk in out) == out.completion.text
    elif door == "astream":
        out.close()
    elif "batch" in door:
        assert len(out) == 2
    settled(gen)


def test_almost_no_temperature_is_greedy(gen, usual):
    out = gen.generate(GOOD, temperature=1e-8, max_tokens=8, ignore_eos=True)
    assert out.token_ids == usual


@pytest.mark.parametrize(
    "prompt",
    [" ", "     ", "\U0001f98a", "\U0001f469\u200d\U0001f467", "\x00", "\x01\x07\x1b[0m\x7f", "\n\t\r", "\u202e\ufeff"],
    ids=ascii,
)
def test_an_unusual_prompt_that_works(gen, model, words, prompt):
    out = gen.generate(prompt, temperature=0, max_tokens=8, ignore_eos=True, gamma=4)
    assert list(out.token_ids) == expected(model, words, prompt, 8)
    message = gen.generate([{"role": "user", "content": prompt}], max_tokens=4, ignore_eos=True)
    assert message.completion_tokens == 4


def test_ids_in_any_sequence(gen, model):
    outs = [
        gen.generate(ids, temperature=0, max_tokens=8, ignore_eos=True).token_ids
        for ids in ([5, 6], (5, 6), range(5, 7), torch.tensor([5, 6]), torch.tensor([5, 6]).numpy())
    ]
    assert set(outs) == {tuple(tiny.greedy(model, [5, 6], 8))}


def test_an_empty_prompt_is_one_token_where_the_tokenizer_adds_bos(model):
    with Generator(model, tokenizer=vocabularies.gemma_like()) as generator:
        out = generator.generate("", max_tokens=3, ignore_eos=True)
        assert (out.prompt_tokens, out.completion_tokens) == (1, 3)
        refused(generator, model, lambda: generator.generate([]), ConfigError, "empty")


def test_messages_without_a_chat_template(model):
    words = vocabularies.gemma_like()
    with Generator(model, tokenizer=words) as generator:
        call = lambda: generator.generate([{"role": "user", "content": "hi"}])  # noqa: E731
        refused(generator, model, call, ConfigError, "chat template", "tokenizer.chat_template", "string")


def test_a_template_that_refuses_the_system_role(model):
    words = tiny.tokenizer()
    words.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + tiny.CHATML
    )
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    with Generator(model, tokenizer=words) as generator:
        call = lambda: generator.generate(talk)  # noqa: E731
        refused(generator, model, call, ConfigError, "'system'", "no system here", "fold_system=True")
        assert generator.generate(talk, fold_system=True, max_tokens=2, ignore_eos=True).completion_tokens == 2


def test_a_prompt_that_kv_can_never_hold(model, words, usual):
    with Generator(model, tokenizer=words, kv_memory=12 * 1024) as generator:  # three blocks, one for copies
        call = lambda: generator.generate([5] * 33)  # noqa: E731
        refused(generator, model, call, PromptTooLongError, "33", "32", "Raise kv_memory")
        out = generator.generate([5] * 32, temperature=0, max_tokens=10, ignore_eos=True)
        assert (out.completion_tokens, out.finish_reason) == (1, "length")
        works(generator, usual)


def test_a_batch_larger_than_the_queue_is_refused_whole(model, words, usual):
    with Generator(model, tokenizer=words, max_queue=2) as generator:
        call = lambda: generator.batch([GOOD] * 3)  # noqa: E731
        error = refused(generator, model, call, QueueFullError, "3", "max_queue", "2")
        assert error.retry_after > 0
        assert len(generator.batch([GOOD] * 2, max_tokens=2)) == 2
        works(generator, usual)


# Construction.


def not_built(error: type[FastDraftError], call: Callable[[], Any], *said: str) -> FastDraftError:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for part in said:
        assert part in message, message
    assert len(message) < 700, "a message is no dump"
    return caught.value


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Any, words: Any) -> Path:
    """The tiny model and its tokenizer in a folder."""
    return save(tmp_path_factory.mktemp("models") / "whole", model, words)


def save(folder: Path, model: Any, words: Any) -> Path:
    log = transformers.utils.logging
    log.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        log.enable_progress_bar()
    if words is not None:
        words.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "damaged"))


def test_a_whole_folder_works(whole, usual):
    with Generator(whole) as generator:
        works(generator, usual)


@pytest.mark.parametrize("kind", ["target", "draft", "tokenizer"])
@pytest.mark.parametrize("path", ["./no/such/folder", "/no/such/folder", "no/such/folder/at-all"])
def test_an_unknown_path(model, words, kind, path):
    arguments = {"target": model, "draft": None, "tokenizer": words, kind: path}
    not_built(ModelLoadError, lambda: Generator(**arguments), path, "folder")


def test_an_unknown_gguf_file(words):
    not_built(ModelLoadError, lambda: Generator("no/such/file.gguf"), "no/such/file.gguf", "does not exist", ".gguf")


def test_an_unknown_hub_id(words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    name = "nobody-at-all/no-such-model"
    not_built(ModelLoadError, lambda: Generator(name, tokenizer=words), name, "Check the id")


@pytest.mark.parametrize("value", ["", "  ", None, 5, object()], ids=["empty", "blank", "None", "number", "object"])
def test_something_that_is_no_model(model, words, value):
    not_built(ConfigError, lambda: Generator(value, tokenizer=words), "model", "hub id")
    if value is not None:  # None is no draft
        not_built(ConfigError, lambda: Generator(model, value, tokenizer=words), "model", "hub id")


def test_modules_that_are_no_causal_model(model, words):
    with torch.random.fork_rng():
        linear = torch.nn.Linear(2, 2)
    not_built(ConfigError, lambda: Generator(linear, tokenizer=words), "Linear", "PreTrainedModel")
    not_built(UnsupportedModelError, lambda: Generator(model.model, tokenizer=words), "LlamaModel", "logits")


def test_a_file_that_is_no_folder(whole):
    not_built(ModelLoadError, lambda: Generator(whole / "config.json"), "config.json", "not a folder", "Pass a hub id")


@pytest.mark.parametrize("kind", ["target", "draft"])
@pytest.mark.parametrize("damage", ["truncated", "wrong magic", "empty", "absent"])
def test_damaged_safetensors(model, words, folder, kind, damage):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(
            {"truncated": data[: len(data) // 2], "wrong magic": b"GARBAGE!" + data[8:], "empty": b""}[damage]
        )
    arguments = {"target": model, "draft": None, "tokenizer": words, kind: folder}
    not_built(ModelLoadError, lambda: Generator(**arguments), str(folder), "weights", "truncated download")


def test_safetensors_that_lack_a_weight(folder):
    """transformers would fill the gap with random numbers."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    not_built(ModelLoadError, lambda: Generator(folder), str(folder), "model.layers.1.mlp.up_proj.weight")


def test_safetensors_with_a_weight_of_another_shape(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, file, metadata={"format": "pt"})
    not_built(ModelLoadError, lambda: Generator(folder), str(folder), "weights")


@pytest.mark.parametrize(
    "content", ["", "{", '{"model_type": "no_such_architecture"}'], ids=["empty", "cut", "unknown"]
)
def test_a_damaged_config(folder, content):
    (folder / "config.json").write_text(content, "utf-8")
    not_built(ModelLoadError, lambda: Generator(folder), str(folder), "Check")
    not_built(ModelLoadError, lambda: Generator.plan(GeneratorConfig(target=folder)), str(folder), "Check")


def test_a_missing_config(folder):
    (folder / "config.json").unlink()
    not_built(ModelLoadError, lambda: Generator(folder), str(folder), "config.json")


@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_a_damaged_tokenizer(folder, damage):
    file = folder / "tokenizer.json"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    not_built(ModelLoadError, lambda: Generator(folder), "tokenizer", str(folder))


def test_a_missing_tokenizer(model, whole):
    not_built(ConfigError, lambda: Generator(model), "tokenizer", "not known", "Pass tokenizer=")
    not_built(ConfigError, lambda: Generator(model, tokenizer=5), "tokenizer", "int", "folder")


@pytest.mark.parametrize("damage", ["wrong magic", "empty", "header only", "half"])
def test_a_damaged_gguf_file(tmp_path, monkeypatch, damage):
    from gguf import GGUFWriter

    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", torch.ones(64, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = file.read_bytes()
    file.write_bytes(
        {"wrong magic": b"NOPE" + data[4:], "empty": b"", "header only": data[:8], "half": data[: len(data) // 2]}[
            damage
        ]
    )
    not_built(ModelLoadError, lambda: Generator(file), str(file), "get the file again")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("memory", [1, 8191, "1KiB"])
def test_too_little_kv_memory(model, words, whole, memory):
    said = ("kv_memory", repr(memory), "8192", "Raise kv_memory")
    not_built(ConfigError, lambda: Generator(model, tokenizer=words, kv_memory=memory), *said)
    not_built(ConfigError, lambda: Generator.plan(GeneratorConfig(target=whole, kv_memory=memory)), *said)


@pytest.mark.parametrize("memory", [0, -1, "lots", "GiB", "-2GiB", "nan", 1.5, NAN, None], ids=repr)
def test_kv_memory_that_is_no_amount(model, words, memory):
    not_built(ConfigError, lambda: Generator(model, tokenizer=words, kv_memory=memory), "kv_memory", repr(memory))


def test_max_context(model, words, whole):
    said = ("max_context", "257", "256", "at most 256")
    not_built(ConfigError, lambda: Generator(model, tokenizer=words, max_context=257), *said)
    not_built(ConfigError, lambda: Generator.plan(GeneratorConfig(target=whole, max_context=257)), *said)
    for small in (1, 0, -5):
        not_built(ConfigError, lambda: Generator(model, tokenizer=words, max_context=small), "max_context", str(small))  # noqa: B023
    with Generator(model, tokenizer=words, max_context=20) as generator:
        refused(generator, model, lambda: generator.generate([5] * 21), PromptTooLongError, "21", "20", "max_context")


# Both on a model that is loaded here and on one that is borrowed: neither may ignore what it was told.
@pytest.mark.parametrize("borrowed", [False, True], ids=["folder", "borrowed"])
@pytest.mark.parametrize("option", ["device", "dtype"])
@pytest.mark.parametrize("place", ["generator", "model"])
def test_nonsense_for_device_and_dtype(model, words, whole, borrowed, option, place):
    spec = model if borrowed else whole
    target, options = (Model(spec, **{option: "nonsense"}), {}) if place == "model" else (spec, {option: "nonsense"})
    not_built(ConfigError, lambda: Generator(target, tokenizer=words, **options), option, "nonsense")


@pytest.mark.parametrize("option", ["device", "dtype"])
def test_nonsense_for_device_and_dtype_of_a_plan(whole, option):
    config = GeneratorConfig(target=whole, **{option: "nonsense"})
    not_built(ConfigError, lambda: Generator.plan(config), option, "nonsense")


def test_a_dtype_without_fractions(whole):
    not_built(ConfigError, lambda: Generator(whole, dtype="int8"), "int8", "'float32'")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here(whole):
    not_built(ConfigError, lambda: Generator(whole, device="cuda"), "cuda", "'cpu'")


def test_a_loaded_model_is_not_converted(model, words):
    said = ("bfloat16", "float32", "not changed", "dtype out")
    not_built(ConfigError, lambda: Generator(Model(model, dtype="bfloat16"), tokenizer=words), *said)
    not_built(ConfigError, lambda: Generator(model, tokenizer=words, dtype="bfloat16"), *said)
    not_built(ConfigError, lambda: Generator(Model(model, device="meta"), tokenizer=words), "meta", "cpu")
    assert model.dtype == torch.float32


@pytest.mark.parametrize("quantization", ["int3", "INT8", 8, True, ""])
def test_an_unknown_quantization(model, words, whole, quantization):
    said = ("quantization", f"{quantization!r}", "'int8'", "'none'")
    for fields in (
        {"target": {"id": str(whole), "quantization": quantization}},
        {"target": whole, "draft": {"kind": "draft_model", "model": {"id": str(whole), "quantization": quantization}}},
    ):
        not_built(ConfigError, lambda: Generator(**fields), *said)  # noqa: B023


def test_a_borrowed_model_is_not_quantised(model, words):
    for quantization in ("int8", "int4", "auto"):
        asked = {"id": model, "quantization": quantization}
        said = (quantization, "borrowed", "take=True")
        not_built(ConfigError, lambda: Generator(asked, None, tokenizer=words), *said)  # noqa: B023
        draft = {"kind": "draft_model", "model": asked}
        not_built(ConfigError, lambda: Generator(model, draft, tokenizer=words), *said)  # noqa: B023
    Generator(Model(model, quantization="none"), None, tokenizer=words).close()


VOCABULARIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "0": ({"vocabulary": 0}, ("vocabulary", "0", ">= 1", "'auto'")),
    "-1": ({"vocabulary": -1}, ("vocabulary", "-1", ">= 1", "'auto'")),
    "True": ({"vocabulary": True}, ("vocabulary", "True", "'auto'")),
    "1.5": ({"vocabulary": 1.5}, ("vocabulary", "1.5")),
    "no ids": ({"vocabulary": ()}, ("vocabulary", "()", "token ids")),
    "a negative id": ({"vocabulary": (5, -2)}, ("vocabulary", "-2", ">= 0")),
    "ids that are words": ({"vocabulary": ("the", "a")}, ("vocabulary", "the")),
    "a word": ({"vocabulary": "most"}, ("vocabulary", "most", "auto")),
    "an id beyond": ({"vocabulary": (5, 320)}, ("draft_model", "320", "share 320", "under 320")),
    "text for nothing": ({"text": "some"}, ("text", "vocabulary", "'auto'")),
    "text beside ids": ({"text": ["some"], "vocabulary": (5, 6)}, ("text", "vocabulary", "'auto'")),
    "bytes as text": ({"text": 5, "vocabulary": 9}, ("text", "5")),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_drafts_vocabulary(model, words, name):
    fields, said = VOCABULARIES[name]
    draft = {"kind": "draft_model", "model": {"id": model}} | fields
    with Forwards(model) as seen:
        error = not_built(ConfigError, lambda: Generator(model, draft, tokenizer=words), *said)
    assert error.hint or "expected" in str(error) or "should be" in str(error) or "nothing counts" in str(error)
    if name != "an id beyond":  # how many tokens two models share is known once both are loaded and checked
        assert seen.count == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_batch": 0}, ("max_batch", "0")),
        ({"max_queue": 0}, ("max_queue", "0")),
        ({"attention": "nonsense"}, ("attention", "nonsense", "sdpa")),
        ({"draft": [NGram(), NGram()]}, ("ngram", "name=")),
        ({"defaults": {"max_tokens": 0}}, ("max_tokens", "0")),
        ({"defaults": 5}, ("defaults", "5", "SamplingParams")),
    ],
    ids=lambda value: next(iter(value)),
)
def test_other_arguments(model, words, fields, said):
    not_built(ConfigError, lambda: Generator(model, **{"tokenizer": words, **fields}), *said)


def test_a_draft_with_another_vocabulary(model, words, tmp_path):
    near = vocabularies.byte_level()
    near = save(tmp_path / "near", tiny.model(vocabulary=len(near)), near)
    said = ("320 target tokens", "NGram()")
    error = not_built(VocabularyMismatchError, lambda: Generator(model, near, tokenizer=words), "overlapping", *said)
    assert re.search(r"8\d\.\d% of the target's tokens", str(error))
    far = save(tmp_path / "far", tiny.model(vocabulary=8), tiny.letters(8))
    error = not_built(VocabularyMismatchError, lambda: Generator(model, far, tokenizer=words), "foreign", *said)
    assert re.search(r"2\.5% of the target's tokens", str(error))
    narrow = tiny.model(vocabulary=100)
    not_built(VocabularyMismatchError, lambda: Generator(model, narrow, tokenizer=words), "100", "320", "NGram()")


@pytest.mark.slow
def test_real_drafts_with_another_vocabulary(smollm2_path):
    for draft in ("gemma-3-270m", "qwen2.5-coder-0.5b-instruct"):
        error = not_built(VocabularyMismatchError, lambda: Generator(smollm2_path, store.load_path(draft)), "NGram()")  # noqa: B023
        assert re.search(r"\d+\.\d% of the target's tokens", str(error))


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=8)
    return AutoModelForCausalLM.from_config(config).eval()


def t5() -> Any:
    config = transformers.T5Config(vocab_size=320, d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).eval()


def dynamic() -> Any:
    return tiny.model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    return transformers.BertForMaskedLM(config).eval()


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "mamba": (mamba, "linear_attention"),
    "t5": (t5, "encoder-decoder"),
    "dynamic rope": (dynamic, "dynamic rope"),
    "bert": (bert, "key/value cache"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_model_that_cannot_be_paged(model, words, tmp_path, name):
    make, why = UNSUPPORTED[name]
    with torch.random.fork_rng():
        made = make()
    said = (why, "cannot be paged and rolled back", "decoder-only")
    not_built(UnsupportedModelError, lambda: Generator(made, tokenizer=words), *said)
    not_built(UnsupportedModelError, lambda: Generator(model, made, tokenizer=words), *said)
    saved = save(tmp_path / "saved", made, words)
    not_built(UnsupportedModelError, lambda: Generator(saved), *said)
    if name != "bert":  # its config alone does not tell
        not_built(UnsupportedModelError, lambda: Generator.plan(GeneratorConfig(target=saved)), *said)


def test_a_model_in_training_mode(words):
    training = tiny.model().train()
    not_built(ConfigError, lambda: Generator(training, tokenizer=words), "training mode", "model.eval()")
    not_built(ConfigError, lambda: Generator(tiny.model(), training, tokenizer=words), "training mode", "model.eval()")
    assert training.training


def test_what_was_not_built_leaves_nothing_behind(model, words):
    before = model.config.to_dict(), model.config._attn_implementation
    with pytest.raises(ConfigError):
        Generator(model, tokenizer=words, kv_memory=1)
    with pytest.raises(VocabularyMismatchError):
        Generator(model, tiny.model(vocabulary=100), tokenizer=words)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("used", [False, True], ids=["never used", "used"])
@doors
def test_a_closed_generator(model, words, door, used):
    generator = Generator(model, tokenizer=words)
    if used:
        generator.generate("hello", max_tokens=2)
    generator.close()
    with Forwards(model) as seen, pytest.raises(GeneratorClosedError, match=r"closed.*Build a new Generator"):
        DOORS[door](generator, "hello")
    assert seen.count == 0
    with pytest.raises(GeneratorClosedError, match="closed"):
        generator.metrics()


def test_hints_are_part_of_the_message(gen):
    with pytest.raises(FastDraftError) as caught:
        gen.generate("")
    assert caught.value.hint
    assert caught.value.hint in str(caught.value)
    assert json.dumps(str(caught.value))


def test_a_target_keeps_one_precision() -> None:
    with pytest.raises(ConfigError, match="rows are computed together"):
        Generator(Model("somewhere", quantization="auto"), None)


def test_a_model_that_is_handed_over_is_used_once() -> None:
    shared = tiny.model("llama")
    with pytest.raises(ConfigError, match="load another one"):
        Generator(shared, DraftModel(Model(shared, take=True)), tokenizer=tiny.tokenizer())

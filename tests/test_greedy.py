"""Greedy speculative decoding is plain greedy decoding, token for token, in float32."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from fastdraft import DraftModel, Generator, NGram
from tests import tiny
from tests.grid import pairwise, whole

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt")
ARCHITECTURES += ("olmo2", "granite", "starcoder2", "smollm3", "cohere")
SOURCES = ("none", "draft_model", "ngram", "chain")
GAMMAS = tuple(range(9))
BATCHES = ("single", "ragged")
AXES = (ARCHITECTURES, SOURCES, GAMMAS, BATCHES)
# Of different lengths: shorter and longer than a block, at a block's border, and one that holds a repetition.
PROMPTS = (
    [(7 * i) % 300 + 3 for i in range(20)],
    [(11 * i) % 300 + 3 for i in range(5)],
    [(13 * i) % 300 + 3 for i in range(32)],
    [50, 60, 70, 80, 90] * 3,
)
TOKENS = 48


@functools.cache
def _model(architecture: str) -> Any:
    return tiny.model(architecture)


@functools.cache
def _expected(architecture: str) -> list[list[int]]:
    return [tiny.greedy(_model(architecture), prompt, TOKENS) for prompt in PROMPTS]


@functools.cache
def _generator(architecture: str, source: str) -> Generator:
    target = _model(architecture)
    draft = DraftModel(tiny.perturbed(target, 0.03))
    sources = {"none": None, "draft_model": draft, "ngram": NGram(min=1), "chain": [NGram(min=2), draft]}
    return Generator(target, sources[source], tokenizer=tiny.tokenizer(), kv_memory="4MiB")


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Any:
    yield
    _generator.cache_clear()


def _check(architecture: str, source: str, gamma: int, batch: str) -> Any:
    expected = _expected(architecture)
    generator = _generator(architecture, source)
    prompts = PROMPTS if batch == "ragged" else PROMPTS[:1]
    outs = generator.batch(prompts, temperature=0, max_tokens=TOKENS, gamma=gamma, ignore_eos=True)
    for out, want in zip(outs, expected, strict=False):
        assert list(out.token_ids) == want
        assert out.finish_reason == "length" and out.lossless
    assert len({t for out in outs for t in out.token_ids}) >= 10, "a model that repeats itself proves nothing"
    metrics = generator.metrics()
    assert metrics.free_blocks == metrics.total_blocks
    assert metrics.draft_free_blocks == metrics.draft_total_blocks
    return outs


@pytest.mark.parametrize(("architecture", "source", "gamma", "batch"), pairwise(AXES))
def test_equals_transformers(architecture: str, source: str, gamma: int, batch: str) -> None:
    _check(architecture, source, gamma, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "source", "gamma", "batch"), whole(AXES))
def test_equals_transformers_on_the_whole_grid(architecture: str, source: str, gamma: int, batch: str) -> None:
    _check(architecture, source, gamma, batch)


@pytest.mark.parametrize("source", SOURCES[1:])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_are_neither_always_right_nor_always_wrong(architecture: str, source: str) -> None:
    outs = _check(architecture, source, 4, "ragged")
    drafted = sum(out.stats.draft_tokens for out in outs)
    accepted = sum(out.stats.accepted_tokens for out in outs)
    assert 0 < accepted < drafted


def test_a_single_request_makes_fewer_target_calls(tokenizer: Any) -> None:
    target = _model("llama")
    with Generator(target, DraftModel(tiny.perturbed(target, 0.01)), tokenizer=tokenizer) as generator:
        out = generator.generate(PROMPTS[0], temperature=0, max_tokens=TOKENS, gamma=4, ignore_eos=True)
    assert out.stats.rounds < TOKENS / 2
    assert out.stats.rounds + out.stats.accepted_tokens == TOKENS
    assert sum(out.stats.accepted_per_position) == out.stats.accepted_tokens


# Our own words, for where the workloads are absent.
OWN_PROMPTS = (
    "The capital of France is",
    "List three primary colours and one fruit of each colour.",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "Translate to German: The weather is fine today, and the weather will be fine tomorrow.",
    "Q: If a train leaves at 9:40 and arrives at 11:05, how long is the trip?\nA:",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name": "Grace", "born":',
    "The days of the week are Monday, Tuesday,",
    "Write a short poem about the moon and the tide.",
    "Explain in one paragraph why the sky is blue.",
    "SELECT name, price FROM products WHERE price > 10 ORDER BY",
    "To make pancakes, first mix the flour and the milk. Then",
    "1 2 3 4 5 6 7 8 9 10 11 12 13",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "The three laws of thermodynamics are as follows. First,",
    "import os\nimport sys\n\nfor name in os.listdir('.'):\n",
    "A haiku about autumn leaves:\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "In 1969, Apollo 11 landed on the Moon. The astronauts were",
    "Summarise: the meeting was moved from Monday to Wednesday because the room was taken.",
)


def _prompts() -> list[str]:
    workload = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "spec_bench.jsonl"
    if not workload.is_file():
        return list(OWN_PROMPTS)
    turns = [json.loads(line)["turns"][0] for line in workload.read_text("utf-8").splitlines()]
    return sorted(turns, key=len)[:20]


def test_equals_transformers_on_smollm2(smollm2: Any, smollm2_path: Path) -> None:
    tokens = 24
    prompts = _prompts()
    draft = DraftModel(tiny.perturbed(smollm2, 0.02))
    with Generator(smollm2, [NGram(), draft], tokenizer=str(smollm2_path)) as generator:
        expected = [tiny.greedy(smollm2, generator.tokenizer(p).input_ids, tokens) for p in prompts]
        # An integer: left to itself, the generator would find that a draft of the target's own size never pays.
        outs = generator.batch(
            prompts, temperature=0, max_tokens=tokens, ignore_eos=True, repetition_penalty=1.0, gamma=4
        )
        assert len(prompts) == 20
        for prompt, out, want in zip(prompts, outs, expected, strict=True):
            assert list(out.token_ids) == want, prompt
        by_source = [out.stats.by_source for out in outs]
    for source in ("ngram", "draft_model"):
        drafted = sum(s[source].draft_tokens for s in by_source if source in s)
        accepted = sum(s[source].accepted_tokens for s in by_source if source in s)
        assert 0 < accepted < drafted, source

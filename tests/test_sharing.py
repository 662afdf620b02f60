"""Prefixes that are computed once: samples of a prompt, prompts that begin alike, pinned prefixes."""

from __future__ import annotations

from typing import Any

import pytest

from fastdraft import CacheFullError, ConfigError, DraftModel, Generator, NGram, PromptTooLongError
from fastdraft.testing import ScriptedGenerator
from tests import tiny
from tests.watch import Forwards, settled

BLOCK = 16
HEAD = [(7 * i) % 300 + 3 for i in range(100)]
OPTIONS: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama", context=1024)


class Peak(Forwards):
    """The most blocks that were held at the start of a forward."""

    def __init__(self, model: Any, generator: Generator) -> None:
        super().__init__(model)
        self._generator = generator
        self.blocks = self.running = 0

    def begin(self) -> None:
        found = self._generator.metrics()  # at once, on the thread that runs the forward
        self.blocks = max(self.blocks, found.total_blocks - found.free_blocks)
        self.running = max(self.running, found.running)


@pytest.mark.parametrize("length", [40, 96, 100])
@pytest.mark.parametrize("gamma", [0, 4])
def test_samples_share_their_prompt(model: Any, tokenizer: Any, length: int, gamma: int) -> None:
    draft = DraftModel(tiny.perturbed(model, 0.1))
    prompt = HEAD[:length]
    options: dict[str, Any] = {**OPTIONS, "temperature": 1.0, "seed": 3, "gamma": gamma}
    with Generator(model, draft, tokenizer=tokenizer) as generator:
        with Peak(model, generator) as one:
            (first,) = generator.batch([prompt], **options)
        generator.forget_prefixes()
        with Peak(model, generator) as eight:
            outs = generator.batch([prompt], n=8, **options)
        assert outs[0].token_ids == first.token_ids and len({out.token_ids for out in outs}) > 1
        assert eight.running == 8
        extra = -(-(20 + gamma) // BLOCK) + 1
        assert eight.blocks - one.blocks <= 7 * extra
        fed = sum(map(len, eight.fed))
        assert fed <= length + 8 * (BLOCK + 20 * (1 + gamma))
        settled(generator)


def test_prompts_that_begin_alike_come_together(model: Any, tokenizer: Any) -> None:
    prompts = [[*HEAD, 200 + i] for i in range(6)]
    with Generator(model, None, tokenizer=tokenizer) as generator:
        with Forwards(model) as seen:
            outs = generator.batch(prompts, temperature=0, **OPTIONS)
        assert sum(map(len, seen.fed)) < len(HEAD) + 6 * (BLOCK + 20)
        assert [out.stats.prefix_tokens for out in outs] == [0, *[96] * 5]
        for prompt, out in zip(prompts, outs, strict=True):
            assert list(out.token_ids) == tiny.greedy(model, prompt, 20)
        settled(generator)


def test_a_short_shared_beginning_is_not_waited_for(model: Any, tokenizer: Any) -> None:
    prompts = [[*HEAD[:20], *[100 + i] * 60] for i in range(3)]
    with Generator(model, None, tokenizer=tokenizer) as generator:
        with Peak(model, generator) as seen:
            generator.batch(prompts, temperature=0, **OPTIONS)
        assert seen.running == 3 and len(seen.fed) == 20


@pytest.mark.parametrize("draft", [False, True])
def test_a_pinned_prefix_stays(model: Any, tokenizer: Any, draft: bool) -> None:
    sources = DraftModel(tiny.perturbed(model, 0.1)) if draft else NGram()
    others = [[(11 * i + shift) % 300 + 3 for i in range(90)] for shift in range(8)]
    memory = 24 * BLOCK * 2 * (2 * 2 * 8 * 4) * (1 + draft)
    with Generator(model, sources, tokenizer=tokenizer, kv_memory=memory) as generator:
        pin = generator.pin(HEAD)
        assert pin.tokens == 96
        held = generator.metrics()
        assert held.total_blocks - held.free_blocks == 6
        assert held.draft_total_blocks - held.draft_free_blocks == 6 * draft
        for other in others:
            generator.generate(other, temperature=0, gamma=4, **OPTIONS)
        with Forwards(model) as seen:
            out = generator.generate([*HEAD, 9], temperature=0, gamma=4, **OPTIONS)
        assert out.stats.prefix_tokens == 96 and len(seen.fed[0]) == 5 + out.stats.gammas[0]
        assert list(out.token_ids) == tiny.greedy(model, [*HEAD, 9], 20)
        pin.release()
        pin.release()
        for other in others:
            generator.generate(other, temperature=0, **OPTIONS)
        assert generator.generate([*HEAD, 9], temperature=0, **OPTIONS).stats.prefix_tokens == 0
        settled(generator)


def test_pins_make_room_for_a_call_that_could_not_run(model: Any, tokenizer: Any) -> None:
    memory = 16 * BLOCK * 2 * (2 * 2 * 8 * 4)
    with Generator(model, None, tokenizer=tokenizer, kv_memory=memory) as generator:
        with pytest.raises(CacheFullError, match="9 of 16 KV blocks would be pinned"):
            generator.pin([(3 * i) % 300 + 3 for i in range(150)])
        with generator.pin(HEAD) as pin:
            assert pin.tokens == 96
            prompt = [(11 * i) % 300 + 3 for i in range(190)]
            assert list(generator.generate(prompt, temperature=0, **OPTIONS).token_ids) == tiny.greedy(
                model, prompt, 20
            )
        settled(generator)


def test_what_is_pinned_of_texts_and_messages(model: Any, tokenizer: Any) -> None:
    system = {"role": "system", "content": "be kind and short, and say nothing that is not true" * 2}
    with Generator(model, None, tokenizer=tokenizer) as generator:
        for prefix, whole in (
            ([system], [system, {"role": "user", "content": "hello there"}]),
            ([system, {"role": "user", "content": "Read: "}], [system, {"role": "user", "content": "Read: all"}]),
            ("the rain in that land is not hot " * 3, "the rain in that land is not hot " * 3 + "at all"),
        ):
            with generator.pin(prefix) as pin:
                assert pin.tokens >= 64
                assert generator.generate(whole, **OPTIONS).stats.prefix_tokens >= pin.tokens
        with pytest.raises(ConfigError):
            generator.pin([])
        with pytest.raises(PromptTooLongError):
            generator.pin([5] * 2000)


def test_prepared_grammars_and_prefixes_are_there(model: Any, tokenizer: Any) -> None:
    for generator in (Generator(model, None, tokenizer=tokenizer), ScriptedGenerator("true")):
        with generator:
            generator.prepare(output_types=[bool, {"type": "integer"}], prefixes=[HEAD])
            if isinstance(generator, Generator):
                assert len(generator._intake.grammars._compiled) == 2
                assert generator.generate([*HEAD, 4], **OPTIONS).stats.prefix_tokens == 96
            with pytest.raises(ValueError, match="absent"):
                generator.prepare(output_types=[{"$ref": "#/$defs/absent"}])

"""outlines' own generator over ours: each backend, each kind of type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import outlines
import pytest
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

from fastdraft import Constrained, Generator, InvalidConstraintError, NGram, OutputValidationError
from fastdraft.integrations.outlines import FastDraft


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="module")
def gen(smollm2: Any) -> Iterator[Generator]:
    with Generator(smollm2, NGram(min=1)) as generator:
        yield generator


@pytest.fixture(scope="module")
def model(gen: Generator) -> FastDraft:
    return FastDraft(gen)


@pytest.mark.parametrize("backend", ["outlines_core", "llguidance"])
def test_outlines_writes_with_drafts(model: FastDraft, backend: str) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
    four = outlines.Generator(model, Regex("[0-9]{4}"), backend=backend)
    assert re.fullmatch("[0-9]{4}", four("A year:", **options))
    choice = outlines.Generator(model, Literal["yes", "no"], backend=backend)
    assert choice("Is snow white?", **options) in ("yes", "no")
    assert set(choice.batch(["Is snow white?", "Is snow black?"], **options)) <= {"yes", "no"}
    assert "".join(choice.stream(Chat([{"role": "user", "content": "Is snow white?"}]), **options)) in ("yes", "no")


def test_outlines_writes_models_and_grammars(model: FastDraft) -> None:
    write = outlines.Generator(model, Person, backend="outlines_core")
    assert Person.model_validate_json(write("Ada, 36", temperature=0, max_tokens=120))
    assert write("Ada, 36", temperature=0, max_tokens=3).startswith("{")  # as far as it came
    grammar = outlines.Generator(model, CFG('start: "a" ("b" | "c")~2'))
    assert re.fullmatch("a[bc]{2}", grammar("x", temperature=1.0, max_tokens=20))
    assert outlines.Generator(model)("Say hi.", temperature=0, max_tokens=5)


def test_the_tokenizer_is_left_as_it_was(gen: Generator) -> None:
    before = gen.tokenizer.padding_side, gen.tokenizer.pad_token
    FastDraft(gen)
    assert (gen.tokenizer.padding_side, gen.tokenizer.pad_token) == before


def test_a_lifted_grammar_gives_the_tokens_of_plain_decoding(gen: Generator, model: FastDraft) -> None:
    from outlines.backends import get_regex_logits_processor

    for backend in ("outlines_core", "llguidance"):
        processor = get_regex_logits_processor(backend, model, "(red|green|blue)( (red|green|blue)){2,5}")
        plain, drafted = (
            gen.generate("red green blue red green", output_type=processor, temperature=0, gamma=gamma, max_tokens=40)
            for gamma in (0, 4)
        )
        assert plain.token_ids == drafted.token_ids and plain.parsed == plain.text
        with pytest.raises(OutputValidationError, match="max_tokens=2"):
            gen.generate("red green", output_type=processor, temperature=0, max_tokens=2)
        with pytest.raises(InvalidConstraintError, match="after"):
            gen.generate("red", output_type=Constrained(processor, after=":"))


def test_outlines_core_by_itself(gen: Generator) -> None:
    for kind in (Regex("[a-f]{3}-[0-9]{2}é?"), ["yes", "no", "né (?)"]):
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30}
        for seed in range(5):
            core = gen.generate("x", output_type=Constrained(kind, backend="outlines_core"), seed=seed, **options)
            assert core.text == gen.generate("x", output_type=kind, seed=seed, **options).text
    for kind in (Person, Constrained(Regex("a"), after="x", backend="outlines_core")):
        with pytest.raises(InvalidConstraintError, match="outlines_core"):
            given = kind if isinstance(kind, Constrained) else Constrained(kind, backend="outlines_core")
            gen.generate("x", output_type=given)
    assert json.loads(gen.generate("x", output_type=Person, temperature=0, max_tokens=80).text)

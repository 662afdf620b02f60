"""Cases about schemas and grammars that users of other systems reported; a test is named by the id of its case."""

from __future__ import annotations

import decimal
import enum
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest
from outlines.types import Regex
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from fastdraft import Completion, DraftModel, Generator, InvalidConstraintError, NGram, OutputValidationError
from fastdraft.models import store
from tests import tiny
from tests.watch import settled

FOX = "🦊👩‍👩‍👧日本語ß"


@pytest.fixture(scope="module")
def words(smollm2_path: Any) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def any_weights(words: Any) -> Iterator[Generator]:
    """Weights that say nothing, with SmolLM2's vocabulary; it drafts for itself."""
    model = tiny.model("llama", vocabulary=49152, context=512, spread=0.1)
    draft = DraftModel(tiny.perturbed(model, 0.1))
    with Generator(model, [draft, NGram(min=1)], tokenizer=words, max_batch=16, kv_memory="64MiB") as generator:
        yield generator


def sample(
    generator: Generator, output_type: Any, seeds: Any, *, prompt: str = "x", **options: Any
) -> list[Completion[Any] | OutputValidationError]:
    """One call a seed."""
    found = []
    for seed in seeds:
        try:
            found.append(generator.generate(prompt, output_type=output_type, seed=seed, **options))
        except OutputValidationError as error:
            found.append(error)
    return found


def ended(found: Any) -> list[Completion[Any]]:
    """Those that came to an end; what was cut off is an error that says so."""
    for one in found:
        if isinstance(one, OutputValidationError):
            assert one.completion.finish_reason == "length" and "max_tokens" in str(one)
    return [one for one in found if isinstance(one, Completion)]


@pytest.mark.parametrize("gamma", [0, 3, 8])
def test_g04_a_regex_forces_characters_split_over_several_tokens(any_weights, gamma):
    for seed in (0, 1, 2):
        stream = any_weights.stream("Say it:", output_type=Regex(FOX), temperature=1.0, seed=seed, gamma=gamma)
        chunks = [chunk.text for chunk in stream]
        assert stream.completion.text == "".join(chunks) == FOX
        assert stream.completion.finish_reason == "stop"
        assert not any("\ufffd" in chunk for chunk in chunks)
    for count in range(1, 8):
        with pytest.raises(OutputValidationError) as cut:
            any_weights.generate("Say it:", output_type=Regex(FOX), temperature=1.0, gamma=gamma, max_tokens=count)
        assert FOX.startswith(cut.value.completion.text) and "\ufffd" not in cut.value.completion.text


Report = pydantic.create_model(
    "Report",
    **{f"f{i}": (Optional[Literal["v"]], None) for i in range(12)},  # type: ignore[call-overload]  # noqa: UP045
)


def test_g05_many_optional_fields(any_weights):
    started = time.perf_counter()
    found = sample(any_weights, Report, range(10), temperature=1.0, max_tokens=200, gamma=4)
    assert time.perf_counter() - started < 60
    for out in found:
        assert isinstance(out, Completion) and out.finish_reason == "stop"
        value = json.loads(out.text)
        assert list(value) == [f"f{i}" for i in range(12)]  # all of them, in order: omit_defaults=True lets them out
        assert set(value.values()) <= {"v", None}
        assert out.parsed == Report.model_validate_json(out.text)


class Lvl(enum.StrEnum):
    only = "naïve"


class Item(BaseModel):
    sku: Literal["A-1"]
    qty: Literal[2]


class Ticket(BaseModel):
    level: Lvl
    path: Literal["a/b"]
    quote: Literal['say "hi"']
    nl: Literal["line\nbreak"]
    win: Literal["C:\\tmp"]
    rx: Literal["x|y.*"]
    jp: Literal["日本語"]
    n: Literal[3]
    ok: Literal[True]
    none: None
    items: list[Item] = Field(min_length=2, max_length=2)


TICKET = Ticket(
    level="naïve",
    path="a/b",
    quote='say "hi"',
    nl="line\nbreak",
    win="C:\\tmp",
    rx="x|y.*",
    jp="日本語",
    n=3,
    ok=True,
    none=None,
    items=[Item(sku="A-1", qty=2), Item(sku="A-1", qty=2)],
)


def check_ticket(generator: Generator) -> None:
    for seed in (0, 1, 2):
        texts = set()
        for gamma in (0, 4, 8):
            out = generator.generate(
                "Open a ticket.", output_type=Ticket, temperature=1.0, seed=seed, max_tokens=200, gamma=gamma
            )
            assert out.parsed == TICKET and out.finish_reason == "stop"
            value = json.loads(out.text)
            assert value["n"] == 3 and value["ok"] is True and len(value["items"]) == 2
            assert value["win"].count("\\") == 1 and value["nl"].count("\n") == 1
            texts.add(out.text)
        assert len(texts) == 1, "a line's end may be spelt in two ways, but the seed alone decides"


def test_g06_forced_values_of_every_kind(any_weights):
    check_ticket(any_weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "gemma-3-270m"])
def test_g06_forced_values_of_every_kind_by_real_models(name):
    with Generator(store.load_path(name), NGram(), dtype="float32", kv_memory="256MiB") as generator:
        check_ticket(generator)


class Node(BaseModel):
    name: Literal["n"]
    children: list[Node] = Field(max_length=2)


def depth(node: Node) -> int:
    return 1 + max(map(depth, node.children), default=0)


def test_g07_a_recursive_model(any_weights):
    found = ended(sample(any_weights, Node, range(60), temperature=1.0, max_tokens=400, gamma=4))
    assert found and max(depth(out.parsed) for out in found) >= 4

    def widest(node: Node) -> int:
        return max([len(node.children), *map(widest, node.children)])

    assert max(widest(out.parsed) for out in found) <= 2


class Note(BaseModel):
    title: Literal["t"]
    body: str = Field(min_length=4000, max_length=8000)


@pytest.mark.parametrize("gamma", [0, 4])
async def test_g08_cut_off_by_max_tokens(any_weights, gamma):
    options: dict[str, Any] = {"temperature": 0.7, "seed": 1, "max_tokens": 16, "gamma": gamma, "output_type": Note}
    started = time.perf_counter()
    with pytest.raises(OutputValidationError) as plain:
        any_weights.generate("Write the note.", **options)
    assert time.perf_counter() - started < 5
    stream = any_weights.stream("Write the note.", **options)
    with pytest.raises(OutputValidationError) as streamed:
        list(stream)
    with pytest.raises(OutputValidationError) as awaited:
        await any_weights.agenerate("Write the note.", **options)
    for caught in (plain, streamed, awaited):
        assert isinstance(caught.value, ValueError) and "max_tokens=16" in str(caught.value)
        assert caught.value.completion.text.startswith('{"title"')
        assert caught.value.completion.finish_reason == "length" and caught.value.completion.parsed is None


class Empty(BaseModel):
    pass


def test_g09_empty_objects_and_schemas_that_say_nothing(any_weights):
    options: dict[str, Any] = {"prompt": "Call the tool.", "temperature": 1.0, "max_tokens": 200, "gamma": 4}
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    for kind, value in ((closed, {}), (Empty, Empty())):
        for out in sample(any_weights, kind, range(10), **options):
            assert isinstance(out, Completion) and out.parsed == value and json.loads(out.text) == {}
    for out in ended(sample(any_weights, {"type": "object"}, range(20), **options)):
        assert isinstance(json.loads(out.text), dict)
    anything = sample(any_weights, {}, range(30), **options)
    for out in ended(anything):
        json.loads(out.text)
    texts = [one.text if isinstance(one, Completion) else one.completion.text for one in anything]
    if numbers := [one for one, text in zip(anything, texts, strict=True) if text[:1] in set("-0123456789")]:
        assert any(isinstance(one, Completion) for one in numbers)


class Price(BaseModel):
    price: decimal.Decimal = Field(max_digits=6, decimal_places=2)
    qty: int = Field(ge=-3, le=3)
    step: Annotated[int, Field(multiple_of=5, ge=0, le=20)]
    ratio: float = Field(ge=0, le=1)


def test_g10_numbers(any_weights):
    found = sample(any_weights, Price, range(60), prompt="Price it.", temperature=1.0, max_tokens=300, gamma=4)
    for out in found:
        if isinstance(out, Completion):
            assert isinstance(out.parsed, Price)
        else:
            assert isinstance(out.__cause__, pydantic.ValidationError)
            assert {error["loc"][0] for error in out.__cause__.errors()} == {"price"}
        text = out.text if isinstance(out, Completion) else out.completion.text
        assert not re.search(r"\d{41}", text)
    assert any(isinstance(out, Completion) for out in found)


def test_g11_patterns_with_and_without_anchors(any_weights):
    def one(name: str, schema: Any) -> Any:
        return {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}

    options: dict[str, Any] = {"prompt": "Give the code.", "temperature": 1.0, "max_tokens": 64, "gamma": 4}
    coded = one("id", {"type": "string", "pattern": r"^[A-Z]{3}-\d{4}$"})
    for out in sample(any_weights, coded, range(20), **options):
        assert isinstance(out, Completion) and re.fullmatch(r"[A-Z]{3}-[0-9]{4}", json.loads(out.text)["id"])
    found = sample(any_weights, one("t", {"type": "string", "pattern": r"\S", "maxLength": 12}), range(50), **options)
    values = [json.loads(out.text)["t"] for out in ended(found)]
    assert all(re.search(r"\S", value) and len(value) <= 12 for value in values)
    assert max(map(len, values)) > 1
    assert any_weights.generate("x", output_type=Regex("^abc$"), temperature=1.0).text == "abc"


class F(BaseModel):
    a: bool
    b: bool
    s: str = Field(max_length=40)


@pytest.mark.parametrize("gamma", [0, 6])
def test_g12_no_runaway_and_no_control_characters(any_weights, gamma):
    for out in sample(any_weights, F, range(50), temperature=1.0, max_tokens=300, gamma=gamma):
        assert isinstance(out, Completion) and out.finish_reason == "stop"
        assert F.model_validate_json(out.text) == out.parsed and len(out.parsed.s) <= 40
        assert not re.search(r"\s", out.text[: out.text.index('"s"')])
        assert all(character >= " " for character in out.text)
        out.parsed.s.encode("utf-8")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


def test_g13_a_discriminated_union(any_weights):
    kinds = set()
    for out in sample(
        any_weights, Owner, range(50), prompt="Describe the pet.", temperature=1.0, max_tokens=64, gamma=4
    ):
        assert isinstance(out, Completion)
        pet = json.loads(out.text)["pet"]
        assert set(pet) == ({"kind", "lives"} if pet["kind"] == "cat" else {"kind", "good"})
        assert type(out.parsed.pet) is {"cat": Cat, "dog": Dog}[pet["kind"]]
        kinds.add(pet["kind"])
    assert kinds == {"cat", "dog"}


BUILDS = (
    '{"build":"b-20.4","stage":"canary","healthy":"true","owner":"team-7"}\n'
    '{"build":"b-20.5","stage":"canary","healthy":true,"owner":"team-7"}\n'
    '{"build":"b-20.6","stage":"prod","healthy":true,"owner":'
)


class Build(BaseModel):
    build: str = Field(max_length=10)
    stage: Literal["canary", "prod"]
    healthy: bool
    owner: str = Field(max_length=12)


def check_build(generator: Generator) -> None:
    plain, drafted = (
        generator.generate(BUILDS, output_type=Build, temperature=0, max_tokens=80, gamma=gamma) for gamma in (0, 5)
    )
    assert drafted.token_ids == plain.token_ids and drafted.stats.accepted_tokens
    assert Build.model_validate_json(drafted.text) == drafted.parsed


def test_g14_prompt_lookup_does_not_change_an_object(smollm2):
    with Generator(smollm2, NGram(min=1)) as generator:
        check_build(generator)


@pytest.mark.slow
def test_g14_prompt_lookup_does_not_change_an_object_of_qwen():
    with Generator(store.load_path("qwen2.5-coder-0.5b-instruct"), NGram(min=1), dtype="float32") as generator:
        check_build(generator)


class S(BaseModel):
    s: str = Field(max_length=30)


@pytest.mark.slow
def test_g15_no_padded_ids_in_a_string_of_qwen():
    path = store.load_path("qwen2.5-coder-0.5b-instruct")
    with Generator(path, path, dtype="float32") as generator:
        found = sample(generator, S, range(20), prompt="The value is", temperature=5.0, max_tokens=250, gamma=4)
        for out in found:
            assert isinstance(out, Completion) and max(out.token_ids) < 151665
            assert "[PAD" not in out.text and "<|" not in out.parsed.s


def test_g24_constrained_jobs_from_eight_threads(words):
    model = tiny.model("llama", vocabulary=49152, context=512, spread=0.3)
    prompts = ["the", "rain in", "that land", "is not hot", "one", "two", "three", "four"]
    jobs = [(prompt, kind) for prompt in prompts for kind in (None, Ticket, Regex("[0-9]{4}"))]

    def run(generator: Generator, job: tuple[str, Any]) -> tuple[int, ...]:
        prompt, kind = job
        return generator.generate(prompt, output_type=kind, temperature=0, max_tokens=120, gamma=4).token_ids

    with Generator(model, NGram(min=1), tokenizer=words) as fresh:
        alone = [run(fresh, job) for job in jobs]
    with Generator(model, NGram(min=1), tokenizer=words) as generator:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda job: run(generator, job), jobs, timeout=60))
        assert together == alone
        settled(generator)


@pytest.mark.parametrize(
    ("output_type", "said"),
    [
        ({"type": "strnig"}, "strnig"),
        ({"$ref": "#/$defs/Missing"}, "Missing"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum.*maximum|maximum.*minimum"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength.*maxLength|maxLength.*minLength"),
        (Regex("(?=a)ab"), "look"),
        (Regex("[a-"), r"\[a-"),
        ({"enum": []}, "enum|empty"),
    ],
)
async def test_g28_constraints_that_cannot_be_met(any_weights, output_type, said):
    before = any_weights.metrics().prompt_tokens
    options: dict[str, Any] = {"output_type": output_type, "max_tokens": 32}
    with pytest.raises(InvalidConstraintError, match=said):
        any_weights.generate("x", **options)
    with pytest.raises(InvalidConstraintError, match=said):
        any_weights.stream("x", **options)
    with pytest.raises(InvalidConstraintError, match=said):
        await any_weights.agenerate("x", **options)
    with pytest.raises(InvalidConstraintError, match=said):
        any_weights.batch(["x", "y"], **options)
    assert any_weights.metrics().prompt_tokens == before


def test_g28_unique_items_are_checked_afterwards(any_weights):
    unique = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}
    found = sample(any_weights, unique, range(20), temperature=1.0, max_tokens=32)
    assert all(len(set(out.parsed)) == len(out.parsed) for out in found if isinstance(out, Completion))
    assert any(isinstance(out, OutputValidationError) for out in found)

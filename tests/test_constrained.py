"""Output types through the user's doors: the same tokens as masked plain decoding, and values instead of text."""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest
import torch
from outlines.types import CFG, Regex

from fastdraft import (
    ConfigError,
    Constrained,
    ConstraintDeadEndError,
    DraftModel,
    Generator,
    InvalidConstraintError,
    Json,
    NGram,
    OutputValidationError,
)
from fastdraft.constraints.grammars import Grammars
from fastdraft.constraints.trail import Trail
from fastdraft.constraints.types import as_constrained, spec_of
from tests import tiny
from tests.grid import pairwise, whole

EOS = 0
TOKENS = 60
PROMPT = [(7 * i) % 300 + 3 for i in range(20)]
PROMPTS = (PROMPT, [(11 * i) % 300 + 3 for i in range(5)], [50, 60, 70, 80, 90] * 3)


class Side(enum.Enum):
    BUY = "buy"
    SELL = "sell"


class Order(pydantic.BaseModel):
    customer: str = pydantic.Field(max_length=8)
    side: Side
    amounts: list[int] = pydantic.Field(max_length=3)
    paid: bool | None


TYPES: dict[str, Any] = {
    "model": Order,
    "regex-like": {"type": "string", "pattern": "^[a-f]{3,6}$"},
    "choice": ["yes", "no", "not sure"],
    "any": Constrained(Json(), max_string=5),
    "after": Constrained(Order, after="::"),
}
TOKENIZER = tiny.tokenizer(merged=tiny.JSON, texts=("</think>",))
THINK = TOKENIZER.convert_tokens_to_ids("</think>")
SOURCES = ("none", "draft_model", "ngram", "chain")
GAMMAS = (0, 1, 4, 7, "auto")
AXES = (tuple(TYPES), SOURCES, GAMMAS, ("single", "batch"))


@functools.cache
def _target() -> Any:
    return tiny.model("llama", spread=2.0)


@functools.cache
def _generator(source: str) -> Generator:
    draft = DraftModel(tiny.perturbed(_target(), 0.03), vocabulary=tuple(range(EOS, 310)))
    whole_draft = DraftModel(tiny.perturbed(_target(), 0.03))
    sources = {"none": None, "draft_model": whole_draft, "ngram": NGram(min=1), "chain": [NGram(min=2), draft]}
    return Generator(_target(), sources[source], tokenizer=TOKENIZER, kv_memory="4MiB")


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    _generator.cache_clear()


@functools.cache
def _grammars() -> Grammars:
    return Grammars(TOKENIZER, tiny.VOCABULARY, [EOS])


def _masked_greedy(prompt: list[int], output_type: Any, tokens: int) -> list[int]:
    """Plain greedy decoding with a mask, one dense forward a token: what every constrained call must give."""
    trail = Trail(lambda: _grammars().start(spec_of(as_constrained(output_type))), tiny.VOCABULARY, [EOS])
    made: list[int] = []
    while len(made) < tokens and not (made and made[-1] == EOS) and not trail.exhausted:
        with torch.no_grad():
            logits_V = _target()(torch.tensor([prompt + made])).logits[0, -1]
        bits = trail.mask().view(torch.uint8)
        legal_V = torch.tensor([bool(bits[t >> 3] >> (t & 7) & 1) for t in range(tiny.VOCABULARY)])
        made.append(int(logits_V.masked_fill(~legal_V, -torch.inf).argmax()))
        trail.commit(made[-1])
    return made


@functools.cache
def _expected(name: str) -> list[list[int]]:
    return [_masked_greedy(prompt, TYPES[name], TOKENS) for prompt in PROMPTS]


def _check(name: str, source: str, gamma: Any, batch: str) -> None:
    generator = _generator(source)
    prompts = PROMPTS if batch == "batch" else PROMPTS[:1]
    outs = generator.batch(
        prompts, temperature=0, max_tokens=TOKENS, gamma=gamma, output_type=TYPES[name], return_exceptions=True
    )
    for out, want in zip(outs, _expected(name), strict=False):
        made = out.completion if isinstance(out, OutputValidationError) else out
        assert list(made.token_ids) == want
        assert made.lossless
    metrics = generator.metrics()
    assert metrics.free_blocks == metrics.total_blocks


@pytest.mark.parametrize(("name", "source", "gamma", "batch"), pairwise(AXES))
def test_greedy_is_masked_plain_greedy(name: str, source: str, gamma: Any, batch: str) -> None:
    _check(name, source, gamma, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source", "gamma", "batch"), whole(AXES))
def test_greedy_is_masked_plain_greedy_on_the_whole_grid(name: str, source: str, gamma: Any, batch: str) -> None:
    _check(name, source, gamma, batch)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["model", "choice", "after"])
def test_a_seed_gives_the_same_tokens_with_every_source(name: str, source: str) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 4, "verification": "invariant", "max_tokens": TOKENS}

    def tokens(generator: Generator, gamma: Any) -> tuple[int, ...]:
        try:
            return generator.generate(PROMPT, output_type=TYPES[name], gamma=gamma, **options).token_ids
        except OutputValidationError as error:
            return error.completion.token_ids

    plain = tokens(_generator("none"), 0)
    assert all(tokens(_generator(source), gamma) == plain for gamma in (2, 5, "auto"))


def test_a_value_of_its_type_comes_back() -> None:
    out = _generator("chain").generate(PROMPT, output_type=Order, temperature=1.5, seed=2, max_tokens=200)
    assert isinstance(out.parsed, Order) and out.finish_reason == "stop"
    assert json.loads(out.text) == out.parsed.model_dump(mode="json")
    assert out.stats.forced_tokens > 10 and out.stats.by_source["forced"].accepted_tokens == out.stats.forced_tokens
    assert out.stats.rounds < out.completion_tokens / 2
    assert 0 < out.stats.constraint_seconds < out.stats.target_seconds + 1
    side = _generator("ngram").generate(PROMPT, output_type=Side, temperature=0)
    assert side.parsed in Side
    literal = _generator("none").generate(PROMPT, output_type=Literal["a", "b"], temperature=0)
    assert literal.parsed in ("a", "b")


def test_what_is_forced_costs_one_round() -> None:
    out = _generator("none").generate(PROMPT, output_type=["the only answer there is"], temperature=0)
    assert out.parsed == "the only answer there is" and out.stats.rounds <= 2


@pytest.mark.parametrize("after", [None, "e"])
def test_a_stream_shows_the_value_so_far(after: str | None) -> None:
    stream = _generator("ngram").stream(
        PROMPT, output_type=Constrained(Order, after=after), temperature=1.5, seed=2, max_tokens=400
    )
    seen = [chunk.partial for chunk in stream]
    order = stream.completion.parsed
    assert isinstance(order, Order)
    assert any(isinstance(one, dict) and 0 < len(one) < 4 for one in seen)
    assert seen[-1] == order.model_dump(mode="json")
    if after:
        assert stream.completion.text.partition(after)[2].lstrip().startswith("{")


def test_calls_with_and_without_types_run_beside_each_other() -> None:
    generator = _generator("chain")
    alone = generator.generate(PROMPT, temperature=0, max_tokens=30, ignore_eos=True)
    with generator.stream(PROMPT, temperature=0, max_tokens=30, ignore_eos=True) as stream:
        typed = generator.generate(PROMPT, output_type=TYPES["choice"], temperature=0)
        assert stream.completion.token_ids == alone.token_ids
    assert typed.parsed in TYPES["choice"]


def test_a_call_that_is_cut_off_says_by_what() -> None:
    with pytest.raises(OutputValidationError, match="max_tokens=7") as caught:
        _generator("ngram").generate(PROMPT, output_type=Order, temperature=0, max_tokens=7)
    assert caught.value.completion.finish_reason == "length" and caught.value.completion.completion_tokens == 7
    assert caught.value.completion.parsed is None


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("tokens", [24, 30, 45, 70])
def test_close_ends_before_the_tokens_do(tokens: int, source: str) -> None:
    class Line(pydantic.BaseModel):
        name: str
        number: int

    class Bill(pydantic.BaseModel):
        who: str
        lines: list[Line]

    options: dict[str, Any] = {"temperature": 2.0, "max_tokens": tokens, "verification": "invariant"}
    closing = Constrained(Bill, finish="close")
    for seed in range(6):
        out = _generator(source).generate(PROMPT, output_type=closing, seed=seed, **options)
        assert isinstance(out.parsed, Bill) and out.completion_tokens <= tokens
        plain = _generator("none").generate(PROMPT, output_type=closing, seed=seed, **options)
        assert out.token_ids == plain.token_ids


class Even(pydantic.BaseModel):
    digit: int = pydantic.Field(ge=0, le=9)

    @pydantic.field_validator("digit")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value


def test_what_no_grammar_enforces_is_tried_again() -> None:
    generator = _generator("none")

    def first_is_odd(seed: int) -> bool:
        try:
            generator.generate(PROMPT, output_type=Even, temperature=3.0, seed=seed)
        except OutputValidationError as error:
            assert isinstance(error.__cause__, pydantic.ValidationError)
            return True
        return False

    odd = [seed for seed in range(12) if first_is_odd(seed)]
    assert odd and len(odd) < 12
    found = 0
    for seed in odd:
        again = Constrained(Even, retries=20)
        out = generator.generate(PROMPT, output_type=again, temperature=3.0, seed=seed)
        assert out.parsed.digit % 2 == 0
        repeated = generator.generate(PROMPT, output_type=Even, temperature=3.0, seed=out.params.seed)
        found += repeated.token_ids == out.token_ids
    assert found == len(odd), "the seed in params repeats the try that was kept"
    with pytest.raises(OutputValidationError, match="none of 3 outputs"):
        impossible = pydantic.create_model(
            "Impossible",
            __base__=Even,
            __validators__={"never": pydantic.field_validator("digit")(lambda cls, value: int("no"))},
        )
        generator.generate(PROMPT, output_type=Constrained(impossible, retries=2), temperature=3.0, seed=0)


async def test_tries_for_an_event_loop() -> None:
    out = await _generator("none").agenerate(PROMPT, output_type=Constrained(Even, retries=30), temperature=3.0, seed=1)
    assert out.parsed.digit % 2 == 0


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.0}])
def test_tries_that_would_be_the_same_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match="temperature 0"):
        _generator("none").generate(PROMPT, output_type=Constrained(Even, retries=1), **options)


def test_a_stream_takes_nothing_back() -> None:
    with pytest.raises(ConfigError, match="stream"):
        _generator("none").stream(PROMPT, output_type=Constrained(Even, retries=1), temperature=1.0)


@pytest.mark.parametrize(
    ("output_type", "said"),
    [
        (object(), "cannot be read"),
        ([], "empty"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength|maxLength"),
        ({"$ref": "#/$defs/absent"}, "absent"),
        (Regex("(?=a)b"), "regular expression"),
    ],
)
def test_types_that_cannot_be_are_refused_before_anything_runs(output_type: Any, said: str) -> None:
    generator = _generator("none")
    with pytest.raises(InvalidConstraintError, match=said):
        generator.generate(PROMPT, output_type=output_type)
    assert generator.generate(PROMPT, temperature=0, max_tokens=2).completion_tokens > 0


def _token(word: str) -> int:
    token = TOKENIZER.convert_tokens_to_ids(word)
    assert isinstance(token, int)
    return token


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("gamma", [0, 5, "auto"])
def test_an_end_in_the_middle_of_what_is_forced(source: str, gamma: Any) -> None:
    """A stop token that the text needs: it may only end, and the text can go no other way."""
    with pytest.raises(OutputValidationError, match="nothing may follow") as caught:
        _generator(source).generate(
            PROMPT, output_type=["uvxyz"], temperature=0, gamma=gamma, stop_token_ids=[_token("x")]
        )
    assert caught.value.completion.text == "uv"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0, "alpha": 0.5}, {"temperature": 1.0}])
def test_a_banned_token_never_comes_out_of_what_is_forced(source: str, options: dict[str, Any]) -> None:
    with pytest.raises(OutputValidationError, match="nothing may follow") as caught:
        _generator(source).generate(
            PROMPT, output_type=["xyz"], gamma=5, logit_bias={_token("y"): float("-inf")}, **options
        )
    assert caught.value.completion.text == "x"
    with pytest.raises(OutputValidationError) as short:
        _generator(source).generate(PROMPT, output_type=["xyz"], gamma=5, min_tokens=5, **options)
    assert short.value.completion.text == "xyz"


@pytest.mark.parametrize("source", SOURCES)
def test_end_of_sequence_is_no_text_where_it_is_ignored(source: str) -> None:
    ids = TOKENIZER('{"a":true}').input_ids
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    out = _generator(source).generate([*ids, EOS, *ids, EOS, *PROMPT], output_type=schema, **options)
    assert out.finish_reason == "stop" and set(out.parsed) == {"a"} and EOS not in out.token_ids


def test_what_a_stop_string_cut_is_no_text_of_the_grammar() -> None:
    grammar = CFG('start: "say " /[ate]{2}/ ";"')
    whole = _generator("ngram").generate(PROMPT, output_type=grammar, temperature=0)
    assert whole.text.endswith(";") and whole.parsed == whole.text
    for kind in (grammar, Regex("say [ate]{2};")):
        with pytest.raises(OutputValidationError, match="no valid value"):
            _generator("ngram").generate(PROMPT, output_type=kind, temperature=0, stop=[";"])


@pytest.mark.parametrize("after", ["e", "</think>"])
@pytest.mark.parametrize("kind", [["  yes", "  no"], Regex(r" [0-9]\/[0-9]"), Regex("a/b?"), Order])
def test_after_is_followed_by_exactly_the_output(kind: Any, after: str) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 300, "logit_bias": {THINK: 9}}
    found = 0
    for seed in range(10):
        try:
            out = _generator("chain").generate(PROMPT, output_type=Constrained(kind, after=after), seed=seed, **options)
        except OutputValidationError as error:
            assert error.completion.finish_reason == "length"
            continue
        found += 1
        body = out.text.partition(after)[2]
        assert after == "e" or THINK in out.token_ids
        assert body == out.parsed if kind is not Order else isinstance(out.parsed, Order)
    assert found


def test_a_whole_text_at_the_cap_is_a_stop() -> None:
    text = "tea at eat"
    for gamma in (0, 4):
        options: dict[str, Any] = {"output_type": [text], "temperature": 0, "gamma": gamma}
        longest = _generator("none").generate(PROMPT, **options)
        assert EOS not in longest.token_ids, "what nothing can be added to needs no end"
        out = _generator("none").generate(PROMPT, max_tokens=longest.completion_tokens, **options)
        assert (out.parsed, out.finish_reason, out.token_ids) == (text, "stop", longest.token_ids)


def test_a_grammar_that_fails_ends_its_own_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Grammars.start

    def complex_(out_W: Any) -> None:
        raise RuntimeError("parser too complex")

    def start(self: Grammars, spec: Any) -> Any:
        constraint: Any = keep(self, spec)
        if spec.kind == "regex":
            constraint.mask = complex_
        return constraint

    generator = _generator("chain")
    monkeypatch.setattr(Grammars, "start", start)
    kinds: list[Any] = [Order, Regex("[a-f]{3}"), Order]
    outs = generator.batch(
        [PROMPT] * 3, output_type=kinds, temperature=1.5, seed=2, max_tokens=200, return_exceptions=True
    )
    failed = outs[1]
    assert isinstance(failed, OutputValidationError)
    assert isinstance(failed.__cause__, ConstraintDeadEndError) and "too complex" in str(failed.__cause__)
    assert all(isinstance(out.parsed, Order) for out in (outs[0], outs[2]))
    assert generator.metrics().free_blocks == generator.metrics().total_blocks

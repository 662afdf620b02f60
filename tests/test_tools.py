"""Tool calls: the grammar of each choice, calls read from a text, and the same through a generator."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest
import torch

from fastdraft import (
    ConfigError,
    ConstraintDeadEndError,
    Generator,
    InvalidConstraintError,
    NGram,
    OutputValidationError,
)
from fastdraft.constraints.grammars import Grammars
from fastdraft.constraints.tools import asked_spec, describe_tools, is_wrapped, read_tools
from fastdraft.models.store import load_path
from fastdraft.testing import ScriptedGenerator
from tests import tiny
from tests.byte_grammar import Grammar

TOKENIZER = tiny.tokenizer(texts=("<tool_call>", "</tool_call>"))
WRAPPED = (
    "{% if tools %}{{ tools | tojson }} <tool_call>\n...\n</tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ASK = [{"role": "user", "content": "how is the weather"}]


class Book(pydantic.BaseModel):
    """Books a table."""

    guests: int = pydantic.Field(ge=1, le=8)
    inside: bool = True


WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Graz", "Wien"]}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city"],
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
}
TOOLS = [WEATHER, Book]
CALL = '{"name": "weather", "arguments": {"city": "Graz"}}'
BOOK = '{"name": "Book", "arguments": {"guests": 2, "inside": false}}'


def _in(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("choice", "wrapped", "legal", "illegal"),
    [
        (
            "auto",
            True,
            ["", "It rains.", "a <tool_cal", _in(CALL), "So: " + _in(CALL, BOOK)],
            ["<tool_call>", CALL * 0 + "<tool_call>x"],
        ),
        ("required", True, [_in(CALL), _in(BOOK, CALL)], ["", "It rains.", "So: " + _in(CALL), CALL]),
        ("Book", True, [_in(BOOK)], [_in(CALL), ""]),
        ("none", True, ["", CALL, "It rains."], [_in(CALL), "a <tool_call> b"]),
        ("auto", False, ["", "It rains.", CALL, BOOK], ["{", CALL + CALL, '{"name": "other", "arguments": {}}']),
        ("required", False, [CALL, BOOK], ["", "It rains.", CALL.replace("Graz", "Linz")]),
        (
            "weather",
            False,
            [CALL, CALL.replace('"Graz"', '"Wien", "unit": "C"')],
            [BOOK, CALL.replace('"Graz"', '"Wien", "unit": "K"')],
        ),
    ],
)
def test_what_each_choice_writes(choice: str, wrapped: bool, legal: list[str], illegal: list[str]) -> None:
    spec = asked_spec(None, read_tools(TOOLS), choice, wrapped=wrapped)
    assert spec is not None
    grammar = Grammar(spec)
    for text in legal:
        assert grammar.writes(text), text
        assert len(spec.read(text)) == (0 if choice == "none" else text.count('"name"'))
    for text in illegal:
        assert not grammar.writes(text), text


def test_calls_are_typed() -> None:
    spec = asked_spec(None, read_tools(TOOLS), "auto", wrapped=True)
    assert spec is not None
    weather, book = spec.read("Let me see. " + _in(CALL, BOOK))
    assert (weather.name, weather.arguments, weather.parsed) == ("weather", {"city": "Graz"}, {"city": "Graz"})
    assert (book.name, book.arguments) == ("Book", {"guests": 2, "inside": False})
    assert book.parsed == Book(guests=2, inside=False)
    assert weather.id != book.id
    for cut in ("<tool_call>", _in(CALL)[:-3], _in(CALL) + "\n<tool_call>\n{"):
        with pytest.raises(ValueError, match="not whole"):
            spec.read(cut)


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ("weather", "auto", "tools is a str"),
        ([3], "auto", r"tools\[0\] is a int"),
        ([{"description": "x"}], "auto", "no name"),
        ([{"name": "two words"}], "auto", "'two words'"),
        ([WEATHER, WEATHER], "auto", "two tools"),
        (TOOLS, "wether", "tool_choice is 'wether'"),
        ([], "required", "no tools"),
        ([{"name": "f", "parameters": 3}], "auto", "expected a JSON schema"),
    ],
)
def test_tools_that_are_none(tools: Any, choice: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked_spec(None, read_tools(tools), choice, wrapped=True)


def test_parameters_that_cannot_be_enforced_name_their_tool() -> None:
    with pytest.raises(InvalidConstraintError, match=r"'f'.*absent"):
        read_tools([{"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/absent"}}}}])
    with pytest.raises(InvalidConstraintError, match="together"):
        asked_spec(int, read_tools(TOOLS), "auto", wrapped=True)


def test_without_a_wrapping_none_is_free_text() -> None:
    assert asked_spec(None, read_tools(TOOLS), "none", wrapped=False) is None


def test_a_call_that_must_be_is_missed() -> None:
    for wrapped, text in ((True, "<tool"), (True, ""), (False, "")):
        spec = asked_spec(None, read_tools(TOOLS), "required", wrapped=wrapped)
        assert spec is not None
        with pytest.raises(ValueError, match="no tool call"):
            spec.read(text)
    other = ScriptedGenerator('{"name": "other", "arguments": {}}').stream("x", tools=TOOLS)
    with pytest.raises(OutputValidationError):
        list(other)


def test_a_parameter_may_be_named_as_a_keyword() -> None:
    parameters = {
        "type": "object",
        "properties": {"enum": {"$ref": "#/$defs/unit"}, "const": {"$ref": "#/$defs/unit"}},
        "required": ["enum"],
        "$defs": {"unit": {"type": "object", "properties": {"u": {"enum": ["C", "F"]}}, "required": ["u"]}},
    }
    spec = asked_spec(None, read_tools([{"name": "f", "parameters": parameters}]), "f", wrapped=False)
    assert spec is not None
    assert Grammar(spec).writes('{"name": "f", "arguments": {"enum": {"u": "C"}}}')


def test_openai_forms_are_read() -> None:
    (tool,) = read_tools([{"type": "function", "function": WEATHER}])
    assert tool.name == "weather" and tool.for_template()["function"]["parameters"] == WEATHER["parameters"]
    named = asked_spec(None, (tool,), {"type": "function", "function": {"name": "weather"}}, wrapped=False)
    assert named is not None and named.read(CALL)[0].name == "weather"
    assert "weather" in describe_tools((tool,)) and is_wrapped(WRAPPED) and not is_wrapped(PLAIN)


@functools.cache
def _generator(source: str) -> Generator:
    return Generator(
        tiny.model("llama", spread=2.0, context=2048),
        NGram(min=1) if source == "ngram" else None,
        tokenizer=TOKENIZER,
        kv_memory="4MiB",
    )


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    _generator.cache_clear()


@pytest.mark.parametrize(("choice", "may", "must"), [("required", 1, True), ("auto", 1, False), ("none", 0, False)])
def test_a_token_that_opens_a_call_is_its_text(choice: str, may: int, must: bool) -> None:
    spec = asked_spec(None, read_tools(TOOLS), choice, wrapped=True)
    assert spec is not None
    constraint = Grammars(TOKENIZER, tiny.VOCABULARY, [0]).start(spec)
    opens, closes, *pieces = TOKENIZER("<tool_call></tool_call><tool").input_ids
    assert constraint.validate([opens]) == may and constraint.validate(pieces[:1]) == 1
    assert constraint.forced().tokens[:1] == ([opens] if must else [])
    mask_W = torch.zeros(tiny.VOCABULARY // 32, dtype=torch.int32)
    constraint.mask(mask_W)
    assert int(mask_W.view(torch.uint8)[opens >> 3]) >> (opens & 7) & 1 == may
    if may:
        rest = TOKENIZER("\n" + CALL + "\n").input_ids
        constraint.advance([opens, *rest])
        assert not constraint.finished
        constraint.advance([closes])
        assert constraint.finished
        constraint.rollback(2 + len(rest))
        assert constraint.validate([opens, *rest, closes]) == 2 + len(rest)


@pytest.mark.parametrize("source", ["none", "ngram"])
@pytest.mark.parametrize("template", [WRAPPED, PLAIN])
@pytest.mark.parametrize("choice", ["required", "Book"])
def test_a_generator_calls_tools(source: str, template: str, choice: Literal["required", "Book"]) -> None:
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "template_options": {"chat_template": template},
        "temperature": 2.0,
        "max_tokens": 200,
    }
    found = 0
    for seed in range(6):
        try:
            out = _generator(source).generate(ASK, seed=seed, **options)
        except OutputValidationError as error:
            assert error.completion.finish_reason == "length"  # calls without end
            continue
        found += 1
        assert out.finish_reason == "tool_calls" and out.parsed is None
        for call in out.tool_calls:
            assert call.name in (("Book",) if choice == "Book" else ("Book", "weather"))
            assert json.dumps(call.arguments) in out.text
        stream = _generator(source).stream(ASK, seed=seed, **options)
        assert [chunk.finish_reason for chunk in stream][-1] == "tool_calls"
        assert stream.completion.text == out.text
    assert found


def test_a_model_may_answer_in_words() -> None:
    options: dict[str, Any] = {"tools": TOOLS, "temperature": 2.0, "max_tokens": 20}
    for choice in ("auto", "none"):
        out = _generator("none").generate(
            ASK, seed=3, tool_choice=choice, template_options={"chat_template": WRAPPED}, **options
        )
        assert out.tool_calls == () and out.finish_reason in ("stop", "length") and out.text


def test_a_template_without_tools_has_them_in_its_system_message() -> None:
    intake = _generator("none")._intake
    tools = read_tools(TOOLS)
    told = {"tools": [tool.for_template() for tool in tools], "without": describe_tools(tools)}

    def text(template: str, messages: Any) -> str:
        ids = intake.encoder.encode(messages, template_options={"chat_template": template}, **told)
        return str(TOKENIZER.decode(ids))

    assert text(PLAIN, ASK).startswith("system: You can call these tools:")
    assert "You can call" not in text(WRAPPED, ASK) and '"weather"' in text(WRAPPED, ASK)
    both = text(PLAIN, [{"role": "system", "content": "Be kind."}, *ASK])
    assert both.startswith("system: Be kind.") and both.count("system:") == 1


def test_scripted_replies_call_tools_too() -> None:
    generator = ScriptedGenerator(["Well. " + _in(CALL), CALL, "It rains."])
    assert generator.generate("x", tools=TOOLS).tool_calls[0].arguments == {"city": "Graz"}
    assert generator.generate("x", tools=TOOLS, tool_choice="required").finish_reason == "tool_calls"
    assert generator.generate("x", tools=TOOLS).tool_calls == ()
    assert generator.calls[1].tool_choice == "required"


def test_each_prompt_of_a_batch_has_its_type() -> None:
    prompts = [[5, 6, 7], [8, 9], [10, 11]]
    outs = _generator("none").batch(prompts, output_type=[bool, None, ["x", "y"]], temperature=0, max_tokens=12)
    assert isinstance(outs[0].parsed, bool) and outs[1].parsed is None and outs[2].parsed in ("x", "y")
    same = _generator("none").batch(prompts, output_type=["x", "y"], temperature=0)
    assert all(out.parsed in ("x", "y") for out in same)
    for generator in (_generator("none"), ScriptedGenerator("true")):
        with pytest.raises(ConfigError, match="2 output types for 3 prompts"):
            generator.batch(prompts, output_type=[bool, int])


def test_a_dead_end_is_an_output_that_is_not_valid() -> None:
    generator = _generator("none")
    y = TOKENIZER.convert_tokens_to_ids("y")
    with pytest.raises(OutputValidationError, match="nothing may follow") as caught:
        generator.generate([5, 6, 7], output_type=["xyz"], temperature=0, logit_bias={y: float("-inf")})
    assert caught.value.completion.text == "x"
    for gamma in (0, 4):  # an accepted token that ends the call comes before the dead end
        with pytest.raises(OutputValidationError, match="no valid"):
            generator.generate(
                [5, 6, 7], output_type=["xyz"], temperature=0, logit_bias={y: float("-inf")}, stop=["x"], gamma=gamma
            )
    assert isinstance(caught.value.__cause__, ConstraintDeadEndError)
    assert generator.metrics().free_blocks == generator.metrics().total_blocks


@pytest.mark.slow
def test_a_real_model_calls_a_tool_and_reads_its_answer() -> None:
    """The form of a real template, whose calls go back into it as they were read."""
    ask: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Graz now? Use the tool."}]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "tools": TOOLS}
    with Generator(load_path("qwen2.5-coder-0.5b-instruct"), NGram()) as generator:
        out = generator.generate(ask, tool_choice="required", **options)
        assert out.text.startswith('<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"')
        assert out.text.endswith("}\n</tool_call>") and out.finish_reason == "tool_calls"
        assert out.tool_calls[0].parsed["city"] == "Graz" and out.stats.forced_tokens > 10
        plain = generator.generate(ask, tool_choice="required", gamma=0, **options)
        assert plain.token_ids == out.token_ids and plain.stats.rounds > 1.5 * out.stats.rounds
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in out.tool_calls]
        ask.append({"role": "assistant", "content": "", "tool_calls": calls})
        ask.append({"role": "tool", "content": "31.5 degrees"})
        answer = generator.generate(ask, tool_choice="none", **options)
        assert "31.5" in answer.text and answer.tool_calls == ()

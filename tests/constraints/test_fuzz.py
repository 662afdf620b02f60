"""Random schemas: what their grammars write at random is valid, and what is valid can be written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from fastdraft import (
    Completion,
    Constrained,
    DraftModel,
    Generator,
    InvalidConstraintError,
    NGram,
    OutputValidationError,
)
from fastdraft.constraints.jsonschema import Validation
from fastdraft.constraints.types import spec_of
from tests import tiny
from tests.byte_grammar import Grammar, in_order, write

NAMES = ["a", "b", "c", "k"]
VALUES = [None, True, False, 0, 1, 3, -2, 2.5, "", "a", "ab", "b-1", [], [1], ["a", 1], {}, {"a": 1}, {"k": "x"}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object", "object", "object"]
# Refusals that say that no value is valid at all, and not that one part contradicts itself.
EMPTY = {"allOf", "anyOf", "false", "not", "oneOf", "properties", "type"}
PATTERNS = ["^a", "b$", "^[a-c]+$", "a|b", "^(?!x)", r"\d", "^a.*b$"]


class Schemas:
    """Draws schemas."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def document(self) -> dict[str, Any]:
        inner, leaf = self.schema(2, refs="y"), self.schema(1)
        if isinstance(leaf, dict) and self.random.random() < 0.4:
            leaf.setdefault("properties", {})["a"] = {"$ref": "#/$defs/" + self.random.choice("xy")}
        return {"allOf": [self.schema(3, refs="xy")], "$defs": {"x": inner, "y": leaf}}

    def schema(self, depth: int, refs: str = "") -> Any:
        draw, choice, chance = self.random.randint, self.random.choice, self.random.random
        if chance() < 0.04:
            return choice([True, False, {}])
        found: dict[str, Any] = {}
        if chance() < 0.75:
            kind = choice(TYPES)
            found["type"] = kind if chance() < 0.8 else sorted({kind, choice(["null", "string", "integer"])})

        def inner() -> Any:
            return self.schema(depth - 1, refs)

        offers: list[tuple[float, str, Any]] = [
            (0.1, "minLength", lambda: draw(0, 2)),
            (0.1, "maxLength", lambda: draw(2, 5)),
            (0.1, "pattern", lambda: choice(PATTERNS)),
            (0.03, "format", lambda: choice(["date", "ipv4", "semver", "uuid"])),
            (0.15, "minimum", lambda: choice([-3, 0, 1, 2.5])),
            (0.15, "maximum", lambda: choice([3, 10.5])),
            (0.07, "exclusiveMinimum", lambda: choice([0, -1.5])),
            (0.1, "multipleOf", lambda: choice([1, 2, 3, 0.5, 0.01, 1.5])),
            (0.04, "enum", lambda: self.random.sample(VALUES, draw(2, 5))),
            (0.02, "const", lambda: choice(VALUES)),
        ]
        if depth:
            offers += [
                (0.4, "items", inner),
                (0.15, "prefixItems", lambda: [inner() for _ in range(draw(1, 2))]),
                (0.1, "minItems", lambda: draw(0, 1)),
                (0.2, "maxItems", lambda: draw(1, 3)),
                (0.05, "uniqueItems", lambda: True),
                (0.05, "contains", inner),
                (0.05, "unevaluatedItems", lambda: choice([False, inner()])),
                (0.7, "properties", lambda: {name: inner() for name in self.random.sample(NAMES, draw(1, 3))}),
                (0.3, "required", lambda: self.random.sample(NAMES, draw(1, 2))),
                (0.15, "additionalProperties", lambda: choice([True, False, inner()])),
                (0.1, "patternProperties", lambda: {choice(["^a", "^k", "b", "^x-"]): inner()}),
                (0.06, "propertyNames", lambda: choice([{"maxLength": 2}, {"pattern": "^[a-k]$"}, {"enum": ["a"]}])),
                (0.06, "minProperties", lambda: draw(0, 1)),
                (0.06, "maxProperties", lambda: draw(1, 3)),
                (0.06, "dependentRequired", lambda: {choice(NAMES): [choice(NAMES)]}),
                (0.05, "dependentSchemas", lambda: {choice(NAMES): inner()}),
                (0.05, "unevaluatedProperties", lambda: choice([False, inner()])),
                (0.08, "allOf", lambda: [inner() for _ in range(draw(1, 2))]),
                (0.1, "anyOf", lambda: [inner() for _ in range(draw(1, 3))]),
                (0.08, "oneOf", lambda: [inner() for _ in range(draw(1, 3))]),
                (0.05, "not", inner),
                (0.05, "if", inner),
                (0.05, "then", inner),
                (0.05, "else", inner),
            ]
        if refs:
            offers.append((0.12, "$ref", lambda: f"#/$defs/{choice(refs)}"))
        self.random.shuffle(offers)
        return found | {keyword: make() for likely, keyword, make in offers if chance() < likely}


def walk(grammar: Grammar, source: random.Random) -> str | None:
    """A text that a grammar writes, drawn byte by byte; None where it does not end soon."""
    matcher: Any = grammar.matcher
    matcher.reset()
    written = bytearray()
    for _ in range(300):
        if matcher.is_accepting() and (matcher.is_stopped() or source.random() < 0.5):
            return written.decode()
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(128) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:
            return None
        closing = [byte for byte in allowed if chr(byte) in '}],":']
        byte = source.choice(closing if closing and source.random() < 0.35 else allowed)
        assert matcher.consume_token(byte), matcher.get_error()
        written.append(byte)
    return None


def check(seed: int, count: int) -> int:
    """Judges a number of schemas; returns how many texts were written."""
    schemas, texts = Schemas(seed), 0
    for _ in range(count):
        schema = schemas.document()
        try:
            spec = spec_of(Constrained(schema))
            grammar = Grammar(spec)
        except InvalidConstraintError as error:
            if str(error).partition(" at ")[0] in EMPTY:
                assert not any(map(Validation(schema).fits, VALUES)), (error, json.dumps(schema))
            continue
        except ValueError as error:  # the engine's own: two patterns exclude each other, or meet without end
            assert "Unsatisfiable" in str(error) or "stack level exceeded" in str(error), (error, schema)
            continue
        for _ in range(4):
            if (text := walk(grammar, schemas.random)) is not None:
                texts += 1
                assert spec.checks or is_valid(spec, text), (text, json.dumps(schema))
        for value in VALUES:
            text = write(in_order(value, spec.source))
            if not isinstance(value, dict) and is_valid(spec, text):  # objects are closed where the schema leaves it
                assert grammar.writes(text), (text, json.dumps(schema))
    return texts


def is_valid(spec: Any, text: str) -> bool:
    try:
        spec.parse(text)
    except ValueError:
        return False
    return True


def test_random_schemas_write_what_is_valid_and_nothing_else():
    assert check(seed=1, count=150) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_random_schemas_write_what_is_valid_and_nothing_else(seed):
    assert check(seed, count=1000) > 1000


def check_engine(seed: int, wanted: int) -> None:
    """Random schemas through a whole generator of random weights, until so many outputs came to their end."""
    model = tiny.model("llama", spread=0.5, seed=seed, context=256)
    schemas, finished = Schemas(seed), 0
    with Generator(
        model,
        [DraftModel(tiny.perturbed(model, 0.05)), NGram(min=1)],
        tokenizer=tiny.tokenizer(),
        kv_memory="16MiB",
        max_queue=1 << 16,
    ) as generator:
        asked = 0
        while finished < wanted:
            assert asked < 8 * wanted, f"{finished} of {asked} came to their end"
            kinds: list[Any] = []
            while len(kinds) < 64:
                schema = schemas.document()
                try:
                    generator._intake.grammars.start(spec_of(Constrained(schema)))
                except InvalidConstraintError:
                    continue
                kinds.append(Constrained(schema, max_string=8, max_items=3))
            asked += len(kinds)
            outs = generator.batch(
                [[5, 6, 7]] * len(kinds),
                output_type=kinds,
                temperature=1.5,
                max_tokens=120,
                seed=seed,
                return_exceptions=True,
            )
            for kind, out in zip(kinds, outs, strict=True):
                if isinstance(out, Completion):
                    finished += 1
                    assert Validation(kind.type).fits(json.loads(out.text)), (out.text, json.dumps(kind.type))
                    assert out.parsed == json.loads(out.text)
                elif isinstance(out, OutputValidationError):
                    checked = spec_of(kind).checks
                    assert out.completion.finish_reason == "length" or checked, (str(out), json.dumps(kind.type))
                else:
                    assert isinstance(out, InvalidConstraintError), out  # with the lengths that were added
        metrics = generator.metrics()
        assert metrics.free_blocks == metrics.total_blocks and not metrics.running


def test_whatever_a_generator_finishes_is_valid():
    check_engine(seed=7, wanted=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 12))
def test_two_thousand_outputs_of_a_generator_are_valid(seed):
    check_engine(seed, wanted=500)

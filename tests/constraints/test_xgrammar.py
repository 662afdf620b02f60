"""The engine xgrammar: the same walks, the same refusals; what it would follow in part only is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from outlines.types import CFG

from fastdraft import Constrained, DraftModel, Generator, InvalidConstraintError, MissingDependencyError, NGram
from fastdraft.constraints.grammars import Grammars
from fastdraft.constraints.trail import Trail
from fastdraft.constraints.types import spec_of
from fastdraft.constraints.xgrammar import weakened
from tests import tiny

TOKENIZER = tiny.tokenizer(merged=tiny.JSON)
EOS = 0
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 5},
        "side": {"enum": ["buy", "sell"]},
        "amounts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "maxLength": {"type": "object", "properties": {"type": {"enum": ["b", "c"]}}, "required": ["type"]},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
    },
    "required": ["customer", "side", "amounts", "maxLength", "note"],
}
KINDS: dict[str, Any] = {"json": ORDER, "choice": ["yes", "no", "not sure"], "any": {"type": "string", "maxLength": 4}}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "pattern"),
        ({"type": "array", "items": {"type": "number", "multipleOf": 0.01}}, "multipleOf"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "ipv4"}}}, "format"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
        ({"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}, "uniqueItems"),
        ({"$defs": {"x": {"allOf": [{}]}}, "$ref": "#/$defs/x"}, "allOf"),
        ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {}}}, "$ref"),
    ],
)
def test_what_would_be_lost_is_named(schema: dict[str, Any], keyword: str) -> None:
    found = dict(weakened(schema))
    assert keyword in found and found[keyword].startswith("#/")


def test_what_is_followed_is_not_refused() -> None:
    assert list(weakened(spec_of(Constrained(ORDER)).source)) == []


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(MissingDependencyError, match="xgrammar"):
        Grammars(TOKENIZER, tiny.VOCABULARY, [EOS]).start(spec_of(Constrained(["a"], backend="xgrammar")))


@pytest.mark.parametrize(("kind", "options"), [(CFG('start: "a"'), {}), (["a"], {"after": "x"})])
def test_grammars_and_triggers_are_refused(kind: Any, options: dict[str, str]) -> None:
    with pytest.raises(InvalidConstraintError, match="xgrammar"):
        spec_of(Constrained(kind, backend="xgrammar", **options))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("xgrammar")
    return Grammars(TOKENIZER, tiny.VOCABULARY, [EOS])


def _legal(mask_W: torch.Tensor) -> list[int]:
    return [t for t in range(tiny.VOCABULARY) if mask_W.view(torch.uint8)[t >> 3] >> (t & 7) & 1]


@pytest.mark.parametrize("name", KINDS)
def test_every_walk_is_undone_exactly(grammars: Grammars, name: str) -> None:
    spec = spec_of(Constrained(KINDS[name], backend="xgrammar"))
    for seed in range(10):
        chance = random.Random(seed)
        one, ids = Trail(lambda: grammars.start(spec), tiny.VOCABULARY, [EOS]), []
        while len(ids) < 60 and not one.exhausted:
            before = one.mask()
            open_ids = _legal(before)
            assert open_ids and not {1, 2} & set(open_ids), "control tokens are no text"
            forced = one.forced()
            assert one.allows(forced) == len(forced)
            draft: list[int] = []
            for _ in range(chance.randrange(5)):
                step = _legal(one.mask())
                if not step:
                    break
                token = chance.choice(step)
                assert one.allows([token]) == 1
                one.walk([token])
                draft.append(token)
                if one.exhausted:
                    break
            one.back()
            assert torch.equal(one.mask(), before)
            assert one.allows(draft) == len(draft)
            token = chance.choice(open_ids)
            one.commit(token)
            ids.append(token)
            if token == EOS:
                break
        if one.exhausted and name == "json":
            assert list(json.loads(TOKENIZER.decode(ids))) == ORDER["required"]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.2, "seed": 3}])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_nothing(grammars: Grammars, name: str, options: dict[str, Any]) -> None:
    target = tiny.model("llama", spread=2.0)
    kind = Constrained(KINDS[name], backend="xgrammar")
    sources = [NGram(min=1), DraftModel(tiny.perturbed(target, 0.03))]
    with Generator(target, sources, tokenizer=TOKENIZER, kv_memory="4MiB") as generator:
        plain = generator.generate([5, 6, 7], output_type=kind, gamma=0, max_tokens=120, **options)
        for source in ("ngram", "draft_model", "forced"):
            out = generator.generate([5, 6, 7], output_type=kind, source=source, max_tokens=120, **options)
            assert (out.token_ids, out.parsed) == (plain.token_ids, plain.parsed)

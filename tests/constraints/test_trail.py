"""A grammar along a draft and back: masks, what may follow, what must; ends are legal where the text may end."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fastdraft.constraints.base import Forced
from fastdraft.constraints.closing import Closing
from fastdraft.constraints.grammars import Grammars
from fastdraft.constraints.trail import Trail
from fastdraft.constraints.types import Spec
from fastdraft.errors import InvalidConstraintError
from tests import tiny

TOKENIZER = tiny.tokenizer()
EOS = 0
INVOICE = {
    "type": "object",
    "properties": {"customer": {"type": "string", "maxLength": 6}, "total": {"type": "integer", "minimum": 0}},
    "required": ["customer", "total"],
    "additionalProperties": False,
}
STRING, KEYS = {"type": "string", "maxLength": 6}, ["customer", "total", "city"]
SPECS = {
    "json": ("json", INVOICE),
    "two": (
        "json",
        {"type": "object", "properties": {k: STRING for k in KEYS}, "required": KEYS, "additionalProperties": False},
    ),
    "any": ("json", {}),
    "regex": ("regex", "[a-c]{2,3}(x|yy)?"),
    "choice": ("choice", ["yes", "no", "not sure"]),
    "lark": ("lark", 'start: "(" start? ")"'),
}


def spec(kind: str, source: Any) -> Any:
    return Spec(kind, source, str, "the output type")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, tiny.VOCABULARY, [EOS])


def legal(mask_W: torch.Tensor) -> list[int]:
    return [t for t in range(tiny.VOCABULARY) if mask_W.view(torch.uint8)[t >> 3] >> (t & 7) & 1]


def trail(grammars: Grammars, name: str, ends: tuple[int, ...] = (EOS,), **options: Any) -> Trail:
    return Trail(lambda: grammars.start(spec(*SPECS[name])), tiny.VOCABULARY, ends, **options)


@pytest.mark.parametrize("name", SPECS)
def test_every_walk_is_undone_exactly_and_masks_tell_what_follows(grammars: Grammars, name: str) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        one, ids = trail(grammars, name), []
        while len(ids) < 40:
            open_ids = legal(one.mask())
            assert open_ids
            # A draft: legal for a while, then perhaps not.
            draft: list[int] = []
            before = one.mask()
            for _ in range(chance.randrange(5)):
                step = legal(one.mask())
                token = chance.choice(step)
                assert one.allows([token]) == 1
                strange = chance.randrange(tiny.VOCABULARY)
                assert one.allows([strange]) == (strange in step)
                one.walk([token])
                draft.append(token)
                if one.exhausted:
                    break
            one.back()
            assert torch.equal(one.mask(), before)
            masks = one.masks(draft)
            assert torch.equal(one.mask(), before) and torch.equal(masks[0], before)
            assert one.allows(draft) == len(draft)
            token = chance.choice(open_ids)
            one.commit(token)
            ids.append(token)
            if token == EOS:
                break
            if draft and token == draft[0]:
                assert torch.equal(one.mask(), masks[1])
        text = TOKENIZER.decode(ids[:-1] if ids[-1] == EOS else ids)
        if ids[-1] == EOS and name in ("json", "two"):
            assert list(json.loads(text)) == SPECS[name][1]["required"]


def test_masks_of_a_draft_stop_at_its_first_illegal_token(grammars: Grammars) -> None:
    one = trail(grammars, "regex")
    a, z = TOKENIZER.convert_tokens_to_ids(["a", "z"])
    masks = one.masks([a, z, a])
    assert torch.equal(masks[1], masks[2]) and torch.equal(masks[2], masks[3])
    after = trail(grammars, "regex")
    after.commit(a)
    assert legal(after.mask()) == legal(masks[1])
    assert one.allows([a, z, a]) == 1
    assert legal(one.mask()) == legal(masks[0]), "it ends where it began"


def test_an_end_is_legal_exactly_where_the_text_may_end(grammars: Grammars) -> None:
    one = trail(grammars, "regex", ends=(EOS, 1))
    a = TOKENIZER.convert_tokens_to_ids("a")
    for token, may_end in ((None, False), (a, False), (a, True), (a, True)):
        if token is not None:
            one.commit(token)
        assert [end in legal(one.mask()) for end in (EOS, 1)] == [may_end] * 2
        assert one.allows([EOS]) == may_end
    one.walk([EOS])
    assert one.exhausted and one.allows([a]) == 0 and one.forced() == []
    one.back()
    assert not one.exhausted


def test_what_must_come_is_spelled_as_the_tokenizer_would(grammars: Grammars) -> None:
    one = trail(grammars, "json")
    forced = one.forced()
    text = TOKENIZER.decode(forced)
    assert text and '{"customer":"'.startswith(text)
    assert one.allows(forced) == len(forced)
    for token in TOKENIZER('{"customer":"ab","total":7}').input_ids:
        one.commit(token)
    assert one.forced() == [] and one.exhausted, "nothing may follow"


def test_what_several_tokens_can_spell_is_spelt_as_it_was_before_in_the_text() -> None:
    words = tiny.tokenizer(merged=tiny.JSON)
    grammars = Grammars(words, tiny.VOCABULARY, [EOS])
    one = trail(grammars, "two")
    assert words.decode(one.forced()) == '{"customer', "who knows which token holds the quotes behind it"
    for token in words('{"customer":"ab","').input_ids:
        one.commit(token)
    forced = one.forced()
    assert forced == words('total":"').input_ids and one.allows(forced) == len(forced)
    one.walk(forced[:1])
    assert one.forced() == forced[1:], "the same on the way"
    one.back()
    assert one.forced() == forced
    apart = words.convert_tokens_to_ids(['"', ":", '"'])
    for token in [*words("total").input_ids, *apart, *words('ab","').input_ids]:
        one.commit(token)
    assert one.forced() == words('city":"').input_ids, "both ways were seen once: the first one stays"
    other = trail(grammars, "two", guesses={b'":"': apart[0]})
    assert other.forced() == [*words('{"customer').input_ids, *apart[:2]], "taken to be so before the text tells"


def test_an_exhausted_text_says_so_with_an_end_or_without_one(grammars: Grammars) -> None:
    ids = TOKENIZER("aaayy").input_ids
    one, endless = trail(grammars, "regex"), trail(grammars, "regex", ends=())
    for token in ids:
        one.commit(token)
        endless.commit(token)
    assert one.forced() == [] and one.exhausted and legal(one.mask()) == [EOS]
    assert endless.exhausted and legal(endless.mask()) == []


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(?=a)ab"),
        ("regex", "[a-"),
        ("lark", "start: missing"),
        ("lark", "start start"),
        ("json", {"type": "strnig"}),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammars: Grammars, kind: str, source: Any) -> None:
    with pytest.raises(InvalidConstraintError, match="the output type cannot be enforced"):
        grammars.start(spec(kind, source))


def test_compiled_grammars_are_kept_and_shared_by_nobody(grammars: Grammars) -> None:
    one, two = trail(grammars, "regex"), trail(grammars, "regex")
    one.commit(TOKENIZER.convert_tokens_to_ids("a"))
    assert two.allows(TOKENIZER("aaayy").input_ids) == len(TOKENIZER("aaayy").input_ids)


class Fragile:
    """Tokens 1 and 2 for ever; after a 2 it cannot say what follows."""

    finished, exhausted = True, False

    def __init__(self) -> None:
        self.text: list[int] = []

    def mask(self, out_W: torch.Tensor) -> None:
        if 2 in self.text:
            raise RuntimeError("too complex")
        out_W[0] = 0b110

    def validate(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def rollback(self, n: int) -> None:
        assert 2 not in self.text, "it is made anew"
        del self.text[len(self.text) - n :]

    def forced(self) -> Forced:
        return Forced([])


def test_what_fails_over_a_draft_is_forgotten_with_it() -> None:
    one = Trail(Fragile, tiny.VOCABULARY, [])
    one.commit(1)
    masks = one.masks([1, 2, 1])
    assert [bool(mask.any()) for mask in masks] == [True, True, False, False]
    assert one.error is None and legal(one.mask()) == [1, 2]
    one.walk([2])
    assert not one.mask().any() and one.allows([1]) == 0 and one.forced() == []
    one.back()
    assert legal(one.mask()) == [1, 2]
    one.commit(2)
    assert not one.mask().any()
    assert isinstance(one.error, RuntimeError) and not one.whole


class Nested(Fragile):
    """Opens or ends, for ever; more than two open ones are too much for it."""

    finished = False

    def advance(self, tokens: Sequence[int]) -> None:
        super().advance(tokens)
        if self.text.count(BEGIN) > 2:
            raise RuntimeError("too complex")

    def mask(self, out_W: torch.Tensor) -> None:
        for token in (BEGIN, FINISH):
            out_W.view(torch.uint8)[token >> 3] |= 1 << (token & 7)

    def forced(self) -> Forced:
        return Forced([FINISH, *[BEGIN] * 3] if self.text[-1:] == [BEGIN] else [])


BEGIN, FINISH = tiny.tokenizer().convert_tokens_to_ids(["[", "]"])


def test_a_look_ahead_that_fails_ends_no_call() -> None:
    one = Trail(Nested, tiny.VOCABULARY, [], closing=Closing({"[": BEGIN, "]": FINISH}), budget=20)
    for token in (BEGIN, FINISH, BEGIN):
        one.commit(token)
        assert legal(one.mask()) == sorted([BEGIN, FINISH]) and one.error is None
    one.walk([FINISH])
    assert legal(one.mask()) == sorted([BEGIN, FINISH])
    one.back()
    assert one.error is None and legal(one.mask()) == sorted([BEGIN, FINISH])

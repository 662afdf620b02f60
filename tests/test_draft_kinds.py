"""Rounded drafts, drafts cut to some tokens and drafts that compete: whatever drafts, the output is the target's own.

Drafts are loaded from folders, as users load them, so that their kernels are exchanged; costs are given, not measured,
so that they are used where ``gamma`` is left to the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastdraft import Completion, DraftModel, DynamicAlpha, Generator, Model, NGram
from fastdraft.control.costs import Costs, Measured
from fastdraft.models.kernels import fasten
from fastdraft.proposers.draft_model import DraftModelProposer
from tests import tiny
from tests.grid import pairwise, whole
from tests.law import FAIL, PASS, SAMPLES, Array, brisk, chi_square, joint, total_variation
from tests.test_law import PROMPT, TOKENS, VOCABULARY, WARPS, _law, _models

ARCHITECTURES = ("llama", "qwen2", "gemma2", "phi3")
KINDS = ("prepacked", "int8", "int4", "auto", "cut", "ids", "int8 and ids", "competing")
GAMMAS: tuple[Any, ...] = (1, 3, 6, "auto")
BATCHES = ("single", "ragged")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
)
PROMPTS = ([(7 * i) % 300 + 3 for i in range(20)], [(11 * i) % 300 + 3 for i in range(5)], [50, 60, 70, 80, 90] * 3)
LONG = 32
COMMON: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True}
IDS = tuple(range(3, tiny.VOCABULARY, 2))

TARGET = Measured(((1, 1.0), (16, 1.3)), ((64, 2.0),))
DRAFT = Measured(((1, 0.02), (16, 0.03)), ((64, 0.05),))


@pytest.fixture(scope="module", autouse=True)
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Costs under which drafting pays, and a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTDRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(
            "fastdraft.build._costs", lambda config, *_: Costs(TARGET, {spec.name: DRAFT for spec in config.draft})
        )
        patch.setattr(Costs, "observe", lambda *_: None)
        yield


def sources(kind: str, folder: Path, ids: tuple[int, ...] = IDS) -> Any:
    """The draft of a kind, made from the model in a folder."""

    def loaded(quantization: Any, **fields: Any) -> Model:
        return Model(str(folder), quantization=quantization, **fields)

    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "prepacked": lambda: loaded("none", dtype="bfloat16"),
        "int8": lambda: loaded("int8"),
        "int4": lambda: loaded("int4"),
        "auto": lambda: str(folder),
        "cut": lambda: DraftModel(loaded("none"), vocabulary=len(ids)),
        "ids": lambda: DraftModel(loaded("none"), vocabulary=ids),
        "int8 and ids": lambda: DraftModel(loaded("int8"), vocabulary=ids),
        "competing": lambda: [
            DraftModel(loaded("int4"), name="small"),
            NGram(min=1),
            DraftModel(loaded("int8"), vocabulary=ids, name="smaller"),
        ],
    }
    return made[kind]()


class Pairs:
    """A target for each architecture, drafts in folders, and a generator for each kind; made once.

    Args:
        folder: For the drafts.
        dtype: The target's.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._targets: dict[str, Any] = {}
        self._expected: dict[str, list[list[int]]] = {}
        self._generators: dict[tuple[str, str], Generator] = {}

    def target(self, architecture: str) -> Any:
        if architecture not in self._targets:
            target = tiny.model(architecture, **tiny.WIDE)
            tiny.save(self._folder / architecture, tiny.perturbed(target, 0.02), tiny.tokenizer())
            self._targets[architecture] = target.to(self._dtype)
        return self._targets[architecture]

    def expected(self, architecture: str) -> list[list[int]]:
        """The greedy tokens after each prompt, from transformers' own ``generate``."""
        if architecture not in self._expected:
            target = self.target(architecture)
            self._expected[architecture] = [tiny.greedy(target, prompt, LONG) for prompt in PROMPTS]
        return self._expected[architecture]

    def generator(self, architecture: str, kind: str) -> Generator:
        key = architecture, kind
        if key not in self._generators:
            target = self.target(architecture)
            draft = sources(kind, self._folder / architecture)
            self._generators[key] = Generator(target, draft, tokenizer=tiny.tokenizer(), kv_memory="8MiB")
        return self._generators[key]

    def close(self) -> None:
        for generator in self._generators.values():
            generator.close()


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    pairs = Pairs(tmp_path_factory.mktemp("float32"), torch.float32)
    yield pairs
    pairs.close()


@pytest.fixture(scope="module")
def float64(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Where rounding of differently shaped products can't flip a near-tie of noise."""
    pairs = Pairs(tmp_path_factory.mktemp("float64"), torch.float64)
    yield pairs
    pairs.close()


# Greedy.


def greedy(pairs: Pairs, architecture: str, kind: str, gamma: Any, batch: str) -> list[Completion[None]]:
    prompts = PROMPTS if batch == "ragged" else PROMPTS[:1]
    outs = pairs.generator(architecture, kind).batch(prompts, temperature=0, gamma=gamma, **COMMON)
    for out, want in zip(outs, pairs.expected(architecture), strict=False):
        assert list(out.token_ids) == want
        assert out.lossless
    assert len({token for out in outs for token in out.token_ids}) >= 10
    metrics = pairs.generator(architecture, kind).metrics()
    assert metrics.draft_free_blocks == metrics.draft_total_blocks
    return outs


GREEDY = (ARCHITECTURES, KINDS, GAMMAS, BATCHES)


@pytest.mark.parametrize(("architecture", "kind", "gamma", "batch"), pairwise(GREEDY))
def test_greedy_is_plain_greedy(float32: Pairs, architecture: str, kind: str, gamma: Any, batch: str) -> None:
    greedy(float32, architecture, kind, gamma, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "gamma", "batch"), whole(GREEDY))
def test_greedy_is_plain_greedy_on_the_whole_grid(
    float32: Pairs, architecture: str, kind: str, gamma: Any, batch: str
) -> None:
    greedy(float32, architecture, kind, gamma, batch)


@pytest.mark.parametrize("gamma", [4, "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_neither_always_right_nor_always_wrong(float32: Pairs, kind: str, gamma: Any) -> None:
    outs = greedy(float32, "llama", kind, gamma, "ragged")
    assert 0 < sum(o.stats.accepted_tokens for o in outs) < sum(o.stats.draft_tokens for o in outs)


def test_every_source_of_several_drafts(float32: Pairs) -> None:
    generator = float32.generator("llama", "competing")
    outs = [generator.generate(prompt, gamma="auto", seed=s, **COMMON) for prompt in PROMPTS for s in range(2)]
    assert {name for out in outs for name in out.stats.by_source} == {"small", "ngram", "smaller"}


# Seeds.


def seeded(pairs: Pairs, setting: int, kind: str, gamma: Any, batch: str) -> list[Completion[None]]:
    prompts = PROMPTS if batch == "ragged" else PROMPTS[:1]
    options = SETTINGS[setting] | COMMON | {"seed": 11}
    outs = pairs.generator("llama", kind).batch(prompts, gamma=gamma, **options)
    plain = pairs.generator("llama", "none").batch(prompts, **options)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert all(out.lossless for out in outs)
    return outs


SEEDED = (range(len(SETTINGS)), KINDS, GAMMAS, BATCHES)


@pytest.mark.parametrize(("setting", "kind", "gamma", "batch"), pairwise(SEEDED))
def test_a_seed_gives_plain_decodings_tokens(float64: Pairs, setting: int, kind: str, gamma: Any, batch: str) -> None:
    seeded(float64, setting, kind, gamma, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "kind", "gamma", "batch"), whole(SEEDED))
def test_a_seed_gives_plain_decodings_tokens_on_the_whole_grid(
    float64: Pairs, setting: int, kind: str, gamma: Any, batch: str
) -> None:
    seeded(float64, setting, kind, gamma, batch)


# Targets with kernels of their own.


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tiny.model("qwen2", dtype=torch.bfloat16, **tiny.WIDE)
    return tiny.save(tmp_path_factory.mktemp("bfloat16") / "target", target, tiny.tokenizer())


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = tiny.perturbed(tiny.model("qwen2", **tiny.WIDE), 0.02).to(torch.bfloat16)
    return tiny.save(tmp_path_factory.mktemp("bfloat16") / "draft", draft, tiny.tokenizer())


def near_tie(target: Any, text: list[int], one: int, other: int) -> bool:
    """Whether two tokens are so close after a text that bfloat16 can't tell them apart."""
    with torch.inference_mode():
        logits_V = target(torch.tensor([text])).logits[0, -1].float()
    ulp = 2.0 ** (torch.frexp(logits_V.max())[1].item() - 8)
    return abs(float(logits_V[one] - logits_V[other])) <= 2 * ulp


@pytest.mark.parametrize("kind", ["int8", "int4", "prepacked", "ids", "competing"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_target_in_bfloat16_differs_from_its_own_plain_run_at_near_ties_alone(
    quantization: Any, kind: str, target_folder: Path, draft_folder: Path
) -> None:
    """Its layers give a row the same bits at every row count; attention over more rows may sum in another order."""
    with Generator(Model(str(target_folder), quantization=quantization), sources(kind, draft_folder)) as generator:
        plain = [generator.generate(p, temperature=0, gamma=0, **COMMON).token_ids for p in PROMPTS]
        outs = generator.batch(PROMPTS, temperature=0, gamma=4, **COMMON)
    assert sum(out.stats.accepted_tokens for out in outs) > 0
    own = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    fasten(own, quantization, label="own", source="")
    same = 0
    for prompt, out, want in zip(PROMPTS, outs, plain, strict=True):
        at = next((i for i in range(LONG) if out.token_ids[i] != want[i]), LONG)
        same += at
        assert at == LONG or near_tie(own, [*prompt, *want[:at]], out.token_ids[at], want[at])
    assert same > LONG, "near-ties are rare"


# The law of whole outputs.


@pytest.fixture(scope="module")
def lawful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft over the law's five letters, wide enough for int4."""
    draft = tiny.model("llama", vocabulary=VOCABULARY, num_hidden_layers=1, context=64, spread=0.5, **tiny.WIDE)
    return tiny.save(tmp_path_factory.mktemp("law") / "draft", draft, tiny.letters(VOCABULARY))


def sample(draft: Any, **options: Any) -> tuple[Array, list[Completion[None]]]:
    """Counts of whole outputs, and the outputs."""
    target, _ = _models()
    with (
        brisk(),
        Generator(
            target,
            draft,
            tokenizer=tiny.letters(VOCABULARY),
            max_batch=96,
            max_queue=SAMPLES,
            kv_memory="32MiB",
        ) as generator,
    ):
        outs = generator.batch([PROMPT], n=SAMPLES, max_tokens=TOKENS, seed=1, verification="rejection", **options)
    counts = np.zeros((VOCABULARY,) * TOKENS)
    np.add.at(counts, tuple(np.array([out.token_ids for out in outs]).T), 1)
    assert 0 < sum(out.stats.accepted_tokens for out in outs) < sum(out.stats.draft_tokens for out in outs)
    return counts, outs


def lawful_outputs(kind: str, warp: str, gamma: Any, folder: Path) -> None:
    counts, outs = sample(sources(kind, folder, (0, 2, 3)), gamma=gamma, **WARPS[warp])
    law = joint(_law(0, WARPS[warp]), VOCABULARY, TOKENS)
    assert all(out.lossless for out in outs)
    assert chi_square(counts, law) > PASS
    assert chi_square(counts.sum((2, 3)), law.sum((2, 3))) > PASS
    if kind == "competing":
        assert len({name for out in outs for name in out.stats.by_source}) > 1


@pytest.mark.parametrize(
    ("kind", "warp", "gamma"), [("int8 and ids", "T1", 3), ("competing", "top_k", "auto")], ids=lambda value: str(value)
)
def test_outputs_have_the_targets_law(kind: str, warp: str, gamma: Any, lawful: Path) -> None:
    lawful_outputs(kind, warp, gamma, lawful)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "warp", "gamma"), whole((KINDS, ("T1", "top_p"), (3, "auto"))))
def test_outputs_have_the_targets_law_on_the_whole_grid(kind: str, warp: str, gamma: Any, lawful: Path) -> None:
    lawful_outputs(kind, warp, gamma, lawful)


@pytest.mark.slow
def test_a_cut_draft_that_claims_its_whole_distribution_is_seen(lawful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn from what was kept, but q says that the others might have come too."""
    drawn = DraftModelProposer._draw

    def draw(self: Any, requests: Any, scores_BV: torch.Tensor, step: int) -> Any:
        p_BV, chosen_B = drawn(self, requests, scores_BV, step)
        return 0.6 * p_BV + 0.2 * (p_BV == 0), chosen_B

    monkeypatch.setattr(DraftModelProposer, "_draw", draw)
    counts, _ = sample(sources("ids", lawful, (0, 2, 3)), gamma=3, temperature=1.0)
    assert chi_square(counts, joint(_law(0, WARPS["T1"]), VOCABULARY, TOKENS)) < FAIL


def test_a_dynamic_alphas_distortion_bounds_how_far_its_law_is_off(lawful: Path) -> None:
    alpha = DynamicAlpha(base=0.5, low=0.3, high=0.8, utilisation=lambda: 0.7)
    counts, outs = sample(sources("int8", lawful), gamma=3, temperature=1.0, alpha=alpha)
    law = joint(_law(0, WARPS["T1"]), VOCABULARY, TOKENS)
    assert chi_square(counts, law) < FAIL, "the setting is meant to be visibly lossy"
    assert not any(out.lossless for out in outs)
    alphas = {value for out in outs for value in out.stats.alphas}
    assert len(alphas) > 2 and min(alphas) >= 0.3 and max(alphas) <= 0.8
    for out in outs:
        reached = zip(out.stats.gammas, out.stats.alphas, strict=True)
        assert 0 <= out.stats.distortion <= sum(gamma * (1 - a) for gamma, a in reached) + 1e-6
    bound = float(np.mean([out.stats.distortion for out in outs]))
    for axes in ((1, 2, 3), (2, 3), (0, 1, 2)):  # fewer cells, so that chance adds little
        assert 0.01 < total_variation(counts.sum(axes) / SAMPLES, law.sum(axes)) < bound

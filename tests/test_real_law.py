"""Sampled tokens of a real model follow the target, not the draft: a z-test over thousands of positions.

S_t holds the tokens that the draft likes better than the target does. A verify that favours the draft, in whatever way,
puts more of its output there than p_t(S_t) says; p and q come from plain transformers forwards over the finished text.

Shapes: T generated tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdraft import Completion, DraftModel, Generator
from tests import tiny
from tests.law import brisk

TEMPERATURE = 0.9
PROMPTS = (
    "The history of the lighthouse begins",
    "def read_config(path):\n    ",
    "Dear Mr. Holloway,\n\nThank you for",
    "Boil the potatoes until they are soft, then",
)
SAMPLES, TOKENS = 5, 104  # 2,080 tokens in all


@pytest.fixture(scope="module")
def draft(smollm2: Any) -> Any:
    """SmolLM2 has no small sibling; noise on its weights makes one that is right about two times in three."""
    return tiny.perturbed(smollm2, 0.05)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def outputs(smollm2: Any, draft: Any, tokenizer: Any) -> list[Completion[None]]:
    with (
        brisk(),
        Generator(
            smollm2,
            DraftModel(draft),
            tokenizer=tokenizer,
            max_batch=len(PROMPTS) * SAMPLES,
            kv_memory="512MiB",
        ) as generator,
    ):
        return generator.batch(
            PROMPTS,
            n=SAMPLES,
            max_tokens=TOKENS,
            ignore_eos=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            gamma=3,
            seed=2,
            verification="rejection",
        )


class Evidence:
    """Sums over positions: tokens found in S_t, how many were expected there, and their variance."""

    def __init__(self) -> None:
        self.found = self.expected = self.variance = 0.0

    def add(self, p_TV: Tensor, q_TV: Tensor, token_T: Tensor) -> None:
        liked_TV = q_TV > p_TV
        mass_T = (p_TV * liked_TV).sum(-1)
        self.found += liked_TV.gather(1, token_T[:, None]).sum().item()
        self.expected += mass_T.sum().item()
        self.variance += (mass_T * (1 - mass_T)).sum().item()

    @property
    def z(self) -> float:
        return float((self.found - self.expected) / np.sqrt(self.variance))


def _law(model: Any, prompt: list[int], tokens: tuple[int, ...]) -> Tensor:
    """The model's distribution at every generated position: [T, V] in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / TEMPERATURE).softmax(-1)


@brisk()
def test_sampled_tokens_follow_the_target_and_not_the_draft(
    smollm2: Any, draft: Any, tokenizer: Any, outputs: list[Completion[None]]
) -> None:
    generator = torch.Generator().manual_seed(3)
    ours, accept_everything = Evidence(), Evidence()
    for number, out in enumerate(outputs):
        prompt = tokenizer(PROMPTS[number // SAMPLES])["input_ids"]
        assert len(prompt) == out.prompt_tokens and len(out.token_ids) == TOKENS
        p_TV, q_TV = _law(smollm2, prompt, out.token_ids), _law(draft, prompt, out.token_ids)
        ours.add(p_TV, q_TV, torch.tensor(out.token_ids))
        accept_everything.add(p_TV, q_TV, torch.multinomial(q_TV, 1, generator=generator)[:, 0])
    drafted, accepted = (sum(getattr(o.stats, f) for o in outputs) for f in ("draft_tokens", "accepted_tokens"))
    assert 0 < accepted < drafted
    assert all(out.lossless for out in outputs)
    assert abs(ours.z) < 4
    assert accept_everything.z > 6

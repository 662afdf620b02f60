"""A seeded call with a fixed draft length and one source repeats, whatever prefixes were kept meanwhile."""

from __future__ import annotations

from fastdraft import DraftModel, Generator
from tests import tiny


def test_a_long_prompt_repeats_after_its_prefix_was_kept() -> None:
    target = tiny.model("llama", context=2048)
    ids = [(7 * i + 3) % 60 for i in range(1500)]
    options = {"seed": 5, "verification": "rejection", "gamma": 4, "source": "draft_model", "max_tokens": 24}
    with Generator(target, DraftModel(tiny.perturbed(target, 0.03)), tokenizer=tiny.tokenizer()) as generator:
        first, second = (generator.generate(ids, temperature=1.0, **options) for _ in range(2))  # type: ignore[arg-type]
    assert second.stats.prefix_tokens > 0
    assert first.stats.gammas == second.stats.gammas
    assert first.token_ids == second.token_ids

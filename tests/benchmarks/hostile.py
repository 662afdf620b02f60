"""Text that nothing can guess: does speculation ever cost more than it should?

python -m tests.benchmarks.hostile [--prompts 2] [--tokens 64] [--repeats 5] [--quantization int8]

Prompts of random tokens, a draft of random weights beside prompt lookup, temperature 1.5. After two calls of the same
kind, decode rate of ``gamma="auto"`` over our own plain decoding, in turns.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from fastdraft import DraftModel, Generator, Model, NGram
from fastdraft.aside import aside
from fastdraft.models.store import load_path
from fastdraft.timing import interleave, median, time_call
from tests.benchmarks.peer_files import PAIR
from tests.benchmarks.report import save
from tests.benchmarks.servers.serve_fastdraft import KV

TARGET, DRAFT = PAIR
TEMPERATURE, PROMPT_TOKENS = 1.5, 64
SIDES: dict[str, dict[str, Any]] = {"plain": {"gamma": 0}, "auto": {}}
WARM = 2
ORDINARY = 151_643  # ids below are text; above are control tokens


@contextmanager
def random_draft() -> Iterator[Path]:
    """A folder with a model of the draft's shape and no knowledge."""

    def make(folder: str) -> None:
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(load_path(DRAFT))
        build: Any = transformers.AutoModelForCausalLM.from_config
        build(config, dtype=torch.bfloat16).save_pretrained(folder)

    with tempfile.TemporaryDirectory() as folder:
        aside(lambda: make(folder))
        for file in load_path(DRAFT).glob("tokenizer*"):
            shutil.copy(file, folder)
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    args = parser.parse_args()
    chance = random.Random(0)
    texts = [[chance.randrange(ORDINARY) for _ in range(PROMPT_TOKENS)] for _ in range(args.prompts + WARM)]
    options = {"max_tokens": args.tokens, "temperature": TEMPERATURE, "ignore_eos": True}
    target = (
        load_path(TARGET) if args.quantization is None else Model(load_path(TARGET), quantization=args.quantization)
    )
    rows, ratios = [], []
    with random_draft() as draft, Generator(target, [NGram(), DraftModel(draft)], kv_memory=KV) as generator:
        for number, ids in enumerate(texts):
            sides = {
                name: (lambda ids=ids, more=more: time_call(generator, ids, **options, **more))
                for name, more in SIDES.items()
            }
            warming = number < WARM
            runs = interleave(sides, 1 if warming else args.repeats, warm=False)
            if warming:
                continue
            rate = {name: median([run.rate or 0.0 for run in got]) for name, got in runs.items()}
            ratios.append(rate["auto"] / rate["plain"])
            drafted = median([run.drafted for run in runs["auto"]])
            rows.append([str(number - WARM + 1), f"{rate['plain']:.2f}", f"{rate['auto']:.2f}", f"{drafted:.0f}"])
            rows[-1].append(f"**{ratios[-1]:.3f}**")
            print(*rows[-1], flush=True)
    text = (
        f"{PROMPT_TOKENS} random tokens as prompt, temperature {TEMPERATURE}, {args.tokens} tokens, a draft model of "
    )
    text += f"random weights beside prompt lookup, target {args.quantization or 'bf16'}."
    head = ["prompt", "plain, tok/s", "auto, tok/s", "tokens drafted", "auto over plain"]
    save(
        "hostile",
        {"title": "Text that nothing can guess", "text": text, "head": head, "rows": rows, "worst": min(ratios)},
    )


if __name__ == "__main__":
    main()

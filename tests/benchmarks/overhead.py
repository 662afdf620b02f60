"""Is our plain decoding at least as fast as transformers' own, and the first token no later?

python -m tests.benchmarks.overhead [--repeats 5] [--tokens 48]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

from fastdraft import Generator
from fastdraft.models.store import load_path
from tests.benchmarks.harness import Run, bars, interleave, median, run_ours, run_transformers, table, write

PROMPT_TOKENS = 512
MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct")


def measure(name: str, dtype: torch.dtype, repeats: int, tokens: int) -> dict[str, list[Run]]:
    folder = load_path(name, progress=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "The history of the town is long, and its archive holds a record of every year since it was founded. "
    ids = tokenizer(text * 60).input_ids[:PROMPT_TOKENS]
    with Generator(model, None, tokenizer=tokenizer) as generator:

        def ours() -> Run:
            return run_ours(generator, ids, tokens)

        def theirs() -> Run:
            return run_transformers(model, ids, tokens)

        same = run_ours(generator, ids, tokens).tokens == theirs().tokens
        runs = interleave({"transformers": theirs, "fastdraft": ours}, repeats)
    print(f"{name} {dtype}: same tokens {same}")
    if dtype == torch.float32:
        assert same
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--models", nargs="*", default=MODELS)
    args = parser.parse_args()
    rows, labels, ratios = [], [], []
    for name in args.models:
        for dtype in (torch.float32, torch.bfloat16) if "smollm2" in name else (torch.bfloat16,):
            repeats = args.repeats if "smollm2" in name else min(args.repeats, 3)
            runs = measure(name, dtype, repeats, args.tokens)
            rate = {side: median([r.rate or 0.0 for r in got]) for side, got in runs.items()}
            first = {side: median([r.first for r in got]) for side, got in runs.items()}
            total = {side: median([r.total for r in got]) for side, got in runs.items()}
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            labels.append(label)
            ratios.append(rate["fastdraft"] / rate["transformers"])
            rows.append(
                [
                    label,
                    f"{rate['transformers']:.1f}",
                    f"{rate['fastdraft']:.1f}",
                    f"**{ratios[-1]:.2f}**",
                    f"{first['transformers']:.2f}",
                    f"{first['fastdraft']:.2f}",
                    f"**{first['transformers'] / first['fastdraft']:.2f}**",
                    f"{total['transformers'] / total['fastdraft']:.2f}",
                ]
            )
    head = ["model", "transformers tok/s", "fastdraft tok/s", "decode ratio", "their first token, s"]
    head += ["our first token, s", "first-token ratio", "end-to-end ratio"]
    body = (
        f"`draft=None` against `model.generate` on the same loaded model, greedy, {PROMPT_TOKENS} prompt tokens, "
        f"{args.tokens} new ones. Above 1, ours is faster.\n\n{table(head, rows)}\n\n"
        + bars("overhead", "plain decoding, fastdraft over transformers", labels, ratios, "decode-rate ratio")
    )
    write("overhead", "Overhead of the loop", body)


if __name__ == "__main__":
    main()

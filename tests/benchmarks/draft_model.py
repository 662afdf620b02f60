"""The Qwen pair, greedy: ours against transformers plain, assisted (constant 4 and default) and prompt lookup.

python -m tests.benchmarks.draft_model [--repeats 3] [--tokens 96]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers

from fastdraft import DraftModel, Generator, NGram
from fastdraft.models.store import load_path
from tests.benchmarks.harness import Run, bars, interleave, median, run_ours, run_transformers, table, workload, write

TARGET, DRAFT = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
GAMMA = 4

EXTRACT = (
    "Extract the invoice as JSON with the keys number, date, customer, items (name, quantity, price), total.\n\n"
    "Invoice 2026-0117 of 3 March 2026 to Bergmann & Sons, Lindenstrasse 14, Potsdam: 12 oak boards at 18.50 each, "
    "4 boxes of brass screws at 6.20 each, 1 delivery at 35.00. Total due 281.80 within 14 days.",
    "List every person in this text as JSON objects with the keys name, role and city.\n\n"
    "Maria Keller, an architect from Graz, met Tom Okafor, who teaches physics in Leeds, and Ines Duarte, a surgeon "
    "in Porto. Their host was Paul Lindqvist, a baker from Uppsala.",
)


# Where the public workloads are absent.
OWN_CODE = [
    'def is_palindrome(text: str) -> bool:\n    """Whether text reads the same backwards, ignoring case."""\n',
    'class Stack:\n    """A stack with push, pop, peek and len; pop of an empty stack raises IndexError."""\n',
]
OWN_EDIT = [
    "Rename the variable `total` to `amount` and return the whole file.\n\n```python\ndef pay(items, rate):\n"
    "    total = 0\n    for item in items:\n        total += item.price * item.count\n    total *= 1 + rate\n"
    "    print('total', total)\n    return total\n```"
]


def prompts() -> dict[str, str]:
    """Two of code, two of extraction, one of edit."""
    code = workload("code.jsonl", lambda line: line["prompt"], [3, 11]) or OWN_CODE
    edit = workload("edit.jsonl", lambda line: line["prompt"], [10]) or OWN_EDIT
    return {"code 1": code[0], "code 2": code[1], "extract 1": EXTRACT[0], "extract 2": EXTRACT[1], "edit": edit[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    folders = [load_path(name, progress=True) for name in (TARGET, DRAFT)]
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    target, draft = (load(folder, dtype=torch.bfloat16).eval() for folder in folders)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    default = draft.generation_config.to_dict()
    constant = {"num_assistant_tokens": GAMMA, "num_assistant_tokens_schedule": "constant"}
    constant["assistant_confidence_threshold"] = 0.0

    def assisted(ids: list[int], tokens: int, settings: dict[str, Any]) -> Run:
        draft.generation_config.update(**(default | settings))
        return run_transformers(target, ids, tokens, assistant_model=draft)

    generator = Generator(target, [NGram(), DraftModel(draft)], tokenizer=tokenizer)
    sides: dict[str, Callable[[list[int], int], Run]] = {
        "transformers plain": lambda ids, n: run_transformers(target, ids, n),
        "transformers assisted, 4 constant": lambda ids, n: assisted(ids, n, constant),
        "transformers assisted, default": lambda ids, n: assisted(ids, n, {}),
        "transformers prompt lookup, 10": lambda ids, n: run_transformers(target, ids, n, prompt_lookup_num_tokens=10),
        "fastdraft plain": lambda ids, n: run_ours(generator, ids, n, gamma=0),
        "fastdraft draft model, gamma 4": lambda ids, n: run_ours(generator, ids, n, gamma=GAMMA, source="draft_model"),
        "fastdraft n-gram, gamma 8": lambda ids, n: run_ours(generator, ids, n, gamma=8, source="ngram"),
        "fastdraft n-gram then draft model, auto": lambda ids, n: run_ours(generator, ids, n),
    }
    for side in sides.values():  # to warm up
        side(tokenizer("def add(a, b):").input_ids, 8)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    firsts: dict[str, list[float]] = {side: [] for side in sides}
    totals: dict[str, list[float]] = {side: [] for side in sides}
    calls: dict[str, list[int]] = {side: [] for side in sides}
    equal: dict[str, int] = dict.fromkeys(sides, 0)
    detail = []
    for name, text in prompts().items():
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        runs = interleave(
            {side: (lambda run=run, ids=ids: run(ids, args.tokens)) for side, run in sides.items()},
            args.repeats,
            warm=False,
        )
        plain = runs["transformers plain"][0].tokens
        row = [name]
        for side, got in runs.items():
            rates[side].append(median([r.rate or 0.0 for r in got]))
            firsts[side].append(median([r.first for r in got]))
            totals[side].append(median([r.total for r in got]))
            calls[side].append(got[0].calls)
            equal[side] += got[0].tokens == plain
            row.append(f"{rates[side][-1]:.1f} / {got[0].calls}")
            print(name, side, row[-1], got[0].tokens == plain, flush=True)
        detail.append(row)
    generator.close()

    def mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    base = mean(rates["transformers plain"])
    rows = [
        [
            side,
            f"{mean(rates[side]):.2f}",
            f"**{mean(rates[side]) / base:.2f}**",
            f"{mean(firsts[side]):.2f}",
            f"{mean(totals[side]):.1f}",
            str(sum(calls[side])),
            f"{equal[side]} of {len(plain_names := prompts())}",
        ]
        for side in sides
    ]
    head = ["side", "tok/s", "over plain", "first token, s", "end to end, s", "target calls", "same tokens as plain"]
    body = (
        f"Qwen2.5-Coder-1.5B-Instruct with the 0.5B as draft, bfloat16, greedy, {args.tokens} tokens, "
        f"{len(plain_names)} prompts of code, extraction and edit. Rates and times are geometric means over the "
        "prompts. In bfloat16 rows computed in another shape or by another attention kernel round differently, so "
        "near-ties may fall the other way; equality in float32 is what the tests prove.\n\n"
        f"{table(head, rows)}\n\n"
        + bars(
            "draft-model",
            "decode rate over transformers plain",
            list(sides),
            [mean(rates[s]) / base for s in sides],
            "ratio",
        )
        + "\n## By prompt: tokens a second / target calls\n\n"
        + table(["prompt", *sides], detail)
    )
    write("draft-model", "A draft model against transformers", body)


if __name__ == "__main__":
    main()

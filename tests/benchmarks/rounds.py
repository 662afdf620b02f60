"""Where each millisecond of a round goes, beside what reading the weights alone would take.

python -m tests.benchmarks.rounds [--prompts 2] [--tokens 96] [--forms bf16 int8] [--gammas auto 0 8]
    [--draft-form int4]

The floor of a round is every weight of the target's linear layers read once, and the draft's once for each drafted
token, at the rate at which this machine reads memory, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from fastdraft import Generator, Model
from fastdraft.aside import aside
from fastdraft.models.store import load_path
from fastdraft.results import Completion
from fastdraft.timing import median
from tests.benchmarks.peer_files import PAIR
from tests.benchmarks.report import save
from tests.benchmarks.servers.serve_fastdraft import KV, VOCABULARY, sources
from tests.benchmarks.workloads import prompts, take

WIDTH = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 64}  # bytes a weight; int4 with scale and zero for each 64
READ = 1 << 28  # float32 numbers: far more than any cache holds


def read_rate() -> float:
    """Bytes a second at which all threads together read memory: the best of a few passes over 1 GiB."""
    numbers = torch.ones(READ)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - started))
    return best


def linear_weights(name: str, vocabulary: int | None = None) -> int:
    """Weights of all linear layers of a model, its output layer included, or as much of it as makes so many tokens."""
    build: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(transformers.AutoConfig.from_pretrained(load_path(name)))
    head = model.get_output_embeddings()
    dropped = 0 if vocabulary is None else max(0, head.out_features - vocabulary) * head.in_features
    return sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear)) - dropped


def spent(completions: Sequence[Completion[Any]]) -> dict[str, float]:
    """Means over the rounds after the first, in milliseconds; ``drafted`` and ``kept`` in tokens."""
    rounds, wall = [], 0.0
    for completion in completions:
        assert completion.trace is not None
        first, *later = completion.trace.rounds
        rounds += later
        if rate := completion.stats.tokens_per_second:  # over the time of the later rounds and what lies between them
            wall += (completion.completion_tokens - len(first.tokens)) / rate
    count = len(rounds)
    target, draft = (sum(getattr(one, part) for one in rounds) for part in ("target_seconds", "draft_seconds"))
    return {
        "drafted": sum(len(one.draft) for one in rounds) / count,
        "kept": sum(len(one.tokens) for one in rounds) / count,
        "target": 1e3 * target / count,
        "draft": 1e3 * draft / count,
        "rest": 1e3 * (wall - target - draft) / count,
        "all": 1e3 * wall / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--forms", nargs="*", choices=["bf16", "int8", "int4"], default=["bf16", "int8"])
    parser.add_argument("--gammas", nargs="*", default=["auto", "0", "8"])
    parser.add_argument("--draft-form", choices=sorted(WIDTH), default="int4", help="of its steps of one row")
    args = parser.parse_args()
    target_weights, draft_weights = linear_weights(PAIR[0]), linear_weights(PAIR[1], VOCABULARY)
    rates, rows = [aside(read_rate)], []
    for form in args.forms:
        quantization = "none" if form == "bf16" else form
        target = Model(load_path(PAIR[0]), quantization=quantization)
        with Generator(target, sources(load_path(PAIR[1])), kv_memory=KV) as generator:
            options: dict[str, Any] = {"max_tokens": args.tokens, "temperature": 0, "trace": True}
            for group in ("code", "qa"):
                generator.generate(prompts(group, "fit")[0].messages, **options)  # to warm up
            for gamma in args.gammas:
                # A fixed length is the draft model's alone, so that its steps can be told.
                drafting: dict[str, Any] = {"gamma": int(gamma), "source": "draft_model"} if gamma != "auto" else {}
                got = spent([generator.generate(p.messages, **options, **drafting) for p in take(args.prompts)])
                rates.append(aside(read_rate))
                read = target_weights * WIDTH[form]
                if gamma != "auto":
                    read += got["drafted"] * draft_weights * WIDTH[args.draft_form]
                floor = "" if gamma == "auto" else f"{1e3 * read / median(rates):.0f}"
                shown = [f"{got[part]:.0f}" for part in ("target", "draft", "rest", "all")]
                rows.append([form, gamma, f"{got['drafted']:.1f}", f"{got['kept']:.1f}", *shown, floor])
                print(*rows[-1], flush=True)
    head = ["target", "gamma", "drafted", "kept", "target, ms", "draft, ms", "rest, ms", "round, ms", "floor, ms"]
    text = (
        f"Means over the rounds after the first, {args.prompts} prompts. This machine read {median(rates) / 1e9:.1f} "
    )
    text += (
        f"GB/s; the floor counts a draft step as {args.draft_form} weights read once. Auto drafts from n-grams too, "
    )
    text += "whose tokens cost nothing, so it has no floor of this kind."
    save("rounds", {"title": "Where a round's time goes", "text": text, "head": head, "rows": rows})


if __name__ == "__main__":
    main()

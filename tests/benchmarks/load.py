"""Many calls at once: speculation under load, long prompts beside short ones, prefixes that are computed once.

python -m tests.benchmarks.load [--models smollm2 qwen] [--levels 1 2 4 8 16] [--repeats 3] [--tokens 64]
    [--parts levels mixed prefix]

Writes docs/benchmarks/load.md. transformers' continuous batching runs in a process of its own, in turns with ours.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fastdraft import Generator, NGram
from fastdraft.models.store import load_path
from fastdraft.timing import median
from tests.benchmarks.figures import decode_rate, geometric
from tests.benchmarks.harness import bars, table, write
from tests.benchmarks.peer import Peer
from tests.benchmarks.peer_files import PAIR
from tests.benchmarks.servers.serve_fastdraft import KV, sources
from tests.benchmarks.workloads import GROUPS, prompts

PLAIN, DRAFTED, BATCHED = "plain", "speculative", "continuous batching"
LEAST = 0.97  # of plain, at any level
OVER = {1: 2.0, 4: 1.6, 16: 1.0}  # over transformers' continuous batching
SIDES: Mapping[str, Mapping[str, Any]] = {PLAIN: {"gamma": 0}, DRAFTED: {}}


class Call(NamedTuple):
    """When each token of a call came, and when the call was made."""

    asked: float
    times: list[float]


def build(name: str, **options: Any) -> Generator:
    """A generator of one of the targets."""
    if name == "smollm2":
        return Generator(load_path("smollm2-135m-instruct"), NGram(), kv_memory=KV, **options)
    lookup, draft = sources(load_path(PAIR[1]))
    return Generator(load_path(PAIR[0]), [lookup, draft], kv_memory=KV, **options)


def at_once(generator: Generator, asked: Sequence[tuple[Sequence[int], int]], **options: Any) -> list[Call]:
    """Makes calls together, each for so many tokens; reads all their streams."""
    gate = threading.Barrier(len(asked))

    def run(one: tuple[Sequence[int], int]) -> Call:
        ids, tokens = one
        gate.wait()
        started, times = time.perf_counter(), []
        length = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        with generator.stream(ids, temperature=0, **length, **options) as stream:
            for chunk in stream:
                times += [time.perf_counter()] * len(chunk.token_ids)
        return Call(started, times)

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(run, asked))


def texts(name: str, count: int, longest: int = 1024) -> list[list[int]]:
    """Prompts of all groups, as ids, with the shorter ones first."""
    with build(name, max_batch=1) as generator:
        encode = generator._intake.encoder.encode
        mixed = [prompt for group in GROUPS for prompt in prompts(group, "measure")[: -(-count // len(GROUPS))]]
        every = [list(encode([{"role": "user", "content": prompt.text}])) for prompt in mixed]
    return sorted((ids for ids in every if len(ids) <= longest), key=len)[:count]


def levels(name: str, args: Any) -> str:
    """Decode rates at each number of concurrent calls."""
    every = texts(name, max(args.levels))
    target = load_path(PAIR[0] if name == "qwen" else "smollm2-135m-instruct")
    rows, ratios = [], []
    with contextlib.ExitStack() as stack:
        generator = stack.enter_context(build(name))
        command = [sys.executable, "-m", "tests.benchmarks.servers.serve_batches", target]
        peer = stack.enter_context(Peer(command, threads=torch.get_num_threads(), stop=()))
        at_once(generator, [(ids, args.tokens) for ids in every[:2]])
        for level in args.levels:
            groups = [every[first :: len(every) // level] for first in range(len(every) // level)]
            found: dict[str, list[float]] = {PLAIN: [], DRAFTED: [], BATCHED: []}
            for chosen in groups:
                rates: dict[str, list[float]] = {side: [] for side in found}
                for _ in range(args.repeats):
                    for side, how in SIDES.items():
                        generator.forget_prefixes()
                        calls = at_once(generator, [(ids, args.tokens) for ids in chosen], **how)
                        rates[side].append(decode_rate([call.times for call in calls]))
                    run = peer.run(chosen[0], args.tokens, prompts=chosen)
                    rates[BATCHED].append(run.rate or 0.0)
                for side, mine in rates.items():
                    found[side].append(median(mine))
            plain, drafted, batched = (geometric(found[side]) or 0.0 for side in (PLAIN, DRAFTED, BATCHED))
            asked = OVER.get(level)
            rows.append(
                [
                    str(level),
                    f"{plain:.1f}",
                    f"{drafted:.1f}",
                    f"**{drafted / plain:.2f}**{'' if drafted / plain >= LEAST else ' (**under 0.97**)'}",
                    f"{batched:.1f}",
                    f"**{drafted / batched:.2f}**",
                    "" if asked is None else f"{asked:.1f}: {'yes' if drafted / batched >= asked else '**no**'}",
                ]
            )
            ratios.append(drafted / plain)
            print(name, *rows[-1], flush=True)
    head = [
        "calls",
        "plain, tok/s",
        "speculative",
        "over plain",
        "transformers' continuous batching",
        "speculative over it",
        "asked, reached",
    ]
    plot = bars(f"load-{name}", "speculative over plain", [str(n) for n in args.levels], ratios, "times")
    return f"### {name}\n\n{table(head, rows)}\n\n{plot}"


def spread(values: Sequence[float]) -> list[str]:
    """p50, p95, p99 and the most, in milliseconds."""
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)]
    return [f"{1e3 * value:.0f}" for value in (*at, ordered[-1])]


def gaps(calls: Sequence[Call], after: float = 0.0) -> list[float]:
    """Seconds between the chunks of calls, from some moment on."""
    found = []
    for call in calls:
        moments = sorted({moment for moment in call.times if moment >= after})
        found += [later - sooner for sooner, later in pairwise(moments)]
    return found


def mixed(name: str, args: Any) -> str:
    """Short calls alone, beside a long prompt, and seven short ones to three long ones."""
    short = [ids[:120] for ids in texts(name, 8)]
    long = [(17 * i) % 4000 + 100 for i in range(args.long)]
    quick = [(ids, args.tokens) for ids in short]
    kinds: dict[str, list[tuple[list[int], int]]] = {
        "8 short": quick,
        "8 short, one long": [*quick, (long, 8)],
        "7 short, 3 of a quarter of it": [*quick[:7], *((long[i : i + args.long // 4], 8) for i in range(3))],
    }
    rows = []
    with build(name) as generator:
        at_once(generator, quick[:2])
        for kind, asked in kinds.items():
            for side, how in SIDES.items():
                first: list[float] = []
                between: list[float] = []
                for _ in range(args.repeats):
                    generator.forget_prefixes()
                    calls = at_once(generator, asked, **how)[: len(asked) - sum(tokens == 8 for _, tokens in asked)]
                    first += [call.times[0] - call.asked for call in calls]
                    # From when they all decode: what is between is a long prompt that comes in.
                    between += gaps(calls, max(call.times[0] for call in calls))
                rows.append([kind, side, *spread(first), *spread(between)])
                print(*rows[-1], flush=True)
    head = ["load", "side", *(f"first, {p}" for p in ("p50", "p95", "p99", "most"))]
    head += [f"between, {p}" for p in ("p50", "p95", "p99", "most")]
    return f"### {name}\n\nOf the short calls, in ms; the long prompt has {args.long} tokens.\n\n{table(head, rows)}\n"


def prefix(name: str, args: Any) -> str:
    """The first token of a call whose head was computed before."""
    head = [(13 * i) % 4000 + 100 for i in range(1500)]
    cold, warm = [], []
    with build(name) as generator:
        at_once(generator, [(head[:50], 4)])
        for number in range(args.repeats):
            generator.forget_prefixes()
            for found, tail in ((cold, [50 + number, 60]), (warm, [70 + number, 80])):
                (call,) = at_once(generator, [([*head, *tail], 4)])
                found.append(call.times[0] - call.asked)
        generator.forget_prefixes()
        before = generator.metrics()
        outs = generator.batch([head[:100]], n=8, max_tokens=32, ignore_eos=True, temperature=1.0, seed=1)
        found = generator.metrics()
    hits = found.prefix_hit_tokens - before.prefix_hit_tokens
    ratio = median(cold) / median(warm)
    return (
        f"### {name}\n\nA head of 1,500 tokens: the first token comes after {1e3 * median(cold):.0f} ms, with the head "
        f"in KV after {1e3 * median(warm):.0f} ms: **{ratio:.0f} times** sooner (15 is asked: "
        f"{'yes' if ratio >= 15 else '**no**'}). Of the {8 * 100} prompt tokens of `batch(n=8)` {hits} were shared "
        f"({len(outs)} samples).\n"
    )


PARTS: Mapping[str, tuple[str, Callable[[str, Any], str]]] = {
    "levels": (
        "Calls at once\n\nGreedy, 16 prompts of all workloads, so many at once until all were asked, each for the same "
        "number of tokens; tokens a second of all calls together, from when each has its first to when the last has "
        "its last.",
        levels,
    ),
    "mixed": ("Long prompts beside short calls", mixed),
    "prefix": ("Prefixes", prefix),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=["smollm2", "qwen"], default=["smollm2", "qwen"])
    parser.add_argument("--levels", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--long", type=int, default=4000)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    sections = []
    for part in args.parts:
        title, run = PARTS[part]
        sections += [f"## {title}\n", *(run(name, args) for name in args.models)]
    write("load", "Many calls at once", "\n".join(sections))


if __name__ == "__main__":
    main()

"""Extraction into pydantic types: what forced tokens, n-grams and a draft model give, and outlines beside them.

python -m tests.benchmarks.json [--models qwen smollm2] [--prompts 20] [--repeats 3] [--tokens 200] [--no-outlines]
    [--fit]

Decode rates over our own masked plain decoding, in turns; outlines runs in a process of its own. Writes
docs/benchmarks/json.md; with ``--fit`` it runs the texts to tune on, and prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
import transformers

from fastdraft import Completion, Generator, InvalidConstraintError, NGram, OutputValidationError
from fastdraft.constraints.grammars import Grammars
from fastdraft.constraints.trail import Trail
from fastdraft.constraints.types import as_constrained, spec_of
from fastdraft.models.store import load_path
from fastdraft.timing import median
from tests.benchmarks.extractions import EXTRACTIONS, FIT, TYPES, ask
from tests.benchmarks.figures import geometric
from tests.benchmarks.harness import bars, table, write
from tests.benchmarks.peer import Peer
from tests.benchmarks.peer_files import PAIR
from tests.benchmarks.servers.serve_fastdraft import KV, sources
from tests.benchmarks.workloads import PUBLIC
from tests.byte_grammar import in_order
from tests.byte_grammar import write as written

PLAIN, OUTLINES, FREE = "masked, plain", "outlines on transformers", "unconstrained, auto"
SIDES: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"gamma": 0},
    "forced tokens": {"source": "forced"},
    "forced and n-gram": {"source": "ngram"},
    "forced, n-gram and draft model": {},
}
ASKED = {"forced tokens": 1.25, "forced and n-gram": 1.7, "forced, n-gram and draft model": 2.8}
OVER_OUTLINES = 3.5


@dataclass(slots=True)
class Seen:
    """What the runs of one side gave, one entry a prompt.

    Attributes:
        rates: Decode rates.
        seconds: From the call to the end of the object.
        outs: Ours.
        whole: How many objects were valid.
    """

    rates: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    outs: list[Completion[Any]] = field(default_factory=list)
    whole: int = 0


class Ran(NamedTuple):
    """One run: decode rate, seconds, our completion, and whether the object was valid."""

    rate: float | None
    seconds: float
    out: Completion[Any] | None
    whole: bool


def build(name: str) -> Generator:
    """A generator of one of the pairs."""
    if name == "smollm2":
        return Generator(load_path("smollm2-135m-instruct"), NGram(), kv_memory=KV)
    lookup, draft = sources(load_path(PAIR[1]))
    return Generator(load_path(PAIR[0]), [lookup, draft], kv_memory=KV)


def measure(name: str, args: Any) -> tuple[dict[str, Seen], str]:
    """All sides on all prompts; and what is to be said of them."""
    chosen = (FIT if args.fit else EXTRACTIONS)[: args.prompts]
    target = load_path(PAIR[0] if name == "qwen" else "smollm2-135m-instruct")
    with contextlib.ExitStack() as stack:
        generator = stack.enter_context(build(name))
        peer = None
        if args.outlines:
            command = [sys.executable, "-m", "tests.benchmarks.servers.serve_outlines", target]
            peer = stack.enter_context(Peer(command, threads=torch.get_num_threads(), stop=()))
        sides = {side: how for side, how in SIDES.items() if name == "qwen" or side != "forced, n-gram and draft model"}
        seen = {side: Seen() for side in [*sides, FREE, *([OUTLINES] if peer else [])]}
        for number, (kind, text) in enumerate([chosen[0], *chosen]):  # the first once to warm up
            one = turns(generator, peer, sides, kind, text, args.repeats if number else 1, args.tokens)
            if number:
                for side, runs in one.items():
                    seen[side].rates.append(median([run.rate or 0.0 for run in runs]))
                    seen[side].seconds.append(median([run.seconds for run in runs]))
                    seen[side].outs += [run.out for run in runs[:1] if run.out is not None]
                    seen[side].whole += runs[0].whole
                rates = (f"{side}: {median([run.rate or 0.0 for run in runs]):.1f}" for side, runs in one.items())
                print(number, kind, *rates, flush=True)
        return seen, f"{len(chosen)} texts"


def turns(
    generator: Generator, peer: Peer | None, sides: Mapping[str, Any], kind: str, text: str, repeats: int, tokens: int
) -> dict[str, list[Ran]]:
    """Each side in turns on one text. The unconstrained call ends where the model ends it."""
    prompt = [{"role": "user", "content": ask(kind, text)}]
    found: dict[str, list[Ran]] = {}
    for _ in range(repeats):
        for side, how in [*sides.items(), (FREE, {})]:
            generator.forget_prefixes()
            output_type = None if side == FREE else TYPES[kind]
            started = time.perf_counter()
            try:
                out: Completion[Any] = generator.generate(
                    prompt, output_type=output_type, temperature=0, max_tokens=tokens, **how
                )
                whole = side != FREE
            except OutputValidationError as error:
                out, whole = error.completion, False
            seconds = time.perf_counter() - started
            found.setdefault(side, []).append(Ran(out.stats.tokens_per_second, seconds, out, whole))
        if peer is not None:
            run = peer.run([0], tokens, type=kind, text=ask(kind, text))
            found.setdefault(OUTLINES, []).append(Ran(run.rate, run.total, None, bool(run.accepted)))
    return found


def page(name: str, seen: Mapping[str, Seen], said: str, *, plot: bool) -> str:
    """The section of one pair."""
    plain = seen[PLAIN]
    rows, labels, values = [], [], []
    for side, one in seen.items():
        ratio = geometric([rate / base for rate, base in zip(one.rates, plain.rates, strict=True) if rate and base])
        rate = geometric([rate for rate in one.rates if rate])
        assert ratio is not None and rate is not None
        stats = [out.stats for out in one.outs]
        valid = "" if side == FREE else f"{one.whole} of {len(one.rates)}"
        mine = [""] * 4  # of another library's side
        if stats:
            mine = [
                f"{fmean(s.completion_tokens for s in stats):.0f}",
                f"{fmean(s.rounds for s in stats):.1f}",
                f"{fmean(s.forced_tokens / s.completion_tokens for s in stats):.0%}",
                f"{1e3 * fmean(s.constraint_seconds for s in stats):.1f}",
            ]
        asked = ASKED.get(side)
        bar = "" if asked is None else f"{asked:.2f}: {'yes' if ratio >= asked else '**no**'}"
        seconds = f"{fmean(one.seconds):.1f}"
        rows.append([side, f"{rate:.1f}", f"**{ratio:.2f}**", bar, seconds, valid, *mine])
        labels.append(side)
        values.append(ratio)
    head = [
        "side",
        "tok/s",
        "over masked plain",
        "asked, reached",
        "seconds, mean",
        "valid",
        "tokens",
        "target calls",
        "forced",
        "grammar, ms an object",
    ]
    fast = [side for side in seen if side in ASKED][-1]
    lines = [f"## {name}\n", f"{said}.\n", table(head, rows), ""]
    if OUTLINES in seen:
        over = geometric([a / b for a, b in zip(seen[fast].rates, seen[OUTLINES].rates, strict=True) if a and b])
        assert over is not None
        reached = (
            f" ({OVER_OUTLINES} is asked: {'yes' if over >= OVER_OUTLINES else '**no**'})" if name == "qwen" else ""
        )
        lines.append(f"{fast[0].upper()}{fast[1:]}, over outlines on transformers: **{over:.2f}**{reached}.")
    free = geometric([a / b for a, b in zip(seen[fast].rates, seen[FREE].rates, strict=True) if a and b])
    lines.append(f"The same over our own unconstrained calls: **{free:.2f}** (1 is asked).\n")
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain.outs, seen[fast].outs, strict=True))
    lines.append(f"The tokens of masked plain decoding: {same} of {len(plain.outs)}.\n")
    if plot:
        lines.append(bars(f"json-{name}", "decode rate over masked plain decoding", labels, values, "times"))
    return "\n".join(lines)


def grammar_costs() -> str:
    """Milliseconds of compiling and of masks, over real schemas and their valid instances, with Qwen's vocabulary."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(load_path(PAIR[0]))
    size, eos = len(tokenizer), [tokenizer.eos_token_id]
    grammars = Grammars(tokenizer, size, eos)
    grammars.start(spec_of(as_constrained(int)))  # reads the vocabulary
    compiled, normalised, masks, served, walked, valid = [], [], [], 0, 0, 0
    for line in map(json.loads, (PUBLIC / "jsonschemabench.jsonl").read_text("utf-8").splitlines()):
        started = time.perf_counter()
        try:
            spec = spec_of(as_constrained(line["schema"]))
            ready = time.perf_counter()
            grammars.start(spec)
        except InvalidConstraintError:
            continue
        served += 1
        normalised.append(1e3 * (ready - started))
        compiled.append(1e3 * (time.perf_counter() - ready))
        for test in line["tests"]:
            if test["valid"]:
                trail = Trail(partial(grammars.start, spec), size, eos)
                text = written(in_order(test["data"], spec.source))
                for token in tokenizer(text, add_special_tokens=False).input_ids:
                    started = time.perf_counter()
                    trail.mask()
                    masks.append(1e6 * (time.perf_counter() - started))
                    if not trail.allows([token]):
                        break
                    trail.commit(token)
                else:
                    walked += 1
                valid += 1
    rows = [
        ["made plain, ms", f"{len(normalised)} schemas", *_spread(normalised)],
        ["compiled, ms", f"{len(compiled)} schemas", *_spread(compiled)],
        ["one mask, us", f"{len(masks):,} places", *_spread(masks)],
    ]
    head = ["", "of", "mean", "median", "99th percentile", "most"]
    text = (
        f"{served} of 63 schemas of jsonschemabench are served, with {size:,} tokens; {walked} of their {valid} valid "
    )
    text += "instances were walked to the end, the others are written otherwise."
    return f"## Grammar work\n\n{text}\n\n{table(head, rows)}\n"


def _spread(values: Sequence[float]) -> list[str]:
    ordered = sorted(values)
    return [f"{one:.3g}" for one in (fmean(ordered), median(ordered), ordered[int(0.99 * len(ordered))], ordered[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=["qwen", "smollm2"], default=["qwen", "smollm2"])
    parser.add_argument("--prompts", type=int, default=len(EXTRACTIONS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--no-outlines", dest="outlines", action="store_false")
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    sections = [page(name, *measure(name, args), plot=not args.fit) for name in args.models]
    if args.fit:
        print("\n".join(sections))
        return
    if PUBLIC.is_dir():
        sections.append(grammar_costs())
    intro = (
        "Letters, notices and notes, read into pydantic types (`tests/benchmarks/extractions.py`), greedy. Each side "
        "writes an object to its end; decode rates are tokens after the first round's over the time after it, medians "
        "over turns, geometric means over texts.\n\n"
    )
    write("json", "Extraction into types", intro + "\n".join(sections))


if __name__ == "__main__":
    main()

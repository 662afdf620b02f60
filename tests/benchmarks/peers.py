"""The Qwen pair against transformers, llama.cpp and OpenVINO, all sides in turns.

python -m tests.benchmarks.peers [--sets bf16 quantised] [--parts greedy first sampled] [--sides PATTERN ...]
    [--prompts 6] [--tokens 96] [--repeats 5] [--slow-repeats 3] [--peers FOLDER]

Peers of other environments are made by ``python -m tests.benchmarks.peer_files``; one that is absent is left out, and
the page says so. Results go to docs/benchmarks/cpu.json, and from there into docs/benchmarks/cpu.md.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from fastdraft.errors import FastDraftError
from fastdraft.models.store import load_path
from fastdraft.timing import Run
from tests.benchmarks.differences import gap_in_ulps
from tests.benchmarks.peer import Peer
from tests.benchmarks.peer_files import PAIR, default_folder
from tests.benchmarks.report import save
from tests.benchmarks.servers.serve_transformers import model
from tests.benchmarks.sides import BASE, SETS, USUAL, Server, Side, command
from tests.benchmarks.workloads import Prompt, prompts, take

Runs: TypeAlias = dict[str, list[Run]]
TARGET = PAIR[0]
PARTS = ("greedy", "first", "sampled")
FIRST_TOKENS = 512
TEMPERATURE = 0.8


@dataclass(slots=True)
class Loaded:
    """The sides of one set that could be loaded.

    Attributes:
        sides: By name, in the order they run.
        peers: The process of each server.
        absent: What is left out, and why.
    """

    sides: dict[str, Side] = field(default_factory=dict)
    peers: dict[Server, Peer] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, ids: Sequence[int], tokens: int, **options: Any) -> Run:
        """One run of a side."""
        side = self.sides[name]
        return self.peers[side.server].run(ids, tokens, **side.options, **options)


def load(
    wanted: Mapping[str, Side], folder: Path, threads: int, stop: Sequence[int], stack: contextlib.ExitStack
) -> Loaded:
    """Starts the servers of all sides; those that do not start are left out."""
    loaded = Loaded()
    for name, side in wanted.items():
        if side.server not in loaded.peers:
            try:
                peer = stack.enter_context(Peer(command(side.server, folder), threads=threads, stop=stop))
            except (OSError, RuntimeError, FastDraftError) as error:
                loaded.absent[name] = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                print(f"left out: {name}: {loaded.absent[name]}", flush=True)
                continue
            loaded.peers[side.server] = peer
            print(f"loaded {' '.join(side.server)}: {peer.versions}", flush=True)
        loaded.sides[name] = side
    if BASE not in loaded.sides:
        raise SystemExit("the base could not be loaded")
    return loaded


def in_turns(loaded: Loaded, chosen: Sequence[str], ids: Sequence[int], args: Any, **options: Any) -> Runs:
    """All sides A B C A B C ...; slow ones sit out the later turns."""
    runs: Runs = {side: [] for side in chosen}
    for turn in range(args.repeats):
        for side in chosen:
            if turn < args.slow_repeats or not loaded.sides[side].slow:
                runs[side].append(got := loaded.run(side, ids, args.tokens, **options))
                rate = "-" if got.rate is None else f"{got.rate:.1f}"
                print(f"  {side}: {rate} tok/s, first {got.first:.2f} s, {len(got.tokens)} tokens", flush=True)
    return runs


def as_json(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """Times and counts of runs; how many tokens, not which."""
    return {
        side: [asdict(run) | {"tokens": len(run.tokens)} for run in got]  # texts have licences of their own
        for side, got in runs.items()
    }


def greedy(loaded: Loaded, chosen: Sequence[Prompt], tokenizer: Any, args: Any) -> dict[str, Any]:
    """Each prompt by each side, and where the tokens are not those they must be."""
    found, compared = [], []
    for prompt in chosen:
        print(f"{prompt.group} {prompt.id}", flush=True)
        ids = encode(tokenizer, prompt)
        runs = in_turns(loaded, list(loaded.sides), ids, args)
        compared.append((ids, {side: got[0].tokens for side, got in runs.items()}))
        found.append({"id": prompt.id, "group": prompt.group, "prompt_tokens": len(ids), "runs": as_json(runs)})
    return {"greedy": found, "differences": differences(compared, loaded), "tokens": args.tokens}


def differences(
    compared: Sequence[tuple[Sequence[int], Mapping[str, Sequence[int]]]], loaded: Loaded
) -> dict[str, dict[str, Any]]:
    """For each side, on how many prompts its tokens are those they must be, and the gap in ulps where they are not."""
    table: dict[str, dict[str, Any]] = {}
    for name, side in loaded.sides.items():
        against = side.against
        if against is None or against not in loaded.sides:
            continue
        gaps = [
            gap_in_ulps(model(str(load_path(TARGET))), ids, made[against], made[name]) if against == BASE else None
            for ids, made in compared
            if made[name] != made[against]
        ]
        table[name] = {"against": against, "same": len(compared) - len(gaps), "of": len(compared), "gaps": gaps}
    return table


def sampled(loaded: Loaded, chosen: Sequence[Prompt], tokenizer: Any, args: Any) -> list[dict[str, Any]]:
    """Code prompts at a temperature, ours alone."""
    ours = [side for side in loaded.sides if side.startswith("fastdraft") and side.endswith((" plain", " auto"))]
    found = []
    for prompt in chosen:
        if prompt.group == "code":
            runs = in_turns(loaded, ours, encode(tokenizer, prompt), args, temperature=TEMPERATURE)
            found.append({"id": prompt.id, "group": prompt.group, "runs": as_json(runs)})
    return found


def first(loaded: Loaded, tokenizer: Any, args: Any) -> dict[str, Any]:
    """The first token after a prompt of 512."""
    ids = [token for prompt in prompts("rag", "measure") for token in tokenizer(prompt.text).input_ids][:FIRST_TOKENS]
    return as_json(in_turns(loaded, list(loaded.sides), ids, argparse.Namespace(**vars(args) | {"tokens": 1})))


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, by the chat template."""
    ids: list[int] = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    return ids


def measure(name: str, args: Any) -> None:
    """One set: load, warm up, and every part that was asked for, saved as soon as it is there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(load_path(TARGET))
    stop: tuple[int, ...] = ()  # every run has the same number of tokens
    wanted = {
        side: how for side, how in SETS[name].items() if side == BASE or any(fnmatch(side, p) for p in args.sides)
    }
    chosen = take(args.prompts)
    with contextlib.ExitStack() as stack:
        loaded = load(wanted, args.peers, torch.get_num_threads(), stop, stack)
        warm = [encode(tokenizer, prompts(group, "fit")[0]) for group in ("code", "qa")]
        for side, how in loaded.sides.items():
            for ids in warm[: 1 if how.slow else None]:
                loaded.run(side, ids, min(args.tokens, 48))
        versions = {name: number for peer in loaded.peers.values() for name, number in peer.versions.items()}
        save(name, {"absent": loaded.absent, "peers": versions})
        if "first" in args.parts:
            save(name, {"first": first(loaded, tokenizer, args)})
        if "greedy" in args.parts:
            save(name, greedy(loaded, chosen, tokenizer, args))
        if "sampled" in args.parts:
            save(name, {"sampled": sampled(loaded, chosen, tokenizer, args)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", choices=sorted(SETS), default=sorted(SETS))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--sides", nargs="*", default=USUAL, metavar="PATTERN", help="'*': all")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow-repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=default_folder())
    args = parser.parse_args()
    for name in args.sets:
        measure(name, args)


if __name__ == "__main__":
    main()

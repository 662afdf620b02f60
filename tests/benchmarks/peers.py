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

from fastdraft.models.store import load_path
from fastdraft.timing import Run
from tests.benchmarks.differences import gap_in_ulps
from tests.benchmarks.peer_files import default_folder
from tests.benchmarks.report import save
from tests.benchmarks.sides import BASE, SETS, TARGET, Family, Machine, Runner, transformers_model
from tests.benchmarks.workloads import GROUPS, Prompt, prompts, take

Runs: TypeAlias = dict[str, list[Run]]
PARTS = ("greedy", "first", "sampled")
FIRST_TOKENS = 512
TEMPERATURE = 0.8


@dataclass(slots=True)
class Loaded:
    """The sides of one set that could be loaded.

    Attributes:
        runners: By side, in the order they run.
        families: The family of each side.
        absent: What is left out, and why.
    """

    runners: dict[str, Runner] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def load(families: Sequence[Family], patterns: Sequence[str], machine: Machine, stack: contextlib.ExitStack) -> Loaded:
    """Loads the families of which a side is wanted; the base always is."""
    loaded = Loaded()
    for family in families:
        wanted = [side for side in family.sides if side == BASE or any(fnmatch(side, p) for p in patterns)]
        if not wanted:
            continue
        try:
            runners = stack.enter_context(family.load(machine, wanted))
        except Exception as error:
            if BASE in wanted:
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            loaded.absent |= dict.fromkeys(wanted, reason)
            print(f"left out: {', '.join(wanted)}: {reason}", flush=True)
            continue
        loaded.runners |= {side: runners[side] for side in wanted}
        loaded.families |= dict.fromkeys(wanted, family)
    return loaded


def in_turns(loaded: Loaded, chosen: Sequence[str], ids: Sequence[int], args: Any, **options: Any) -> Runs:
    """All sides A B C A B C ...; slow ones sit out the later turns."""
    runs: Runs = {side: [] for side in chosen}
    for turn in range(args.repeats):
        for side in chosen:
            if turn < args.slow_repeats or not loaded.families[side].slow:
                runs[side].append(got := loaded.runners[side](ids, args.tokens, **options))
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
        runs = in_turns(loaded, list(loaded.runners), ids, args)
        compared.append((ids, {side: got[0].tokens for side, got in runs.items()}))
        found.append({"id": prompt.id, "group": prompt.group, "prompt_tokens": len(ids), "runs": as_json(runs)})
    return {"greedy": found, "differences": differences(compared, loaded), "tokens": args.tokens}


def differences(
    compared: Sequence[tuple[Sequence[int], Mapping[str, Sequence[int]]]], loaded: Loaded
) -> dict[str, dict[str, Any]]:
    """For each side, on how many prompts its tokens are those they must be, and the gap in ulps where they are not."""
    judged = any(family.against == BASE for family in loaded.families.values())
    judge = transformers_model(TARGET) if judged else None  # mapped from the same files as the base's
    table: dict[str, dict[str, Any]] = {}
    for side, family in loaded.families.items():
        against = family.against
        if against is None or against not in loaded.runners:
            continue
        gaps = [
            gap_in_ulps(judge, ids, made[against], made[side]) if against == BASE else None
            for ids, made in compared
            if made[side] != made[against]
        ]
        table[side] = {"against": against, "same": len(compared) - len(gaps), "of": len(compared), "gaps": gaps}
    return table


def sampled(loaded: Loaded, chosen: Sequence[Prompt], tokenizer: Any, args: Any) -> list[dict[str, Any]]:
    """Code prompts at a temperature, ours alone."""
    ours = [side for side in loaded.runners if side.startswith("fastdraft") and side.endswith((" plain", " auto"))]
    found = []
    for prompt in chosen:
        if prompt.group == "code":
            runs = in_turns(loaded, ours, encode(tokenizer, prompt), args, temperature=TEMPERATURE)
            found.append({"id": prompt.id, "group": prompt.group, "runs": as_json(runs)})
    return found


def first(loaded: Loaded, tokenizer: Any, args: Any) -> dict[str, Any]:
    """The first token after a prompt of 512."""
    ids = [token for prompt in prompts("rag", "measure") for token in tokenizer(prompt.text).input_ids][:FIRST_TOKENS]
    return as_json(in_turns(loaded, list(loaded.runners), ids, argparse.Namespace(**vars(args) | {"tokens": 1})))


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, by the chat template."""
    ids: list[int] = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    return ids


def measure(name: str, args: Any) -> None:
    """One set: load, warm up, and every part that was asked for, saved as soon as it is there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(load_path(TARGET))
    stop = tuple(transformers.GenerationConfig.from_pretrained(load_path(TARGET)).eos_token_id)
    machine = Machine(args.peers, torch.get_num_threads(), stop)
    with contextlib.ExitStack() as stack:
        loaded = load(SETS[name], args.sides, machine, stack)
        warm = [encode(tokenizer, prompts(group, "fit")[0]) for group in ("code", "qa")]
        for side, run in loaded.runners.items():
            for ids in warm[: 1 if loaded.families[side].slow else None]:
                run(ids, min(args.tokens, 48))
        chosen = take(args.prompts)
        save(name, {"absent": loaded.absent, "sides": list(loaded.runners), "groups": list(GROUPS)})
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
    parser.add_argument("--sides", nargs="*", default=["*"], metavar="PATTERN", help="such as 'fastdraft*'")
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

"""docs/benchmarks/cpu.json, which several scripts add to, and the page made from it."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.demands import DEMANDS
from tests.benchmarks.figures import Figures
from tests.benchmarks.harness import PAGES, bars, table
from tests.benchmarks.sides import BASE
from tests.benchmarks.workloads import GROUPS

FILE = PAGES / "cpu.json"
PACKAGES = ("fastdraft", "torch", "transformers")

SET_TITLES = {
    "bf16": "In bfloat16, the target as loaded",
    "quantised": "With an int8 target, against llama.cpp and OpenVINO",
}


def save(section: str, found: Mapping[str, Any]) -> None:
    """Adds what was measured to a section of cpu.json, with date, versions and command, and writes the page anew."""
    results = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    command = " ".join(["python", "-m", f"tests.benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    stamp = {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "versions": {name: version(name) for name in PACKAGES},
        "machine": f"{platform.machine()}, {_processor()}, {torch.get_num_threads()} threads",
    }
    results[section] = results.get(section, {}) | {"measured": stamp} | dict(found)
    PAGES.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(results, indent=1), "utf-8")
    (PAGES / "cpu.md").write_text(page(results), "utf-8")


def page(results: Mapping[str, Any]) -> str:
    """The page from what has been measured so far."""
    figures = Figures(results)
    parts = ["# Against other engines on a CPU", INTRODUCTION, _demands(figures)]
    for name, title in SET_TITLES.items():
        if name in results:
            parts += [f"## {title}", _compared(figures, name), _first(figures, name), _sampled(figures, name)]
            parts += [_absent(results[name]), _measured(results[name])]
    for name in ("rounds", "gamma", "hostile", "quality"):
        if name in results:
            section = results[name]
            rows = table(section["head"], section["rows"])
            parts += [f"## {section['title']}", section["text"], rows, _measured(section)]
    return "\n\n".join(part for part in parts if part) + "\n"


INTRODUCTION = (
    "Qwen2.5-Coder-1.5B-Instruct with the 0.5B as draft, greedy, the same number of tokens from every side: an end of "
    "sequence does not end a run (transformers and fastdraft exclude it, llama.cpp and OpenVINO pass over it). Sides "
    "run in turns on each prompt; figures are medians over turns, then geometric means over prompts. **Ratios are "
    f"decode rates (tokens after the first over the time after it) over `{BASE}`** in the same run, by kind of "
    "prompt; time to first token and end to end stand beside them. Nothing was tuned on these prompts: see "
    "`tests/benchmarks/workloads.py`."
)


def _demands(figures: Figures) -> str:
    rows = [
        [demand.text, f"{demand.least:.2f}", f"{value:.2f}", "yes" if value >= demand.least else "**no**"]
        for demand in DEMANDS
        if (value := demand.value(figures)) is not None
    ]
    return "## What is asked, and what is reached\n\n" + table(["", "at least", "measured", "reached"], rows)


def _compared(figures: Figures, name: str) -> str:
    sides = figures.sides(name)
    if not sides:
        return ""
    rows = []
    for side in sides:
        groups = [figures.ratio(name, side, BASE, group) for group in GROUPS]
        rows.append(
            [
                side,
                _number(figures.rate(name, side), 1),
                *(_number(ratio, 2) for ratio in groups),
                f"**{_number(figures.ratio(name, side, BASE), 2)}**",
                _number(figures.mean(name, side, "first"), 2),
                _number(figures.mean(name, side, "total"), 1),
                _number(figures.tokens_a_call(name, side), 1),
                _difference(figures.difference(name, side)),
            ]
        )
    head = ["side", "tok/s", *GROUPS, "all groups", "first token, s", "end to end, s", "tokens a call", "same tokens"]
    counts = figures.counts(name)
    said = ", ".join(f"{count} of {group}" for group, count in counts.items())
    ratios = [figures.ratio(name, side, BASE) or 0.0 for side in sides]
    picture = bars(f"cpu-{name}", f"decode rate over {BASE}", sides, ratios, "ratio")
    return f"{sum(counts.values())} prompts: {said}.\n\n{table(head, rows)}\n\n{picture}"


def _difference(found: Mapping[str, Any] | None) -> str:
    """Such as ``5 of 6; 1.0 ulp`` : the widest gap between the two tokens where outputs part."""
    if found is None:
        return ""
    text = f"{found['same']} of {found['of']}"
    gaps = [gap for gap in found["gaps"] if gap is not None]
    return f"{text}; gap {max(gaps):.1f} ulp" if gaps else text


def _first(figures: Figures, name: str) -> str:
    firsts = figures.firsts(name)
    if not firsts:
        return ""
    rows = [[side, f"{seconds:.2f}", f"**{firsts[BASE] / seconds:.2f}**"] for side, seconds in firsts.items()]
    return "First token after 512 prompt tokens:\n\n" + table(["side", "seconds", "times sooner"], rows)


def _sampled(figures: Figures, name: str) -> str:
    rows = [
        [side, f"{rate:.1f}", _number(figures.sampled_over_greedy(name, side), 2)]
        for side, rate in figures.sampled(name).items()
    ]
    head = ["side", "tok/s at 0.8", "over greedy"]
    return "Code at temperature 0.8, a new sample each time:\n\n" + table(head, rows) if rows else ""


def _absent(section: Mapping[str, Any]) -> str:
    return "\n".join(f"- Left out: {side} ({reason})" for side, reason in section.get("absent", {}).items())


def _measured(section: Mapping[str, Any]) -> str:
    stamp = section["measured"]
    known = stamp["versions"] | section.get("peers", {})
    versions = ", ".join(f"{name} {number}" for name, number in known.items())
    return f"Measured {stamp['date']} with `{stamp['command']}`: {versions}; {stamp['machine']}."


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _processor() -> str:
    """The processor's name and what matters here of what it can do, where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        known.setdefault(key.strip(), value.strip())
    flags: Sequence[str] = known.get("flags", "").split()
    able = [flag for flag in ("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8") if flag in flags]
    return f"{known.get('model name', platform.processor())} ({' '.join(able) or 'no bf16 or int8 instructions'})"

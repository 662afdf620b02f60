"""The sides of a comparison: which server runs each, and with what options."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fastdraft.models.store import load_path
from tests.benchmarks.peer_files import PAIR, interpreter, model_file

BASE = "transformers plain"
SERVERS = Path(__file__).with_name("servers")

# Such as ("openvino", "int8", "draft"): sides with the same words share a process.
Server: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One side.

    Attributes:
        server: The process it runs in.
        options: Of each of its runs.
        slow: Whether it is run fewer times.
        against: The side whose tokens its own must be, if any.
    """

    server: Server
    options: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = True
    against: str | None = None


def command(server: Server, peers: Path) -> list[str | Path]:
    """The command line of a server.

    Args:
        server: As in `Side`.
        peers: The folder of `peer_files`.
    """
    name, *words = server
    target, draft = PAIR
    if name in ("transformers", "fastdraft"):
        module = f"tests.benchmarks.servers.serve_{name}"
        rounding = ["--quantization", words[0]] if words else []
        return [sys.executable, "-m", module, load_path(target), load_path(draft), *rounding]
    python, form = interpreter(peers, name), words[0]
    line: list[str | Path] = [python, SERVERS / f"serve_{name}.py", model_file(peers, target, form)]
    return [*line, "--draft", model_file(peers, draft, form)] if words[1:] else line


def _constant(count: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": count,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


_TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "assisted, default": {"assistant": {}},
    "assisted, 4 constant": {"assistant": _constant(4)},
    "assisted, 8 constant": {"assistant": _constant(8)},
    "prompt lookup, 10": {"prompt_lookup_num_tokens": 10},
}
_OURS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"gamma": 0},
    "auto": {},
    "draft model 4": {"gamma": 4, "source": "draft_model"},
    "draft model 8": {"gamma": 8, "source": "draft_model"},
    "n-gram 8": {"gamma": 8, "source": "ngram"},
}

_BASE = Side(("transformers",))

# The best setting of each engine where all were tried, and ours; the others are run where they are asked for.
USUAL = (
    "transformers assisted, 4*",
    "fastdraft*plain",
    "fastdraft*auto",
    "llama*",
    "OpenVINO*plain",
    "OpenVINO int8 draft 3",
)

# What is measured together: what fits into memory side by side, always with the common base.
SETS: Mapping[str, Mapping[str, Side]] = {
    "bf16": {
        BASE: _BASE,
        **{
            f"transformers {name}": Side(_BASE.server, options, against=BASE) for name, options in _TRANSFORMERS.items()
        },
        **{
            f"fastdraft {name}": Side(("fastdraft",), options, slow=False, against=BASE)
            for name, options in _OURS.items()
        },
    },
    "quantised": {
        BASE: _BASE,
        **{
            f"fastdraft int8 {name}": Side(("fastdraft", "int8"), options, slow=False, against="fastdraft int8 plain")
            for name, options in _OURS.items()
        },
        "llama.cpp Q4_K_M plain": Side(("llama", "q4_k_m")),
        "llama.cpp Q8_0 plain": Side(("llama", "q8_0")),
        **{
            f"OpenVINO {form} plain": Side(("openvino", form), against=f"OpenVINO {form} plain")
            for form in ("int8", "int4")
        },
        **{
            f"OpenVINO {form} draft {count}": Side(
                ("openvino", form, "draft"), {"assistants": count}, against=f"OpenVINO {form} plain"
            )
            for form in ("int8", "int4")
            for count in (3, 5)
        },
    },
}

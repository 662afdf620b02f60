"""The sides of a comparison, in families that are loaded together.

A family names its sides before anything is loaded, so that only what was asked for is. What a family yields are
functions from token ids and a number of tokens to a `Run`; greedy unless told otherwise, and ended by the model's own
end-of-sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from fastdraft import DraftModel, Generator, Model, NGram
from fastdraft.models.store import load_path
from fastdraft.timing import Run, time_call
from tests.benchmarks.harness import run_transformers
from tests.benchmarks.peer import Peer
from tests.benchmarks.peer_files import PAIR, interpreter, model_file

BASE = "transformers plain"
TARGET, DRAFT = PAIR
KV = "512MiB"

Runner: TypeAlias = Callable[..., Run]
ASSISTED: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    **{
        f"{count} constant": {
            "num_assistant_tokens": count,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        for count in (4, 8)
    },
}
OURS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"gamma": 0},
    "auto": {},
    "draft model 4": {"gamma": 4, "source": "draft_model"},
    "draft model 8": {"gamma": 8, "source": "draft_model"},
    "n-gram 8": {"gamma": 8, "source": "ngram"},
}
OPENVINO: Mapping[str, Sequence[str]] = {
    "plain": (),
    "draft 3": ("--assistants", "3"),
    "draft 5": ("--assistants", "5"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What every family shares.

    Attributes:
        peers: The folder of `peer_files`.
        threads: Compute threads of every side.
        stop: Ids that end a run.
    """

    peers: Path
    threads: int
    stop: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Sides that are loaded together.

    Attributes:
        sides: Their names.
        load: A context manager that loads what those named need and gives their runners.
        slow: Whether they are run fewer times.
        against: The side whose tokens theirs must be, if any.
    """

    sides: tuple[str, ...]
    load: Callable[[Machine, Sequence[str]], contextlib.AbstractContextManager[dict[str, Runner]]]
    slow: bool
    against: str | None


def transformers_model(name: str) -> Any:
    """A model of the pair as transformers loads it, bf16."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(load_path(name), dtype=torch.bfloat16).eval()


@contextlib.contextmanager
def _transformers(machine: Machine, wanted: Sequence[str]) -> Iterator[dict[str, Runner]]:
    del machine  # its threads are torch's, and its stop tokens the model's
    target = transformers_model(TARGET)
    plain = partial(run_transformers, target, min_new_tokens=0)
    runners: dict[str, Runner] = {BASE: plain}
    if any("assisted" in side for side in wanted):
        draft = transformers_model(DRAFT)
        default = draft.generation_config.to_dict()

        def assisted(ids: Sequence[int], tokens: int, *, settings: Mapping[str, Any]) -> Run:
            draft.generation_config.update(**(default | settings))
            return plain(ids, tokens, assistant_model=draft)

        runners |= {f"transformers assisted, {name}": partial(assisted, settings=s) for name, s in ASSISTED.items()}
    runners["transformers prompt lookup, 10"] = partial(plain, prompt_lookup_num_tokens=10)
    yield runners


@contextlib.contextmanager
def _fastdraft(
    machine: Machine, wanted: Sequence[str], *, label: str, quantization: str | None
) -> Iterator[dict[str, Runner]]:
    del machine, wanted
    target = load_path(TARGET) if quantization is None else Model(load_path(TARGET), quantization=quantization)
    with Generator(target, [NGram(), DraftModel(load_path(DRAFT))], kv_memory=KV) as generator:

        def run(ids: Sequence[int], tokens: int, **options: Any) -> Run:
            return time_call(generator, list(ids), **{"max_tokens": tokens, "temperature": 0} | options)

        yield {f"{label} {name}": partial(run, **options) for name, options in OURS.items()}


@contextlib.contextmanager
def _llama(machine: Machine, wanted: Sequence[str], *, forms: Mapping[str, str]) -> Iterator[dict[str, Runner]]:
    with contextlib.ExitStack() as stack:
        yield {
            side: stack.enter_context(
                _peer(machine, "llama", "serve_llama.py", [model_file(machine.peers, TARGET, forms[side])])
            ).run
            for side in wanted
        }


@contextlib.contextmanager
def _openvino(machine: Machine, wanted: Sequence[str], *, form: str) -> Iterator[dict[str, Runner]]:
    target, draft = (model_file(machine.peers, name, form) for name in PAIR)
    with contextlib.ExitStack() as stack:
        runners = {}
        for name, settings in OPENVINO.items():
            if (side := f"OpenVINO {form} {name}") in wanted:
                drafting = ["--draft", draft, *settings] if settings else []
                peer = _peer(machine, "openvino", "serve_openvino.py", [target, *drafting])
                runners[side] = stack.enter_context(peer).run
        yield runners


def _peer(machine: Machine, environment: str, server: str, arguments: Sequence[str | Path]) -> Peer:
    python = interpreter(machine.peers, environment)
    return Peer(python, server, arguments, threads=machine.threads, stop=machine.stop)


def _ours(label: str, quantization: str | None, against: str) -> Family:
    load = partial(_fastdraft, label=label, quantization=quantization)
    return Family(tuple(f"{label} {name}" for name in OURS), load, slow=False, against=against)


_LLAMA = {"llama.cpp Q4_K_M plain": "q4_k_m", "llama.cpp Q8_0 plain": "q8_0"}
_BASE = Family(
    (BASE, *(f"transformers assisted, {name}" for name in ASSISTED), "transformers prompt lookup, 10"),
    _transformers,
    slow=True,
    against=BASE,
)

# What is measured together: what fits into memory side by side, always with the common base.
SETS: Mapping[str, Sequence[Family]] = {
    "bf16": (_BASE, _ours("fastdraft", None, BASE)),
    "quantised": (
        Family((BASE,), _transformers, slow=True, against=None),
        _ours("fastdraft int8", "int8", "fastdraft int8 plain"),
        Family(tuple(_LLAMA), partial(_llama, forms=_LLAMA), slow=True, against=None),
        *(
            Family(
                tuple(f"OpenVINO {form} {name}" for name in OPENVINO),
                partial(_openvino, form=form),
                slow=True,
                against=f"OpenVINO {form} plain",
            )
            for form in ("int8", "int4")
        ),
    ),
}

"""outlines on transformers behind JSON lines, bf16, greedy.

Run with ``python -m tests.benchmarks.servers.serve_outlines TARGET --threads 2``. A request's option ``type`` names one
of `tests.benchmarks.extractions.TYPES`, ``text`` is the user's message; its ids are not read. ``accepted`` says whether
the object is valid.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

import outlines
import torch
import transformers
from outlines.inputs import Chat
from pydantic import ValidationError

from fastdraft.timing import Run
from tests.benchmarks.extractions import TYPES
from tests.benchmarks.harness import Clock
from tests.benchmarks.servers.serve import Answer, serve


def load(target: str) -> tuple[Answer, dict[str, str]]:
    make: Any = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model: Any = outlines.from_transformers(make(target, dtype=torch.bfloat16).eval(), tokenizer)

    @cache
    def writer(kind: str) -> Any:
        return outlines.Generator(model, TYPES[kind])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        write = writer(request["options"]["type"])  # compiled before the clock runs
        chat = Chat([{"role": "user", "content": request["options"]["text"]}])
        clock = Clock()
        started = time.perf_counter()
        text = write(chat, max_new_tokens=request["tokens"], do_sample=False, streamer=clock)
        times, counts = clock.times[1:], clock.counts[1:]
        after = sum(counts[1:])
        rate = after / (times[-1] - times[0]) if after else None
        ids = tokenizer(text, add_special_tokens=False).input_ids
        whole = _is_valid(TYPES[request["options"]["type"]], text)
        return asdict(Run(tuple(ids), times[0] - started, times[-1] - started, rate, sum(counts), 0, whole))

    return answer, {"outlines": version("outlines"), "transformers": transformers.__version__}


def _is_valid(kind: Any, text: str) -> bool:
    try:
        kind.model_validate_json(text)
    except ValidationError:
        return False
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    serve(lambda: load(arguments.target))

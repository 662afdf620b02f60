"""fastdraft behind JSON lines, n-grams and a draft model as sources.

Run with ``python -m tests.benchmarks.servers.serve_fastdraft TARGET DRAFT --threads 2``. A request's options are those
of ``generate``; greedy unless they say otherwise.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fastdraft
from fastdraft import DraftModel, Generator, Model, NGram
from fastdraft.timing import time_call
from tests.benchmarks.servers.serve import Answer, serve
from tests.benchmarks.workloads import GROUPS, prompts

KV = "512MiB"
VOCABULARY = 16384  # of the draft, the frequent tokens of the half that is not measured


def sources(draft: str | Path) -> tuple[NGram, DraftModel]:
    """What the Qwen pair drafts with, here and wherever it is measured."""
    text = tuple(prompt.text for group in GROUPS for prompt in prompts(group, "fit"))
    return NGram(), DraftModel(draft, vocabulary=VOCABULARY, text=text)


def load(target: str, draft: str, quantization: str | None) -> tuple[Answer, dict[str, str]]:
    model: Any = Model(target, quantization=quantization)
    generator = Generator(model, sources(draft), kv_memory=KV)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        # No end of sequence, as in transformers' min_new_tokens: every side makes the same number of tokens.
        length = {"max_tokens": request["tokens"], "min_tokens": request["tokens"]}
        options = {**length, "temperature": 0} | request["options"]
        return asdict(time_call(generator, request["ids"], **options))

    return answer, {"fastdraft": fastdraft.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    serve(lambda: load(arguments.target, arguments.draft, arguments.quantization))

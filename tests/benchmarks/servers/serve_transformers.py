"""transformers behind JSON lines, bf16.

Run with ``python -m tests.benchmarks.servers.serve_transformers TARGET DRAFT --threads 2``. A request's options are
further keywords of ``generate``; ``assistant``, if it is there, holds generation settings of the draft, and asks for
assisted generation.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
import transformers

from tests.benchmarks.harness import run_transformers
from tests.benchmarks.servers.serve import Answer, serve


@cache
def model(folder: str) -> Any:
    """A model as transformers loads it; each once."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.bfloat16).eval()


def load(target: str, draft: str) -> tuple[Answer, dict[str, str]]:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        options = dict(request["options"])
        if (settings := options.pop("assistant", None)) is not None:
            assistant = model(draft)
            assistant.generation_config = transformers.GenerationConfig.from_pretrained(draft, **settings)
            options["assistant_model"] = assistant
        return asdict(run_transformers(model(target), request["ids"], request["tokens"], **options))

    model(target)
    return answer, {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    serve(lambda: load(arguments.target, arguments.draft))

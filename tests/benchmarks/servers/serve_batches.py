"""transformers' continuous batching behind JSON lines, bf16, greedy.

Run with ``python -m tests.benchmarks.servers.serve_batches TARGET --threads 2``. A request's option ``prompts`` holds
the ids of every call; all of them write exactly ``tokens`` tokens. The rate is that of `tests.benchmarks.figures`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from fastdraft.timing import Run
from tests.benchmarks.figures import decode_rate
from tests.benchmarks.servers.serve import Answer, serve

PAGE, BLOCKS, ROWS = 256, 96, 512  # the fastest of several on a CPU


def load(target: str) -> tuple[Answer, dict[str, str]]:
    make: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = make(target, dtype=torch.bfloat16).eval()
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=BLOCKS, max_batch_tokens=ROWS, allow_block_sharing=False
    )

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        tokens = request["tokens"]
        settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        started = time.perf_counter()
        outs = model.generate_batch(
            request["options"]["prompts"],
            generation_config=settings,
            continuous_batching_config=config,
            record_timestamps=True,
            warmup=False,
        )
        total = time.perf_counter() - started
        times = [list(out.timestamps) for out in outs.values()]
        assert all(len(out.generated_tokens) == tokens for out in outs.values())
        ids = next(iter(outs.values())).generated_tokens
        first = min(one[0] for one in times)
        return asdict(Run(tuple(ids), max(one[0] for one in times) - first, total, decode_rate(times), 0))

    return answer, {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    serve(lambda: load(arguments.target))

"""OpenVINO GenAI behind JSON lines: ``python serve_openvino.py MODEL --threads 2``.

With a draft, a request's option ``assistants`` is the number of tokens it makes a round.
"""

from __future__ import annotations

import argparse
from typing import Any

from serve import Answer, Deliver, serve, timed

BLOCKS = 128  # of 32 tokens each: more than any prompt here needs


def load(model: str, threads: int, draft: str | None) -> tuple[Answer, dict[str, str]]:
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # every run computes its whole prompt
    scheduler.num_kv_blocks = BLOCKS
    options: dict[str, Any] = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": threads}
    if draft is not None:
        options["draft_model"] = openvino_genai.draft_model(draft, "CPU", INFERENCE_NUM_THREADS=threads)
    pipeline = openvino_genai.LLMPipeline(model, "CPU", **options)

    class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, deliver: Deliver) -> None:
            super().__init__()
            self.deliver = deliver

        def write(self, tokens: int | list[int]) -> Any:
            self.deliver([tokens] if isinstance(tokens, int) else list(tokens))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def decode(request: dict[str, Any], deliver: Deliver) -> None:
        ids, stop = request["ids"], request["stop"]
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["tokens"]
        config.do_sample = False
        config.ignore_eos = not stop
        if stop:
            config.eos_token_id = stop[0]
            config.stop_token_ids = set(stop)
        if draft is not None:
            config.num_assistant_tokens = request["options"]["assistants"]
        prompt = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        mask = openvino.Tensor(numpy.ones((1, len(ids)), dtype=numpy.int64))
        pipeline.generate(openvino_genai.TokenizedInputs(prompt, mask), config, Streamer(deliver))

    return timed(decode), {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--draft", help="a folder; no speculation without it")
    arguments = parser.parse_args()
    serve(lambda: load(arguments.model, arguments.threads, arguments.draft))

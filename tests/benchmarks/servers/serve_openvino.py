"""OpenVINO GenAI behind JSON lines, with or without its draft: ``python serve_openvino.py MODEL --threads 2``."""

from __future__ import annotations

import argparse
from typing import Any

from serve import Answer, Deliver, serve, timed


def load(model: str, threads: int, draft: str | None, assistants: int) -> tuple[Answer, dict[str, str]]:
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # every run computes its whole prompt
    scheduler.cache_size = 1
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

    def decode(ids: list[int], most: int, stop: list[int], deliver: Deliver) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = most
        config.do_sample = False
        config.ignore_eos = not stop
        if stop:
            config.eos_token_id = stop[0]
            config.stop_token_ids = set(stop)
        if draft is not None:
            config.num_assistant_tokens = assistants
        prompt = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        mask = openvino.Tensor(numpy.ones((1, len(ids)), dtype=numpy.int64))
        pipeline.generate(openvino_genai.TokenizedInputs(prompt, mask), config, Streamer(deliver))

    return timed(decode), {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--draft", help="a folder; no speculation without it")
    parser.add_argument("--assistants", type=int, default=5, help="tokens its draft makes a round")
    arguments = parser.parse_args()
    serve(lambda: load(arguments.model, arguments.threads, arguments.draft, arguments.assistants))

"""llama.cpp behind JSON lines, plain decoding: ``python serve_llama.py MODEL.gguf --threads 2``."""

from __future__ import annotations

import argparse
from typing import Any

from serve import Answer, Deliver, serve, timed

CONTEXT = 4096


def load(model: str, threads: int) -> tuple[Answer, dict[str, str]]:
    import llama_cpp

    llama = llama_cpp.Llama(
        model, n_ctx=CONTEXT, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def decode(request: dict[str, Any], deliver: Deliver) -> None:
        llama.reset()  # or what is left of an earlier prompt is reused
        for made, token in enumerate(llama.generate(request["ids"], temp=0.0, repeat_penalty=1.0), start=1):
            deliver([token])
            if made == request["tokens"] or token in request["stop"]:
                return

    return timed(decode), {"llama-cpp-python": llama_cpp.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(lambda: load(arguments.model, arguments.threads))

"""A conversation. Each turn sends all of it again, and only what is new is computed: the rest is still in the KV cache.

python examples/chat.py [MODEL]     asks you in a terminal; elsewhere three questions are scripted
"""

import sys
from collections.abc import Iterator

from fastdraft import Generator
from fastdraft.models.store import load_path

SCRIPT = ("What is the capital of France?", "And what is the capital of Italy?", "Write one sentence about Rome.")


def questions() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from SCRIPT
        return
    print("An empty line ends the conversation.")
    while question := input("you> ").strip():
        yield question


model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
messages = [{"role": "system", "content": "You answer in one short sentence."}]

with Generator(target=model) as gen:
    for question in questions():
        messages.append({"role": "user", "content": question})
        print(f"\nuser: {question}\nassistant: ", end="")
        with gen.stream(messages, max_tokens=48, temperature=0) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        out = stream.completion
        messages.append({"role": "assistant", "content": out.text})
        print(f"\n  [{out.stats.prefix_tokens} of {out.prompt_tokens} prompt tokens came from the KV cache]")

"""Threads share one generator: urgent calls first, and a full queue says when to come back.

python examples/threads.py [MODEL]
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from fastdraft import Generator, QueueFullError
from fastdraft.models.store import load_path

model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
words = ["sea", "hill", "lamp", "rain", "bread", "train", "snow", "bird"]


def line(word: str) -> str:
    prompt = [{"role": "user", "content": f"Write one short sentence with the word {word}."}]
    while True:
        try:
            out = gen.generate(prompt, max_tokens=16, temperature=0, priority=1 if word == "bird" else 0)
        except QueueFullError as error:
            time.sleep(error.retry_after)
        else:
            return f"{word}: {out.text.strip()}"


with Generator(target=model, max_batch=2, max_queue=3) as gen:
    with ThreadPoolExecutor(len(words)) as pool:
        for text in pool.map(line, words):
            print(text)
    found = gen.metrics()

spread = found.time_to_first_token
print(f"\n{found.finished} calls, {found.tokens} tokens")
print(f"first token after {spread.p50:.2f} s, the latest after {spread.p99:.2f} s")

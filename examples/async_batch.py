"""Many tasks, one generator: they share its rounds, and the head of their prompts is computed once.

python examples/async_batch.py [MODEL]
"""

import asyncio
import sys

from fastdraft import Generator
from fastdraft.models.store import load_path

model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
system = {
    "role": "system",
    "content": "You are the assistant of a small bookshop. You answer in one short sentence.",
}
questions = ["When do you open?", "Do you have maps?", "Where are the novels?", "Can I pay by card?"]


async def answer(gen: Generator, question: str) -> str:
    out = await gen.agenerate([system, {"role": "user", "content": question}], max_tokens=24, temperature=0)
    return f"{question} {out.text.strip()} [{out.stats.prefix_tokens} of {out.prompt_tokens} prompt tokens reused]"


async def impatient(gen: Generator) -> str:
    try:
        await asyncio.wait_for(gen.agenerate("Once upon a time", max_tokens=400, ignore_eos=True), 0.2)
    except TimeoutError:
        return "a task that was not waited for any longer"
    return "a fast machine"


async def main() -> None:
    async with Generator(target=model) as gen:
        pin = await asyncio.to_thread(gen.pin, [system])
        print(f"{pin.tokens} tokens of every prompt are kept")
        for line in await asyncio.gather(*(answer(gen, question) for question in questions), impatient(gen)):
            print(line)
        found = gen.metrics()
        print(f"{found.finished} calls in {found.rounds} rounds, {found.tokens} tokens")


asyncio.run(main())

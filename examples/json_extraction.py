"""Text in, a typed object out: the grammar writes what the type leaves no choice about, the model the rest.

python examples/json_extraction.py [MODEL]
"""

import sys

from pydantic import BaseModel, Field

from fastdraft import Constrained, Generator
from fastdraft.models.store import load_path


class Item(BaseModel):
    name: str
    quantity: int = Field(ge=1)


class Order(BaseModel):
    customer: str
    city: str
    items: list[Item] = Field(max_length=3)
    express: bool


TEXT = "Dear team, this is Maria Gruber from Graz. Please send 2 lamps and 1 desk as soon as you can, by express."

model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
prompt = [{"role": "user", "content": f"Extract the order as JSON from this letter:\n{TEXT}"}]
wanted = Constrained(Order, max_string=40, finish="close")  # no string without an end, and whole within max_tokens

with Generator(target=model, draft="auto") as gen:
    with gen.stream(prompt, output_type=wanted, temperature=0, max_tokens=120) as stream:
        for chunk in stream:
            print(chunk.partial)  # what is known so far
    out = stream.completion

print(f"\n{out.parsed!r}")
stats = out.stats
print(f"{out.completion_tokens} tokens in {stats.rounds} rounds; {stats.forced_tokens} left no choice")

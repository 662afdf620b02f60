"""Tools: the model is made to call one, and its arguments are always what the tool takes.

python examples/tools.py [MODEL]
"""

import sys
from typing import Literal

from pydantic import BaseModel, Field

from fastdraft import Generator
from fastdraft.models.store import load_path


class Weather(BaseModel):
    """Tells the weather of a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"] = "celsius"


convert = {
    "name": "convert",
    "description": "Converts an amount of money.",
    "parameters": {
        "type": "object",
        "properties": {"amount": {"type": "number"}, "to": {"enum": ["EUR", "USD", "JPY"]}},
        "required": ["amount", "to"],
    },
}


def weather(city: str, unit: str) -> str:
    """Stands for a real service."""
    return f"{city}: 21 degrees {unit}, sunny"


model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
prompt = [{"role": "user", "content": "How warm is it in Graz today?"}]

with Generator(target=model, draft="auto") as gen:
    out = gen.generate(prompt, tools=[Weather, convert], tool_choice="required", temperature=0, max_tokens=80)
    for call in out.tool_calls:
        print(f"{call.name}({call.arguments})")
        if isinstance(call.parsed, Weather):
            print("->", weather(call.parsed.city, call.parsed.unit))

print(f"\n{out.completion_tokens} tokens in {out.stats.rounds} rounds; {out.stats.forced_tokens} left no choice")

"""Answers of a fixed shape: a pattern, and a choice.

python examples/pattern.py [MODEL]
"""

import sys

from outlines.types import Regex

from fastdraft import Generator
from fastdraft.models.store import load_path

model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)


def ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


with Generator(target=model) as gen:
    date = gen.generate(
        ask("On which day did people first walk on the moon? Answer as YYYY-MM-DD."),
        output_type=Regex(r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
        temperature=0,
    )
    mood = gen.generate(
        ask("Is this review good or bad? 'It broke after a day.'"), output_type=["good", "bad"], temperature=0
    )
print(f"a date: {date.parsed}")
print(f"a mood: {mood.parsed}")

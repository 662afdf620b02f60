"""One answer from a generator, and what speculation gave.

python examples/quickstart.py [MODEL]     a hub id, folder or .gguf file; else SmolLM2-135M, fetched once
"""

import sys

from fastdraft import Generator
from fastdraft.models.store import load_path

model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
letter = """Dear Tom,

thank you for your order of 24 August. Your parcel with two blue lamps and four chairs left our warehouse this morning \
and will arrive on Thursday between 9 and 12 o'clock.

Kind regards,
Maria Keller"""
ask = [{"role": "user", "content": f"Proofread this letter and return it in full.\n\n{letter}"}]

with Generator(target=model) as gen:  # draft="auto" copies drafts from the prompt and the answer
    out = gen.generate(ask, max_tokens=80, temperature=0)

print(out.text)
print()
print(f"finished because of {out.finish_reason!r}, lossless: {out.lossless}")
stats = out.stats
print(f"{out.completion_tokens} tokens from {stats.rounds} target calls")
print(f"{stats.accepted_tokens} of {stats.draft_tokens} drafted tokens were accepted")
print(f"{stats.tokens_per_second:.1f} tokens a second after the first, which took {stats.time_to_first_token:.2f} s")

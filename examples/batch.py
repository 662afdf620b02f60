"""Several prompts at once, two sampled answers each. The seed makes them repeatable.

python examples/batch.py [MODEL]
"""

import sys

from fastdraft import Generator, SamplingParams
from fastdraft.models.store import load_path

model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
topics = ["the sea", "a winter morning", "an old clock"]
prompts = [[{"role": "user", "content": f"Write one short sentence about {topic}."}] for topic in topics]
params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7)

with Generator(target=model, dtype="float32") as gen:  # bfloat16 rounds a batch of another size otherwise
    outs = gen.batch(prompts, params, n=2)
    again = gen.batch(prompts[:1], params, n=2)

for index, out in enumerate(outs):  # n results for each prompt, in order
    topic, sample = topics[index // 2], index % 2
    print(f"{topic}, sample {sample} ({out.completion_tokens} tokens, {out.finish_reason}): {out.text.strip()}")
print("the same seed gave the same answers:", [out.text for out in again] == [out.text for out in outs[:2]])
print(f"{sum(out.completion_tokens for out in outs)} tokens in all")

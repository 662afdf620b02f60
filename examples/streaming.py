"""An answer as it comes: a round may bring several tokens at once, and a stream may be left early.

python examples/streaming.py [MODEL]
"""

import sys

from fastdraft import Generator, NGram
from fastdraft.models.store import load_path

model = sys.argv[1] if len(sys.argv) > 1 else load_path("smollm2-135m-instruct", progress=True)
text = """The old lighthouse stands at the end of the harbour wall. Every evening the keeper climbs the ninety-three \
steps, lights the lamp and writes the weather into a large blue book."""
ask = [{"role": "user", "content": f"Repeat this text word for word.\n\n{text}"}]

with Generator(target=model, draft=NGram()) as gen:
    sizes = []
    with gen.stream(ask, max_tokens=64, temperature=0) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
            sizes.append(len(chunk.token_ids))
    print("\n\ntokens in each chunk:", *sizes)
    print(f"time to first token: {stream.completion.stats.time_to_first_token:.3f} s")

    with gen.stream(ask, max_tokens=64, temperature=0) as stream:
        for chunk in stream:
            if "." in chunk.text:
                break  # leaving the block cancels the call within one round
    print("left early:", stream.completion.finish_reason, "after", stream.completion.completion_tokens, "tokens")

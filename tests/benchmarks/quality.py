"""What rounding weights costs: the same texts read by the bf16 model and by its rounded forms.

python -m tests.benchmarks.quality [--texts 1] [--forms int8 int4] [--models NAME ...]

Texts are of the half that nothing is fitted on. At each token: is the likeliest next token the same, and how far are
the two distributions from each other (total variation, temperature 1)?
"""

from __future__ import annotations

import argparse
import gc
from statistics import fmean
from typing import Any

import transformers
from torch import Tensor

from fastdraft import Generator
from fastdraft.config import make_config
from fastdraft.lending import lend, load_models
from fastdraft.models.dense import dense_logits
from fastdraft.models.store import load_path
from fastdraft.sampling.agreement import total_variation
from tests.benchmarks.peer_files import PAIR
from tests.benchmarks.report import save
from tests.benchmarks.workloads import GROUPS, prompts

LONGEST = 512  # tokens read of each text


def texts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of so many texts of each group."""
    return [
        tokenizer(prompt.text).input_ids[:LONGEST] for group in GROUPS for prompt in prompts(group, "measure")[:count]
    ]


def read(name: str, form: str, ids: list[list[int]]) -> list[Tensor]:
    """Logits [T, V] of each text, by the model as a generator holds it."""
    config = make_config({"target": {"id": load_path(name), "quantization": form}, "draft": None, "kv_memory": "64MiB"})
    models = load_models(config)
    vocabulary = models[0].model.config.get_text_config().vocab_size
    with Generator.from_config(lend(config, models, take=True)):
        return [dense_logits(models[0].model, one[:1], one[1:], vocabulary).bfloat16() for one in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1, help="of each group")
    parser.add_argument("--forms", nargs="*", default=["int8", "int4"])
    parser.add_argument("--models", nargs="*", default=PAIR)
    args = parser.parse_args()
    ids = texts(transformers.AutoTokenizer.from_pretrained(load_path(PAIR[0])), args.texts)
    rows, target_int8 = [], None
    for name in args.models:
        plain = read(name, "none", ids)
        for form in args.forms:
            gc.collect()
            same, apart = [], []
            for one_TV, other_TV in zip(plain, read(name, form, ids), strict=True):
                same += (one_TV.argmax(-1) == other_TV.argmax(-1)).tolist()
                for first in range(0, len(one_TV), 128):
                    apart += total_variation(one_TV[first : first + 128], other_TV[first : first + 128])
            rows.append([name, form, f"{len(same)}", f"**{fmean(same):.4f}**", f"{fmean(apart):.4f}"])
            print(*rows[-1], flush=True)
            if (name, form) == (PAIR[0], "int8"):
                target_int8 = fmean(same)
    head = ["model", "weights", "tokens", "same likeliest token", "mean total variation"]
    text = f"Against bf16, {args.texts} texts of each group, at most {LONGEST} tokens of each."
    save(
        "quality",
        {"title": "What rounding costs", "text": text, "head": head, "rows": rows, "agreement": target_int8},
    )


if __name__ == "__main__":
    main()

"""Is ``gamma="auto"`` as good as the best fixed draft length, for every kind of prompt, greedy and at temperature 0.8?

python -m tests.benchmarks.gamma [--prompts 1] [--tokens 96] [--repeats 2] [--quantization int8]

Each prompt is answered once; both models read the answers, and every draft length from 0 to 16 is replayed over costs
measured here. Only auto, the best length, and that length more and less 2 then run live, in turns. At a temperature the
answers have a seed, so that they do not depend on what is drafted. Kept prefixes are used again: prompts cost nothing
after the first run, and decode rates are all that counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from fastdraft import Generator
from fastdraft.aside import aside
from fastdraft.config import make_config
from fastdraft.control.costs import Costs
from fastdraft.control.gamma import MOST
from fastdraft.doctor.reading import Output
from fastdraft.doctor.subject import SEED, Subject
from fastdraft.forecast import forecast
from fastdraft.lending import lend, load_models
from fastdraft.models.store import load_path
from fastdraft.timing import median
from tests.benchmarks.figures import geometric
from tests.benchmarks.peer_files import PAIR
from tests.benchmarks.report import save
from tests.benchmarks.servers.serve_fastdraft import KV, sources
from tests.benchmarks.workloads import GROUPS, prompts

TARGET, DRAFT = PAIR
TEMPERATURES = (0.0, 0.8)
AUTO = "auto"


def best_gamma(subject: Subject, costs: Costs, ids: Sequence[tuple[int, ...]], tokens: int, warmth: float) -> int:
    """The draft length of the highest forecast over some prompts."""
    if warmth:
        outputs = subject.sample(ids, tokens, warmth)
    else:
        outputs = [Output(one, subject.time(one, tokens, 0).tokens) for one in ids]
    read = [reading.text for reading in subject.read(outputs, warmth)]
    rates = forecast([text for text in read if len(text.chances) > 1], costs, source=subject.source.name)
    return max(rates[1:], key=lambda rate: rate.tokens_per_second).gamma


def live(generator: Generator, ids: Sequence[tuple[int, ...]], gammas: Sequence[int], args: Any, warmth: float) -> Any:
    """Tokens a second of each draft length of the draft model, and of auto with all sources."""
    sides: dict[str, dict[str, Any]] = {str(gamma): {"gamma": gamma, "source": "draft_model"} for gamma in gammas}
    sides[AUTO] = {}
    rates: dict[str, list[float | None]] = {side: [] for side in sides}
    for number, prompt in enumerate(ids):
        options = {"max_tokens": args.tokens, "temperature": warmth, "seed": SEED + number if warmth else None}
        found: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(args.repeats + 1):
            for side, more in sides.items():
                rate = generator.generate(list(prompt), **options, **more).stats.tokens_per_second
                if turn and rate is not None:  # the first fills the caches
                    found[side].append(rate)
        for side, got in found.items():
            rates[side].append(median(got) if got else None)
    return {side: geometric(each) for side, each in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1, help="of each group")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    args = parser.parse_args()
    spec = {"id": load_path(TARGET)} | ({"quantization": args.quantization} if args.quantization else {})
    lookup, source = sources(load_path(DRAFT))
    config = make_config({"target": spec, "draft": [lookup, source], "kv_memory": KV})
    models = aside(lambda: load_models(config))
    rows, ratios = [], []
    with Generator.from_config(lend(config, models, take=True)) as generator:
        subject = Subject(generator, source, models[0], models[1])
        for group in ("code", "qa"):
            subject.warm_up(subject.encode(prompts(group, "fit")[0].messages))
        target_costs, draft_costs = subject.measure()
        assert draft_costs is not None
        costs = Costs(target_costs, {source.name: draft_costs})
        for warmth in TEMPERATURES:
            for group in GROUPS:
                ids = [subject.encode(prompt.messages) for prompt in prompts(group, "measure")[: args.prompts]]
                best = best_gamma(subject, costs, ids, args.tokens, warmth)
                gammas = sorted({max(1, best - 2), best, min(MOST, best + 2)})
                rates = live(generator, ids, gammas, args, warmth)
                auto = rates.pop(AUTO)
                fastest = max(rates, key=lambda side: rates[side] or 0.0)
                ratios.append(auto / rates[fastest])
                fixed = ", ".join(f"{side}: {rate:.1f}" for side, rate in rates.items())
                rows.append([f"{warmth:g}", group, str(best), fixed, f"{auto:.1f}", f"**{ratios[-1]:.2f}**"])
                print(*rows[-1], flush=True)
    head = ["temperature", "group", "best by replay", "fixed, tok/s", "auto, tok/s", "auto over the best fixed"]
    text = f"{args.prompts} prompts of each group, target {args.quantization or 'bf16'}. Auto may draft with either "
    text += "source, the fixed lengths are the draft model's."
    save("gamma", {"title": "Draft length", "text": text, "head": head, "rows": rows, "worst": min(ratios)})


if __name__ == "__main__":
    main()

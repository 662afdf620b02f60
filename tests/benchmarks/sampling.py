"""What do probabilities and verify cost beside a round? T 0.8, top_p 0.95, a vocabulary of 152k, 5 rows.

python -m tests.benchmarks.sampling [--repeats 20]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from fastdraft.round import Draft
from fastdraft.sampling.noise import DRAFT, uniform
from fastdraft.sampling.probs import History, Warp, probs, scores
from fastdraft.sampling.verify import Trial, choose, draw, verify
from tests.benchmarks.harness import bars, median, table, write

VOCABULARY, GAMMA = 151_936, 4


def logits(rows: int) -> torch.Tensor:
    """Peaked like a language model's: a few likely tokens over a broad floor."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(rows, VOCABULARY, generator=generator) * 2
    out[:, :40] += torch.linspace(16, 6, 40)
    return out.to(torch.bfloat16)


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def draw_one(raw_RV: torch.Tensor, history: History, warp: Warp, invariant: bool) -> torch.Tensor:
    """What a draft step does with its logits."""
    scores_RV = scores(raw_RV, [history])
    if warp.greedy:
        return scores_RV.argmax(-1)
    p_RV = probs(scores_RV, [warp])
    u_R = uniform([7], [100], [0], DRAFT, p_RV.device)
    return choose(p_RV, [7], [100]) if invariant else draw(p_RV, u_R)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--round", type=float, default=0.0, help="milliseconds of a round, for the share")
    args = parser.parse_args()
    raw_RV = logits(GAMMA + 1)
    settings = {
        "greedy": (Warp(temperature=0), False),
        "T 0.8, top_p 0.95": (Warp(temperature=0.8, top_p=0.95), False),
        "T 0.8, top_p 0.95, invariant": (Warp(temperature=0.8, top_p=0.95), True),
        "T 0.8, top_k 50, min_p 0.05, invariant": (Warp(temperature=0.8, top_k=50, min_p=0.05), True),
        "T 0.8": (Warp(temperature=0.8), False),
        "T 0.8, invariant": (Warp(temperature=0.8), True),
    }
    rows, labels, values = [], [], []
    for name, (warp, invariant) in settings.items():
        history = History(warp, [], [], torch.zeros(GAMMA, dtype=torch.int64), 0, GAMMA + 1)
        scores_RV = scores(raw_RV, [history])
        p_RV = probs(scores_RV, [warp] * (GAMMA + 1))
        q_SV = None if warp.greedy else p_RV[:GAMMA].clone()
        draft = Draft(p_RV[:GAMMA].argmax(-1), ("draft",) * GAMMA, q_SV, () if q_SV is None else tuple(range(GAMMA)))
        trial = Trial(draft, 7, 100, greedy=warp.greedy, invariant=invariant)
        shape = milliseconds(lambda h=history, w=warp: probs(scores(raw_RV, [h]), [w] * (GAMMA + 1)), args.repeats)
        decide = milliseconds(lambda p=p_RV, s=scores_RV, t=trial: verify(p, s, [t]), args.repeats)
        sort = milliseconds(lambda s=scores_RV: s.sort(-1), 3)
        one = History(warp, [], [], history.draft_G, 0, 1)
        step = milliseconds(lambda h=one, w=warp, i=invariant: draw_one(raw_RV[:1], h, w, i), args.repeats)
        whole = shape + decide + GAMMA * step
        share = f"{100 * whole / args.round:.1f} %" if args.round else ""
        times = [f"{shape:.1f}", f"{decide:.1f}", f"{GAMMA * step:.1f}", f"**{whole:.1f}**"]
        rows.append([name, *times, f"{sort:.0f}", share])
        labels.append(name)
        values.append(whole)
    head = [
        "settings",
        "probabilities, ms",
        "verify, ms",
        f"the draft's {GAMMA} draws, ms",
        "together, ms",
        "a full sort, ms",
        "share of a round",
    ]
    body = (
        f"{GAMMA + 1} rows of a vocabulary of {VOCABULARY:,}, gamma {GAMMA}. "
        + (
            f"A round of the Qwen pair at gamma {GAMMA} took about {args.round:.0f} ms on the same machine. "
            if args.round
            else ""
        )
        + f"\n\n{table(head, rows)}\n\n"
        + bars("sampling", "probabilities and verify", labels, values, "milliseconds")
    )
    write("sampling", "Cost of sampling and verify", body)


if __name__ == "__main__":
    main()

"""Time and memory of the loss in portions beside the usual form over the whole sequence and vocabulary.

`python -m bench.loss [tokens] [vocabulary] [hidden]`; each form runs in its own process, so its peak memory is too.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from time import perf_counter

import torch

from stage2_trainer.learner.loss import LossOptions, LossTargets, stage2_loss, stage2_loss_from_hidden

FORMS = ("none", "portions", "supervised", "everything")
SHARE = 0.5  # of the tokens are supervised, a third of those are coordinates
GIB = 2**20  # KiB, the unit of ru_maxrss


def run(form: str, tokens: int, vocabulary: int, width: int) -> None:
    """One forward and backward pass; prints seconds, peak GiB and the loss."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    coord_ids = torch.arange(1000)
    count = int(tokens * SHARE)
    split = count * 2 // 3
    targets = LossTargets(
        positions=torch.arange(tokens - count, tokens),
        labels=torch.randint(0, vocabulary, (split,)),
        bins=torch.randint(0, 1000, (count - split,)),
        in_prefix=torch.zeros(count - split, dtype=torch.bool),
        ce_denominator=split,
        coord_denominator=count - split,
    )
    start = perf_counter()
    rows = targets.logit_positions
    total = torch.zeros(())
    if form == "portions":
        total = stage2_loss_from_hidden(hidden[rows], weight, targets, coord_ids, LossOptions()).total
    elif form == "supervised":
        total = stage2_loss(hidden[rows] @ weight.T, targets, coord_ids, LossOptions()).total
    elif form == "everything":
        total = stage2_loss((hidden @ weight.T).float()[rows], targets, coord_ids, LossOptions()).total
    if form != "none":
        total.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB
    print(f"{perf_counter() - start:.2f} {peak:.3f} {total.item():.6f}")


def main(arguments: list[str]) -> None:
    """Print one row for each form."""
    if arguments[:1] == ["--run"]:
        run(arguments[1], *map(int, arguments[2:]))
        return
    shape = arguments or ["4096", "32768", "64"]
    print(f"tokens {shape[0]}, vocabulary {shape[1]}, hidden {shape[2]}, {SHARE:.0%} supervised")
    print(f"torch {torch.__version__}\n")
    print("| form | seconds | peak GiB above start | loss |\n| --- | ---: | ---: | ---: |")
    start = 0.0
    for form in FORMS:
        command = [sys.executable, "-m", "bench.loss", "--run", form, *shape]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        took, peak, loss = map(float, output.split())
        if form == "none":
            start = peak
        else:
            print(f"| {form} | {took:.2f} | {peak - start:.2f} | {loss:.6f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

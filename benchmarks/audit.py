"""What audits find in broken defenses, and that they accuse no correct one.

python benchmarks/audit.py faults [RUNS] [FILE]      # the table of docs/audit_faults.md
python benchmarks/audit.py correct [RUNS] [FIRST [LAST]]     # 100 runs of each by default
python benchmarks/audit.py power [RUNS] [METHOD ...] # DP-SGD at epsilon 4, done right and quietly
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from audited_defenses import BROKEN, CORRECT, PLAN, Centred, Mechanism, Quiet, Unchecked
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Batch, Defense, Plan
from leakfrontier.evaluate.data import load_dataset
from leakfrontier.evaluate.models import build_model
from leakfrontier.evaluate.privacy.accounting import calibrate
from leakfrontier.evaluate.privacy.audit import AUDITS, audit
from leakfrontier.evaluate.privacy.finding import Audit
from leakfrontier.evaluate.statistics import clopper_pearson

EPSILON, LONGER = 4.0, Plan(steps=200, sample_rate=0.05, delta=1e-5)
CHEAP = tuple(AUDITS)[:-1]  # all but the audit of a whole training run


def digits(width: int = 8) -> tuple[nn.Module, Batch]:
    """Return a small network and the handwritten digits."""
    data = load_dataset("digits")
    rng = torch.Generator().manual_seed(0)
    model = build_model("mlp", data.space, rng, width=width)
    return model, data.normalised[0].at(slice(200))


def faults(runs: int, file: Path | None) -> None:
    """Audit every broken defense; print which tests find each, in how many runs."""
    model, data = digits()
    lines = []
    for name, defense in BROKEN.items():
        own = Centred(model) if isinstance(defense, Unchecked) else model  # type: ignore[arg-type]
        found = dict.fromkeys(AUDITS, 0)
        words = ""
        for seed in range(runs):
            for method, one in findings(defense, own, data, seed, tuple(AUDITS)).items():
                if isinstance(one, Audit) and one.violated:
                    words = words or one.words
                    found[method] += 1
        marks = [f"{found[method]}/{runs}" if found[method] else "" for method in AUDITS]
        lines.append(f"| {name} | {' | '.join(marks)} | {words or 'not found'} |")
        print(lines[-1], flush=True)
    if file is not None:
        file.write_text(document(lines, runs))


def document(lines: Sequence[str], runs: int) -> str:
    """Return the page of faults."""
    header = f"| fault | {' | '.join(AUDITS)} | what is said first |"
    rule = "|---" * (len(AUDITS) + 2) + "|"
    return "\n".join(
        [
            "# What audits find",
            "",
            f"Defenses that break a claim of DP-SGD (sigma 1, {PLAN.steps} steps at rate "
            f"{PLAN.sample_rate:g}, delta {PLAN.delta:g}), each in one way, and in how many of "
            f"{runs} runs each test finds it. Made by `python benchmarks/audit.py faults {runs} "
            "docs/audit_faults.md`; the defenses are in `benchmarks/audited_defenses.py`.",
            "",
            header,
            rule,
            *lines,
            "",
        ]
    )


def correct(runs: int, names: Sequence[str]) -> None:
    """Audit every correct defense; print whom audits accuse, which should be nobody."""
    model, data = digits()
    for name in names:
        start, accused, applied = time.process_time(), [], set()
        for seed in range(runs):
            found = findings(CORRECT[name], model, data, seed, CHEAP)
            applied |= {method for method, one in found.items() if isinstance(one, Audit)}
            accused += [
                f"{method}: {one.words}"
                for method, one in found.items()
                if isinstance(one, Audit) and one.violated
            ]
        print(
            f"| {name} | {len(applied)} | {len(accused)} of {runs * len(applied)} | "
            f"{'; '.join(dict.fromkeys(accused))} | {(time.process_time() - start) / runs:.1f} |",
            flush=True,
        )


def findings(
    defense: Defense, model: nn.Module, data: Batch, seed: int, methods: tuple[str, ...]
) -> dict[str, object]:
    """Return what audits say, with another seed each time."""
    rng = torch.Generator().manual_seed(1000 + seed)
    return {**audit(defense, model, cross_entropy, data, PLAN, rng, methods)}


def power(runs: int, methods: Sequence[str]) -> None:
    """Audit DP-SGD at epsilon 4 and with 0.8 of its noise, with another seed each time."""
    model, data = digits(width=32)
    sigma = calibrate(EPSILON, LONGER.sample_rate, LONGER.steps, LONGER.delta)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(data.targets)} examples, sigma {sigma:.3f}, {LONGER}")
    for method in methods:
        for defense in (Mechanism(sigma), Quiet(sigma)):
            start, found = time.perf_counter(), []
            for seed in range(runs):
                rng = torch.Generator().manual_seed(seed)
                found.append(AUDITS[method](defense, model, cross_entropy, data, LONGER, rng, 1))
            bounds = torch.tensor([finding.lower_bound for finding in found])
            refuted = sum(finding.violated for finding in found)
            print(
                f"{method}, {type(defense).__name__}: refuted in {refuted} of {runs} "
                f"({clopper_pearson(refuted, runs)}); claimed {found[0].claimed:.2f}, lower "
                f"bound {bounds.mean():.2f} (sd {bounds.std():.2f}), ceiling "
                f"{found[0].ceiling:.2f}; {(time.perf_counter() - start) / runs:.2f} s each",
                flush=True,
            )


def main(command: str, *arguments: str) -> None:
    """Run one of the commands."""
    if command == "faults":
        file = Path(arguments[1]) if len(arguments) > 1 else None
        faults(int(arguments[0]) if arguments else 5, file)
    elif command == "correct":
        numbers = [int(one) for one in arguments[1:]]
        correct(int(arguments[0]) if arguments else 100, [*CORRECT][slice(*numbers or [None])])
    elif command == "power":
        power(int(arguments[0]) if arguments else 20, arguments[1:] or list(AUDITS))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*(sys.argv[1:] or ["help"]))

"""Run the audits on broken and on correct defenses. They must accuse only the broken ones.

python benchmarks/audit.py faults RESULTS [RUNS]     # every broken defense, 5 times each by default
python benchmarks/audit.py correct RESULTS [RUNS]    # every correct one, 100 times each by default
python benchmarks/audit.py page RESULTS [FILE]       # both as docs/lab/audit_faults.md
python benchmarks/audit.py power [RUNS] [METHOD ...] # DP-SGD at epsilon 4, right and too quiet

RESULTS is a file with one JSON line per run. The first two commands append to it. They continue
after an interruption, and ignore lines of other versions of the code. The seed of a run does not
depend on other runs.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from audited_defenses import BROKEN, CORRECT, PLAN, Centred, Mechanism, Quiet, Unchecked
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Batch, Plan
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.foundations.statistics import clopper_pearson
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.privacy.accounting import calibrate
from leakfrontier.evaluate.privacy.audit import AUDITS, audit
from leakfrontier.evaluate.privacy.canaries import Subject
from leakfrontier.evaluate.privacy.finding import CANARY_SIGNIFICANCE, SIGNIFICANCE, Audit

EPSILON, LONGER = 4.0, Plan(steps=200, sample_rate=0.05, delta=1e-5)
CHEAP = tuple(AUDITS)[:-1]  # all but the audit of a whole training run
AUDITED = ("dpsgd", "client_dp", "noise", "per_example", "pld")  # modules of defenses


def digits() -> tuple[nn.Sequential, Batch]:
    """Return a perceptron with one hidden layer, and the handwritten digits."""
    data = load_dataset("digits")
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    return nn.Sequential(*layers), data.normalised[0].at(slice(200))


@dataclass(frozen=True)
class Runs:
    """The stored audits.

    Attributes:
        file: File of the audits.
    """

    file: Path

    def run(self, kind: str, defense: str, runs: int, methods: tuple[str, ...]) -> None:
        """Audit a defense with every missing seed."""
        perceptron, data = digits()
        audited = {"faults": BROKEN, "correct": CORRECT}[kind][defense]
        model = Centred(perceptron) if isinstance(audited, Unchecked) else perceptron
        done = {line["seed"] for line in self.of(kind, defense)}
        for seed in range(runs):
            if seed in done:
                continue
            start = time.process_time()
            rng = torch.Generator().manual_seed(1000 + seed)
            found = audit(audited, model, cross_entropy, data, PLAN, rng, methods)
            line = {
                "code": _code(),
                "kind": kind,
                "defense": defense,
                "seed": seed,
                "seconds": time.process_time() - start,
                "found": {
                    method: {"violated": one.violated, "p": one.p_value, "words": one.words}
                    for method, one in found.items()
                    if isinstance(one, Audit)
                },
            }
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def of(self, kind: str, defense: str) -> list[dict[str, Any]]:
        """Return the runs of a defense by the present code."""
        if not self.file.exists():
            return []
        lines = map(json.loads, self.file.read_text().splitlines())
        wanted = {"code": _code(), "kind": kind, "defense": defense}
        return [line for line in lines if wanted.items() <= line.items()]


@cache
def _code() -> str:
    """Return a digest of the code behind the figures: audits and audited defenses."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    audits = sorted((root / "evaluate" / "privacy").glob("*.py"))
    files = [*audits, *(root / "defenses" / f"{name}.py" for name in AUDITED)]
    for file in (*files, Path(__file__).with_name("audited_defenses.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def audit_all(kind: str, runs: Runs, count: int) -> None:
    """Audit every defense of a kind, and print a row for each."""
    methods = tuple(AUDITS) if kind == "faults" else CHEAP
    for name in BROKEN if kind == "faults" else CORRECT:
        runs.run(kind, name, count, methods)
        row = fault_row if kind == "faults" else correct_row
        print(row(name, runs.of(kind, name)), flush=True)


def fault_row(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """Return a row: in how many runs each test found a fault, and the first finding."""
    found = {method: _violations(lines, method) for method in AUDITS}
    marks = [f"{len(words)}/{len(lines)}" if words else "" for words in found.values()]
    said = next((words[0] for words in found.values() if words), "not found")
    return f"| {name} | {' | '.join(marks)} | {said} |"


def correct_row(name: str, lines: Sequence[dict[str, Any]]) -> str:
    """Return a row: the number of tests of a correct defense, and their accusations."""
    accused = [f"{method}: {w}" for method in CHEAP for w in _violations(lines, method)]
    applied = {method for line in lines for method in line["found"]}
    tests = [one["p"] for line in lines for one in line["found"].values()]
    least = f"{min(tests):.1g}" if tests else ""
    seconds = sum(line["seconds"] for line in lines) / max(1, len(lines))
    words = "; ".join([str(len(accused)), *dict.fromkeys(accused)])
    return f"| {name} | {len(lines)} | {len(applied)} | {words} | {least} | {seconds:.1f} |"


def _violations(lines: Sequence[dict[str, Any]], method: str) -> list[str]:
    found = [line["found"][method] for line in lines if method in line["found"]]
    return [one["words"] for one in found if one["violated"]]


def page(runs: Runs, commit: str) -> str:
    """Return the text of docs/lab/audit_faults.md for a commit."""
    broken = {name: runs.of("faults", name) for name in BROKEN}
    sound = {name: runs.of("correct", name) for name in CORRECT}
    audits = sum(map(len, sound.values()))
    tests = sum(len(line["found"]) for lines in sound.values() for line in lines)
    accused = sum(len(_violations(lines, one)) for lines in sound.values() for one in CHEAP)
    return "\n".join(
        [
            "# What audits find",
            "",
            f"These figures come from commit `{commit}`.",
            "",
            "```bash",
            f"python benchmarks/audit.py faults audits.jsonl {_fewest(broken)}",
            f"python benchmarks/audit.py correct audits.jsonl {_fewest(sound)}",
            "python benchmarks/audit.py page audits.jsonl docs/lab/audit_faults.md",
            "```",
            "",
            "The last command writes this page. The defenses are in "
            "`benchmarks/audited_defenses.py`. "
            f"All claim privacy for {PLAN.steps} steps at rate {PLAN.sample_rate:g} and delta "
            f"{PLAN.delta:g}, most of them as DP-SGD with sigma 1.",
            "",
            "## Broken defenses",
            "",
            "Each defense breaks its claim in one way. The cells count the runs in which a test "
            "finds the fault. The last column is the first finding.",
            "",
            f"| fault | {' | '.join(AUDITS)} | first finding |",
            "|---" * (len(AUDITS) + 2) + "|",
            *(fault_row(name, lines) for name, lines in broken.items()),
            "",
            "## Correct defenses",
            "",
            "Each defense keeps its claim in an unusual way. The tests made "
            f"{accused} accusations in {audits} audits with {tests} tests. A test accuses if its "
            f"p-value is below {SIGNIFICANCE:g} (step canaries: {CANARY_SIGNIFICANCE:g}, because "
            "their limits are cautious). Among so many tests, the smallest p-value may well be one "
            "in some hundreds.",
            "",
            "| defense | runs | tests | accusations | least p-value | CPU s per run |",
            "|---" * 6 + "|",
            *(correct_row(name, lines) for name, lines in sound.items()),
            "",
        ]
    )


def _commit() -> str:
    """Return the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _fewest(runs: Mapping[str, Sequence[object]]) -> int:
    return min(len(lines) for lines in runs.values())


def power(runs: int, methods: Sequence[str]) -> None:
    """Audit DP-SGD at epsilon 4, correct and with 0.8 of its noise, with several seeds."""
    data = load_dataset("digits")
    model = build_model("mlp", data.space, torch.Generator().manual_seed(0), width=32)
    examples = data.normalised[0].at(slice(200))
    sigma = calibrate(EPSILON, LONGER.sample_rate, LONGER.steps, LONGER.delta)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(examples.targets)} examples, sigma {sigma:.3f}, {LONGER}")
    for method in methods:
        for defense in (Mechanism(sigma), Quiet(sigma)):
            start, found = time.perf_counter(), []
            for seed in range(runs):
                rng = torch.Generator().manual_seed(seed)
                subject = Subject(defense, model, cross_entropy, examples, LONGER, rng)
                found.append(AUDITS[method](subject, 1))
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
    if command == "power":
        power(int(arguments[0]) if arguments else 20, arguments[1:] or list(AUDITS))
    elif command not in ("faults", "correct", "page") or not arguments:
        sys.exit(__doc__)
    elif command == "page":
        text = page(Runs(Path(arguments[0])), _commit())
        if len(arguments) > 1:
            Path(arguments[1]).write_text(text)
        else:
            print(text)
    else:
        usual = 5 if command == "faults" else 100
        count = int(arguments[1]) if len(arguments) > 1 else usual
        audit_all(command, Runs(Path(arguments[0])), count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*(sys.argv[1:] or ["help"]))

"""Print how often audits refute DP-SGD at epsilon 4: done right, and with 0.8 of its noise.

python benchmarks/audit.py [RUNS] [METHOD ...]     # 20 runs of every method by default
"""

import sys
import time
from dataclasses import dataclass, field

import torch
from torch import Generator, nn
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import DPSGD, Batch, Loss, Plan, Update
from leakfrontier.evaluate.data import load_dataset
from leakfrontier.evaluate.models import build_model
from leakfrontier.evaluate.privacy.accounting import calibrate
from leakfrontier.evaluate.privacy.audit import AUDITS
from leakfrontier.evaluate.statistics import clopper_pearson

EPSILON, PLAN = 4.0, Plan(steps=200, sample_rate=0.05, delta=1e-5)


@dataclass
class Quiet(DPSGD):
    """DP-SGD that draws 0.8 of the noise that it claims."""

    _worker: DPSGD | None = field(default=None, init=False, repr=False)

    def gradient(self, model: nn.Module, loss: Loss, batch: Batch, rng: Generator) -> Update:
        """Return the gradient with too little noise."""
        if self._worker is None:
            self._worker = DPSGD(0.8 * self.noise_multiplier, self.max_grad_norm)
        self._worker._batch_size = self._batch_size
        return self._worker.gradient(model, loss, batch, rng)


def main(runs: int, methods: list[str]) -> None:
    """Audit both, with another seed each time."""
    digits = load_dataset("digits")
    space = digits.space
    model = build_model("mlp", space, torch.Generator().manual_seed(0), width=32)
    data = Batch(space.to_inputs(digits.train.inputs), digits.train.targets)
    sigma = calibrate(EPSILON, PLAN.sample_rate, PLAN.steps, PLAN.delta)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(data.targets)} examples, sigma {sigma:.3f}, {PLAN}")
    for method in methods:
        for defense in (DPSGD(sigma), Quiet(sigma)):
            start, findings = time.perf_counter(), []
            for seed in range(runs):
                rng = torch.Generator().manual_seed(seed)
                findings.append(AUDITS[method](defense, model, cross_entropy, data, PLAN, rng))
            bounds = torch.tensor([finding.lower_bound for finding in findings])
            refuted = sum(finding.violated for finding in findings)
            print(
                f"{method}, {type(defense).__name__}: refuted in {refuted} of {runs} "
                f"({clopper_pearson(refuted, runs)}); claimed {findings[0].claimed:.2f}, lower "
                f"bound {bounds.mean():.2f} (sd {bounds.std():.2f}), ceiling "
                f"{findings[0].ceiling:.2f}; {(time.perf_counter() - start) / runs:.2f} s each",
                flush=True,
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2:] or list(AUDITS))

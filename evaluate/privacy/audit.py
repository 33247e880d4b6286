"""Audits: tests whether a defense keeps its differential-privacy claim. They use only its hooks.

| test | what it looks for |
|---|---|
| `residual noise` | less noise than claimed, reused noise, noise of another distribution |
| `sampling` | batches that are not drawn as the claim assumes |
| `neighbours` | an example that moves an upload further than the noise can hide |
| `clipping` | the same for gradients of many norms and batches of unusual sizes |
| `local steps` | missing noise at some step of local training |
| `rare steps` | single steps without noise, noise that repeats after many steps |
| `step canaries` | canaries that can be detected at one step [1] |
| `one run` | the same over a training run, including sampling [2]; slower and far looser |

The claim is the `guarantee` of the defense for the plan, at its own delta and adjacency. A single
step must only be as private as the whole plan requires (see `promise`).

A lower bound means: the true epsilon is at least this. It is not an estimate. The ceiling is the
lower bound that a perfect implementation of the claim would show. An audit that finds nothing rules
out only the faults that it looks for; `docs/lab/audit_faults.md` lists them. The tests assume that
the noise of different steps is independent. So they wrongly accuse mechanisms that correlate noise
on purpose (DP-FTRL).

References:
    [1] Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini, Terzis. "Tight Auditing of
        Differentially Private Machine Learning." USENIX Security 2023.
        https://arxiv.org/abs/2302.07956
    [2] Steinke, Nasr, Jagielski. "Privacy Auditing with One (1) Training Run." NeurIPS 2023.
        https://arxiv.org/abs/2305.08846
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Generator, nn

from leakfrontier.adversaries import NotApplicable
from leakfrontier.defenses import Batch, Defense, Loss, Plan

from .canaries import Subject
from .contributions import clipping, neighbours
from .finding import Audit
from .noise_alone import local_steps, rare_steps
from .one_run import one_run
from .residual_noise import residual_noise
from .sampling import sampling
from .step_canaries import step_canaries

AUDITS: dict[str, Callable[[Subject, int], Audit]] = {
    "residual noise": residual_noise,
    "sampling": sampling,
    "neighbours": neighbours,
    "clipping": clipping,
    "local steps": local_steps,
    "rare steps": rare_steps,
    "step canaries": step_canaries,
    "one run": one_run,
}
"""Every audit by name, the quickest first."""

QUICK = ("residual noise", "sampling", "neighbours", "local steps")
"""Audits that are fast enough for every training run."""


def audit(
    defense: Defense,
    model: nn.Module,
    loss: Loss,
    data: Batch,
    plan: Plan,
    rng: Generator,
    methods: tuple[str, ...] = tuple(AUDITS)[:-1],
    runs: int = 1,
) -> dict[str, Audit | NotApplicable]:
    """Return the findings of several audits, by name.

    Args:
        defense: A defense that claims differential privacy. In a chain, the link that makes the
            claim is audited.
        model: The model, after the defense's `on_model`.
        loss: Mean loss of a batch.
        data: Examples like those of the client.
        plan: Steps, sample rate and delta of the claim.
        rng: Source of all randomness.
        methods: Names in `AUDITS`.
        runs: Number of repetitions. Bounds and verdicts hold jointly for all of them.
    """
    try:
        subject = Subject(defense, model, loss, data, plan, rng)
    except NotApplicable as reason:
        return dict.fromkeys(methods, reason)
    return {method: _finding(method, subject, runs) for method in methods}


def _finding(method: str, subject: Subject, runs: int) -> Audit | NotApplicable:
    try:
        return AUDITS[method](subject, runs)
    except NotApplicable as reason:
        return reason

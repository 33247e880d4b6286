"""Does a defense keep its differential-privacy claim? Several tests, from its hooks alone.

| test | what it looks for |
|---|---|
| `residual noise` | less noise than claimed, noise that is used again, another distribution |
| `sampling` | batches that are not drawn as the claim counts on |
| `neighbours` | an example that moves an upload further than the noise hides |
| `clipping` | the same for gradients of many norms, and batches of unusual sizes |
| `local steps` | noise that is missing at some step of local training |
| `rare steps` | single steps without noise, noise that comes back after many |
| `step canaries` | canaries that can be told from none, at one step [1] |
| `one run` | the same over a training run, sampling included [2]; slower, and far looser |

The claim is what the defense's `guarantee` says of the plan, at its own delta and adjacency; what
single steps must do is what the plan as a whole needs (`promise`).

A lower bound says that the true epsilon is not below it; it is no estimate. Beside it stands the
ceiling: what a perfect implementation of the claim would score. An audit that finds nothing
speaks of the faults that it looks for, and of no others: `docs/lab/audit_faults.md` has a table of
these. The tests take the noise of different steps to be independent: mechanisms that correlate it
on purpose (DP-FTRL) would be accused.

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
"""Those that every training run can afford."""


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
        defense: Any defense that claims differential privacy; of a chain, the link that makes
            the claim is audited.
        model: The model, after the defense's `on_model`.
        loss: Mean loss of a batch.
        data: Examples such as the client's.
        plan: Steps, sample rate and delta for which epsilon is claimed.
        rng: Source of all randomness.
        methods: Names in `AUDITS`.
        runs: How often this is repeated: bounds and verdicts of all repetitions hold together.
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

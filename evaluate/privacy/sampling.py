"""Which examples a defense really draws, against what its claim counts on."""

from __future__ import annotations

from leakfrontier.adversaries import NotApplicable

from .canaries import Subject
from .draws import STEPS, poisson_samples, shuffled_epochs
from .finding import Audit
from .promise import judged


def sampling(subject: Subject, runs: int = 1) -> Audit:
    """Test what `batches` yields: Poisson samples of the claimed rate, or shuffled epochs.

    Of Poisson samples of rate q, the inclusions of records are independent, over records and
    over steps: their number is at most Binomial(q), and the sizes of batches, the counts of
    records and the inclusions in one step and the next vary as binomials do. A claim that counts
    on epochs must have each record in one batch of each.
    """
    promise, plan = subject.promise, subject.plan
    in_full = promise.sample_rate == 1 and promise.steps == plan.steps
    if promise.claim.unit != "record" or in_full:
        raise NotApplicable("the claim does not count on how batches are drawn")
    if promise.sample_rate == 1:
        symptoms = [shuffled_epochs(subject.defense, subject.rng)]
        fine = "each record is in one batch of an epoch"
    else:
        symptoms = poisson_samples(subject.defense, plan.sample_rate, subject.rng)
        fine = f"{STEPS} batches are Poisson samples, for all that can be seen"
    return judged("sampling", promise, symptoms, runs, fine=fine)

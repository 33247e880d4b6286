"""Test whether a defense draws batches as its claim assumes."""

from __future__ import annotations

from leakfrontier.adversaries import NotApplicable

from .canaries import Subject
from .draws import STEPS, poisson_samples, shuffled_epochs
from .finding import Audit
from .promise import judged


def sampling(subject: Subject, runs: int = 1) -> Audit:
    """Test whether `batches` yields Poisson samples of the claimed rate, or shuffled epochs.

    In Poisson samples of rate q, inclusions are independent over records and steps. So the total
    number of inclusions is at most Binomial(q). The sizes of batches, the counts of records and
    the inclusions in successive steps have the variance of binomials. If a claim assumes shuffled
    epochs, each record must be in one batch of each epoch.
    """
    promise, plan = subject.promise, subject.plan
    in_full = promise.sample_rate == 1 and promise.steps == plan.steps
    if promise.claim.unit != "record" or in_full:
        raise NotApplicable("the claim does not depend on how batches are drawn")
    if promise.sample_rate == 1:
        symptoms = [shuffled_epochs(subject.defense, subject.rng)]
        fine = "each record is in one batch of an epoch"
    else:
        symptoms = poisson_samples(subject.defense, plan.sample_rate, subject.rng)
        fine = f"{STEPS} batches look like Poisson samples"
    return judged("sampling", promise, symptoms, runs, fine=fine)

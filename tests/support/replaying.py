"""A check of what an informed adversary does with a defense that acts on the update."""

import torch
from federated import batch, mlp, rng
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Batch, Defense, Update, batch_gradient


def check_replay(defense: Defense) -> None:
    """Replay two guesses at once and one by one: the same, finite, and differentiable."""
    model, targets = mlp(), batch(2).targets
    upload = defense.on_update(batch_gradient(model, cross_entropy, batch(2)), rng())
    uploads = {name: value.expand(2, *value.shape) for name, value in upload.items()}
    guesses = torch.stack([batch(2, seed).inputs for seed in (1, 2)]).requires_grad_()

    def replay(inputs: Tensor, observed: Update) -> Update:
        gradient = batch_gradient(model, cross_entropy, Batch(inputs, targets))
        replayed = defense.replay(observed).on_update(gradient, rng())
        likelihood = defense.log_likelihood(observed, replayed)
        return replayed if likelihood is None else {**replayed, "log likelihood": likelihood}

    together = vmap(replay)(guesses, uploads)
    for index, guess in enumerate(guesses):
        alone = replay(guess, upload)
        torch.testing.assert_close({name: value[index] for name, value in together.items()}, alone)
    for value in together.values():
        (slope,) = torch.autograd.grad(value.sum(), guesses, retain_graph=True)
        assert slope.isfinite().all()
    assert slope.abs().sum() > 0

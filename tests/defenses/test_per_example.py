import torch
from federated import batch, convolutional, rng
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.defenses import Defense
from leakfrontier.defenses.per_example import gradient_norms, mixing_layer, replica


def test_norms_are_those_of_each_example_alone_up_to_a_factor() -> None:
    model, share = convolutional(), batch(5)
    alone = [
        Defense().gradient(model, cross_entropy, share.at(slice(i, i + 1)), rng()) for i in range(5)
    ]
    found = gradient_norms(model, cross_entropy, share)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, norms in found.items():
        expected = torch.stack([gradient[name].norm() for gradient in alone]).detach()
        torch.testing.assert_close(norms / norms.sum(), expected / expected.sum())


def test_a_replica_shares_nothing_and_works_nowhere_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True)).eval()
    copied = replica(model)
    with torch.no_grad():
        copied[0].weight.zero_()  # type: ignore[index, operator, union-attr]
    assert model[0].weight.any()  # type: ignore[operator, union-attr]
    assert (model[1].inplace, copied[1].inplace) == (True, False)  # type: ignore[index]
    assert (model.training, copied.training) == (False, True)


def test_names_the_layer_that_mixes_examples() -> None:
    assert mixing_layer(convolutional()) is None
    assert "layer '1' is a BatchNorm" in str(
        mixing_layer(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)))
    )

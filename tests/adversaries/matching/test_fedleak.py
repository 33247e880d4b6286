import math
from dataclasses import replace

import pytest
import torch
from federated import SPACE, batch, observed, rng

from leakfrontier.adversaries import FedLeak, ImageSpace, NotApplicable
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

LENET = build_model("lenet", SPACE, rng())


@pytest.mark.parametrize(("width", "lr"), [(8, 0.02), (0, 0.05)])
def test_recovers_an_undefended_batch(width: int, lr: float) -> None:
    share = batch(2)
    attack = FedLeak(iterations=120, width=width, lr=lr)
    result = attack.reconstruct(observed(LENET, share), rng())
    guess, private = SPACE.to_unit(result.inputs), SPACE.to_unit(share.inputs)
    assert metrics.psnr(guess[metrics.match(guess, private)], private).min() > 15


def test_only_the_largest_entries_of_the_guess_are_matched() -> None:
    distance = FedLeak(matched=0.5).distance(observed(LENET, batch(1)))
    replayed = {"weight": torch.tensor([[0.1, -4.0, 3.0, 0.2]])}
    seen = {"weight": torch.tensor([[9.0, -4.0, 1.0, 9.0]])}
    value, slope = distance(replayed, seen)
    cosine = (16 + 3) / math.sqrt((16 + 9) * (16 + 1))
    # All entries from the lower median upwards: three of the four.
    kept = FedLeak(matched=0.3).distance(observed(LENET, batch(1)))
    assert float(kept(replayed, seen)[0]) == pytest.approx(2 / 4 + 1 - cosine)
    assert slope["weight"][0, 0] == 0
    assert slope["weight"][0, 3] != 0
    same, _ = distance(seen, seen)
    assert float(same) == pytest.approx(0, abs=1e-6)
    assert float(value) > 0


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (2, 5, 12)])
def test_the_generator_draws_images_of_any_shape(shape: tuple[int, ...]) -> None:
    space = ImageSpace(shape, 10, (0.5,), (0.25,))
    observation = replace(observed(LENET, batch(3)), space=space)
    attack = FedLeak(width=8, restarts=2)
    unknowns = attack.start(observation, rng())
    images = space.to_unit(attack.render(observation, unknowns))
    assert images.shape == (2, 3, *shape)
    assert images.min() > 0
    assert images.max() < 1
    assert not torch.allclose(images[0], images[1])
    again = space.to_unit(attack.render(observation, attack.start(observation, rng())))
    torch.testing.assert_close(images, again)


def test_a_generators_input_stays_fixed() -> None:
    attack, observation = FedLeak(width=4, iterations=3), observed(LENET, batch(2))
    start = attack.start(observation, rng())
    best, _ = attack.optimizer().minimise(
        attack._evaluation(
            observation,
            batch(2).targets.unsqueeze(0),
            {name: value.unsqueeze(0) for name, value in observation.update.items()},
        ),
        start,
        lambda unknowns: attack.project(observation, unknowns),
        torch.zeros_like,
    )
    assert best["latent"].equal(start["latent"])
    assert any(not best[name].equal(start[name]) for name in start)


def test_what_is_no_image_is_not_applicable_to_a_generator() -> None:
    flat = replace(observed(LENET, batch(1)), space=ImageSpace((192,), 10))
    with pytest.raises(NotApplicable, match="images"):
        FedLeak().reconstruct(flat, rng())


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", math.nan), ("matched", 0.0), ("look_ahead", 1.0), ("width", -1), ("weight_decay", -1)],
)
def test_rejects_bad_parameters(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        FedLeak(**{name: value})  # type: ignore[arg-type]

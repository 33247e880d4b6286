"""Test that no honest defense fails the checks `invertibility` and `replay`.

Every defense runs at its identity and at extreme settings, on several seeds and protocols. The
script prints how near each comes to failing: how much more decoders recover than uploads show, and
the contrast of its replay beside that of an undefended client.

    python benchmarks/inversion.py [--seeds 5] [--dataset digits]
"""

from __future__ import annotations

import argparse

import torch

from leakfrontier.adversaries import ContinuousSpace, FedAvg, FedSGD, InputSpace, Protocol
from leakfrontier.defenses import (
    ATS,
    DPSGD,
    PRECODE,
    Chain,
    ClientDP,
    Defense,
    DisaggregationSNR,
    DualPruning,
    Mixup,
    Noise,
    Outpost,
    Quantization,
    RandomK,
    Refused,
    SecureAggregation,
    SignSGD,
    Soteria,
    TopK,
    WeightInspection,
)
from leakfrontier.evaluate.client.client import Client
from leakfrontier.evaluate.client.discrimination import Examined, discriminated
from leakfrontier.evaluate.client.examination import examine, failures, mending_of
from leakfrontier.evaluate.client.inversion import (
    PublicTraining,
    invert,
    public_clients,
    still_holds_update,
)
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, World, load_world

DEFENSES: tuple[Defense, ...] = (
    Defense(),
    *(DPSGD(noise_multiplier=noise) for noise in (0.0, 0.01, 1.0, 10.0)),
    DPSGD(noise_multiplier=0.0, max_grad_norm=1e6),
    *(ClientDP(noise_multiplier=noise) for noise in (0.0, 0.1, 10.0)),
    *(Noise(scale=scale) for scale in (0.0, 0.005, 0.02, 0.1, 10.0)),
    Noise(scale=0.1, distribution="laplace"),
    *(TopK(ratio=ratio) for ratio in (1.0, 0.1, 0.001)),
    *(RandomK(ratio=ratio) for ratio in (1.0, 0.5, 0.1, 0.001)),
    *(Quantization(bits=bits) for bits in (1, 4, 8)),
    Quantization(bits=1, stochastic=False),
    DualPruning(largest=0.1, smallest=0.5),
    SignSGD(),
    Mixup(alpha=0.01),
    Mixup(alpha=5.0),
    ATS(),
    Soteria(pruning_rate=0.5),
    Outpost(),
    PRECODE(),
    WeightInspection(),
    DisaggregationSNR(threshold=torch.inf),
    SecureAggregation(clients=2),
    Chain((TopK(ratio=0.1), Noise(scale=1e-3))),
    Chain((RandomK(ratio=0.5), Quantization(bits=1))),
)
PROTOCOLS: tuple[tuple[Protocol, int], ...] = (
    (FedSGD(), 1),
    (FedSGD(), 8),
    (FedAvg(epochs=2, batch_size=4, lr=0.05), 8),
)


def main() -> None:
    """Print one line per protocol and defense: the worst case of all seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dataset", default="digits")
    arguments = parser.parse_args()
    model = Method(name="mlp", options={"width": 32})
    world = load_world(Scenario(dataset=arguments.dataset, model=model))
    failed = 0
    for protocol, size in PROTOCOLS:
        for defense in DEFENSES:
            found = [_examined(world, defense, protocol, size, n) for n in range(arguments.seeds)]
            failed += _report(f"{protocol}, {size} examples, {defense}", found)
    print(f"{failed} of {len(PROTOCOLS) * len(DEFENSES)} cases fail")


def _examined(
    world: World, defense: Defense, protocol: Protocol, size: int, seed: int
) -> Examined | None:
    rng = generator("benchmark", seed)
    defense = _for_space(defense, world.space)
    client = Client(world.model(defense, seed), world.modality.loss, defense, protocol, world.space)
    rows = torch.randperm(len(world.train.targets), generator=rng)
    rounds = [
        [world.train.at(part) for part in three.split(size)]
        for three in rows[: 3 * size * defense.cohort].split(size * defense.cohort)
    ]
    clients = public_clients(defense)
    each = size if not protocol.uploads_gradient else len(world.test.targets) // clients
    shares = [world.test.at(part) for part in torch.arange(clients * each).split(each)]
    try:
        replay = examine(client, rounds, rng)
        inversion = invert(client, shares, PublicTraining(size), rng)
    except Refused:
        return None
    probe = discriminated(inversion, client, rounds, mending_of(replay), rng)
    return Examined(replay, probe, inversion.decoder)


def _for_space(defense: Defense, space: InputSpace) -> Defense:
    """Return a defense that knows how the inputs were normalised."""
    if not isinstance(space, ContinuousSpace):
        return defense
    return defense.for_space(space.mean, space.std)


def _report(name: str, found: list[Examined | None]) -> bool:
    """Print the worst case of one defense, and return whether it fails."""
    pairs = [(one.replay, one.probe) for one in found if one is not None and one.probe is not None]
    if not pairs:
        print(f"refused  {name}")
        return False
    fails = any(
        still_holds_update(probe) or failures(*pair) for pair in pairs for probe in pair[1:]
    )
    excess = max(probe.decoded - probe.plain for _, probe in pairs)
    contrast, ideal = min(
        ((probe.contrast, probe.ideal_contrast) for _, probe in pairs),
        key=lambda both: both[0] - both[1],
    )
    verdict = "FAILS" if fails else "passes"
    print(
        f"{verdict:6}  excess {excess:+.2f}  contrast {contrast:.2f} of {ideal:.2f}  {name}",
        flush=True,
    )
    return fails


if __name__ == "__main__":
    main()

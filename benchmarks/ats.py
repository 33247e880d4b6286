"""Test the search of ATS: compare the policies it finds with random ones, on CIFAR-10.

    python benchmarks/ats.py [FOLDER] [--candidates 200] [--victims 30] [--iterations 300]
        [--per-class 1] [--policies 2] [--score-untrained]

The script searches policies for the LeNet with sigmoids. Then Inverting Gradients attacks uploads
of the untrained model, of one image each. There are three arms: no defense, the best policies, and
policies drawn at random from those that the search accepted. So only the privacy score of the
search makes the difference. Nothing else is chosen after seeing results.

An attack succeeds if its guess is nearer to the victim than to 99 look-alikes of the same class. It
is scored against transformed images, from which the upload is made (the look-alikes get the same
draws as the victim), and against the originals. An adversary that knows the policy guesses the
original, with its own draws at every iteration. If that fails, the original is not therefore
hidden: an adversary that has candidates and tries the few possible draws reaches the rate on
transformed images. Rates under different policies are not equally hard: a transformation that adds
contrast also separates the look-alikes.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import ContinuousSpace, FedSGD, InvertingGradients, Reconstruction
from leakfrontier.defenses import Batch
from leakfrontier.defenses.ats import ATS
from leakfrontier.defenses.ats_search import search
from leakfrontier.evaluate.client.client import Client, ThreatModel, make_replay, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.foundations.statistics import paired_difference, rate
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.modality.modality import Images
from leakfrontier.evaluate.models.models import build_model

LOOK_ALIKES = 99


@dataclass(frozen=True)
class Lab:
    """The common parts of all arms: the attacked model, the victims and the attack."""

    model: nn.Module
    space: ContinuousSpace
    train: Batch
    victims: Sequence[int]
    attack: InvertingGradients

    def attacked(self, policy: str, *, informed: bool) -> dict[str, list[bool]]:
        """Return which victims are identified, by kind of compared image."""
        defense = ATS(policy).for_space(self.space.mean, self.space.std)
        threat = ThreatModel(knows_defense=informed)
        rng = generator("replay", policy)
        client = Client(self.model, cross_entropy, defense, FedSGD(), self.space)
        replay = make_replay(client, threat, rng)
        observations = [
            observe(
                client,
                [self.train.at(torch.tensor([victim]))],
                threat,
                generator("client", policy, victim),
                replay=replay,
            )[0].observation
            for victim in self.victims
        ]
        starts = [generator("adversary", victim) for victim in self.victims]
        guesses = self.attack.reconstruct_all(observations, starts)
        compared = (
            {"original": ATS("")} if informed else {"transformed": defense, "original": ATS("")}
        )
        return {
            what: [
                self._is_identified(victim, guess, transform)
                for victim, guess in zip(self.victims, guesses, strict=True)
            ]
            for what, transform in compared.items()
        }

    def _is_identified(self, victim: int, guess: object, transform: ATS) -> bool:
        if not isinstance(guess, Reconstruction):
            raise ValueError(f"the attack does not apply: {guess}")
        look_alikes = Images(self.space).look_alikes(
            victim,
            Batch(self.space.to_unit(self.train.inputs), self.train.targets),
            torch.tensor([victim]),
            LOOK_ALIKES,
            generator("look-alikes", victim),
        )
        # One by one: all get the draws that the client made for the victim.
        images = [
            transform.on_batch(
                self.train.at(torch.tensor([row])), generator("client", transform.policy, victim)
            ).inputs
            for row in (victim, *look_alikes.tolist())
        ]
        truth, pool = self.space.to_unit(torch.cat(images)).split([1, LOOK_ALIKES])
        return bool(metrics.identified(self.space.to_unit(guess.inputs), truth, pool[None]))


def semi_trained(space: ContinuousSpace, train: Batch, epochs: int = 30) -> nn.Module:
    """Return the LeNet trained on a tenth of the data, as in the authors' search."""
    rng = generator("semi-trained")
    model = build_model("lenet", space, rng)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    part = train.at(torch.randperm(len(train.targets), generator=rng)[::10])
    for _ in range(epochs):
        for rows in torch.randperm(len(part.targets), generator=rng).split(50):
            optimizer.zero_grad()
            cross_entropy(model(part.inputs[rows]), part.targets[rows]).backward()
            optimizer.step()
    return model


def main() -> None:
    """Search, attack, and print rates with 95 % intervals."""
    options = _options()
    torch.set_num_threads(1)
    console = Console()
    data = load_dataset(str(options.folder))
    space, (train, test) = data.space, data.normalised
    untrained = build_model("lenet", space, generator("untrained"))
    scored = untrained if options.score_untrained else semi_trained(space, train)
    found = search(
        scored,
        untrained,
        cross_entropy,
        test,
        space,
        generator("search"),
        candidates=options.candidates,
        per_class=options.per_class,
        console=console,
    )
    if options.save:
        options.save.write_text(json.dumps([asdict(one) for one in found], indent=2))
    best, random = _choose([one.policy for one in found], options.policies)
    console.print(f"{len(found)} policies accepted; found: {best}; random: {random}", markup=False)

    victims = torch.randperm(len(train.targets), generator=generator("victims"))
    attack = InvertingGradients(iterations=options.iterations)
    lab = Lab(untrained, space, train, victims[: options.victims].tolist(), attack)
    compare(lab, best, random, console)


def compare(lab: Lab, best: list[str], random: list[str], console: Console) -> None:
    """Attack all arms. Print rates over victims, and differences on the same victims."""
    arms = {
        "no defense": ([""], False),
        "found": (best, False),
        "random": (random, False),
        "found, known to the adversary": (best, True),
        "random, known to the adversary": (random, True),
    }
    results: dict[tuple[str, str], list[bool]] = {}
    for arm, (policies, informed) in arms.items():
        outcomes = [lab.attacked(policy, informed=informed) for policy in policies]
        for what in outcomes[0]:
            hits = results[arm, what] = [hit for outcome in outcomes for hit in outcome[what]]
            share = rate(hits, [*lab.victims] * len(policies))
            console.print(f"{arm:40}{what:13}{share}", markup=False)
    for arm, what in results:
        if arm.startswith("found"):
            other = results[arm.replace("found", "random"), what]
            difference = paired_difference(results[arm, what], other, [*lab.victims] * len(best))
            label = arm.replace("found", "found - random")
            console.print(f"{label:40}{what:13}{difference}", markup=False)


def _choose(ranked: list[str], count: int) -> tuple[list[str], list[str]]:
    """Return the best policies, and as many random ones of the others."""
    if not 1 <= count <= len(ranked) // 2:
        raise ValueError(f"{len(ranked)} accepted policies are too few, {2 * count} are needed")
    order = torch.randperm(len(ranked) - count, generator=generator("random policies"))
    return ranked[:count], [ranked[count + i] for i in order[:count]]


def _options() -> argparse.Namespace:
    shared = os.environ.get("LEAKFRONTIER_DATA")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?" if shared else None,
        default=Path(shared or "", "cifar10"),
        help="images of CIFAR-10 in train/ and test/ (default: $LEAKFRONTIER_DATA/cifar10)",
    )
    numbers = {"candidates": 200, "victims": 30, "iterations": 300, "policies": 2, "per-class": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--score-untrained",
        action="store_true",
        help="compute the privacy score on the attacked model instead of a semi-trained one",
    )
    parser.add_argument("--save", type=Path, help="JSON file for the policies")
    return parser.parse_args()


if __name__ == "__main__":
    main()

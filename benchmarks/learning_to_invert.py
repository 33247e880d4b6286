"""Compare Learning to Invert with gradient matching, on the same uploads of a LeNet, batch size 1.

python benchmarks/learning_to_invert.py FOLDER|fashion-mini [VICTIMS] [PUBLIC] [DEFENSE ...]

The setting is that of the paper's Table 1: an untrained LeNet, inputs in [0, 1], no labels granted.
The defenses are signs, 99 % pruning and Gaussian noise of 0.1. The adversary's public data is the
training split, and victims come from the test split. For fashion-mini it is the other way round,
because its training split is the smaller one. The script prints the mean MSE and PSNR, and how many
victims are identified among private examples of their class. `mean` guesses the mean of the public
data.
"""

import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import (
    PANEL,
    Adversary,
    FedSGD,
    ImageSpace,
    LearningToInvert,
    NotApplicable,
    PublicData,
    Reconstruction,
)
from leakfrontier.defenses import Batch, Defense, Noise, SignSGD, TopK
from leakfrontier.evaluate.client.client import Client, ThreatModel, Upload, make_replay, observe
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.foundations.seeds import generator
from leakfrontier.evaluate.modality import metrics
from leakfrontier.evaluate.models.models import build_model

CANDIDATES = 100
DEFENSES: dict[str, Defense] = {
    "none": Defense(),
    "sign": SignSGD(scale=False),
    "prune": TopK(0.01, error_feedback=False),
    "noise": Noise(0.1),
}


def main(dataset: str, victims: int = 20, public: int = 5000, *names: str) -> None:
    """Attack the same victims under every defense, with and without knowledge of it."""
    data = load_dataset(dataset)
    private, known = data.test, data.train
    if dataset == "fashion-mini":
        private, known = data.train, data.test
    space = ImageSpace(tuple(private.inputs.shape[1:]), len(data.classes))
    some = torch.randperm(len(known.inputs), generator=generator("public"))[:public]
    auxiliary = PublicData(known.inputs[some], known.targets[some])
    rows = torch.randperm(len(private.inputs), generator=generator("victims"))[:victims]
    pool = torch.stack(
        [
            data.modality.look_alikes(int(i), private, rows[:0], CANDIDATES - 1, generator(int(i)))
            for i in rows
        ]
    )
    truth, others = private.inputs[rows], private.inputs[pool]
    blind = auxiliary.inputs.mean(dim=0).expand_as(truth)
    print(f"{victims} victims, {len(some)} public examples")
    print(f"{'mean of public data':42}", _scores(blind, truth, others))
    model = build_model("lenet", space, generator("model"))
    for name in names or DEFENSES:
        for knows in (True,) if name == "none" else (False, True):
            threat = ThreatModel(knows_defense=knows, public=auxiliary)
            shares = [private.at(row) for row in rows.split(1)]
            client = Client(model, cross_entropy, DEFENSES[name], FedSGD(), space)
            uploads = _observe(client, shares, threat)
            attacks: list[Adversary] = [LearningToInvert(), PANEL.members["InvertingGradients"]]
            for attack in attacks:
                start = time.perf_counter()
                rngs = [generator("adversary", i) for i in range(victims)]
                found = attack.reconstruct_all([u.observation for u in uploads], rngs)
                seconds = time.perf_counter() - start
                guess = torch.cat([_inputs(result) for result in found])
                knowledge = "informed" if knows else "ignorant"
                title = f"{name}, {knowledge} {type(attack).__name__}"
                scores = _scores(guess.clamp(0, 1), truth, others)
                print(f"{title:42} {scores}, {seconds:.0f} s", flush=True)


def _observe(client: Client, shares: list[Batch], threat: ThreatModel) -> list[Upload]:
    """Return one upload per share. All uploads use one replay."""
    defense = repr(client.defense)
    replay = make_replay(client, threat, generator("replay", defense))
    uploads = []
    for index, share in enumerate(shares):
        rng = generator("client", defense, index)
        uploads += observe(client, [share], threat, rng, replay=replay)
    return uploads


def _inputs(result: Reconstruction | NotApplicable) -> Tensor:
    if isinstance(result, NotApplicable):
        raise result
    return result.inputs


def _scores(guess: Tensor, truth: Tensor, others: Tensor) -> str:
    mse = (guess - truth).square().flatten(1).mean(dim=1)
    psnr = metrics.psnr(guess, truth).mean()
    found = metrics.identified(guess, truth, others)
    return f"MSE {mse.mean():.4f}, PSNR {psnr:5.2f} dB, identified {int(found.sum())}/{len(truth)}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], *(int(n) for n in sys.argv[2:4]), *sys.argv[4:])

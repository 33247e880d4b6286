"""Sound and text are attacked by the same path as images."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federated import rng
from token_leakage import TokenLeakage

from leakfrontier.adversaries import (
    ADVERSARIES,
    Adversary,
    Candidates,
    FedAvg,
    FedSGD,
    InvertingGradients,
    LinearLeakage,
    NotApplicable,
    PriorAware,
    Protocol,
    PublicData,
    infer_targets,
)
from leakfrontier.defenses import DPSGD, Defense, Noise
from leakfrontier.evaluate.client.client import Client, ThreatModel, Upload, observe
from leakfrontier.evaluate.data.data import Dataset, load_dataset
from leakfrontier.evaluate.models.models import build_model


def upload(
    data: Dataset,
    model: str,
    *,
    examples: int = 1,
    public: bool = True,
    defense: Defense | None = None,
    protocol: Protocol | None = None,
) -> Upload:
    """Return what a server sees of a client with the first examples."""
    train, test = data.normalised
    client = Client(
        build_model(model, data.space, rng()),
        data.modality.loss,
        defense or Defense(),
        protocol or FedSGD(),
        data.space,
    )
    threat = ThreatModel(public=PublicData(*test) if public else None)
    (seen,) = observe(client, [train.at(slice(examples))], threat, rng(1))
    return seen


def scores(data: Dataset, seen: Upload, attack: Adversary) -> dict[str, float]:
    guess = attack.reconstruct(seen.observation, rng()).inputs
    values = data.modality.values
    return {
        name: value.item()
        for name, value in data.modality.scores(values(guess), values(seen.truth.inputs)).items()
    }


@pytest.fixture(scope="module")
def digits() -> Dataset:
    folder = os.environ.get("LEAKFRONTIER_DATA")
    if not folder:
        pytest.skip("LEAKFRONTIER_DATA does not name a folder of datasets")
    return load_dataset(str(Path(folder) / "audio" / "fsdd"))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("sentences")
    words = ("the cat", "a dog", "no bird", "her fox", "my hen", "this cow", "one pig", "an ape")
    verbs = ("sat", "ran off", "slept", "barked")
    texts = [{"text": f"{w} {v}.", "label": int(v < "c")} for w in words for v in verbs]
    for split, part in (("train", texts), ("test", texts[::3])):
        lines = "".join(f"{json.dumps(text)}\n" for text in part)
        (folder / f"{split}.jsonl").write_text(lines)
    return load_dataset(str(folder))


def test_linear_leakage_recovers_speech(digits: Dataset) -> None:
    assert scores(digits, upload(digits, "mlp"), LinearLeakage())["snr"] > 100


@pytest.mark.parametrize(("model", "gain"), [("mlp", 5.0), ("conv1d", 1.0)])
def test_optimisation_gets_nearer_to_speech(digits: Dataset, model: str, gain: float) -> None:
    seen = upload(digits, model)
    attack = InvertingGradients(total_variation=0.01)
    short, longer = (
        scores(digits, seen, replace(attack, iterations=count))["snr"] for count in (2, 100)
    )
    assert longer > short + gain


def test_every_attack_runs_on_text_or_says_why_not(sentences: Dataset) -> None:
    train = sentences.train
    reasons = ("token", "candidates", "not a transformers model")
    for examples in (1, 4):
        seen = upload(sentences, "token_mlp", examples=examples).observation
        granted = Candidates(*(part[: 2 * examples].unflatten(0, (2, -1)) for part in train))
        for observation in (seen, replace(seen, public=None), replace(seen, candidates=granted)):
            for attack in ADVERSARIES.values():
                (result,) = attack().reconstruct_all([observation], [rng()])
                if isinstance(result, NotApplicable):
                    assert any(reason in str(result) for reason in reasons), result
                else:
                    assert result.inputs.dtype == torch.int64
                    assert result.inputs.shape[1:] == sentences.space.shape


def test_candidates_are_told_apart_by_their_text(sentences: Dataset) -> None:
    train = sentences.train
    granted = Candidates(train.inputs[:8, None].flip(0), train.targets[:8, None].flip(0))
    for defense in (Defense(), DPSGD(noise_multiplier=0.01, max_grad_norm=1.0)):
        seen = upload(sentences, "token_mlp", defense=defense)
        guess = PriorAware().reconstruct(replace(seen.observation, candidates=granted), rng())
        assert torch.equal(guess.inputs, seen.truth.inputs)


@pytest.mark.parametrize(
    "protocol", [FedSGD(), FedAvg(epochs=1, batch_size=1, lr=0.1)], ids=["FedSGD", "FedAvg"]
)
@pytest.mark.parametrize("public", [True, False])
def test_embeddings_give_a_text_away(sentences: Dataset, protocol: Protocol, public: bool) -> None:
    seen = upload(sentences, "token_mlp", protocol=protocol, public=public)
    guess = TokenLeakage().reconstruct(seen.observation, rng())
    names = ("token_accuracy", "exact", "rouge1", "rouge2", "rougeL")
    assert scores(sentences, seen, TokenLeakage()) == dict.fromkeys(names, 1.0)
    assert guess.targets is not None
    assert torch.equal(guess.targets, seen.truth.targets)


def test_noise_hides_a_text(sentences: Dataset) -> None:
    seen = upload(sentences, "token_mlp", defense=Noise(scale=1.0))
    assert scores(sentences, seen, TokenLeakage())["token_accuracy"] < 0.5


def test_labels_of_several_texts_are_inferred(sentences: Dataset) -> None:
    for public in (True, False):
        seen = upload(sentences, "token_mlp", examples=4, public=public)
        assert len(infer_targets(seen.observation, rng())) == 4


def test_token_leakage_says_what_it_needs(sentences: Dataset) -> None:
    with pytest.raises(NotApplicable, match="of one text, got 4"):
        TokenLeakage().reconstruct(upload(sentences, "token_mlp", examples=4).observation, rng())
    with pytest.raises(NotApplicable, match="no tokens"):
        TokenLeakage().reconstruct(upload(load_dataset("digits"), "mlp").observation, rng())

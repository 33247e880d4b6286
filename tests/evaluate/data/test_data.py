import gzip
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from leakfrontier.adversaries import ImageSpace
from leakfrontier.defenses import Batch
from leakfrontier.evaluate.data import data
from leakfrontier.evaluate.data.data import DATASETS, data_digest, forget_digests, load_dataset


@pytest.fixture(scope="module")
def datasets_folder() -> Path:
    folder = os.environ.get("LEAKFRONTIER_DATA")
    if not folder:
        pytest.skip("LEAKFRONTIER_DATA does not name a folder of datasets")
    return Path(folder)


SPACE = ImageSpace((1, 2, 2), 2)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_images(
    folder: Path, *, count: int = 5, size: tuple[int, int] = (4, 3), mode: str = "L"
) -> None:
    folder.mkdir(parents=True)
    draws = np.random.default_rng(list(folder.name.encode()))
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    for index in range(count):
        pixels = draws.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")


def check_pixels(batch: Batch, shape: tuple[int, ...]) -> None:
    assert batch.inputs.shape == shape
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.is_contiguous()
    assert batch.inputs.max() == 1.0
    assert batch.inputs.min() == 0.0
    assert batch.targets.dtype == torch.int64


def test_fashion_mini() -> None:
    dataset = load_dataset("fashion-mini")
    check_pixels(dataset.train, (2000, 1, 28, 28))
    check_pixels(dataset.test, (500, 1, 28, 28))
    assert dataset.train.targets.bincount().tolist() == [200] * 10
    assert dataset.test.targets.bincount().tolist() == [50] * 10
    trousers = dataset.train.inputs[dataset.train.targets == dataset.classes.index("Trouser")]
    middle, side = trousers[..., 14].mean(), trousers[..., 2].mean()
    assert middle > 10 * side  # a trouser is narrow, and stands upright


def test_fashion_mini_bytes_are_the_embedded_ones() -> None:
    folder = Path(data.__file__).parent / "fashion_mini"
    raw = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    inputs = load_dataset("fashion-mini").test.inputs
    assert (inputs * 255).round().to(torch.uint8).numpy().tobytes() == raw
    assert "MIT License" in (folder / "NOTICE").read_text(encoding="utf-8")


def test_digits() -> None:
    dataset = load_dataset("digits")
    check_pixels(dataset.train, (1438, 1, 8, 8))
    check_pixels(dataset.test, (359, 1, 8, 8))
    images = torch.cat([dataset.train.inputs, dataset.test.inputs]).flatten(1) * 16
    labels = torch.cat([dataset.train.targets, dataset.test.targets])
    expected = load_digits()
    found = np.column_stack([images.numpy(), labels.numpy()])
    reference = np.column_stack([expected.data, expected.target])
    assert sorted(map(tuple, found)) == sorted(map(tuple, reference))
    assert np.bincount(expected.target).tolist() == labels.bincount().tolist()
    shares = dataset.test.targets.bincount() / labels.bincount()
    assert shares.min() > 0.19
    assert shares.max() < 0.21


def test_statistics_are_of_the_training_split() -> None:
    dataset = load_dataset("digits")
    space = dataset.space
    assert (space.shape, space.classes) == ((1, 8, 8), 10)
    pixels = dataset.train.inputs.double().numpy()
    assert space.mean == pytest.approx([pixels.mean()], rel=1e-5)
    assert space.std == pytest.approx([pixels.std()], rel=1e-5)
    inputs = space.to_inputs(dataset.train.inputs)
    assert torch.allclose(space.to_unit(inputs), dataset.train.inputs, atol=1e-6)


def test_loaded_once() -> None:
    assert load_dataset("digits") is load_dataset("digits")


def test_split_is_fixed() -> None:
    first = DATASETS["digits"](Path())
    torch.manual_seed(1)
    again = DATASETS["digits"](Path())
    assert first is not again
    assert torch.equal(first.test.inputs, again.test.inputs)


def test_full_mnist_from_a_read_only_folder(datasets_folder: Path) -> None:
    dataset = load_dataset("mnist", datasets_folder)
    check_pixels(dataset.train.at(slice(None)), (60_000, 1, 28, 28))
    check_pixels(dataset.test.at(slice(None)), (10_000, 1, 28, 28))
    assert dataset.train.targets[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert dataset.space.mean == pytest.approx([0.1307], abs=5e-5)  # the well-known constants
    assert dataset.space.std == pytest.approx([0.3081], abs=5e-5)


def test_folder_of_colour_images(datasets_folder: Path) -> None:
    started = time.perf_counter()
    dataset = load_dataset(str(datasets_folder / "cifar10"))
    assert time.perf_counter() - started < 15
    check_pixels(dataset.train, (5000, 3, 32, 32))
    check_pixels(dataset.test, (1000, 3, 32, 32))
    assert dataset.classes[0] == "airplane"
    assert dataset.train.targets.bincount().tolist() == [500] * 10
    assert dataset.space.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=0.01)
    assert dataset.space.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=0.01)
    first = min((datasets_folder / "cifar10" / "train" / "airplane").iterdir())
    with Image.open(first) as image:
        assert image.getpixel((5, 9)) == tuple((dataset.train.inputs[0, :, 9, 5] * 255).int())


def test_folder_of_grey_images(datasets_folder: Path) -> None:
    dataset = load_dataset(str(datasets_folder / "emnist_letters"))
    check_pixels(dataset.train, (4992, 1, 28, 28))
    assert len(dataset.classes) == 26


def test_folder_without_a_split_is_split_by_class(tmp_path: Path) -> None:
    write_images(tmp_path / "cat", count=20)
    write_images(tmp_path / "dog", count=10)
    (tmp_path / ".hidden").mkdir()
    dataset = load_dataset(str(tmp_path))
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.inputs.shape == (24, 1, 3, 4)
    assert dataset.train.targets.bincount().tolist() == [16, 8]
    assert dataset.test.targets.bincount().tolist() == [4, 2]
    together = torch.cat([dataset.train.inputs, dataset.test.inputs]).flatten(1)
    assert len(together.unique(dim=0)) == 30
    assert load_dataset(dataset.name) is dataset


def test_validation_folder_and_grey_among_colours(tmp_path: Path) -> None:
    write_images(tmp_path / "train" / "cat", mode="RGB")
    write_images(tmp_path / "train" / "dog", mode="L")
    write_images(tmp_path / "val" / "cat", count=2)
    write_images(tmp_path / "val" / "dog", count=3)
    dataset = load_dataset(str(tmp_path))
    assert dataset.train.inputs.shape == (10, 3, 3, 4)
    assert dataset.test.targets.tolist() == [0, 0, 1, 1, 1]
    grey = dataset.train.inputs[dataset.train.targets == 1]
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_constant_channel_is_only_centred(tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    for index in range(5):
        Image.new("RGB", (4, 4), (index * 20, 0, 0)).save(tmp_path / "red" / f"{index}.png")
    dataset = load_dataset(str(tmp_path))
    assert dataset.space.std[1:] == (1.0, 1.0)
    assert dataset.space.to_inputs(dataset.train.inputs).isfinite().all()


def test_known_names_come_before_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    write_images(tmp_path / "pets" / "cat")
    monkeypatch.chdir(tmp_path)
    assert load_dataset("digits").name == "digits"
    assert load_dataset("pets").classes == ("cat",)


def test_unknown_name_lists_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"path of a folder with.*got 'imagnet'") as caught:
        load_dataset("imagnet")
    assert all(name in str(caught.value) for name in DATASETS)


def test_unusable_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder or file .*absent"):
        load_dataset(str(tmp_path / "absent"))
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none has no classes"):
        load_dataset(str(tmp_path / "none"))
    write_images(tmp_path / "pets" / "cat")
    (tmp_path / "pets" / "dog").mkdir()
    with pytest.raises(ValueError, match="dog holds no images or WAV files"):
        load_dataset(str(tmp_path / "pets"))
    write_images(tmp_path / "few" / "cat", count=4)
    with pytest.raises(ValueError, match=r"test split of .*few.*at least one example"):
        load_dataset(str(tmp_path / "few"))
    write_images(tmp_path / "new" / "train" / "cat")
    write_images(tmp_path / "new" / "test" / "cat")
    write_images(tmp_path / "new" / "test" / "fox")
    with pytest.raises(ValueError, match="without training data: fox"):
        load_dataset(str(tmp_path / "new"))


def test_unusable_images(tmp_path: Path) -> None:
    write_images(tmp_path / "sizes" / "train" / "cat", size=(4, 3))
    write_images(tmp_path / "sizes" / "test" / "cat", size=(4, 5))
    with pytest.raises(ValueError, match=r"4x3 .* and 4x5 .*resize them first"):
        load_dataset(str(tmp_path / "sizes"))
    write_images(tmp_path / "broken" / "cat")
    (tmp_path / "broken" / "cat" / "9.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"cannot read the image .*9.png"):
        load_dataset(str(tmp_path / "broken"))
    write_images(tmp_path / "deep" / "cat")
    deep = Image.fromarray(np.full((3, 4), 40_000, dtype=np.uint16))
    deep.save(tmp_path / "deep" / "cat" / "9.png")
    with pytest.raises(ValueError, match=r"9.png has more than 8 bits"):
        load_dataset(str(tmp_path / "deep"))


def test_a_dataset_is_known_by_its_content(tmp_path: Path) -> None:
    for name in ("here", "there"):
        write_images(tmp_path / name / "cat")
        write_images(tmp_path / name / "dog")

    def found(name: str) -> str:
        forget_digests()
        return data_digest(str(tmp_path / name))

    first = found("here")
    assert found("there") == first
    (tmp_path / "there" / "notes.txt").write_text("no example")
    assert found("there") == first
    file = tmp_path / "there" / "cat" / "0.png"
    content, times = file.read_bytes(), file.stat()
    before = load_dataset(str(tmp_path / "there"))
    file.write_bytes((tmp_path / "there" / "cat" / "1.png").read_bytes())
    assert found("there") != first
    assert not torch.equal(load_dataset(str(tmp_path / "there")).train.inputs, before.train.inputs)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert found("there") == first
    file.rename(file.with_name("9.png"))
    assert found("there") != first


def test_examples_are_read_once_for_their_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "cat")
    first = data_digest(str(tmp_path))
    forget_digests()
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("read again"))
    assert data_digest(str(tmp_path)) == first


def test_texts_are_known_by_their_content(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one", "label": "a"}\n')
    first = data_digest(str(file))
    file.write_text('{"text": "two", "label": "a"}\n')
    forget_digests()
    assert data_digest(str(file)) != first

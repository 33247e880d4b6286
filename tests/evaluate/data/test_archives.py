import gzip
import hashlib
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from leakfrontier.evaluate.data.archives import (
    CifarArchive,
    IdxArchive,
    archives,
    located,
    pixel_moments,
    read_archive,
    unpickled,
)
from leakfrontier.evaluate.data.data import ARCHIVES, FASHION_CLASSES, data_files, load_dataset

DRAWS = np.random.default_rng(0)
PIXELS = DRAWS.integers(0, 256, (6, 28, 28), dtype=np.uint8)
LABELS = np.arange(6, dtype=np.uint8)
SMALL = IdxArchive("MNIST", "MNIST/raw", ("train", "t10k"), (6, 6), tuple("abcdef"))


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    return header + values.tobytes()


def write_mnist(folder: Path, *, packed: bool = False, parts: tuple[str, str]) -> Path:
    raw = folder / SMALL.folder
    raw.mkdir(parents=True)
    for part in parts:
        for kind, values in zip(SMALL.KINDS, (PIXELS, LABELS), strict=True):
            content, name = idx(values), f"{part}-{kind}"
            if packed:
                content, name = gzip.compress(content), f"{name}.gz"
            (raw / name).write_bytes(content)
    return folder


def listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("packed", [True, False])
def test_files_are_read_in_place(tmp_path: Path, packed: bool) -> None:
    write_mnist(tmp_path, packed=packed, parts=SMALL.parts)
    before = listed(tmp_path)
    train, test, classes = read_archive(SMALL, "mnist", tmp_path)
    assert listed(tmp_path) == before  # nothing was unpacked beside them
    assert train.inputs.dtype == torch.uint8
    assert torch.equal(train.inputs[:, 0], torch.from_numpy(PIXELS))
    assert test.targets.tolist() == LABELS.tolist()
    assert classes == SMALL.classes


def test_a_folder_of_the_datasets_name_is_found(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", parts=SMALL.parts)
    assert located(SMALL, "mnist", tmp_path) == tmp_path / "mnist"
    assert len(read_archive(SMALL, "mnist", tmp_path)[0].targets) == 6


def test_emnist_from_its_one_archive(tmp_path: Path) -> None:
    archive = replace(SMALL, folder="EMNIST/raw", split="letters", first=1, counts=(5, 5))
    raw = tmp_path / archive.folder
    raw.mkdir(parents=True)
    with zipfile.ZipFile(raw / "gzip.zip", "w") as whole:
        for name in archive.names:
            values = LABELS[1:] if "labels" in name else PIXELS[1:]
            whole.writestr(f"gzip/{name}.gz", gzip.compress(idx(values)))
    train, _, _ = read_archive(archive, "emnist-letters", tmp_path)
    assert torch.equal(train.inputs[:, 0], torch.from_numpy(PIXELS[1:]).mT)
    assert train.targets.tolist() == [0, 1, 2, 3, 4]
    assert [*listed(tmp_path)].count("EMNIST/raw/gzip.zip") == 1
    assert len(listed(tmp_path)) == 3


def test_incomplete_files_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, parts=SMALL.parts)
    with pytest.raises(ValueError, match="must hold 7 examples, got 6: the file is not the full"):
        read_archive(replace(SMALL, counts=(6, 7)), "mnist", tmp_path)
    file = tmp_path / SMALL.folder / SMALL.names[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is incomplete: delete it"):
        read_archive(SMALL, "mnist", tmp_path)


def test_changed_archives_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True, parts=SMALL.parts)
    archive = replace(SMALL, md5={f"{SMALL.names[0]}.gz": "0" * 32})
    with pytest.raises(ValueError, match="is damaged or not the original"):
        read_archive(archive, "mnist", tmp_path)


class Python2(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Writes texts and bytes as Python 2 did, which made the files of CIFAR."""

    dispatch: ClassVar[dict[type, object]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_string(self, value: str | bytes) -> None:
        content = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def python2_pickle(entry: dict[str, object]) -> bytes:
    buffer = io.BytesIO()
    Python2(buffer, protocol=2).dump(entry)
    return buffer.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def cifar(folder: Path) -> tuple[CifarArchive, np.ndarray]:
    pixels = DRAWS.integers(0, 256, (8, 3072), dtype=np.uint8)
    parts = {"batch_1": slice(0, 3), "batch_2": slice(3, 6), "held_out": slice(6, 8)}
    entries: dict[str, dict[str, object]] = {
        name: {"data": pixels[rows], "labels": [*range(8)][rows]} for name, rows in parts.items()
    }
    entries["meta"] = {"label_names": list("abcdefgh")}
    place = folder / "small-py"
    place.mkdir()
    sums = {}
    for name, entry in entries.items():
        content = python2_pickle(entry)
        sums[name] = hashlib.md5(content).hexdigest()
        (place / name).write_bytes(content)
    train = {name: sums[name] for name in ("batch_1", "batch_2")}
    archive = CifarArchive(
        "CIFAR10",
        "small-py",
        "small.tar.gz",
        train,
        {"held_out": sums["held_out"]},
        ("meta", sums["meta"]),
        ("labels", "label_names"),
    )
    return archive, pixels


@pytest.mark.parametrize("packed", [True, False])
def test_cifar_from_its_folder_and_from_its_archive(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, pixels = cifar(tmp_path)
    if packed:
        with tarfile.open(tmp_path / archive.archive, "w:gz") as whole:
            whole.add(tmp_path / archive.folder, archive.folder)
        shutil.rmtree(tmp_path / archive.folder)
    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("an unrestricted pickle"))
    train, test, classes = read_archive(archive, "cifar10", tmp_path)
    assert torch.equal(train.inputs, torch.from_numpy(pixels[:6]).reshape(-1, 3, 32, 32))
    assert test.targets.tolist() == [6, 7]
    assert classes == tuple("abcdefgh")
    assert (tmp_path / archive.folder).exists() != packed


def test_another_pickle_is_not_read(tmp_path: Path) -> None:
    archive, _ = cifar(tmp_path)
    (tmp_path / archive.folder / "batch_2").write_bytes(python2_pickle({"data": 1}))
    with pytest.raises(ValueError, match="batch_2 is damaged or not the original"):
        read_archive(archive, "cifar10", tmp_path)


class Command:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_a_pickle_runs_no_code() -> None:
    with pytest.raises(ValueError, match=r"must not name posix\.system"):
        unpickled(pickle.dumps({"data": Command()}, protocol=2))
    with pytest.raises(ValueError, match="must hold a mapping, got list"):
        unpickled(pickle.dumps([1], protocol=2))


def test_missing_files_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, folder: Path) -> None:
        raise OSError("no network")

    monkeypatch.setattr(IdxArchive, "download", fail)
    monkeypatch.setattr(CifarArchive, "download", fail)
    for name, files in (
        ("mnist", r"MNIST/raw/train-images-idx3-ubyte and 3 more, or these with .gz"),
        ("emnist-digits", "or EMNIST/raw/gzip.zip"),
        ("cifar100", "cifar-100-python.tar.gz or the unpacked folder cifar-100-python"),
    ):
        with pytest.raises(ValueError, match="--data or data_folder") as caught:
            load_dataset(name, tmp_path)
        assert f"{tmp_path} does not hold {name}" in str(caught.value)
        assert files in str(caught.value)


def test_moments_are_those_of_the_pixels() -> None:
    pixels = torch.from_numpy(DRAWS.integers(0, 256, (50, 3, 4, 4), dtype=np.uint8))
    std, mean = pixel_moments(pixels)
    expected = pixels.double() / 255
    assert torch.allclose(mean, expected.mean((0, 2, 3)))
    assert torch.allclose(std, expected.std((0, 2, 3), correction=0))


def test_names_are_those_of_torchvision() -> None:
    from torchvision import datasets

    known = archives(FASHION_CLASSES)
    for name, archive in known.items():
        reader = getattr(datasets, archive.reader)
        if isinstance(archive, CifarArchive):
            assert [[*one] for one in archive.train.items()] == reader.train_list
            assert [[*one] for one in archive.test.items()] == reader.test_list
            assert archive.meta == (reader.meta["filename"], reader.meta["md5"])
            assert (archive.folder, archive.archive) == (reader.base_folder, reader.filename)
        elif isinstance(archive, IdxArchive) and archive.split:
            classes = reader.classes_split_dict[archive.split]
            assert [*archive.classes] == [one for one in classes if one != "N/A"], name
        elif isinstance(archive, IdxArchive):
            assert dict(reader.resources) == archive.md5
            assert [*archive.classes] == reader.classes


def test_the_files_that_are_read_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist", parts=SMALL.parts)
    monkeypatch.setitem(ARCHIVES, "mnist", SMALL)
    ((_, (bundle, _)),) = data_files("mnist", tmp_path)
    assert {*bundle.files} == {f"{SMALL.folder}/{name}" for name in SMALL.names}


SCRIPT = """
import resource, sys, time
from pathlib import Path
from leakfrontier.evaluate.world.scenario import Scenario, load_world
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
world = load_world(Scenario(dataset="mnist", data_folder=Path(sys.argv[1])))
print(len(world.train.targets), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_full_mnist_needs_little_memory() -> None:
    folder = os.environ.get("LEAKFRONTIER_DATA")
    if not folder:
        pytest.skip("LEAKFRONTIER_DATA does not name a folder of datasets")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, check=True
    )
    examples, kilobytes = map(int, done.stdout.split())
    assert examples == 60_000
    assert kilobytes < 350_000  # the training pictures alone would need 184 MB as floats, twice

"""Full datasets in torchvision's layout. Archives are read in place: nothing is unpacked.

So folders may be read-only, and several processes may read them at once. The pictures stay 8-bit.
Unpacked files of MNIST's format are memory-mapped, so processes share their memory.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leakfrontier.defenses import Batch, torchvision_ops  # noqa: F401 (or torchvision may fail)

Pictures = tuple[Batch, Batch, tuple[str, ...]]
"""8-bit training and test pictures with labels, and the names of classes."""


class Archive(Protocol):
    """A full dataset on disk, by torchvision's file names."""

    @property
    def places(self) -> str:
        """Return where its files belong, for messages."""

    def files(self, folder: Path) -> list[Path]:
        """Return the files to read; an empty list if some are missing."""

    def read(self, folder: Path) -> Pictures:
        """Return its content."""

    def download(self, folder: Path) -> None:
        """Download it."""


def located(archive: Archive, name: str, folder: Path) -> Path:
    """Return the folder that holds a dataset: the given one, or one of its name within."""
    inner = folder / name
    return inner if not archive.files(folder) and archive.files(inner) else folder


def read_archive(archive: Archive, name: str, folder: Path) -> Pictures:
    """Return a dataset. Download it if it is missing."""
    place = located(archive, name, folder)
    if not archive.files(place):
        try:
            archive.download(place)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{folder} does not hold {name}, and it cannot be downloaded: {error}\nIf you have "
                f"the files, name their folder with --data or data_folder. It must hold "
                f"{archive.places}"
            ) from error
    return archive.read(place)


@dataclass(frozen=True)
class IdxArchive:
    """Four files in the format of MNIST.

    Attributes:
        reader: The class of torchvision that downloads it.
        folder: The folder of the files.
        parts: How the names of training and test files begin.
        counts: Number of training and of test examples.
        classes: Name of each label.
        split: EMNIST's name of this dataset. EMNIST stores transposed pictures.
        first: The first label.
        md5: Checksums of compressed files, by name.
    """

    reader: str
    folder: str
    parts: tuple[str, str]
    counts: tuple[int, int]
    classes: tuple[str, ...]
    split: str = ""
    first: int = 0
    md5: Mapping[str, str] = field(default_factory=dict)

    KINDS: ClassVar = ("images-idx3-ubyte", "labels-idx1-ubyte")

    @property
    def names(self) -> list[str]:
        """Return the names of the files."""
        return [f"{part}-{kind}" for part in self.parts for kind in self.KINDS]

    @property
    def places(self) -> str:
        """Return where its files belong, for messages."""
        files = f"{self.folder}/{self.names[0]} and {len(self.names) - 1} more, or these with .gz"
        return files + (f", or {self.folder}/gzip.zip" if self.split else "")

    def files(self, folder: Path) -> list[Path]:
        """Return the files to read; an empty list if some are missing."""
        raw = folder / self.folder
        chosen = [_first(raw / name, raw / f"{name}.gz") for name in self.names]
        if all(chosen):
            return [path for path in chosen if path is not None]
        whole = raw / "gzip.zip"
        return [whole] if self.split and whole.is_file() else []

    def read(self, folder: Path) -> Pictures:
        """Return its content."""
        files, parts = self.files(folder), []
        for number, count in enumerate(self.counts):
            names = self.names[2 * number : 2 * number + 2]
            if files[0].name == "gzip.zip":
                with zipfile.ZipFile(files[0]) as whole:
                    pixels, labels = (
                        parse_idx(gzip.decompress(whole.read(f"gzip/{name}.gz"))) for name in names
                    )
            else:
                pixels, labels = (self._idx(path) for path in files[2 * number : 2 * number + 2])
            for name, values in zip(names, (pixels, labels), strict=True):
                if len(values) != count:
                    raise ValueError(
                        f"{name} in {folder / self.folder} must hold {count} examples, got "
                        f"{len(values)}: the file is not the full dataset. Delete it, or name "
                        "another folder"
                    )
            inputs = torch.from_numpy(pixels).unsqueeze(1)
            targets = torch.from_numpy(np.asarray(labels)).long() - self.first
            parts.append(Batch(inputs.mT if self.split else inputs, targets))
        return parts[0], parts[1], self.classes

    def download(self, folder: Path) -> None:
        """Download it."""
        from torchvision import datasets  # slow to import

        options = {"split": self.split} if self.split else {}
        getattr(datasets, self.reader)(folder, download=True, **options)

    def _idx(self, path: Path) -> NDArray[np.uint8]:
        if path.suffix != ".gz":
            with path.open("rb") as file:
                shape = idx_shape(file.read(16))
            start = 4 + 4 * len(shape)
            if path.stat().st_size != start + int(np.prod(shape)):
                raise ValueError(f"{path} is incomplete: delete it, or name another folder")
            return np.memmap(path, np.uint8, mode="c", offset=start, shape=shape)
        content = path.read_bytes()
        _check_md5(path, content, self.md5.get(path.name))
        return parse_idx(gzip.decompress(content))


@dataclass(frozen=True)
class CifarArchive:
    """The Python version of CIFAR: a folder of pickles, or its archive.

    The pickles are read only if their checksums are known, and without executing any code.

    Attributes:
        reader: The class of torchvision that downloads it.
        folder: The folder of the files, which is also their folder in the archive.
        archive: The name of the archive.
        train: Checksums of the files of training examples, by name.
        test: Checksums of the files of test examples.
        meta: The name and the checksum of the file of class names.
        labels: The keys of labels and of class names.
    """

    reader: str
    folder: str
    archive: str
    train: Mapping[str, str]
    test: Mapping[str, str]
    meta: tuple[str, str]
    labels: tuple[str, str]

    @property
    def places(self) -> str:
        """Return where its files belong, for messages."""
        return f"{self.archive} or the unpacked folder {self.folder}"

    def files(self, folder: Path) -> list[Path]:
        """Return the files to read; an empty list if some are missing."""
        paths = [folder / self.folder / name for name in self._checksums]
        if all(path.is_file() for path in paths):
            return paths
        return [path for path in [folder / self.archive] if path.is_file()]

    def read(self, folder: Path) -> Pictures:
        """Return its content."""
        files, contents = self.files(folder), {}
        if files[0].name == self.archive:
            with tarfile.open(files[0]) as whole:
                for member in whole:
                    name = member.name.removeprefix(f"{self.folder}/")
                    if name in self._checksums and (file := whole.extractfile(member)):
                        contents[name] = file.read()
        else:
            contents = {path.name: path.read_bytes() for path in files}
        for name, md5 in self._checksums.items():
            _check_md5(files[0] if len(files) == 1 else files[0].parent / name, contents[name], md5)
        known = {name: unpickled(content) for name, content in contents.items()}
        train, test = (self._batch([known[name] for name in part]) for part in self._parts)
        return train, test, tuple(known[self.meta[0]][self.labels[1]])

    def download(self, folder: Path) -> None:
        """Download it. The archive is read in place."""
        from torchvision import datasets  # slow to import
        from torchvision.datasets.utils import download_url

        reader = getattr(datasets, self.reader)
        download_url(reader.url, str(folder), self.archive, reader.tgz_md5)

    @property
    def _parts(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        return self.train, self.test

    @property
    def _checksums(self) -> dict[str, str]:
        return {**self.train, **self.test, self.meta[0]: self.meta[1]}

    def _batch(self, entries: list[dict[str, Any]]) -> Batch:
        pixels = np.concatenate([entry["data"] for entry in entries])
        labels = [label for entry in entries for label in entry[self.labels[0]]]
        return Batch(torch.from_numpy(pixels).reshape(-1, 3, 32, 32), torch.tensor(labels))


class _Restricted(pickle.Unpickler):
    """Reads lists, texts and arrays. Any other class is an error."""

    ALLOWED: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as pickle declares it
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise ValueError(f"a dataset must not name {module}.{name}") from None


def unpickled(content: bytes) -> dict[str, Any]:
    """Return a mapping of lists, texts and arrays from a pickle, without executing code."""
    known = _Restricted(io.BytesIO(content), encoding="latin1").load()
    if not isinstance(known, dict):
        raise ValueError(f"a file of CIFAR must hold a mapping, got {type(known).__name__}")
    return known


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """Return the array of a file in the format of MNIST."""
    shape = idx_shape(content[:16])
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy()


def idx_shape(header: bytes) -> tuple[int, ...]:
    """Return the shape of the array of bytes that a file in the format of MNIST begins with."""
    if header[:3] != b"\0\0\x08":
        raise ValueError("the file must be an array of bytes in the format of MNIST")
    return tuple(np.frombuffer(header, ">i4", count=header[3], offset=4).tolist())


def pixel_moments(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the deviation and the mean of each channel of 8-bit pictures, in units of 255.

    They come from the counts of the 256 values, so no picture is converted.
    """
    levels = torch.arange(256, dtype=torch.double) / 255
    counts = torch.zeros(pixels.shape[1], 256, dtype=torch.double)
    for part in pixels.split(1000):
        for channel, counted in enumerate(counts):
            counted += torch.bincount(part[:, channel].flatten(), minlength=256)
    shares = counts / counts.sum(1, keepdim=True)
    mean = shares @ levels
    variance = (shares * (levels - mean[:, None]).square()).sum(1)
    return variance.sqrt(), mean


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _check_md5(path: Path, content: bytes, md5: str | None) -> None:
    if md5 is not None and hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise ValueError(f"{path} is damaged or not the original: delete it, or get it again")


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_MERGED = "".join(sorted({*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"abdefghnqrt", *"0123456789"}))


def _emnist(
    split: str, counts: tuple[int, int], classes: tuple[str, ...], first: int
) -> IdxArchive:
    parts = (f"emnist-{split}-train", f"emnist-{split}-test")
    return IdxArchive("EMNIST", "EMNIST/raw", parts, counts, classes, split, first)


def archives(fashion: tuple[str, ...]) -> dict[str, Archive]:
    """Return every full dataset by name, given the classes of Fashion-MNIST."""
    halves, full = ("train", "t10k"), (60_000, 10_000)
    numbered = tuple(f"{digit} - {word}" for digit, word in enumerate(_DIGITS))
    plain = tuple(str(digit) for digit in range(10))
    return {
        "mnist": IdxArchive("MNIST", "MNIST/raw", halves, full, numbered, md5=_md5s(_MNIST)),
        "emnist-letters": _emnist("letters", (124_800, 20_800), _LETTERS, 1),
        "emnist-digits": _emnist("digits", (240_000, 40_000), plain, 0),
        "emnist-balanced": _emnist("balanced", (112_800, 18_800), tuple(_MERGED), 0),
        "fashion-mnist": IdxArchive(
            "FashionMNIST", "FashionMNIST/raw", halves, full, fashion, md5=_md5s(_FASHION)
        ),
        "cifar10": CifarArchive(
            "CIFAR10",
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            {
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            },
            {"test_batch": "40351d587109b95175f43aff81a1287e"},
            ("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
            ("labels", "label_names"),
        ),
        "cifar100": CifarArchive(
            "CIFAR100",
            "cifar-100-python",
            "cifar-100-python.tar.gz",
            {"train": "16019d7e3df5f24257cddd939b257f8d"},
            {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
            ("meta", "7973b15100ade9c7d40fb424638fde48"),
            ("fine_labels", "fine_label_names"),
        ),
    }


_MNIST = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_FASHION = (
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)


def _md5s(values: tuple[str, ...]) -> dict[str, str]:
    """Return the checksums of MNIST's four compressed files, by name."""
    names = [f"{part}-{kind}.gz" for part in ("train", "t10k") for kind in IdxArchive.KINDS]
    return dict(zip(names, values, strict=True))

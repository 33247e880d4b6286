"""Datasets by name and by path."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from leakfrontier.adversaries import ContinuousSpace, ImageSpace, WaveSpace
from leakfrontier.defenses import Batch

from ..engines.parcels import DOWNLOAD, Bundle, Files
from ..foundations.examples import Examples, from_bytes
from ..foundations.plugins import file_digest
from .archives import archives, located, parse_idx, pixel_moments, read_archive
from .audio import WAVE_SUFFIXES, read_waves
from .dataset import Dataset, split
from .messages import messages
from .text import AS_CHARACTERS, HUB, Reading, Splits, as_dataset, hub_texts, read_splits

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
EXAMPLE_SUFFIXES = IMAGE_SUFFIXES | WAVE_SUFFIXES | {".jsonl"}
DOWNLOADS = Path("~/.cache/leakfrontier")
_BY_PATH = (
    "a folder with one subfolder of images or WAV files per class (or such folders train/ and "
    "test/), or texts with labels: a .jsonl file, or a folder with train.jsonl and test.jsonl"
)


def load_dataset(
    name: str, folder: Path | None = None, reading: Reading = AS_CHARACTERS
) -> Dataset:
    """Return a dataset. A process reads it once, so its tensors must not be modified.

    Args:
        name: One of `DATASETS` or `TEXTS`, a path, or `hub:` and the id of texts on the Hugging
            Face hub (`hub_texts`).
            A folder of images or of WAV files has one subfolder per class, either directly (a
            fifth of each class is held out for testing) or within `train/` and `test/` (or
            `val/`). Grey images have one channel, all others three. For sound see `read_waves`.
            Texts are `.jsonl` files of {"text", "label"}: one file, or a folder with
            `train.jsonl` and `test.jsonl` (or `val.jsonl`).
        folder: Folder of full datasets in torchvision's layout, or of such folders by name.
            Missing ones are downloaded. Default: `~/.cache/leakfrontier`.
        reading: How texts become examples. Default: each character is a token.
    """
    path = Path(name).expanduser()
    if name in DATASETS:
        return _load(name, (folder or DOWNLOADS).expanduser().resolve())
    if name in TEXTS or name.startswith(HUB):
        return _load(name, DOWNLOADS, reading)
    if path.is_dir() or (path.is_file() and path.suffix == ".jsonl"):
        return _load(str(path.resolve()), DOWNLOADS, reading, data_digest(name))
    if path.is_file():
        raise ValueError(f"{path} must be a folder or a .jsonl file")
    if os.sep in name or "/" in name:
        raise ValueError(f"there is no folder or file {path}; texts on the hub are {HUB}{name}")
    known = ", ".join([*DATASETS, *TEXTS])
    raise ValueError(
        f"dataset must be one of {known}, {HUB} and an id of texts on the Hugging Face hub, or the "
        f"path of {_BY_PATH}, got {name!r}"
    )


def is_named(name: str) -> bool:
    """Return whether a dataset is found by its name rather than at a path."""
    return name in DATASETS or name in TEXTS or name.startswith(HUB)


@cache
def data_digest(name: str) -> str:
    """Return a hash of the examples at a path: of their relative names and their bytes.

    The hash is computed once. `forget_digests` clears it. For texts on the hub, it is a hash of the
    texts.
    """
    if name.startswith(HUB):
        return hashlib.sha256(repr(hub_texts(name, "next-token")).encode()).hexdigest()
    path = Path(name).expanduser().resolve()
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():  # loading it reports the error
        return ""
    digest = hashlib.sha256()
    for found in sorted(_examples(str(path)), key=lambda entry: entry.path):
        status = found.stat()
        content = _digest(found.path, status.st_size, status.st_mtime_ns)
        digest.update(f"{found.path.removeprefix(str(path))}\0".encode() + content)
    return digest.hexdigest()


forget_digests = data_digest.cache_clear


def example_files(folder: Path) -> list[Path]:
    """Return the files below a folder that hold examples."""
    return [Path(found.path) for found in _examples(str(folder))] if folder.is_dir() else []


def downloads(name: str, folder: Path) -> list[Path]:
    """Return the files of a full dataset; none for datasets of the package."""
    return ARCHIVES[name].files(folder) if name in ARCHIVES else []


def _examples(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _examples(entry.path)
            elif os.path.splitext(entry.name)[1].lower() in EXAMPLE_SUFFIXES:
                yield entry


@cache
def _digest(path: str, size: int, modified: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).digest()


@lru_cache(maxsize=4)
def _load(name: str, folder: Path, reading: Reading = AS_CHARACTERS, content: str = "") -> Dataset:
    if name in DATASETS:
        return DATASETS[name](folder)
    if name in TEXTS:
        return as_dataset(name, TEXTS[name](), reading)
    if name.startswith(HUB):
        return as_dataset(name, hub_texts(name, reading.task), reading)
    path = Path(name)
    if path.is_file() or (path / "train.jsonl").is_file():
        return as_dataset(name, read_splits(path, reading.task), reading)
    return _class_folders(path)


def _fashion_mini(folder: Path) -> Dataset:
    source = Path(__file__).parent / "fashion_mini"
    train, test = (
        Batch(
            _to_pixels(_unpacked(source / f"{split}-images-idx3-ubyte.gz")[..., None]),
            torch.from_numpy(_unpacked(source / f"{split}-labels-idx1-ubyte.gz")).long(),
        )
        for split in ("train", "t10k")
    )
    return _measured("fashion-mini", train, test, FASHION_CLASSES)


def _digits(folder: Path) -> Dataset:
    from sklearn.datasets import load_digits  # slow to import

    digits = load_digits()
    inputs = torch.from_numpy(digits.images / 16).float().unsqueeze(1)
    targets = torch.from_numpy(digits.target).long()
    classes = tuple(str(digit) for digit in digits.target_names)
    return _measured("digits", *split(Batch(inputs, targets)), classes)


def _full(name: str, folder: Path) -> Dataset:
    """Return a full dataset. Its pictures stay 8-bit until they are used."""
    train, test, classes = read_archive(ARCHIVES[name], name, folder)
    std, mean = pixel_moments(train.inputs)
    shape = tuple(train.inputs.shape[1:])
    space = ImageSpace(shape, len(classes), tuple(mean.tolist()), tuple(std.tolist()))
    compact, held_out = (Examples(*part, (from_bytes,)) for part in (train, test))
    return Dataset(name, compact, held_out, classes, space)


ARCHIVES = archives(FASHION_CLASSES)
"""Full datasets of torchvision, by name."""

DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "fashion-mini": _fashion_mini,
    "digits": _digits,
    **{name: partial(_full, name) for name in ARCHIVES},
}
"""Every dataset by name, given the folder of downloads. To add a dataset, add a line here."""

TEXTS: dict[str, Callable[[], Splits]] = {"messages": messages}
"""Texts by name."""


def _class_folders(folder: Path) -> Dataset:
    train, test = folder / "train", _held_out(folder)
    parts = [train, test] if test is not None and train.is_dir() else [folder]
    classes = _class_names(parts[0])
    files = [_labelled_files(part, classes) for part in parts]
    paths = [path for part in files for path, _ in part]
    inputs, space, notes = _read_media(folder, paths)
    everything = Batch(inputs, torch.tensor([label for part in files for _, label in part]))
    cut = len(files[0])
    if len(parts) == 1:
        splits = split(everything)
    else:  # read both together, because their sizes must agree
        splits = everything.at(slice(cut)), everything.at(slice(cut, None))
    return replace(_measured(str(folder), *splits, classes, space), notes=notes)


def _read_media(
    folder: Path, paths: Sequence[Path]
) -> tuple[Tensor, Callable[..., ContinuousSpace], tuple[str, ...]]:
    """Return images or sounds, their input space, and warnings."""
    is_sound = {path.suffix.lower() in WAVE_SUFFIXES: path for path in paths}
    if len(is_sound) == 2:
        both = f"{is_sound[False]} and {is_sound[True]}"
        raise ValueError(f"{folder} must hold images or sounds, got both: {both}")
    if False in is_sound:
        images = [_read_image(path) for path in paths]
        return _same_size(paths, images), ImageSpace, _mixed(folder, images)
    inputs, rate = read_waves(paths)
    return inputs, partial(WaveSpace, rate=rate), ()


def _held_out(folder: Path) -> Path | None:
    """Return the folder of test examples within a folder; None if there is none."""
    found = (folder / name for name in ("test", "val"))
    return next((path for path in found if path.exists()), None)


def _class_names(folder: Path) -> tuple[str, ...]:
    names = (path.name for path in folder.iterdir() if path.is_dir())
    classes = tuple(sorted(name for name in names if not name.startswith(".")))
    if not classes:
        raise ValueError(f"{folder} has no classes; it must be {_BY_PATH}")
    return classes


def _labelled_files(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    unknown = set(_class_names(folder)) - set(classes)
    if unknown:
        raise ValueError(f"{folder} has classes without training data: {', '.join(unknown)}")
    files = []
    for label, name in enumerate(classes):
        found = [
            path
            for path in (folder / name).glob("*")
            if path.suffix.lower() in IMAGE_SUFFIXES | WAVE_SUFFIXES
        ]
        if not found:
            raise ValueError(
                f"the class folder {folder / name} holds no images or WAV files; a dataset must "
                f"be {_BY_PATH}"
            )
        files += [(path, label) for path in sorted(found)]
    return files


def _mixed(folder: Path, images: Sequence[NDArray[np.uint8]]) -> tuple[str, ...]:
    """Return a warning if some images are grey and others are not."""
    grey = sum(image.shape[2] == 1 for image in images)
    if grey in (0, len(images)):
        return ()
    return (
        f"{folder.name}: {grey} of {len(images)} images are grey, the others are coloured. The "
        "grey ones are read with three equal channels, so models and attacks can recognise them: "
        "convert all images to one kind unless you want this",
    )


def _same_size(paths: Sequence[Path], images: Sequence[NDArray[np.uint8]]) -> Tensor:
    for path, image in zip(paths, images, strict=True):
        if image.shape[:2] != images[0].shape[:2]:
            raise ValueError(
                f"all images must have one size, got {_size(images[0])} ({paths[0]}) and "
                f"{_size(image)} ({path}); resize them first"
            )
    channels = max(image.shape[2] for image in images)  # grey images among coloured ones get three
    pixels = np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in images])
    return _to_pixels(pixels)


def _read_image(path: Path) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # PIL would clip their values
                raise ValueError(f"{path} has more than 8 bits per channel; convert it first")
            return np.atleast_3d(np.asarray(image if image.mode == "L" else image.convert("RGB")))
    except OSError as error:
        raise ValueError(f"cannot read the image {path}: {error}") from error


def _size(image: NDArray[np.uint8]) -> str:
    height, width, _ = image.shape
    return f"{width}x{height}"


def _unpacked(path: Path) -> NDArray[np.uint8]:
    return parse_idx(gzip.decompress(path.read_bytes()))


def _to_pixels(images: NDArray[np.uint8]) -> Tensor:
    """Return images of shape (n, height, width, channels) as (n, channels, height, width)."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float().div_(255)


def _measured(
    name: str,
    train: Batch,
    test: Batch,
    classes: tuple[str, ...],
    space: Callable[..., ContinuousSpace] = ImageSpace,
) -> Dataset:
    """Return a dataset, normalised by the mean and deviation of its training examples."""
    axes = [axis for axis in range(train.inputs.dim()) if axis != 1]
    std, mean = torch.std_mean(train.inputs, dim=axes, correction=0)
    std = torch.where(std > 0, std, 1.0)  # a constant channel is only centred
    shape = tuple(train.inputs.shape[1:])
    known = space(shape, len(classes), tuple(mean.tolist()), tuple(std.tolist()))
    return Dataset(name, train, test, classes, known)


def data_files(dataset: str, folder: Path | None) -> Files:
    """Yield data by path or downloaded data. Data of the package need not travel."""
    if dataset not in DATASETS:
        path = Path(dataset).expanduser()
        if path.exists():
            yield dataset, (bundle_of(dataset, path.resolve().name), path.resolve().name)
        return
    place = (folder or DOWNLOADS).expanduser()
    if dataset in ARCHIVES:
        place = located(ARCHIVES[dataset], dataset, place)
    if files := {str(path.relative_to(place)): path for path in downloads(dataset, place)}:
        yield DOWNLOAD + dataset, (Bundle(f"download-{dataset}", files), "")


def bundle_of(dataset: str, name: str) -> Bundle:
    """Return the examples at a path, in a folder with the given name."""
    path = Path(dataset).expanduser().resolve()
    files = {f"{name}/{one.relative_to(path)}": one for one in example_files(path)}
    return Bundle(f"data-{data_digest(dataset)}", files if path.is_dir() else {name: path})

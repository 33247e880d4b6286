import os
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from leakfrontier.adversaries import WaveSpace
from leakfrontier.evaluate.data.audio import read_waves
from leakfrontier.evaluate.data.data import load_dataset
from leakfrontier.evaluate.modality.modality import Waves

RATE = 8000


@pytest.fixture(scope="module")
def sounds_folder() -> Path:
    folder = os.environ.get("LEAKFRONTIER_DATA")
    if not folder:
        pytest.skip("LEAKFRONTIER_DATA does not name a folder of datasets")
    return Path(folder) / "audio"


def write(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, rate, samples)
    return path


def write_class(folder: Path, count: int = 5, length: int = 30) -> None:
    draws = np.random.default_rng(list(folder.name.encode()))
    for index in range(count):
        write(folder / f"{index}.wav", draws.integers(-(2**15), 2**15, length, dtype=np.int16))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([-(2**15), 0, 1, 2**15 - 1], np.int16), [0, 0.5, 0.5 + 2**-16, 1 - 2**-16]),
        (np.array([0, 128, 129, 255], np.uint8), [0, 0.5, 0.5 + 2**-8, 1 - 2**-8]),
        (np.array([-(2**31), 0, 2**16, 2**30], np.int32), [0, 0.5, 0.5 + 2**-16, 0.75]),
        (np.array([-1.0, 0.0, 0.25, 1.0], np.float32), [0, 0.5, 0.625, 1]),
        (np.array([-1.0, 0.0, 0.25, 1.0], np.float64), [0, 0.5, 0.625, 1]),
    ],
    ids=["16 bits", "8 bits", "32 bits", "float", "double"],
)
def test_samples_become_values_around_a_half(
    samples: np.ndarray, expected: list[float], tmp_path: Path
) -> None:
    values, rate = read_waves([write(tmp_path / "a.wav", samples)])
    assert rate == RATE
    assert values.dtype == torch.float32
    assert values.tolist() == [[expected]]


def test_24_bits(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(3)
        file.setframerate(RATE)
        samples = (-(2**23), 0, 2**22)
        file.writeframes(b"".join(v.to_bytes(3, "little", signed=True) for v in samples))
    values, _ = read_waves([tmp_path / "a.wav"])
    assert values.flatten().tolist() == [0.0, 0.5, 0.75]


def test_one_length_for_all(tmp_path: Path) -> None:
    lengths = [4] * 8 + [6, 9]
    paths = [
        write(tmp_path / f"{index}.wav", np.arange(1, length + 1, dtype=np.float32) / 16)
        for index, length in enumerate(lengths)
    ]
    values, _ = read_waves(paths)
    amplitudes = (32 * values - 16).squeeze(1)  # in sixteenths
    assert amplitudes[0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 0]
    shorter, _ = read_waves(paths[:9] + paths[:9] + paths[9:])
    assert shorter.shape == (19, 1, 6)
    assert (32 * shorter - 16)[-1].tolist() == [[2, 3, 4, 5, 6, 7]]  # the middle


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.array([0.0, np.nan], np.float32), r"amplitudes of .*bad.wav must lie in \[-1, 1\]"),
        (np.array([0.0, np.inf], np.float32), r"amplitudes of .*bad.wav must lie in \[-1, 1\]"),
        (np.array([0.0, -1.5], np.float32), r"bad.wav must lie in \[-1, 1\], got -1.5 to 0"),
        (np.zeros((5, 2), np.int16), r"bad.wav has 2 channels; mix it down"),
        (np.zeros(0, np.int16), r"bad.wav holds no sound"),
    ],
    ids=["nan", "infinite", "too loud", "stereo", "empty"],
)
def test_unusable_sounds_are_named(samples: np.ndarray, message: str, tmp_path: Path) -> None:
    good = write(tmp_path / "good.wav", np.zeros(5, np.int16))
    bad = write(tmp_path / "bad.wav", samples)
    with pytest.raises(ValueError, match=message):
        read_waves([good, bad])


@pytest.mark.parametrize("kept", [0, 3, 10, 30, 41, 50])
def test_broken_files_are_named(kept: int, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.wav", np.arange(20, dtype=np.int16))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"cannot read the sound .*bad.wav"):
        read_waves([path])


def test_other_files_are_no_sounds(tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_bytes(b"not a sound at all, but long enough to be read")
    with pytest.raises(ValueError, match=r"cannot read the sound .*bad.wav"):
        read_waves([tmp_path / "bad.wav"])


def test_metadata_is_skipped(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = write(tmp_path / "a.wav", np.zeros(4, np.int16))
    content = path.read_bytes() + b"note" + (4).to_bytes(4, "little") + b"text"
    path.write_bytes(content[:4] + (len(content) - 8).to_bytes(4, "little") + content[8:])
    assert read_waves([path])[0].shape == (1, 1, 4)
    assert not recwarn


def test_rates_must_agree(tmp_path: Path) -> None:
    first = write(tmp_path / "a.wav", np.zeros(5, np.int16), rate=8000)
    second = write(tmp_path / "b.wav", np.zeros(5, np.int16), rate=16000)
    with pytest.raises(ValueError, match=r"8000 Hz .*a.wav.* 16000 Hz .*b.wav.*resample"):
        read_waves([first, second])


def test_a_folder_of_sounds_is_a_dataset(tmp_path: Path) -> None:
    write_class(tmp_path / "train" / "no", count=6)
    write_class(tmp_path / "train" / "yes", count=4)
    write_class(tmp_path / "test" / "no", count=2)
    write_class(tmp_path / "test" / "yes", count=1)
    (tmp_path / "cover.png").touch()  # of no class
    dataset = load_dataset(str(tmp_path))
    assert dataset.classes == ("no", "yes")
    assert dataset.train.inputs.shape == (10, 1, 30)
    assert dataset.test.targets.tolist() == [0, 0, 1]
    space = dataset.space
    assert isinstance(space, WaveSpace)
    assert (space.shape, space.classes, space.rate) == ((1, 30), 2, RATE)
    values = dataset.train.inputs.double().numpy()
    assert space.mean == pytest.approx([values.mean()], rel=1e-5)
    assert space.std == pytest.approx([values.std()], rel=1e-5)
    train, _ = dataset.normalised
    assert train.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert isinstance(dataset.modality, Waves)


def test_a_folder_without_a_split(tmp_path: Path) -> None:
    write_class(tmp_path / "no", count=10)
    write_class(tmp_path / "yes", count=5)
    dataset = load_dataset(str(tmp_path))
    assert dataset.train.targets.bincount().tolist() == [8, 4]
    assert dataset.test.targets.bincount().tolist() == [2, 1]


def test_images_among_sounds_are_refused(tmp_path: Path) -> None:
    write_class(tmp_path / "no")
    (tmp_path / "no" / "spectrum.png").touch()
    with pytest.raises(ValueError, match=r"images or sounds, got both: .*spectrum.png and .*wav"):
        load_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "examples", "rate"), [("fsdd", (120, 60), 8000), ("audiomnist", (80, 20), 16_000)]
)
def test_spoken_digits(
    name: str, examples: tuple[int, int], rate: int, sounds_folder: Path
) -> None:
    dataset = load_dataset(str(sounds_folder / name))
    assert (len(dataset.train.targets), len(dataset.test.targets)) == examples
    assert dataset.classes == tuple("0123456789")
    space = dataset.space
    assert isinstance(space, WaveSpace)
    assert space.rate == rate
    assert 0.3 < space.shape[1] / rate < 1  # seconds
    first = min((sounds_folder / name / "train" / "0").iterdir())
    _, samples = wavfile.read(first)
    found = (dataset.train.inputs[0, 0] * 2**16 - 2**15).numpy()
    kept = min(len(samples), len(found))
    start = (len(samples) - kept) // 2
    assert np.array_equal(found[:kept], samples[start : start + kept])
    assert not found[kept:].any()

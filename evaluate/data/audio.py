"""Sound from WAV files."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.io import wavfile
from torch import Tensor

WAVE_SUFFIXES = {".wav", ".wave"}
LENGTH_PERCENTILE = 90
"""The length of an example is this quantile of the lengths of all sounds."""


def read_waves(paths: Sequence[Path]) -> tuple[Tensor, int]:
    """Return sounds of shape (n, 1, samples) and their rate. 0 and 1 are the amplitudes -1 and 1.

    All sounds get one length, the 90th percentile of their lengths. Shorter sounds end in silence.
    Of longer sounds, the middle is kept. Files hold integers of any width or floats in [-1, 1], in
    one channel, and all have one rate. Nothing is mixed or resampled, so attacks see exactly what
    the files hold.

    Raises:
        ValueError: If a file cannot be used. The message names it.
    """
    waves, rates = zip(*(_read(path) for path in paths), strict=True)
    for path, rate in zip(paths, rates, strict=True):
        if rate != rates[0]:
            raise ValueError(
                f"all sounds must have one rate, got {rates[0]} Hz ({paths[0]}) and {rate} Hz "
                f"({path}); resample them first, e.g. ffmpeg -i in.wav -ar {rates[0]} out.wav"
            )
    lengths = [len(wave) for wave in waves]
    length = int(np.percentile(lengths, LENGTH_PERCENTILE, method="higher"))
    values = np.stack([_fitted(wave, length) for wave in waves])
    return torch.from_numpy(values).float().unsqueeze(1), rates[0]


def _read(path: Path) -> tuple[NDArray[np.float64], int]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # about metadata
            warnings.filterwarnings("error", "Reached EOF", wavfile.WavFileWarning)
            rate, samples = wavfile.read(path)
    except (OSError, ValueError, struct.error, wavfile.WavFileWarning) as error:
        raise ValueError(f"cannot read the sound {path}: {error}") from error
    if samples.ndim != 1:
        raise ValueError(
            f"{path} has {samples.shape[1]} channels; mix it down first, e.g. "
            "ffmpeg -i in.wav -ac 1 out.wav"
        )
    if not len(samples):
        raise ValueError(f"{path} holds no sound")
    return _to_unit(path, samples), rate


def _to_unit(path: Path, samples: NDArray[Any]) -> NDArray[np.float64]:
    """Return amplitudes on the scale where 0, 1/2 and 1 stand for -1, silence and 1."""
    values: NDArray[np.float64] = samples.astype(np.float64)
    if np.issubdtype(samples.dtype, np.integer):
        limits = np.iinfo(samples.dtype)  # scipy widens 24 bits to 32, in the upper bits
        return (values - limits.min) / 2.0**limits.bits
    if not np.abs(values).max() <= 1:  # also true for NaN
        raise ValueError(
            f"the amplitudes of {path} must lie in [-1, 1], got {values.min()} to {values.max()}"
        )
    return (values + 1) / 2


def _fitted(wave: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    start = max(0, len(wave) - length) // 2
    kept = wave[start : start + length]
    return np.pad(kept, (0, length - len(kept)), constant_values=0.5)

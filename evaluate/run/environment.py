"""The environment of a run: versions, code and machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..engines.engine import cores
from ..foundations.plugins import package_digest
from ..foundations.seeds import SEED_BITS

PACKAGES = (
    *("leakfrontier", "torch", "torchvision", "opacus", "numpy", "scipy", "pandas"),
    *("dp-accounting", "geoopt", "pillow", "rouge-score", "scikit-learn", "transformers"),
)
"""The packages on which rows depend."""


def environment() -> dict[str, Any]:
    """Return the versions, code and machine on which rows depend, besides their configuration."""
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "code": package_digest(),
        "seed_bits": SEED_BITS,
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "processor": _processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cores": cores(),
        },
    }


def versions(*more: str) -> dict[str, str]:
    """Return the installed versions of `PACKAGES` and of additional packages."""
    found = {}
    for name in (*PACKAGES, *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

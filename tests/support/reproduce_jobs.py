"""Trials for the tests of tables: workers import them by name."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Generator

from leakfrontier.evaluate.data.data import Dataset
from leakfrontier.evaluate.papers.table import PaperSetting, Scores


def draw(problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator) -> Scores:
    """Return what is drawn, shifted by what the method and the problem say."""
    drawn = torch.rand(problem["size"], generator=rng, dtype=torch.float64)
    if method.get("fails") and drawn[0] < 0.5:
        raise ValueError("drew too little")
    return {
        "value": (drawn + method.get("shift", 0)).tolist(),
        "success": [float(drawn[0] > 0.5)],
        "seconds": [float(len(data.classes))],
    }


def exact(problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator) -> Scores:
    """Return scores that are as long as they get in print."""
    drawn = torch.rand((), generator=rng).item()
    names = ("accuracy", "recovered", "broken", "alone", "expected", "Eq. 16", "exact", "unique")
    texts = ("rouge1", "rouge2", "rougeL")
    shares = {name: [1.0] for name in (*names, *texts, "20 dB", "30 dB", "60 dB")}
    small = {name: [drawn] for name in ("L_sim", "ratio", "cos w_0", "max cos")}
    psnr = 159.5 if "b" in problem else 29.5  # only exact attacks reach the former
    costs = {"time": [2434.5 + drawn], "memory": [29.9 + drawn], "GiB": [29.9 + drawn]}
    levels = {name: [psnr + drawn] for name in ("psnr", "median", "original")}
    levels["psnr255"] = [229.5 + drawn]
    return {**shares, **small, **costs, **levels, "noise": [-11.1], "seconds": [123.4]}


def wait(problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator) -> Scores:
    """Leave a file named after the process, and work for long."""
    (Path(os.environ["STARTED"]) / f"{os.getpid()}.pid").touch()
    time.sleep(60)
    return draw(problem, method, data, rng)


def mark(problem: PaperSetting, method: PaperSetting, data: Dataset, rng: Generator) -> Scores:
    """Leave a line in a file, and take a moment."""
    with (Path(os.environ["STARTED"]) / "marks").open("a") as file:
        file.write("done\n")
    time.sleep(0.3)
    return draw(problem, method, data, rng)

"""Helpers that read logs of uploads."""

from __future__ import annotations

from leakfrontier.evaluate.run.upload_log import Logged, UploadLog


def every(log: UploadLog, number: int) -> list[Logged]:
    """Return an attacked upload and the ones before it, newest first."""
    return [log.upload(number, age) for age in range(log.uploads(number))]

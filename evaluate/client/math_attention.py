"""Attention in elementary steps, because PyTorch's fused kernels have no second derivative.

Attacks differentiate a client's gradient. So a client computes attention by matrix products and a
softmax, for every module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_LOCK = threading.Lock()
_SWITCHED = ExitStack()  # the switches belong to the process, not to a thread
_inside = 0


@contextmanager
def math_attention() -> Iterator[None]:
    """Switch fused attention off. Leaving the last block restores the earlier setting."""
    global _inside
    with _LOCK:
        if not _inside:
            _SWITCHED.enter_context(sdpa_kernel(SDPBackend.MATH))
            _SWITCHED.enter_context(_without_fast_path())
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _SWITCHED.close()


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Make `nn.TransformerEncoderLayer` run its own code in evaluation mode too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

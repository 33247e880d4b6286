"""Attention in elementary steps: PyTorch's fused kernels have no second derivative.

Attacks differentiate a client's gradient, so that a client computes attention by matrix products
and a softmax, whatever module asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_LOCK = threading.Lock()
_SWITCHED = ExitStack()  # the switches are those of the process, not of a thread
_inside = 0


@contextmanager
def math_attention() -> Iterator[None]:
    """Switch fused attention off; what was set before returns when the last block is left."""
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
    """Let `nn.TransformerEncoderLayer` run its own code in evaluation, too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)

"""Client-side defenses, one published method per module."""

from .base import Batch, Chain, Defense, Guarantee, Loss, Plan, Update, batch_gradient

__all__ = [
    "Batch",
    "Chain",
    "Defense",
    "Guarantee",
    "Loss",
    "Plan",
    "Update",
    "batch_gradient",
]

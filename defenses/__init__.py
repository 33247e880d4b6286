"""Client-side defenses, one published method per module."""

from .base import Batch, Chain, Defense, Guarantee, Loss, Plan, Update, batch_gradient
from .dpsgd import DPSGD
from .topk import TopK

DEFENSES: dict[str, type[Defense]] = {"none": Defense, "DPSGD": DPSGD, "TopK": TopK}
"""Every defense by name. Add a line here to add a defense; `none` defends nothing."""

__all__ = [
    "DEFENSES",
    "DPSGD",
    "Batch",
    "Chain",
    "Defense",
    "Guarantee",
    "Loss",
    "Plan",
    "TopK",
    "Update",
    "batch_gradient",
]

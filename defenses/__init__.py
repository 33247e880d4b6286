"""Client-side defenses, one published method per module."""

from .ats import ATS
from .base import (
    ADJACENCIES,
    Batch,
    Chain,
    Defense,
    Guarantee,
    Loss,
    Plan,
    Refused,
    Update,
    batch_gradient,
    overrides,
    trainable,
)
from .client_dp import ClientDP
from .disaggregation_snr import DisaggregationSNR
from .dpsgd import DPSGD
from .dual_pruning import DualPruning
from .eda import EDA
from .mixup import Mixup
from .noise import Noise
from .outpost import Outpost
from .precode import PRECODE
from .quantization import Quantization
from .randomk import RandomK
from .secagg.secure_aggregation import SecureAggregation
from .signsgd import SignSGD
from .soteria import Soteria
from .summing import Summing, summing_of
from .topk import TopK
from .weight_inspection import WeightInspection

DEFENSES: dict[str, type[Defense]] = {
    "none": Defense,
    **{
        cls.__name__: cls
        for cls in (
            DPSGD,
            ClientDP,
            Noise,
            Quantization,
            SignSGD,
            TopK,
            RandomK,
            DualPruning,
            ATS,
            Mixup,
            EDA,
            SecureAggregation,
            Soteria,
            PRECODE,
            Outpost,
            WeightInspection,
            DisaggregationSNR,
        )
    },
}
"""Every defense by name. To add a defense, add a line here. `none` is the undefended client."""

__all__ = [
    "ADJACENCIES",
    "ATS",
    "DEFENSES",
    "DPSGD",
    "EDA",
    "PRECODE",
    "Batch",
    "Chain",
    "ClientDP",
    "Defense",
    "DisaggregationSNR",
    "DualPruning",
    "Guarantee",
    "Loss",
    "Mixup",
    "Noise",
    "Outpost",
    "Plan",
    "Quantization",
    "RandomK",
    "Refused",
    "SecureAggregation",
    "SignSGD",
    "Soteria",
    "Summing",
    "TopK",
    "Update",
    "WeightInspection",
    "batch_gradient",
    "overrides",
    "summing_of",
    "trainable",
]

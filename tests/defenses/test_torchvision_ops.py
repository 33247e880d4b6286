import runpy

import torch

from leakfrontier.defenses import torchvision_ops


def test_operators_of_torchvision_are_defined_only_if_missing() -> None:
    assert hasattr(torch.ops.torchvision, "nms")
    runpy.run_path(torchvision_ops.__file__)  # to define an operator twice is an error
    assert hasattr(torch.ops.torchvision, "nms")

"""Make torchvision importable if its compiled operators do not load."""

from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch


def _load_compiled() -> None:
    package = find_spec("torchvision")
    compiled = package and PathFinder.find_spec("_C", package.submodule_search_locations)
    if compiled and compiled.origin:
        try:
            torch.ops.load_library(compiled.origin)
        except OSError:
            return  # built for a different torch, such as one with CUDA


# Importing torchvision registers fake versions of its operators, which fails if the operators do
# not exist. Try to load torchvision's own library first, because defining an operator twice is an
# error too.
_load_compiled()
_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

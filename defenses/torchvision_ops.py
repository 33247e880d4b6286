"""Lets torchvision be imported where its compiled operators do not load."""

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
            return  # built for another torch, such as one with CUDA


# Importing torchvision declares what its operators do without data, and fails unless they exist.
# They are defined here only once its own library has had its turn: an operator defined twice is
# an error as well.
_load_compiled()
_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""Convolutional networks for attacks that perceptrons have no place for."""

from torch import nn

from leakfrontier.adversaries import InputSpace


def invertible(space: InputSpace) -> nn.Module:
    """Return a network whose layers can be inverted one after the other."""
    channels, height, width = space.shape
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(4 * height * width, space.classes),
    )


def encoding(space: InputSpace) -> nn.Module:
    """Return a network whose convolutions can hold an encoder, and its next layer bins."""
    channels, height, width = space.shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * height * width, 32),
        nn.ReLU(),
        nn.Linear(32, space.classes),
    )

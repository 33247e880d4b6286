"""Networks of papers whose tables we reproduce, as their released code builds them.

Any scenario can use them, e.g. `leakfrontier.evaluate.models.networks:sme_vit`. BatchNorm is in
evaluation mode with its initial statistics, because these papers attack untrained networks.

References:
    SME: Zhu, Yao, Blaschko. "Surrogate Model Extension (SME): A Fast and Accurate Weight Update
    Attack on Federated Learning." ICML 2023, appendices D and G. https://arxiv.org/abs/2306.00127
    ARES: Gong et al. "ARES: Scalable and Practical Gradient Inversion Attack in Federated Learning
    through Activation Recovery." IEEE S&P 2026.
    Scale-MIA: Shi, Kotevska, Reshniak, Amini, Chakraborty, Lou, Hou. "Scale-MIA: A Scalable Model
    Inversion Attack against Secure Federated Learning via Latent Space Reconstruction." NDSS 2025.
    https://arxiv.org/abs/2311.05808
    IG: Geiping, Bauermeister, Droege, Moeller. "Inverting Gradients: How easy is it to break
    privacy in federated learning?" NeurIPS 2020. https://arxiv.org/abs/2003.14053
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from leakfrontier.adversaries import InputSpace


def sme_cnn(space: InputSpace) -> nn.Module:
    """SME: return two convolutions and two linear layers; twice as wide for coloured images."""
    channels, height, width = space.shape
    features, hidden = (32, 100) if channels == 1 else (64, 200)
    return nn.Sequential(
        nn.Conv2d(channels, features, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(features, 2 * features, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * features * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, space.classes),
    )


def sme_mlp(space: InputSpace) -> nn.Module:
    """SME: return a perceptron with two hidden layers, and a ReLU even after the last layer."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise((math.prod(space.shape), 1000, 1000, space.classes)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def sme_lenet(space: InputSpace) -> nn.Module:
    """SME: return a LeNet with tanh. It ends in a softmax, although the loss applies another."""
    return nn.Sequential(
        nn.Conv2d(space.shape[0], 6, 5),
        nn.Tanh(),
        nn.AvgPool2d(2, padding=1),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.AvgPool2d(2, padding=1),
        nn.Flatten(),
        nn.LazyLinear(120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, space.classes),
        nn.Softmax(dim=1),
    )


def sme_resnet8(space: InputSpace) -> nn.Module:
    """SME: return three residual blocks and two linear layers without an activation between."""
    return nn.Sequential(
        nn.Conv2d(space.shape[0], 32, 3, padding=1, bias=False),
        _FrozenBatchNorm(32),
        nn.ReLU(),
        _ResidualBlock(32, 32, stride=1),
        _ResidualBlock(32, 64, stride=2),
        _ResidualBlock(64, 128, stride=2),
        nn.AvgPool2d(2, padding=1),
        nn.Flatten(),
        nn.LazyLinear(1000),
        nn.Linear(1000, space.classes),
    )


def sme_vit(space: InputSpace) -> nn.Module:
    """SME: return a transformer of four blocks with a class token; its one patch is the image."""
    return _VisionTransformer(math.prod(space.shape), space.classes)


def ares_summed(space: InputSpace, clients: int = 10) -> nn.Module:
    """ARES: return a convolution with three kernels per client, followed by the end of a CNN.

    The paper names the three kernels, but no network.
    """
    channels, height, width = space.shape
    return nn.Sequential(
        nn.Conv2d(channels, 3 * clients, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * clients * height * width, 1024),
        nn.ReLU(),
        nn.Linear(1024, space.classes),
    )


def ares_audio(space: InputSpace) -> nn.Module:
    """ARES: return a convolution over time and a wide layer. The paper names no network."""
    channels, samples = space.shape
    return nn.Sequential(
        nn.Conv1d(channels, 12, 9, padding=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * samples, 1024),
        nn.ReLU(),
        nn.Linear(1024, space.classes),
    )


def scale_mia(space: InputSpace) -> nn.Module:
    """Scale-MIA: return three strided convolutions and three linear layers."""
    layers: list[nn.Module] = []
    sizes = pairwise((space.shape[0], 12, 32, 64))
    for (inputs, outputs), kernel in zip(sizes, (4, 3, 4), strict=True):
        layers += [nn.Conv2d(inputs, outputs, kernel, stride=2, padding=1), nn.ReLU()]
    layers += [nn.Flatten(), nn.LazyLinear(1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, space.classes))


def ig_convnet(space: InputSpace, width: int = 64) -> nn.Module:
    """IG: return eight convolutions with normalisation and a linear layer."""
    layers: list[nn.Module] = []
    channels = space.shape[0]
    for factor in (1, 2, 2, 4, 4, 4, 0, 4, 4, 0):
        if factor:
            layers += [nn.Conv2d(channels, factor * width, 3, padding=1)]
            layers += [_FrozenBatchNorm(factor * width), nn.ReLU()]
            channels = factor * width
        else:
            layers += [nn.MaxPool2d(3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(space.classes))


def ig_resnet20(space: InputSpace, width: int = 64) -> nn.Module:
    """IG: return ResNet20-4, three stages of three residual blocks and a linear layer."""
    layers: list[nn.Module] = [
        nn.Conv2d(space.shape[0], width, 3, padding=1, bias=False),
        _FrozenBatchNorm(width),
        nn.ReLU(),
    ]
    channels = width
    for stage in range(3):
        for block in range(3):
            stride = 2 if stage and not block else 1
            layers += [_ResidualBlock(channels, width << stage, stride)]
            channels = width << stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, space.classes)]
    model = nn.Sequential(*layers, *head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class _FrozenBatchNorm(nn.Module):
    """BatchNorm in evaluation mode with its initial statistics: a scale and a shift."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class _ResidualBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            _FrozenBatchNorm(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            _FrozenBatchNorm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), _FrozenBatchNorm(outputs)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.body(inputs) + self.shortcut(inputs))


class _VisionTransformer(nn.Module):
    def __init__(self, pixels: int, classes: int, width: int = 384) -> None:
        super().__init__()
        self.embedding = nn.Linear(pixels, width)
        self.token = nn.Parameter(torch.zeros(width))
        self.position = nn.Parameter(torch.zeros(2, width))
        self.blocks = nn.Sequential(*(_Block(width, first=block == 0) for block in range(4)))
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 768), nn.GELU(), nn.Linear(768, classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        patch = self.embedding(inputs.flatten(1))
        tokens = torch.stack([self.token.expand_as(patch), patch], dim=1) + self.position
        outputs: Tensor = self.head(self.blocks(tokens)[:, 0])
        return outputs


class _Block(nn.Module):
    """Attention and a perceptron. The first block's attention has no norm and no residual."""

    def __init__(self, width: int, *, first: bool, heads: int = 4) -> None:
        super().__init__()
        self.first, self.heads = first, heads
        self.attention_norm = nn.Identity() if first else nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        attended = self._attend(self.attention_norm(tokens))
        tokens = attended if self.first else tokens + attended
        return tokens + self.perceptron(tokens)  # type: ignore[no-any-return]

    def _attend(self, tokens: Tensor) -> Tensor:
        parts = self.queries_keys_values(tokens).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind()
        weights = (queries @ keys.mT / math.sqrt(queries.shape[-1])).softmax(dim=-1)
        attended: Tensor = self.projection((weights @ values).transpose(1, 2).flatten(2))
        return attended

"""A small vision transformer, as a user would write it."""

VISION_TRANSFORMER = """
from torch import nn
from torch.nn import functional

class VisionTransformer(nn.Module):
    def __init__(self, space, kind, dropout):
        super().__init__()
        channels, height, width = space.shape
        self.cut = nn.Conv2d(channels, 16, kernel_size=4, stride=4)
        self.places = nn.Parameter(0.1 * torch.randn(1, (height // 4) * (width // 4), 16))
        if kind == "layer":
            self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        elif kind == "attention":
            self.body = nn.MultiheadAttention(16, 2, dropout, batch_first=True)
        self.kind, self.head = kind, nn.Linear(16, space.classes)

    def forward(self, images):
        tokens = self.cut(images).flatten(2).mT + self.places
        if self.kind == "layer":
            tokens = self.body(tokens)
        elif self.kind == "attention":
            tokens = tokens + self.body(tokens, tokens, tokens, need_weights=False)[0]
        else:
            heads = tokens.unflatten(2, (2, 8)).transpose(1, 2)
            joined = functional.scaled_dot_product_attention(heads, heads, heads)
            tokens = tokens + joined.transpose(1, 2).flatten(2)
        return self.head(tokens.mean(1))

class InColour(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images.expand(-1, 3, -1, -1))

def build(space, kind="layer", dropout=0.0):
    if kind == "torchvision":
        from torchvision.models import VisionTransformer as Theirs

        sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
        model = Theirs(8, 4, **sizes, dropout=dropout, num_classes=space.classes)
        nn.init.normal_(model.heads.head.weight)  # zeros, of which nothing leaks
        return InColour(model)
    return VisionTransformer(space, kind, dropout)
"""

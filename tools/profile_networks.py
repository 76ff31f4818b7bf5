"""Networks that neither torchvision nor transformers has, written from their published tables."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


class Yolo(nn.Module):
    """YOLO v1: 24 convolutions and 2 fully connected layers (Redmon et al. 2016, figure 3)."""

    # (channels, kernel, stride) of a convolution; "pool" is a 2x2 maximum with stride 2.
    TABLE: tuple[tuple[int, int, int] | str, ...] = (
        (64, 7, 2),
        "pool",
        (192, 3, 1),
        "pool",
        *((128, 1, 1), (256, 3, 1), (256, 1, 1), (512, 3, 1)),
        "pool",
        *(((256, 1, 1), (512, 3, 1)) * 4),
        *((512, 1, 1), (1024, 3, 1)),
        "pool",
        *(((512, 1, 1), (1024, 3, 1)) * 2),
        *((1024, 3, 1), (1024, 3, 2), (1024, 3, 1), (1024, 3, 1)),
    )

    def __init__(self) -> None:
        super().__init__()
        body: OrderedDict[str, nn.Module] = OrderedDict()
        channels, convs, pools = 3, 0, 0
        for row in self.TABLE:
            if isinstance(row, str):
                pools += 1
                body[f"pool{pools}"] = nn.MaxPool2d(2, 2)
                continue
            width, kernel, stride = row
            convs += 1
            body[f"conv{convs}"] = nn.Conv2d(channels, width, kernel, stride, kernel // 2)
            channels = width
        self.body = nn.Sequential(body)
        self.fc1 = nn.Linear(7 * 7 * channels, 4096)
        self.fc2 = nn.Linear(4096, 7 * 7 * 30)

    def forward(self, x: Tensor) -> Tensor:
        """448 x 448 images to the 7 x 7 x 30 grid."""
        out: Tensor = self.fc2(self.fc1(self.body(x).flatten(1)))
        return out


class VggCifar(nn.Module):
    """VGG-16 for 32 x 32 images, 25/64 as wide (Simonyan & Zisserman 2014, column D).

    Ripples (section 7.1.2) trains one of 9.23 MB on CIFAR-10 and does not say which. The usual ones
    have 37 to 60 MB; 13 convolutions of this width and two hidden layers of 161 have 9.23 MB.
    """

    WIDTHS = (25, 25, 0, 50, 50, 0, 100, 100, 100, 0, 200, 200, 200, 0, 200, 200, 200, 0)
    HIDDEN = 161

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        body: OrderedDict[str, nn.Module] = OrderedDict()
        channels, block, conv = 3, 1, 0
        for width in self.WIDTHS:
            if not width:
                body[f"pool{block}"] = nn.MaxPool2d(2, 2)
                block, conv = block + 1, 0
                continue
            conv += 1
            body[f"conv{block}_{conv}"] = nn.Conv2d(channels, width, 3, 1, 1)
            channels = width
        self.body = nn.Sequential(body)
        self.fc1 = nn.Linear(channels, self.HIDDEN)
        self.fc2 = nn.Linear(self.HIDDEN, self.HIDDEN)
        self.fc3 = nn.Linear(self.HIDDEN, classes)

    def forward(self, x: Tensor) -> Tensor:
        """32 x 32 images to the classes' scores."""
        out: Tensor = self.fc3(self.fc2(self.fc1(self.body(x).flatten(1))))
        return out


class VggCifarNorm(nn.Module):
    """VGG-16 for 32 x 32 images with batch normalisation and a single linear layer.

    The usual one for CIFAR-10. OMGS-SGD (table V) counts its 54 tensors: two of each convolution,
    of each normalisation and of the linear layer.
    """

    WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        body: OrderedDict[str, nn.Module] = OrderedDict()
        channels, block, conv = 3, 1, 0
        for width in self.WIDTHS:
            if not width:
                body[f"pool{block}"] = nn.MaxPool2d(2, 2)
                block, conv = block + 1, 0
                continue
            conv += 1
            body[f"conv{block}_{conv}"] = nn.Conv2d(channels, width, 3, 1, 1)
            body[f"norm{block}_{conv}"] = nn.BatchNorm2d(width)
            channels = width
        self.body = nn.Sequential(body)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """32 x 32 images to the classes' scores."""
        out: Tensor = self.fc(self.body(x).flatten(1))
        return out


class LstmPtb(nn.Module):
    """The "large" LSTM of Zaremba et al. 2014: 2 layers of 1500 units, 10000 words, untied.

    Two one-layer modules, so that each layer's gradients are ready on their own.
    """

    def __init__(self, words: int = 10_000, hidden: int = 1_500) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, hidden)
        self.lstm1 = nn.LSTM(hidden, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Words' scores for (batch, steps) tokens."""
        state, _ = self.lstm1(self.encoder(tokens))
        state, _ = self.lstm2(state)
        out: Tensor = self.decoder(state)
        return out


def conv_bn(
    channels: int, width: int, kernel: int | tuple[int, int], stride: int = 1, valid: bool = False
) -> nn.Sequential:
    """A convolution without bias and its BatchNorm, keeping the size unless ``valid``."""
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (0, 0) if valid else (size[0] // 2, size[1] // 2)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv"] = nn.Conv2d(channels, width, size, stride, padding, bias=False)
    layers["bn"] = nn.BatchNorm2d(width)
    return nn.Sequential(layers)


Row = tuple[int, int | tuple[int, int]] | tuple[int, int | tuple[int, int], int, bool]


def chain(channels: int, *rows: Row) -> nn.Sequential:
    """``conv_bn`` after ``conv_bn``; a row is (width, kernel[, stride, valid])."""
    layers = []
    for row in rows:
        layers.append(conv_bn(channels, *row))
        channels = row[0]
    return nn.Sequential(*layers)


class Branches(nn.Module):
    """Several paths over the same input, side by side in the channels."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate what the paths make of ``x``."""
        return torch.cat([path(x) for path in self.paths], dim=1)


def pooled(channels: int, width: int) -> nn.Sequential:
    """Average pooling and a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_bn(channels, width, 1))


def inception_a() -> Branches:
    """35 x 35 block (Szegedy et al. 2016, figure 4)."""
    return Branches(
        chain(384, (96, 1)),
        chain(384, (64, 1), (96, 3)),
        chain(384, (64, 1), (96, 3), (96, 3)),
        pooled(384, 96),
    )


def inception_b() -> Branches:
    """17 x 17 block (figure 5)."""
    tall, wide = (7, 1), (1, 7)
    return Branches(
        chain(1024, (384, 1)),
        chain(1024, (192, 1), (224, wide), (256, tall)),
        chain(1024, (192, 1), (192, tall), (224, wide), (224, tall), (256, wide)),
        pooled(1024, 128),
    )


def inception_c() -> Branches:
    """8 x 8 block (figure 6)."""
    tall, wide = (3, 1), (1, 3)
    return Branches(
        chain(1536, (256, 1)),
        nn.Sequential(
            chain(1536, (384, 1)), Branches(chain(384, (256, wide)), chain(384, (256, tall)))
        ),
        nn.Sequential(
            chain(1536, (384, 1), (448, tall), (512, wide)),
            Branches(chain(512, (256, wide)), chain(512, (256, tall))),
        ),
        pooled(1536, 256),
    )


def stem() -> nn.Sequential:
    """299 x 299 x 3 to 35 x 35 x 384 (figure 3)."""
    return nn.Sequential(
        chain(3, (32, 3, 2, True), (32, 3, 1, True), (64, 3)),
        Branches(nn.MaxPool2d(3, 2), chain(64, (96, 3, 2, True))),
        Branches(
            chain(160, (64, 1), (96, 3, 1, True)),
            chain(160, (64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3, 1, True)),
        ),
        Branches(chain(192, (192, 3, 2, True)), nn.MaxPool2d(3, 2)),
    )


class InceptionV4(nn.Module):
    """Inception-v4 (Szegedy et al. 2016, figure 9)."""

    def __init__(self) -> None:
        super().__init__()
        reduction_a = Branches(
            chain(384, (384, 3, 2, True)),
            chain(384, (192, 1), (224, 3), (256, 3, 2, True)),
            nn.MaxPool2d(3, 2),
        )
        reduction_b = Branches(
            chain(1024, (192, 1), (192, 3, 2, True)),
            chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2, True)),
            nn.MaxPool2d(3, 2),
        )
        self.stem = stem()
        self.a = nn.Sequential(*(inception_a() for _ in range(4)))
        self.reduction_a = reduction_a
        self.b = nn.Sequential(*(inception_b() for _ in range(7)))
        self.reduction_b = reduction_b
        self.c = nn.Sequential(*(inception_c() for _ in range(3)))
        self.fc = nn.Linear(1536, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """299 x 299 images to 1000 scores."""
        x = self.reduction_a(self.a(self.stem(x)))
        x = self.c(self.reduction_b(self.b(x)))
        out: Tensor = self.fc(x.mean(dim=(2, 3)))
        return out

"""Make the paced models' profiles, or check that the files are what this makes.

::

    python tools/make_profiles.py            write src/wingbeat_lab/paced/profiles/*.json
    python tools/make_profiles.py --check    write nothing; exit 1 if a file differs

Needs the ``profiles`` extra (torchvision, transformers). Nothing is downloaded: the networks are
built without weights on torch's meta device, run once there, and each layer's cost is counted
from the shapes that a forward hook sees.

How a throughput becomes layer times: a layer's weight is the larger of FLOPs / peak and
bytes / bandwidth of the device (the roofline), for the whole batch in float32, where bytes are
the layer's input, output and parameters. So convolutions, linear layers and attention go by
FLOPs, BatchNorm, LayerNorm and embeddings by bytes. The weights share batch / throughput.
Modules without parameters (ReLU, pooling) and the optimizer get no time of their own: all of
the measured iteration is shared out. Backward is twice forward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from profile_devices import LAMBDA, files
from profile_networks import InceptionV4, LstmPtb, VggCifar, VggCifarNorm, Yolo
from torch import Tensor, nn

from wingbeat.profiling import Parameter, Profile, ProfiledLayer, encode
from wingbeat_lab.paced.profile import decode

FOLDER = Path(__file__).resolve().parent.parent / "src" / "wingbeat_lab" / "paced" / "profiles"
DEVICE = "NVIDIA GeForce RTX 2080 Ti, float32"
PEAK = 13.45e12  # FLOP/s in float32, from the card's data sheet
BANDWIDTH = 616e9  # bytes/s
BACKWARD = 2.0  # of forward: one product for the inputs' gradient, one for the weights'
SPLIT = (
    "roofline: each layer's share is the larger of FLOPs/13.45e12 and bytes/616e9 of the batch; "
    "backward is 2x forward"
)

RTX2080 = (
    "github.com/ggg17226/rtx2080-dl-benchmark (benchmark-tf.md, tf_cnn_benchmarks, batch 64, "
    "RTX 2080)"
)
TI_OVER_2080 = 1.37  # Lambda's mean over networks, FP32


@dataclass(frozen=True)
class Cost:
    """One layer as a hook saw it: FLOPs and bytes of one forward pass of the batch."""

    name: str
    kind: str
    parameters: tuple[Parameter, ...]
    flops: float
    nbytes: float

    @property
    def seconds(self) -> float:
        """Roofline time at the device's peaks."""
        return max(self.flops / PEAK, self.nbytes / BANDWIDTH)


@dataclass(frozen=True)
class Network:
    """How to build one network and an input batch, both on the meta device."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    shapes_from: str


KINDS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Conv2d, "conv"),
    (nn.Linear, "linear"),
    (nn.BatchNorm2d, "bn"),
    (nn.LayerNorm, "layernorm"),
    (nn.Embedding, "embedding"),
    (nn.LSTM, "lstm"),
)


def kind_of(module: nn.Module) -> str:
    """The profile's word for a module."""
    for cls, kind in KINDS:
        if isinstance(module, cls):
            return kind
    if type(module).__name__ == "BertSelfAttention":
        return "attention"
    return type(module).__name__.lower()


def flops_of(module: nn.Module, given: Tensor, out: Tensor) -> float:
    """FLOPs (two per multiply-add) of one forward call; 0 for what is bound by memory."""
    if isinstance(module, nn.Conv2d):
        return 2.0 * out.numel() * module.weight[0].numel()
    if isinstance(module, nn.Linear):
        return 2.0 * out.numel() * module.in_features
    if isinstance(module, nn.LSTM):
        rows = given.numel() // given.shape[-1]
        return 2.0 * rows * sum(p.numel() for p in module.parameters() if p.dim() == 2)
    if type(module).__name__ == "BertSelfAttention":
        # Scores and weighted sum: batch x steps x steps x hidden each.
        return 4.0 * out.numel() * out.shape[1]
    return 0.0


def costs_of(network: Network, batch_size: int) -> list[Cost]:
    """Run the network once and return its layers in the order in which they ran."""
    with torch.device("meta"):
        model = network.build().train()
        inputs = network.batch(batch_size)
    found: list[Cost] = []
    seen: set[int] = set()

    def watch(name: str, module: nn.Module) -> None:
        def hook(
            _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: object
        ) -> None:
            given, made = args[0] if args else next(iter(kwargs.values())), _first(out)
            own = [(n, p) for n, p in module.named_parameters(recurse=False) if id(p) not in seen]
            seen.update(id(p) for _, p in own)
            held = sum(p.numel() for p in module.parameters(recurse=False))
            moved = 4.0 * (made.numel() + held + (0 if given.dim() < 3 else given.numel()))
            parameters = tuple(Parameter(n, tuple(p.shape)) for n, p in own)
            flops = flops_of(module, given, made)
            found.append(Cost(name, kind_of(module), parameters, flops, moved))

        module.register_forward_hook(hook, with_kwargs=True)

    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)) or kind_of(module) == "attention":
            watch(name, module)
    model(**inputs)
    total = sum(p.numel() for p in model.parameters())
    counted = sum(p.numel for cost in found for p in cost.parameters)
    if counted != total:
        raise RuntimeError(f"the hooks saw {counted} parameters of {total}")
    return found


def _first(out: object) -> Tensor:
    while isinstance(out, (tuple, list)):
        out = out[0]
    assert isinstance(out, Tensor)
    return out


def flops_per_sample(network: Network, batch_size: int = 2) -> float:
    """Forward FLOPs of one sample."""
    return sum(cost.flops for cost in costs_of(network, batch_size)) / batch_size


def images(size: int) -> Callable[[int], dict[str, Tensor]]:
    """Square images as the network's first argument, whatever its name."""
    return lambda batch: {"x": torch.empty(batch, 3, size, size)}


def vision(name: str, size: int = 224, **options: object) -> Network:
    """A torchvision classifier."""

    def build() -> nn.Module:
        from torchvision import models

        model: nn.Module = getattr(models, name)(weights=None, **options)
        return model

    extra = "".join(f", {key}={value}" for key, value in options.items() if key != "init_weights")
    return Network(build, images(size), f"torchvision {name}{extra}, input 3x{size}x{size}")


def bert(size: str, head: str, steps: int) -> Network:
    """BERT of transformers; tied weights are counted where they are used first."""

    def build() -> nn.Module:
        import transformers

        options: dict[str, Any] = {"attn_implementation": "eager"}  # runs on the meta device
        if size == "large":
            options |= {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
            options |= {"intermediate_size": 4096}
        config = transformers.BertConfig(**options)
        model: nn.Module = getattr(transformers, head)(config)
        return model

    def batch(rows: int) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(rows, steps, dtype=torch.long)}

    return Network(build, batch, f"transformers {head}, BERT-{size}, {steps} tokens")


def tokens(steps: int) -> Callable[[int], dict[str, Tensor]]:
    """Rows of word numbers."""
    return lambda batch: {"tokens": torch.zeros(batch, steps, dtype=torch.long)}


NETWORKS: dict[str, Network] = {
    "alexnet": vision("alexnet"),
    "vgg16": vision("vgg16", init_weights=False),
    "vgg19": vision("vgg19", init_weights=False),
    "resnet50": vision("resnet50"),
    "densenet201": vision("densenet201"),
    "inception_v3": vision("inception_v3", 299, aux_logits=True, init_weights=False),
    "inception_v4": Network(
        InceptionV4, images(299), "Szegedy et al. 2016, arXiv:1602.07261, input 3x299x299"
    ),
    "yolo": Network(Yolo, images(448), "Redmon et al. 2016, arXiv:1506.02640, figure 3, 3x448x448"),
    "vgg16_cifar": Network(
        VggCifar,
        images(32),
        "Simonyan & Zisserman 2014, arXiv:1409.1556, column D at 25/64 of the width, hidden layers "
        "of 161, input 3x32x32",
    ),
    "vgg16_cifar_bn": Network(
        VggCifarNorm,
        images(32),
        "Simonyan & Zisserman 2014, arXiv:1409.1556, column D with batch normalisation and one "
        "linear layer, input 3x32x32",
    ),
    "bert_base": bert("base", "BertForPreTraining", 64),
    "bert_large": bert("large", "BertForPreTraining", 64),
    "lstm_ptb": Network(
        LstmPtb, tokens(35), "Zaremba et al. 2014, arXiv:1409.2329, large; 35 steps"
    ),
}


def published() -> Iterator[tuple[str, int, float, str]]:
    """Networks measured on the device: (name, batch size, samples/s, source)."""
    yield "resnet50", 64, 294.0, f"measured: {LAMBDA}; batch size 64 is DeAR's (table I)"
    yield "inception_v3", 64, 194.0, f"measured: {LAMBDA}; the batch size is our choice"
    yield (
        "inception_v4",
        64,
        79.0,
        (
            f"measured: {LAMBDA}; batch size 64 is DeAR's (table I), whose table II implies "
            "about 190 images/s at an input size it does not state"
        ),
    )


def from_sibling() -> Iterator[tuple[str, int, float, str]]:
    """Networks measured on an RTX 2080 and carried over to the Ti."""
    rule = f"times {TI_OVER_2080}, the 2080 Ti over the 2080 in FP32 ({LAMBDA})"
    for name, batch, rate, row, note in (
        ("alexnet", 512, 2103.99, "AlexNetOWT", "; batch size 512 is Geryon's (section V)"),
        ("vgg16", 64, 128.15, "VGG16", ""),
        ("vgg19", 64, 111.23, "VGG19", "; batch size 64 is Geryon's (section V)"),
    ):
        source = f"derived: {rate} images/s, row {row} of {RTX2080}, {rule}{note}"
        yield name, batch, rate * TI_OVER_2080, source


def dear_seconds(params: float, s_max: float) -> float:
    """Compute seconds of an iteration from DeAR's table II, 10GbE, where both passes are exceeded.

    ``s_max`` = 64 * compute / (reduce-scatter + all-gather) on 64 GPUs, when each half of the
    all-reduce takes longer than the pass it runs under (section VI-E); each half moves 63/64 of
    the float32 gradients at 1.25e9 bytes/s.
    """
    half = params * 4.0 * 63.0 / 64.0 / 1.25e9
    return s_max * 2.0 * half / 64.0


def from_dear() -> Iterator[tuple[str, int, float, str]]:
    """Networks whose times follow from the bounds that DeAR (arXiv:2302.12445) prints."""
    paper = "DeAR (arXiv:2302.12445), tables I and II, 64 RTX 2080 Ti with 10GbE"
    for name, batch, params, s_max in (
        ("bert_base", 64, 110.1e6, 25.5),
        ("bert_large", 32, 336.2e6, 12.1),
    ):
        source = (
            f"derived: S_max = {s_max} of {paper}, solved for the compute time; the same way gives "
            f"its ResNet-50 within 1% of the measured 294 images/s; 64 tokens"
        )
        yield name, batch, batch / dear_seconds(params, s_max), source
    # S_max = 64: the all-gather hides under forward, and backward is twice forward.
    forward = 20.0e6 * 4.0 * 63.0 / 64.0 / 1.25e9
    yield (
        "densenet201",
        32,
        32.0 / ((1.0 + BACKWARD) * forward),
        f"derived, an upper limit: S_max = 64 of {paper}, says that forward takes at least as long "
        "as the all-gather; backward taken as twice forward",
    )


def from_flops() -> Iterator[tuple[str, int, float, str]]:
    """Networks for which no throughput was found: carried over by counting FLOPs."""
    vgg = 128.15 * TI_OVER_2080 * flops_per_sample(NETWORKS["vgg16"])
    yield (
        "yolo",
        64,
        vgg / flops_per_sample(NETWORKS["yolo"]),
        "derived: the FLOP rate of the vgg16 profile, also mostly 3x3 convolutions; batch size 64 "
        "is Geryon's (section V)",
    )
    yield (
        "vgg16_cifar",
        128,
        vgg / flops_per_sample(NETWORKS["vgg16_cifar"]),
        "derived: the FLOP rate of the vgg16 profile, an upper limit, as small images fill a card "
        "less; batch size 128 and 9.23 MB are Ripples' (section 7.1.2)",
    )
    yield (
        "vgg16_cifar_bn",
        128,
        vgg / flops_per_sample(NETWORKS["vgg16_cifar_bn"]),
        "derived: the FLOP rate of the vgg16 profile, an upper limit, as small images fill a card "
        "less; batch size 128 is OMGS-SGD's (table IV)",
    )
    yield (
        "lstm_ptb",
        100,
        0.4 * PEAK / ((1.0 + BACKWARD) * flops_per_sample(NETWORKS["lstm_ptb"])),
        "derived: 40% of the peak of 13.45e12 FLOP/s, an assumption; batch size 100 is OMGS-SGD's "
        "(table IV), 35 steps are Zaremba et al.'s",
    )


def make(name: str, batch_size: int, rate: float, source: str) -> Profile:
    """Share one throughput among a network's layers."""
    rate = float(f"{rate:.4g}")
    costs = costs_of(NETWORKS[name], batch_size)
    whole = sum(cost.seconds for cost in costs)
    forward_ms = 1000.0 * batch_size / rate / (1.0 + BACKWARD)
    layers = []
    for cost in costs:
        forward = forward_ms * cost.seconds / whole
        times = round(forward, 5), round(BACKWARD * forward, 5)
        layers.append(ProfiledLayer(cost.name, cost.kind, cost.parameters, *times))
    return Profile(
        name=name,
        device=DEVICE,
        batch_size=batch_size,
        samples_per_second=rate,
        source=source,
        shapes_from=NETWORKS[name].shapes_from,
        split=SPLIT,
        layers=tuple(layers),
    )


def main(argv: list[str] | None = None) -> int:
    """Write or check every profile; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 on a difference"
    )
    check = parser.parse_args(argv).check
    stale = 0
    for row in (*published(), *from_sibling(), *from_dear(), *from_flops()):
        profile = make(*row)
        stale += not put(profile.name, encode(profile), check)
    # After the others, whose throughputs they go by.
    for name, text in files():
        stale += not put(name, text, check)
    return int(check and stale > 0)


def put(name: str, text: str, check: bool) -> bool:
    """Write or check one file and print a line; return whether the file was so already."""
    path = FOLDER / f"{name}.json"
    same = path.exists() and path.read_text(encoding="utf-8") == text
    if not check:
        path.write_text(text, encoding="utf-8")
    state = "ok" if same else ("differs" if check else "written")
    profile = decode(text, where=path.name)
    total = profile.forward_ms + profile.backward_ms
    print(f"{profile.name:13} {profile.params:11,} {total:9.2f} ms  {state}")
    return same


if __name__ == "__main__":
    sys.exit(main())

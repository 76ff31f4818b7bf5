"""Networks of the profiles at the pace of other devices: small files that name a profile.

Throughputs are kept to four digits. The layers' shares of the time are those of the profile named:
on a card with another ratio of arithmetic to memory they would differ somewhat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from wingbeat.paced.profile import load_profile

K40, V100 = "NVIDIA Tesla K40, float32", "NVIDIA Tesla V100 (32 GB), float32"
GTX = "NVIDIA GeForce GTX 1080 Ti, float32"
GERYON_VGG19 = 279.2 / 8 / 0.946
TI_OVER_V100 = 0.73
TI_OVER_GTX = 1.35
LAMBDA = (
    "Lambda, 'RTX 2080 Ti Deep Learning Benchmarks with TensorFlow' (2019), FP32 training, 1 GPU, "
    "https://lambdalabs.com/blog/2080-ti-deep-learning-benchmarks"
)


def four_digits(value: float) -> float:
    """Round to four significant digits, which is more than any of these is worth."""
    return float(f"{value:.4g}")


def rows() -> Iterator[tuple[str, str, str, float, str]]:
    """Each file as (name, profile it is like, device, samples/s, source)."""
    k40 = four_digits(GERYON_VGG19)
    ti = load_profile("vgg19").samples_per_second
    yield (
        "vgg19_k40",
        "vgg19",
        K40,
        k40,
        "derived: 279.2 images/s of 8 workers with slices of 1024K (Geryon, table IV), / 8, "
        f"/ 94.6%, their scaling efficiency (table II), makes {k40}; batch size 64 is "
        "Geryon's (section V)",
    )
    for like in ("alexnet", "resnet50", "yolo"):
        profile = load_profile(like)
        rate = four_digits(profile.samples_per_second * k40 / ti)
        yield (
            f"{like}_k40",
            like,
            K40,
            rate,
            f"derived: {profile.samples_per_second:g} images/s of the {like} profile, times "
            f"{k40} / {ti:g} = {k40 / ti:.4f}, the K40 over the 2080 Ti on VGG-19 (profiles "
            f"vgg19_k40 and vgg19), makes {rate}; batch size {profile.batch_size} is Geryon's "
            "(section V)",
        )
    v100 = four_digits(ti / TI_OVER_V100)
    yield (
        "vgg19_v100",
        "vgg19",
        V100,
        v100,
        f"derived: {ti:g} images/s of the vgg19 profile, / {TI_OVER_V100}, the 2080 Ti over the "
        f"V100 in FP32 ({LAMBDA}), makes {v100}; batch size 64 is Geryon's (section V)",
    )
    small = load_profile("vgg16_cifar").samples_per_second
    gtx = four_digits(small / TI_OVER_GTX)
    yield (
        "vgg16_cifar_1080ti",
        "vgg16_cifar",
        GTX,
        gtx,
        f"derived: {small:g} images/s of the vgg16_cifar profile, / {TI_OVER_GTX}, the 2080 Ti "
        f"over the GTX 1080 Ti in FP32 ({LAMBDA}), makes {gtx:g}; the card is Ripples' (Fig. 14)",
    )


def files() -> Iterator[tuple[str, str]]:
    """Each file's name and text."""
    for name, like, device, rate, source in rows():
        data = {"name": name, "like": like, "device": device}
        data |= {"samples_per_second": rate, "source": source}
        yield name, json.dumps(data, indent=2) + "\n"

"""Networks of the profiles at another pace: small files that name a profile.

The pace is that of another device, or one fitted to what a paper prints (`fitted`).
Throughputs are kept to four digits. The layers' shares of the time are those of the profile named:
on a card with another ratio of arithmetic to memory they would differ somewhat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from wingbeat_lab.paced.profile import load_profile

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


DEAR_WORKERS = 64
DEAR_RATES = {"slow": 10e9 / 8, "fast": 100e9 / 8}
"""Bytes per second of DeAR's two networks: 10GbE and 100GbIB."""
DEAR = "DeAR (arXiv:2302.12445), table II"


def half_s(params: float, rate: str) -> float:
    """Seconds of DeAR's reduce-scatter, and of its all-gather: Eqs. 3 and 4 without latency."""
    return params * 4 * (DEAR_WORKERS - 1) / DEAR_WORKERS / DEAR_RATES[rate]


def inception_v4_s(s_max: float) -> float:
    """Forward and backward of DeAR's Inception-v4, in seconds, by its S_max at the slow rate.

    Backward is twice forward, as the paper says. Were forward longer than the all-gather, S_max
    would be 64, and were backward shorter than the reduce-scatter, 48 at most: so it lies between,
    S_max / 64 = 3 t_ff / (t_ag + 2 t_ff). At the fast rate all is hidden then: 64, as printed.
    """
    share = s_max / DEAR_WORKERS
    forward = share * half_s(load_profile("inception_v4").params, "slow") / (3 - 2 * share)
    return 3 * forward


def bert_large_s(slow: float, fast: float) -> tuple[float, float]:
    """Forward and backward of DeAR's BERT-Large, in seconds, by its S_max at both rates.

    At the slow rate both passes are shorter than the half they hide, so that S_max gives their sum
    and nothing else: S_max / 64 = (t_ff + t_bp) / (2 t_ag). At the fast rate the same sum is
    S_max / 64 of max(t_ff, t_ag) + max(t_bp, t_rs). With backward twice forward that is 64 and not
    51.8; below 64 one pass must be shorter than its half, and the other is what is left.
    """
    params = load_profile("bert_large").params
    both = 2 * half_s(params, "slow") * slow / DEAR_WORKERS
    backward = both * DEAR_WORKERS / fast - half_s(params, "fast")
    return both - backward, backward


def fitted() -> Iterator[tuple[str, str, str, float, float | None, str]]:
    """Each file of a fitted pace: as in `rows`, with forward's share before the source."""
    device = "none: times fitted to S_max in DeAR's table II (RTX 2080 Ti, float32)"
    rate = four_digits(64 / inception_v4_s(59.8))
    yield (
        "inception_v4_dear",
        "inception_v4",
        device,
        rate,
        None,
        f"derived, fitted: S_max = 59.8 with 10GbE and 64 with 100GbIB of {DEAR}, solved for the "
        f"compute time with backward twice forward, makes {rate:g} images/s; Lambda measured 79",
    )
    forward, backward = bert_large_s(12.1, 51.8)
    rate = four_digits(32 / (forward + backward))
    yield (
        "bert_large_dear",
        "bert_large",
        device,
        rate,
        four_digits(forward / (forward + backward)),
        f"derived, fitted: S_max = 12.1 with 10GbE and 51.8 with 100GbIB of {DEAR}, which only "
        f"forward of {1e3 * forward:.1f} ms and backward of {1e3 * backward:.1f} ms have together "
        "(or the other way round), as no real network has; with backward twice forward S_max is "
        "64 with 100GbIB, or 51.8 if that carries 46.5 Gbit/s",
    )


def files() -> Iterator[tuple[str, str]]:
    """Each file's name and text."""
    for name, like, device, rate, source in rows():
        data: dict[str, Any] = {"name": name, "like": like, "device": device}
        data |= {"samples_per_second": rate, "source": source}
        yield name, json.dumps(data, indent=2) + "\n"
    for name, like, device, rate, share, source in fitted():
        data = {"name": name, "like": like, "device": device, "samples_per_second": rate}
        data |= {} if share is None else {"forward_share": share}
        yield name, json.dumps(data | {"source": source}, indent=2) + "\n"

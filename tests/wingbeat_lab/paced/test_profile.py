"""Profiles: the files that come with wingbeat, scaling, and what is refused."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.profiles import TINY
from wingbeat.errors import UsageError
from wingbeat.profiling import encode
from wingbeat_lab.bench.bound import seconds_per_byte, simple
from wingbeat_lab.layer_costs import LayerCosts
from wingbeat_lab.paced import Parameter, load_profile, names, parse, table
from wingbeat_lab.paced.profile import decode

# Millions of parameters as the papers and libraries print them.
PUBLISHED = {
    "alexnet": 61.1,
    "vgg16": 138.36,
    "vgg19": 143.67,
    "resnet50": 25.557,
    "densenet201": 20.01,
    "inception_v3": 27.16,  # with the auxiliary classifier
    "inception_v4": 42.68,
    "yolo": 271.7,
    "bert_base": 110.1,
    "bert_large": 336.2,
    "lstm_ptb": 66.03,
    "vgg16_cifar": 9.23 / 4,  # Ripples, section 7.1.2
    "vgg16_cifar_bn": 14.73,
}
# Known networks at another device's pace: the profile whose layers they have, and samples/s.
LIKE = {
    "alexnet_k40": ("alexnet", 697.6),
    "resnet50_k40": ("resnet50", 71.2),
    "vgg19_k40": ("vgg19", 279.2 / 8 / 0.946),
    "vgg16_cifar_1080ti": ("vgg16_cifar", 41680.0),
    "vgg19_v100": ("vgg19", 208.8),
    "yolo_k40": ("yolo", 32.4),
}
# Known networks at a pace that is fitted to what a paper prints.
FITTED = {"bert_large_dear": "bert_large", "inception_v4_dear": "inception_v4"}
PUBLISHED |= {name: PUBLISHED[like] for name, (like, _) in LIKE.items()}
PUBLISHED |= {name: PUBLISHED[like] for name, like in FITTED.items()}
# DeAR, table II: S_max of 64 workers at 10 and at 100 Gbit/s.
S_MAX = {
    "resnet50": (61.6, 64),
    "densenet201": (64, 64),
    "inception_v4_dear": (59.8, 64),
    "bert_base": (25.5, 64),
    "bert_large_dear": (12.1, 51.8),
}
# Parameter tensors as DeAR's table I counts them; of the last two as OMGS-SGD's table V does.
TENSORS = {
    "resnet50": 161,
    "densenet201": 604,
    "inception_v4": 449,
    "bert_base": 206,
    "bert_large": 398,
    "lstm_ptb": 11,
    "vgg16_cifar_bn": 54,
}

MINE = {
    "name": "mine",
    "like": "vgg16",
    "device": "my GPU",
    "samples_per_second": 10.0,
    "source": "invented for a test",
}


def test_profile_names_are_the_published_models() -> None:
    assert set(names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_totals_match_the_published_count_and_the_stated_throughput(name: str) -> None:
    profile = load_profile(name)
    assert profile.params / 1e6 == pytest.approx(PUBLISHED[name], rel=5e-4)
    assert profile.tensors == TENSORS.get(name, profile.tensors)
    iteration_ms = 1e3 * profile.batch_size / profile.samples_per_second
    assert profile.forward_ms + profile.backward_ms == pytest.approx(iteration_ms, rel=1e-4)
    if name != "bert_large_dear":
        assert profile.backward_ms == pytest.approx(2 * profile.forward_ms, rel=1e-4)
    assert profile.source.startswith(("measured: ", "derived"))


@pytest.mark.parametrize(
    "name",
    ["alexnet", "vgg16", "vgg19", "resnet50", "densenet201", "inception_v3"],
)
def test_profile_shapes_equal_torchvisions(name: str) -> None:
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("torchvision.models")
    options = {"aux_logits": True, "init_weights": False} if name == "inception_v3" else {}
    with torch.device("meta"):
        real = getattr(models, name)(weights=None, **options)
    want = {key: tuple(p.shape) for key, p in real.named_parameters()}
    have = {
        f"{layer.name}.{p.name}": p.shape
        for layer in load_profile(name).layers
        for p in layer.parameters
    }
    assert have == want


def test_inception_v3_without_its_auxiliary_classifier_is_the_other_published_count() -> None:
    layers = load_profile("inception_v3").layers
    kept = sum(layer.numel for layer in layers if not layer.name.startswith("AuxLogits"))
    assert kept / 1e6 == pytest.approx(23.83, rel=5e-4)


@pytest.mark.parametrize(
    ("name", "hidden", "depth"), [("bert_base", 768, 12), ("bert_large", 1024, 24)]
)
def test_bert_counts_its_tied_embedding_once(name: str, hidden: int, depth: int) -> None:
    profile = load_profile(name)
    words = [
        layer
        for layer in profile.layers
        if any(p.shape == (30522, hidden) for p in layer.parameters)
    ]
    assert [layer.kind for layer in words] == ["embedding"]
    assert sum(layer.kind == "attention" for layer in profile.layers) == depth
    assert all(not layer.parameters for layer in profile.layers if layer.kind == "attention")


def test_layers_come_in_the_order_of_execution() -> None:
    # torchvision defines a block's downsample after bn3 but runs it between bn3 and the addition;
    # inception_v3 defines its auxiliary classifier before the layers that run after it.
    order = [layer.name for layer in load_profile("resnet50").layers]
    assert order[:2] == ["conv1", "bn1"]
    assert order[-1] == "fc"
    yolo = [layer.name for layer in load_profile("yolo").layers]
    assert yolo == [f"body.conv{i}" for i in range(1, 25)] + ["fc1", "fc2"]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@pytest.mark.parametrize("scale", [0.5, 0.25, 0.1])
def test_scale_shrinks_parameters_and_leaves_times(name: str, scale: float) -> None:
    whole = load_profile(name)
    small = whole.scaled(scale)
    assert small.scale == scale
    assert small.params == pytest.approx(scale * whole.params, rel=0.01)
    assert small.tensors == whole.tensors
    assert (small.forward_ms, small.backward_ms) == (whole.forward_ms, whole.backward_ms)
    for layer, full in zip(small.layers, whole.layers, strict=True):
        for p, q in zip(layer.parameters, full.parameters, strict=True):
            assert 1 <= p.numel <= q.numel
            assert len(p.shape) == len(q.shape)


def test_scales_multiply_and_a_tensor_keeps_an_element() -> None:
    assert load_profile("alexnet").scaled(0.5).scaled(0.5).scale == 0.25
    assert Parameter("bias", (3,)).scaled(0.01).shape == (1,)
    assert Parameter("weight", (64, 3, 7, 7)).scaled(0.25).shape == (16, 3, 7, 7)


def test_parse_reads_name_and_scale() -> None:
    assert parse("paced:resnet50") == load_profile("resnet50")
    assert parse("paced:resnet50@0.25") == load_profile("resnet50").scaled(0.25)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("paced:resnet5", ["'resnet5'", "did you mean 'resnet50'?", "vgg16"]),
        ("paced:resnet5@0.5", ["'resnet5'", "did you mean 'resnet50'?"]),
        ("resnet50", ["'resnet50'", "paced:resnet50"]),
        ("paced:resnet50@half", ["'half'", "more than 0 and at most 1"]),
        ("paced:resnet50@", ["''", "more than 0 and at most 1"]),
        ("paced:resnet50@0", ["scale 0 ", "more than 0 and at most 1"]),
        ("paced:resnet50@nan", ["scale nan", "at most 1"]),
        ("paced:resnet50@2", ["scale 2 ", "at most 1"]),
        ("paced:/does/not/exist.json", ["/does/not/exist.json", "No such file"]),
    ],
)
def test_parse_refuses_in_one_line(text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", LIKE)
def test_another_devices_pace_changes_times_alone(name: str) -> None:
    like, rate = LIKE[name]
    here, there = load_profile(name), load_profile(like)
    assert (here.name, here.batch_size) == (name, there.batch_size)
    assert here.device != there.device
    assert here.source != there.source
    assert here.samples_per_second == pytest.approx(rate, rel=1e-3)
    factor = there.samples_per_second / here.samples_per_second
    for mine, other in zip(here.layers, there.layers, strict=True):
        assert (mine.name, mine.kind, mine.parameters) == (other.name, other.kind, other.parameters)
        assert mine.forward_ms == pytest.approx(other.forward_ms * factor, rel=1e-4)
        assert mine.backward_ms == pytest.approx(other.backward_ms * factor, rel=1e-4)


def test_the_other_devices_files_are_what_the_generator_makes() -> None:
    root = Path(__file__).resolve().parents[3]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "tools"))
        made = dict(importlib.import_module("profile_devices").files())
    assert set(made) == set(LIKE) | set(FITTED)
    for name, text in made.items():
        file = root / "src" / "wingbeat_lab" / "paced" / "profiles" / f"{name}.json"
        assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", S_MAX)
@pytest.mark.parametrize("column", [0, 1], ids=["10 Gbit/s", "100 Gbit/s"])
def test_profiles_reproduce_dears_table_of_largest_speedups(name: str, column: int) -> None:
    profile, gbit = load_profile(name), (10, 100)[column]
    layers = [LayerCosts(profile.forward_ms / 1e3, profile.backward_ms / 1e3, profile.nbytes)]
    limit = simple("halves", layers, seconds_per_byte([gbit * 1e9 / 8] * 64))
    assert limit is not None
    s_max = 64 * (profile.forward_ms + profile.backward_ms) / 1e3 / limit
    assert s_max == pytest.approx(S_MAX[name][column], rel=0.01)


@pytest.mark.parametrize("name", FITTED)
def test_fitted_pace_keeps_layers_and_names_no_device(name: str) -> None:
    here, there = load_profile(name), load_profile(FITTED[name])
    assert [(x.name, x.parameters) for x in here.layers] == [
        (x.name, x.parameters) for x in there.layers
    ]
    assert here.device.startswith("none: times fitted")
    assert "fitted" in here.source
    # Within a pass each layer has the share that it had.
    for mine, other in zip(here.layers, there.layers, strict=True):
        of_forward = other.forward_ms / there.forward_ms
        assert mine.forward_ms / here.forward_ms == pytest.approx(of_forward)
        of_backward = other.backward_ms / there.backward_ms
        assert mine.backward_ms / here.backward_ms == pytest.approx(of_backward)


def test_own_pace_may_divide_forward_and_backward_differently() -> None:
    mine = decode(json.dumps({**MINE, "forward_share": 0.25, "batch_size": 4}), where="here")
    assert (mine.forward_ms, mine.backward_ms) == (pytest.approx(100.0), pytest.approx(300.0))
    assert decode(encode(mine), where="here") == mine


def test_ones_own_pace_of_a_known_network_loads_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**MINE, "batch_size": 4}), encoding="utf-8")
    profile = parse(f"paced:{path}")
    assert (profile.name, profile.device, profile.batch_size) == ("mine", "my GPU", 4)
    assert profile.forward_ms + profile.backward_ms == pytest.approx(400.0)
    assert profile.params == load_profile("vgg16").params
    assert decode(encode(profile), where="here") == profile


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"like": "vgg17"}, "unknown model 'vgg17' in profile my.json: like"),
        ({"like": 3}, "'like' must be a str"),
        ({"layers": []}, "both 'like' and 'layers'"),
        ({"samples_per_second": 0}, "must be > 0"),
        ({"batch_size": 0}, "must be > 0"),
        ({"source": None}, "'source' must be a str"),
        ({"params": 5}, "params is 5 but its layers make"),
        ({"forward_share": 0}, "forward_share is 0; allowed are numbers between 0 and 1"),
        ({"forward_share": 1.0}, "forward_share is 1; allowed"),
        ({"forward_share": "half"}, "'forward_share' must be a number"),
        ({"forward_share": None}, "'forward_share' must be a number"),
        ({"forward_share": True}, "'forward_share' must be a number"),
    ],
)
def test_a_broken_pace_is_refused_naming_the_field(change: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError) as caught:
        decode(json.dumps({**MINE, **change}), where="my.json")
    assert part in str(caught.value)


def test_a_profile_of_ones_own_loads_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    profile = parse(f"paced:{path}@0.5")
    assert [p.shape for p in profile.layers[0].parameters] == [(4, 4), (4,)]
    assert (profile.forward_ms, profile.backward_ms) == (6.0, 14.0)


def test_encode_and_decode_are_inverse() -> None:
    profile = load_profile("bert_base")
    assert decode(encode(profile), where="here") == profile


def test_loading_profiles_does_not_import_torch() -> None:
    code = (
        "import sys; from wingbeat_lab.paced import parse, names\n"
        "for name in names(): parse(f'paced:{name}')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tables_show_the_profiles_numbers() -> None:
    profile = load_profile("lstm_ptb")
    rows = table([profile]).splitlines()
    assert rows[2] == "| lstm_ptb | 100 | 4 | 11 | 66.03 | 264.1 | 66.4 | 132.7 |"


def test_the_documentations_table_is_the_profiles() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "developers" / "paced-models.md"
    assert table([load_profile(name) for name in names()]) in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_files_are_what_the_generator_makes() -> None:
    for module in ("torchvision", "transformers"):
        pytest.importorskip(module)
    tool = Path(__file__).resolve().parents[3] / "tools" / "make_profiles.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--check"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok") == len(PUBLISHED)

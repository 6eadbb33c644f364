"""The text of layer profiles: what is read is what was written, and one message for everything wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from examples.export_layer_profile import format_layer_profile
from parplan.cost_models.layer_profile.records import (
    AxisCut,
    Effect,
    LayerProfile,
    ProfiledLayer,
    ProfileEdge,
    Samples,
    Times,
)
from parplan.cost_models.layer_profile.text import load_layer_profile, parse_layer_profile
from parplan.errors import ProfileError

ROOT = Path(__file__).resolve().parents[3]
HEAD = "parplan-layer-profile 1\nbatch 8\ndevice one card\nper batch\n"
SIZES = "forward-s=1 backward-s=2 activation-bytes=10 parameter-bytes=20"


def test_a_profile_with_everything() -> None:
    text = f"""parplan-layer-profile 1   # the version
    # a comment
    model  net of two
    device  Tesla  V100
    batch 8
    precision bf16
    per batch
    edge a b activation-bytes=4   # before the layers
    times a batch=2 forward-s=3e-1 backward-s=0.5
    layer a {SIZES} saved-bytes=7 kind=conv cut=out-channels:64,rows:6:both@2>3
    layer b {SIZES} samples=together update-s=1e-3 cut=in-features:4,experts:2:output@2,tokens:5:input
    """
    cuts = (AxisCut("out-channels", 64, Effect.OUTPUT), AxisCut("rows", 6, Effect.BOTH, 2, 3))
    more = (
        AxisCut("in-features", 4, Effect.INPUT),
        AxisCut("experts", 2, Effect.OUTPUT, gives=2),
        AxisCut("tokens", 5, Effect.INPUT),
    )
    a = ProfiledLayer("a", (Times(2, 0.3, 0.5), Times(8, 1, 2)), 10, 20, 7, "conv", cuts=cuts)
    b = ProfiledLayer("b", (Times(8, 1, 2),), 10, 20, samples=Samples.TOGETHER, cuts=more, update_s=1e-3)
    assert parse_layer_profile(text) == LayerProfile(
        "net of two", 8, "Tesla V100", (a, b), (ProfileEdge("a", "b", 4),), "bf16"
    )


def test_figures_per_sample_become_those_of_the_batch() -> None:
    text = HEAD.replace("per batch", "per sample")
    text += f"layer a {SIZES} saved-bytes=3\ntimes a batch=2 forward-s=4 backward-s=5\nedge a b activation-bytes=1\n"
    text += f"layer b {SIZES}\nlayer mask {SIZES} samples=none saved-bytes=3\nedge mask b"
    profile = parse_layer_profile(text)
    a, _, mask = profile.layers
    assert (a.times, a.activation_bytes, a.saved_bytes) == ((Times(2, 8, 10), Times(8, 8, 16)), 80, 24)
    assert (mask.times, mask.activation_bytes, mask.saved_bytes) == ((Times(8, 1, 2),), 10, 3)
    assert a.parameter_bytes == 20
    assert profile.edges[0].activation_bytes == 8


def test_the_name_of_the_file_stands_in_for_a_model(tmp_path: Path) -> None:
    path = tmp_path / "net.v2.profile"
    path.write_text(f"\ufeff{HEAD}layer a {SIZES}\r\n", encoding="utf-8")
    assert load_layer_profile(path).model == "net"


# ---- round trip -----------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=8).filter(
    lambda name: not name.startswith("#") and "=" not in name
)
SECONDS = st.floats(0, 1e6)
BYTES = st.integers(0, 2**50)


@st.composite
def cuts(draw: st.DrawFn) -> AxisCut:
    axis = draw(NAMES.filter(lambda name: not set(name) & set(":,")) | st.sampled_from(["out-features", "heads"]))
    effect, dims = draw(st.sampled_from(Effect)), st.integers(1, 4)
    takes = draw(dims) if effect is not Effect.OUTPUT else 1
    gives = draw(dims) if effect is not Effect.INPUT else 1
    return AxisCut(axis, draw(st.integers(1, 2**31)), effect, takes, gives)


@st.composite
def profiles(draw: st.DrawFn) -> LayerProfile:
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    batch = draw(st.integers(1, 2**31))
    layers = []
    for name in names:
        batches = sorted({batch, *draw(st.lists(st.integers(1, 2**31), max_size=2))})
        layers.append(
            ProfiledLayer(
                name,
                tuple(Times(size, draw(SECONDS), draw(SECONDS)) for size in batches),
                draw(BYTES),
                draw(BYTES),
                draw(st.none() | BYTES),
                draw(NAMES),
                draw(st.sampled_from(Samples)),
                tuple(draw(st.lists(cuts(), max_size=2, unique_by=lambda cut: cut.axis))),
                draw(SECONDS),
            )
        )
    pairs = [(a, b) for i, a in enumerate(layers) for b in layers[i + 1 :]]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    edges = [ProfileEdge(a.name, b.name, draw(st.none() | st.integers(0, a.activation_bytes))) for a, b in chosen]
    return LayerProfile(draw(NAMES), batch, draw(NAMES), tuple(layers), tuple(edges), draw(st.just("") | NAMES))


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(profiles())
def test_what_is_written_is_read_back(profile: LayerProfile) -> None:
    assert parse_layer_profile(format_layer_profile(profile)) == profile


LAYER = ProfiledLayer("a", (Times(8, 1, 2),), 10, 20)
UNWRITABLE = [
    (replace(LAYER, name="two words"), "layer 'two words'"),
    (replace(LAYER, name="#1"), "layer '#1'"),
    (replace(LAYER, name=""), "layer ''"),
    (replace(LAYER, kind="a b"), "kind 'a b'"),
    (replace(LAYER, cuts=(AxisCut("x:y", 2, Effect.BOTH),)), "axis 'x:y'"),
    (replace(LAYER, times=(Times(4, 1, 2),)), "no times at the profile's batch of 8"),
]


@pytest.mark.parametrize(("layer", "words"), UNWRITABLE)
def test_what_the_text_cannot_hold_is_not_written(layer: ProfiledLayer, words: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(words)):
        format_layer_profile(LayerProfile("net", 8, "card", (layer,)))


@pytest.mark.parametrize("device", ["", "two  blanks", "a #comment", "a\nlayer"])
def test_a_header_that_the_text_cannot_hold_is_not_written(device: str) -> None:
    with pytest.raises(ProfileError, match="device"):
        format_layer_profile(LayerProfile("net", 8, device, (LAYER,)))


# ---- refusals -------------------------------------------------------------------------------------------------------


def with_layer(fields: str, name: str = "a") -> str:
    return f"{HEAD}layer {name} {fields}"


REFUSED = [
    ("", "p: empty; a layer profile is text that begins with `parplan-layer-profile 1`"),
    ("# nothing\n", "p: empty"),
    ("batch 8", "p:1: begins with 'batch'; a layer profile is text that begins with"),
    ("parplan-layer-profile 2", "p:1: version '2'; this parplan reads version 1"),
    ("parplan-layer-profile", "p:1: version 'none'"),
    (HEAD, "p: no layers; add lines `layer"),
    (f"parplan-layer-profile 1\ndevice x\nper batch\nlayer a {SIZES}", "p: no line for batch; add `batch 256`"),
    (f"parplan-layer-profile 1\nbatch 8\nper batch\nlayer a {SIZES}", "p: no line for device"),
    (f"parplan-layer-profile 1\nbatch 8\ndevice x\nlayer a {SIZES}", "p: no line for per"),
    ("parplan-layer-profile 1\nbatch 0", "p:2: batch is '0'; expected a whole number of at least 1"),
    ("parplan-layer-profile 1\nbatch 1.5", "p:2: batch is '1.5'"),
    ("parplan-layer-profile 1\nbatch 99999999999999999999", "p:2: batch is '99999999999999999999'"),
    ("parplan-layer-profile 1\nbatch", "p:2: batch is empty; write `batch 256`"),
    (f"{HEAD}batch 9", "p:5: a second batch; keep one"),
    ("parplan-layer-profile 1\nper step", "p:2: per is 'step'; expected one of batch, sample"),
    (f"{HEAD}layers a", "p:5: 'layers' begins no line; did you mean layer?"),
    (f"{HEAD}layer", "p:5: a name is missing; write `layer NAME"),
    (f"{HEAD}layer {SIZES}", "p:5: a name is missing"),
    (with_layer(SIZES, "a\x07"), "p:5: name 'a\\x07' has characters that cannot be shown"),
    (f"{with_layer(SIZES)}\nlayer a {SIZES}", "p:6: layer a is there already (p:5); keep one"),
    (with_layer(SIZES.replace("forward-s=1 ", "")), "p:5: layer a: missing field 'forward-s'; add it"),
    (with_layer(f"{SIZES} forward=1"), "p:5: layer a: unknown field 'forward'; did you mean forward-s?"),
    (with_layer(f"{SIZES} forward-s=1"), "p:5: layer a: forward-s is given twice"),
    (with_layer(f"{SIZES} kind="), "p:5: layer a: kind has no value; write kind=VALUE"),
    (with_layer(f"{SIZES} kind"), "p:5: layer a: kind has no value"),
    (
        with_layer(SIZES.replace("forward-s=1", "forward-s=-1")),
        "p:5: layer a: forward-s is '-1'; expected seconds from 0",
    ),
    (with_layer(SIZES.replace("forward-s=1", "forward-s=nan")), "p:5: layer a: forward-s is 'nan'; expected seconds"),
    (with_layer(SIZES.replace("forward-s=1", "forward-s=inf")), "p:5: layer a: forward-s is 'inf'"),
    (
        with_layer(SIZES.replace("forward-s=1", "forward-s=2e6")),
        "p:5: layer a: forward-s is '2e6'; expected seconds from 0 to 1,0",
    ),
    (
        with_layer(SIZES.replace("forward-s=1", "forward-s=1ms")),
        "p:5: layer a: forward-s is '1ms'; expected seconds from",
    ),
    (
        with_layer(SIZES.replace("bytes=10", "bytes=1.5")),
        "p:5: layer a: activation-bytes is '1.5'; expected a whole number of bytes",
    ),
    (
        with_layer(SIZES.replace("bytes=10", "bytes=1e99")),
        "p:5: layer a: activation-bytes is '1e99'; expected a whole number",
    ),
    (with_layer(SIZES.replace("bytes=10", f"bytes={'9' * 5000}")), "p:5: layer a: activation-bytes is '9999"),
    (with_layer(SIZES.replace("bytes=20", "bytes=-2")), "p:5: layer a: parameter-bytes is '-2'"),
    (with_layer(f"{SIZES} saved-bytes=x"), "p:5: layer a: saved-bytes is 'x'; expected a whole number of bytes"),
    (with_layer(f"{SIZES} samples=some"), "p:5: layer a: samples is 'some'; expected one of split, together, none"),
    (
        with_layer(f"{SIZES} kind=\x07"),
        "p:5: layer a: kind is '\\x07'; expected a word without characters that cannot be shown",
    ),
    (with_layer(f"{SIZES} cut=heads"), "p:5: layer a: cut is 'heads'; expected axes as AXIS:UNITS or"),
    (with_layer(f"{SIZES} cut=heads:0"), "p:5: layer a: cut heads: units is '0'"),
    (
        with_layer(f"{SIZES} cut=experts:8"),
        "p:5: layer a: cut experts: the effect of cutting it is not known; say experts:8:output",
    ),
    (
        with_layer(f"{SIZES} cut=heads:8:half"),
        "p:5: layer a: cut heads: effect is 'half'; expected one of output, input, both",
    ),
    (with_layer(f"{SIZES} cut=heads:8:both@0"), "p:5: layer a: cut heads: dimension is '0'"),
    (with_layer(f"{SIZES} cut=heads:8:both@1>x"), "p:5: layer a: cut heads: dimension is 'x'"),
    (with_layer(f"{SIZES} cut=heads:8:input@1>2"), "p:5: layer a: cut heads: input cuts one dimension, found '1>2'"),
    (with_layer(f"{SIZES} cut=heads:8,heads:4"), "p:5: layer a: cut heads is given twice"),
    (f"{with_layer(SIZES)}\ntimes b batch=2 forward-s=1 backward-s=1", "p:6: no layer is called 'b'; known: a"),
    (
        f"{with_layer(SIZES)}\ntimes a batch=8 forward-s=1 backward-s=1",
        "p:6: times of a at batch 8 are there already (p:",
    ),
    (
        f"{with_layer(SIZES)}\n" + "times a batch=2 forward-s=1 backward-s=1\n" * 2,
        "p:7: times a batch=2 is there already (p:6)",
    ),
    (f"{with_layer(SIZES)}\ntimes a forward-s=1 backward-s=1", "p:6: times a: missing field 'batch'"),
    (f"{with_layer(SIZES)}\nedge a", "p:6: a name is missing; write `edge FROM TO`"),
    (f"{with_layer(SIZES)}\nedge a conv", "p:6: no layer is called 'conv'; known: a"),
    (f"{with_layer(SIZES, 'conv1')}\nedge conv1 conv2", "p:6: no layer is called 'conv2'; did you mean conv1?"),
    (f"{with_layer(SIZES)}\nedge a a", "p:6: edge a a: a layer cannot feed itself"),
    (f"{with_layer(SIZES)}\nlayer b {SIZES}\nedge a b\nedge a b", "p:8: edge a b is there already (p:7)"),
    (f"{with_layer(SIZES)}\nlayer b {SIZES}\nedge a b\nedge b a", "closes a cycle, "),
    (
        f"{with_layer(SIZES)}\nlayer b {SIZES}\nedge a b activation-bytes=11",
        "p:7: edge a b: activation-bytes is 11, and a ",
    ),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_is_wrong_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_layer_profile(text, "p")
    assert words in str(caught.value)
    assert str(caught.value).startswith("p:")
    assert len(str(caught.value)) < 250


def test_files_that_are_no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary").write_bytes(b"\x00\x01\x02")
    (tmp_path / "latin").write_bytes(b"parplan-layer-profile 1\nmodel \xe9\n")
    (tmp_path / "long").write_bytes(b" " * 1001)
    monkeypatch.setattr("parplan.fields._MOST_BYTES", 1000)
    for name, words in (
        ("binary", "it is binary, not text; a layer profile is text that begins"),
        ("latin", "not text in UTF-8 (byte 30)"),
        ("long", "it is longer than"),
        ("", "that is a folder; a layer profile is text"),
        ("none", "No such file"),
    ):
        with pytest.raises(ProfileError, match=re.escape(words)):
            load_layer_profile(tmp_path / name)


# ---- documentation --------------------------------------------------------------------------------------------------


def code_block(language: str) -> str:
    text = (ROOT / "docs/profile-graph.md").read_text(encoding="utf-8")
    return text.split(f"```{language}\n")[1].partition("```")[0]


def test_the_documented_profile_is_one() -> None:
    profile = parse_layer_profile(code_block(""))
    assert (profile.model, profile.batch, len(profile.layers), len(profile.edges)) == ("two-branches", 256, 6, 6)


GRAPH_TXT = """\
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=22.5, backward_compute_time=6.0, \
activation_size=400.000, parameter_size=93184.000
node1 -- Input -- forward_compute_time=635.9, backward_compute_time=0.000, activation_size=154.000, parameter_size=0.000
node3 -- Linear(in_features=9216, out_features=4096, bias=True) -- forward_compute_time=1.75, \
backward_compute_time=3.5, activation_size=100.000, parameter_size=200.000
\tnode1 -- node2
\tnode2 -- node3
"""


def converted(tmp_path: Path, graph: str) -> LayerProfile:
    (tmp_path / "convert.py").write_text(code_block("python"))
    (tmp_path / "graph.txt").write_text(graph)
    command = [sys.executable, "convert.py", "graph.txt", "64", "one Titan X"]
    return parse_layer_profile(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)


def test_the_documented_conversion_of_pipedream_profiles(tmp_path: Path) -> None:
    conv = ProfiledLayer("Conv2d.node2", (Times(64, 0.0225, 0.006),), 400, 93184, 400, "conv")
    cut = (AxisCut("out-features", 4096, Effect.OUTPUT),)
    linear = ProfiledLayer("Linear.node3", (Times(64, 0.00175, 0.0035),), 100, 200, 0, "linear", cuts=cut)
    loss = ProfiledLayer("loss", (Times(64, 0, 0),), 4, 0, kind="loss")
    edges = (ProfileEdge("Conv2d.node2", "Linear.node3"), ProfileEdge("Linear.node3", "loss"))
    assert converted(tmp_path, GRAPH_TXT) == LayerProfile("profile", 64, "one Titan X", (conv, linear, loss), edges)


class Block(nn.Module):
    """The start of a residual network; notes in PipeDream's words what ran and what came out."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = nn.ModuleList([
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 8),
        ])  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        nodes, edges, at = [], ["\tnode0 -- node1"], 0
        nodes.append(
            "node0 -- Input -- forward_compute_time=0, backward_compute_time=0, activation_size=0, parameter_size=0"
        )

        def note(text: str, *before: int) -> None:
            nonlocal at
            at += 1
            times = "forward_compute_time=1.0, backward_compute_time=1.0"
            nodes.append(f"node{at} -- {text} -- {times}, activation_size={4.0 * x.numel()}, parameter_size=0.0")
            edges.extend(f"\tnode{other} -- node{at}" for other in before if other)

        for number, op in enumerate(self.ops):
            if number == 4:
                kept, kept_at = x, at
            if number == 9:
                x += kept
                note("Add(inplace)", at, kept_at)
            x = op(x)
            note("ReLU(inplace)" if isinstance(op, nn.ReLU) else f"{type(op).__name__}()", at)
        return x, "\n".join([*nodes, *edges]) + "\n"


def test_the_documented_conversion_counts_what_autograd_saves(tmp_path: Path) -> None:
    model, images, saved = Block(), torch.zeros(2, 3, 16, 16), {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (images, *model.parameters(), *model.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dim() == 4:  # not a norm's statistics of channels
            saved[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _result, graph = model(images)
    profile = converted(tmp_path, graph)
    assert sum(layer.saved_bytes or 0 for layer in profile.layers) == sum(nbytes for _, nbytes in saved.values())

"""`gpu=` as cuda-convnet2 reads it: replicas, inheritance, and what it would have refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import parplan
from parplan.convnet2 import read
from parplan.pins import Pin
from tests.convnet2.layer_files import COST, DATA, SMALL, fixture, write

FC = "[{name}]\ntype=fc\ninputs={inputs}\noutputs=4\n"


def chain(**layers: str) -> str:
    """Fully-connected layers: `b="a gpu=0,1"` takes a and has this line."""
    text = "[data]\ntype=data\ndataIdx=0\nend=4\n"
    for name, words in layers.items():
        inputs, _, gpu = words.partition(" ")
        text += FC.format(name=name, inputs=inputs) + (f"{gpu}\n" if gpu else "")
    return text


def places(folder: Path, text: str) -> dict[str, tuple[int, ...] | None]:
    return {pin.pattern: pin.devices for pin in read(write(folder, text)).pins}


INHERITED = [
    pytest.param(chain(a="data gpu=0,1", b="a", c="b gpu=1", d="c"), {"a": (0, 1), "b": (0, 1), "c": (1,), "d": (1,)},
                 id="from the layer above"),
    pytest.param(chain(a="data gpu=0", b="data gpu=1", c="b,a", d="a,b"), {"a": (0,), "b": (1,), "c": (1,), "d": (0,)},
                 id="from the first input"),
    pytest.param(chain(a="data gpu=2", b="data,a"), {"a": (2,), "b": (2,)}, id="data has no place"),
    pytest.param(chain(a="data", b="a", c="b gpu=0"), {"c": (0,)}, id="nothing to inherit"),
    pytest.param(chain(a="data", b="data gpu=1", c="a,b"), {"b": (1,)}, id="the first input has no place"),
    pytest.param(chain(a="data gpu=3,1"), {"a": (3, 1)}, id="in the file's order"),
    pytest.param(chain(a="data", b="a"), {}, id="no gpu, no pins"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "devices"), INHERITED)
def test_inheritance(tmp_path: Path, text: str, devices: dict[str, tuple[int, ...]]) -> None:
    found = read(write(tmp_path, text))
    assert {pin.pattern: pin.devices for pin in found.pins} == devices
    assert found.gpus == (1 + max(max(own) for own in devices.values()) if devices else None)


def test_pins_say_replicas_and_where_they_come_from(tmp_path: Path) -> None:
    pins = read(write(tmp_path, SMALL)).pins
    assert pins[:2] == (
        Pin("conv1", replicas=2, shards=1, devices=(0, 1), origin="layers-some.cfg [conv1]"),
        Pin("pool1", replicas=2, shards=1, devices=(0, 1), origin="layers-some.cfg [pool1], inherited"),
    )
    assert [pin.pattern for pin in pins[2:]] == ["fca", "fcb", "both", "fc2", "probs", "logprob"]


def test_layers_that_compute_nothing_have_no_pin(tmp_path: Path) -> None:
    text = chain(a="data gpu=0") + "[p]\ntype=pass\ninputs=a\ngpu=1\n[n]\ntype=neuron\nneuron=ident\ninputs=p\n"
    assert places(tmp_path, text) == {"a": (0,)}


def test_predictions_need_no_pins_of_costs(tmp_path: Path) -> None:
    found = read(write(tmp_path, SMALL))
    assert {pin.pattern for pin in found.pins} - {pin.pattern for pin in found.prediction_pins} == {"logprob"}


def test_names_are_no_patterns(tmp_path: Path) -> None:
    (pin,) = read(write(tmp_path, "[data]\ntype=data\ndataIdx=0\nend=4\n" + FC.format(name="f*", inputs="data")
                        + "gpu=0\n")).pins  # fmt: skip
    assert pin.matches("f*")
    assert not pin.matches("fc")


# (file, what cuda-convnet2 would have said)
REFUSED = [
    pytest.param(chain(a="data gpu=0,1", b="data gpu=2", c="a,b gpu=0"), ["c: the layers that feed it", "data: the"],
                 id="R2"),
    pytest.param(chain(a="data gpu=0,1", b="a gpu=0,1", c="a gpu=1"), ["a: the layers it feeds have"], id="R3"),
    pytest.param(chain(a="data gpu=0", b="a gpu=0,1"), ["a: the 2 replicas of b"], id="R4"),
    pytest.param(chain(a="data gpu=0,1", b="a gpu=0,1", c="b gpu=1"), [], id="nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_what_cuda_convnet2_would_have_refused_is_told(tmp_path: Path, text: str, said: list[str]) -> None:
    notes = [note for note in read(write(tmp_path, text)).notes if "refuses what parplan bridges" in note]
    assert len(notes) == (1 if said else 0)
    assert all(words in notes[0] for words in said)


SIZES = [
    ("type=conv\nchannels=3\nfilters=16\nfilterSize=3", ""),
    ("type=conv\nchannels=3\nfilters=24\nfilterSize=3", "filters that are no multiple of 16"),
    ("type=pool\npool=max\nchannels=3\nsizeX=2\nstride=2", "channels that are no multiple of 16"),
]


@pytest.mark.parametrize(("keys", "said"), SIZES)
def test_sizes_its_kernels_refuse_are_told(tmp_path: Path, keys: str, said: str) -> None:
    text = DATA.format(end=192).partition("[labels]")[0] + f"[c]\ninputs=data\n{keys}\n"
    notes = read(write(tmp_path, text)).notes
    assert [said in note for note in notes] == ([True] if said else [])


def test_functions_of_the_file_are_not_run(tmp_path: Path) -> None:
    text = SMALL.replace("outputs=10", "outputs=10\ninitWFunc=nothing.there(1)")
    assert any("fc2 are not run" in note for note in read(write(tmp_path, text)).notes)


@pytest.mark.full
def test_the_fixtures_are_cuda_convnet2s() -> None:
    """It would have refused none of them."""
    for name in ("2gpu-model", "4gpu-data-model"):
        assert not [note for note in fixture(name).notes if "refuse" in note]


@pytest.mark.parametrize("name", ["costs", "data", "float", "forward", "training"])
def test_names_that_a_module_has_already_are_refused(tmp_path: Path, name: str) -> None:
    text = chain(a="data").replace("[data]", "[images]").replace("inputs=data", "inputs=images")
    with pytest.raises(Exception, match="cannot have a layer of this name; rename it"):
        read(write(tmp_path, text.replace("[a]", f"[{name}]")))


def test_labels_are_not_data(tmp_path: Path) -> None:
    text = DATA.format(end=4) + FC.format(name="fc2", inputs="data,labels") + COST
    with pytest.raises(Exception, match="logprob takes it as labels, other layers as data; make two of it"):
        read(write(tmp_path, text))


UNLIKE = (
    DATA.format(end=192)
    + "[a]\ntype=conv\ninputs=data\nchannels=3\nfilters=4\nfilterSize=3\npadding=1\ninitW=0.3\nsharedBiases=0\ngpu=0\n"
    "[b]\ntype=neuron\ninputs=data\nneuron=softrelu\ngpu=1\n"
    "[c]\ntype=conv\ninputs=a,b\nchannels=4,3\nfilters=4\nfilterSize=3,5\npadding=1,2\ninitW=0.3\ngpu=0,1\n"
    "[p]\ntype=pass\ninputs=c\ngpu=1\n[r]\ntype=rnorm\ninputs=p\nchannels=4\nsize=3\n"
    "[e]\ntype=eltsum\ninputs=r,c\ngpu=0,1\n"
    "[fc2]\ntype=fc\ninputs=e,a\noutputs=10\ninitW=0.1\ngpu=1\n" + COST
)


@pytest.mark.full
def test_what_cuda_convnet2_refuses_runs_with_the_plain_numbers(tmp_path: Path) -> None:
    """Replicas that grow and differ, filters of two sizes in one layer, biases per position, a pass that passes."""
    found = read(write(tmp_path, UNLIKE))
    assert any("and 4 more" in note for note in found.notes)
    checked = parplan.verify(found.network, found.example_inputs(4), pins=found.pins)
    assert checked.passed
    devices = {name: strategy.devices for name, strategy in checked.plan.layers.items()}
    assert {name: own for name, own in devices.items() if name.startswith("c.")} == {
        "c.conv2d": (0, 1), "c.conv2d_1": (0, 1), "c.add": (0, 1),
    }  # fmt: skip
    assert (devices["a"], devices["b"], devices["r"], devices["fc2"]) == ((0,), (1,), (1,), (1,))

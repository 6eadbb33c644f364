"""What each type of layer computes, against loops over single numbers and closed forms."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parplan.convnet2 import LayerFile, read
from tests.convnet2 import oracle
from tests.convnet2.layer_files import write

SIDE, CHANNELS = 9, 4
HEAD = "[data]\ntype=data\ndataIdx=0\n"
LABELS = "[labels]\ntype=data\ndataIdx=1\n"
END = "[probs]\ntype=softmax\ninputs=fc\n[logprob]\ntype=cost.logreg\ninputs=labels,probs\n"


def loaded(folder: Path, text: str, params: str | None = None) -> LayerFile:
    """A file read with a fixed seed, its network in double precision."""
    torch.manual_seed(0)
    if params is not None:
        write(folder, params, "layer-params-some.cfg")
    found = read(write(folder, text), shapes={0: (CHANNELS, SIDE, SIDE)})
    found.network.double()
    return found


def images(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)


def layer(text: str, name: str = "layer") -> str:
    return f"{HEAD}[{name}]\ninputs=data\n{text}\n"


# (keys of the layer, (size, stride, padding, groups))
CONVS = [
    pytest.param("filterSize=3", (3, 1, 0, 1), id="defaults"),
    pytest.param("filterSize=3\nstride=2\npadding=1", (3, 2, 1, 1), id="even"),
    pytest.param("filterSize=4\nstride=3", (4, 3, 0, 1), id="hangs over"),
    pytest.param("filterSize=4\nstride=3\npadding=1", (4, 3, 1, 1), id="border and hangs over"),
    pytest.param("filterSize=3\ngroups=2", (3, 1, 0, 2), id="groups"),
]


@pytest.mark.parametrize(("keys", "way"), CONVS)
def test_conv(tmp_path: Path, keys: str, way: tuple[int, int, int, int]) -> None:
    size, stride, padding, groups = way
    found = loaded(tmp_path, layer(f"type=conv\nchannels={CHANNELS}\nfilters=3\ninitW=1\ninitB=0.25\n{keys}"))
    weight = found.network.get_submodule("layer").get_parameter("weight")
    assert weight.shape == (3 * groups, CHANNELS // groups, size, size)
    expected = torch.stack([oracle.conv(x, weight, stride, padding, groups) + 0.25 for x in images()])
    torch.testing.assert_close(found.network(images()), expected)


@pytest.mark.parametrize(("sizes", "names"), [("3", {"weight", "bias"}), ("3,5", {"weight_0", "weight_1", "bias"})])
def test_conv_sums_its_inputs(tmp_path: Path, sizes: str, names: set[str]) -> None:
    """Inputs under like filters share one weight; under unlike ones each has its own."""
    padding = "1" if sizes == "3" else "1,2"
    text = HEAD + f"[a]\ntype=neuron\nneuron=linear[2,1]\ninputs=data\n[layer]\ntype=conv\ninputs=data,a\nfilters=3\n" \
        f"channels={CHANNELS},{CHANNELS}\nfilterSize={sizes}\npadding={padding}\ninitW=1,0.5\n"  # fmt: skip
    found = loaded(tmp_path, text)
    weights = dict(found.network.get_submodule("layer").named_parameters())
    assert weights.keys() == names
    first, second = weights["weight"].split(CHANNELS, 1) if "weight" in weights else (weights["weight_0"],
                                                                                     weights["weight_1"])  # fmt: skip
    parts = [(x, first, 1) for x in images()], [(2 * x + 1, second, second.shape[-1] // 2) for x in images()]
    expected = [torch.stack([oracle.conv(x, w, 1, p, 1) for x, w, p in part]) for part in parts]
    torch.testing.assert_close(found.network(images()), expected[0] + expected[1])


def test_weights_are_as_deep_as_the_file_says(tmp_path: Path) -> None:
    text = HEAD + "[layer]\ntype=fc\ninputs=data,data\noutputs=300\ninitW=0.5,0.02\ninitB=-7\n"
    weight = loaded(tmp_path, text).network.get_submodule("layer").get_parameter("weight")
    spreads = [float(part.std()) for part in weight.detach().split(CHANNELS * SIDE * SIDE, 1)]
    assert spreads == [pytest.approx(0.5, rel=0.02), pytest.approx(0.02, rel=0.02)]
    assert set(loaded(tmp_path, text).network.get_submodule("layer").get_parameter("bias").tolist()) == {-7}


def test_biases_of_their_own_at_every_position(tmp_path: Path) -> None:
    found = loaded(tmp_path, layer(f"type=conv\nchannels={CHANNELS}\nfilters=3\nfilterSize=3\ninitW=1\nsharedBiases=0"))
    conv = found.network.get_submodule("layer")
    assert conv.get_parameter("bias").shape == (3, 7, 7)
    with torch.no_grad():
        conv.get_parameter("bias").normal_()
    expected = torch.stack([oracle.conv(x, conv.get_parameter("weight"), 1, 0, 1) for x in images()])
    torch.testing.assert_close(found.network(images()), expected + conv.get_parameter("bias"))


# (keys, (size, stride, start, outputs))
POOLS = [
    pytest.param("sizeX=3\nstride=2", (3, 2, 0, 4), id="even"),
    pytest.param("sizeX=4\nstride=3", (4, 3, 0, 3), id="hangs over"),
    pytest.param("sizeX=2\nstride=2", (2, 2, 0, 5), id="one pixel left"),
    pytest.param("sizeX=3\nstride=2\nstart=1", (3, 2, 1, 4), id="later start"),
    pytest.param("sizeX=4\nstride=2\nstart=-2", (4, 2, -2, 5), id="earlier start"),
    pytest.param("sizeX=4\nstride=3\nstart=-1", (4, 3, -1, 3), id="earlier start, even"),
    pytest.param("sizeX=3\nstride=2\noutputsX=2", (3, 2, 0, 2), id="fewer outputs"),
]


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize(("keys", "way"), POOLS)
def test_pool(tmp_path: Path, kind: str, keys: str, way: tuple[int, int, int, int]) -> None:
    found = loaded(tmp_path, layer(f"type=pool\npool={kind}\nchannels={CHANNELS}\n{keys}"))
    expected = torch.stack([oracle.pool(x, kind, *way) for x in images()])
    torch.testing.assert_close(found.network(images()), expected)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["cmrnorm", "rnorm"])
def test_norms(tmp_path: Path, kind: str, size: int) -> None:
    found = loaded(tmp_path, layer(f"type={kind}\nchannels={CHANNELS}\nsize={size}"),
                   "[layer]\nscale=0.5\npow=0.75\nminDiv=2\n")  # fmt: skip
    one = oracle.cross_map_norm if kind == "cmrnorm" else oracle.same_map_norm
    expected = torch.stack([one(x, size, 0.5, 0.75, 2.0) for x in images()])
    torch.testing.assert_close(found.network(images()), expected)


def test_norms_without_a_layer_parameter_file_say_what_they_take(tmp_path: Path) -> None:
    found = loaded(tmp_path, layer(f"type=cmrnorm\nchannels={CHANNELS}\nsize=3"))
    expected = torch.stack([oracle.cross_map_norm(x, 3, 1e-4, 0.75, 1.0) for x in images()])
    torch.testing.assert_close(found.network(images()), expected)
    assert any("layer; scale 0.0001" in note for note in found.notes)


NEURONS = [
    ("ident", lambda x: x),
    ("abs", abs),
    ("logistic", lambda x: 1 / (1 + math.exp(-x))),
    ("relu", lambda x: max(x, 0.0)),
    ("softrelu", lambda x: math.log(1 + math.exp(x))),
    ("square", lambda x: x * x),
    ("tanh[1.7,0.6]", lambda x: 1.7 * math.tanh(0.6 * x)),
    ("brelu[0.5]", lambda x: min(0.5, max(x, 0.0))),
    ("linear[-2,3]", lambda x: 3 - 2 * x),
    ("drelu[0.5]", lambda x: x - 0.5 * math.tanh(x / 0.5)),
    ("log[9]", lambda x: math.log(9 + x)),
]


@pytest.mark.parametrize(("name", "function"), NEURONS, ids=[name for name, _ in NEURONS])
def test_neurons(tmp_path: Path, name: str, function: object) -> None:
    assert callable(function)
    found = loaded(tmp_path, layer(f"type=neuron\nneuron={name}"))
    expected = torch.tensor([function(x) for x in images().flatten().tolist()], dtype=torch.float64)
    torch.testing.assert_close(found.network(images()).flatten(), expected)


def test_sqrt_neuron(tmp_path: Path) -> None:
    found = loaded(tmp_path, layer("type=neuron\nneuron=sqrt"))
    torch.testing.assert_close(found.network(images().square()), images().abs())


@pytest.mark.parametrize("text", ["type=pool\npool=max\nchannels=4\nsizeX=3\nstride=3", "type=fc\noutputs=5\ninitW=1",
                                  "type=cmrnorm\nchannels=4\nsize=2", "type=rnorm\nchannels=4\nsize=2",
                                  "type=pass", "type=conv\nchannels=4\nfilters=2\nfilterSize=3\ninitW=1",
                                  "type=eltsum", "type=dropout"])  # fmt: skip
def test_a_neuron_in_any_layer(tmp_path: Path, text: str) -> None:
    plain = loaded(tmp_path, layer(text)).network.eval()
    bent = loaded(tmp_path, layer(text + "\nneuron=linear[3,1]")).network.eval()
    torch.testing.assert_close(bent(images()), 3 * plain(images()) + 1)


@pytest.mark.parametrize(("kind", "train", "test"), [("dropout", 1 / 0.8, 1.0), ("dropout2", 1.0, 0.8)])
def test_dropout(tmp_path: Path, kind: str, train: float, test: float) -> None:
    network = loaded(tmp_path, layer(f"type={kind}"), "[layer]\nkeep=0.8\n").network
    x = images(200)
    torch.manual_seed(0)
    found = network(x)
    kept = found != 0
    assert float(kept.double().mean()) == pytest.approx(0.8, abs=0.01)
    torch.testing.assert_close(found[kept], x[kept] * train)
    torch.testing.assert_close(network.eval()(x), x * test)


@pytest.mark.parametrize(("kind", "factor"), [("dropout", 1.0), ("dropout2", 0.5)])
def test_dropout_switched_off(tmp_path: Path, kind: str, factor: float) -> None:
    network = loaded(tmp_path, layer(f"type={kind}"), "[layer]\nenable=false\n").network
    torch.testing.assert_close(network.train()(images()), images() * factor)


def test_pass_lays_maps_on_maps_and_vectors_on_vectors(tmp_path: Path) -> None:
    text = layer("type=neuron\nneuron=square", "a") + "[maps]\ntype=pass\ninputs=a,data\n[f]\ntype=fc\ninputs=a\n" \
        "outputs=3\n[flat]\ntype=concat\ninputs=data,f\n"  # fmt: skip
    network = loaded(tmp_path, text).network
    maps, flat = network(images())
    torch.testing.assert_close(maps, torch.cat([images().square(), images()], 1))
    assert flat.shape == (2, CHANNELS * SIDE * SIDE + 3)
    torch.testing.assert_close(flat[:, :-3], images().reshape(2, -1))


def test_eltsum(tmp_path: Path) -> None:
    text = layer("type=neuron\nneuron=square", "a") + "[s]\ntype=eltsum\ninputs=a,data,a\n"
    network = loaded(tmp_path, text, "[s]\ncoeffs=0.5,-1,1\n").network
    torch.testing.assert_close(network(images()), 1.5 * images().square() - images())


def test_a_vector_taken_from_maps_runs_over_maps_rows_columns(tmp_path: Path) -> None:
    found = loaded(tmp_path, layer("type=fc\noutputs=5\ninitW=1"))
    weight = found.network.get_submodule("layer").get_parameter("weight")
    torch.testing.assert_close(found.network(images()), images().reshape(2, -1) @ weight.T)


@pytest.mark.parametrize("coeff", [1.0, 0.5])
def test_cost_and_predictions(tmp_path: Path, coeff: float) -> None:
    text = layer("type=fc\noutputs=6\ninitW=1", "fc") + LABELS + END
    found = loaded(tmp_path, text, f"[logprob]\ncoeff={coeff}\ntopk=5\n")
    labels = torch.tensor([2, 5])
    probabilities = found.network(images()).detach()
    costs = found.network(images(), labels)
    assert costs.shape == (2,)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(2, dtype=torch.float64))
    expected = [-coeff * math.log(float(probabilities[row, label])) for row, label in enumerate(labels)]
    torch.testing.assert_close(costs, torch.tensor(expected, dtype=torch.float64))
    assert found.classes == 6


def test_a_certain_mistake_costs_what_it_should(tmp_path: Path) -> None:
    """The probability is far below the smallest number there is; its logarithm is not."""
    found = loaded(tmp_path, layer("type=fc\noutputs=2\ninitW=1", "fc") + LABELS + END)
    fc = found.network.get_submodule("fc")
    with torch.no_grad():
        fc.get_parameter("weight").zero_()
        fc.get_parameter("bias").copy_(torch.tensor([0.0, 2000.0]))
    cost = found.network(images(1), torch.tensor([0]))
    cost.sum().backward()
    assert cost.item() == pytest.approx(2000.0)
    bias = fc.get_parameter("bias")
    assert bias.grad is not None
    assert bias.grad.tolist() == [-1.0, 1.0]


def test_probabilities_that_other_layers_take_are_probabilities(tmp_path: Path) -> None:
    text = layer("type=fc\noutputs=6\ninitW=1", "fc") + "[p]\ntype=softmax\ninputs=fc\n[s]\ntype=eltsum\ninputs=p\n"
    network = loaded(tmp_path, text).network
    torch.testing.assert_close(network(images()).sum(1), torch.ones(2, dtype=torch.float64))


def test_wrong_number_of_inputs(tmp_path: Path) -> None:
    network = loaded(tmp_path, layer("type=fc\noutputs=6", "fc") + LABELS + END).network
    for given in ((), (images(), torch.zeros(2), torch.zeros(2))):
        with pytest.raises(TypeError, match="data layers data, labels; give one for each"):
            network(*given)


def test_every_layer_is_a_module_of_the_files_own_name(tmp_path: Path) -> None:
    network = loaded(tmp_path, layer("type=fc\noutputs=6", "fc") + LABELS + END).network
    assert [name for name, _ in network.named_modules()] == ["", "fc", "probs", "logprob"]
    assert isinstance(network, nn.Module)

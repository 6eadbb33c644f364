"""Every mistake in a layer file is refused with file, section, key, value, and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from parplan.convnet2 import read
from parplan.convnet2.ini import read_sections
from parplan.errors import LayerFileError
from tests.convnet2.layer_files import SMALL, write

CONV = "filters=8\nfilterSize=5\n"

# (what is replaced in the small file, by what, what the message says)
MISTAKES = [
    pytest.param("type=softmax", "type=local", "[probs] type=local: it is not known here; types are data, conv,",
                 id="layer type"),
    pytest.param("type=softmax", "tipe=softmax", "[probs] type: it is missing", id="no type"),
    pytest.param("sizeX=2", "sizex=2\nsiseY=2", "[pool1] sisey=2: this key of a layer of type pool is not known here",
                 id="unknown key"),
    pytest.param("stride=2\n", "strid=2\n", "[conv1] strid=2: this key of a layer of type conv is not known here; "
                 "did you mean stride?", id="key with a typo"),
    pytest.param("[fcb]", "[fca]", "[fca]: it stands there twice (line", id="section twice"),
    pytest.param("filters=8", "filters=8\nfilters=9", "[conv1] filters: it is given twice", id="key twice"),
    pytest.param("filters=8", "filters 8", "is no layer file", id="no key"),
    pytest.param("filters=8", "filters=eight", "[conv1] filters=eight: 'eight' is not a whole number", id="no number"),
    pytest.param("filters=8", "filters=1e99", "[conv1] filters=1e99: '1e99' is not a whole number", id="power"),
    pytest.param("filters=8", "filters=99999999999", "of a plausible size", id="huge number"),
    pytest.param("initW=0.2", "initW=nan", "[conv1] initW=nan: 'nan' is not a number of a plausible size", id="nan"),
    pytest.param("filters=8", "filters=0", "[conv1] filters=0: it must be at least 1", id="too small"),
    pytest.param("filters=8", "filters=8,8,8", "[conv1] filters=8,8,8: 3 values for 1 inputs; give one", id="list"),
    pytest.param("filters=8\n", "", "[conv1] filters: it is missing; add a line filters=...", id="key missing"),
    pytest.param("filters=8\n", "filters=\n", "[conv1] filters=: it is missing", id="value missing"),
    pytest.param("inputs=fca,fcb", "inputs=fca,,fcb", "[both] inputs=fca,,fcb: a name is empty", id="empty name"),
    pytest.param("inputs=fca,fcb", "inputs=fca,fcc", "[both] inputs=fca,fcc: there is no layer fcc; did you mean fcb?",
                 id="no such input"),
    pytest.param("inputs=fca,fcb", "inputs=fca,probs", "probs stands below; a layer takes layers above it only",
                 id="input below"),
    pytest.param("inputs=fca,fcb", "inputs=fca", "[fcb] type=fc: no layer takes what it gives", id="unused layer"),
    pytest.param("pool=max", "pool=maxabs", "[pool1] pool=maxabs: it must be max or avg", id="pool"),
    pytest.param("neuron=tanh[1.7,0.6]", "neuron=tanh[1.7]", "[fcb] neuron=tanh[1.7]: write it as tanh[a,b]",
                 id="numbers of a neuron"),
    pytest.param("neuron=tanh[1.7,0.6]", "neuron=tanh[a,b]", "write it as tanh[a,b], with numbers", id="letters"),
    pytest.param("neuron=tanh[1.7,0.6]", "neuron=nrelu", "[fcb] neuron=nrelu: it is not known here; use ident, abs,",
                 id="neuron"),
    pytest.param("channels=3", "channels=4", "[data] end=432: 432 are no square maps of 4 channels", id="data size"),
    pytest.param("channels=8", "channels=16", "[pool1] channels=16: conv1 gives 8 maps of 5 x 5; write channels=8",
                 id="channels"),
    pytest.param("filterSize=5", "filterSize=13", "filters of 13 do not fit on 12 pixels with a border of 0",
                 id="filter too large"),
    pytest.param("filters=8", "filters=8\ngroups=2", "[conv1] groups=2: 3 channels", id="groups"),
    pytest.param("filters=8", "filters=8\nrandSparse=1", "[conv1] randSparse=1: filters that see some maps",
                 id="sparse filters"),
    pytest.param("filters=8", "filters=8\nsharedBiases=maybe", "[conv1] sharedBiases=maybe: it must be 0 or 1",
                 id="flag"),
    pytest.param("sizeX=2", "sizeX=6", "[pool1] sizeX=6: a window of 6 is more than the 5 pixels", id="pool too large"),
    pytest.param("sizeX=2", "sizeX=1", "[pool1] stride=2: windows of 1 would leave pixels out", id="pool stride"),
    pytest.param("sizeX=2", "sizeX=2\nstart=-2", "[pool1] start=-2: half of a window of 2", id="pool start"),
    pytest.param("sizeX=2", "sizeX=2\noutputsX=9", "[pool1] outputsX=9: 3 windows cover the image", id="outputsX"),
    pytest.param("pool=max", "pool=avg\nsum=1", "[pool1] sum=1: sums over windows are not known here", id="pool sum"),
    pytest.param("inputs=pool1\noutputs=12\ninitW=0.1\nneuron=relu\ngpu=0", "inputs=pool1\noutputs=12\ngpu=0,0",
                 "[fca] gpu=0,0: replicas have to be on different devices", id="device twice"),
    pytest.param("gpu=0,1", "gpu=0,-1", "[conv1] gpu=0,-1: it must be at least 0", id="negative device"),
    pytest.param("gpu=0,1", "gpu=0,123456", "[conv1] gpu=0,123456: devices are counted from 0", id="far device"),
    pytest.param("inputs=labels,probs", "inputs=probs,labels", "a logistic cost takes a data layer of labels",
                 id="cost"),
    pytest.param("inputs=labels,probs", "inputs=labels,fc2", "and a layer of type softmax", id="cost without softmax"),
    pytest.param("dataIdx=1", "dataIdx=2", "[labels] dataIdx=2: data layers are arguments", id="gap in dataIdx"),
    pytest.param("dataIdx=1", "dataIdx=1\nstart=5", "[labels] start=5: data layers begin", id="start of data"),
    pytest.param("[both]", "[a.b]", "[a.b]: a torch module cannot have a layer of this name", id="name with a dot"),
    pytest.param("[fca]\ntype=fc", "[pool]\ntype=fc\nneuron=relu\n[float]\ntype=fc", "is missing", id="rest missing"),
    pytest.param("inputs=fc2", "inputs=fc2,fca", "[probs] inputs=fc2,fca: a layer of type softmax takes one input",
                 id="one input"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES)
def test_mistakes(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in SMALL
    file = write(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(LayerFileError) as refused:
        read(file)
    assert said in str(refused.value)
    assert file.name in str(refused.value)


# (a whole file, what the message says)
FILES = [
    pytest.param("type=data\n[a]\n", "line 1, 'type=data', stands before any section; it has sections [name] and lines",
                 id="no section"),
    pytest.param("", "has no layers; a layer is a section", id="empty"),
    pytest.param("[a]\ntype=fc\ninputs=a\noutputs=3\n", "it takes itself; take a layer above it", id="its own input"),
    pytest.param("[a]\ntype=neuron\nneuron=relu\n", "inputs: it is missing", id="no inputs"),
    pytest.param("[data]\ntype=data\ndataIdx=0\n", "no layer takes it; leave it out", id="data alone"),
    pytest.param("[d]\ntype=data\ndataIdx=0\n[f]\ntype=fc\ninputs=d\noutputs=2\n", "add end=, the numbers in one",
                 id="size of a sample"),
    pytest.param("[d]\ntype=data\ndataIdx=0\nend=4\n[f]\ntype=fc\ninputs=d\noutputs=2\n[c]\ntype=conv\ninputs=f\n"
                 "channels=2\nfilters=2\nfilterSize=1\n", "f gives 2 numbers; this type needs maps", id="no maps"),
    pytest.param("[d]\ntype=data\ndataIdx=0\nend=4\n[n]\ntype=neuron\ninputs=d\n", "add a line such as neuron=relu",
                 id="no neuron"),
    pytest.param("[d]\ntype=data\ndataIdx=0\nend=12\n[n]\ntype=cmrnorm\ninputs=d\nchannels=3\nsize=5\n",
                 "size=5: there are 3 maps only; use up to 3", id="maps of a norm"),
    pytest.param("[d]\ntype=data\ndataIdx=0\nend=12\n[n]\ntype=rnorm\ninputs=d\nchannels=3\nsize=2\nblocked=1\n",
                 "blocked=1: normalising block by block is not known here", id="blocked norm"),
    pytest.param("[d]\ntype=data\ndataIdx=0\nend=4\n[e]\ntype=data\ndataIdx=1\nend=5\n[s]\ntype=eltsum\ninputs=d,e\n",
                 "[s] inputs=d,e: e gives 5 numbers, the first 4 numbers", id="sum of unlike"),
    pytest.param("[d]\ntype=data\ndataIdx=0\nend=48\n[c]\ntype=conv\ninputs=d,d\nchannels=3\nfilters=2\nfilterSize=1,3\n",
                 "[c] inputs=d,d: they give 4 x 4 and 2 x 2 positions", id="positions differ"),
    pytest.param("[d]\ntype=data\ndataIdx=0\nend=48\n[c]\ntype=conv\ninputs=d,d\nchannels=3\nfilters=2,4\nfilterSize=1\n",
                 "filters x groups has to be the same for every input", id="filters differ"),
]  # fmt: skip


@pytest.mark.parametrize("begin", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_what_editors_write_is_the_same_file(tmp_path: Path, begin: str, end: str) -> None:
    plain = read_sections(write(tmp_path, SMALL))
    file = tmp_path / "layers-some.cfg"
    file.write_bytes((begin + SMALL.replace("\n", end)).encode())
    assert read_sections(file) == plain


@pytest.mark.parametrize(("text", "said"), FILES)
def test_files(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LayerFileError) as refused:
        read(write(tmp_path, text))
    assert said in str(refused.value)


# (the layer-parameter file, what the message says)
PARAMS = [
    pytest.param("[fcc]\nwc=0\n", "[fcc]: layers-some.cfg has no such layer; did you mean [fcb]?", id="no such layer"),
    pytest.param("[fca]\nepsw=1\nmomV=2\n", "[fca] momv=2: this key of a layer of type fc is not known here; did you "
                 "mean mom", id="key"),
    pytest.param("[fca]\nepsW=fast\n", "[fca] epsW=fast: it is no learning rate; write a number, or lin", id="rate"),
    pytest.param("[fca]\nepsW=dexp[base=0.1]\n", "it is no learning rate", id="schedule without its numbers"),
    pytest.param("[fca]\nepsW=0.1\nepsB=0.1\nmomW=0.9\nmomB=0.9\nupdatePeriod=-1\n", "it must be at least 0",
                 id="period"),
    pytest.param("[fca]\nepsW=0.1,0.2\nepsB=0.1\nmomW=0.9\nmomB=0.9\n", "share one learning rate here", id="two rates"),
    pytest.param("[fca]\nepsW=0.1\nepsB=0.1\nmomW=0.9,0.8\nmomB=0.9\n", "share one number here", id="two momenta"),
    pytest.param("[fca]\nepsW=0.1\nepsB=0.1\nmomB=0.9\n", "[fca] momW: it is missing", id="no momentum"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), PARAMS)
def test_layer_parameter_files(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path, text, "layer-params-some.cfg")
    with pytest.raises(LayerFileError) as refused:
        read(write(tmp_path, SMALL))
    assert said in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LayerFileError, match=r"cannot read .*none\.cfg: No such file"):
        read(tmp_path / "none.cfg")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "layers.cfg").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayerFileError, match="it is no text"):
        read(tmp_path / "layers.cfg")


def test_keys_have_no_case_and_comments_are_skipped(tmp_path: Path) -> None:
    text = SMALL.replace("sizeX=2", "# windows\nSIZEx = 2 ; pixels").replace("stride=2\n", "stride: 2\n")
    found, plain = read(write(tmp_path, text)), read(write(tmp_path, SMALL))
    assert str(found.network) == str(plain.network)
    assert found.pins == plain.pins

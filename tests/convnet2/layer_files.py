"""Layer files for the tests: a small one, and the five configurations of the guide at a fraction of their sizes."""

from __future__ import annotations

import re
from pathlib import Path

from parplan.convnet2 import LayerFile, read

ROOT = Path(__file__).resolve().parent.parent.parent
FIXTURES = ROOT / "examples" / "seeds" / "cuda_convnet2"
NAMES = ("1gpu", "2gpu-data", "2gpu-model", "4gpu-data", "4gpu-data-model")

DATA = "[data]\ntype=data\ndataIdx=0\nend={end}\n[labels]\ntype=data\ndataIdx=1\n"
COST = "[probs]\ntype=softmax\ninputs=fc2\n[logprob]\ntype=cost.logreg\ninputs=labels,probs\n"

# Images of 3 x 12 x 12, ten classes.
SMALL = (
    DATA.format(end=432)
    + """
[conv1]
type=conv
inputs=data
channels=3
filters=8
filterSize=5
stride=2
initW=0.2
neuron=relu
gpu=0,1

[pool1]
type=pool
pool=max
inputs=conv1
channels=8
sizeX=2
stride=2

[fca]
type=fc
inputs=pool1
outputs=12
initW=0.1
neuron=relu
gpu=0

[fcb]
type=fc
inputs=pool1
outputs=12
initW=0.1
neuron=tanh[1.7,0.6]
gpu=1

[both]
type=pass
inputs=fca,fcb
gpu=0

[fc2]
type=fc
inputs=both
outputs=10
initW=0.1
"""
    + COST
)


def write(folder: Path, text: str, name: str = "layers-some.cfg") -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def fixture(name: str) -> LayerFile:
    """One of the five, at full size."""
    return read(FIXTURES / f"layers-{name}.cfg")


def scaled(text: str, classes: int = 10) -> str:
    """The same layers with an eighth of the filters, a 64th of the units, and initial weights that suit."""

    def divided(line: re.Match[str]) -> str:
        by = 64 if line["key"] == "outputs" else 8
        kept = {3: 3, 1000: classes}
        sizes = [kept.get(int(size), int(size) // by) for size in line["sizes"].split(",")]
        return f"{line['key']}={','.join(map(str, sizes))}"

    text = re.sub(r"^(?P<key>filters|channels|outputs)=(?P<sizes>[\d,]+)$", divided, text, flags=re.MULTILINE)
    text = re.sub(r"0\.0[13](?=$|,)", "0.1", text, flags=re.MULTILINE)
    return re.sub(r"^initB=1$", "initB=0.1", text, flags=re.MULTILINE)


def sibling(folder: Path, name: str) -> Path:
    """One of the five, scaled down, with its layer-parameter file if it has one; images are to be 3 x 64 x 64."""
    params = FIXTURES / f"layer-params-{name}.cfg"
    if params.is_file():
        write(folder, params.read_text(encoding="utf-8"), params.name)
    file = FIXTURES / f"layers-{name}.cfg"
    return write(folder, scaled(file.read_text(encoding="utf-8")), file.name)

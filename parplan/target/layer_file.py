"""Targets that are cuda-convnet2 layer files: the network, its inputs, and the file's pins."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from parplan.convnet2 import LayerFile, read
from parplan.errors import TargetError
from parplan.target.inputs import from_options

__all__ = ["layer_file", "layer_file_inputs"]


def layer_file(target: str, inputs: Sequence[str], layer_params: str | None) -> LayerFile:
    """Read the file a command line names; shapes given as options say how large a sample is.

    Raises:
        TargetError: it is not there, or says something impossible.
    """
    path = Path(target)
    if path.is_dir():
        raise TargetError(f"{target}: that is a folder; name a layer file in it")
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.cfg") if file.is_file())
        near = difflib.get_close_matches(path.name, beside, n=2)
        hint = f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
        raise TargetError(f"{target}: no such file{hint}")
    if layer_params is not None and not Path(layer_params).is_file():
        raise TargetError(f"--layer-params {layer_params}: no such file")
    shapes = {place: tensor.shape[1:] for place, tensor in enumerate(_given(inputs)) if tensor.dim() > 1}
    return read(path, layer_params, shapes)


def layer_file_inputs(found: LayerFile, inputs: Sequence[str], batch: int | None) -> tuple[Tensor, ...]:
    """Data and labels of `batch` samples; default: of the first shape given, else 128 for every replica.

    Raises:
        TargetError: more tensors than data layers, or of another shape than the file's.
    """
    given = _given(inputs)
    count = batch if batch is not None else given[0].shape[0] if given else None
    examples = found.example_inputs(count)
    if len(given) > len(examples):
        raise TargetError(f"--input is given {len(given)} times for {len(examples)} data layers; give one for each")
    for tensor, data in zip(given, found.data.values(), strict=False):
        if tuple(tensor.shape[1:]) != data.shape:
            wanted = "x".join(map(str, ("N", *data.shape)))
            raise TargetError(f"--input {'x'.join(map(str, tensor.shape))}: {data.name} needs {wanted}")
    return examples


def _given(inputs: Sequence[str]) -> tuple[Tensor, ...]:
    """Tensors of the shapes given, in order of dataIdx.

    Raises:
        TargetError: one has a name, which data layers do not have.
    """
    found = from_options(inputs)
    if found is not None and found.kwargs:
        raise TargetError(f"--input {next(iter(found.kwargs))}=...: a layer file's inputs go by their dataIdx; leave "
                          "out the name")  # fmt: skip
    return found.args if found is not None else ()

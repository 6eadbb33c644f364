"""Targets that are cuda-convnet2 layer files: the network, its inputs, and the file's pins."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from parplan.convnet2 import read
from parplan.errors import TargetError
from parplan.target.inputs import Inputs, Target, from_options

__all__ = ["layer_file"]


def layer_file(target: str, inputs: Sequence[str], layer_params: str | None, batch: int | None) -> Target:
    """The network of the file a command line names, and data and labels of `batch` samples.

    Args:
        inputs: shapes by dataIdx, which say how large a sample is.
        batch: default: of the first shape given, else 128 for every replica.

    Raises:
        TargetError: the file is not there, or says something impossible; an input has a name, there are more of them
            than data layers, or one is of another shape than the file's.
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
    named = from_options(inputs) or Inputs((), {})
    if named.kwargs:
        raise TargetError(f"--input {next(iter(named.kwargs))}=...: a layer file's inputs go by their dataIdx; leave "
                          "out the name")  # fmt: skip
    given: tuple[Tensor, ...] = named.args
    shapes = {place: tensor.shape[1:] for place, tensor in enumerate(given) if tensor.dim() > 1}
    found = read(path, layer_params, shapes)
    count = batch if batch is not None else given[0].shape[0] if given else None
    examples = found.example_inputs(count)
    if len(given) > len(examples):
        raise TargetError(f"--input is given {len(given)} times for {len(examples)} data layers; give one for each")
    for tensor, data in zip(given, found.data.values(), strict=False):
        if tuple(tensor.shape[1:]) != data.shape:
            wanted = "x".join(map(str, ("N", *data.shape)))
            raise TargetError(f"--input {'x'.join(map(str, tensor.shape))}: {data.name} needs {wanted}")
    return Target(path.stem, found.network, examples, {}, found.pins, found.gpus, found.notes)

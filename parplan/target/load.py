"""The model and the inputs named on a command line: `model.py`, `model.py:name`, `package.module:name`.

A person's file is run here, so whatever it does wrong becomes one error that names the line; it sees no arguments of
ours, and what it prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from parplan.errors import TargetError
from parplan.target.candidates import build, choose
from parplan.target.inputs import Target, from_example, from_options, with_batch
from parplan.target.layer_file import layer_file
from parplan.target.model_library import LIBRARIES, library_model
from parplan.target.trouble import guarded

__all__ = ["load"]


@dataclass(frozen=True)
class _Place:
    """A target as parsed: a file or a module, and a name inside it (empty: look for one)."""

    text: str
    file: Path | None
    module: str
    name: str

    @property
    def stem(self) -> str:
        """The file's or the module's own name."""
        return self.file.stem if self.file else self.module.rpartition(".")[2]

    @property
    def folder(self) -> Path:
        """First folder of the import path: the file's own, for a module the current one."""
        return self.file.resolve().parent if self.file else Path.cwd()


def load(
    target: str,
    inputs: Sequence[str] = (),
    batch: int | None = None,
    layer_params: str | None = None,
    *,
    sequence: int | None = None,
    dtype: str | None = None,
    meta: bool = False,
) -> Target:
    """The model and the example inputs that a command line names.

    Args:
        target: `model.py` (its `model` or `build()`, else the only candidate), `model.py:name` or
            `package.module:name`; a name is a model, a class or a function that needs no arguments. Or a
            cuda-convnet2 layer file, `layers.cfg`, or a library's model, `transformers:gpt2`.
        inputs: `256x3x224x224`, `8x128:int64`, `mask=8x128:bool`; they replace the file's `example_inputs`.
        batch: samples in dimension 0 of every example tensor that has the examples' batch there.
        layer_params: the layer-parameter file of a layer file, where it is not the one beside it.
        sequence, dtype: tokens per sample, and the type of the weights, of a library's model.
        meta: build a library's model without weights.

    Raises:
        TargetError: nothing there, several candidates, no inputs, or an exception of the file's own.
    """
    if target.endswith(".cfg"):
        return layer_file(target, inputs, layer_params, batch)
    if layer_params is not None:
        raise TargetError(f"--layer-params goes with a cuda-convnet2 layer file, and {target} is none; leave it out")
    if target.partition(":")[0] in LIBRARIES:
        known, instead = library_model(target, batch, sequence, dtype, meta), from_options(inputs)
        return known if instead is None else replace(known, args=instead.args, kwargs=instead.kwargs)
    for name, value in (("--seq", sequence), ("--dtype", dtype)):
        if value is not None:
            raise TargetError(
                f"{name} {value} is for a library's model, transformers:gpt2; the inputs of {target} say it"
            )
    place = _place(target)
    given = from_options(inputs)
    with _quiet_import(place):
        source = guarded(lambda: _imported(place), f"{place.text}: importing it failed", place.folder)
        chosen = choose(source, place.text, place.name)
        module, examples = build(chosen, f"{place.text}: {chosen.words} failed", place.folder)
        examples = given or examples
        if examples is None:
            example = getattr(source, "example_inputs", None)
            if example is None:
                raise TargetError(
                    f"{place.text} has no example_inputs; add them (a tensor, a tuple of tensors, a dict, or a "
                    "function that returns one), or say the shapes: --input 64x3x224x224"
                )
            if callable(example):
                example = guarded(example, f"{place.text}: example_inputs() failed", place.folder)
            examples = from_example(example, f"{place.text}: example_inputs")
    examples = with_batch(examples, batch) if batch is not None else examples
    kind = type(module)
    # Containers of torch.nn say nothing: their name is the file's.
    name = place.stem if kind.__module__.startswith("torch.nn.") else kind.__name__
    return Target(name, module, examples.args, examples.kwargs)


def _place(target: str) -> _Place:
    if target.endswith(".py") or Path(target).is_file():
        return _file(target, target, "")
    head, colon, name = target.rpartition(":")
    path = Path(target)
    if not colon and not target.strip():
        raise TargetError("the target is empty; name a model.py, model.py:name or package.module:name")
    if not colon and Path(f"{target}.py").is_file():
        raise TargetError(f"{target} is not a file; did you mean {target}.py?")
    if not colon and path.is_dir():
        files = sorted(entry.name for entry in path.glob("*.py"))
        inside = f"; it holds {', '.join(files[:8])}" if files else ""
        raise TargetError(f"{target} is a folder; name a file in it{inside}")
    if not colon and "." in target and all(part.isidentifier() for part in target.split(".")):
        return _Place(target, None, target, "")
    if not colon:
        raise TargetError(f"{target}: no such file; a target is model.py, model.py:name or package.module:name")
    if not head or not name:
        raise TargetError(f"{target}: a name is missing; write model.py:name or package.module:name")
    if head.endswith(".py") or Path(head).is_file():
        return _file(target, head, name)
    if not all(part.isidentifier() for part in head.split(".")):
        raise TargetError(f"{target}: {head} is neither a .py file nor a module; write model.py:name")
    return _Place(target, None, head, name)


def _file(target: str, path: str, name: str) -> _Place:
    file = Path(path)
    if file.is_file():
        return _Place(target, file, "", name)
    if file.is_dir():
        raise TargetError(f"{path} is a folder; name a .py file in it")
    if not file.parent.is_dir():
        raise TargetError(f"{path}: no such file; there is no folder {file.parent}")
    names = sorted(entry.name for entry in file.parent.glob("*.py"))
    close = difflib.get_close_matches(file.name, names, n=3) or names[:5]
    hint = f"; did you mean {' or '.join(str(file.parent / name) for name in close)}?" if close else ""
    raise TargetError(f"{path}: no such file{hint}")


@contextlib.contextmanager
def _quiet_import(place: _Place) -> Iterator[None]:
    """The folder on the import path, no arguments of ours, and prints on standard error."""
    path, argv = list(sys.path), sys.argv
    sys.path.insert(0, str(place.folder))
    sys.argv = [str(place.file or place.module)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:], sys.argv = path, argv


def _imported(place: _Place) -> ModuleType:
    """The module; a file is imported under a name that hides no installed module of the same name."""
    file = place.file
    if file is None:
        return importlib.import_module(place.module)
    name = f"parplan_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

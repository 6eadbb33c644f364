"""Targets of every form, and one clear error for everything that is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import TargetError
from parplan.target import Target, load

HEAD = "import torch\nfrom torch import nn\n"
NET = "class Net(nn.Linear):\n    def __init__(self, width=3):\n        super().__init__(width, 2)\n"
INPUTS = "example_inputs = torch.zeros(4, 3)\n"


def write(folder: Path, text: str, name: str = "some_model.py") -> str:
    """A file with the usual imports; its path."""
    (folder / name).write_text(HEAD + text)
    return str(folder / name)


def shapes(target: Target) -> list[tuple[int, ...]]:
    """Of the positional inputs."""
    return [tuple(value.shape) for value in target.args]


# (the file, what follows its name, the model's width)
FORMS = [
    pytest.param("model = nn.Linear(3, 2)\n", "", 3, id="model"),
    pytest.param(NET + "model = Net\n", "", 3, id="model is a class"),
    pytest.param("def build():\n    return nn.Linear(3, 2)\n", "", 3, id="build"),
    pytest.param("model = nn.Linear(3, 2)\ndef build():\n    return nn.Linear(9, 2)\n", "", 3, id="model before build"),
    pytest.param("def model():\n    return nn.Linear(3, 2)\n", "", 3, id="model is a function"),
    pytest.param("net = nn.Linear(3, 2)\n", "", 3, id="the only instance"),
    pytest.param("net = nn.Linear(3, 2)\nalias = net\n", "", 3, id="an instance under two names"),
    pytest.param(NET, "", 3, id="the only class"),
    pytest.param(NET + "net = Net(5)\n", "", 5, id="a class and its instance"),
    pytest.param(NET + "class Block(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n", "", 3,
                 id="a class that needs arguments is no candidate"),
    pytest.param("def build_net(width=3):\n    return nn.Linear(width, 2)\n", "", 3, id="build_ function"),
    pytest.param("from torch.nn import Linear\nimport torch.nn as model\nnet = Linear(3, 2)\n", "", 3, id="imports"),
    pytest.param("a = nn.Linear(3, 2)\nb = nn.Linear(5, 2)\n", ":b", 5, id="named instance"),
    pytest.param(NET + "model = Net(5)\n", ":Net", 3, id="named class"),
    pytest.param("def tiny():\n    return nn.Linear(7, 2)\n", ":tiny", 7, id="named function"),
    pytest.param("import functools\ntiny = functools.partial(nn.Linear, 7, 2)\n", ":tiny", 7, id="named callable"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "suffix", "width"), FORMS)
def test_forms(tmp_path: Path, text: str, suffix: str, width: int) -> None:
    found = load(write(tmp_path, text + INPUTS) + suffix)
    assert isinstance(found.module, nn.Linear)
    assert found.module.in_features == width
    assert shapes(found) == [(4, 3)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (NET + "model = Net()\n", "Net"),
        ("model = nn.Sequential(nn.Linear(3, 2))\n", "some_model"),
    ],
)
def test_the_name_says_something(tmp_path: Path, text: str, name: str) -> None:
    assert load(write(tmp_path, text + INPUTS)).name == name


@pytest.mark.parametrize("target", ["some_package.nets:Net", "some_package.nets"])
def test_a_module_is_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    (tmp_path / "some_package").mkdir()
    write(tmp_path / "some_package", f"from some_package.sizes import WIDTH\n{NET}{INPUTS}", "nets.py")
    (tmp_path / "some_package" / "sizes.py").write_text("WIDTH = 3\n")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("some_package")]:
        monkeypatch.delitem(sys.modules, name)
    assert load(target).name == "Net"


EXAMPLES = [
    pytest.param("example_inputs = torch.zeros(4, 3)\n", [(4, 3)], {}, id="tensor"),
    pytest.param("example_inputs = (torch.zeros(4, 3), torch.zeros(4))\n", [(4, 3), (4,)], {}, id="tuple"),
    pytest.param("example_inputs = [torch.zeros(4, 3)]\n", [(4, 3)], {}, id="list"),
    pytest.param("example_inputs = {'x': torch.zeros(4, 3)}\n", [], {"x": (4, 3)}, id="dict"),
    pytest.param("def example_inputs():\n    return torch.zeros(4, 3)\n", [(4, 3)], {}, id="function"),
    pytest.param("def example_inputs():\n    return {'x': torch.zeros(4, 3)}\n", [], {"x": (4, 3)}, id="its dict"),
    pytest.param("example_inputs = torch.zeros(9, 9)\ndef build():\n    return nn.Identity(), torch.zeros(4, 3)\n",
                 [(4, 3)], {}, id="build gives its own"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "args", "kwargs"), EXAMPLES)
def test_example_inputs(
    tmp_path: Path, text: str, args: list[tuple[int, ...]], kwargs: dict[str, tuple[int, ...]]
) -> None:
    model = "" if "def build" in text else "model = nn.Identity()\n"
    found = load(write(tmp_path, model + text))
    assert shapes(found) == args
    assert {name: tuple(value.shape) for name, value in found.kwargs.items()} == kwargs


def test_inputs_of_the_command_line_replace_the_files(tmp_path: Path) -> None:
    found = load(write(tmp_path, "model = nn.Identity()\n" + INPUTS), ["6x5", "mask=6x5:bool"], 8)
    assert shapes(found) == [(8, 5)]
    assert found.kwargs["mask"].dtype == torch.bool
    assert found.kwargs["mask"].shape == (8, 5)


def test_the_file_sees_its_folder_and_no_arguments_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside_it.py").write_text("WIDTH = 3\n")
    text = (
        "import sys\nfrom beside_it import WIDTH\nprint('argv', len(sys.argv), __name__ == '__main__')\n"
        "def build():\n    from beside_it import WIDTH\n    print('building')\n    return nn.Linear(WIDTH, 2)\n"
    )
    monkeypatch.setattr(sys, "argv", ["parplan", "analyze", "--gpus", "4"])
    path = list(sys.path)
    load(write(tmp_path, text + INPUTS))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "argv 1 False\nbuilding\n")
    assert sys.argv == ["parplan", "analyze", "--gpus", "4"]
    assert sys.path == path


TWO = "class A(nn.Module):\n    pass\nb = nn.ReLU()\ndef build_c():\n    return nn.ReLU()\n"
REFUSED = [
    pytest.param(TWO, "", r"has 3 models and neither `model` nor `build\(\)`; name one:\n  \S+:b  "
                 r"\(an instance of ReLU\)\n  \S+:A  \(a class\)\n  \S+:build_c  \(a function\)", id="several"),
    pytest.param("x = 1\n", "", r"some_model\.py has no model; define `model`, a function build\(\)", id="none"),
    pytest.param("class A(nn.Module):\n    def __init__(self, size, *, depth):\n        pass\n", "",
                 r"no model that can be made without arguments: A \(needs size, depth\)", id="class needs arguments"),
    pytest.param("def build(size):\n    pass\n", "", r"some_model\.py:build needs arguments \(size\)",
                 id="build needs arguments"),
    pytest.param("class Network(nn.Module):\n    pass\n", ":Netwrok", r"has no Netwrok; did you mean Network\?",
                 id="misspelt name"),
    pytest.param("class A(nn.Module):\n    pass\n", ":model", r"has no model; it has A", id="wrong name"),
    pytest.param("x = 3\n", ":x", r"some_model\.py:x is an int; a torch\.nn\.Module, a class of one, or a function",
                 id="not a model"),
    pytest.param("def build():\n    pass\n", "", r"some_model\.py:build\(\) returned None; it must return a torch",
                 id="build returns nothing"),
    pytest.param("import no_such_package_at_all\n", "",
                 r"importing it failed: \S+some_model\.py:3: ModuleNotFoundError: No module named 'no_su", id="import"),
    pytest.param("def build(:\n", "", r"importing it failed: \S+some_model\.py:3: SyntaxError: invalid syntax",
                 id="syntax"),
    pytest.param("from . import sizes\n", "", r"some_model\.py:3: ImportError: .*; name it as package\.module:name",
                 id="relative import"),
    pytest.param("import sys\nsys.exit('usage: x')\n", "", r"some_model\.py:4: it called sys\.exit\('usage: x'\)",
                 id="exit"),
    pytest.param("def build():\n    return nn.Linear('a', 2)\n", "", r"build\(\) failed: \S+some_model\.py:4: Type",
                 id="build raises"),
    pytest.param("model = nn.ReLU()\ndef example_inputs():\n    raise ValueError('no data')\n", "",
                 r"example_inputs\(\) failed: \S+some_model\.py:5: ValueError: no data", id="inputs raise"),
    pytest.param("model = nn.ReLU()\n", "", r"has no example_inputs; add them .* --input 64x3x224x224", id="no inputs"),
    pytest.param("model = nn.ReLU()\nexample_inputs = 3\n", "", r"example_inputs: int is not inputs", id="bad inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "suffix", "words"), REFUSED)
def test_refused_files(tmp_path: Path, text: str, suffix: str, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        load(write(tmp_path, text) + suffix)


PLACES = [
    ("modle.py", r"modle\.py: no such file; did you mean model\.py\?"),
    ("model", r"model is not a file; did you mean model\.py\?"),
    ("nowhere/model.py", r"nowhere/model\.py: no such file; there is no folder nowhere"),
    ("modle.py:net", r"modle\.py: no such file; did you mean model\.py\?"),
    ("folder", r"folder is a folder; name a file in it; it holds net\.py"),
    ("net", r"net: no such file; a target is model\.py, model\.py:name or package\.module:name"),
    (":net", r":net: a name is missing"),
    ("model.py:", r"model\.py:: a name is missing"),
    ("no/module:net", r"no/module is neither a \.py file nor a module"),
    ("no_such_module_at_all:net", r"importing it failed: ModuleNotFoundError: No module named 'no_such_module_at_all'"),
]


@pytest.mark.parametrize(("target", "words"), PLACES)
def test_refused_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, words: str) -> None:
    write(tmp_path, "", "model.py")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder", "", "net.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=words):
        load(target)


def test_an_error_names_the_line_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "\nraise RuntimeError\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=r"^some_model\.py: importing it failed: some_model\.py:4: RuntimeError$"):
        load("some_model.py")


def test_an_interrupt_is_not_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(write(tmp_path, "raise KeyboardInterrupt\n"))


def test_a_file_may_be_called_like_an_installed_module(tmp_path: Path) -> None:
    found = load(write(tmp_path, "import types\nmodel = nn.Linear(3, 2)\n" + INPUTS, "torch.py"))
    (inputs,) = found.args
    assert isinstance(inputs, Tensor)
    assert found.module(inputs).shape == (4, 2)

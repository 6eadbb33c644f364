"""Targets that name a library's model: built from a configuration, on meta, with inputs of one training step."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import TargetError
from parplan.graph.capture.capture import capture
from parplan.target import load


class TinyConfig:
    """Settings of a language model of one layer."""

    def __init__(self, width: int = 8, max_position_embeddings: int = 64, **more: Any) -> None:
        self.width, self.max_position_embeddings, self.use_cache = width, max_position_embeddings, True
        self.architectures, self.longest_step = more.get("architectures"), more.get("longest_step", 1.0)
        self.dtype = torch.bfloat16 if more.get("dtype") == "bfloat16" else None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TinyConfig:
        """Of a config.json."""
        return cls(**{name: value for name, value in fields.items() if name != "model_type"})

    def get_text_config(self) -> TinyConfig:
        """Itself."""
        return self


class TinyLM(nn.Module):
    """Embedding and head, with a loss for labels."""

    config_class = TinyConfig
    main_input_name = "input_ids"

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed, self.head = nn.Embedding(16, config.width), nn.Linear(config.width, 16)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss, or the scores."""
        y: Tensor = self.head(self.embed(input_ids))
        return y if labels is None else nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())


class OtherLM(TinyLM):
    """Named as an architecture."""


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small libraries in the place of real ones."""
    transformers, auto, timm = (ModuleType(n) for n in ("transformers", "transformers.models.auto", "timm"))
    known: dict[str, Any] = {
        "CONFIG_MAPPING": {"tiny": TinyConfig}, "TinyLM": TinyLM, "OtherLM": OtherLM, "TinyConfig": TinyConfig,
    }  # fmt: skip
    for name, value in known.items():
        setattr(transformers, name, value)
    auto.__dict__["MODEL_FOR_CAUSAL_LM_MAPPING"] = {TinyConfig: TinyLM}
    timm.__dict__.update(
        is_model=lambda name: name == "tinynet", list_models=lambda: ["tinynet"], create_model=_tiny_net
    )
    for name, module in (("transformers", transformers), ("transformers.models.auto.modeling_auto", auto)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "timm", timm)


def _tiny_net(name: str, pretrained: bool) -> nn.Module:
    assert not pretrained
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model.__dict__["default_cfg"] = {"input_size": (3, 20, 20)}
    return model


def test_a_model_type_has_its_librarys_defaults_and_no_weights() -> None:
    found = load("transformers:tiny", meta=True)
    assert {p.device.type for p in found.module.parameters()} == {"meta"}
    assert {name: tuple(t.shape) for name, t in found.kwargs.items()} == {"input_ids": (8, 64), "labels": (8, 64)}
    assert found.notes == (
        "transformers:tiny: TinyLM of the defaults of TinyConfig, 64 tokens a sample, labels, batch 8, float32; no "
        "weights are loaded",
    )
    graph = capture(found.module, found.args, found.kwargs)
    assert graph.batch == 8
    assert graph.parameter_count == 16 * 8 + 16 * 8 + 16


def test_sizes_and_type_are_those_of_the_command_line() -> None:
    found = load("transformers:OtherLM", batch=3, sequence=7, dtype="bf16")
    assert type(found.module) is OtherLM
    assert {p.dtype for p in found.module.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in found.module.parameters()} == {"cpu"}
    assert found.kwargs["input_ids"].shape == (3, 7)
    assert "weights are random" in found.notes[0]


def test_a_configuration_file_names_architecture_and_type(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    fields = {"model_type": "tiny", "width": 4, "architectures": ["OtherLM"], "dtype": "bfloat16"}
    file.write_text(json.dumps(fields), encoding="utf-8")
    for target in (f"transformers:{file}", f"transformers:{tmp_path}"):
        found = load(target, meta=True)
        assert type(found.module) is OtherLM
        assert found.module.head.weight.shape == (16, 4)
        assert found.module.head.weight.dtype is torch.bfloat16
        assert str(file) in found.notes[0]


def test_a_configuration_file_may_have_infinite_numbers_and_any_number_of_positions(tmp_path: Path) -> None:
    fields = {"model_type": "tiny", "max_position_embeddings": -1, "longest_step": {"__float__": "Infinity"}}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    found = load(f"transformers:{tmp_path}", meta=True)
    assert vars(found.module)["config"].longest_step == math.inf
    assert found.kwargs["input_ids"].shape == (8, 512)


def test_images_have_the_size_that_the_model_was_made_for() -> None:
    found = load("timm:tinynet", batch=2, dtype="fp16", meta=True)
    assert found.args[0].shape == (2, 3, 20, 20)
    assert found.args[0].dtype is torch.float16


@pytest.mark.parametrize(
    ("target", "options", "text"),
    [
        ("transformers:tinny", {}, "no model type tinny; did you mean tiny"),
        ("transformers:", {}, "names no model"),
        ("transformers:./none.json", {}, "none.json cannot be read"),
        ("transformers:tiny", {"sequence": 65}, "has 64 positions"),
        ("transformers:tiny", {"dtype": "int8"}, "weights are of type bf16"),
        ("timm:tinnynet", {}, "timm has no model tinnynet; did you mean tinynet"),
        ("timm:tinynet", {"sequence": 4}, "takes images"),
        ("model.py", {"sequence": 4}, "--seq 4 is for a library's model"),
    ],
)
def test_what_cannot_be_built_is_said(target: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TargetError, match=text):
        load(target, **options)


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_a_missing_library_is_named_with_what_installs_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, library)

    class Missing:
        """Finds no module of that name."""

        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == library:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    with pytest.raises(TargetError, match=rf"needs {library}, which is not installed: pip install 'parplan\[zoo\]'"):
        load(f"{library}:anything")


class LazyLibrary(ModuleType):
    """Imports what its models need where they are first asked for, and wraps errors, as transformers does."""

    CONFIG_MAPPING = {"tiny": TinyConfig}  # noqa: RUF012
    wrapping: type[Exception] = ModuleNotFoundError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            importlib.import_module("brokenvision")
        except Exception as error:
            raise self.wrapping(f"Could not import module {name!r}") from error


@pytest.mark.parametrize("wrapping", [ModuleNotFoundError, RuntimeError])
def test_a_package_that_fails_to_import_is_named_with_what_to_do(
    wrapping: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brokenvision.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = LazyLibrary("transformers")
    lazy.wrapping = wrapping
    monkeypatch.setitem(sys.modules, "transformers", lazy)
    words = (
        r"^transformers:TinyLM needs brokenvision, which is installed and cannot be imported: .*RuntimeError: operator "
        r"nms does not exist; install a version of brokenvision that fits torch"
    )
    with pytest.raises(TargetError, match=words):
        load("transformers:TinyLM")


def test_a_package_that_a_model_needs_and_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", LazyLibrary("transformers"))
    with pytest.raises(TargetError, match="transformers:TinyLM needs brokenvision, which is not installed"):
        load("transformers:TinyLM")


def test_a_library_that_fails_to_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('too old')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm")
    with pytest.raises(TargetError, match=r"^timm is installed and cannot be imported: .*RuntimeError: too old"):
        load("timm:resnet18")


def test_a_failure_that_is_no_import_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> bool:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(sys.modules["timm"], "is_model", fail)
    with pytest.raises(RuntimeError, match=r"^no such thing"):
        load("timm:resnet18")

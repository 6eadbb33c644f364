"""Targets without a file: `transformers:gpt2`, `transformers:./config.json`, `timm:vit_base_patch16_224`.

A model is built from its configuration, on torch's meta device where it is only planned for: no weights are downloaded
and none are allocated. A model type or an architecture by name stands for the defaults of the library's own
configuration class, which are said in a note; a config.json says everything itself.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from parplan.errors import TargetError
from parplan.target.inputs import DTYPES, Target
from parplan.target.library_inputs import RequestedSizes, library_inputs, modalities, without_draws
from parplan.target.trouble import guarded, trouble

__all__ = ["LIBRARIES", "library_model"]

LIBRARIES = ("transformers", "timm")

BATCH = 8
# Heads in order of preference, as transformers names the mappings from configurations to classes; one that takes fewer
# modalities than the model without a head is a part of what the name means (the text half of a speech model).
_HEADS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "ZERO_SHOT_OBJECT_DETECTION", "MASK_GENERATION", "CTC", "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "DEPTH_ESTIMATION", "SEMANTIC_SEGMENTATION",
)  # fmt: skip


def library_model(
    target: str, batch: int | None = None, sequence: int | None = None, dtype: str | None = None, meta: bool = True
) -> Target:
    """The model that `library:name` names, with inputs of one training step, and notes on what was assumed.

    Args:
        target: `transformers:` with a model type (gpt2), an architecture (GPT2LMHeadModel) or a path to a config.json;
            `timm:` with a model's name.
        batch: samples, 8 without one.
        sequence: tokens per sample, the configuration's longest up to 512 without one.
        dtype: of parameters and images, such as "bf16"; the configuration's own for a config.json, else float32.
        meta: on the meta device, without memory for weights; else with random weights.

    Raises:
        TargetError: the library is missing or fails, or does not know the name.
    """
    library, _, name = target.partition(":")
    if not name:
        raise TargetError(f"{target} names no model; write {library}:gpt2" if library == "transformers" else
                          f"{target} names no model; write {library}:resnet50")  # fmt: skip
    kind = None if dtype is None else DTYPES.get(_SHORT.get(dtype, dtype))
    if dtype is not None and (kind is None or not kind.is_floating_point):
        raise TargetError(f"--dtype {dtype}: weights are of type {', '.join(_SHORT)}")
    try:
        module: Any = importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise TargetError(f"{library} cannot be imported: {error}; pip install 'parplan[zoo]'") from error
        raise TargetError(f"{target} needs {library}, which is not installed: pip install 'parplan[zoo]'") from error
    except Exception as error:
        raise _import_failure(target, library, error) from error
    wanted = RequestedSizes(target, batch or BATCH, sequence, kind or torch.float32, meta)
    try:
        if library == "timm":
            return _timm(module, name, wanted)
        return _transformers(module, name, wanted, dtype is None)
    except (ImportError, RuntimeError) as error:  # libraries import their parts where these are first asked for
        if not isinstance(error, ImportError) and "import" not in str(error):
            raise
        raise _import_failure(target, library, error) from error


def _import_failure(target: str, library: str, error: Exception) -> TargetError:
    """The package whose import failed first, with its own words: libraries wrap these errors in theirs."""
    first: BaseException = error
    while before := first.__cause__ or (None if first.__suppress_context__ else first.__context__):
        first = before
    missing = first.name if isinstance(first, ModuleNotFoundError) else None
    if missing is not None and missing.partition(".")[0] != library:
        return TargetError(f"{target} needs {missing}, which is not installed; install it (pip install 'parplan[zoo]')")
    inside = (str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in walk_tb(first.__traceback__))
    package = [name for name in inside if name not in ("", "parplan", "importlib", "torch")] or [library]
    needs = f"{target} needs {package[-1]}, which" if package[-1] != library else library
    return TargetError(
        f"{needs} is installed and cannot be imported: {trouble(first, Path.cwd())}; install a version of "
        f"{package[-1]} that fits torch {torch.__version__} (pip install 'parplan[zoo]'), or uninstall it if nothing "
        "needs it"
    )


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _timm(timm: Any, name: str, wanted: RequestedSizes) -> Target:
    if wanted.sequence is not None:
        raise TargetError(f"--seq {wanted.sequence}: {wanted.target} takes images; leave it out")
    if not timm.is_model(name.split(".")[0]):
        raise TargetError(f"timm has no model {name}{_near(name, timm.list_models())}")
    model = wanted.built(lambda: timm.create_model(name, pretrained=False))
    channels, height, width = model.default_cfg["input_size"]  # type: ignore[index]
    images = wanted.tensor(channels, height, width)
    note = f"{wanted.target}: images of {channels} x {height} x {width}, {_said(wanted)}, no loss"
    return Target(type(model).__name__, model, (images,), {}, notes=(note,))


def _transformers(library: Any, name: str, wanted: RequestedSizes, own_dtype: bool) -> Target:
    """A model by configuration; one with a loss is given labels."""
    config, source, written = _configuration(library, name, wanted.target)
    named = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if own_dtype and isinstance(named, torch.dtype):
        wanted = replace(wanted, dtype=named)
    kind = _architecture(library, name, config)
    if kind is None:
        raise TargetError(f"{wanted.target}: transformers has no model for {type(config).__name__}")
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a training step keeps no keys and values for later tokens
    settled = without_draws(config)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    model = wanted.built(lambda: kind(config))
    inputs, said = library_inputs(model, config, wanted, written)
    notes = [f"{wanted.target}: {kind.__name__} of {source}, {said}, {_said(wanted)}"]
    if settled:
        drawn = " and ".join(settled)
        notes.append(f"{wanted.target}: planned with {drawn}: these draws decide in Python what the forward does")
    return Target(type(model).__name__, model, (), inputs, notes=tuple(notes))


def _said(wanted: RequestedSizes) -> str:
    dtype = str(wanted.dtype).removeprefix("torch.")
    return f"batch {wanted.batch}, {dtype}; {'no weights are loaded' if wanted.meta else 'weights are random'}"


def _configuration(library: Any, name: str, target: str) -> tuple[Any, str, str]:
    """The configuration, where it is from, and code that makes it."""
    mapping, path, refused = library.CONFIG_MAPPING, Path(name), f"{target}: the configuration is refused"
    if name.endswith(".json") or path.is_dir():
        file = path / "config.json" if path.is_dir() else path
        try:
            fields = json.loads(file.read_text(encoding="utf-8"), object_hook=_number)
            known = fields["model_type"] in mapping
        except OSError as error:
            raise TargetError(f"{target}: {file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError(f"{target}: {file} is no configuration of transformers with a model_type") from error
        if not known:
            near = _near(str(fields["model_type"]), mapping.keys())
            raise TargetError(f"{target}: this transformers has no model type {fields['model_type']}{near}")
        config = guarded(lambda: mapping[fields["model_type"]].from_dict(fields), refused, Path.cwd())
        return config, str(file), f"transformers.AutoConfig.from_pretrained({str(file)!r})"
    architecture = getattr(library, name, None) if name.isidentifier() else None
    kind = getattr(architecture, "config_class", None)
    if kind is None and name in mapping:
        kind = mapping[name]
    if kind is None:
        near = _near(name, mapping.keys())
        raise TargetError(
            f"transformers has no model type {name}{near}; name a model type (gpt2), an architecture (GPT2LMHeadModel) "
            "or a config.json (transformers:./config.json); names of a hub are not looked up"
        )
    config = guarded(kind, refused, Path.cwd())
    return config, f"the defaults of {kind.__name__}", f"transformers.{kind.__name__}()"


def _number(found: dict[str, Any]) -> Any:
    """Infinity and NaN, as transformers writes them: {"__float__": "Infinity"}; other objects as they are."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _architecture(library: Any, name: str, config: Any) -> Any:
    """The class: the one named, the configuration's own, or the first head there is for it and all its modalities."""
    for wanted in (name, *(getattr(config, "architectures", None) or ())):
        found = getattr(library, wanted, None) if wanted.isidentifier() else None
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = ("MODEL_MAPPING", *(f"MODEL_FOR_{head}_MAPPING" for head in _HEADS))
    known = [getattr(auto, mapping, {}).get(type(config), None) for mapping in names]
    body, *heads = (found[0] if isinstance(found, (tuple, list)) else found for found in known)
    wanted = modalities(body) if body is not None else frozenset[str]()
    return next((head for head in heads if head is not None and wanted <= modalities(head)), body)


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""

"""Example inputs of transformers' models: a tensor for each modality that a forward takes, sized by its configuration.

The forward's arguments say which modalities there are, and fields of the configuration say how large an image, a
spectrogram or a text is. Where no field does, the error shows the file that says it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parplan.errors import TargetError
from parplan.target.trouble import guarded, trouble

__all__ = ["MODALITIES", "RequestedSizes", "library_inputs", "modalities", "without_draws"]

# Arguments of a forward that bring what a model looks at, as transformers names them everywhere.
MODALITIES = ("input_ids", "pixel_values", "input_features", "input_values")

SEQUENCE = 512
IMAGE = 224
_RATE = 16_000  # of sound, per second, where a configuration does not say another
_FRAMES = 1_000  # of a spectrogram: ten seconds


@dataclass(frozen=True)
class RequestedSizes:
    """Sizes and the type that a command line asks for; None for those it does not name."""

    target: str
    batch: int
    sequence: int | None
    dtype: torch.dtype
    meta: bool

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model, in the wanted type.

        Raises:
            TargetError: the library's code fails.
        """
        with torch.device("meta") if self.meta else nullcontext():
            what = f"{self.target}: the library cannot build it"
            return guarded(lambda: build().to(self.dtype), what, Path.cwd())

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of the wanted type (or of `dtype`) for every sample, which index every table."""
        return torch.zeros((self.batch, *shape), dtype=dtype or self.dtype, device="meta" if self.meta else "cpu")


def modalities(kind: Any) -> frozenset[str]:
    """Modalities that a class of models takes, by the names of their arguments."""
    return frozenset(MODALITIES) & inspect.signature(kind.forward).parameters.keys()


def library_inputs(model: Any, config: Any, wanted: RequestedSizes, written: str) -> tuple[dict[str, Any], str]:
    """Keyword arguments of one training step, and their sizes in words.

    Args:
        written: Python code that makes the configuration, for a file that says other inputs.

    Raises:
        TargetError: the configuration does not say how large they are, or the model does not take them so.
    """
    parameters = inspect.signature(model.forward).parameters
    taken = modalities(model)
    texts = "input_ids" in taken or "decoder_input_ids" in parameters or not taken
    if wanted.sequence is not None and not texts:
        raise TargetError(f"--seq {wanted.sequence}: {wanted.target} takes {_NAMES[min(taken)]}; leave it out")
    inputs: dict[str, Any] = {}
    said: list[str] = []
    for name in (name for name in _SIZES if name in taken):
        shape, words = _SIZES[name](config, parameters, getattr(model, "input_modalities", ""))
        inputs[name] = wanted.tensor(*shape) if shape else None
        said.append(words)
    loss = "labels" in parameters and "list" not in str(parameters["labels"].annotation) and not _is_ctc(model)
    if texts:
        text = wanted.tensor(_length(config, wanted), dtype=torch.int64)
        if "input_ids" in taken or not taken:
            inputs["input_ids"] = text = _with_places(config, text, said)
        elif not loss:
            inputs["decoder_input_ids"] = text
        said.append(f"{text.shape[1]:,} tokens a sample")
    if loss:
        inputs["labels"] = torch.zeros_like(text) if texts else wanted.tensor(dtype=torch.int64)
    if "return_loss" in parameters:
        inputs["return_loss"] = True
        said.append("the loss of all pairs")
    if unknown := [name for name in inputs if inputs[name] is None]:
        inputs |= dict.fromkeys(name for name in _ANY_SIZE if name in parameters)
        reason = f"the configuration does not say the shape of {unknown[0]}"
        raise TargetError(_in_a_file(model, wanted, inputs, reason, written))
    if taken - {"input_ids"} and (why := _refusal(model, wanted, inputs)):
        without = {name: value for name, value in inputs.items() if name != "labels"}
        if _refusal(model, wanted, without):
            raise TargetError(_in_a_file(model, wanted, inputs, f"its own forward fails on these: {why}", written))
        inputs = without  # of a kind that the number of samples and of tokens does not say
    said += ["labels"] if "labels" in inputs else []
    return inputs, ", ".join(said)


_NAMES = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}


def _fields(config: Any) -> Iterator[Any]:
    """The configuration and those of its parts."""
    yield config
    yield from (
        part for name in getattr(config, "sub_configs", ()) if (part := getattr(config, name, None)) is not None
    )


def _field(config: Any, *names: str) -> Any:
    """The first part of a configuration that has values for all of these fields; None without one."""
    return next((one for one in _fields(config) if all(getattr(one, n, None) is not None for n in names)), None)


def _pictures(config: Any, parameters: Mapping[str, Any], kinds: Any) -> tuple[tuple[int, ...], str]:
    """Shape of a sample's image or film; none where pixels come as patches of images of any size."""
    if not parameters.keys().isdisjoint(_ANY_SIZE):
        return (), ""
    sized = _field(config, "image_size")
    size = _pair(getattr(sized, "image_size", IMAGE))
    height, width = size[0], size[-1]
    channels = getattr(sized, "num_channels", None) or 3
    frames = getattr(_field(config, "num_frames"), "num_frames", None)
    if frames and "video" in kinds and "image" not in kinds:
        return (frames, channels, height, width), f"films of {frames} x {channels} x {height} x {width}"
    return (channels, height, width), f"images of {channels} x {height} x {width}"


def _spectrogram(config: Any, parameters: Mapping[str, Any], kinds: Any) -> tuple[tuple[int, ...], str]:
    """Shape of a sample's spectrogram, by the fields that say how the model reads it."""
    shape: tuple[int, ...] = ()
    if one := _field(config, "input_feat_per_channel", "input_channels"):
        shape = (_FRAMES, one.input_feat_per_channel * one.input_channels)
    elif one := _field(config, "feature_projection_input_dim"):
        shape = (_FRAMES, one.feature_projection_input_dim)
    elif one := _field(config, "spec_size", "num_mel_bins"):
        shape = (1, one.spec_size * one.spec_size // one.num_mel_bins, one.num_mel_bins)
    elif one := _field(config, "num_mel_bins", "max_source_positions"):
        shape = (one.num_mel_bins, 2 * one.max_source_positions)  # its second convolution halves them
    return shape, f"spectrograms of {' x '.join(map(str, shape))}"


def _sound(config: Any, parameters: Mapping[str, Any], kinds: Any) -> tuple[tuple[int, ...], str]:
    """Shape of a sample's sound: a spectrogram, or a second of its wave."""
    if one := _field(config, "num_mel_bins", "max_length", "frequency_stride"):
        return (one.max_length, one.num_mel_bins), f"spectrograms of {one.max_length} x {one.num_mel_bins}"
    rate = getattr(_field(config, "sampling_rate"), "sampling_rate", _RATE)
    if one := _field(config, "audio_channels"):
        return (one.audio_channels, rate), f"sound of {one.audio_channels} x {rate}"
    if _field(config, "conv_stride", "conv_dim"):
        return (rate,), f"sound of {rate}"
    return (), ""


def without_draws(config: Any) -> list[str]:
    """Switch off what random draws decide in Python, of which a captured graph would keep one outcome; in words."""
    settled = []
    for part in _fields(config):
        for name, value in list(vars(part).items()):
            if (name == "apply_spec_augment" or name.endswith("layerdrop")) and value:
                setattr(part, name, type(value)(0))
                settled.append(f"{name}={getattr(part, name)}")
    return settled


_SIZES = {"pixel_values": _pictures, "input_features": _spectrogram, "input_values": _sound}
# Arguments that say where the pieces of images of any size lie.
_ANY_SIZE = ("image_grid_thw", "pixel_position_ids", "spatial_shapes")


def _length(config: Any, wanted: RequestedSizes) -> int:
    """Tokens of a sample: those asked for, else the configuration's longest up to 512."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    longest = next(filter(None, (getattr(text, name, None) for name in names)), 0)
    length = wanted.sequence or min(SEQUENCE, longest if longest > 0 else SEQUENCE)
    if 0 < longest < length:  # -1: as long as anybody likes
        raise TargetError(f"--seq {length}: {wanted.target} has {longest} positions; use {longest} or fewer")
    return length


def _with_places(config: Any, text: Tensor, said: list[str]) -> Tensor:
    """A text with a token in front for every piece of an image that the model puts in such a token's place."""
    place = getattr(config, "image_token_id", None)
    sized = _field(config, "image_size", "patch_size")
    if place is None or sized is None:
        return text
    pieces = getattr(config, "image_seq_length", None) or math.prod(_pair(sized.image_size)) // math.prod(
        _pair(sized.patch_size)
    )
    said.append(f"{pieces} tokens for the image")
    return torch.cat((torch.full_like(text[:, :1], place).expand(-1, pieces), text), 1)


def _pair(size: Any) -> tuple[int, ...]:
    return tuple(size) if isinstance(size, (tuple, list)) else (size, size)


def _is_ctc(model: Any) -> bool:
    """Whether labels are aligned by CTC, whose number per sample is a value."""
    return hasattr(getattr(model, "config", None), "ctc_loss_reduction") and type(model).__name__.endswith("CTC")


def _refusal(model: Any, wanted: RequestedSizes, inputs: Mapping[str, Any]) -> str:
    """The error of the model's forward on the meta device, where sizes are all there is; empty where it takes them."""
    if not wanted.meta:
        return ""
    try:
        with torch.no_grad(), torch.device("meta"):
            model(**inputs)
    except Exception as error:
        # Where it asks for a value, which a tensor on meta has not, capture says whether it can do without.
        return "" if "meta" in str(error).lower() else trouble(error, Path.cwd())
    return ""


def _in_a_file(model: Any, wanted: RequestedSizes, inputs: Mapping[str, Any], reason: str, written: str) -> str:
    """An error that shows the file which says the inputs; None stands for one of unknown shape."""
    kind = type(model).__name__
    lines = [f'"{name}": {_written(value, wanted.batch)}' for name, value in inputs.items()]
    return (
        f"{wanted.target}: {kind} takes {' and '.join(inputs)}, and {reason}; write the inputs into a file, model.py, "
        "and plan that (parplan analyze model.py):\n"
        "  import torch, transformers\n"
        f"  def build(): return transformers.{kind}({written})\n"
        f"  example_inputs = {{{', '.join(lines)}}}"
    )


def _written(value: Any, batch: int) -> str:
    if value is None:
        return f"torch.zeros({batch}, ...)"
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
    return f"torch.zeros({', '.join(map(str, value.shape))}{dtype})"

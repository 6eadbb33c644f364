"""Inputs of models of several modalities: which architecture a name means, and how large each input is."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parplan.errors import TargetError
from parplan.graph.capture.capture import capture
from parplan.target import load


class Config:
    """A configuration with the fields that it is given, and parts."""

    def __init__(self, **fields: Any) -> None:
        self.sub_configs = [name for name in fields if name.endswith("_config")]
        self.__dict__.update(fields)

    def get_text_config(self) -> Any:
        """That of the text, where there is one."""
        return getattr(self, "text_config", self)


class Model(nn.Module):
    """A model that multiplies what it is given by a weight."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.ones(()))

    def result(self, *given: Tensor) -> Tensor:
        """One number a sample."""
        return sum((one.to(self.weight.dtype).flatten(1).sum(1) for one in given), self.weight * 0)


class SpeechConfig(Config):
    def __init__(self) -> None:
        super().__init__(num_mel_bins=4, max_source_positions=6, max_target_positions=5)


class SpeechText(Model):
    """The text half alone."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Scores of the text."""
        return self.result(input_ids)


class Speech(Model):
    """Sound to text."""

    def forward(
        self, input_features: Tensor, decoder_input_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Scores of the text, for sound of one length."""
        if input_features.shape[1:] != (4, 12):
            raise ValueError("spectrograms are 4 x 12")
        return self.result(input_features, *(x for x in (labels,) if x is not None))


class PairsConfig(Config):
    def __init__(self) -> None:
        part = Config(image_size=(6, 8), num_channels=2)
        super().__init__(vision_config=part, text_config=Config(max_position_embeddings=7))


class PairsImages(Model):
    """The image half alone."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Classes."""
        return self.result(pixel_values)


class Pairs(Model):
    """Texts and images, all with all."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor, return_loss: bool = False) -> Tensor:
        """Scores of all pairs."""
        found = self.result(pixel_values)[:, None] * self.result(input_ids)
        return found.mean() if return_loss else found


class FilmConfig(Config):
    def __init__(self) -> None:
        super().__init__(image_size=6, num_channels=2, num_frames=3)


class Films(Model):
    """Classes of films; labels are of another shape than one number a sample."""

    input_modalities = "video"

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Scores, of every pixel."""
        found = pixel_values.mean((1, 2)) * self.weight
        return found if labels is None else found + labels.reshape(-1, 6, 6)


class PatchesConfig(Config):
    def __init__(self) -> None:
        super().__init__(patch_size=2, max_position_embeddings=7)


class Patches(Model):
    """Images of any size."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Scores."""
        return self.result(input_ids)


class OddConfig(Config):
    def __init__(self) -> None:
        super().__init__(image_size=6, num_channels=2)


class Odd(Model):
    """Images of which the configuration says another size than the forward wants."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """An error."""
        raise ValueError("images are 7 x 7")


KINDS = {"speech": SpeechConfig, "pairs": PairsConfig, "film": FilmConfig, "patches": PatchesConfig, "odd": OddConfig}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of these models, with transformers' mappings."""
    transformers, auto = ModuleType("transformers"), ModuleType("transformers.models.auto.modeling_auto")
    transformers.__dict__.update({"CONFIG_MAPPING": KINDS, "Odd": Odd})
    auto.__dict__.update(
        MODEL_MAPPING={SpeechConfig: Speech, PairsConfig: Pairs, FilmConfig: Films, PatchesConfig: Patches,
                       OddConfig: Odd},
        MODEL_FOR_CAUSAL_LM_MAPPING={SpeechConfig: SpeechText},
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING={SpeechConfig: Speech},
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING={PairsConfig: PairsImages},
        MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING={FilmConfig: Films},
    )  # fmt: skip
    for module in (transformers, auto):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "transformers.models.auto", ModuleType("transformers.models.auto"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "kind", "shapes"),
    [
        ("speech", Speech, {"input_features": (8, 4, 12), "labels": (8, 5)}),
        ("pairs", Pairs, {"pixel_values": (8, 2, 6, 8), "input_ids": (8, 7)}),
        ("film", Films, {"pixel_values": (8, 3, 2, 6, 6)}),
    ],
)
def test_a_name_means_the_model_of_all_modalities_with_inputs_of_each(
    name: str, kind: type[nn.Module], shapes: dict[str, tuple[int, ...]]
) -> None:
    found = load(f"transformers:{name}", meta=True)
    assert type(found.module) is kind
    assert {key: tuple(t.shape) for key, t in found.kwargs.items() if isinstance(t, Tensor)} == shapes
    assert found.kwargs.get("return_loss", name == "pairs") is (name == "pairs")
    assert capture(found.module, (), found.kwargs).batch == 8


def test_masks_that_are_drawn_in_the_forward_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(self: Config) -> None:
        Config.__init__(self, conv_stride=(5,), conv_dim=(3,), apply_spec_augment=True, encoder_layerdrop=0.1)

    monkeypatch.setattr(SpeechConfig, "__init__", made)
    monkeypatch.setattr(Speech, "forward", lambda self, input_values: self.result(input_values))
    found = load("transformers:speech", meta=True)
    assert vars(found.module)["config"].apply_spec_augment is False
    assert "planned with apply_spec_augment=False and encoder_layerdrop=0.0: these draws" in found.notes[1]


def test_inputs_that_no_field_sizes_are_shown_in_a_file() -> None:
    with pytest.raises(TargetError) as refused:
        load("transformers:patches", meta=True)
    assert "the configuration does not say the shape of pixel_values" in str(refused.value)
    assert '"input_ids": torch.zeros(8, 7, dtype=torch.int64)' in str(refused.value)
    assert '"image_grid_thw": torch.zeros(8, ...)' in str(refused.value)
    assert "def build(): return transformers.Patches(transformers.PatchesConfig())" in str(refused.value)


def test_inputs_that_the_models_own_forward_refuses_are_shown_in_a_file() -> None:
    with pytest.raises(TargetError, match=r"its own forward fails on these: .*ValueError: images are 7 x 7; write"):
        load("transformers:odd", meta=True)


@pytest.mark.parametrize(("fields", "shape"), [
    ({"input_feat_per_channel": 5, "input_channels": 2}, (8, 1000, 10)),
    ({"feature_projection_input_dim": 6}, (8, 1000, 6)),
    ({"spec_size": 8, "num_mel_bins": 4}, (8, 1, 16, 4)),
])  # fmt: skip
def test_a_spectrogram_has_the_shape_that_the_fields_say(
    fields: dict[str, int], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeechConfig, "__init__", lambda self: Config.__init__(self, audio_config=Config(**fields)))
    monkeypatch.setattr(Speech, "forward", lambda self, input_features: self.result(input_features))
    assert load("transformers:speech", meta=True).kwargs["input_features"].shape == shape


@pytest.mark.parametrize(("fields", "shape"), [
    ({"num_mel_bins": 4, "max_length": 9, "frequency_stride": 2}, (8, 9, 4)),
    ({"audio_channels": 2, "sampling_rate": 50}, (8, 2, 50)),
    ({"conv_stride": (5,), "conv_dim": (3,)}, (8, 16_000)),
])  # fmt: skip
def test_sound_has_the_shape_that_the_fields_say(
    fields: dict[str, Any], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeechConfig, "__init__", lambda self: Config.__init__(self, **fields))
    monkeypatch.setattr(Speech, "forward", lambda self, input_values: self.result(input_values))
    assert load("transformers:speech", meta=True).kwargs["input_values"].shape == shape

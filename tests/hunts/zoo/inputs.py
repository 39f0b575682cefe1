"""A batch for any model: from the names of its forward's arguments, its config, and what its own errors say.

How many placeholder tokens an image or a sound takes is the model's own arithmetic: it is asked by letting it refuse
("... features and ... tokens do not match"). Where an argument has several usual shapes, they are tried in turn.
"""

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.hunts.zoo.configs import FIRST_WORD, VOCAB
from tests.hunts.zoo.mappings import Entry
from tests.hunts.zoo.overrides import INPUTS

ROWS, LENGTH = 2, 15
_MISMATCH = re.compile(
    r"(image|video|audio|multimodal|speech)\w* features and .*?tokens do not match.*?(\d+).*?(\d+)", re.I | re.S
)


@dataclass
class Spec:
    """What has been found out about a model's batch so far."""

    dtype: torch.dtype
    placeholders: dict[str, int] = field(default_factory=dict)
    """Tokens per row of each modality."""
    tried: set[tuple[str, int]] = field(default_factory=set)
    labels: bool = True
    variant: int = 0
    """Which of the usual shapes; odd ones leave out what is optional beside the pixels."""

    def learn(self, error: BaseException) -> bool:
        """Take a hint from an error. False if there is none, or it was followed already."""
        match = _MISMATCH.search(str(error))
        if match is None:
            return False
        modality, have, want = match.group(1).lower(), int(match.group(2)), int(match.group(3))
        modality = {"multimodal": "image", "speech": "audio"}.get(modality, modality)
        if have:
            self.tried.add((modality, self.placeholders.get(modality, 0)))
        # Features are counted as vectors, by some models as numbers (32 each); in a row, by some in all.
        for per_row in (want // ROWS, want // ROWS // 32, want):
            if 0 < per_row < 2000 and (modality, per_row) not in self.tried:
                self.placeholders[modality] = per_row
                return True
        return False


class Batches:
    """Makes the batches of one model; step ``seed`` always gets the same values."""

    def __init__(self, model: nn.Module, entry: Entry, spec: Spec):
        self.config: Any = model.config
        self.entry, self.spec = entry, spec
        self.model = model
        self.arguments = inspect.signature(model.forward).parameters
        self.text = _text_config(self.config)
        names = ("vision_config", "image_config", "backbone_config", "image_encoder")
        around = _first(self.config, "vlm_config", "thinker_config", "encoder")
        self.vision: Any = getattr(around, "vision_config", None) or _first(self.config, *names) or self.config
        names = ("audio_config", "speech_config", "audio_encoder", "encoder_config")
        self.audio: Any = getattr(around, "audio_config", None) or _first(self.config, *names) or self.config
        self.generator = torch.Generator()

    def __call__(self, seed: int) -> dict[str, Any]:
        self.generator.manual_seed(seed)
        made = INPUTS.get(self.entry.name) or INPUTS.get(self.config.model_type)
        adding = isinstance(made, tuple)
        batch = self._general() if made is None or adding else {}
        if made is not None:
            extra = (made[1] if adding else made)(self)
            batch.update(extra)
        return {k: self._cast(v) for k, v in batch.items() if v is not None}

    # ---- values

    def words(self, *shape: int, low: int = FIRST_WORD, high: int = VOCAB - 1) -> torch.Tensor:
        high = min(high, self._vocab())
        return torch.randint(min(low, high - 2), high, shape, generator=self.generator)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def _vocab(self) -> int:
        size = getattr(self.text, "vocab_size", None)
        return size if isinstance(size, int) and size > 2 else VOCAB

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.spec.dtype) if value.is_floating_point() else value
        if isinstance(value, list):
            return [self._cast(v) for v in value]
        if isinstance(value, dict):
            return {k: self._cast(v) for k, v in value.items()}
        return value

    # ---- by the names of arguments

    def _general(self) -> dict[str, Any]:
        names = self.arguments
        batch: dict[str, Any] = {}
        if "input_ids" in names:
            batch["input_ids"] = self.text_ids()
        if "decoder_input_ids" in names and not self.spec.labels or self._required("decoder_input_ids"):
            batch["decoder_input_ids"] = self.words(ROWS, LENGTH)
        for name in ("pixel_values", "image", "images"):
            if name in names and ("input_ids" not in names or self._sees_images()):
                batch[name] = self.pixels()
        if self._required("pixel_values_videos") or ("pixel_values_videos" in names and "pixel_values" not in names):
            batch["pixel_values_videos"] = self.pixels()
        if "pixel_values" in batch:
            self._grids(batch)
        for name in ("input_values", "input_features", "audio_values"):
            if name in names:
                batch[name] = self.sound(name)
        for name in ("input_features_mask", "feature_attention_mask", "padding_mask"):
            if name in names and "input_features" in batch:
                batch[name] = torch.ones(ROWS, max(batch["input_features"].shape[1:]), dtype=torch.long)
        if "bool_masked_pos" in names and any(t == "MASKED_IMAGE_MODELING" for t in self.entry.tasks):
            side = _pair(self.vision.image_size)[0] // _pair(self.vision.patch_size)[0]
            batch["bool_masked_pos"] = torch.arange(side * side).expand(ROWS, -1) % 2 == 0
        if "return_loss" in names and self.spec.labels:
            batch["return_loss"] = True
        if "bbox" in names and "input_ids" in batch:
            corners = torch.tensor([2, 3, 20, 30])
            batch["bbox"] = corners.expand(*batch["input_ids"].shape, 4).clone()
        if "labels" in names and self.spec.labels:
            batch["labels"] = self.labels(batch)
        for wanted, make in (("mm_token_type_ids", self._types), ("token_type_ids", self._types)):
            if wanted in names and "input_ids" in batch and (wanted[0] == "m" or self.spec.placeholders):
                batch[wanted] = make(batch["input_ids"])
        return batch

    def _required(self, name: str) -> bool:
        argument = self.arguments.get(name)
        return argument is not None and argument.default is inspect.Parameter.empty

    def text_ids(self) -> torch.Tensor:
        parts = [torch.full((ROWS, 1), 1)]
        for modality, count in self.spec.placeholders.items():
            token = self.placeholder(modality)
            if token is not None:
                parts.append(torch.full((ROWS, count), token))
        return torch.cat([*parts, self.words(ROWS, LENGTH)], dim=1)

    def placeholder(self, modality: str) -> int | None:
        tried = (
            f"{modality}_token_id", f"{modality}_token_index", f"{modality}_placeholder_token_id",
            f"{modality}_patch_id", "image_token_id", "image_token_index", "audio_token_id", "audio_token_index",
            "media_token_id", "media_placeholder_token_id", "img_context_token_id",
        )  # fmt: skip
        for config in (self.config, getattr(self.config, "vlm_config", None), self.text):
            for name in tried:
                token = getattr(config, name, None)
                if isinstance(token, int):
                    return token
        return None

    def _types(self, ids: torch.Tensor) -> torch.Tensor:
        types = torch.zeros_like(ids)
        for modality, kind in (("image", 1), ("video", 2), ("audio", 3)):
            if modality in self.spec.placeholders and (token := self.placeholder(modality)) is not None:
                types[ids == token] = kind
        return types

    def _sees_images(self) -> bool:
        return self.vision is not self.config or self.entry.tasks != ("MULTIMODAL_LM",)

    def pixels(self) -> torch.Tensor:
        size = _first(self.vision, "image_size", "img_size", "input_size", "crop_size")
        size = size or _first(self.config, "image_size") or 64
        if isinstance(size, dict):
            size = (size["height"], size["width"])
        height, width = _pair(size)
        if isinstance(height, (tuple, list)):
            height, width = _pair(height)
        channels = _first(self.vision, "num_channels", "in_channels", "in_chans", "image_channels") or 3
        channels = channels if isinstance(channels, int) else 3
        video = "VIDEO_CLASSIFICATION" in self.entry.tasks
        frames = _first(self.vision, "num_frames", "frames_per_clip") or 4
        shapes: list[tuple[int, ...]] = [
            (ROWS, channels, height, width), (ROWS, 1, channels, height, width), (ROWS, channels, 64, 64),
            (ROWS, frames, channels, height, width), (ROWS, 2, channels, height, width),
        ]  # fmt: skip
        if video:
            shapes = [(ROWS, frames, channels, height, width)]
        return self.floats(*shapes[self.spec.variant // 2 % len(shapes)])

    def _grids(self, batch: dict[str, Any]) -> None:
        for name in ("image_grid_thw", "image_grid_hws", "grid_thw"):
            if name in self.arguments:
                patch = _pair(self.vision.patch_size)[0]
                merge = _pair(_first(self.vision, "spatial_merge_size", "merge_size") or 2)[0]
                time = _first(self.vision, "temporal_patch_size", "patch_temporal") or 1
                side = 2 * merge
                channels = _first(self.vision, "num_channels", "in_channels", "in_chans") or 3
                batch[name] = torch.tensor([[1, side, side]] * ROWS)
                width = channels * time * patch * patch
                batch["pixel_values"] = self.floats(ROWS * side * side, width)
                if self.spec.variant // 2 % 2:
                    batch["pixel_values"] = self.floats(ROWS * side * side, channels, patch, patch)
                self.spec.placeholders.setdefault("image", side * side // merge**2)
        if "image_sizes" in self.arguments and self.spec.variant % 2 == 0:
            batch["image_sizes"] = torch.tensor([list(batch["pixel_values"].shape[-2:])] * ROWS)
        if "pixel_attention_mask" in self.arguments and batch["pixel_values"].dim() == 5:
            shape = batch["pixel_values"].shape
            batch["pixel_attention_mask"] = torch.ones(*shape[:2], *shape[-2:], dtype=torch.bool)

    def sound(self, name: str) -> torch.Tensor:
        names = ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "mel_bins", "num_mels")
        mels = _first(self.audio, *names)
        mels = mels or _first(self.config, "num_mel_bins", "feature_projection_input_dim", "input_dim") or 16
        if name == "input_values":
            long = _first(self.audio, "max_length") or 32
            shapes: list[tuple[int, ...]] = [
                (ROWS, 8000), (ROWS, 1, 3200), (ROWS, long, mels), (ROWS, 64, mels), (ROWS, 1, 64, mels),
            ]  # fmt: skip
        else:
            length = 2 * (_first(self.audio, "max_source_positions") or 32)
            wide = _first(self.audio, "feature_projection_input_dim", "input_dim") or mels
            shapes = [
                (ROWS, mels, length), (ROWS, length, wide), (ROWS, 1, mels, length), (ROWS, 4000), (ROWS, 1, 4000),
            ]  # fmt: skip
        return self.floats(*shapes[self.spec.variant // 2 % len(shapes)])

    def labels(self, batch: dict[str, Any]) -> Any:
        tasks = self.entry.tasks
        num = getattr(self.config, "num_labels", 2)
        if tasks[0] in ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_IMAGE_MODELING"):
            ids = batch.get("input_ids")
            if ids is None or "decoder_input_ids" in self.arguments:
                return self.words(ROWS, LENGTH)
            labels = ids.clone()
            for modality in self.spec.placeholders:
                token = self.placeholder(modality)
                labels[labels == token] = -100
            return labels
        if tasks[0] in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "TEXT_RECOGNITION"):
            return self.words(ROWS, LENGTH)
        if tasks[0] in ("CTC", "RNNT", "TDT"):
            return self.words(ROWS, 3)
        if tasks[0] == "SEMANTIC_SEGMENTATION":
            return torch.randint(0, num, (ROWS, *batch["pixel_values"].shape[-2:]), generator=self.generator)
        if tasks[0] == "VISUAL_QUESTION_ANSWERING":
            words = self.words(ROWS, batch["input_ids"].shape[1])
            return words if self.spec.variant % 2 else torch.rand(ROWS, num, generator=self.generator)
        if tasks[0] == "AUDIO_FRAME_CLASSIFICATION":
            return None
        if "CLASSIFICATION" in tasks[0] or tasks[0] == "AUDIO_XVECTOR":
            return torch.randint(0, num, (ROWS,), generator=self.generator)
        return None


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # an encoder's and a decoder's
        return config.get_text_config(decoder=True)


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _pair(value: Any) -> tuple[Any, Any]:
    return (value[0], value[-1]) if isinstance(value, (tuple, list)) else (value, value)

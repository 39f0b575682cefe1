"""Which classes there are: transformers' auto-mappings, grouped into the kinds of models that the table shows."""

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from transformers.models.auto import modeling_auto

# Every mapping of these kinds; one that a later transformers adds shows up as missing in the test of the table.
KINDS: dict[str, tuple[str, ...]] = {
    "causal LM": ("CAUSAL_LM",),
    "seq2seq LM": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked LM": ("MASKED_LM",),
    "vision": (
        "IMAGE_CLASSIFICATION", "IMAGE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION",
        "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION",
        "MASKED_IMAGE_MODELING", "CAUSAL_IMAGE_MODELING", "IMAGE_TO_IMAGE", "IMAGE_MATTING", "NORMAL_ESTIMATION",
        "POINTMAP_ESTIMATION", "POSE_ESTIMATION", "MASK_GENERATION", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING",
        "VIDEO_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "BACKBONE", "IMAGE", "TEXT_RECOGNITION",
        "TABLE_RECOGNITION",
    ),
    "audio": (
        "CTC", "RNNT", "TDT", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION",
        "AUDIO_XVECTOR", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "AUDIO_TOKENIZATION",
    ),
    "vision-language": (
        "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING", "RETRIEVAL",
    ),
}  # fmt: skip

# Mappings of other kinds: the same models with another head, or base models without one.
ELSEWHERE = (
    "PRETRAINING", "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING", "TOKEN_CLASSIFICATION",
    "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION", "TEXT_ENCODING", "TIME_SERIES_CLASSIFICATION",
    "TIME_SERIES_REGRESSION", "TIME_SERIES_PREDICTION", "DECISION",
)  # fmt: skip


class Entry(NamedTuple):
    """One class of one or more mappings, with the config it is listed under first."""

    name: str
    model_type: str
    tasks: tuple[str, ...]


@cache
def _mapping(task: str) -> dict[str, tuple[str, ...]]:
    names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", None)
    if names is None:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_NAMES")
    return {model_type: (v,) if isinstance(v, str) else tuple(v) for model_type, v in names.items()}


def known_tasks() -> set[str]:
    """Every ``MODEL_FOR_*`` mapping of the installed transformers."""
    found = (re.fullmatch(r"MODEL_FOR_(\w+?)(?:_MAPPING)?_NAMES", name) for name in dir(modeling_auto))
    return {match.group(1) for match in found if match}


def entries(kind: str) -> list[Entry]:
    """The classes of a kind by name. A class of two kinds belongs to the first."""
    earlier = {e.name for k in list(KINDS)[: list(KINDS).index(kind)] for e in entries(k)}
    types: dict[str, str] = {}
    tasks: dict[str, list[str]] = {}
    for task in KINDS[kind]:
        for model_type, names in _mapping(task).items():
            for name in names:
                best = types.get(name)
                if best is None or _closeness(name, model_type) > _closeness(name, best):
                    types[name] = model_type
                if task not in tasks.setdefault(name, []):
                    tasks[name].append(task)
    return [Entry(n, types[n], tuple(tasks[n])) for n in sorted(types, key=str.lower) if n not in earlier]


def _closeness(name: str, model_type: str) -> int:
    """How much of the class name the config's name explains: a class may be listed under several configs."""
    flat = model_type.replace("_", "").replace("-", "").lower()
    return len(flat) if name.lower().startswith(flat) else 0


def all_entries() -> Iterator[tuple[str, Entry]]:
    for kind in KINDS:
        for entry in entries(kind):
            yield kind, entry

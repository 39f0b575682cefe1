"""The model to train, from a preset, a Hugging Face config file or a model folder: first its config, then its weights.

Reading the config is quick and tells all that must be checked against the text; building takes the memory. Only files
at hand are read, and no code that comes with a model is run (pickled weights are read as tensors and nothing else). A
model that comes with weights was trained on the ids of its tokenizer: bytes would be noise to it, so they have to be
asked for (``--bytes``), unless its vocabulary is that of bytes.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import nn

from gemini.config import GeminiConfig
from gemini.errors import GeminiError
from gemini.jobs.errors import JobError
from gemini.jobs.text import BYTE_VOCABULARY
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.ranks import launch
from gemini.train.ddp import GeminiDDP
from gemini.train.loading.attention import Attention
from gemini.train.loading.from_config import skeleton_from_config
from gemini.train.loading.from_pretrained import skeleton_from_pretrained
from gemini.train.loading.skeleton import Skeleton

PRESETS = ("gpt2-small",)


@dataclass(frozen=True)
class ModelSource:
    """A model not built yet: its config, the folder its weights come from (else drawn), its tokenizer's folder."""

    label: str
    config: Any
    weights: Path | None = None
    tokenizer: Path | None = None


def find_model(
    model: Path | None, preset: str | None, layers: int | None = None, *, as_bytes: bool = False
) -> ModelSource:
    """Read the config behind ``--model`` or ``--preset``, with ``--layers`` layers instead of its own if that is given.

    ``as_bytes``: whatever tokenizer there is, tokens are to be bytes.

    Raises:
        JobError: if there is no such thing, or it is not a causal language model that transformers knows.
    """
    if preset is not None:
        source = ModelSource(f"preset {preset}", _preset(preset))
    else:
        assert model is not None
        source = _from_path(model, as_bytes)
    if layers is not None:
        if source.weights is not None:
            raise JobError(
                f"--layers {layers} builds another model, but {model} has weights for its own layers. Drop one."
            )
        _set_layers(source.config, layers)
    if type(source.config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise JobError(
            f"{source.label} is of type {source.config.model_type!r}, which transformers has no causal language model "
            "for. `gemini train` trains models that predict the next token, such as GPT-2, Llama, Qwen or Mixtral."
        )
    return source


def find_config(name: str, layers: int | None = None) -> ModelSource:
    """The config behind a name: a preset, a config file or a model folder; of any model type, weights are not read.

    Raises:
        JobError: if there is no such thing.
    """
    path = Path(name)
    if name in PRESETS and not path.exists():
        source = ModelSource(f"preset {name}", _preset(name))
    else:
        file = _config_file(path, name)
        source = ModelSource(f"config {file}", _read_config(file, str(file)))
    if layers is not None:
        _set_layers(source.config, layers)
    return source


def lora_of(rank: int, source: ModelSource) -> Callable[[Any], Any]:
    """What puts a LoRA of ``rank`` on all linear layers of a model.

    Raises:
        JobError: for a model without weights, and without peft.
    """
    if source.weights is None:
        raise JobError(f"--lora {rank} adapts trained weights, and {source.label} has none: give a model folder.")
    return lora_on(rank)


def lora_on(rank: int) -> Callable[..., Any]:
    """peft's ``get_peft_model`` for a LoRA of ``rank`` on all linear layers of any model.

    Raises:
        JobError: without peft.
    """
    try:
        import peft
    except ImportError as e:
        raise JobError(f"--lora {rank} needs peft, an optional package ({e}): pip install 'peft>=0.17'") from e
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return partial(peft.get_peft_model, peft_config=config)


def outline_model(
    source: ModelSource, attention: Attention | None = None, adapt: Callable[[Any], Any] | None = None
) -> tuple[Skeleton, list[str]]:
    """The transformers model without values, from its config or what its files say they hold, and the params that
    these files lack.

    ``adapt``: changes a model with weights before they are read, as in ``gemini.from_pretrained``.

    Raises:
        JobError: if transformers cannot make it of these files.
    """
    with only_refusing(source, "built"):
        if source.weights is None:
            skeleton = skeleton_from_config(
                source.config,
                model_class=transformers.AutoModelForCausalLM,
                attention=attention,
                dtype=torch.float32,
            )
            return skeleton, []
        skeleton, info = skeleton_from_pretrained(
            source.weights,
            model_class=transformers.AutoModelForCausalLM,
            attention=attention,
            adapt=adapt,
            config=source.config,
            dtype="auto",
            local_files_only=True,
        )
        return skeleton, sorted(info["missing_keys"])


@contextmanager
def only_refusing(source: ModelSource, what: str) -> Iterator[None]:
    """Whatever transformers trips over in the block comes from the files and options it was given.

    Raises:
        JobError: saying that the model cannot be ``what``.
    """
    try:
        yield
    except (JobError, MemoryError):
        raise
    except Exception as e:
        said = str(e) if isinstance(e, GeminiError) else first_line(e)
        raise JobError(f"{source.label} cannot be {what}: {said}") from e


def quantize_model(
    source: ModelSource, precision: str, attention: Attention, adapt: Callable[[Any], Any] | None
) -> Any:
    """The transformers model with its linear layers in 4 bits, as QLoRA has them: transformers quantizes one param
    after the other while it reads, so that host memory takes the codes alone.

    Raises:
        JobError: without bitsandbytes, or if transformers cannot make it of these files.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as e:
        raise JobError(
            f"--load-in-4bit needs bitsandbytes, an optional package ({e}): pip install 'bitsandbytes>=0.50'"
        ) from e
    dtype = COMPUTE_DTYPES[precision]
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    kwargs = attention.keyword(source.config, transformers.AutoModelForCausalLM)
    with only_refusing(source, "built in 4 bits"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.weights,
            config=source.config,
            quantization_config=config,
            dtype=dtype,
            device_map="cpu",
            local_files_only=True,
            **kwargs,
        )
        return model if adapt is None else adapt(model)


def fill_model(outline: Skeleton | nn.Module, config: GeminiConfig, *, seed: int, mesh: Any = None) -> Any:
    """The managed model: weights read as they are stored, or drawn in fp32 from ``seed``, straight into the tiers."""
    # Drawn weights must not depend on what ran before, and what runs after must not depend on loading or drawing.
    draw_from(seed)
    if isinstance(outline, nn.Module):  # with its values already
        model = GeminiDDP(outline, config, mesh=mesh)
    else:
        model = outline.manage(config, mesh=mesh)
    draw_from(seed)
    return name_the_loss(model)


def draw_from(seed: int) -> None:
    """Let every random choice from here on follow from ``seed``; models draw from all three generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def name_the_loss(model: Any) -> Any:
    """Set the loss transformers would choose anyway: it warns about classes whose names tell it nothing."""
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    return model


def hush() -> None:
    """What libraries say beside a job would stand in the middle of its lines; all but the first process are silent."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Of what the libraries will rename, nobody who runs a command can change a call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|peft|transformers|trl)\.")
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # PEFT sets what is right itself
    if not launch.speaks():
        warnings.simplefilter("ignore")


def checkpoint_activations(model: Any) -> None:
    """Have the blocks of ``model`` compute their activations again in backward."""
    # Renamed in the course of transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _preset(name: str) -> Any:
    if name not in PRESETS:
        raise JobError(f"--preset {name}: there is no such preset. There is {', '.join(PRESETS)}.")
    return transformers.GPT2Config()  # its defaults are GPT-2 small


def _from_path(path: Path, as_bytes: bool) -> ModelSource:
    file = _config_file(path, f"--model {path}")
    config = _read_config(file, f"--model {file}")
    if path.is_file():
        return ModelSource(f"config {path}", config)
    pickled = [path / name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")]
    has_weights = any(path.glob("*.safetensors")) or any(file.is_file() for file in pickled)
    vocabulary = config.get_text_config().vocab_size
    tokenizer = None
    if not as_bytes and check_tokenizer(path, vocabulary=vocabulary, has_weights=has_weights):
        tokenizer = path
    if has_weights:
        return ModelSource(f"model folder {path}", config, weights=path, tokenizer=tokenizer)
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise JobError(
            f"--model {path}: the folder has pickled files, and neither safetensors nor a pytorch_model.bin. Other "
            "formats are not read; convert them with `model.save_pretrained(folder)` of transformers."
        )
    return ModelSource(f"config {file}", config, tokenizer=tokenizer)


def _config_file(path: Path, asked: str) -> Path:
    """The config.json that ``path`` is or holds; ``asked`` is how the user named it."""
    if not path.exists():
        raise JobError(
            f"{asked}: there is no such file or folder. Give a config.json or a folder that holds one; a name "
            "on a hub has to be downloaded first."
        )
    if path.is_file():
        return path
    if not (path / "config.json").is_file():
        raise JobError(f"{asked}: the folder has no config.json, so it is not a Hugging Face model folder.")
    return path / "config.json"


def _read_config(path: Path, asked: str) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:
        raise JobError(
            f"{asked}: transformers {transformers.__version__} refuses this config (code that comes with a model is "
            f"not run): {first_line(e)}"
        ) from e


def _set_layers(config: Any, layers: int) -> None:
    if getattr(config, "num_hidden_layers", None) is None:
        raise JobError(f"--layers {layers}: {config.model_type} configs have no single number of layers to change.")
    # Some families list a kind for each layer; a shorter model keeps the first ones.
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        if layers > len(kinds):
            raise JobError(f"--layers {layers}: the config names the kinds of {len(kinds)} layers; at most so many.")
        config.layer_types = kinds[:layers]
    config.num_hidden_layers = layers


def first_line(error: Exception) -> str:
    """What an error says, without the pages some libraries add."""
    lines = [line.strip() for line in str(error).strip().partition("\n\n")[0].splitlines()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}" if lines else type(error).__name__


# ---- tokenizers ------------------------------------------------------------------------------------------------------

_FILES = (
    "tokenizer.json tokenizer.model spiece.model sentencepiece.bpe.model sentencepiece.model spm.model "
    "tekken.json vocab.json merges.txt vocab.txt bpe.codes added_tokens.json tokenizer_config.json "
    "special_tokens_map.json"
).split()
_SAMPLE = "The quick brown fox jumps over 13 lazy dogs."
_BYTES = "Or say --bytes, if the model is meant to see bytes: then every byte is a token."


def tokenizer_files(folder: Path) -> list[str]:
    """The files in a model folder that belong to a tokenizer."""
    return [name for name in _FILES if (folder / name).is_file()]


def check_tokenizer(folder: Path, *, vocabulary: int, has_weights: bool) -> bool:
    """Whether the folder has a tokenizer to be loaded; else its model takes bytes.

    Raises:
        JobError: if there is none, and the model is pretrained on something else than bytes.
    """
    if tokenizer_files(folder):
        return True
    if has_weights and vocabulary not in (BYTE_VOCABULARY - 1, BYTE_VOCABULARY):
        raise JobError(
            f"--model {folder}: the folder has weights for a vocabulary of {vocabulary} and no tokenizer "
            f"(tokenizer.json, tokenizer.model, vocab.json with merges.txt, ...). Copy its files "
            f"into it. {_BYTES}"
        )
    return False


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        JobError: naming the files there are, if transformers cannot make a tokenizer of them that reads text.
    """
    found = ", ".join(tokenizer_files(folder))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        ids = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    except Exception as e:
        lines = " ".join(str(e).split())[:300]
        raise JobError(
            f"--model {folder}: its tokenizer ({found}) cannot be loaded: {type(e).__name__}: {lines} A tokenizer.json "
            f"(tokenizer.save_pretrained(folder) of transformers writes one) loads without further packages. {_BYTES}"
        ) from e
    # Of missing files transformers makes tokenizers that know nothing; what tokenizer.json says is the user's own.
    if not (folder / "tokenizer.json").is_file() and len({*ids} - {tokenizer.unk_token_id}) < 3:
        raise JobError(
            f"--model {folder}: what transformers makes of its tokenizer ({found}) has {len(tokenizer)} ids and cannot "
            f"read {_SAMPLE!r}: files of it are missing. Copy all of them into the folder. {_BYTES}"
        )
    return tokenizer


_CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """Every byte of UTF-8 is its own id, 256 ends a document: what a model of bytes is saved with."""
    import tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    end = "<|endoftext|>"
    kit = tokenizers.Tokenizer(tokenizers.models.BPE({char: byte for byte, char in bytes_to_unicode().items()}, []))
    kit.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    kit.decoder = tokenizers.decoders.ByteLevel()
    kit.add_special_tokens([end])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=kit, eos_token=end, pad_token=end, bos_token=end, chat_template=_CHAT
    )

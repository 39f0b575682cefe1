"""The model to train, from a preset, a Hugging Face config file, a model folder or a name: first its config, which is
quick to read and tells all that must be checked against the rows, then its weights. A config file alone is a model of
bytes. A folder has a tokenizer, whose ids the model may have learned: bytes have to be asked for (``--bytes``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import transformers

from gemini.jobs import JobError, refusing
from gemini.ranks import launch

_PRESET = "gpt2-small"


class ModelSource(NamedTuple):
    """A model not built yet: its config, and what its weights come from (None: they are drawn) and its tokenizer."""

    label: str
    config: Any
    weights: str | None = None
    tokenizer: str | None = None


def find_model(name: str, *, as_bytes: bool = False, trust: bool = False, revision: str = "main") -> ModelSource:
    """The model of that name. ``as_bytes``: tokens are bytes, even if there is a tokenizer; ``trust``: run its code."""
    asked, path = f"--model_name_or_path {name}", Path(name)
    source = find_config(name, asked=asked, trust=trust, revision=revision)
    if path.is_file() or (name == _PRESET and not path.exists()):
        return source
    source = source._replace(tokenizer=None if as_bytes else name)
    if path.exists() and not any((*path.glob("*.safetensors"), *path.glob("pytorch_model.bin*"))):
        if any((*path.glob("*.bin"), *path.glob("*.pt"))):
            raise JobError(
                f"{asked}: the folder has pickled files, and neither safetensors nor a pytorch_model.bin. Other "
                "formats are not read; convert them with `model.save_pretrained(folder)` of transformers."
            )
        return source
    return source._replace(label=f"model folder {path}" if path.exists() else name, weights=name)


def find_config(
    name: str, layers: int | None = None, *, asked: str | None = None, trust: bool = False, revision: str = "main"
) -> ModelSource:
    """The config behind a name, of any model type; weights are not read."""
    path = Path(name)
    if name == _PRESET and not path.exists():
        source = ModelSource(f"preset {name}", transformers.GPT2Config())  # its defaults are GPT-2 small
    else:
        if not path.exists():
            _look_for(name, revision, asked or name)
        code = "" if trust else " (code that comes with a model is not run)"
        with refusing(f"{asked or name}: transformers {transformers.__version__} refuses this config{code}"):
            config = transformers.AutoConfig.from_pretrained(
                name, local_files_only=path.exists(), trust_remote_code=trust, revision=revision
            )
        source = ModelSource(f"config of {name}", config)
    if layers is not None:
        kinds = getattr(source.config, "layer_types", None)  # of some families a kind for each layer
        if getattr(source.config, "num_hidden_layers", None) is None or len(kinds or range(layers)) < layers:
            raise JobError(f"--layers {layers}: {source.label} has no such number of layers to change to.")
        source.config.num_hidden_layers = layers
        if kinds is not None:  # a shorter model keeps the first ones
            source.config.layer_types = kinds[:layers]
    return source


def _look_for(name: str, revision: str, asked: str) -> None:
    """A JobError unless the hub's cache or the hub has the name; the hub is asked once (transformers asks for 23 s)."""
    with refusing(
        f"{asked}: no such file or folder here. As a name on the hub",
        " -- Check the name, or give a config.json or a model folder.",
    ):
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str):
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json", revision=revision))


def lora_on(rank: int) -> Callable[..., Any]:
    """peft's ``get_peft_model`` for a LoRA of ``rank`` on all linear layers of any model."""
    with refusing(f"--lora {rank} needs peft, an optional package", ": pip install 'peft>=0.17'"):
        import peft
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return partial(peft.get_peft_model, peft_config=config)


def hush() -> None:
    """Silence libraries, whose words would stand in the middle of a job's lines, and all processes but the first."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Of what the libraries will rename, nobody who runs a command can change a call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(accelerate|peft|transformers|trl)\.")
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # PEFT sets what is right itself
    if not launch.speaks():
        warnings.simplefilter("ignore")


_SAMPLE = "The quick brown fox jumps over 13 lazy dogs."
_REMEDY = (
    " Copy all of its files into the folder (tokenizer.save_pretrained(folder) of transformers writes them), or say "
    "--bytes, if the model is meant to see bytes: then every byte is a token."
)


def tokenizer_of(source: ModelSource, *, trust: bool = False, revision: str = "main") -> tuple[Any, str]:
    """The tokenizer of a model, and what it is; a JobError if it reads no text, or has more tokens than the model."""
    if source.tokenizer is None:
        tokenizer, words = byte_tokenizer(), "byte-level tokens (ids 0..255, 256 ends a document)"
    else:
        folder, asked = Path(source.tokenizer), f"--model_name_or_path {source.tokenizer}"
        with refusing(f"{asked}: its tokenizer cannot be loaded", f".{_REMEDY}"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source.tokenizer, local_files_only=folder.is_dir(), trust_remote_code=trust, revision=revision
            )
            ids = {*tokenizer.encode(_SAMPLE, add_special_tokens=False)} - {tokenizer.unk_token_id}
        # Of missing files transformers makes tokenizers that know nothing; what tokenizer.json says is the user's own.
        if folder.is_dir() and not (folder / "tokenizer.json").is_file() and len(ids) < 3:
            raise JobError(
                f"{asked}: the folder has no tokenizer, or a part of one, which cannot read {_SAMPLE!r}.{_REMEDY}"
            )
        words = f"tokenizer of {source.tokenizer} with {len(tokenizer)} ids"
    vocabulary = getattr(source.config.get_text_config(), "vocab_size", None)
    if vocabulary is None:
        raise JobError(f"{source.label} has no vocabulary, so it learns from no text: give a causal language model.")
    # Special tokens that no text becomes may be beyond it, as Gemma 3's for images is where it reads text alone.
    own, template = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}, str(tokenizer.chat_template)
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    unread = {number for number, token in special.items() if token not in own and token not in template}
    needed = 1 + max({*tokenizer.get_vocab().values()} - unread)
    if needed > vocabulary:
        raise JobError(
            f"{source.label} has a vocabulary of {vocabulary}; {words} need {needed}. Give a config with a "
            f"vocab_size of at least {needed}."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, words


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

"""The tokenizer of a model folder: which files say that there is one, and what is done where it cannot be loaded.

A model that comes with weights was trained on the ids of its tokenizer. Bytes would be noise to it, so they have to be
asked for (``--bytes``), unless its vocabulary is that of bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from gemini.jobs.errors import JobError
from gemini.jobs.sequences import BYTE_VOCABULARY

_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model",
    "spm.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt", "bpe.codes", "added_tokens.json",
    "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip
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

"""Which params a module reads in its own forward: what is gathered when it starts, and counted before it fits.

Most modules read the params they own. ``nn.ParameterDict`` and ``nn.ParameterList`` are never called, so whoever holds
them reads what is in them. A compiled module reads all that is under it, where nothing is called on its own any more,
and so does one that is computed in tiles, which would else read each of its weights once more for every tile. A tuner
layer of PEFT (LoRA and its kin around one layer of the base) reads all that is under it: DoRA takes the norm of the
base weight, IA3 scales it, LoHa and OFT build new weights out of factors. So does CPT, which bounds its prompts. So do
torch's own layers with a fused path for evaluation: it computes other bits than the plain one, and is taken only where
every param is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gemini.train.modules.compiled import compiled_part

READ_AS_A_WHOLE = "_gemini_computed_in_tiles"
"""The mark of a module that is computed in tiles of tokens."""

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def is_read_as_a_whole(module: nn.Module) -> bool:
    """Whether a module reads all that is under it when it is called, and nothing under it is called on its own."""
    return compiled_part(module) is not None or READ_AS_A_WHOLE in module.__dict__


def is_a(kind: type, name: str) -> bool:
    """Whether a class is, or comes from, PEFT's class of that name. By name: PEFT need not be installed."""
    return any(c.__name__ == name and c.__module__.startswith("peft.") for c in kind.__mro__)


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether PEFT has put this module around one of the base model."""
    return is_a(type(module), "BaseTunerLayer")


def params_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The params that ``module`` reads itself, when it is called."""
    of_peft = is_tuner_layer(module) or is_a(type(module), "CPTEmbedding")
    if of_peft or is_read_as_a_whole(module) or isinstance(module, _FUSED):
        yield from module.parameters()
        return
    if isinstance(module, nn.TransformerEncoder) and len(module.layers):
        yield from module.layers[0].parameters()  # they decide on nested tensors
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module.children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            yield from params_read_by(child)


def readers(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Parameter, ...]]]:
    """Every module that is called on its own, by path, with the params it reads itself."""
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Parameter, ...]]]:
        if module in seen:
            return
        seen.add(module)
        yield path, module, tuple(params_read_by(module))
        if not is_read_as_a_whole(module):
            for name, child in module.named_children():
                yield from visit(f"{path}.{name}" if path else name, child)

    yield from visit("", model)


def adapter_params(model: nn.Module) -> set[int]:
    """The params (by ``id``) of all adapters, of those too that are not active now and so do not require gradients.

    They are laid out as trained ones, so that ``set_adapter`` finds states for them, and not beside base weights,
    which would get states with them.
    """
    adapters: set[int] = set()
    base: set[int] = set()

    def visit(module: nn.Module, in_adapter: bool) -> None:
        (adapters if in_adapter else base).update(id(param) for param in module._parameters.values())
        around = is_tuner_layer(module) or is_a(type(module), "AuxiliaryTrainingWrapper")
        for name, child in module.named_children():
            if around:
                visit(child, name not in ("base_layer", "original_module"))
            else:
                visit(child, in_adapter or (name == "prompt_encoder" and is_a(type(module), "PeftModel")))

    visit(model, False)
    return adapters - base

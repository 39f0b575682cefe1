"""Which params a module reads in its own forward: what is gathered when it starts, and counted before it fits.

Most modules read the params they own. ``nn.ParameterDict`` and ``nn.ParameterList`` are never called, so whoever holds
them reads what is in them. A tuner layer of PEFT (LoRA and its kin around one layer of the base) reads all that is
under it: DoRA takes the norm of the base weight, IA3 scales it, LoHa and OFT build new weights out of factors.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def is_a(kind: type, name: str) -> bool:
    """Whether a class is, or comes from, PEFT's class of that name. By name: PEFT need not be installed."""
    return any(c.__name__ == name and c.__module__.startswith("peft.") for c in kind.__mro__)


def is_tuner_layer(module: nn.Module) -> bool:
    """Whether PEFT has put this module around one of the base model."""
    return is_a(type(module), "BaseTunerLayer")


def params_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The params that ``module`` reads itself, when it is called."""
    if is_tuner_layer(module):
        yield from module.parameters()
        return
    yield from (param for param in module._parameters.values() if param is not None)
    for child in module.children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            yield from params_read_by(child)


def adapter_params(model: nn.Module) -> set[int]:
    """The params (by ``id``) of all adapters, of those too that are not active now and so do not require gradients.

    They are laid out as trained ones, so that ``set_adapter`` finds moments for them, and not beside base weights,
    which would get moments with them.
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

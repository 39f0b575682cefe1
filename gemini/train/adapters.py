"""What a managed model does when it is a ``PeftModel``: merging gathers, and what would add params is refused.

``GeminiDDP(get_peft_model(model, peft_config))`` is both; its class gets :class:`ManagedAdapters` as well. Training,
``save_pretrained``, ``set_adapter`` and ``disable_adapter`` are PEFT's own. Told by names, so that PEFT is never
imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from gemini.errors import GeminiError
from gemini.interrupts import call_without_grad
from gemini.ranks.agree import Attempt, Point
from gemini.train.engine import engine_of
from gemini.train.modules.codes import first_coded
from gemini.train.modules.reading import Structure, is_a, is_tuner_layer
from gemini.train.params.exposure import take_in
from gemini.train.params.handle import handle_of, handles_of
from gemini.train.params.state_dict import own_state
from gemini.train.sharding.shards import Company
from gemini.train.wrap import unmanage


def _refusal(what: str) -> GeminiError:
    return GeminiError(
        f"{what} on a managed model: params of a new adapter would not be managed. Add adapters first and wrap "
        "after, GeminiDDP(get_peft_model(model, peft_config), config); set_adapter() switches between those that are "
        "there"
    )


def refused(error: Exception) -> Any:
    """A method that a managed model refuses."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise copy.copy(error)  # a new one each time: it keeps the frames that it comes through

    return method


class ManagedAdapters:
    """The methods of ``PeftModel`` that read or write base weights, or change which params there are."""

    __dict__: dict[str, Any]
    _gemini_original: Any
    base_model: Any
    gathered: Any
    _modules: dict[str, nn.Module]
    peft_config: Any

    def save_pretrained(
        self,
        save_directory: Any,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: Any = "auto",
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """As in PEFT: an ordinary adapter directory, in the compute dtype. Base weights are not read for it.

        With several ranks all of them call it with the same directory; the first one writes.
        """
        company = engine_of(self).shards
        kwargs |= {
            "safe_serialization": safe_serialization,
            "selected_adapters": selected_adapters,
            "save_embedding_layers": save_embedding_layers,
            "is_main_process": is_main_process and company.ranks.everyone.rank == 0,
        }
        # Prompt tuning calls its encoder to save what it gives.
        if not company.ranks.shares_params:
            prompts = self._modules.get("prompt_encoder", nn.Module())
            with self.gathered(prompts.parameters()):  # some of them are saved as they are
                call_without_grad(super().save_pretrained, save_directory, **kwargs)  # type: ignore[misc]
        else:
            call_without_grad(self._save_together, company, Path(save_directory), kwargs)

    def _save_together(self, company: Company, directory: Path, kwargs: dict[str, Any]) -> None:
        """All ranks go through PEFT's saving side by side, for what it reads takes all of them."""
        engine = engine_of(self)
        engine.state.check_whole()
        if kwargs.get("state_dict") is None:
            kept = Structure(self).adapters  # type: ignore[arg-type]
            for name in ("get_input_embeddings", "get_output_embeddings"):  # a base of the user's own may have none
                module = getattr(self, name, lambda: None)()
                if kwargs["save_embedding_layers"] and module is not None:
                    kept |= {id(param) for param in module.parameters()}
            state = own_state(self)  # type: ignore[arg-type]
            kwargs["state_dict"] = {
                name: value if handle is None else engine.by_names.read(handle)
                for name, value in state.items()
                for handle in [handle_of(value)]
                if handle is None or handle.param.requires_grad or id(value) in kept
            }
        # Held back until all ranks are here: one that raised alone would leave the others waiting.
        with Attempt(BaseException) as attempt:
            self._gemini_original.save_pretrained(self, directory, **kwargs)
        # A rank may return only when the files are there, on whichever rank they are written.
        company.ranks.waiting.wait_for_all("save_pretrained")
        company.agree_on_folder(Point.EXPORT, "save_pretrained", directory, attempt.refusal)

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """As in PEFT: the base model with the adapters merged into its weights, as an *ordinary* model on the CPU.

        Every weight is gathered first, in the compute dtype (2 bytes per param in half precision), so this needs host
        memory for the whole model. Nothing is managed afterwards: this object is an ordinary ``PeftModel`` then, taken
        apart as PEFT does it, and optimizers made for it are of no use. With several ranks all of them call it.

        Raises:
            BudgetExceeded: if the host has not the memory; nothing was changed.
        """
        # Before unmanaging, after which there is no way back.
        _check_merge_allowed(self.base_model)
        unmanage(self, "merge_and_unload()")  # type: ignore[arg-type]
        return self.base_model.merge_and_unload(*args, **kwargs)

    def unload(self, *args: Any, **kwargs: Any) -> Any:
        """As in PEFT: the base model without the adapters, an ordinary model on the CPU as of merge_and_unload."""
        unmanage(self, "unload()")  # type: ignore[arg-type]
        return self.base_model.unload(*args, **kwargs)

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """As in PEFT: add the adapters to the base weights, in place and one layer at a time; the model stays managed.

        The sum is rounded to the dtype of the base weights, as PEFT does with a base of that dtype.
        """
        _check_merge_allowed(self.base_model)
        _refuse_coded(self, "merge_adapter()")  # type: ignore[arg-type]
        for layer in _tuner_layers(self):  # type: ignore[arg-type]
            # One layer at a time: room for the weights of one is enough, and Ctrl-C leaves whole layers.
            with _written(self, layer):
                layer.merge(adapter_names=adapter_names, safe_merge=safe_merge)

    def unmerge_adapter(self) -> None:
        """As in PEFT: subtract what :meth:`merge_adapter` added, with the same rounding as there."""
        _refuse_coded(self, "unmerge_adapter()")  # type: ignore[arg-type]
        for layer in _tuner_layers(self):  # type: ignore[arg-type]
            with _written(self, layer):
                layer.unmerge()

    def load_adapter(self, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """As in PEFT, into an adapter that is there; a new one is refused (GeminiError). Its dtype stays."""
        if adapter_name not in self.peft_config:
            raise _refusal(f"load_adapter(..., {adapter_name!r})")
        # PEFT would cast the adapter's params to fp32, which chunks refuse.
        kwargs["autocast_adapter_dtype"] = False
        return super().load_adapter(model_id, adapter_name, *args, **kwargs)  # type: ignore[misc]

    add_adapter = refused(_refusal("add_adapter()"))
    add_weighted_adapter = refused(_refusal("add_weighted_adapter()"))

    def delete_adapter(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Refused: the memory of an adapter belongs to the chunks that were laid out for it."""
        raise GeminiError(
            f"delete_adapter({adapter_name!r}) on a managed model: its chunks stay as they were laid out. Delete it "
            "before GeminiDDP(model), or choose the others with set_adapter()"
        )


class NoAdapters:
    """The methods by which a transformers model takes adapters in, of one that is managed without."""

    add_adapter = refused(_refusal("add_adapter()"))
    load_adapter = refused(_refusal("load_adapter()"))


def faces_of(original: type[nn.Module]) -> tuple[type, ...]:
    """Find what the class of a managed model has beside ``GeminiDDP`` and the original."""
    if is_a(original, "PeftModel"):
        return (ManagedAdapters,)
    return (NoAdapters,) if hasattr(original, "load_adapter") else ()


def refuse_unsupported(structure: Structure) -> None:
    """Refuse adapters that cannot be trained in chunks, before anything is managed: a ValueError with the remedy."""
    for _, module in structure.modules:
        if is_a(type(module), "AdaLoraModel"):
            raise ValueError(
                "AdaLoRA chooses the ranks of its adapters by p.grad in update_and_allocate(), and gradients of a "
                "managed model live in chunks: train with LoraConfig (or DoRA: use_dora=True) instead"
            )
        if len(getattr(module, "lora_magnitude_vector", ())) and (coded := first_coded(module)):
            raise ValueError(
                f"DoRA (use_dora=True) on 4-bit weights ({coded!r}): PEFT puts a new param in the place of the weight "
                "in each forward, which nobody manages. Train with LoraConfig without it, or with the base in bf16"
            )


def _check_merge_allowed(tuner: Any) -> None:
    if not hasattr(tuner, "merge_adapter"):
        raise GeminiError(f"{type(tuner).__name__} has nothing to merge: its prompts are not part of any weight")
    tuner._check_merge_allowed()


def _refuse_coded(model: nn.Module, what: str) -> None:
    if coded := first_coded(model):
        raise GeminiError(
            f"{what} on a base of 4-bit codes ({coded!r}): PEFT would put new params in their place, which nobody "
            "manages. merge_and_unload() gives an ordinary model, its sum rounded to 4 bits; or save the adapter and "
            "merge it into the base in bf16"
        )


def _tuner_layers(model: nn.Module) -> Iterator[Any]:
    layers = [module for module in model.modules() if is_tuner_layer(module)]
    if not layers:
        raise GeminiError("there are no adapter layers to merge or to unmerge in this model")
    yield from layers


@contextmanager
def _written(model: Any, layer: nn.Module) -> Iterator[None]:
    """``gathered(write=True)`` for one tuner layer; what PEFT puts in place of a weight is copied into it."""
    engine_of(model).state.check_masters("merging or unmerging adapters")  # it would add averages to the frozen base
    handles = handles_of(layer.parameters())
    with model.gathered([handle.param for handle in handles], write=True):
        yield
        # Before the block ends, which takes over what is in the window and refuses other memory.
        for handle in handles:
            take_in(handle)

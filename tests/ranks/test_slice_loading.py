"""``from_pretrained`` over ``tp`` and ``ep`` reads of each file what is here, and gets the bits of the whole model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import gemini
from gemini.train.loading.from_pretrained import SliceReading
from gemini.train.params.by_name import ByName
from gemini.train.params.handle import ParamHandle
from tests.ranks.expert_cases import KINDS, Case, moe, tiny
from tests.ranks.parallel_cases import mesh_of
from tests.ranks.pool import Pools
from tests.ranks.test_expert_parallel import FAMILIES as EXPERTS
from tests.ranks.test_slices import FAMILIES, small
from tests.train import helpers
from tests.world import world_of


class Read:
    """Elements that transformers reads inside: of whole tensors, and of slices."""

    def __init__(self) -> None:
        from transformers import core_model_loading

        self.whole = self.of_slices = 0
        self._module: Any = core_model_loading
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Read:
        copy, read, read_whole = self._module._materialize_copy, SliceReading.shard_tensor, ByName.read_whole

        def whole(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            found = copy(tensor, *args, **kwargs)
            self.whole += 0 if found.is_meta else found.numel()
            return found

        def of_slice(reading: SliceReading, *args: Any, **kwargs: Any) -> Any:
            found = read(reading, *args, **kwargs)
            self.of_slices += 0 if found is None else found.numel()
            return found

        def read_back(homes: ByName, handle: ParamHandle, *args: Any) -> Any:
            assert handle.cut is None, "a slice that has gone home is read again"
            return read_whole(homes, handle, *args)

        self._patches.enter_context(patch.object(self._module, "_materialize_copy", whole))
        self._patches.enter_context(patch.object(SliceReading, "shard_tensor", of_slice))
        self._patches.enter_context(patch.object(ByName, "read_whole", read_back))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()


def loaded(sizes: dict[str, int], path: str, folder: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The whole state; and elements that were read and should be: of whole params, and of slices."""
    import transformers
    from transformers import AutoConfig

    kind = AutoConfig.from_pretrained(path).architectures[0]
    memory = gemini.MemoryBudget(cpu="256MiB", nvme="256MiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(device="cpu", precision="bf16", memory=memory, placement=placement)
    with Read() as read:
        model: Any = gemini.from_pretrained(
            path, config, mesh=mesh_of(sizes), dtype=torch.bfloat16, model_class=getattr(transformers, kind)
        )
    handles, state = world_of(model).handles, model.state_dict(dtype=torch.float32)
    wanted = [sum(h.slot.numel for h in handles if (h.cut is not None) is sliced) for sliced in (False, True)]
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted[0] += sum(value.numel() for name, value in state.items() if name not in params)
    return state, [read.whole, read.of_slices, *wanted]


def made(kind: str) -> Any:
    if kind in EXPERTS:
        return moe(Case(kind))
    return small(kind) if kind in FAMILIES else tiny(kind)


QUICK = (("tp", "mixtral"), ("tp", "t5"), ("ep", "deepseek_v3"))
SLOW = [case for case in [*(("tp", kind) for kind in FAMILIES), *(("ep", kind) for kind in KINDS)] if case not in QUICK]


@pytest.mark.parametrize(("dim", "kind"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_only_slices_are_read(dim: str, kind: str, pool_of: Pools, tmp_path: Path) -> None:
    model = made(kind)
    path, folder = str(tmp_path / "model"), str(tmp_path)
    model.save_pretrained(path)
    wanted = type(model).from_pretrained(path, dtype=torch.bfloat16).state_dict()
    for state, (whole, of_slices, wanted_whole, wanted_slices) in pool_of(2).run(loaded, {dim: 2}, path, folder):
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert helpers.same_bits(state[name], value.to(state[name].dtype)), name
        assert (whole, of_slices) == (wanted_whole, wanted_slices)


def loaded_with_more_words(path: str) -> tuple[dict[str, torch.Tensor], set[str]]:
    config: Any = gemini.GeminiConfig(device="cpu", precision="fp32")
    torch.manual_seed(0)
    model, info = gemini.from_pretrained(
        path, config, mesh=mesh_of({"tp": 2}), vocab_size=256, ignore_mismatched_sizes=True, output_loading_info=True
    )
    return model.state_dict(), {name for name, *_ in info["mismatched_keys"]}


def test_params_of_another_size_are_drawn(pool_of: Pools, tmp_path: Path) -> None:
    """A slice of the embedding has as many rows as the whole one in the file."""
    model = small("llama")
    model.save_pretrained(tmp_path)
    (first, names), (second, _) = pool_of(2).run(loaded_with_more_words, str(tmp_path))
    assert names == {"model.embed_tokens.weight", "lm_head.weight"}
    for name, value in model.state_dict().items():
        if name in names:
            assert first[name].shape == (256, 64) and not torch.equal(first[name][:128], value)
        else:
            assert torch.equal(first[name], value), name
        assert torch.equal(first[name], second[name]), name


def grown(model: Any) -> Any:
    """More words, and another weight of a layer that is cut."""
    model.resize_token_embeddings(160, mean_resizing=False)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    return model


def loaded_and_grown(path: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    config: Any = gemini.GeminiConfig(device="cpu", precision="fp32")
    model = gemini.from_pretrained(path, config, mesh=mesh_of({"tp": 2}), adapt=grown)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_what_was_adapted_is_cut(pool_of: Pools, tmp_path: Path) -> None:
    model = small("llama")
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    wanted = grown(type(model).from_pretrained(tmp_path)).state_dict()
    for state in pool_of(2).run(loaded_and_grown, str(tmp_path)):
        for name, value in wanted.items():
            assert torch.equal(state[name], value), name

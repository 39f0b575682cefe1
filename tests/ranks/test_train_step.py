"""``gemini.train_step``: micro-batches block by block have the bits of one after another, and fetch weights once."""

import gc
import random
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

import gemini
from gemini.pipeline import micro_batches
from gemini.pipeline.stages import Placeholder
from tests.ranks.parallel_cases import Found, config_for, hybrid_adam, train
from tests.ranks.pipeline_cases import STEPS, half
from tests.ranks.test_slices import small
from tests.train import helpers
from tests.world import world_of

QUICK = ("llama", "gpt_neox")
MORE = ("qwen2", "qwen3", "mistral", "phi3", "olmo2", "granite", "starcoder2", "gemma2")
"""With heads of their own here. Together ten families."""


def unequal(step: int, number: int = 4) -> list[dict[str, Any]]:
    """Micro-batches with labels of unequal counts."""
    draw = torch.Generator().manual_seed(step)
    batches = []
    for i in range(number):
        ids = torch.randint(3, 128, (2, 12), generator=draw)
        labels = ids.clone()
        labels[:, : 2 * i] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def per_token(batches: list[dict[str, Any]]) -> Any:
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)

    def loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        logits = output.logits[:, :-1].float().flatten(0, 1)
        losses: torch.Tensor = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
        return losses / total

    return loss


def untied(kind: str) -> Any:
    """A small model of a family, whose head is its own and which drops nothing."""
    model = small(kind)
    config = model.config
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    config.tie_word_embeddings = False
    return type(model)(config).train()


def round_sums(model: Any) -> None:
    """What is retained of a sum: each of fp32 rounded once."""
    gradients = model._gemini_engine.backward.gradients
    for handle in model._gemini_engine.params.handles:
        if handle.has_grad:
            rounded = gradients.own_part(handle).bfloat16().float()
            handle.norm_sums = None
            gradients.add_part(handle, rounded)


def both(make: Any, where: str, folder: str, *, own_loss: bool = False, **settings: Any) -> tuple[Found, Found]:
    """Steps block by block, and by the ordinary loop. What bf16 retains of a sum is rounded."""
    found, rounds = [], settings.get("precision") == "bf16" and "gradients" not in settings
    for by_block in (True, False):
        torch.manual_seed(0)
        sums = {"gradients": "accumulate"} if rounds and not by_block else {}
        model: Any = gemini.GeminiDDP(make(), config_for(where, folder, **settings, **sums))
        world, fetched = world_of(model), 0

        def compute(step: int, model: Any = model, by_block: bool = by_block, world: Any = world) -> float:
            nonlocal fetched
            batches, before = unequal(step), world.num_gathers
            loss = per_token(batches) if own_loss else lambda output, batch: output.loss / 4
            if by_block:
                losses = gemini.train_step(model, batches, loss if own_loss else None)
            else:
                parts = []
                for batch in batches:
                    own = loss(model(**batch), batch)
                    own.backward()
                    parts.append(own.detach())
                losses = torch.stack(parts)
                round_sums(model) if rounds else None
            fetched = world.num_gathers - before
            return losses.sum().item()

        found.append(train(model, hybrid_adam(model), compute, steps=STEPS)._replace(fetched=fetched))
    return found[0], found[1]


def assert_same(found: Found, plain: Found) -> None:
    assert (found.losses, found.norms) == (plain.losses, plain.norms)
    assert found.state.keys() == plain.state.keys()
    assert all(helpers.same_bits(value, plain.state[name]) for name, value in found.state.items())


@pytest.fixture(autouse=True)
def nothing_is_said() -> Iterator[None]:
    """A model that is computed in the ordinary order by mistake would pass all comparisons."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="train_step")
        warnings.filterwarnings("error", message="tile_tokens")
        yield


@pytest.mark.parametrize("own_loss", [False, True], ids=["mean", "per token"])
@pytest.mark.parametrize(
    "settings",
    [
        {"gradients": "accumulate"}, {"precision": "bf16"},
        {"precision": "bf16", "states": "compact", "gradients": "accumulate_bf16"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("where", ["ram", "disk", "standin"])
def test_the_bits_of_accumulation(where: str, settings: dict[str, Any], own_loss: bool, tmp_path: Any) -> None:
    def make() -> Any:
        model = half().train()
        model.activation_checkpointing_enable() if own_loss else None
        return model

    assert_same(*both(make, where, str(tmp_path), own_loss=own_loss, **settings))


def adapted(**how: Any) -> Any:
    return peft.get_peft_model(untied("llama"), peft.LoraConfig(r=4, target_modules="all-linear", **how)).train()


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def compiled(model: Any) -> Any:
    for block in model.model.layers:
        block.compile(backend="eager")
    return model


def asked_for_states(model: Any) -> Any:
    """From here on transformers has a hook on each block."""
    model(**unequal(0)[0], output_hidden_states=True)
    return model


def patched(model: Any) -> Any:
    """As TRL puts a fused head in: by a function that has the forward that was there, tiles and all."""
    own = model.forward

    def forward(self: Any, **batch: Any) -> Any:
        return own(**batch)

    model.forward = MethodType(forward, model)
    return model


def test_a_forward_that_was_put_around_tiles_is_cut(tmp_path: Any) -> None:
    def found(by_block: bool) -> torch.Tensor:
        torch.manual_seed(0)
        config = config_for("disk", str(tmp_path), gradients="accumulate", tile_tokens="head=5,mlp=7")
        model: Any = patched(gemini.GeminiDDP(untied("llama"), config))
        if by_block:
            return gemini.train_step(model, unequal(0))
        return torch.stack([model(**batch).loss.detach() / 4 for batch in unequal(0)])

    assert helpers.same_bits(found(True), found(False))


@pytest.mark.parametrize(
    "make, settings",
    [
        (lambda: untied("llama"), {"tile_tokens": 5}),
        (lambda: untied("llama"), {"tile_tokens": "head=5"}),
        (lambda: checkpointed(untied("llama")), {"tile_tokens": "head=5,mlp=7"}),
        (lambda: checkpointed(untied("llama")), {"kept_blocks": 1, "offload_activations": "nvme"}),
        (lambda: checkpointed(untied("llama"), reentrant=True), {}),
        (lambda: compiled(untied("llama")), {}),
        (adapted, {}),
        (partial(adapted, use_dora=True, modules_to_save=["lm_head"]), {}),
        (lambda: checkpointed(adapted()), {"precision": "bf16"}),
        (lambda: untied("mixtral"), {}),
        (lambda: asked_for_states(untied("llama")), {}),
    ],
    ids="tiles head both kept reentrant compiled lora dora checkpointed-lora moe states".split(),
)  # fmt: skip
def test_models_as_programs_change_them_are_cut(make: Any, settings: dict[str, Any], tmp_path: Any) -> None:
    """Where they could not be, a warning would say so, which is an error here."""
    assert_same(*both(make, "disk", str(tmp_path), **{"gradients": "accumulate", **settings}))


def with_routers(model: Any) -> Any:
    model.config.output_router_logits = True
    return model


def test_each_block_is_read_twice_and_its_gradients_land_once(tmp_path: Any) -> None:
    """On a drive: eight micro-batches read and write what two do."""
    moved = []
    for number in (2, 8):
        config = config_for("serial", str(tmp_path), precision="bf16", gradients="accumulate")
        model: Any = gemini.GeminiDDP(half().train(), config)
        optimizer = hybrid_adam(model)
        gemini.train_step(model, unequal(0, number))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(model.memory_report()["moved"])
    assert moved[0] == moved[1] and moved[0]["nvme->cpu"] > 0


@pytest.mark.parametrize(
    "make, settings, why",
    [
        (partial(half, tie_word_embeddings=True), {}, "is also"),
        (partial(half, attention_dropout=0.1), {}, "dropout"),
        (partial(small, "t5"), {}, "pass on hidden states alone$"),
        (half, {"precision": "fp16"}, "loss scale"),
        (lambda: with_routers(untied("mixtral")), {}, "a loss of its routers"),
        (partial(adapted, lora_dropout=0.1), {}, "dropout"),
    ],
    ids=["tied", "dropout", "encoder-decoder", "fp16", "routers", "adapters"],
)  # fmt: skip
def test_what_cannot_be_cut_is_computed_one_after_another(make: Any, settings: Any, why: str, tmp_path: Any) -> None:
    config = config_for("disk", str(tmp_path), **{"gradients": "accumulate", **settings})
    model: Any = gemini.GeminiDDP(make().train(), config)
    scaler = gemini.GradScaler(enabled="precision" in settings)

    def scaled(output: Any, batch: Any) -> torch.Tensor:
        return scaler.scale(output.loss / 4)  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match=f"one after another.*{why}"):
        losses = gemini.train_step(model, unequal(0), scaled)
    assert losses.shape == (4,) and not losses.requires_grad
    gemini.train_step(model, unequal(1), scaled)  # said once: a warning would be an error


OF_LIGER = """
def of_liger(function):
    def forward(*args, **kwargs):
        refuse((args, kwargs))
        return function(*args, **kwargs)
    return forward
"""


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_kernels_that_read_values_are_looked_through(kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Liger puts its own in: forwards, and a function for rope. Like Triton they take no tensors without values."""

    def refuse(values: Any) -> None:
        for leaf in tree_leaves(values):
            assert not isinstance(leaf, FakeTensor) and not getattr(leaf, "is_meta", False)

    package: dict[str, Any] = {"__name__": "liger_kernel.ops", "refuse": refuse}
    exec(OF_LIGER, package)
    of_liger = package["of_liger"]

    def make() -> Any:
        model = untied(kind)
        parts = [[layer.mlp, layer.input_layernorm, layer.post_attention_layernorm] for layer in model.model.layers]
        for module in (model, model.model.norm, *sum(parts, [])):
            module.forward = MethodType(of_liger(type(module).forward), module)
        return model

    family = sys.modules[type(untied(kind)).__module__]
    monkeypatch.setattr(family, "apply_rotary_pos_emb", of_liger(family.apply_rotary_pos_emb))
    assert_same(*both(make, "disk", str(tmp_path)))


def test_sums_of_a_stage_come_before_windows_that_are_read_later(tmp_path: Any) -> None:
    """Each window is fetched once more then; sums elsewhere are read and written for each micro-batch."""
    moved = []
    for number in (2, 8):
        config = config_for("serial", str(tmp_path), precision="bf16", gradients="accumulate")
        config = replace(config, memory=replace(config.memory, cpu="1000KiB"))
        model: Any = gemini.GeminiDDP(half().train(), config)
        gemini.train_step(model, unequal(0, number))
        hybrid_adam(model).step()
        moved.append(model.memory_report()["moved"])
    assert moved[0] == moved[1] and moved[0]["cpu->nvme"] > 0


@pytest.mark.parametrize(
    ("where", "gradients", "by_block"),
    [("ram", "accumulate", False), ("ram", "retain", True), ("disk", "accumulate", True)],
)
def test_where_nothing_moves_micro_batches_are_computed_one_after_another(
    where: str, gradients: Any, by_block: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is said of it. What is retained has sums for a stage alone."""
    own, num_calls = micro_batches.breadth_first, 0

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return own(*args, **kwargs)

    monkeypatch.setattr(micro_batches, "breadth_first", counting)
    model: Any = gemini.GeminiDDP(half().train(), config_for(where, str(tmp_path), gradients=gradients))
    gemini.train_step(model, unequal(0))
    assert num_calls == by_block


def test_one_stage_has_all_blocks_where_nothing_moves_and_all_sums_fit(tmp_path: Any) -> None:
    """With the bits of one for each block: sums are rounded once in both."""
    found = []
    for cpu, is_one in (("64MiB", True), ("2700KiB", False)):
        torch.manual_seed(0)
        config = config_for("ram", str(tmp_path), gradients="retain", precision="bf16")
        model: Any = gemini.GeminiDDP(half().train(), replace(config, memory=replace(config.memory, cpu=cpu)))
        losses = gemini.train_step(model, unequal(0))
        assert len(model.__dict__[micro_batches._SEEN].stages) == (1 if is_one else len(model.model.layers))
        found.append((losses, {name: model.full_grad(name) for name, _ in model.named_parameters()}))
    (losses, grads), (other_losses, other_grads) = found
    assert helpers.same_bits(losses, other_losses)
    assert all(helpers.same_bits(grad, other_grads[name]) for name, grad in grads.items())


def test_stages_compute_no_loss_where_labels_are_the_inputs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stood_for, own = set[str](), Placeholder.forward

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        stood_for.add(type(self.__dict__["twin"]).__name__)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Placeholder, "forward", noting)
    model: Any = gemini.GeminiDDP(half().train(), config_for("disk", str(tmp_path), gradients="accumulate"))
    gemini.train_step(model, [{"input_ids": batch["input_ids"], "labels": batch["input_ids"]} for batch in unequal(0)])
    assert stood_for == {"Embedding"}


def test_a_step_keeps_its_place_between_micro_batches(tmp_path: Any) -> None:
    """What was lost would be fetched from the beginning of the step again, for each of them."""
    model: Any = gemini.GeminiDDP(half().train(), config_for("disk", str(tmp_path), gradients="accumulate"))
    manager, places = model._gemini_engine.store.manager, list[int]()
    own = manager.look_ahead
    manager.look_ahead = lambda **how: places.append(manager.foresight.place) or own(**how)
    gemini.train_step(model, unequal(0))
    assert len(places) > 8 and places == sorted(places)


def test_what_changes_between_steps_is_looked_at(tmp_path: Any) -> None:
    model: Any = gemini.GeminiDDP(half().train(), config_for("disk", str(tmp_path), gradients="accumulate"))
    gemini.train_step(model, unequal(0))
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.warns(UserWarning, match="one after another.*dropout"):
        gemini.train_step(model, unequal(1))


def test_a_model_is_freed(tmp_path: Any) -> None:
    model: Any = gemini.GeminiDDP(half().train(), config_for("disk", str(tmp_path), gradients="accumulate"))
    gemini.train_step(model, unequal(0))
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_refusals(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="given none"):
        gemini.train_step(half(), [])
    with pytest.raises(ValueError, match="not managed"):
        gemini.train_step(half(), unequal(0))


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_families(kind: str, tmp_path: Any) -> None:
    assert_same(*both(partial(untied, kind), "disk", str(tmp_path), own_loss=True, precision="bf16"))


LEFT: dict[str, torch.Tensor] = {}


class Leaving(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LEFT["x"] = super().forward(x)
        return LEFT["x"]


class LeftSomewhere(nn.Module):
    """What comes after the blocks takes what the last of them has left; nothing before the second one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), Leaving(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * LEFT.pop("x")


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_what_is_left_somewhere_and_what_is_frozen(where: str, tmp_path: Any) -> None:
    batches = [{"x": torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]
    found = []
    for by_block in (True, False):
        torch.manual_seed(0)
        model: Any = gemini.GeminiDDP(LeftSomewhere(), config_for(where, str(tmp_path), gradients="accumulate"))
        if by_block:
            losses = gemini.train_step(model, batches, lambda output, _: output.square().mean())
        else:
            parts = [model(**batch).square().mean() for batch in batches]
            for part in parts:
                part.backward()
            losses = torch.stack(parts).detach()
        found.append((losses, {name: model.full_grad(name) for name, _ in model.named_parameters()}))
    (losses, grads), (plain_losses, plain_grads) = found
    assert helpers.same_bits(losses, plain_losses) and grads["blocks.0.weight"] is None
    assert all(grad is None or helpers.same_bits(grad, plain_grads[name]) for name, grad in grads.items())


# ---- ways that were not seen -----------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks between two layers; ``forward`` may go another way than at first."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
        self.label = nn.Embedding(5, 16)

    def forward(self, x: torch.Tensor, labels: Any = None, skip: Any = None, all_states: bool = False) -> Any:
        h = self.before(x)
        h = first = h if labels is None else h + self.label(labels)
        states = []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        if skip is not None or x.shape[0] > 4:
            h = h + first
        return {"y": self.after(h), "states": states} if all_states else self.after(h)


def squares(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return (output["y"] if isinstance(output, dict) else output).square().mean()


def inputs(step: int, **more: Any) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(step)
    return [{"x": torch.randn(4, 8, generator=draw), **more} for _ in range(3)]


def compared(
    folder: str, make: Any, batches: Any, loss: Any, between: Any = lambda model, step: None
) -> tuple[list[str], list[Any]]:
    """What is warned of, and where three steps end, block by block and one micro-batch after another."""
    ends = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for by_block in (True, False):
            torch.manual_seed(0)
            random.seed(0)
            config = config_for("disk", folder, precision="fp32", gradients="accumulate")
            model: Any = gemini.GeminiDDP(make(), config)
            optimizer, seen = gemini.HybridAdam(model.parameters(), lr=0.1), []
            for step in range(3):
                between(model, step)
                if by_block:
                    seen.append(gemini.train_step(model, batches(step), loss(model)))
                else:
                    for batch in batches(step):
                        own = loss(model)(model(**batch), batch)
                        own.backward()
                        seen.append(own.detach())
                optimizer.step()
                optimizer.zero_grad()
            ends.append(
                [
                    torch.cat([one.view(-1) for one in seen]),
                    *(model.full_param(n) for n in dict(model.named_parameters())),
                ]
            )
    return [str(one.message) for one in caught if "train_step" in str(one.message)], ends


def labelled(step: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(step)
    return inputs(step, labels=torch.randint(0, 5, (4,), generator=draw))


def second_skips(step: int) -> list[dict[str, Any]]:
    return [batch | ({"skip": 1} if number == 1 else {}) for number, batch in enumerate(inputs(step))]


def later_skip(step: int) -> list[dict[str, Any]]:
    return inputs(step, **({"skip": 1} if step else {}))


def plain(model: Any) -> Any:
    return squares


def with_weights(model: Any) -> Any:
    return lambda output, batch: squares(output, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


def with_states_later(model: Any) -> Any:
    """Of a switch that no batch says."""
    return lambda output, batch: squares(output, batch) + (output["states"][0].square().mean() if model.later else 0)


def wanting_states(step: int) -> list[dict[str, Any]]:
    """Whose states the model's hooks collect; transformers makes them in the first forward."""
    return [batch | {"output_hidden_states": True} for batch in unequal(step)]


def wanting_a_state(step: int) -> list[dict[str, Any]]:
    """By number: that of the last block, and in the last step of another one."""
    return [batch | {"output_hidden_states": 1 if step == 2 else 2} for batch in unequal(step)]


def with_all_states(model: Any) -> Any:
    return lambda output, batch: (
        output.loss + sum(states.square().mean() for states in output.hidden_states if states is not None)
    )


def dropping() -> Any:
    model = Chain()
    for block in model.blocks:
        block.register_module("2", RandomlyDropped())
    return model


class RandomlyDropped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (random.random() < 0.5)


def with_head(early: bool) -> Any:
    """Its forward was replaced, calls the one before, and reads the weight of a layer that never runs."""
    model: Any = Chain()
    model.head = nn.Linear(8, 4, bias=False)
    original = model.forward

    def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = original(x + self.head.weight.sum(0) if early else x)
        return nn.functional.linear(hidden, self.head.weight)

    model.forward = MethodType(fused, model)
    return model


def switch(model: Any, step: int) -> None:
    object.__setattr__(model, "later", [1] if step else [])


@pytest.mark.parametrize(
    ("make", "batches", "loss", "between", "why"),
    [
        (Chain, labelled, plain, None, ""),
        (Chain, second_skips, plain, None, "is read in what comes after the blocks"),
        (Chain, later_skip, plain, None, "is read in what comes after the blocks"),
        (Chain, inputs, with_weights, None, "its loss reads"),
        (Chain, partial(inputs, all_states=True), with_states_later, switch, "output.states is read"),
        (dropping, inputs, plain, None, "draws random numbers"),
        (partial(with_head, False), inputs, plain, None, ""),
        (partial(with_head, True), inputs, plain, None, "something of head is read outside of it"),
        (partial(untied, "llama"), wanting_states, with_all_states, None, "is read in what comes after the blocks"),
        (partial(untied, "llama"), wanting_a_state, with_all_states, None, "keeps something"),
    ],
    ids=["labels before the blocks", "second micro-batch", "later step", "weights in the loss", "switch", "random",
         "head that never runs", "head read early", "states that hooks collect",
         "a state by its number"],
)  # fmt: skip
def test_another_way_than_that_of_the_first_micro_batch(
    make: Any, batches: Any, loss: Any, between: Any, why: str, tmp_path: Any
) -> None:
    warned, (found, wanted) = compared(str(tmp_path), make, batches, loss, between or (lambda model, step: None))
    assert (why in warned[0]) if why else not warned
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_steps_of_another_kind_than_the_first_one_are_made_block_by_block_too(tmp_path: Any) -> None:
    """Each by stages of its own: with labels another layer comes before the blocks."""
    said, ends = compared(
        str(tmp_path), Chain, lambda step: labelled(step) if step % 2 else inputs(step), lambda model: squares
    )
    assert not said and all(torch.equal(found, plain) for found, plain in zip(*ends, strict=True))


def test_a_step_that_strays_behind_its_first_gradients_is_refused_and_can_be_made_again(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model: Any = gemini.GeminiDDP(Chain(), config_for("disk", str(tmp_path), precision="fp32", gradients="accumulate"))
    batches = [{"x": torch.randn(rows, 8)} for rows in (4, 6)]
    with pytest.raises(gemini.GeminiError, match=r"goes another way.*dropped: call train_step\(\) again"):
        gemini.train_step(model, batches, squares)
    with pytest.warns(UserWarning, match="one after another"):
        losses = gemini.train_step(model, batches, squares)
    assert torch.equal(losses, torch.stack([squares(model(**batch), batch).detach() for batch in batches]))
    world_of(model).check()


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_step_that_fails_leaves_no_gradients(where: str, tmp_path: Any) -> None:
    """A program may go on without ``zero_grad()``, and which gradients were there would depend on the placement."""
    model: Any = gemini.GeminiDDP(Chain(), config_for(where, str(tmp_path), precision="fp32", gradients="accumulate"))
    model(**inputs(0)[0]).square().mean().backward()

    def third_fails(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        if batch is batches[2] and type(output) is not FakeTensor:
            raise OSError("no labels")
        return squares(output, batch)

    batches = inputs(1)
    with pytest.raises(OSError, match="no labels"):
        gemini.train_step(model, batches, third_fails)
    assert not any(handle.has_grad for handle in world_of(model).handles)
    gemini.train_step(model, batches, squares)
    names = [handle.name for handle in world_of(model).handles if handle.has_grad]
    grads = [model.full_grad(name) for name in names]
    model.zero_grad()
    for batch in batches:
        squares(model(**batch), batch).backward()
    assert all(helpers.same_bits(grad, model.full_grad(name)) for grad, name in zip(grads, names, strict=True))


def test_hooks_of_all_modules(tmp_path: Any) -> None:
    model: Any = gemini.GeminiDDP(Chain(), config_for("disk", str(tmp_path), precision="fp32", gradients="accumulate"))
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    with hook, pytest.warns(UserWarning, match="hooked all modules"):
        gemini.train_step(model, inputs(0), squares)
    assert seen.count("Chain") == 3 and len(seen) == 36


@pytest.mark.parametrize(
    ("batches", "loss", "error"),
    [
        ({"x": torch.zeros(4, 8)}, squares, ValueError), (inputs(0), None, gemini.GeminiError),
        (inputs(0), lambda output, batch: None, gemini.GeminiError),
    ],
    ids=["no list", "no loss", "a loss of None"],
)  # fmt: skip
def test_what_gives_no_loss(batches: Any, loss: Any, error: type[Exception], tmp_path: Any) -> None:
    model: Any = gemini.GeminiDDP(Chain(), config_for("disk", str(tmp_path), precision="fp32", gradients="accumulate"))
    warnings.filterwarnings("ignore", message="train_step")
    with pytest.raises(error, match="loss|list"):
        gemini.train_step(model, batches, loss)

"""``gemini.weights_for``: the bits of ``state_dict`` by name, one bucket at a time, and one copy in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

import gemini
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import MemoryPlane
from gemini.planning.planes import WEIGHTS
from gemini.tiers import Tier
from gemini.train.params.by_name import ByName
from tests.integrations import peft_cases
from tests.train import helpers
from tests.train.helpers import llama, step_on
from tests.train.test_parked import HALF, RESIDENT, assert_same, parked, wrap
from tests.world import world_of

PROMPT = torch.tensor([[5, 9, 2, 7]])


def without_ties(model: Any) -> dict[str, torch.Tensor]:
    """What ``state_dict`` has, once by the first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict().items():
        found.setdefault(value.data_ptr(), (name, value))
    return dict(found.values())


def trained(model: Any, steps: int = 2) -> Any:
    helpers.train(model, gemini.HybridAdam(model.parameters(), lr=1e-2), range(steps))
    return model


@pytest.mark.parametrize("where", ["resident", "half", "ram", "disk", "standin"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_names_and_bits_of_state_dict(where: str, precision: str, tmp_path: Path) -> None:
    """Right behind a step, whose updates may be in flight; also while the model is parked."""
    if where in ("resident", "half"):
        model = wrap(tmp_path, **{"resident": RESIDENT, "half": HALF}[where], precision=precision)
    else:
        model = helpers.wrap(llama(tied=True), where, tmp_path, precision=precision)
    model.register_buffer("scale", torch.ones(3))
    trained(model)
    found = dict(gemini.weights_for(model))
    wanted = without_ties(model)
    assert "lm_head.weight" not in found and "scale" in found
    assert_same({name: value.clone() for name, value in found.items()}, wanted)
    with model.parked():
        assert_same(dict(gemini.weights_for(model)), wanted)
        pairs = [pair for bucket in gemini.weights_for(model, bucket_bytes="8KiB") for pair in bucket]
        assert_same(dict(pairs), wanted)


def test_a_plain_model_with_them_computes_what_the_saved_one_does(tmp_path: Path) -> None:
    model = trained(wrap(tmp_path, model=llama(), **HALF))
    plain = peft_cases.cast_params(llama(), "bf16")
    with model.parked():
        plain.load_state_dict(dict(gemini.weights_for(model)))
        model.save_pretrained(tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(plain.eval()(PROMPT).logits, saved.eval()(PROMPT).logits)
    how = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(plain.generate(PROMPT, **how), saved.generate(PROMPT, **how))


def test_weights_at_home_in_host_memory_are_not_copied(tmp_path: Path) -> None:
    model = wrap(tmp_path, placement=gemini.StaticPlacement())
    planes = [chunk.planes[WEIGHTS] for chunk in world_of(model).chunks]
    homes = {plane.tensor.untyped_storage()._cdata for plane in planes}
    shown = dict(gemini.weights_for(model))
    assert {tensor.untyped_storage()._cdata for tensor in shown.values()} == homes
    before = {name: value.clone() for name, value in shown.items()}
    trained(model, 1)
    world_of(model).check()
    now = dict(gemini.weights_for(model))
    assert any(not torch.equal(value, now[name]) for name, value in before.items())
    assert_same(shown, now)  # the home itself


@pytest.mark.parametrize("bucket", [1, 4096, "12KiB", "1MiB"])
def test_one_bucket_at_a_time(bucket: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(tmp_path, **RESIDENT)
    wanted = without_ties(model)
    live, peaks = list[StorageWeakRef](), list[int]()

    def alive() -> int:
        return sum(torch.UntypedStorage._new_with_weak_ptr(r.cdata).nbytes() for r in live if not r.expired())

    read = ByName.read

    def counting(self: ByName, *args: Any) -> torch.Tensor:
        value = read(self, *args)
        live.append(StorageWeakRef(value.untyped_storage()))
        peaks.append(alive())
        return value

    monkeypatch.setattr(ByName, "read", counting)
    size = bucket if isinstance(bucket, int) else int(bucket[:-3]) * {"KiB": 2**10, "MiB": 2**20}[bucket[-3:]]
    found, sizes = dict[str, int](), list[int]()

    def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
        sizes.append(sum(tensor.nbytes for _, tensor in pairs))
        assert sizes[-1] <= size or len(pairs) == 1
        found.update((name, tensor.numel()) for name, tensor in pairs)

    for pairs in gemini.weights_for(model, bucket_bytes=bucket):
        load(pairs)
    assert found == {name: value.numel() for name, value in wanted.items()}
    assert len(peaks) == len(wanted) and max(peaks) <= max(size, max(v.nbytes for v in wanted.values()))
    assert size < 2**20 or len(sizes) == 1


@pytest.mark.parametrize(
    "method",
    ["lora", "dora", "modules to save", "experts", "ia3", "oft", "vera", "trainable tokens", "token embeddings"],
)
def test_adapters_merged_and_apart(method: str, tmp_path: Path) -> None:
    base = peft_cases.maker(method)
    model, merged = (trained(wrap(tmp_path, model=base(), placement=gemini.StaticPlacement())) for _ in range(2))
    before = model.state_dict(dtype=torch.float32)
    with model.parked():
        found = {name: value.clone() for name, value in gemini.weights_for(model)}
        assert_same(dict(gemini.weights_for(model, adapters="apart")), without_ties(model))
    assert_same(model.state_dict(dtype=torch.float32), before)
    plain = merged.merge_and_unload()
    wanted: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in plain.state_dict().items():
        wanted.setdefault(value.data_ptr(), (name, value))
    assert_same(found, dict(wanted.values()))


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids="-".join)
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_of_tied_weights_are_merged(method: str, targets: list[str], tmp_path: Path) -> None:
    """Wherever they are: the weight has one name, and the sums that PEFT makes of all of them."""

    def config() -> peft.PeftConfig:
        how: Any = {"use_dora": method == "dora", "task_type": "CAUSAL_LM"}
        return peft.LoraConfig(r=4, target_modules=["q_proj", *targets], **how)

    model = trained(wrap(tmp_path, model=peft_cases.maker(config, tied=True)()))
    found = {name: value.clone() for name, value in gemini.weights_for(model)}
    plain = model.merge_and_unload().state_dict()
    assert plain.pop("lm_head.weight").data_ptr() == plain["model.embed_tokens.weight"].data_ptr()
    assert_same(found, plain)


def test_a_saved_module_leaves_the_weight_that_it_was_tied_to(tmp_path: Path) -> None:
    """PEFT trains a copy of the embedding, and the head keeps what both had."""

    def config() -> peft.PeftConfig:
        return peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")

    model = trained(wrap(tmp_path, model=peft_cases.maker(config, tied=True)()))
    found = {name: value.clone() for name, value in gemini.weights_for(model)}
    assert_same(found, model.merge_and_unload().state_dict())


def test_what_cannot_be_merged_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is none"):
        gemini.weights_for(llama())
    with pytest.raises(ValueError, match="this str is none"):
        gemini.weights_for("llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use 'merged' or 'apart'"):
        gemini.weights_for(wrap(tmp_path), adapters="both")  # type: ignore[call-overload]
    prompts = wrap(tmp_path, model=peft_cases.maker("prompt")())
    with pytest.raises(GeminiError, match="prompts are part of no weight"):
        gemini.weights_for(prompts)
    assert_same(dict(gemini.weights_for(prompts, adapters="apart")), without_ties(prompts))


class Engine:
    """What vLLM's ``LLM`` shows to a trainer, and TRL's colocate mode calls; its GPU is a count of bytes."""

    KV_BYTES = 40 * 2**10

    def __init__(self, make: Any, *, mirrors: bool = False):
        self.model = peft_cases.cast_params(make(), "bf16").eval()
        self.shapes = {name: (param.shape, param.dtype) for name, param in self.model.named_parameters()}
        self.mirrors = mirrors  # sleep level 1: weights wait in host memory
        self.host_bytes, self.held = 0, Counter[str]()
        self.wake_up()

    @property
    def gpu_bytes(self) -> int:
        return self.held.total()

    def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        for tag in tags:
            if tag == "kv_cache":
                self.held[tag] = self.KV_BYTES
            elif not self.held[tag]:
                for name, param in self.model.named_parameters():
                    shape, dtype = self.shapes[name]
                    old = param.data if self.host_bytes else torch.full(shape, torch.nan, dtype=dtype)
                    param.data = old
                    self.held[tag] += old.nbytes
                self.host_bytes = 0

    def sleep(self, level: int = 1) -> None:
        if level == 1:
            self.host_bytes = self.held["weights"]
        else:
            for param in self.model.parameters():
                param.data = torch.empty(0, dtype=param.dtype)
        self.held.clear()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            assert self.held["weights"], "nothing is mapped there"
            own[name].data.copy_(tensor)

    def generate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.held["weights"] and self.held["kv_cache"]
        with torch.no_grad():
            return self.model.generate(ids, max_new_tokens=5, do_sample=False), self.model(ids).logits


def run(path: Path, level: int | None, how: dict[str, Any]) -> tuple[Any, list[int]]:
    """Three steps on what the engine generates; without ``level`` the model itself does."""
    model = wrap(path, model=llama(), **how)
    world, most = world_of(model), list[int]()
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    engine = Engine(llama)
    engine.sleep(level or 2)
    for _ in range(3):
        if level is None:
            with torch.no_grad():
                tokens, logits = model.generate(PROMPT, max_new_tokens=5, do_sample=False), model(PROMPT).logits
        else:
            with parked(model):
                engine.wake_up(["weights"])
                for bucket in gemini.weights_for(model, bucket_bytes="16KiB"):
                    engine.load_weights(bucket)
                engine.wake_up(["kv_cache"])
                most.append(engine.gpu_bytes + world.used(Tier.GPU))
                tokens, logits = engine.generate(PROMPT)
                engine.sleep(level)
            most.append(engine.gpu_bytes + world.used(Tier.GPU))
        loss = model(input_ids=tokens, labels=tokens.clone()).loss
        step_on(loss, optimizer)
        loss = None
        del loss
    assert engine.host_bytes == (sum(p.nbytes for p in engine.model.parameters()) if level == 1 else 0)
    return (tokens, logits, helpers.snapshot(model)), most


@pytest.mark.parametrize("how", [RESIDENT, HALF, {"placement": gemini.StaticPlacement()}])
def test_trainer_and_engine_take_turns(how: dict[str, Any], tmp_path: Path) -> None:
    (tokens, logits, wanted), _ = run(tmp_path, None, how)
    for level in (1, 2):
        (found_tokens, found_logits, found), most = run(tmp_path, level, how)
        assert torch.equal(found_tokens, tokens) and torch.equal(found_logits, logits)
        helpers.assert_same_snapshot(found, wanted)
        held = most[1]  # by the trainer alone
        assert set(most[1::2]) == {held} and max(most[0::2]) < held + Engine.KV_BYTES, "never both"


def test_policy_and_engine_are_one_copy_in_host_memory(tmp_path: Path) -> None:
    """An engine that computes with the tensors themselves, as on memory that it shares with a GPU."""
    model = wrap(tmp_path, model=llama(), placement=gemini.StaticPlacement())
    weights = world_of(model).held(Tier.CPU, WEIGHTS)
    plain = peft_cases.cast_params(llama(), "bf16").eval()
    with parked(model), torch.no_grad():
        assert world_of(model).held(Tier.CPU, WEIGHTS) == weights
        shown = dict(gemini.weights_for(model))
        for name, param in plain.named_parameters():
            param.data = shown[name]
        planes = [c.planes[WEIGHTS] for c in world_of(model).chunks]
        storages = {plane.tensor.untyped_storage()._cdata for plane in planes if isinstance(plane, MemoryPlane)}
        mapped = {param.data.untyped_storage()._cdata: param.data for param in plain.parameters()}
        assert mapped.keys() == storages and sum(t.untyped_storage().nbytes() for t in mapped.values()) == weights
        logits = plain(PROMPT).logits
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, logits)

"""Several models in one budget that holds what all keep and the largest working set: the bits of separate budgets."""

import copy
import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.errors import BudgetExceeded, StorageError
from gemini.ledger import Ledger, Turn, Want
from gemini.memory.devices.pages import PAGE
from gemini.tiers import Tier
from gemini.train.engine import Engine
from tests.standins import PieceDevice
from tests.train.helpers import failing, make_config, noise, same_bits, tight_bytes
from tests.world import world_of

WIDTH = 64


def layers(count: int, seed: int, out: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count - 1)), nn.Linear(WIDTH, out))


def generator() -> nn.Module:
    return layers(4, 0)


def discriminator() -> nn.Module:
    return layers(3, 1, out=1)


def judge() -> nn.Module:
    return layers(2, 2).requires_grad_(False).eval()


def separate(where: str, path: Path, *makes: Any) -> list[Any]:
    return [gemini.GeminiDDP(make(), make_config(make(), where, path, slack=2**14)) for make in makes]


def together(where: str, path: Path, *makes: Any, slack: int = 2**14) -> tuple[gemini.SharedBudget, list[Any]]:
    """All homes away from where modules compute; room there for one working set, and the staging of each."""
    sizes = [tight_bytes(make(), "bf16") for make in makes]
    gathered, staging = max(size for size, _ in sizes) + slack, sum(size for _, size in sizes)
    if where == "disk":
        memory = gemini.SharedBudget(cpu=gathered + staging, nvme="64MiB", nvme_path=path)
    else:
        memory = gemini.SharedBudget(gpu=gathered, cpu="64MiB", nvme="64MiB", nvme_path=path)
    device = {"disk": lambda: "cpu", "pieces": lambda: PieceDevice()}.get(where, lambda: "standin")
    found = []
    for make in makes:
        config = make_config(make(), "disk" if where == "disk" else "standin", path)
        found.append(
            gemini.GeminiDDP(
                make(),
                gemini.GeminiConfig(
                    precision="bf16", memory=memory, device=device(), placement=config.placement,
                ),
            )
        )  # fmt: skip
    return memory, found


def adversarial(g: Any, d: Any, judge: Any, steps: int = 3) -> list[float]:
    """Both models in one graph, one after the other, and a frozen one whose gradients flow through."""
    of_g, of_d = (gemini.HybridAdam(model.parameters(), lr=1e-2) for model in (g, d))
    losses = []
    for seed in range(steps):
        for _ in range(2):  # summed up
            fake = g(noise(4, WIDTH, seed=seed))
            loss = nn.functional.softplus(d(fake.detach()).float()) + nn.functional.softplus(
                -d(noise(4, WIDTH, seed=seed + 99)).float()
            )
            (loss.mean() / 2).backward()
        of_d.step()
        of_d.zero_grad()
        fake = g(noise(4, WIDTH, seed=seed))
        of_both = nn.functional.softplus(-d(fake).float()).mean() + judge(fake).float().square().mean()
        of_both.backward()
        g.clip_grad_norm_(1.0)
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
        losses += [loss.mean().item(), of_both.item()]
    return losses


def check(memory: gemini.SharedBudget, models: list[Any]) -> None:
    for model in models:
        world_of(model).check()
    together = memory.report()
    for tier in world_of(models[0]).tiers:
        rows = [model.memory_report()[tier.value] for model in models]
        assert together[tier.value]["used"] == sum(row["used"] for row in rows)
        assert together[tier.value]["peak"] <= together[tier.value]["budget"]


@pytest.mark.parametrize("where", ["disk", "standin", "pieces"])
def test_three_models_in_room_for_one_have_the_bits_of_separate_budgets(where: str, tmp_path: Path) -> None:
    makes = (generator, discriminator, judge)
    apart = separate("disk" if where == "disk" else "standin", tmp_path, *makes)
    wanted = adversarial(*apart)
    memory, models = together(where, tmp_path, *makes)
    assert adversarial(*models) == wanted
    check(memory, models)
    for model, other in zip(models, apart, strict=True):
        for name in model.state_dict():
            assert same_bits(*(each.full_param(name, torch.float32) for each in (model, other))), name
    # It was tight: each had to take from the others.
    computing = Tier.CPU if where == "disk" else Tier.GPU
    whole = sum(world_of(model).problem.working_set for model in models)
    assert memory.report()[computing.value]["budget"] < whole + sum(world_of(m).problem.staging for m in models)


def all_in_place(memory: gemini.SharedBudget, make: Any) -> Any:
    return gemini.GeminiDDP(make(), gemini.GeminiConfig(precision="bf16", memory=memory, device="cpu"))


@pytest.mark.parametrize("how", ["deleted", "released"])
def test_a_model_that_ends_gives_its_room_back_and_one_that_fails_took_none(how: str) -> None:
    needed = all_in_place(gemini.SharedBudget(cpu="1GiB"), generator).memory_report()["cpu"]["used"]
    memory = gemini.SharedBudget(cpu=needed + 2**10)
    first = all_in_place(memory, generator)
    second = generator()
    with pytest.raises(BudgetExceeded, match="does not fit") as refused:
        gemini.GeminiDDP(second, gemini.GeminiConfig(memory=memory, device="cpu"))
    assert refused.value.__traceback__ is not None  # what it refers to counts for nothing
    assert memory.report()["cpu"]["used"] == needed == first.memory_report()["cpu"]["used"]
    if how == "released":
        gemini.release(first)
    else:
        del first
        gc.collect()
    assert memory.report()["cpu"]["used"] == 0
    second = gemini.GeminiDDP(second, gemini.GeminiConfig(memory=memory, device="cpu"))
    assert memory.report()["cpu"]["used"] == needed
    check(memory, [second])


def test_a_wrap_that_breaks_off_late_took_nothing() -> None:
    memory = gemini.SharedBudget(cpu="1MiB")
    kept = all_in_place(memory, judge)
    used = memory.report()["cpu"]["used"]
    with failing(Engine, "take_home", 1, OSError("no")), pytest.raises(OSError, match="no") as error:
        all_in_place(memory, generator)
    assert memory.report()["cpu"]["used"] == used and error.value.__traceback__ is not None
    check(memory, [kept])


@pytest.mark.parametrize("slack", [0, 2**12, 2**14, 2**16, 2**18])
@pytest.mark.parametrize("device", ["cpu", "standin"])
def test_a_later_plan_leaves_the_working_set_of_the_models_before_it(device: str, slack: int, tmp_path: Path) -> None:
    """Whatever the planner chooses: the one with the larger layers can still be trained when the others have come."""

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    computing = Tier.GPU if device == "standin" else Tier.CPU
    gathered, staging = tight_bytes(wide(), "bf16")
    sizes = (
        {"gpu": gathered + slack, "cpu": "64MiB"} if device == "standin" else {"cpu": gathered + 2 * staging + slack}
    )
    memory = gemini.SharedBudget(**sizes, nvme="64MiB", nvme_path=tmp_path)  # type: ignore[arg-type]
    config = gemini.GeminiConfig(precision="bf16", memory=memory, device=device)
    first = gemini.GeminiDDP(
        wide(), replace(config, placement=gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1))
    )
    second = gemini.GeminiDDP(judge(), config)
    weights = sum(world_of(second).held(tier, "weights") for tier in world_of(second).tiers)
    padded = sum(chunk.numel for chunk in world_of(second).layout.chunks)
    assert weights == 2 * padded  # frozen: bf16 and nothing else, in any tier
    kept = sum(world_of(model).ledger.kept(computing) for model in (first, second))
    assert kept + world_of(first).problem.working_set <= memory.report()[computing.value]["budget"]
    optimizer = gemini.HybridAdam(first.parameters(), lr=1e-2)
    for seed in range(2):
        second(first(noise(4, WIDTH, seed=seed))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    check(memory, [first, second])


def test_a_parked_model_leaves_its_gpu_to_the_others(tmp_path: Path) -> None:
    memory, (g, d) = together("standin", tmp_path, generator, discriminator)
    with g.parked():
        assert g.memory_report()["gpu"]["used"] == 0
        d(noise(4, WIDTH)).float().mean().backward()
    d.zero_grad()
    g(noise(4, WIDTH)).float().mean().backward()
    check(memory, [g, d])


def test_a_parked_model_whose_room_was_taken_holds_nothing_and_comes_back_later(tmp_path: Path) -> None:
    memory = gemini.SharedBudget(gpu="400KiB", cpu="2MiB", nvme="8MiB", nvme_path=tmp_path)
    config = gemini.GeminiConfig(memory=memory, precision="fp32", device="standin")
    model, other = (gemini.GeminiDDP(make(), config) for make in (discriminator, discriminator))
    with torch.no_grad():
        wanted, used = model(noise(4, WIDTH, dtype=torch.float32)), model.memory_report()["gpu"]["used"]
    taker = None
    with pytest.raises(BudgetExceeded, match=r"stays parked.*`with model.parked\(\): pass` brings it back"):
        with model.parked():
            taker = gemini.GeminiDDP(discriminator(), config)
    assert model.memory_report()["gpu"]["used"] == 0
    check(memory, [model, other, taker])
    gemini.release(taker)
    del taker
    gc.collect()
    with model.parked():
        pass
    with torch.no_grad():
        assert same_bits(model(noise(4, WIDTH, dtype=torch.float32)), wanted)
    assert model.memory_report()["gpu"]["used"] == used
    check(memory, [model, other])


def test_a_model_in_which_another_thread_is_at_work_gives_nothing(tmp_path: Path) -> None:
    memory, (g, d) = together("disk", tmp_path, generator, discriminator, slack=0)
    inside, go_on = threading.Event(), threading.Event()
    said: list[torch.Tensor] = []

    def wait(module: nn.Module, args: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    with torch.no_grad():
        wanted = [g(noise(4, WIDTH)), d(noise(4, WIDTH))]
        hook = g[2].register_forward_pre_hook(wait)
        thread = threading.Thread(target=lambda: said.append(torch.no_grad()(g)(noise(4, WIDTH))))
        thread.start()
        assert inside.wait(60)
        with pytest.raises(
            BudgetExceeded,
            match=r"Other models of the same budget have .* of it\. Another thread is at work in a model",
        ):
            d(noise(4, WIDTH))
        go_on.set()
        thread.join(60)
        hook.remove()
        assert same_bits(said[0], wanted[0])
        for _ in range(2):  # one after the other, from whatever thread
            assert same_bits(d(noise(4, WIDTH)), wanted[1])
            thread = threading.Thread(target=lambda: said.append(torch.no_grad()(g)(noise(4, WIDTH))))
            thread.start()
            thread.join(60)
            assert same_bits(said[-1], wanted[0])
    check(memory, [g, d])


def test_a_second_durable_store_and_a_model_too_many_are_told_of_the_others(tmp_path: Path) -> None:
    memory = gemini.SharedBudget(cpu="1MiB", nvme="64MiB", nvme_path=tmp_path, durable=True)
    config = gemini.GeminiConfig(memory=memory, device="cpu")
    first = gemini.GeminiDDP(generator(), config)
    with pytest.raises(StorageError):
        gemini.GeminiDDP(judge(), config)
    other = replace(config, memory=replace(memory, durable=False))
    second = gemini.GeminiDDP(judge(), other)
    check(memory, [first, second])
    with pytest.raises(BudgetExceeded, match=r"leave of a SharedBudget.*later="):
        gemini.GeminiDDP(nn.Linear(2048, 2048), other)
    check(memory, [first, second])


def test_a_budget_is_copied_with_the_config_that_it_is_in() -> None:
    memory = gemini.SharedBudget(cpu="1MiB")
    config = copy.deepcopy(gemini.GeminiConfig(memory=memory, device="cpu"))
    model = gemini.GeminiDDP(judge(), replace(config, memory=replace(config.memory, durable=False)))
    assert memory.report()["cpu"]["used"] == model.memory_report()["cpu"]["used"] > 0
    assert memory == gemini.SharedBudget(cpu="1MiB") and memory != gemini.MemoryBudget(cpu="1MiB")


def wide(width: int, trained: bool) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)).requires_grad_(trained)


@pytest.mark.parametrize("room", ["the largest alone", "the largest and a part", "two"])
def test_models_of_other_sizes_take_what_several_give_together(room: str, tmp_path: Path) -> None:
    """On a GPU, where windows have memory of their own: no other model has as much as the largest lacks."""
    sizes, finals = {128: False, 160: False, 256: True}, []
    for is_shared in (True, False):
        needs = [tight_bytes(wide(width, trained), "bf16")[0] for width, trained in sizes.items()]
        gpu = {"the largest alone": needs[2], "the largest and a part": needs[2] + needs[0], "two": sum(needs[1:])}
        kind = gemini.SharedBudget if is_shared else gemini.MemoryBudget
        memory = kind(gpu=gpu[room], cpu="64MiB")
        config = gemini.GeminiConfig(memory=memory, device="standin", placement=gemini.StaticPlacement())
        first, second, trained = (gemini.GeminiDDP(wide(width, t), config) for width, t in sizes.items())
        optimizer = gemini.HybridAdam(trained.parameters(), lr=1e-2)
        for seed in range(3):
            x = noise(4, WIDTH, seed=seed)
            with torch.no_grad():
                wanted = first(x).float() + second(x).float()
            (trained(x).float() - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        check(memory, [first, second, trained]) if is_shared else None
        finals.append([trained.full_param(name, torch.float32) for name in trained.state_dict()])
    assert all(map(same_bits, *finals))


@pytest.mark.parametrize("where", ["disk", "pieces"])
def test_whoever_can_be_asked_for_memory_is_whole(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the same budget asks as soon as a part of another one, which is in the making, has registered."""
    register, failed, asked = Ledger.register, list[str](), set[Turn]()

    def ask_at_once(ledger: Ledger, turn: Turn, reclaim: Any, *tiers: Tier) -> None:
        register(ledger, turn, reclaim, *tiers)
        for tier in tiers:
            try:
                asked.add(turn)
                reclaim(Want(ledger, tier, PAGE, "", frozenset({turn})))
            except Exception as e:
                failed.append(f"{turn.name}: {type(e).__name__}: {e}")

    monkeypatch.setattr(Ledger, "register", ask_at_once)
    together(where, tmp_path, generator, discriminator)
    assert not failed and {Turn.READERS, Turn.PREFETCHES, Turn.KEPT} <= asked

"""What ``gemini plan`` plans for: the sizes that were given, and the machine that was named."""

from __future__ import annotations

from typing import NamedTuple

from gemini.errors import human_bytes
from gemini.jobs.errors import JobError
from gemini.jobs.plan_settings import PlanSettings
from gemini.planning.hardware import Hardware, load_hardware
from gemini.planning.working import MARGIN
from gemini.tiers import Tier

ROUNDED = 1.01
"""More than a tier has by less than this is the number on its box: a card of 24 GiB shows 23.99."""


class Machine(NamedTuple):
    """What there is to plan for: bytes per tier of one machine and where each comes from; its speeds if known.

    ``sharing``: ranks that divide its host memory and drives. ``beyond``: what it has of tiers that more was given of.
    """

    budgets: dict[Tier, int]
    origins: dict[Tier, str]
    hardware: Hardware | None
    compute: Tier
    ranks: int
    sharing: int
    beyond: dict[Tier, int]

    @property
    def budgets_of_rank(self) -> dict[Tier, int]:
        return {tier: n if tier is Tier.GPU else n // self.sharing for tier, n in self.budgets.items()}

    @property
    def target(self) -> str:
        """Whose workspaces are traced."""
        return "cuda" if self.compute is Tier.GPU else "cpu"


def machine_of(settings: PlanSettings) -> Machine:
    """Budgets as given, else the share of the machine's capacities that the runtime takes of what is free.

    Raises:
        JobError: if there is nothing to plan for, or no such machine.
    """
    hardware = None if settings.machine is None else load_hardware(settings.machine)
    budgets: dict[Tier, int] = {}
    origins: dict[Tier, str] = {}
    beyond: dict[Tier, int] = {}
    for tier in Tier:
        given = settings.given_bytes(tier)
        capacity = None if hardware is None else hardware.capacity(tier)
        if given is None and capacity is not None:
            given, origins[tier] = int(capacity * MARGIN), f"({MARGIN:.0%} of {human_bytes(capacity)})"
        if given and hardware is not None and capacity is not None and given > capacity:
            # Who gives a size may know the machine: its speeds are taken, and what a named one has is said.
            has = f"{hardware.name}: {human_bytes(capacity)}"
            if given > ROUNDED * capacity:
                beyond[tier] = capacity
            origins[tier] = f"(MORE than it has, {has})" if tier in beyond else f"({has})"
            hardware = hardware.with_figures("as given", **{f"{tier.value}_bytes": given})
        if given:
            budgets[tier] = given
    if settings.compute == "cpu":
        budgets.pop(Tier.GPU, None)
    compute = Tier.GPU if Tier.GPU in budgets else Tier.CPU
    if settings.compute == "gpu" and compute is not Tier.GPU:
        raise JobError("--compute gpu needs the size of a GPU: --gpu 24GiB, or a --machine that has one.")
    if Tier.CPU not in budgets:
        raise JobError(
            "A plan needs host memory, where whatever moves stands in between: give --cpu 64GiB, or --machine for "
            f"{MARGIN:.0%} of what a machine has."
        )
    local = settings.gpus
    if compute is Tier.GPU and hardware is not None and hardware.has("num_gpus"):
        hardware = hardware.with_gpus(local)
        num_gpus = int(hardware.get("num_gpus", needed_for="a plan for several GPUs"))
        local = min(local, num_gpus)
        if settings.gpus % local:
            raise JobError(
                f"--gpus {settings.gpus}: a {hardware.name} has {num_gpus}, so that many or fewer, or a multiple of it "
                "for several machines."
            )
    beyond = {tier: capacity for tier, capacity in beyond.items() if tier in budgets}
    return Machine(budgets, origins, hardware, compute, settings.gpus, local, beyond)

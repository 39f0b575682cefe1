"""``model.memory_report()``: what every tier holds, as a mapping that reads well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from gemini.errors import human_bytes
from gemini.ledger import Ledger
from gemini.memory.devices.device import Device
from gemini.memory.store import ChunkStore
from gemini.planning.layout import Layout
from gemini.planning.planes import GRADS
from gemini.planning.timeline import Track, human_seconds
from gemini.planning.token_tiles import tile_words
from gemini.tiers import Tier
from gemini.train.sharding.shards import Company
from gemini.train.update.guess import GuessRecord

_FOR_RANKS = ("other ranks", Track.GATHER.value, Track.REDUCE.value)


class MemoryReport(dict[str, Any]):
    """``report["cpu"]["peak"]`` in bytes, ``report["moved"]["nvme->cpu"]``, and so on. ``print(report)`` shows a table.

    Its keys:

    - "gpu", "cpu", "nvme": for each tier "budget", "used", "peak" and "holders" (bytes by what uses them). With several
      ranks, those of this rank. Of a :class:`gemini.SharedBudget`, whose ``report()`` has those of all its models,
      "budget" is the whole.
    - "moved": bytes moved between two tiers in the last step.
    - "sent": with several ranks, bytes that this rank sent in the last step, by collective.
    - "stalls": seconds that the training thread waited in the last step (from the end of one ``optimizer.step()`` to
      the end of the next), by cause, the longest first. Causes are for example "fetch from nvme" (waiting for weights),
      "gradient landing", "update", "activation", and with several ranks "other ranks", "all-gather" and
      "reduce-scatter". If one wait happens inside another, all of it counts for the outer one.
    - "params": the number of managed params. "bytes_per_param": bytes of weights and states. "grad_bytes_per_param":
      bytes reserved for gradients between backward and update. Both are per trained param.
    - "fp32": by why, the number of params that stay in fp32 in a model of bf16 or fp16 (``GeminiConfig(keep_fp32=)``).
    - "tile_tokens": as in the config, or with "auto" what the planner chose. None: not tiled.
    - "speculation": how many of the updates that ``HybridAdam(speculate=True)`` made during backward were "kept" and
      how many "undone" (or not made, for lack of room), since the model was wrapped.
    - "allocator", on CUDA: torch's "allocated" and "reserved" bytes, their peaks ("allocated_peak", "reserved_peak"),
      and "driver", the bytes of the GPU that all programs use. Compared with what Gemini manages: "unmanaged" bytes are
      allocated by torch for something else (activations, workspaces, your own tensors), "cached" ones are reserved by
      torch and not in use (fragmentation too), and "elsewhere" are not torch's (CUDA itself, other programs).

    On CUDA "stalls" does not contain the time in which the GPU waits for weights, since the training thread does not.
    """

    def __str__(self) -> str:
        tiers = [tier.value for tier in Tier if tier.value in self]
        lines = [f"{'tier':<6}{'used':>12}{'peak':>12}{'budget':>12}  held by"]
        for name in tiers:
            tier = self[name]
            held = ", ".join(
                f"{holder} {human_bytes(num_bytes)}"
                for holder, num_bytes in sorted(tier["holders"].items(), key=lambda item: -item[1])
            )
            sizes = "".join(f"{human_bytes(tier[key]):>12}" for key in ("used", "peak", "budget"))
            lines.append(f"{name:<6}{sizes}  {held or 'nothing'}")
        if "allocator" in self:
            lines += _allocator_lines(self["allocator"])
        moved = ", ".join(f"{way} {human_bytes(n)}" for way, n in self["moved"].items()) or "nothing"
        lines.append(f"moved in the last step: {moved}")
        waited = ", ".join(f"{cause} {human_seconds(s)}" for cause, s in self["stalls"].items()) or "nothing"
        lines.append(f"waited in the last step: {waited}")
        if "sent" in self:
            seconds = sum(self["stalls"].get(cause, 0.0) for cause in _FOR_RANKS)
            lines.append(f"of that for other ranks: {human_seconds(seconds)}")
            sent = ", ".join(f"{how} {human_bytes(n)}" for how, n in self["sent"].items()) or "nothing"
            lines.append(f"sent to other ranks in the last step: {sent}")
        if any(self["speculation"].values()):
            kept, undone = self["speculation"]["kept"], self["speculation"]["undone"]
            lines.append(f"updates begun before their step was known: {kept:,} kept, {undone:,} undone")
        lines.append(
            f"{self['params']:,} params ({self['trained_params']:,} trained): {self['bytes_per_param']:.2f} bytes "
            f"each when trained, and {self['grad_bytes_per_param']:.2f} for gradients between backward and update"
        )
        if self["fp32"]:
            listed = ", ".join(f"{num_params:,} {why}" for why, num_params in self["fp32"].items())
            lines.append(f"params that stay in fp32: {listed}")
        if self["tile_tokens"] is not None:
            lines.append(f"in tiles: {tile_words(self['tile_tokens'])} at a time")
        return "\n".join(lines)


def _allocator_lines(figures: dict[str, int]) -> list[str]:
    size = {key: human_bytes(num_bytes) for key, num_bytes in figures.items()}
    return [
        f"gpu, says torch: allocated {size['allocated']} (peak {size['allocated_peak']}), {size['unmanaged']} of it "
        f"not managed here; reserved {size['reserved']} (peak {size['reserved_peak']}), {size['cached']} of it unused",
        f"gpu, says the driver: used {size['driver']}, {size['elsewhere']} of it not by torch here",
    ]


def _reconcile(device: Device, ledger: Ledger) -> dict[str, int]:
    """Put the allocator's and the driver's figures beside the ledger's; nothing where the device has none."""
    figures = device.memory_figures()
    if not figures:
        return {}
    holders = ledger.holders(device.tier)
    rooms = ("activations", "context")  # which nothing managed is in
    managed = sum(num_bytes for holder, num_bytes in holders.items() if holder not in rooms)
    return {
        **figures,
        # Not below zero: torch rounds what it allocates, and the two are not read at one instant.
        "unmanaged": max(figures["allocated"] - managed, 0),
        "cached": figures["reserved"] - figures["allocated"],
        "elsewhere": max(figures["driver"] - figures["reserved"], 0),
    }


def make_report(
    store: ChunkStore,
    layout: Layout,
    company: Company,
    guesses: GuessRecord,
    tile_tokens: int | str | None = None,
    kept: Iterable[str] = (),
) -> MemoryReport:
    """Make the report of a model as it stands, nothing being in flight.

    Args:
        kept: of each param that stays in fp32, why.
    """
    ledger, report = store.ledger, MemoryReport()
    report["fp32"] = dict(sorted(Counter(kept).items()))
    report["speculation"] = {"kept": guesses.num_kept, "undone": guesses.num_undone}
    report["tile_tokens"] = tile_tokens
    for tier in ledger.tiers:
        report[tier.value] = {
            "budget": ledger.budget(tier),
            "used": ledger.used(tier),
            "peak": ledger.peak(tier),
            "holders": ledger.holders(tier),
        }
    allocator = _reconcile(store.device, ledger)
    if allocator:
        report["allocator"] = allocator
    report["moved"] = dict(sorted(store.mover.watch.moved_last_step.counts().items()))
    report["stalls"] = dict(store.mover.watch.stalls)
    if company.ranks.shares_params:
        report["sent"] = dict(sorted(company.sent_last_step.items()))
    trained = [chunk for chunk in store.chunks if chunk.trained]
    num_trained = sum(chunk.spec.payload for chunk in trained)
    ranks = layout.ranks  # each holds an equal shard
    # Bytes of all ranks over params of the whole model: padding of shards is in it.
    state = ranks * sum(p.num_bytes for c in trained for kind, p in c.planes.items() if kind not in GRADS)
    state += ledger.holders(Tier.CPU).get("factors", 0)
    grads = ranks * sum(p.num_bytes for c in trained for kind, p in c.planes.items() if kind in GRADS)
    # Codes are bytes of two weights each.
    report["params"] = sum(chunk.payload * (2 if chunk.coded else 1) for chunk in layout.chunks)
    report["trained_params"] = num_trained
    report["bytes_per_param"] = state / num_trained if num_trained else 0.0
    report["grad_bytes_per_param"] = grads / num_trained if num_trained else 0.0
    return report

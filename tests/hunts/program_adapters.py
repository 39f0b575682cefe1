"""Adapters of drawn programs (PEFT): which are put on the model before it is managed, and what loops do with them."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.hunts.program_parts import Habit, before, stepped

TARGETS = r'target_modules=r".*\b(fc|up|down|qkv|out|a|b|conv|energy)"'
TARGETED = ("linear", "norm", "mlp", "attention")
"""Ordinary kinds with a module of such a name."""


def _config(kind: str, **more: str) -> str:
    told = "".join(f", {name}={value}" for name, value in more.items())
    return f"peft.{kind}Config({TARGETS}{told})"


ADAPTERS: dict[str, str] = {
    "lora": _config("Lora", r="2", init_lora_weights="False"),
    "lora_as_is": _config("Lora", r="2"),
    "rslora": _config("Lora", r="2", use_rslora="True", init_lora_weights="False"),
    "lora_dropout": _config("Lora", r="2", lora_dropout="0.2", init_lora_weights="False"),
    "lora_bias": _config("Lora", r="2", bias='"all"', init_lora_weights="False"),
    "lora_beside_weight": _config("Lora", r="2", modules_to_save='["norm"]', init_lora_weights="False"),
    "dora": _config("Lora", r="2", use_dora="True", init_lora_weights="False"),
    "pissa": _config("Lora", r="2", init_lora_weights='"pissa"'),
    "olora": _config("Lora", r="2", init_lora_weights='"olora"'),
    "ia3": _config("IA3", feedforward_modules=r'r".*\bdown"', init_ia3_weights="False"),
    "oft": _config("OFT", oft_block_size="2", init_weights="False"),
    "oft_coft": _config("OFT", oft_block_size="2", coft="True", eps="1e-3", init_weights="False"),
    "boft": _config("BOFT", boft_block_size="2", init_weights="False"),
    "loha": _config("LoHa", r="2", init_weights="False"),
    "lokr": _config("LoKr", r="2", init_weights="False"),
    "hra": _config("HRA", r="2", init_weights="False"),
    "vera": _config("Vera", r="2", init_weights="False"),
    "fourierft": _config("FourierFT", n_frequency="4", init_weights="True"),
    "vblora": _config("VBLoRA", r="2", num_vectors="6", vector_length="2", topk="2"),
    "unilora": _config("UniLora", r="2"),
    "randlora": _config("RandLora", r="2", init_weights="False"),
    "miss": _config("Miss", r="2", init_weights="False"),
    "road": _config("Road", group_size="2", init_weights="False"),
    "shira": _config("Shira", r="1", init_weights="False"),
    "c3a": _config("C3A", block_size="2", init_weights="False"),
    "adalora": _config("AdaLora", init_r="2", target_r="1", total_step="10"),
}
"""The config of each, over the modules of the ordinary kinds."""

TWO = ("lora", "rslora", "ia3", "oft", "loha", "lokr")
"""Those that get a second one beside them, "other"."""


def make(name: str) -> str:
    """The lines that put the adapter on ``model``, and give it back."""
    config = ADAPTERS[name]
    second = f'\n    model.add_adapter("other", {config})' if name in TWO else ""
    return f"    model = peft.get_peft_model(Model(), {config}){second}\n    return model"


def _noting(source: str) -> str:
    """What PEFT writes into trained base weights is noted, as every write of a program's own."""
    return re.sub(
        r"^( *)(model\S*merge_adapter\(.*\)|first = .*|take\(.*)$",
        r"\1with side.writing(list(model.parameters())):\n\1    \2",
        source,
        flags=re.MULTILINE,
    )


_HABITS: dict[str, Habit] = {
    "adapter_off": stepped("with model.disable_adapter():\n    side.see('off', take(model, model(x)))"),
    "adapter_off_trained": before(
        "with model.disable_adapter():\n    reference = take(model, {call}(x)).detach()\nside.see('r', reference)"
    ),
    "adapter_merged": stepped(
        "model.merge_adapter()\nside.lay_out()\n<EVALUATE>\nmodel.unmerge_adapter()\nside.lay_out()\n<EVALUATE>"
    ),
    "adapter_merged_safely": stepped(
        "model.merge_adapter(safe_merge=True)\nside.lay_out()\n<EVALUATE>\nmodel.unmerge_adapter()\nside.lay_out()"
    ),
    "adapter_stays_merged": stepped("if step == {last}:\n    model.merge_adapter()"),
    "adapter_merged_and_off": stepped("""
        model.merge_adapter()
        side.lay_out()
        try:
            oft = "OFT" in str(model.peft_config["default"].peft_type)  # transposes weights in memory
            with torch.no_grad(), model.disable_adapter():
                model.train(not oft)  # no statistics of what other kernels give
                first = take(model, {call}(batch(side, 70 + step)))
                model.train()
                side.lay_out()
                side.see("unmerged and off", take(model, {call}(batch(side, 70 + step))))
            if not oft:
                side.see("merged and off", first)
        finally:
            model.unmerge_adapter()
            side.lay_out()
        """),
    "adapter_merged_off_caught": stepped("""
        model.merge_adapter()
        side.lay_out()
        with torch.no_grad(), model.disable_adapter():
            take(model, {call}(batch(side, 70 + step)))
        model.eval()
        with torch.no_grad():
            side.lay_out()
            side.see("after", take(model, {call}(batch(side, 70 + step))))
        model.train()
        """),
    "adapter_layers_off": stepped(
        "model.base_model.disable_adapter_layers()\n<EVALUATE>\nmodel.base_model.enable_adapter_layers()\n<EVALUATE>"
    ),
    "adapter_other": before(
        'if "other" in model.peft_config:\n    model.set_adapter("other" if step % 2 else "default")'
    ),
    "adapter_other_merged": stepped("""
        if "other" in model.peft_config:
            model.base_model.merge_adapter(adapter_names=["other"])
            model.unmerge_adapter()
            side.lay_out()
        """),
    "adapter_added_late": stepped(
        'if step == 0:\n    model.add_adapter("late", copy.deepcopy(model.peft_config["default"]))'
    ),
    "adapter_deleted": stepped('if step == 0 and "other" in model.peft_config:\n    model.delete_adapter("other")'),
    "adapter_weighted": stepped(
        'if step == 0 and "other" in model.peft_config:\n'
        '    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mean", combination_type="linear")'
    ),
    "adapter_state": stepped("""
        values = peft.get_peft_model_state_dict(model)
        for name, value in values.items():
            side.see(name, value)
        with side.writing([p for p in model.parameters() if p.requires_grad], whole=True):
            peft.set_peft_model_state_dict(model, {name: value * 0.9 for name, value in values.items()})
        """),
    "adapter_requires_grad": before(
        'if "other" in model.peft_config:\n    model.set_requires_grad("other", step % 2 == 0)'
    ),
    "adapter_status": stepped(
        "side.see('status', str(model.get_model_status()))\n"
        "side.see('layers', [str(s) for s in model.get_layer_status()])\n"
        "side.see('trainable', list(model.get_nb_trainable_parameters()))"
    ),
    "adapter_saved": stepped("""
        if step == 1:
            folder = side.folder("adapter")
            model.save_pretrained(folder)
            with torch.random.fork_rng():
                torch.manual_seed(7)  # what the file lacks (pruned weights) is drawn
                opened = peft.PeftModel.from_pretrained(side.cast(Model()), folder, autocast_adapter_dtype=False)
            side.see("saved", sorted(peft.get_peft_model_state_dict(opened)))
            side.see("saved values", [v for _, v in sorted(peft.get_peft_model_state_dict(opened).items())])
        """),
    "adapter_loaded": stepped("""
        if step == 0:
            folder = side.folder("adapter")
            model.save_pretrained(folder)
        if step == 1:
            with side.writing([p for p in model.parameters() if p.requires_grad], whole=True):
                model.load_adapter(folder, "default", is_trainable=True, autocast_adapter_dtype=False)
        """),
    "adapter_scaled": stepped("""
        for m in model.modules():
            if hasattr(m, "set_scale") and step == 0:
                m.set_scale("default", 0.5)
        """),
    "adapter_unloaded": stepped("""
        if step == {last}:
            bare = model.unload()
            side.see("bare", sorted(bare.state_dict()))
            return
        """),
    "adapter_merged_and_unloaded": stepped("""
        if step == {last}:
            merged = model.merge_and_unload()
            side.see("merged", [v for v in merged.state_dict().values() if torch.is_tensor(v)])
            return
        """),
}
ADAPTER_HABITS = {
    name: replace(habit, source=_noting(habit.source), needs="adapter") for name, habit in _HABITS.items()
}

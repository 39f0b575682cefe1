"""Habits of drawn programs that stop and resume, or go back: in which order a model and its optimizer are loaded, from
what, into the same objects or into new ones.

``{optimizer}`` stands for the lines that make an optimizer and its schedule. ``side.restore`` loads both, in an order.
"""

import re

from tests.hunts.program_parts import Habit, before

ORDERS = (
    "model, optimizer", "optimizer, model", "parts", "parts around", "twice", "set_state_dict", "set one by one",
    "torch.save", "dcp", "checkpoint", "checkpoint behind",
)  # fmt: skip
"""How ``side.restore`` loads what ``side.saved`` gave."""


def _anew(order: str) -> Habit:
    return before(
        f"""
        if step == 1:
            saved = side.saved(model, optimizer, scheduler, {order!r})
            model = side.anew(make())
            {{optimizer}}
            side.restore(saved, model, optimizer, scheduler, {order!r})
        """
    )


def _back(order: str) -> Habit:
    name = re.sub(r"\W+", "_", order)  # a program may have several of these
    return before(
        f"""
        if step == 1:
            saved_{name} = side.saved(model, optimizer, scheduler, {order!r})
        if step == 2:
            side.restore(saved_{name}, model, optimizer, scheduler, {order!r})
        """
    )


RESUMES: dict[str, Habit] = {
    **{f"anew from {order}": _anew(order) for order in ORDERS},
    **{f"back to {order}": _back(order) for order in ORDERS},
    "state_dict_hooks": before("""
        if step == 0:
            seen = []
            model.register_state_dict_post_hook(lambda m, values, prefix, meta: seen.append(len(values)))
            model.register_load_state_dict_post_hook(lambda m, keys: seen.append(len(keys.missing_keys)))
            optimizer.register_state_dict_pre_hook(lambda o: seen.append("saving"))
            optimizer.register_state_dict_post_hook(lambda o, values: seen.append(len(values["param_groups"])))
            optimizer.register_load_state_dict_pre_hook(lambda o, values: seen.append("loading"))
            optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        saved = side.saved(model, optimizer, None, "model, optimizer")
        side.restore(saved, model, optimizer, None, "model, optimizer")
        side.see("hooks", sorted({str(value) for value in seen}))
        """),
    "strict_loading": before("""
        if step == 1:
            values = {name: value.clone() for name, value in model.state_dict().items()}
            name = next(iter(values))
            for wrong in ({n: v for n, v in values.items() if n != name}, {**values, "more": torch.zeros(2)},
                          {**values, name: torch.zeros(3, 5, 7)}):
                try:
                    model.load_state_dict(wrong)
                except RuntimeError:
                    side.see("strict", 1)
        """),
    "state_of_a_part": before(
        'for name, value in {block}.state_dict(prefix="part.").items():\n    side.see(name, value)'
    ),
    "loading_a_part": before("""
        if step == 0:
            part = {name: value.clone() for name, value in {block}.state_dict().items()}
        if step == 2:
            side.load(part, {block})
        """),
}

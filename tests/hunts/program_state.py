"""What a program's side saves of a training run, and the orders in which it is loaded again (``program_resumes``)."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as by_torch


def saved(model: nn.Module, optimizer: Any, order: str, folder: Path) -> Any:
    """The state of both, as the order needs it: copies, or where they were written."""
    if order in ("set_state_dict", "set one by one", "dcp"):
        values = copied(by_torch.get_state_dict(model, optimizer))
        if order == "dcp":
            dcp.save({"model": values[0], "optimizer": values[1]}, checkpoint_id=str(folder / "dcp"), no_dist=True)
            return folder / "dcp"
        return values
    values = copied((model.state_dict(), optimizer.state_dict()))
    if order == "torch.save":
        torch.save(values, folder / "state.pt")
        return folder / "state.pt"
    return values


def restore(values: Any, model: nn.Module, optimizer: Any, order: str) -> None:
    """Load them in this order, as torch's own functions do it."""
    if order == "torch.save":
        values = torch.load(values, weights_only=False)
    if order == "dcp":
        into = dict(zip(("model", "optimizer"), by_torch.get_state_dict(model, optimizer), strict=True))
        try:
            dcp.load(into, checkpoint_id=str(values), no_dist=True)
        except dcp.CheckpointException as e:  # a BaseException
            raise RuntimeError(str(e)) from None
        values, order = (into["model"], into["optimizer"]), "set_state_dict"
    of_model, of_optimizer = copied(values)
    if order == "set_state_dict":
        by_torch.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    elif order == "set one by one":
        by_torch.set_optimizer_state_dict(model, optimizer, of_optimizer)
        by_torch.set_model_state_dict(model, of_model)
    elif order in ("model, optimizer", "checkpoint", "checkpoint behind"):
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
    elif order in ("optimizer, model", "torch.save"):
        optimizer.load_state_dict(of_optimizer)
        model.load_state_dict(of_model)
    elif order == "twice":
        optimizer.load_state_dict(copied(of_optimizer))
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
    elif order in ("parts", "parts around"):
        names = list(of_model)
        first, second = ({n: of_model[n] for n in part} for part in (names[::2], names[1::2]))
        model.load_state_dict(first, strict=False)
        if order == "parts around":
            optimizer.load_state_dict(of_optimizer)
        model.load_state_dict(second, strict=False)
        if order == "parts":
            optimizer.load_state_dict(of_optimizer)
    else:
        raise ValueError(f"there is no order {order!r}")


def copied(values: Any) -> Any:
    """Copies of all tensors in it, in ordinary containers. (A model's state has a ``_metadata`` that copies lose.)"""
    return copy.deepcopy(values)

"""What a backward that is running was asked for: the calls of torch's engine that are under way, and their graphs.

Autograd tells a node that runs neither where its backward started nor what else flows into the nodes it leads to; the
Python frame that waits for the engine knows the first, and the graph below it the second. Nothing is changed by
looking, and where there is nothing to be seen (a backward that no Python started) the answer is that it is unknown.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.nn.modules._functions import BackwardHookFunction

_RUN = _engine_run_backward.__code__
_ACCUMULATE = "AccumulateGrad"
_MODULE_HOOK: Any = BackwardHookFunction._backward_cls  # type: ignore[attr-defined]


class BackwardCall(NamedTuple):
    """A ``backward()`` or ``autograd.grad()`` that is under way."""

    roots: tuple[Any, ...]
    """The nodes that it starts from."""
    given: tuple[Any, ...]
    """The tensors whose gradients alone were asked for; none for those of all leaves. Those of a transform of
    ``torch.func`` are its own, and have no node here."""
    accumulates: bool
    """Whether leaves keep their gradients (``backward``), or they are returned (``autograd.grad``)."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The nodes of :attr:`given`."""
        return tuple(map(_node_of, self.given))


def running_calls() -> list[BackwardCall]:
    """The calls around this point of a backward, the innermost first; none if it cannot be said.

    On a CPU they wait in this very thread. Nodes of another device run in a thread of autograd's own, and what they
    belong to waits in another one: only if a single one waits is it known to be that.
    """
    calls = list(_calls_on(sys._getframe()))
    if torch.cuda.is_initialized():
        own = threading.get_ident()
        others = [found for ident, f in sys._current_frames().items() if ident != own and (found := list(_calls_on(f)))]
        if len(others) > 1:
            return []
        calls += [call for found in others for call in found]
    return calls


def _calls_on(frame: FrameType | None) -> Iterator[BackwardCall]:
    while frame is not None:
        if frame.f_code is _RUN:
            names, there = _RUN.co_varnames, frame.f_locals
            outputs, args, kwargs = (there[names[i]] for i in range(3))
            # Of torch.autograd.backward and torch.autograd.grad alike: gradients, retain_graph, create_graph, inputs.
            yield BackwardCall(tuple(map(_node_of, outputs)), tuple(args[3]), bool(kwargs.get("accumulate_grad")))
        frame = frame.f_back


def _node_of(output: Any) -> Any:
    return output.node if isinstance(output, torch.autograd.graph.GradientEdge) else get_gradient_edge(output).node


def nodes_below(roots: tuple[Any, ...]) -> list[Any]:
    """Every node that a backward from ``roots`` may reach, each before those it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(root.next_functions))]
        while path:  # depth first: a node is done when all below it are
            node, edges = path[-1]
            for child, _ in edges:
                if child is not None and child not in seen:
                    seen.add(child)
                    path.append((child, iter(child.next_functions)))
                    break
            else:
                order.append(node)
                path.pop()
    return order[::-1]


def first_below(roots: tuple[Any, ...], kind: type) -> Any:
    """A node of that class that a backward from ``roots`` may reach, the nearest one; None without one."""
    waiting = deque(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        if isinstance(node, kind):
            return node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return None


def marks_below(roots: tuple[Any, ...], start: int, through: Callable[[Any, int], int]) -> dict[Any, int]:
    """By node: the union of the marks with which gradients arrive there, over all paths from ``roots``.

    Args:
        start: the mark of the roots.
        through: (node, its marks) -> the marks of what it sends on.
    """
    order = nodes_below(roots)
    marks = dict.fromkeys(order, 0)
    for root in roots:
        marks[root] |= start
    for node in order:
        sent = through(node, marks[node])
        for child, _ in node.next_functions:
            if child is not None:
                marks[child] |= sent
    return marks


def is_leaf(node: Any) -> bool:
    """Whether gradients end here, in the ``.grad`` of ``node.variable``."""
    return type(node).__name__ == _ACCUMULATE


def may_start_another(node: Any) -> bool:
    """Whether it is a ``torch.autograd.Function``, in whose backward another one may run (checkpointing does)."""
    return isinstance(node, BackwardCFunction) and not isinstance(node, _MODULE_HOOK)


def is_seen(leaf: Any) -> bool:
    """Whether a program could look at the gradient of a leaf: anybody but the graph refers to its tensor."""
    return _num_references(leaf) > _NUM_UNSEEN


def _num_references(leaf: Any) -> int:
    return sys.getrefcount(leaf.variable)


def _unseen() -> Any:
    return get_gradient_edge(torch.zeros(0, device="cpu").requires_grad_(True)).node


_NUM_UNSEEN = _num_references(_unseen())

"""The two sides that a program runs on: a plain loop on ordinary params, and the same model managed by Gemini.

A program (source text, see ``program_source``) asks its side for the few things that are spelled differently there:
batches, an optimizer, clipping, gathered weights, gradients by name; and it tells the side what it sees. The plain side
defines the bits. Its params are cast to the compute dtype, what several backwards give is summed in fp32 (as the
contract of numerics says; one backward is torch's own), and ``HybridAdam``, which works on ordinary params too, updates
them. Both sides start from weights that the compute dtype holds exactly, so that the first masters are the same.
"""

import contextlib
import copy
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gemini.integrations.rules import to_hybrid
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

import gemini
import tests.standin_device  # noqa: F401 - "standin" is a device then
from gemini.kernels import reference
from gemini.memory.devices.device import make_device
from gemini.planning.layout import DEFAULT_MAX_CHUNK
from gemini.planning.placement import bytes_per_tier
from gemini.ranks.group import Ranks, alone
from gemini.rules import ADAM, UpdateRule
from gemini.tiers import Tier
from gemini.train.modules.reading import Structure
from gemini.train.optimizers import states as states_of
from gemini.train.setup.problem import decide
from tests import plain_programs
from tests.hunts import program_state
from tests.hunts.race_recipes import AlwaysPays
from tests.world import is_managed, world_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = tuple(DTYPES)
INIT_SCALE = 2.0**10
ADAPTERS_BUFFERS = ("vera_", "randlora_", "unilora_")  # in names of what PEFT computes in the dtype of weights


@dataclass(frozen=True)
class Where:
    """One way to manage a model: homes, and budgets that just hold them (``slack``: working sets more)."""

    device: str = "cpu"
    static: gemini.StaticPlacement | None = None
    gradients: str = "retain"
    overlap: bool = True
    max_chunk: int = DEFAULT_MAX_CHUNK
    slack: int = 0
    speculates: bool = False
    durable: bool = False
    shared: bool = False
    """All models of a program in one budget, which holds what two of them keep and one working set."""

    def config(self, model: nn.Module, precision: str, folder: Path, ranks: Ranks | None = None) -> gemini.GeminiConfig:
        """The config whose budget of the computing tier is the smallest that wraps ``model``."""
        if self.static is None:
            return self._config(precision, gemini.MemoryBudget(cpu="256MiB"), model)
        sizes: dict[str, Any] = {"cpu": "256MiB", "nvme": "256MiB", "nvme_path": folder, "durable": self.durable}
        if self.device == "standin":
            sizes["gpu"] = "256MiB"
        device, ranks = make_device(self.device), ranks or alone()
        decision = decide(Structure(model), self._config(precision, gemini.MemoryBudget(**sizes), model), device, ranks)
        needed = bytes_per_tier(decision.problem, decision.placement)
        needed[device.tier] += self.slack * decision.problem.working_set
        local = ranks.local_size  # which divide the memory and the drive of their machine
        sizes[device.tier.value] = needed[device.tier] * (1 if device.tier is Tier.GPU else local)
        sizes["nvme"] = (4 * needed[Tier.NVME] + 2**20) * local
        if self.shared:
            kept = needed[device.tier] - (self.slack + 1) * decision.problem.working_set
            sizes[device.tier.value] += kept
            return self._config(
                precision, gemini.SharedBudget(**sizes, later=0 if device.tier is Tier.GPU else kept), model
            )
        return self._config(precision, gemini.MemoryBudget(**sizes), model)

    def _config(self, precision: str, memory: gemini.MemoryBudget, model: nn.Module) -> gemini.GeminiConfig:
        return gemini.GeminiConfig(
            precision=precision,
            keep_fp32=getattr(model, "keep_fp32", "auto"),
            memory=memory,
            placement="auto" if self.static is None else self.static,
            gradients=self.gradients,
            device=self.device,
            max_chunk=self.max_chunk,
            overlap=self.overlap,
            update_threads=1,
            optimizer=rule_for(model),
        )


ALL_ON_NVME = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
HALF_ON_NVME = gemini.StaticPlacement(weights_on_nvme=0.5, optimizer_on_nvme=0.5)

PLACEMENTS = {
    "memory": Where(),
    "nvme": Where(static=ALL_ON_NVME),
    "serial": Where(static=ALL_ON_NVME, overlap=False),
    "chunks": Where(static=ALL_ON_NVME, max_chunk=64),
    "half": Where(static=HALF_ON_NVME),
    "standin": Where("standin", gemini.StaticPlacement(weights_on_nvme=0.3, optimizer_on_nvme=0.5)),
    "accumulate": Where(static=ALL_ON_NVME, gradients="accumulate", slack=1),
    "transient": Where(static=ALL_ON_NVME, gradients="transient"),
    "shared": Where(static=ALL_ON_NVME, shared=True),
    "shared_host": Where("standin", gemini.StaticPlacement(weights_on_nvme=0.3), slack=1, shared=True),
    "guessed": Where(static=ALL_ON_NVME, gradients="accumulate", slack=1, speculates=True, durable=True),
    "guessed_small": Where(static=ALL_ON_NVME, max_chunk=64, speculates=True, durable=True),
    "guessed_memory": Where(gradients="accumulate", speculates=True),
    "guessed_half": Where(static=HALF_ON_NVME, slack=8, speculates=True),
    "guessed_host": Where("standin", gemini.StaticPlacement(optimizer_on_nvme=0.5), max_chunk=64, speculates=True),
}
"""By the names that the command line takes. "transient" also steps in backward, and "guessed" guesses steps there."""
STEPPING = ("transient", *(name for name, where in PLACEMENTS.items() if where.speculates))
"""Those with updates inside backward."""


class Side:
    """What a program may ask for, wherever it runs."""

    def __init__(self, model: nn.Module, precision: str, folder: Path):
        self.model, self.precision, self.dtype = model, precision, DTYPES[precision]
        self._folder = folder
        self.seen: list[tuple[str, Any]] = []
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, enabled=precision == "fp16")

    def noise(self, key: int, *shape: int) -> torch.Tensor:
        """A batch of the compute dtype, the same for the same key."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(key)).to(self.dtype)

    def ids(self, key: int, high: int, *shape: int) -> torch.Tensor:
        """Token ids below ``high``."""
        return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(key))

    def see(self, label: str, value: Any) -> None:
        """Note a value, to be compared with the other side's."""
        if isinstance(value, torch.Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(value):  # a transform, which ends before we compare
                value = torch._C._functorch.get_unwrapped(value)
            value = value.detach().to("cpu", copy=True)
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                self.see(f"{label}[{number}]", item)
            return
        self.seen.append((label, value))

    def folder(self, name: str) -> str:
        """A path of this run's own, the same on all ranks."""
        return str(self._folder / name)

    def cast(self, model: nn.Module) -> nn.Module:
        """An ordinary model of the compute dtype, for both sides: a target network, say."""
        round_weights(model, self.precision)
        for name, param in model.named_parameters():
            param.data = param.data.to(dtype_of(model, name, self.precision))
        _cast_where_they_meet(model, DTYPES[self.precision])
        return model

    def to_own_dtype(self) -> None:
        """``model.to(dtype)``, of the compute dtype."""
        self.model.to(self.dtype)

    def saved(self, model: nn.Module, optimizer: Any, scheduler: Any, order: str) -> Any:
        """The state of a run, for :meth:`restore`."""
        own = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        return own, torch.get_rng_state(), self._saved(model, optimizer, scheduler, order)

    def restore(self, saved: Any, model: nn.Module, optimizer: Any, scheduler: Any, order: str) -> None:
        """Load what was saved, in this order."""
        own, random, values = saved
        if scheduler is not None:
            scheduler.load_state_dict(own)
        self._restore(values, model, optimizer, scheduler, order)
        if order.startswith("checkpoint"):
            torch.set_rng_state(random)  # which is in a checkpoint

    def beside(self, name: str) -> None:
        """Note what plain torch gives, without any managed model: see ``tests/plain_programs.py``."""
        self.see(f"beside {name}", self._beside(name))

    def grads(self) -> None:
        """Note every gradient there is."""
        for name, grad in self._grads():
            self.see(f"gradient of {name}", None if grad is None else grad.float())

    def end(self) -> None:
        """Note what a program leaves behind: weights, buffers, the state of the random numbers."""
        for name, value in self._weights():
            self.see(f"weight {name}", value)
        for name, value in self.model.named_buffers():
            self.see(f"buffer {name}", value)
        for name, module in self.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self.see(f"extra state of {name}", list(torch.utils._pytree.tree_leaves(module.get_extra_state())))
        self.see("state of the random numbers", torch.get_rng_state())

    def _grads(self) -> Iterable[tuple[str, torch.Tensor | None]]:
        raise NotImplementedError

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def _beside(self, name: str) -> Any:
        raise NotImplementedError

    def _saved(self, model: nn.Module, optimizer: Any, scheduler: Any, order: str) -> Any:
        return program_state.saved(model, optimizer, order, Path(tempfile.mkdtemp(dir=self._folder)))

    def _restore(self, values: Any, model: nn.Module, optimizer: Any, scheduler: Any, order: str) -> None:
        program_state.restore(values, model, optimizer, order)
        if order.startswith("checkpoint"):
            model.zero_grad()  # a checkpoint is of a model without gradients


class PlainSide(Side):
    """The ordinary loop. ``managed`` is False: a program may ask, where only one side has a method."""

    managed = False

    def __init__(self, model: nn.Module, precision: str, folder: Path, num_ranks: int = 1):
        super().__init__(model, precision, folder)
        self._num_ranks = num_ranks
        self._optimizers: list[gemini.HybridAdam] = []
        self.another(model)

    def another(self, model: nn.Module) -> nn.Module:
        """A second model, as this side has them."""
        for name, param in model.named_parameters():
            param.data = param.data.to(dtype_of(model, name, self.precision)).contiguous()
            if param.dtype != torch.float32 and param.is_floating_point():
                _sum_in_fp32(param, self._num_ranks)
        _cast_where_they_meet(model, self.dtype)
        for name, buffer in model.named_buffers():
            if any(word in name for word in ADAPTERS_BUFFERS) and buffer.is_floating_point():
                buffer.data = buffer.data.to(self.dtype)
        for module in model.modules():
            if getattr(module, "max_norm", None) is not None or hasattr(module, "_project_batch") and module.coft:
                self._follow_max_norm(module)
        return model

    def to_own_dtype(self) -> None:
        params = list(self.model.parameters())
        # In fp32, as Gemini has them: torch would cast them too.
        sums = [None if param.grad is None else param.grad.clone() for param in params]
        parts = [part for module in self._fp32_parts() for part in module.modules()]
        weights = [
            (param, param.detach().clone())
            for part in parts
            for param in part._parameters.values()
            if param is not None
        ]
        buffers = [dict(part._buffers) for part in parts]
        super().to_own_dtype()
        for param, value in weights:
            param.data = value
        for part, before in zip(parts, buffers, strict=True):
            part._buffers.update(before)
        for param, total in zip(params, sums, strict=True):
            param.grad = total

    def _fp32_parts(self) -> list[nn.Module]:
        """Modules with params that stay in fp32, which ``to`` leaves as they are."""
        kept = [
            name.rpartition(".")[0]
            for name, param in self.model.named_parameters()
            if param.dtype == torch.float32 == dtype_of(self.model, name, self.precision) != self.dtype
        ]
        return [self.model.get_submodule(name) for name in kept]

    def lay_out(self) -> None:
        """PEFT has left merged weights transposed: torch would choose other kernels for them."""
        for param in self.model.parameters():
            param.data = param.data.contiguous()

    def anew(self, model: nn.Module) -> nn.Module:
        """The model of a new run takes the place of this one's."""
        self.model = self.another(round_weights(model, self.precision))
        return self.model

    def _follow_max_norm(self, module: Any) -> None:
        """What an embedding, or PEFT's OFT, rewrites in its forward loses the other half of its master too."""
        before: list[torch.Tensor] = []
        module.register_forward_pre_hook(lambda *_: before.append(module.weight.detach().clone()))
        module.register_forward_hook(lambda *_: self._note_rewritten(module.weight, before.pop()))

    def adam(self, params: Any, **how: Any) -> gemini.HybridAdam:
        optimizer = gemini.HybridAdam(params, **{"lr": 0.02, "weight_decay": 0.1, **how})
        optimizer.rule = rule_for(self.model)
        # torch's own optimizers write through autograd, which then knows that an older graph is out of date. They
        # leave params without a gradient alone.
        optimizer.register_step_post_hook(
            lambda o, *_: _written(p for g in o.param_groups for p in g["params"] if p.grad is not None)
        )
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            self._keep_master(param, optimizer)
        self._optimizers.append(optimizer)
        return optimizer

    def convert(self, old: torch.optim.Optimizer) -> gemini.HybridAdam:
        """What takes the place of an optimizer of torch: all that can be read of it stays, and so do its hooks."""
        new = self.adam(old.param_groups, decoupled=isinstance(old, torch.optim.AdamW))
        new.defaults.update({name: value for name, value in old.defaults.items() if name in new.defaults})
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            getattr(new, name).update(getattr(old, name))
        return new

    def _saved(self, model: nn.Module, optimizer: Any, scheduler: Any, order: str) -> Any:
        """A state dict has nothing of params without a step by this optimizer; a checkpoint has their masters."""
        if order.startswith("checkpoint"):
            return super()._saved(model, optimizer, scheduler, order)
        masters = {p: state for p, state in optimizer.state.items() if not state.get("step")}
        for param in masters:
            del optimizer.state[param]
        try:
            return super()._saved(model, optimizer, scheduler, order)
        finally:
            optimizer.state.update(masters)

    def _keep_master(self, param: nn.Parameter, optimizer: gemini.HybridAdam) -> None:
        """A new optimizer begins with states of zero; the master is the model's, and stays exact."""
        for old in self._optimizers:
            kept = {name: old.state[param][name] for name in ("residual", "master") if name in old.state.get(param, {})}
            if kept:
                optimizer.state[param] = {**states_of.first_state(optimizer.rule.spec, param), **kept}

    def clip(self, max_norm: float, params: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
        chosen = self.model.parameters() if params is None else params
        grads = [p.grad for p in chosen if p.grad is not None]
        total = reference.total([reference.total(reference.sum_squares(g.float().view(-1))) for g in grads])
        norm = math.sqrt(total)
        if math.isfinite(norm):
            for grad in grads:
                grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return torch.tensor(norm, dtype=torch.float32)

    def load(self, values: dict[str, torch.Tensor], part: nn.Module | None = None) -> None:
        """``load_state_dict``: what is loaded is the whole master."""
        whose = part or self.model
        with self.writing(list(whose.parameters()), whole=True):
            whose.load_state_dict(values)
        _written(whose.parameters())

    def _note_written(self, params: Iterable[torch.Tensor]) -> None:
        """What was written is the whole master."""
        every = list(params)
        for state, param in ((optimizer.state.get(p, {}), p) for optimizer in self._optimizers for p in every):
            if "residual" in state:
                state["residual"].zero_()
            if "master" in state:
                state["master"] = param.detach().float()

    @contextlib.contextmanager
    def writing(self, params: list[nn.Parameter], *, whole: bool = False) -> Iterator[None]:
        """Written inside, in place: masters are what was written; without ``whole``, of the elements that changed."""
        before = [p.detach().clone() for p in params]
        yield
        if whole:
            for param, old in zip(params, before, strict=True):
                self._note_met(param, old)
            self._note_written(params)
        else:
            for param, old in zip(params, before, strict=True):
                self._note_rewritten(param, old)

    def train_step(self, parts: list[dict[str, Any]], loss: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        losses = []
        for part in parts:
            own = loss(self.model(**part), part)
            own.backward()
            losses.append(own.detach())
        return torch.stack(losses)

    def micro_batch(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        return call()

    def parked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def averages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The moving average of each param: its master, while it had no update."""
        for name, param in self.model.named_parameters():
            state: dict[str, Any] = {}
            for optimizer in self._optimizers:
                if any(param is own for group in optimizer.param_groups for own in group["params"]):
                    state = optimizer.state.get(param, {})
            if state.get("step"):
                yield name, state["ema"].view(param.shape).clone()
                continue
            master = param.detach().float()
            if "residual" in state:
                reference.join_master(param.detach().reshape(-1), state["residual"].view(-1), master.view(-1))
            yield name, state.get("master", master)

    @contextlib.contextmanager
    def averages_swapped(self) -> Iterator[None]:
        weights = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        for name, average in list(self.averages()):
            self.model.get_parameter(name).data.copy_(average)
        yield
        for name, weight in weights.items():
            self.model.get_parameter(name).data.copy_(weight)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What an inference engine loads: each param once."""
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not (isinstance(value, nn.Parameter) and id(value) in seen):
                seen.add(id(value))
                yield name, value

    def full_param(self, name: str) -> torch.Tensor:
        return self.model.get_parameter(name).detach().clone()

    def full_grad(self, name: str) -> torch.Tensor | None:
        grad = self.model.get_parameter(name).grad
        return None if grad is None else grad.clone()

    @contextlib.contextmanager
    def gathered(self, params: Any = None, write: bool = False) -> Iterator[None]:
        """Written elements lose the other half of their master, as in ``GeminiDDP.gathered``."""
        params = list(self.model.parameters()) if params is None else list(params)
        before = [p.detach().clone() for p in params]
        yield
        if write:
            _written(params)
            for param, old in zip(params, before, strict=True):
                self._note_rewritten(param, old)

    def _note_rewritten(self, param: torch.Tensor, old: torch.Tensor) -> None:
        changed = param.detach() != old
        self._note_met(param, old)
        for optimizer in self._optimizers:
            state = optimizer.state.get(param, {})
            # A loaded master that still waits for its weights is not what was written to.
            state = state.get(states_of.BEFORE, state)
            if "residual" in state:
                state["residual"][changed] = 0
            if "master" in state:
                state["master"][changed] = param.detach().float()[changed]

    def _note_met(self, param: torch.Tensor, old: torch.Tensor) -> None:
        """A loaded master that waits for its weights has met them, where they were here before a write."""
        for state in (optimizer.state.get(param, {}) for optimizer in self._optimizers):
            if states_of.BEFORE in state and states_of.is_of(old, state):
                states_of.complete_master(old, state)

    def _grads(self) -> Iterable[tuple[str, torch.Tensor | None]]:
        """As the loss gives them, as ``full_grad`` does: a scaler leaves those that no optimizer owns as they are."""
        owned = {id(p) for o in self._optimizers[-1:] for group in o.param_groups for p in group["params"]}
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        return [
            (name, param.grad if param.grad is None or id(param) in owned else param.grad / scale)
            for name, param in self.model.named_parameters()
        ]

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return [(name, param.detach()) for name, param in self.model.named_parameters()]

    def _beside(self, name: str) -> Any:
        return plain_programs.before(name)


class ManagedSide(Side):
    """The same program under ``GeminiDDP``."""

    managed = True

    def __init__(self, model: nn.Module, precision: str, where: Where, folder: Path, ranks: Ranks | None = None):
        self._how_managed, self._stores = (where, ranks), itertools.count()
        self._memory: gemini.MemoryBudget | None = None
        super().__init__(model, precision, folder)
        self.model = model = self.another(model)
        how = {"step_in_backward": where.gradients == "transient" or where.speculates, "speculate": where.speculates}
        self._how = how if any(how.values()) else {}
        if where.speculates:
            world_of(model).guess_by(AlwaysPays())
        if precision == "fp16":
            self.scaler = gemini.GradScaler(init_scale=INIT_SCALE)

    def another(self, model: nn.Module) -> nn.Module:
        where, ranks = self._how_managed
        own = self._folder / f"store{next(self._stores)}"  # a durable store has one model
        own.mkdir(exist_ok=True)  # ranks share it
        config = where.config(model, self.precision, own, ranks)
        if where.shared:
            self._memory = self._memory or config.memory
            config = replace(config, memory=self._memory)
        return gemini.GeminiDDP(model, config)  # type: ignore[no-any-return]

    def lay_out(self) -> None:
        pass

    def anew(self, model: nn.Module) -> nn.Module:
        self.model = self.another(round_weights(model, self.precision))
        return self.model

    def convert(self, old: torch.optim.Optimizer) -> gemini.HybridAdam:
        return to_hybrid(old)  # type: ignore[return-value]

    def adam(self, params: Any, **how: Any) -> gemini.HybridAdam:
        how = {"lr": 0.02, "weight_decay": 0.1, **how}
        return gemini.HybridAdam(params, **how, **self._how)

    def clip(self, max_norm: float, params: Iterable[nn.Parameter] | None = None) -> torch.Tensor:
        return self.model.clip_grad_norm_(max_norm, params=params)  # type: ignore[operator]

    def load(self, values: dict[str, torch.Tensor], part: nn.Module | None = None) -> None:
        (part or self.model).load_state_dict(values)

    def writing(self, params: list[nn.Parameter], *, whole: bool = False) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def train_step(self, parts: list[dict[str, Any]], loss: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        return gemini.train_step(self.model, parts, loss)

    def micro_batch(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.model.micro_batch(call)  # type: ignore[operator,no-any-return]

    def parked(self) -> contextlib.AbstractContextManager[None]:
        return self.model.parked()  # type: ignore[operator,no-any-return]

    def averages(self) -> Iterator[tuple[str, torch.Tensor]]:
        ema = gemini.EMA(self.model)
        # A program may have given a param another name: pruning.
        return ((name, ema.full_param(param._gemini.name)) for name, param in self.model.named_parameters())

    def averages_swapped(self) -> contextlib.AbstractContextManager[None]:
        return gemini.EMA(self.model).swapped_in()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return gemini.weights_for(self.model, adapters="apart")

    def full_param(self, name: str) -> torch.Tensor:
        try:
            return self.model.full_param(name)  # type: ignore[operator]
        except KeyError:  # the program has given it another name: pruning
            return self.model.get_parameter(name).detach().clone()

    def full_grad(self, name: str) -> torch.Tensor | None:
        return self.model.full_grad(name)  # type: ignore[operator]

    def gathered(self, params: Any = None, write: bool = False) -> contextlib.AbstractContextManager[None]:
        return self.model.gathered(params, write=write)  # type: ignore[operator]

    def end(self) -> None:
        super().end()
        if self._is_managed:
            world_of(self.model).check()  # type: ignore[union-attr]

    @property
    def _is_managed(self) -> bool:
        """False once the program has made it an ordinary one: ``merge_and_unload()``."""
        return is_managed(self.model) and hasattr(self.model, "full_param")

    def _grads(self) -> Iterable[tuple[str, torch.Tensor | None]]:
        handles = [(name, getattr(param, "_gemini", None)) for name, param in self.model.named_parameters()]
        return [(name, handle and self.full_grad(handle.name)) for name, handle in handles]  # None: it came later

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        names = [name for name, _ in self.model.named_parameters()]
        return [(name, self.full_param(name) if self._is_managed else self.model.get_parameter(name)) for name in names]

    def _beside(self, name: str) -> Any:
        return plain_programs.run(name)

    def _saved(self, model: nn.Module, optimizer: Any, scheduler: Any, order: str) -> Any:
        if not order.startswith("checkpoint"):
            return super()._saved(model, optimizer, scheduler, order)
        folder = self.folder("checkpoint")
        return folder, gemini.save_checkpoint(folder, model, optimizer, scheduler, wait=order == "checkpoint")

    def _restore(self, values: Any, model: nn.Module, optimizer: Any, scheduler: Any, order: str) -> None:
        if not order.startswith("checkpoint"):
            return super()._restore(values, model, optimizer, scheduler, order)
        folder, pending = values
        if pending is not None:
            pending.wait()
        gemini.load_checkpoint(folder, model, optimizer, scheduler)


def rule_for(model: nn.Module) -> UpdateRule:
    """Adam's, with moving averages where the model says so."""
    return gemini.optim.AveragedRule(decay=model.averages) if hasattr(model, "averages") else ADAM


def dtype_of(model: nn.Module, name: str, precision: str) -> torch.dtype:
    """What a param is computed in: fp32 where the model says so, or where torch has buffers in fp32 beside it."""
    whose, _, last = name.rpartition(".")
    module, param = model.get_submodule(whose), model.get_parameter(name)
    said = [*getattr(model, "keep_fp32", ()), *getattr(model, "_keep_in_fp32_modules_strict", ())]
    kept = any(part in said for part in name.split("."))
    kept |= isinstance(module, _NormBase) and module.track_running_stats
    kept |= last.startswith("original") and _is_parametrized_in_fp32(module)
    kept |= any(isinstance(hook, SpectralNorm) and last == f"{hook.name}_orig" for hook in _pre_hooks(module))
    return param.dtype if kept or not param.is_floating_point() else DTYPES[precision]


def _is_parametrized_in_fp32(module: nn.Module) -> bool:
    """Orthogonal weights, and those with buffers (spectral norms)."""
    return isinstance(module, parametrize.ParametrizationList) and any(
        type(part).__name__ == "_Orthogonal" or any(True for _ in part.buffers()) for part in module
    )


def _pre_hooks(module: nn.Module) -> Iterable[Any]:
    return list(module._forward_pre_hooks.values())


def _cast_where_they_meet(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights that torch computes in fp32 are multiplied in the dtype of the others."""
    for module in model.modules() if dtype != torch.float32 else ():
        if _is_parametrized_in_fp32(module):
            module.register_forward_hook(lambda _, args, weight: weight.to(dtype))
        for hook in _pre_hooks(module):
            if isinstance(hook, SpectralNorm):
                module.register_forward_pre_hook(
                    lambda m, args, name=hook.name: setattr(m, name, getattr(m, name).to(dtype))
                )


def _sum_in_fp32(param: nn.Parameter, num_ranks: int) -> None:
    """Let gradients of ``param`` be rounded to its dtype, as autograd does, and be added up in fp32.

    Ranks divide by their number first (docs/ranks.md): a subnormal half of a small gradient in fp16 has a bit less.
    """
    trained = param.requires_grad
    param.requires_grad_(True)  # a program may unfreeze it, and only then hooks can be registered
    param.grad_dtype = None  # type: ignore[attr-defined]
    param.register_hook(lambda grad: grad.to(param.dtype).div(num_ranks).mul(num_ranks).to(grad.dtype))
    param.register_post_accumulate_grad_hook(_to_fp32)
    param.requires_grad_(trained)


def _to_fp32(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.float()


def _written(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        torch.autograd.graph.increment_version(param)


def round_weights(model: nn.Module, precision: str) -> nn.Module:
    """Let the weights be values of the compute dtype, in fp32, and lie as they did."""
    for name, param in model.named_parameters():
        if param.is_floating_point():
            with torch.no_grad():
                param.copy_(param.to(dtype_of(model, name, precision)))
    return model

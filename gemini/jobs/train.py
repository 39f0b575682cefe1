"""The main job: a causal language model, text files, and the ordinary PyTorch loop, in the memory it was given.

``TrainRun`` is one run from settings to a saved model. Everything that can be refused is refused while it is made, the
cheap checks first; then ``run`` goes through the steps, ``save`` writes the model. The loop in ``_step`` is the loop of
the README.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import gemini
from gemini.errors import human_bytes
from gemini.jobs import checkpoints
from gemini.jobs.errors import JobError, as_job_error
from gemini.jobs.interrupt import StopWish
from gemini.jobs.models import ModelSource, build_model, checkpoint_activations, find_model, load_tokenizer
from gemini.jobs.progress import StepReport, TrainProgress
from gemini.jobs.settings import TrainSettings
from gemini.jobs.text_files import find_text_files, fingerprint
from gemini.jobs.tokens import ByteTokens, TokenizerTokens, Tokens
from gemini.jobs.windows import WindowStream

# fp16 skips steps while it looks for a loss scale, but then the loss itself is finite.
_HOPELESS_STEPS = 10


class TrainRun:
    """A model under Gemini with its optimizer, schedule and text, ready for the next step.

    Raises:
        JobError: if the settings, the model or the text cannot be trained on.
        gemini.GeminiError: if the model cannot fit the budgets, or the NVMe folder or a checkpoint is unusable.
    """

    def __init__(self, settings: TrainSettings, console: Console) -> None:
        settings.check()
        self.settings = settings
        self._console = console
        source = find_model(settings.model, settings.preset, settings.layers)
        self._tokenizer: Any = None
        checkpoints.prepare_out(settings.out)
        checkpoint = checkpoints.choose(settings.resume, settings.out, overwrite=settings.overwrite)
        self.stream = self._open_text(source)

        self.device = _device(settings.device)
        model = build_model(source, seed=settings.seed)
        self._use_cache = getattr(model.config, "use_cache", None)
        model.config.use_cache = False  # the cache of generate() would keep keys and values of every layer for nothing
        if settings.gradient_checkpointing:
            with as_job_error(asked="--gradient-checkpointing"):
                checkpoint_activations(model)
        groups = _param_groups(model, settings.weight_decay)
        self._weight_decays = [group["weight_decay"] for group in groups]
        self.num_params = sum(p.numel() for p in model.parameters())
        with as_job_error(asked="The settings cannot be used together"):
            config = gemini.GeminiConfig(
                precision=settings.precision,
                memory=gemini.MemoryBudget(
                    gpu=settings.gpu_memory,
                    cpu=settings.cpu_memory,
                    nvme=settings.nvme_memory,
                    nvme_path=settings.nvme_path,
                ),
                gradients="accumulate" if settings.accumulate > 1 else "retain",
                device=settings.device,
                activations=settings.activations or 0,
            )
        self.model: Any = gemini.GeminiDDP(model, config)
        self.optimizer = gemini.HybridAdam(
            groups, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.scheduler = transformers.get_scheduler(
            settings.schedule, self.optimizer, num_warmup_steps=settings.warmup, num_training_steps=settings.steps
        )
        self.step = 0
        self._say(f"model: {source.label}, {self.num_params:,} params, {settings.precision}")
        self._say(_tier_budgets(self.model.memory_report()))
        self._resume(checkpoint)

    # ---- before the first step ---------------------------------------------------------------------------------------

    def _open_text(self, source: ModelSource) -> WindowStream:
        settings = self.settings
        longest = getattr(source.config, "max_position_embeddings", None)
        if longest is not None and settings.seq_len > longest:
            raise JobError(
                f"--seq-len {settings.seq_len} is more than the model's {longest} positions. Use at most {longest}."
            )
        files = find_text_files(settings.data, settings.glob, without_folders=settings.without_folders)
        tokens: Tokens
        if source.tokenizer is None:
            tokens = ByteTokens(files)
        else:
            self._tokenizer = load_tokenizer(source.tokenizer)
            tokens = TokenizerTokens(
                files, self._tokenizer, scratch=settings.out, origin=f"tokenizer of {source.tokenizer}"
            )
        if tokens.vocabulary > source.config.vocab_size:
            raise JobError(
                f"{source.label} has a vocabulary of {source.config.vocab_size}; the text as {tokens.describe()} needs "
                f"{tokens.vocabulary}. Give a config with a vocab_size of at least {tokens.vocabulary}."
            )
        stream = WindowStream(
            tokens,
            settings.seq_len,
            seed=settings.seed,
            num_held_out=settings.num_held_out,
            identity=fingerprint(files),
        )
        self._say(
            f"text: {len(files)} files, {human_bytes(sum(file.num_bytes for file in files))}, {tokens.num_tokens:,} "
            f"tokens in {stream.num_windows:,} windows of {settings.seq_len}; {tokens.describe()}"
        )
        return stream

    def _resume(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            if self.settings.resume == "auto":
                self._say(f"no checkpoint in {self.settings.out}: starting anew")
            return
        extra = gemini.load_checkpoint(checkpoint, self.model, self.optimizer, self.scheduler)
        if not isinstance(extra, dict) or "gemini_train" not in extra:
            raise JobError(
                f"--resume {checkpoint}: this checkpoint was not written by `gemini train`, it has no position."
            )
        self._follow_settings()
        self.stream.load_state_dict(extra["gemini_train"]["data"])
        self.step = int(extra["gemini_train"]["step"])
        self._say(f"resumed from {checkpoint} after step {self.step}")
        if self.step >= self.settings.steps:
            raise JobError(
                f"--resume {checkpoint}: its {self.step} steps are all of --steps {self.settings.steps}. Ask for more "
                "steps to go on."
            )

    def _follow_settings(self) -> None:
        """Learning rate and weight decay as the command line has them: the checkpoint brought back those of its run."""
        self.scheduler.base_lrs = [self.settings.lr for _ in self.optimizer.param_groups]
        for group, decay, factor in zip(
            self.optimizer.param_groups, self._weight_decays, self.scheduler.lr_lambdas, strict=True
        ):
            group["initial_lr"], group["weight_decay"] = self.settings.lr, decay
            group["lr"] = self.settings.lr * factor(self.scheduler.last_epoch)

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def run(self) -> list[float]:
        """Train to the last step, or to the whole step after Ctrl-C. Returns the loss of each step that was run.

        Afterwards ``self.step < self.settings.steps`` says that it was stopped, and a checkpoint is there.
        """
        settings = self.settings
        losses: list[float] = []
        self.model.train()
        progress = TrainProgress(
            self._console, num_steps=settings.steps, first_step=self.step, log_every=settings.log_every
        )
        stop = StopWish("Stopping after this step, then saving. Once more stops at once, and saves nothing.")
        with stop, progress:
            stopping = False
            while self.step < settings.steps and not stopping:
                report = self._step_or_stop(progress)
                losses.append(report.loss)
                if len(losses) >= _HOPELESS_STEPS and not any(map(math.isfinite, losses[-_HOPELESS_STEPS:])):
                    raise JobError(
                        f"The loss has been inf or NaN for {_HOPELESS_STEPS} steps, the last is step {self.step}. "
                        f"A lower --lr may help, or --precision bf16. {self._newest_checkpoint()}"
                    )
                progress.show(report)
                stopping = stop.wanted  # looked at once: a signal after this stops after the next step
                due = self.step == settings.steps or self.step % max(settings.save_every, 1) == 0
                if stopping or (settings.save_every and due):
                    self._save_checkpoint(progress)
        return losses

    def _step_or_stop(self, progress: TrainProgress) -> StepReport:
        """A step; where gradients are not finite, a checkpoint from before it, so that hours are not lost."""
        try:
            return self._step()
        except gemini.NonFiniteGradient as e:
            self.optimizer.zero_grad()
            self._save_checkpoint(progress)
            raise JobError(
                f"The gradients of step {self.step + 1} hold inf or NaN, so no weight was changed. The state before it "
                "is saved; --resume auto goes on from there with the text that follows. A lower --lr may help."
            ) from e

    def _step(self) -> StepReport:
        """One optimizer step over ``accumulate`` batches."""
        settings = self.settings
        lr = self.optimizer.param_groups[0]["lr"]
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for batch_number in range(settings.accumulate):
            ids = torch.tensor(self.stream.next_batch(settings.batch_size), device=self.device)
            last = batch_number == settings.accumulate - 1
            with nullcontext() if last else self.model.no_sync():
                loss = self.model(input_ids=ids, labels=ids).loss / settings.accumulate
                loss.backward()
            total += loss.detach().float()
        norm = float(self.model.clip_grad_norm_(settings.clip)) if settings.clip else None
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        memory = self.model.memory_report()
        return StepReport(
            step=self.step,
            loss=float(total),
            grad_norm=norm,
            lr=lr,
            num_tokens=settings.accumulate * settings.batch_size * settings.seq_len,
            used_bytes={tier: memory[tier]["used"] for tier in tiers_of(memory)},
        )

    def _newest_checkpoint(self) -> str:
        there = checkpoints.checkpoints_in(self.settings.out)
        return f"The newest checkpoint is {there[-1]}." if there else "There is no checkpoint."

    def _save_checkpoint(self, progress: TrainProgress) -> None:
        path = checkpoints.checkpoint_path(self.settings.out, self.step)
        extra = {"gemini_train": {"step": self.step, "data": self.stream.state_dict()}}
        path.parent.mkdir(exist_ok=True)
        gemini.save_checkpoint(path, self.model, self.optimizer, self.scheduler, extra=extra)
        checkpoints.prune(self.settings.out, self.settings.keep)
        progress.say(f"saved {path}")

    # ---- after the last step -----------------------------------------------------------------------------------------

    def held_out_loss(self) -> float:
        """The mean loss on the windows that training never sees."""
        self.model.eval()
        loss = mean_loss(self.model, torch.tensor(self.stream.held_out(), device=self.device), self.settings.batch_size)
        self.model.train()
        return loss

    def save(self) -> None:
        """Write the model to ``--out`` as Hugging Face safetensors, its tokenizer beside it."""
        if self._use_cache is not None:
            self.model.config.use_cache = self._use_cache
        self.model.save_pretrained(self.settings.out)
        self.model.config.use_cache = False
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(self.settings.out)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@torch.no_grad()
def mean_loss(model: Any, windows: torch.Tensor, batch_size: int) -> float:
    """The mean over batches of windows, in as little memory as training takes."""
    losses = [float(model(input_ids=ids, labels=ids, use_cache=False).loss) for ids in windows.split(batch_size)]
    return sum(losses) / len(losses)


def tiers_of(memory: Any) -> list[str]:
    """The tiers a memory report has, fastest first."""
    return [tier for tier in ("gpu", "cpu", "nvme") if tier in memory]


def budget_lines(memory: Any) -> tuple[list[str], bool]:
    """For each tier whether its peak stayed within its budget, and whether all did."""
    lines, all_within = [], True
    for tier in tiers_of(memory):
        peak, budget = memory[tier]["peak"], memory[tier]["budget"]
        within = peak <= budget
        all_within = all_within and within
        verdict = "stayed within" if within else "WENT OVER"
        lines.append(f"{tier}: {verdict} its budget, peak {human_bytes(peak)} of {human_bytes(budget)}")
    return lines, all_within


def train(settings: TrainSettings, console: Console, *, command: str) -> int:
    """Run the job as the command line does; returns the exit code. ``command`` is how to call it again."""
    run = TrainRun(settings, console)
    run.run()
    finished = run.step == settings.steps
    if finished:
        run.save()
    memory = run.model.memory_report()
    lines, all_within = budget_lines(memory)
    console.print(str(memory), *lines, sep="\n", highlight=False, markup=False, soft_wrap=True)
    if finished:
        said = f"The model is in {settings.out}; it opens with transformers' AutoModelForCausalLM.from_pretrained."
    else:
        said = f"Stopped after step {run.step} of {settings.steps}. To go on: {command}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)
    return 130 if not finished else 0 if all_within else 1


def _device(asked: str | None) -> torch.device:
    """Where the batches go: the device Gemini computes on (its stand-in computes on the CPU)."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "standin":
        return torch.device("cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as e:
        raise JobError(f"--device {asked}: there is no such device. Use cpu or cuda, or leave it out.") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JobError(
            f"--device {asked}: torch finds no usable GPU (`gemini doctor` says more). Leave it out to use the CPU."
        )
    return device


def _param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; biases and norms, which have one dimension, do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _tier_budgets(memory: Any) -> str:
    return "memory: " + ", ".join(
        f"{tier} {human_bytes(memory[tier]['used'])} of {human_bytes(memory[tier]['budget'])}"
        for tier in tiers_of(memory)
    )

"""Tunes one small model on a task with every optimizer, exact and compact, and with LoRA: what it learns, and the cost.

    python benchmarks/tuning.py --seeds 0 1 2
    python benchmarks/tuning.py --methods "AdamW" "AdamW, compact" --steps 50 --rates 1

A Llama of bytes is trained on the source of Python's standard library, but for the files that are held out, and then
tuned to write the first line of a function's docstring, given the function without it. Two scores on functions of the
files that are held out: the loss of the answer's bytes, and how often the right one of four answers has the lowest loss
(25 % are right by chance). The learning rate of a method is the best of a few with the first seed; seeds are of the
order of the data. Every method begins with the same weights and sees the same batches.

Cost: bytes per param that last (weights, masters, states; of LoRA those of the adapters too), and CPU seconds of a step
beside those of AdamW in the same run.
"""

from __future__ import annotations

import argparse
import ast
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import add_out, head, publish, table

CHOICES = 4
IGNORED = -100


class Example(NamedTuple):
    prompt: bytes
    answer: bytes


# ---- data ------------------------------------------------------------------------------------------------------------


def examples_of(path: Path, *, longest: int) -> list[Example]:
    """Of each function with a docstring: it without that, cut, and the first line of that."""
    source = path.read_text(errors="replace")
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        first = (ast.get_docstring(node) or "").split("\n")[0].strip()
        top = lines[node.lineno - 1 : node.body[0].lineno - 1]
        code = "\n".join([*top, *lines[node.body[1].lineno - 1 : node.end_lineno]]).encode()
        answer = first.encode()[: longest // 3]
        if len(answer) > 8 and len(code) > 16:
            found.append(Example(code[: longest - len(answer) - 4] + b"\n# ", answer + b"\n"))
    return found


class Data(NamedTuple):
    text: Tensor
    train: list[Example]
    held_out: list[Example]


def read_data(longest: int) -> Data:
    text: list[bytes] = []
    parts: list[list[Example]] = [[], []]
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))):
        if {"test", "tests", "site-packages", "lib2to3", "idlelib", "turtledemo"} & set(path.parts):
            continue
        held_out = number % 8 == 0
        try:
            parts[held_out] += examples_of(path, longest=longest)
        except SyntaxError:
            continue
        if not held_out:
            text.append(path.read_bytes())
    return Data(torch.frombuffer(bytearray(b"".join(text)), dtype=torch.uint8).long(), *parts)


def encoded(pairs: Sequence[tuple[bytes, bytes]], longest: int) -> dict[str, Tensor]:
    """Sequences of prompt and answer, padded behind; only answers have labels."""
    ids, labels = torch.zeros(len(pairs), longest, dtype=torch.long), torch.full((len(pairs), longest), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        whole = list(prompt + answer)[:longest]
        ids[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(prompt) : len(whole)] = ids[row, len(prompt) : len(whole)]
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


# ---- model and scores ------------------------------------------------------------------------------------------------


def make_model(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=args.hidden, intermediate_size=args.hidden * 3, num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 32, max_position_embeddings=args.length, use_cache=False,
            attn_implementation="eager",
        )
    )  # fmt: skip


def pretrained(args: argparse.Namespace, data: Data) -> dict[str, Tensor]:
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.pretrain)
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.pretrain):
        starts = torch.randint(0, len(data.text) - args.length, (args.batch,), generator=generator)
        ids = torch.stack([data.text[start : start + args.length] for start in starts.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"pretrained: loss {loss.item():.3f} after {args.pretrain} steps", flush=True)
    return {name: weight.clone() for name, weight in model.state_dict().items()}


class Score(NamedTuple):
    loss: float
    right: float


@torch.no_grad()
def score(model: Any, args: argparse.Namespace, data: Data) -> Score:
    """Losses of bytes of answers, and the share of questions whose own answer has the lowest."""
    chosen = random.Random(7).sample(data.held_out, min(args.questions, len(data.held_out)))
    total = count = right = 0.0
    for number, example in enumerate(chosen):
        others = random.Random(number).sample(
            [other for other in chosen if other.answer != example.answer], CHOICES - 1
        )
        batch = encoded([(example.prompt, one.answer) for one in (example, *others)], args.length)
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1].float()
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        own = (labels != IGNORED).sum(1)
        means = each.sum(1) / own
        total, count = total + each[0].sum().item(), count + own[0].item()
        right += int(means.argmin() == 0)
    return Score(total / count, right / len(chosen))


# ---- methods ---------------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    rates: tuple[float, ...]
    make: Callable[[Any, float], Any]
    config: Callable[[], dict[str, Any]] = dict
    lora: bool = False


def methods() -> dict[str, Method]:
    import gemini
    from gemini import optim

    adam, compact = (3e-4, 1e-3, 3e-3), {"states": "compact"}

    def adopted() -> Any:
        return optim.adopt(torch.optim.Adafactor)

    def of(rule: Any, **more: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"optimizer": rule(), **more}

    def lomo(params: Any, lr: float) -> Any:
        return optim.LOMO(params, lr=lr)

    found = {
        "AdamW": Method(adam, lambda p, lr: gemini.HybridAdam(p, lr=lr)),
        "AdamW, compact": Method(adam, lambda p, lr: gemini.HybridAdam(p, lr=lr), lambda: compact),
        "Lion": Method((3e-5, 1e-4, 3e-4), lambda p, lr: optim.Lion(p, lr=lr), of(optim.LionRule)),
        "Lion, compact": Method((3e-5, 1e-4, 3e-4), lambda p, lr: optim.Lion(p, lr=lr), of(optim.LionRule, **compact)),
        "SGD, momentum": Method((1e-2, 3e-2, 1e-1), lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9), of(optim.SGDRule)),
        "SGD, momentum, compact": Method(
            (1e-2, 3e-2, 1e-1), lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9), of(optim.SGDRule, **compact)
        ),
        "LOMO": Method((3e-2, 1e-1, 3e-1), lomo, of(optim.PlainSGDRule, gradients="transient")),
        "AdaLomo": Method((3e-3, 1e-2, 3e-2), lambda p, lr: optim.AdaLomo(p, lr=lr), of(optim.AdaLomoRule)),
        "Adafactor, adopted": Method((1e-3, 3e-3, 1e-2), lambda p, lr: adopted().make(p, lr=lr), of(adopted)),
        "Adan": Method((3e-4, 1e-3, 3e-3), lambda p, lr: optim.Adan(p, lr=lr), of(optim.AdanRule)),
        "Sophia-G": Method((3e-5, 1e-4, 3e-4), lambda p, lr: optim.SophiaG(p, lr=lr, bs=512), of(optim.SophiaGRule)),
        "Sophia-H": Method((3e-5, 1e-4, 3e-4), lambda p, lr: optim.SophiaH(p, lr=lr), of(optim.SophiaHRule)),
        "Muon": Method(
            (3e-4, 1e-3, 3e-3),
            lambda p, lr: optim.Muon(p, lr=lr, adjust_lr="match_rms_adamw"),
            of(optim.MuonRule),
        ),
        "LoRA, rank 8, AdamW": Method((1e-3, 3e-3, 1e-2), lambda p, lr: gemini.HybridAdam(p, lr=lr), lora=True),
    }
    return found


def wrap(model: Any, method: Method, lr: float, **config: Any) -> tuple[Any, Any]:
    """The model, managed, and what the optimizer of the method is given."""
    import gemini
    from gemini import optim

    if method.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = {"precision": "bf16", "device": "cpu", **config, **method.config()}
    model = gemini.GeminiDDP(model, gemini.GeminiConfig(**settings))
    if isinstance(settings.get("optimizer"), optim.MuonRule):
        return model, optim.muon_groups(model, lr=lr / 3)
    return model, [param for param in model.parameters() if param.requires_grad]


class Tuned(NamedTuple):
    score: Score
    bytes_per_param: float
    seconds: float
    """Of the CPU for a step, the mean."""


def tune(args: argparse.Namespace, data: Data, begin: dict[str, Tensor], method: Method, lr: float, seed: int) -> Tuned:
    model = make_model(args)
    model.load_state_dict(begin)
    numel = sum(param.numel() for param in model.parameters())
    torch.manual_seed(seed)
    model, trained = wrap(model, method, lr)
    optimizer = method.make(trained, lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, 0.1 + 0.9 * (1 - step / args.steps))
    )
    order = random.Random(seed)
    seconds = []
    for step in range(args.steps):
        batch = encoded(order.sample(data.train, args.batch), args.length)
        start = time.process_time()
        if step % 10 == 0:
            estimate(model, optimizer, batch)
        model(**batch).loss.backward()
        if not optimizer.step_in_backward:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    model.eval()
    report = model.memory_report()
    frozen = 2 * (report["params"] - report["trained_params"])
    per_param = (report["bytes_per_param"] * report["trained_params"] + frozen) / numel
    return Tuned(score(model, args, data), per_param, statistics.mean(seconds))


def estimate(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> None:
    """Sophia's estimates of the Hessian, of a part of the batch."""
    from gemini import optim

    part = {name: value[:2] for name, value in batch.items()}
    if isinstance(optimizer, optim.SophiaH):
        optimizer.estimate_hessian(model(**part).loss)
    if isinstance(optimizer, optim.SophiaG):
        logits = model(input_ids=part["input_ids"]).logits.float()
        labels = torch.distributions.Categorical(logits=logits).sample()
        with optimizer.estimating_hessian():
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()


def compared(args: argparse.Namespace, data: Data, begin: dict[str, Tensor]) -> list[str]:
    model = make_model(args)
    model.load_state_dict(begin)
    before = score(model.eval(), args, data)
    rows: list[list[Any]] = [["before", "", f"{before.loss:.4f}", "", f"{before.right:.1%}", "", "", ""]]
    base = 0.0
    for name, method in methods().items():
        if args.methods and name not in args.methods:
            continue
        tried = {
            lr: tune(args, data, begin, method, lr, args.seeds[0])
            for lr in method.rates[: args.rates or len(method.rates)]
        }
        lr = min(tried, key=lambda rate: tried[rate].score.loss)
        found = [tried[lr], *(tune(args, data, begin, method, lr, seed) for seed in args.seeds[1:])]
        losses, right = [one.score.loss for one in found], [one.score.right for one in found]
        seconds = statistics.median(one.seconds for one in found)
        base = base or seconds
        rows.append([
            name, f"{lr:g}", f"{statistics.mean(losses):.4f}", f"{max(losses) - min(losses):.4f}",
            f"{statistics.mean(right):.1%}", f"{max(right) - min(right):.1%}", f"{found[0].bytes_per_param:.2f}",
            f"{seconds / base:.2f}",
        ])  # fmt: skip
        print("|", " | ".join(map(str, rows[-1])), "|", flush=True)
    names = ["method", "lr", "held-out loss", "spread", "right answers", "spread", "bytes/param", "step, of AdamW's"]
    return table(names, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[], help="which are tried (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the order of the data")
    parser.add_argument("--rates", type=int, default=0, help="how many learning rates are tried (default: all)")
    parser.add_argument("--pretrain", type=int, default=1500, help="steps before (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps of tuning (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=192, help="bytes of a sequence (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=150, help="of the scores (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="its layers (default: %(default)s)")
    add_out(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = read_data(args.length)
    numel = sum(param.numel() for param in make_model(args).parameters())
    what = (
        f"{numel:,} params, {len(data.train):,} functions to tune on, {len(data.held_out):,} held out, of which "
        f"{args.questions} are asked; {args.steps} steps of {args.batch}; seeds {args.seeds}; spread: largest less "
        "least."
    )
    begin = pretrained(args, data)
    publish([*head("Tuning with every optimizer", [what], 1), *compared(args, data, begin)], args.out)


if __name__ == "__main__":
    main()

"""The same 3B training by Gemini, DeepSpeed ZeRO-3 offload and FSDP2 CPUOffloadPolicy on the GPU, interleaved.

    python benchmarks/gpu/peers.py --deepspeed FOLDER --out FOLDER
    python benchmarks/gpu/peers.py --peers gemini,fsdp2 --tokens 4096,16384 --out FOLDER
    python benchmarks/gpu/peers.py --device standin --tiny             # to try the script

Each peer is a process of its own that sleeps while another one trains; every second round goes in the opposite order
and a ratio is taken inside a round. Who does not fit in host memory together is compared with Gemini in turn: a pair
for each peer. ``--deepspeed`` names the folder that ``pack_deepspeed.py`` has made. Losses have to agree.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import psutil  # noqa: E402

from benchmarks._processes import Group, RanksFailed, end_on_signals  # noqa: E402
from benchmarks._report import table  # noqa: E402
from benchmarks._rounds import Spread, ratios  # noqa: E402
from benchmarks.gpu import _llama, _part  # noqa: E402
from benchmarks.gpu._card import Card, host_budget  # noqa: E402
from gemini.errors import human_bytes, parse_bytes  # noqa: E402

BYTES = {"gemini": 14.5, "deepspeed": 20.0, "fsdp2": 18.0}
"""Of host memory per param, at most: states and gradients; pinned pieces and casts on their way."""
AIMS = {("deepspeed", 4096): 2.33}
"""Speed over a peer at a number of tokens; at all others 1: never slower."""
FIRST_RTOL = 2e-3
"""Of the first loss, where all have the same weights: bf16 rounds to 2^-9 of a value."""


def groups_of(peers: Sequence[str], params: int, host: int) -> list[list[str]]:
    """Who is alive at the same time: all, or a pair with Gemini for each."""
    if sum(BYTES[name] for name in peers) * params <= host:
        return [list(peers)]
    others = [name for name in peers if name != "gemini"]
    return [["gemini", name] for name in others] if "gemini" in peers else [[name] for name in others]


def has_deepspeed(folder: Path | None) -> bool:
    """Whether its process will find it, in the folder that was named or where Python looks anyway."""
    return find_spec("deepspeed") is not None or (folder is not None and (folder / "deepspeed").is_dir())


def settings_of(args: argparse.Namespace, name: str, share: float) -> dict[str, Any]:
    tiny = args.tiny
    return {
        "peer": name, "shape": "tiny-tied" if tiny else args.shape, "tokens": [64] if tiny else args.tokens,
        "seq_len": 32 if tiny else args.seq_len, "clip": args.clip, "device": args.device, "threads": args.threads,
        "gpu": 2**31 if tiny else args.gpu, "host": int(host_budget(args.host) * share),
    }  # fmt: skip


def start(args: argparse.Namespace, name: str, extensions: str, share: float) -> Group:
    root = str(HERE.parents[1])
    path = [str(args.deepspeed)] if name == "deepspeed" and args.deepspeed else []
    path += [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "TRANSFORMERS_VERBOSITY": "error",
                   "TORCH_EXTENSIONS_DIR": extensions}  # fmt: skip
    if args.device == "standin":
        environment["DS_ACCELERATOR"] = "cpu"
    return Group(
        str(HERE.parent / "peers" / f"with_{name}.py"), settings_of(args, name, share), ranked=name != "gemini",
        environment=lambda rank: environment, threads=args.threads, timeout=args.timeout,
    )  # fmt: skip


def take_turns(args: argparse.Namespace, names: list[str], results: _part.Results, extensions: str) -> list[str]:
    """Rounds of one group; what could not be measured, in words."""
    wrong: list[str] = []
    with ExitStack() as stack:
        alive: dict[str, Group] = {}
        share = BYTES["gemini"] / sum(BYTES[name] for name in names)
        for name in names:
            print(f"starting {name}", file=sys.stderr, flush=True)
            try:
                alive[name] = stack.enter_context(start(args, name, extensions, share if len(names) > 1 else 1.0))
            except RanksFailed as e:
                wrong.append(f"{name} could not be started: {str(e).strip()[-700:]}")
        for tokens in [64] if args.tiny else args.tokens:
            rounds: list[dict[str, Any]] = []
            seen = {"group": names, "tokens": tokens, "rounds": rounds}
            results.append("compared", seen)
            for number in range(args.rounds + 1):  # the first is to warm up
                if number > 1 and results.left() < 1.5 * sum(one["seconds"] for one in rounds[-1].values()):
                    wrong.append(f"{names}, {tokens} tokens: {len(rounds)} rounds, then no time left")
                    break
                own: dict[str, Any] = {}
                for name in list(alive) if number % 2 else list(alive)[::-1]:
                    try:
                        (own[name],) = alive[name].order("block", steps=args.steps if number else 1, tokens=tokens)
                        alive[name].order("rest")
                    except RanksFailed as e:
                        wrong.append(f"{name} failed at {tokens} tokens: {str(e).strip()[-700:]}")
                        alive.pop(name).close()
                if number:
                    rounds.append(own)
                else:
                    seen["warm-up"] = own
                results.add("wrong", wrong)
        about = {name: group.order("about")[0] for name, group in alive.items()}
        results.append("about", about)
    return wrong


def told(args: argparse.Namespace, shape: _llama.Shape, results: _part.Results) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and the goals."""
    rows, lines = [], []
    for seen in results.raw["compared"]:
        rounds, tokens = seen["rounds"], seen["tokens"]
        for name in seen["group"]:
            blocks = [one[name] for one in rounds if name in one]
            if not blocks:
                continue
            step = Spread.of([block["seconds"] / args.steps for block in blocks])
            both = [one for one in rounds if name in one and "gemini" in one]
            faster = ratios(*([one[who]["seconds"] for one in both] for who in (name, "gemini")))
            over = Spread.of(faster).told(2) if faster else "-"
            flops = shape.flops(tokens, min(32 if args.tiny else args.seq_len, tokens)) / step.median / 1e12
            card = max((block["card"].get("reserved", 0) for block in blocks), default=0)
            rows.append([name, f"{tokens:,}", f"{step.median:.3f}", f"{step.least:.3f}-{step.most:.3f}",
                         f"{tokens / step.median:,.0f}", f"{flops:.1f}", over if name != "gemini" else "1",
                         human_bytes(card), human_bytes(max(block["VmRSS"] for block in blocks))])  # fmt: skip
            if faster and name != "gemini":
                aim = AIMS.get((name, tokens), 1.0)
                what = f"speed of gemini over {name} at {tokens:,} tokens"
                lines.append(_part.verdict(what, Spread.of(faster).median, aim))
        lines += losses_of(seen)
    return rows, lines


def losses_of(seen: dict[str, Any]) -> list[str]:
    """Everybody trains the same: the first losses, and how far the later ones went apart."""
    warm, lines = seen.get("warm-up", {}), []
    if "gemini" not in warm:
        return []
    wanted = warm["gemini"]["losses"] + [
        loss for one in seen["rounds"] for loss in one.get("gemini", warm["gemini"])["losses"]
    ]
    for name, own in warm.items():
        losses = own["losses"] + [loss for one in seen["rounds"] for loss in one.get(name, own)["losses"]]
        offs = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=False)]
        # Only at the first number of tokens have all the same weights: later ones go on from what each has made.
        agrees = "agree" if offs[0] <= FIRST_RTOL else "DIFFER"
        if name != "gemini":
            lines.append(
                f"- losses of {name} and gemini at {seen['tokens']:,} tokens {agrees}: first {losses[0]:.4f} and "
                f"{wanted[0]:.4f}, last {losses[-1]:.4f} and {wanted[-1]:.4f}, at most {max(offs):.1e} apart"
            )
    return lines


def measure(args: argparse.Namespace, card: Card, results: _part.Results) -> None:
    end_on_signals()
    args.steps, args.rounds = (1, 2) if args.tiny else (args.steps, args.rounds)
    shape = _llama.SHAPES["tiny-tied" if args.tiny else args.shape]
    host = psutil.virtual_memory().total * 0.9
    wrong: list[str] = []
    if "deepspeed" in args.peers and not has_deepspeed(args.deepspeed):
        args.peers = [name for name in args.peers if name != "deepspeed"]  # no round of Gemini's beside nobody
        where = "on PYTHONPATH" if args.deepspeed is None else f"in {args.deepspeed}"
        wrong.append(f"deepspeed is not {where}, so it was not compared: pack_deepspeed.py makes a folder of it")
    groups = groups_of(args.peers, shape.params, int(host))
    results.add("settings", {name: settings_of(args, name, 1.0) for name in args.peers} | {"groups": groups})
    with tempfile.TemporaryDirectory(prefix="extensions-") as extensions:
        for names in groups:
            wrong += take_turns(args, names, results, str(args.extensions or extensions))
            lines = said_of(args, shape, results, wrong)
            results.say_so_far(*lines)
    results.say(*lines)
    if wrong and not any(seen["rounds"] for seen in results.raw["compared"]):
        raise SystemExit(1)


def said_of(args: argparse.Namespace, shape: _llama.Shape, results: _part.Results, wrong: list[str]) -> list[str]:
    """The report of what was compared until now."""
    rows, lines = told(args, shape, results)
    names = ["peer", "tokens", "s per step", "range", "tokens/s", "TFLOP/s", "gemini is faster by", "card, reserved",
             "RSS"]  # fmt: skip
    clip = f"clipping to {args.clip}" if args.clip else "no clipping"
    return [
        f"Llama of {shape.params:,} params, bf16, AdamW, gradient checkpointing, {clip}; Gemini's GPU budget "
        f"{human_bytes(settings_of(args, 'gemini', 1)['gpu'])}; blocks of {args.steps} steps, work in flight included.",
        "",
        *table(names, rows),
        *lines,
        *(f"- {one}" for one in wrong),
        "",
    ]


def main(argv: Sequence[str] | None = None) -> _part.Results:
    parser = _part.make_parser(__doc__, seconds=480)
    add = parser.add_argument
    add("--peers", type=lambda text: text.split(","), default=["gemini", "deepspeed", "fsdp2"], metavar="NAME,...",
        help=f"of {', '.join(BYTES)} (default: all)")  # fmt: skip
    add("--shape", choices=_llama.SHAPES, default="3b", help="(default: %(default)s)")
    add("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[4096, 16384], metavar="N,...",
        help="per step (default: 4096,16384)")  # fmt: skip
    add("--seq-len", type=int, default=4096, help="(default: %(default)s)")
    add("--clip", type=float, default=1.0, help="0: no clipping (default: %(default)s)")
    add("--gpu", type=parse_bytes, default=24 * 2**30, help="Gemini's GPU budget (default: 24GiB)")
    add("--steps", type=int, default=2, help="of a block (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every peer (default: all cores)")
    add("--timeout", type=float, default=240.0, help="seconds for one order (default: %(default)s)")
    add("--deepspeed", type=Path, default=None, help="the folder made by pack_deepspeed.py")
    add("--extensions", type=Path, default=None, help="where DeepSpeed's ops are, or are built (default: for this run)")
    return _part.run("peers", parser, measure, argv)


if __name__ == "__main__":
    main()

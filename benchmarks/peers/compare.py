"""The same training by Gemini and by its peers, interleaved in one run: speed and memory of whole processes.

    python benchmarks/peers/compare.py --spill /scratch --tokens 128

Each peer is a process of its own, in the virtual environment that it needs (``README.md`` beside this file), alive
during the whole run. Round by round each trains a block of steps while all others sleep in a read from their pipe;
every second round goes in the opposite order. A ratio is taken inside a round, so that a busy machine hurts everybody
alike; what is printed is the median over rounds. All see the same tokens in the same order from the same weights, and
their losses must agree.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks import _report  # noqa: E402
from benchmarks._memory import available_bytes  # noqa: E402
from benchmarks._processes import Group, RanksFailed, end_on_signals  # noqa: E402
from benchmarks._rounds import in_turn  # noqa: E402
from benchmarks.peers import report  # noqa: E402
from benchmarks.peers.peer import PEERS, Seen  # noqa: E402

DEEPSPEED_PYTHON = HERE.parents[1] / "runs" / "peers" / "deepspeed" / "bin" / "python"
WARM_UP = 2


# ---- running ---------------------------------------------------------------------------------------------------------


def settings_of(args: argparse.Namespace, name: str, spill: str | None) -> dict[str, Any]:
    shape = {key: getattr(args, key) for key in ("hidden", "layers", "vocab", "tokens", "seq_len")}
    config = args.gemini if name.startswith("gemini") else args.deepspeed if name.startswith("deepspeed") else {}
    return {"peer": name, "shape": shape, "threads": args.threads, "clip": args.clip, "spill": spill, "config": config,
            "cpu": args.cpu, "cpu_beside_nvme": args.cpu_beside_nvme,
            "cpu_budget": args.cpu_budget}  # fmt: skip


def start(args: argparse.Namespace, name: str, spill: str | None) -> Group:
    deepspeed = name.startswith("deepspeed")
    python = args.deepspeed_python if deepspeed else Path(sys.executable)
    environment = {"PYTHONPATH": str(HERE.parents[1]), "TRANSFORMERS_VERBOSITY": "error"}
    if args.wait_policy is not None:
        environment["OMP_WAIT_POLICY"] = args.wait_policy
    if args.spins is not None:
        environment["GOMP_SPINCOUNT"] = str(args.spins)
    if deepspeed:  # its native ops are built there; ninja is found beside its Python
        environment |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "extensions"),
                        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])}  # fmt: skip
    return Group(
        str(HERE / PEERS[name].script), settings_of(args, name, spill), environment=lambda rank: environment,
        threads=args.threads, timeout=args.timeout, python=str(python),
    )  # fmt: skip


def cpu_seconds(group: Group) -> float:
    """Of all threads of a peer since it began, as the system counts them from outside."""
    with open(f"/proc/{group.ranks[0].process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def take_turns(args: argparse.Namespace, groups: Mapping[str, Group]) -> tuple[dict[str, Seen], int]:
    """A block of each peer per round. What was seen of each, and the fewest bytes of memory that were free."""
    seen = {name: Seen() for name in groups}
    free = available_bytes()
    for name, group in groups.items():
        own = seen[name]
        run_block(own, group, WARM_UP)
        if not group.order("forget_peak")[0]:
            raise SystemExit("/proc/self/clear_refs cannot be written: peaks of steps alone cannot be told")
        own.step_peak = 0
        free = min(free, available_bytes())
    asleep = {name: (time.monotonic(), cpu_seconds(group)) for name, group in groups.items()}
    for number, name in in_turn(groups, args.rounds, warm_up=0, order="reversed"):
        own, group = seen[name], groups[name]
        since, spent = asleep[name]
        slept = time.monotonic() - since
        if slept > 1.0:
            own.idle = max(own.idle, (cpu_seconds(group) - spent) / slept)
        done = run_block(own, group, args.steps)
        asleep[name] = (time.monotonic(), cpu_seconds(group))
        own.seconds.append(done["seconds"])
        own.cpu.append(done["cpu"])
        free = min(free, available_bytes())
        print(f"round {number + 1} of {args.rounds}: {name} {done['seconds']:.2f}", file=sys.stderr, flush=True)
    for name, group in groups.items():
        seen[name].about = group.order("about")[0]
        seen[name].empty = seen[name].about["empty_rss"]
    return seen, free


def run_block(own: Seen, group: Group, steps: int) -> dict[str, Any]:
    done: dict[str, Any] = group.order("block", steps=steps)[0]
    own.losses += done["losses"]
    own.life_peak = max(own.life_peak, done["peak_rss"], done["VmHWM"], done["ru_maxrss"])
    own.step_peak = max(own.step_peak, done["VmHWM"])
    return done


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peers", type=lambda text: text.split(","), default=None, metavar="NAME,...",
        help=f"of {', '.join(PEERS)} (default: all; with --clip without those that cannot clip)")  # fmt: skip
    add("--tokens", type=int, default=128, help="per step (default: %(default)s)")
    add("--seq-len", type=int, default=None, help="of a sequence (default: --tokens, at most 512)")
    add("--steps", type=int, default=5, help="of a block (default: %(default)s)")
    add("--rounds", type=int, default=7, help="(default: %(default)s)")
    add("--threads", type=int, default=2, help="of each peer (default: %(default)s)")
    add("--wait-policy", choices=("active", "passive"), default=None,
        help="OMP_WAIT_POLICY for all: threads that wait for each other spin or sleep (sleep on a busy machine) "
        "(default: not set)")  # fmt: skip
    add("--spins", type=int, default=None,
        help="GOMP_SPINCOUNT for all: how often a thread of torch's looks for the others before it sleeps "
        "(default: not set, which is 300000)")  # fmt: skip
    add("--clip", type=float, default=None, help="the norm to clip to, for all (default: no clipping)")
    add("--hidden", type=int, default=512, help="(default: %(default)s)")
    add("--layers", type=int, default=12, help="(default: %(default)s)")
    add("--vocab", type=int, default=32000, help="(default: %(default)s, Llama's)")
    add("--spill", type=Path, default=None, help="an existing folder on the drive, for all that use NVMe")
    add("--cpu", default="8GiB", help="cpu budget of Gemini in memory (default: %(default)s)")
    add("--cpu-beside-nvme", default="256MiB", help="cpu budget of Gemini on NVMe (default: %(default)s)")
    add("--cpu-budget", default="1GiB",
        help="of Gemini in a budget, and with weights in memory, states on NVMe (default: %(default)s)")  # fmt: skip
    add("--gemini", type=pair, action="append", default=[], metavar="FIELD=VALUE",
        help="of GeminiConfig, for every gemini peer; may be given several times")  # fmt: skip
    add("--deepspeed", type=json.loads, default={}, metavar="JSON", help="merged into DeepSpeed's configs")
    add("--deepspeed-python", type=Path, default=DEEPSPEED_PYTHON, help="(default: %(default)s)")
    add("--timeout", type=float, default=900.0, help="seconds for one order (default: %(default)s)")
    add("--report", type=Path, default=None, metavar="FILE", help="write the report here, as markdown")
    args = parser.parse_args()
    args.gemini = dict(args.gemini)
    args.seq_len = args.seq_len or min(args.tokens, 512)
    if args.peers is None:
        args.peers = [name for name, peer in PEERS.items() if peer.clips or args.clip is None]
    check(parser, args)
    end_on_signals()
    with ExitStack() as stack:
        spill = None
        if any(PEERS[name].nvme for name in args.peers):
            spill = stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-", dir=args.spill))
        groups: dict[str, Group] = {}
        for name in args.peers:
            print(f"starting {name}", file=sys.stderr, flush=True)
            try:
                groups[name] = stack.enter_context(start(args, name, spill))
            except RanksFailed as e:
                raise SystemExit(f"{name}: {e}") from e
        seen, free = take_turns(args, groups)
    lines, wrong = report.make(args, seen, free, WARM_UP)
    _report.publish(lines, args.report)
    return 1 if wrong else 0


def pair(text: str) -> tuple[str, Any]:
    """``overlap=false`` -> ("overlap", False): the value is JSON where it can be read so, else a string."""
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers: there is no {name!r}; there are {', '.join(PEERS)}")
        if args.clip is not None and not PEERS[name].clips:
            parser.error(f"{name} updates inside backward and cannot clip: leave out --clip or {name}")
    if args.tokens % args.seq_len:
        parser.error(f"--tokens {args.tokens} is not a multiple of --seq-len {args.seq_len}")
    if any(PEERS[name].nvme for name in args.peers) and (args.spill is None or not args.spill.is_dir()):
        parser.error("peers that use NVMe need --spill, an existing folder on the drive")
    if any(name.startswith("deepspeed") for name in args.peers) and not args.deepspeed_python.exists():
        parser.error(f"there is no {args.deepspeed_python}: make it as benchmarks/peers/README.md says, give "
                     "--deepspeed-python, or leave the deepspeed peers out of --peers")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""Draws the reports of tuning.py and optimizer_speed.py: loss against bytes per param, and tokens per second.

python benchmarks/optimizer_pictures.py --tuning benchmarks/reports/tuning_<...>.md --picture docs/images/tuned.png
python benchmarks/optimizer_pictures.py --speed benchmarks/reports/optimizer_speed_<...>.md --picture speed.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

LORA, COMPACT, EXACT = "tab:green", "tab:orange", "tab:blue"


def rows_of(report: Path) -> list[dict[str, str]]:
    """The first table of a report, by the names of its columns; of two alike the first counts.

    Raises:
        ValueError: for a report without a table.
    """
    lines = [line for line in report.read_text().splitlines() if line.startswith("|")]
    if len(lines) < 3:
        raise ValueError(f"{report} has no table")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names, found = cells[0], []
    for row in cells[2:]:
        if len(row) != len(names):
            break
        found.append(dict(reversed(list(zip(names, row, strict=True)))))
    return found


def colour_of(method: str) -> str:
    return LORA if "LoRA" in method else COMPACT if "compact" in method else EXACT


def draw_tuning(report: Path, picture: Path) -> None:
    """Held-out loss with its spread over seeds, against the bytes per param that last."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows_of(report) if row["bytes/param"]]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    lowest: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: float(row["held-out loss"])):
        size, loss = float(row["bytes/param"]), float(row["held-out loss"])
        axes.errorbar(size, loss, float(row["spread"]) / 2, fmt="o", color=colour_of(row["method"]), capsize=3)
        at = max(loss, lowest.get(round(size), 0.0) + 0.0017)  # names of the same column one above the other
        lowest[round(size)] = at
        axes.annotate(
            row["method"], (size, at), xytext=(7, -3), textcoords="offset points", fontsize=8,
            color=colour_of(row["method"]),
        )  # fmt: skip
    axes.set_xlabel("bytes per param that last (weights, masters, states)")
    axes.set_ylabel("held-out loss of answers")
    axes.set_xlim(0, max(float(row["bytes/param"]) for row in rows) * 1.15)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=150)


def draw_speed(report: Path, picture: Path) -> None:
    """Tokens per second of each method in each home."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(report)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    homes = list(dict.fromkeys(row["home"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(8, 0.42 * len(methods) + 1), layout="constrained")
    height = 0.8 / len(homes)
    for number, home in enumerate(homes):
        speeds = {row["method"]: float(row["tokens/s"].replace(",", "")) for row in rows if row["home"] == home}
        places = [at + (number - (len(homes) - 1) / 2) * height for at in range(len(methods))]
        bars = axes.barh(places, [speeds.get(method, 0) for method in methods], height, label=home)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel("tokens per second")
    axes.legend(title="states in", fontsize=8)
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tuning", type=Path, help="a report of tuning.py")
    which.add_argument("--speed", type=Path, help="a report of optimizer_speed.py")
    parser.add_argument("--picture", type=Path, required=True, help="the .png or .svg")
    args = parser.parse_args()
    if args.tuning:
        draw_tuning(args.tuning, args.picture)
    else:
        draw_speed(args.speed, args.picture)


if __name__ == "__main__":
    main()

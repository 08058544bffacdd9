"""Draws the README's curves: training, and success over turns.

    python tests/curves.py assets/results/demo-seed1?/r1-metrics.jsonl --out assets/training.svg
    python tests/curves.py assets/results/experiments/seed?/*-turns.json --out turns.svg

Training has four panels: held-out success over the steps (mean and range of runs with --held-out) and the
three of the paper's Fig. 3, one line a run. base-dev.json and bc-dev.json next to a run's metrics are the
summary.json files of the base and of the clone on the same held-out tasks; they become dashed lines.
"""
import argparse
import json
import math
import re
import statistics
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, GAP = 200, 130, 44, 56, 46  # of a panel, and around it; pixels
COLORS = ("#2a9d8f", "#264653", "#e76f51", "#8d2e3c", "#6a994e")
PANELS = (("success_rate", "success of sampled episodes"), ("response_tokens", "tokens of a response"),
          ("turns", "turns of an episode"))


def panel(left: float, title: str, curves: list[list[float]], last: str,
          at=lambda i, n: i / max(n - 1, 1), colors=COLORS, band=((), ()), levels=()) -> list[str]:
    """One chart from 0 to the next round number. last: label of its right end; at: where point i of n is.

    band: lowest and highest value at each point, shaded; levels: (name, value) of dashed lines.
    """
    highest = max(*map(max, curves), *band[1], *(value for _, value in levels), 1e-9)
    unit = 10 ** math.floor(math.log10(highest))
    tops = (unit * digits for digits in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10))
    top = next(value for value in tops if value >= highest)
    show = (lambda v: f"{v:.0%}") if top <= 1 else (lambda v: f"{v:g}")
    svg = [f'<text x="{left}" y="{TOP - 12}">{title}</text>',
           f'<path d="M{left} {TOP}V{TOP + HEIGHT}H{left + WIDTH}" fill="none" stroke="#999"/>']
    for share in (0.0, 0.5, 1.0):
        y = TOP + HEIGHT * (1 - share)
        svg.append(f'<text x="{left - 5}" y="{y + 4:.0f}" text-anchor="end" font-size="11">'
                   f'{show(share * top)}</text>')

    def points(curve):
        return [f"{left + WIDTH * at(i, len(curve)):.1f},{TOP + HEIGHT * (1 - v / top):.1f}"
                for i, v in enumerate(curve)]

    if band[0]:
        around = " ".join(points(band[0]) + points(band[1])[::-1])
        svg.append(f'<polygon points="{around}" fill="{colors[0]}" fill-opacity="0.2"/>')
    for name, value in levels:
        y = TOP + HEIGHT * (1 - value / top)
        svg += [f'<path d="M{left} {y:.1f}H{left + WIDTH}" stroke="#666" stroke-dasharray="4 3"/>',
                f'<text x="{left + WIDTH}" y="{y - 4:.1f}" text-anchor="end" font-size="11">'
                f'{name} {value:.0%}</text>']
    for color, curve in zip(colors, curves):
        line = " ".join(points(curve))
        svg.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
    return [*svg, f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end" font-size="11">'
            f'{last}</text>']


def picture(names, panels: list[list[str]], apart: int = 110) -> str:
    """Panels side by side under the names of their lines."""
    size = f'width="{LEFT + len(panels) * (WIDTH + GAP) - GAP + 20}" height="{TOP + HEIGHT + 26}"'
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
           f'<rect {size} fill="white"/>']
    for i, (name, color) in enumerate(zip(names, COLORS)):
        svg.append(f'<text x="{LEFT + apart * i}" y="20" fill="{color}" font-weight="bold">{name}</text>')
    return "\n".join([*svg, *sum(panels, []), "</svg>\n"])


def held_out(runs: dict[str, list[dict]], levels: dict[str, list[float]], last: int) -> list[list[str]]:
    """The panel of greedy success on held-out tasks, where all runs evaluated; it starts with the clones."""
    points = {0: levels.get("BC", [])}
    for line in (line for lines in runs.values() for line in lines if "held_out_success" in line):
        points.setdefault(line["step"] + 1, []).append(line["held_out_success"])
    points = {step: rates for step, rates in points.items() if len(rates) == len(runs)}
    if not points:
        return []
    steps, of_each = list(points), lambda function: [function(rates) for rates in points.values()]
    return [panel(LEFT, "success on held-out tasks, greedy", [of_each(statistics.mean)], f"step {last}",
                  lambda i, _: steps[i] / last, ["#111"], (of_each(min), of_each(max)),
                  [(name, statistics.mean(rates)) for name, rates in levels.items()])]


def training(runs: dict[str, list[dict]], levels: dict[str, list[float]]) -> str:
    """{name: lines of metrics.jsonl} and {"base": held-out success rates, "BC": one a run} as SVG."""
    last = max(map(len, runs.values()))
    panels = held_out(runs, levels, last)
    for key, title in PANELS:
        curves = [[line[key] for line in lines] for lines in runs.values()]
        panels.append(panel(LEFT + len(panels) * (WIDTH + GAP), title, curves, f"step {last}"))
    return picture(runs, panels)


def scaling(policies: dict[str, list[dict]]) -> str:
    """{policy: its summary.json files, one a seed} as SVG: mean success over the turns allowed."""
    names = list(next(iter(policies.values()))[0]["splits"])
    turns = [int(re.search(r"within (\d+) turns", name)[1]) for name in names]
    curves = [[statistics.mean(run["splits"][name]["success_rate"] for run in runs) for name in names]
              for runs in policies.values()]
    return picture(policies, [panel(LEFT, "success within that many turns", curves, f"{turns[-1]} turns",
                                    lambda i, _: turns[i] / turns[-1])], apart=60)


def draw(files: list[Path]) -> str:
    if files[0].suffix == ".jsonl":
        read = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
        levels = {}
        for name, file in (("base", "base-dev.json"), ("BC", "bc-dev.json")):
            for path in (path.with_name(file) for path in files if path.with_name(file).exists()):
                levels.setdefault(name, []).append(json.loads(path.read_text())["success_rate"])
        return training({path.parent.name: read(path) for path in files}, levels)
    policies = {}
    for path in files:
        policies.setdefault(path.name.removesuffix("-turns.json"), []).append(json.loads(path.read_text()))
    return scaling(policies)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("files", nargs="+", type=Path,
                        help="metrics.jsonl files, each named after its folder; or POLICY-turns.json, one per "
                             "policy and seed")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(draw(args.files))


if __name__ == "__main__":
    main()

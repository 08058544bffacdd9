"""Draws assets/training.svg: what changes over the steps of one or more training runs.

    python tests/tools/curves.py assets/results/demo-seed1?/r1-metrics.jsonl --out assets/training.svg

On the left, greedy success on held-out tasks (runs with --held-out): every run and their mean, at the steps
where all of them evaluated. It starts with the clones. On the right, the curves of the paper's Fig. 3, which
come from the episodes that a step samples. A run is named after the folder of its metrics.jsonl.
base-dev.json and bc-dev.json next to it are the summary.json files of the base and of the clone on the same
held-out tasks.
"""
import argparse
import json
import math
import statistics
from pathlib import Path

from svg import Panel, picture

WIDTH = 850
NAMES_ROOM = 96  # right of a panel, for the names of its lines
LINE_HEIGHT = 15
SAMPLED = (("success_rate", "success of sampled episodes", ".0%"), ("response_tokens", "tokens of a response", ".1f"),
           ("turns", "turns of an episode", ".1f"))
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24211d; }
.title { font-size: 14px; font-weight: 600; } .tick { font-size: 11px; fill: #6d675f; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .paper { fill: #fff; } .axis { stroke: #9a948a; } .grid { stroke: #ece8e0; }
path, polyline { fill: none; } polyline { stroke-width: 1.8; stroke-linejoin: round; }
.level { stroke: #8b847a; stroke-dasharray: 4 4; } text.level { stroke: none; fill: #6d675f; }
polyline.mean { stroke: #24211d; stroke-width: 3.2; } text.mean { font-weight: 700; }
polyline.run0 { stroke: #12877a; } text.run0 { fill: #12877a; } polyline.run1 { stroke: #3b6fc4; } text.run1 { fill: #3b6fc4; }
polyline.run2 { stroke: #cc5a1f; } text.run2 { fill: #cc5a1f; } polyline.run3 { stroke: #a0357a; } text.run3 { fill: #a0357a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e4dd; } .tick, text.level { fill: #a19a8f; } .paper { fill: #191817; }
  .axis { stroke: #7d776e; } .grid { stroke: #2d2a28; } .level { stroke: #8b847a; } polyline.mean { stroke: #f4f1ea; }
  polyline.run0 { stroke: #45c4b3; } text.run0 { fill: #45c4b3; } polyline.run1 { stroke: #86b0f5; } text.run1 { fill: #86b0f5; }
  polyline.run2 { stroke: #f0935a; } text.run2 { fill: #f0935a; } polyline.run3 { stroke: #e086c0; } text.run3 { fill: #e086c0; }
}
</style>"""


def round_up(value: float) -> float:
    """The next number that looks well on an axis."""
    unit = 10 ** math.floor(math.log10(value))
    for digits in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10):
        if unit * digits >= value:
            break
    return unit * digits


def axes(panel: Panel, title: str, form: str, parts: int, step_marks: list[int]) -> list[str]:
    """The title, the axes, a horizontal line at each of `parts` equal parts and the marks of steps."""
    bottom = panel.top + panel.height
    right = panel.left + panel.width
    svg = [f'<text class="title" x="{panel.left}" y="{panel.top - 12}">{title}</text>']
    for i in range(parts + 1):
        value = panel.y_high * i / parts
        y = panel.y(value)
        kind = "grid" if i else "axis"
        svg.append(f'<path class="{kind}" d="M{panel.left} {y:.1f}H{right}"/>')
        svg.append(f'<text class="tick end" x="{panel.left - 7}" y="{y + 4:.1f}">{value:{form}}</text>')
    for step in step_marks:
        name = f"step {step}" if step == step_marks[-1] else step
        svg.append(f'<text class="tick middle" x="{panel.x(step):.1f}" y="{bottom + 17}">{name}</text>')
    return svg


def names(panel: Panel, lines: list[tuple]) -> list[str]:
    """The names of lines, right of their last points, moved apart where they would overlap.

    lines: (value of the last point, name, kind).
    """
    lines = sorted(lines, reverse=True)
    heights = [panel.y(value) + 4 for value, _, _ in lines]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + LINE_HEIGHT)
    # What was pushed below the panel moves up again, and the names above it with it.
    lowest = panel.top + panel.height + 4
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], lowest)
        lowest = heights[i] - LINE_HEIGHT
    svg = []
    for y, (_, name, kind) in zip(heights, lines):
        svg.append(f'<text class="{kind}" x="{panel.left + panel.width + 8}" y="{y:.1f}">{name}</text>')
    return svg


def held_out_rates(runs: dict[str, list[dict]], clones: list[float]) -> dict[int, list[float]]:
    """{step: the runs' success rates} where all runs evaluated; at 0 those of their clones."""
    rates = {0: clones}
    for rows in runs.values():
        for row in rows:
            if "held_out_success" in row:
                rates.setdefault(row["step"] + 1, []).append(row["held_out_success"])
    return {step: values for step, values in rates.items() if len(values) == len(runs)}


def held_out(panel: Panel, titles: list[str], rates: dict[int, list[float]], levels: dict[str, float]) -> list[str]:
    """Every run, their mean, and a dashed line for each level {name: success rate}."""
    marks = [step for step in rates if step % 6 == 0 or step == panel.x_high]
    svg = axes(panel, "success on held-out tasks, greedy", ".0%", 4, marks)
    for name, value in levels.items():
        y = panel.y(value)
        svg.append(f'<path class="level" d="M{panel.left} {y:.1f}H{panel.left + panel.width}"/>')
        svg.append(f'<text class="level end" x="{panel.left + panel.width - 4}" y="{y + 15:.1f}">{name}: {value:.0%}</text>')
    mean = [(step, statistics.mean(values)) for step, values in rates.items()]
    svg.append(panel.line(mean, "mean"))
    ends = [(mean[-1][1], f"mean: {mean[-1][1]:.0%}", "mean")]
    for i, title in enumerate(titles):
        points = [(step, values[i]) for step, values in rates.items()]
        svg.append(panel.line(points, f"run{i}"))
        ends.append((points[-1][1], f"{title}: {points[-1][1]:.0%}", f"run{i}"))
    return svg + names(panel, ends)


def sampled(panel: Panel, title: str, form: str, curves: dict[str, list[float]], *, step_marks) -> list[str]:
    """One value a step and run, from the episodes that the step sampled."""
    tick_form = ".0%" if form == ".0%" else "g"
    svg = axes(panel, title, tick_form, 2, step_marks)
    ends = []
    for i, (name, values) in enumerate(curves.items()):
        points = [(step + 1, value) for step, value in enumerate(values)]
        svg.append(panel.line(points, f"run{i}"))
        ends.append((values[-1], f"{name}: {values[-1]:{form}}", f"run{i}"))
    return svg + names(panel, ends)


def training(runs: dict[str, list[dict]], levels: dict[str, list[float]]) -> str:
    """{name: rows of metrics.jsonl} and {"base" or "after cloning": held-out success rates}, as SVG."""
    steps = max(len(rows) for rows in runs.values())
    titles = [name.replace("demo-", "").replace("seed", "seed ") for name in runs]
    rates = held_out_rates(runs, levels.get("after cloning", []))
    svg = []
    left = 60
    if len(rates) > 1:
        wide = Panel(left, 42, 320, 220, x_low=0, x_high=steps, y_low=0, y_high=1.0)
        means = {name: statistics.mean(values) for name, values in levels.items()}
        svg += held_out(wide, titles, rates, means)
        left += wide.width + NAMES_ROOM + 50
    top = 42
    for key, title, form in SAMPLED:
        curves = {name: [row[key] for row in rows] for name, rows in zip(titles, runs.values())}
        highest = round_up(max(max(values) for values in curves.values()))
        if form == ".0%":
            highest = 1.0
        panel = Panel(left, top, WIDTH - left - NAMES_ROOM, 48, x_low=0, x_high=steps, y_low=0, y_high=highest)
        marks = [1, steps] if key == SAMPLED[-1][0] else []
        svg += sampled(panel, title, form, curves, step_marks=marks)
        top += 86
    return picture(WIDTH, 300, STYLE, svg)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(files: list[Path]) -> str:
    levels = {}
    for name, file in (("base", "base-dev.json"), ("after cloning", "bc-dev.json")):
        for path in files:
            summary = path.with_name(file)
            if summary.exists():
                levels.setdefault(name, []).append(json.loads(summary.read_text())["success_rate"])
    runs = {path.parent.name: read_rows(path) for path in files}
    return training(runs, levels)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("files", nargs="+", type=Path, help="metrics.jsonl files, at most four")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(draw(args.files), encoding="utf-8")


if __name__ == "__main__":
    main()

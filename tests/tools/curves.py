"""Draws assets/training.svg: what changes over the steps of one or more training runs.

    python tests/tools/curves.py assets/results/experiments/seed3?/r1-metrics.jsonl --out assets/training.svg

On the left, greedy success on held-out tasks (runs with --held-out): every run, their mean, and a band from
the lowest to the highest, at the steps where all of them evaluated. It starts with the clones. On the right, the curves
of the paper's Fig. 3, which come from the episodes that a step samples.

base.json, bc.json and filtered.json next to a metrics.jsonl are what evaluate.py wrote about the base, the clone, and
filtered cloning from as many episodes. Their success on the runs' held-out tasks is drawn where a file is there.
"""
import argparse
import json
import math
import statistics
from pathlib import Path

from svg import Panel, picture

WIDTH = 850
HEIGHT = 316
NAMES_ROOM = 150  # right of the panel of held-out success, for the names of its lines
LINE_HEIGHT = 15
SAMPLED = (("success_rate", "success of sampled episodes", ".0%"), ("response_tokens", "tokens of a response", ".1f"),
           ("turns", "turns of an episode", ".1f"))
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24211d; }
.title { font-size: 14px; font-weight: 600; } .tick { font-size: 11px; fill: #6d675f; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .paper { fill: #fff; } .axis { stroke: #9a948a; } .grid { stroke: #ece8e0; }
path, polyline { fill: none; } polyline { stroke-width: 1; stroke-linejoin: round; }
.level { stroke: #8b847a; stroke-dasharray: 4 4; } text.level { stroke: none; fill: #6d675f; }
polyline.run { stroke: #12877a; stroke-opacity: 0.45; } polygon.band { fill: #12877a; fill-opacity: 0.14; }
polyline.mean { stroke: #12877a; stroke-width: 3; } text.mean { fill: #12877a; font-weight: 700; }
path.other { stroke: #cc5a1f; stroke-width: 2; } circle.other { fill: #cc5a1f; } text.other { fill: #cc5a1f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e4dd; } .tick, text.level { fill: #a19a8f; } .paper { fill: #191817; }
  .axis { stroke: #7d776e; } .grid { stroke: #2d2a28; } .level { stroke: #8b847a; }
  polyline.run, polyline.mean { stroke: #45c4b3; } polygon.band, text.mean { fill: #45c4b3; }
  path.other { stroke: #f0935a; } circle.other, text.other { fill: #f0935a; }
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


def mean_and_band(panel: Panel, rates: dict[float, list[float]]) -> list[str]:
    """{step: the runs' values} as a band from the lowest to the highest run, and a line for their mean."""
    low = [(step, min(values)) for step, values in rates.items()]
    high = [(step, max(values)) for step, values in rates.items()]
    corners = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in low + high[::-1])
    mean = [(step, statistics.mean(values)) for step, values in rates.items()]
    return [f'<polygon class="band" points="{corners}"/>', panel.line(mean, "mean")]


def held_out_rates(runs: list[list[dict]], clones: list[float]) -> dict[int, list[float]]:
    """{step: the runs' success rates} where all runs evaluated; at 0 those of their clones."""
    rates = {0: clones}
    for rows in runs:
        for row in rows:
            if "held_out_success" in row:
                rates.setdefault(row["step"] + 1, []).append(row["held_out_success"])
    return {step: values for step, values in rates.items() if len(values) == len(runs)}


def held_out(panel: Panel, rates: dict[int, list[float]], levels: dict[str, list[float]], last: int) -> list[str]:
    """Every run, their mean and band; a dashed line for base and clone; filtered cloning behind the last step."""
    svg = axes(panel, "success on held-out tasks, greedy", ".0%", 4, list(rates))
    for name in ("base", "after cloning"):
        if values := levels.get(name):
            y = panel.y(statistics.mean(values))
            label = f"{name}: {statistics.mean(values):.0%}"
            svg.append(f'<path class="level" d="M{panel.left} {y:.1f}H{panel.left + panel.width}"/>')
            svg.append(f'<text class="level end" x="{panel.x(last) - 4:.1f}" y="{y + 15:.1f}">{label}</text>')
    svg += mean_and_band(panel, rates)
    for i in range(len(rates[last])):
        svg.append(panel.line([(step, values[i]) for step, values in rates.items()], "run"))
    end = statistics.mean(rates[last])
    ends = [(end, f"M-GRPO: {end:.0%}", "mean")]
    note = "one run"
    if len(rates[last]) > 1:
        note = f"bold: mean of {len(rates[last])} runs, band: lowest to highest"
    if values := levels.get("filtered cloning"):
        mean = statistics.mean(values)
        x = panel.left + panel.width - 4
        svg.append(f'<path class="other" d="M{x} {panel.y(min(values)):.1f}V{panel.y(max(values)):.1f}"/>')
        svg.append(f'<circle class="other" cx="{x}" cy="{panel.y(mean):.1f}" r="4"/>')
        ends.append((mean, f"filtered cloning: {mean:.0%}", "other"))
        if len(values) < len(rates[last]):
            note += f"; filtered cloning: {len(values)} of them"
    svg.append(f'<text class="tick" x="{panel.left}" y="{panel.top + panel.height + 38}">{note}</text>')
    return svg + names(panel, ends)


def sampled(panel: Panel, title: str, form: str, runs: list[list[float]], step_marks: list[int]) -> list[str]:
    """One value a step, from the episodes that the step sampled: the runs' mean and band."""
    tick_form = ".0%" if form == ".0%" else "g"
    svg = axes(panel, title, tick_form, 2, step_marks)
    svg += mean_and_band(panel, {step + 1: list(values) for step, values in enumerate(zip(*runs))})
    last = statistics.mean(values[-1] for values in runs)
    return svg + names(panel, [(last, f"{last:{form}}", "mean")])


def training(runs: list[list[dict]], levels: dict[str, list[float]]) -> str:
    """The rows of each run's metrics.jsonl and {"base", "after cloning", "filtered cloning": rates}, as SVG."""
    steps = min(len(rows) for rows in runs)
    rates = held_out_rates(runs, levels.get("after cloning", []))
    svg = []
    left = 60
    if len(rates) > 1:
        wide = Panel(left, 42, 320, 220, x_low=0, x_high=steps + 0.4, y_low=0, y_high=1.0)
        svg += held_out(wide, rates, levels, last=max(rates))
        left += wide.width + NAMES_ROOM + 40
    top = 42
    for key, title, form in SAMPLED:
        values = [[row[key] for row in rows[:steps]] for rows in runs]
        highest = 1.0 if form == ".0%" else round_up(max(map(max, values)))
        panel = Panel(left, top, WIDTH - left - 50, 48, x_low=1, x_high=steps, y_low=0, y_high=highest)
        marks = [1, steps] if key == SAMPLED[-1][0] else []
        svg += sampled(panel, title, form, values, marks)
        top += 86
    return picture(WIDTH, HEIGHT, STYLE, svg)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(files: list[Path]) -> str:
    runs = [read_rows(path) for path in files]
    split = "sandbox:dev"
    for row in runs[0]:
        split = row.get("held_out", split)
    levels = {}
    for name, file in (("base", "base.json"), ("after cloning", "bc.json"), ("filtered cloning", "filtered.json")):
        for path in files:
            summary = path.with_name(file)
            if summary.exists():
                splits = json.loads(summary.read_text())["splits"]
                levels.setdefault(name, []).append(splits[split]["success_rate"])
    return training(runs, levels)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("files", nargs="+", type=Path, help="metrics.jsonl files")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(draw(args.files), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Draws assets/training.svg: what changes over the steps of one or more training runs.

    python tests/tools/curves.py assets/results/experiments/seed3?/r1-metrics.jsonl --out assets/training.svg

On the left, greedy success on held-out tasks (runs with --held-out): every run, their mean, and a band from
the lowest to the highest, at the steps where all of them evaluated. It starts with the clones, if each run has
a bc.json. On the right, the curves of the paper's Fig. 3, which come from the episodes that a step samples.

base.json, bc.json and filtered.json next to a metrics.jsonl are what evaluate.py wrote about the base, the clone, and
filtered cloning from as many episodes. Their success on the runs' held-out tasks is drawn where a file is there.
"""
import argparse
import json
import math
import statistics
from pathlib import Path

from svg import Panel, picture, text

WIDTH = 850
HEIGHT = 316
NAMES_ROOM = 150  # right of the panel of held-out success, for the names of its lines
LINE_HEIGHT = 15
# {key of a line of metrics.jsonl: (title, format)}
SAMPLED = {
    "success_rate": ("success of sampled episodes", ".0%"),
    "response_tokens": ("tokens of a response", ".1f"),
    "turns": ("turns of an episode", ".1f"),
}
# {what else is drawn: its file next to a metrics.jsonl}
LEVELS = {"base": "base.json", "after cloning": "bc.json", "filtered cloning": "filtered.json"}
Rates = dict[int, list[float]]   # {step: one value a run}
Levels = dict[str, list[float]]  # {a key of LEVELS: one success rate for each run that has the file}
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
    exponent = math.floor(math.log10(value))
    unit = 10 ** exponent
    for digits in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10):
        if unit * digits >= value:
            break
    return unit * digits


def axes(panel: Panel, title: str, form: str, parts: int, step_marks: list) -> list[str]:
    """The title, the axes, a horizontal line at each of `parts` equal parts and the marks of steps."""
    svg = [text(panel.left, panel.top - 12, title, "title")]
    for i in range(parts + 1):
        value = panel.y_high * i / parts
        kind = "grid"
        if i == 0:
            kind = "axis"
        svg.append(panel.level(value, kind))
        middle = panel.y(value) + 4
        written = f"{value:{form}}"
        svg.append(text(panel.left - 7, middle, written, "tick end"))
    below = panel.bottom + 17
    for step in step_marks:
        name = str(step)
        if step == step_marks[-1]:
            name = f"step {step}"
        svg.append(text(panel.x(step), below, name, "tick middle"))
    return svg


def names(panel: Panel, lines: list[tuple]) -> list[str]:
    """The names of lines, right of their last points, moved apart where they would overlap.

    lines: (value of the last point, name, kind).
    """
    lines = sorted(lines, reverse=True)
    heights = []
    for value, _, _ in lines:
        heights.append(panel.y(value) + 4)
    for i in range(1, len(heights)):
        free = heights[i - 1] + LINE_HEIGHT
        heights[i] = max(heights[i], free)
    # What was pushed below the panel moves up again, and the names above it with it.
    lowest = panel.y(panel.y_low) + 4
    for i in range(len(heights) - 1, -1, -1):
        heights[i] = min(heights[i], lowest)
        lowest = heights[i] - LINE_HEIGHT

    x = panel.right + 8
    svg = []
    for y, (_, name, kind) in zip(heights, lines):
        svg.append(text(x, y, name, kind))
    return svg


def mean_and_band(panel: Panel, rates: Rates) -> list[str]:
    """A band from the lowest to the highest run, and a line for the runs' mean."""
    low = []
    high = []
    mean = []
    for step, values in rates.items():
        low.append((step, min(values)))
        high.append((step, max(values)))
        mean.append((step, statistics.mean(values)))
    around = low + high[::-1]
    return [panel.area(around, "band"), panel.line(mean, "mean")]


def held_out_rates(runs: list[list[dict]], clones: list[float]) -> Rates:
    """The success rates where all runs evaluated; at 0 those of their clones."""
    rates = {0: clones}
    for rows in runs:
        for row in rows:
            if "held_out_success" in row:
                steps_done = row["step"] + 1
                rates.setdefault(steps_done, [])
                rates[steps_done].append(row["held_out_success"])
    complete = {}
    for step, values in rates.items():
        if len(values) == len(runs):
            complete[step] = values
    return complete


def dashed_level(panel: Panel, name: str, values: list[float], last: int) -> list[str]:
    """The mean of values as a line through the panel, with its name below."""
    mean = statistics.mean(values)
    end = panel.x(last) - 4
    below = panel.y(mean) + 15
    line = panel.level(mean, "level")
    label = text(end, below, f"{name}: {mean:.1%}", "level end")
    return [line, label]


def mean_and_range(panel: Panel, values: list[float]) -> list[str]:
    """Behind the last step: a dot for the mean, a stroke from the lowest to the highest value."""
    x = panel.right - 4
    mean = statistics.mean(values)
    middle = panel.y(mean)
    low = panel.y(min(values))
    high = panel.y(max(values))
    stroke = f'<path class="other" d="M{x} {low:.1f}V{high:.1f}"/>'
    dot = f'<circle class="other" cx="{x}" cy="{middle:.1f}" r="4"/>'
    return [stroke, dot]


def held_out(panel: Panel, rates: Rates, levels: Levels) -> list[str]:
    """Every run, their mean and band; a dashed line for base and clone; filtered cloning behind the last step."""
    steps = list(rates)
    last = max(steps)
    svg = axes(panel, "success on held-out tasks, greedy", ".0%", 4, steps)
    for name in ("base", "after cloning"):
        if name in levels:
            svg += dashed_level(panel, name, levels[name], last)

    svg += mean_and_band(panel, rates)
    count = len(rates[last])
    for i in range(count):
        points = [(step, rates[step][i]) for step in steps]
        svg.append(panel.line(points, "run"))
    mean = statistics.mean(rates[last])
    ends = [(mean, f"M-GRPO: {mean:.1%}", "mean")]
    note = "one run"
    if count > 1:
        note = f"bold: mean of {count} runs, band: lowest to highest"

    if "filtered cloning" in levels:
        values = levels["filtered cloning"]
        svg += mean_and_range(panel, values)
        mean = statistics.mean(values)
        ends.append((mean, f"filtered cloning: {mean:.1%}", "other"))
        note += "; orange: "
        if len(values) > 1:
            note += "mean and range of "
        note += "filtered cloning"
        if len(values) < count:
            note += f" ({len(values)} of them)"
    svg.append(text(panel.left, panel.bottom + 38, note, "tick"))
    svg += names(panel, ends)
    return svg


def sampled(panel: Panel, key: str, runs: list[list[float]]) -> list[str]:
    """The runs' mean and band of one key of SAMPLED: a value a step, from the episodes that the step sampled."""
    title, form = SAMPLED[key]
    tick_form = "g"
    if form == ".0%":
        tick_form = form
    marks = []
    if key == "turns":  # the lowest panel
        marks = [1, len(runs[0])]
    svg = axes(panel, title, tick_form, 2, marks)

    rates = {}
    for step, values in enumerate(zip(*runs), start=1):
        rates[step] = list(values)
    svg += mean_and_band(panel, rates)
    last = statistics.mean(values[-1] for values in runs)
    end = (last, f"{last:{form}}", "mean")
    svg += names(panel, [end])
    return svg


def training(runs: list[list[dict]], levels: Levels) -> str:
    """SVG of the rows of each run's metrics.jsonl. Longer runs are cut to the length of the shortest."""
    steps = min(len(rows) for rows in runs)
    clones = levels.get("after cloning", [])
    rates = held_out_rates(runs, clones)
    svg = []
    left = 60
    top = 42
    if len(rates) > 1:
        wide = Panel(
            left=left,
            top=top,
            width=320,
            height=220,
            x_low=0,
            x_high=steps + 0.4,
            y_low=0,
            y_high=1.0,
        )
        svg += held_out(wide, rates, levels)
        left = wide.right + NAMES_ROOM + 40

    width = WIDTH - left - 50
    for key in SAMPLED:
        values = []
        for rows in runs:
            values.append([row[key] for row in rows[:steps]])
        highest = 1.0
        if key != "success_rate":
            largest = max(max(run) for run in values)
            highest = round_up(largest)
        panel = Panel(
            left=left,
            top=top,
            width=width,
            height=48,
            x_low=1,
            x_high=steps,
            y_low=0,
            y_high=highest,
        )
        svg += sampled(panel, key, values)
        top += 86
    return picture(WIDTH, HEIGHT, STYLE, svg)


def read_rows(path: Path) -> list[dict]:
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_levels(files: list[Path], split: str) -> Levels:
    """Success on the split. A level of which no run has the file is left out."""
    levels = {}
    for name, file in LEVELS.items():
        found = []
        for path in files:
            summary = path.with_name(file)
            if summary.exists():
                figures = json.loads(summary.read_text())
                of_split = figures["splits"][split]
                found.append(of_split["success_rate"])
        if found:
            levels[name] = found
    return levels


def draw(files: list[Path]) -> str:
    runs = [read_rows(path) for path in files]
    split = "sandbox:dev"
    for row in runs[0]:
        split = row.get("held_out", split)
    levels = read_levels(files, split)
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

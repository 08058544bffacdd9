"""Draws assets/differences.svg: M-GRPO minus filtered cloning, in every setting that we ran.

    python tests/tools/differences.py

A dot is a mean difference, the line through it its 95% interval. The figures are those of the table "In all
settings" of assets/results.md, which says what each interval is over.
"""
import argparse
import re
from pathlib import Path
from typing import NamedTuple

from svg import Panel, picture, text

ROOT = Path(__file__).parents[2]
WIDTH = 850
ROW_HEIGHT = 25
TOP = 84
NAMES_ROOM = 306  # left of the first panel
POINT = 3  # pixels for a point of success
# {column of the table: (left edge of its panel, smallest difference, largest)}
PANELS = {
    "unseen instances": (NAMES_ROOM, -60, 40),
    "unseen templates": (NAMES_ROOM + 336, -20, 40),
}
# How the picture names the settings, in the order of the table.
NAMES = (
    "demo, 1,728 episodes",
    "demo, 3,456 episodes",
    "demo, from weak clones",
    "long tasks, clone of 8 epochs",
    "long tasks, clone of 22 epochs",
    "long tasks, the same, 4,608 episodes",
    "SmolLM2, four kinds of MiniWoB++",
    "SmolLM2, six kinds of the sandbox",
    "SmolLM2, six kinds, lr 2e-4",
    "SmolLM2, six kinds, lr 5e-5",
    "SmolLM2, all kinds of the sandbox",
)
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24211d; } .title { font-size: 14px; font-weight: 600; }
.soft, .tick { fill: #6d675f; } .tick { font-size: 11px; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.paper { fill: #fff; } path { fill: none; } .axis { stroke: #9a948a; } .grid { stroke: #ece8e0; }
.interval { stroke: #8b847a; stroke-width: 2; } .beyond { stroke: #12877a; stroke-width: 2; }
circle.interval { fill: #8b847a; } circle.beyond { fill: #12877a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e4dd; } .soft, .tick { fill: #a19a8f; } .paper { fill: #191817; }
  .axis { stroke: #7d776e; } .grid { stroke: #2d2a28; }
  .interval { stroke: #a19a8f; } .beyond { stroke: #45c4b3; }
  circle.interval { fill: #a19a8f; } circle.beyond { fill: #45c4b3; }
}
</style>"""


class Difference(NamedTuple):
    """In points of success, with its 95% interval."""
    mean: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval leaves out 0. Of many intervals, one may do so by chance."""
        return self.low > 0 or self.high < 0


def table_below(page: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table after a text: {column: cell}."""
    _, below = page.split(heading)
    lines = below[below.index("\n|"):].strip().split("\n")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = line.strip("|").split("|")
        rows.append([cell.strip() for cell in cells])
    head, _, *body = rows
    return [dict(zip(head, cells, strict=True)) for cells in body]


def read_difference(cell: str) -> Difference | None:
    """Of a cell such as -1.0 [-4.4, 2.4]; None if the setting has no such tasks."""
    if not cell:
        return None
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d", cell)]
    return Difference(*numbers)


def axis(panel: Panel, name: str) -> list[str]:
    svg = [text(panel.left, panel.top - 34, name, "title")]
    for value in range(int(panel.x_low), int(panel.x_high) + 1, 10):
        kind = "grid"
        if value == 0:
            kind = "axis"
        svg.append(panel.plumb(value, kind))
        if value % 20 == 0:
            mark = f"{value:+d}" if value else "0"
            svg.append(text(panel.x(value), panel.bottom + 17, mark, "tick middle"))
    zero = panel.x(0)
    svg.append(text(zero - 8, panel.top - 12, "← filtered", "tick end"))
    svg.append(text(zero + 8, panel.top - 12, "M-GRPO →", "tick"))
    return svg


def drawn(panel: Panel, row: float, difference: Difference) -> list[str]:
    """A dot and its interval. One that goes on beyond the panel's left edge ends there, with an arrow."""
    kind = "interval"
    if difference.beyond_chance:
        kind = "beyond"
    y = panel.y(row)
    x = panel.x(difference.mean)
    left = max(panel.x(difference.low), panel.left)
    right = panel.x(difference.high)
    svg = [
        f'<path class="{kind}" d="M{left:.1f} {y:.1f}H{right:.1f}"/>',
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
    ]
    if difference.low < panel.x_low:
        svg.append(f'<path class="{kind}" d="M{left + 6:.1f} {y - 5:.1f}l-6 5l6 5"/>')
    return svg


def count_of_seeds(cell: str) -> str:
    """31 -> 1 seed; 31, 32 -> 2 seeds; 31 to 36 -> 6 seeds."""
    first, *others = [int(seed) for seed in re.findall(r"\d+", cell)]
    count = 1 + len(others)
    if "to" in cell:
        count = others[0] - first + 1
    if count == 1:
        return "1 seed"
    return f"{count} seeds"


def differences_figure(rows: list[dict[str, str]]) -> str:
    height = ROW_HEIGHT * len(rows)
    panels = {}
    svg = []
    for column, (left, low, high) in PANELS.items():
        panel = Panel(
            left=left,
            top=TOP,
            width=POINT * (high - low),
            height=height,
            x_low=low,
            x_high=high,
            y_low=len(rows),
            y_high=0,
        )
        panels[column] = panel
        svg += axis(panel, column)

    svg.append(text(20, 28, "M-GRPO minus filtered cloning", "title"))
    svg.append(text(20, 46, "points of success, 95% intervals;", "soft"))
    svg.append(text(20, 63, "in color those that leave out 0", "soft"))
    for i, (name, row) in enumerate(zip(NAMES, rows, strict=True)):
        middle = i + 0.5
        for column, panel in panels.items():
            difference = read_difference(row[column])
            if difference is not None:
                svg += drawn(panel, middle, difference)
        y = panels["unseen instances"].y(middle) + 4
        svg.append(text(20, y, name))
        svg.append(text(NAMES_ROOM - 14, y, count_of_seeds(row["seeds"]), "tick end"))
    return picture(WIDTH, TOP + height + 34, STYLE, svg)


def all_settings() -> list[dict[str, str]]:
    page = (ROOT / "assets/results.md").read_text(encoding="utf-8")
    return table_below(page, "**In all settings**")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=ROOT / "assets/differences.svg")
    args = parser.parse_args()
    svg = differences_figure(all_settings())
    Path(args.out).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()

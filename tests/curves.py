"""Draws the training curves of the README: the paper's three panels (its Fig. 3), a line a run.

    python tests/curves.py assets/results/demo-seed?/r1-metrics.jsonl --out assets/training.svg
"""
import argparse
import json
import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, GAP = 200, 130, 44, 56, 46  # of a panel, and around it; pixels
COLORS = ("#2a9d8f", "#264653", "#e76f51", "#8d2e3c", "#6a994e")
PANELS = (("success_rate", "success of sampled episodes"), ("response_tokens", "tokens of a response"),
          ("turns", "turns of an episode"))


def panel(left: float, title: str, curves: list[list[float]]) -> list[str]:
    """One chart from 0 to the next round number."""
    highest = max(max(map(max, curves)), 1e-9)
    unit = 10 ** math.floor(math.log10(highest))
    top = next(unit * digits for digits in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if unit * digits >= highest)
    show = (lambda v: f"{v:.0%}") if top <= 1 else (lambda v: f"{v:g}")
    svg = [f'<text x="{left}" y="{TOP - 12}">{title}</text>',
           f'<path d="M{left} {TOP}V{TOP + HEIGHT}H{left + WIDTH}" fill="none" stroke="#999"/>']
    for share in (0.0, 0.5, 1.0):
        y = TOP + HEIGHT * (1 - share)
        svg.append(f'<text x="{left - 5}" y="{y + 4:.0f}" text-anchor="end" font-size="11">{show(share * top)}</text>')
    for color, curve in zip(COLORS, curves):
        points = [(left + WIDTH * i / max(len(curve) - 1, 1), TOP + HEIGHT * (1 - v / top)) for i, v in enumerate(curve)]
        svg.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="{color}" '
                   'stroke-width="2"/>')
    svg.append(f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end" font-size="11">step '
               f'{max(map(len, curves))}</text>')
    return svg


def figure(runs: dict[str, list[dict]]) -> str:
    """{name: lines of metrics.jsonl} as SVG."""
    width = LEFT + 3 * WIDTH + 2 * GAP + 20
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 26}" '
           'font-family="sans-serif" font-size="13">', f'<rect width="{width}" height="{TOP + HEIGHT + 26}" fill="white"/>']
    for i, (name, color) in enumerate(zip(runs, COLORS)):
        svg.append(f'<text x="{LEFT + 110 * i}" y="20" fill="{color}" font-weight="bold">{name}</text>')
    for i, (key, title) in enumerate(PANELS):
        svg += panel(LEFT + i * (WIDTH + GAP), title, [[line[key] for line in lines] for lines in runs.values()])
    return "\n".join([*svg, "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="+", type=Path, help="metrics.jsonl of runs; a run is called like its folder")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(figure({path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
                                for path in args.metrics}))


if __name__ == "__main__":
    main()

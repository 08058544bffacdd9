"""Draws assets/losses.svg: how hard the losses of forks/losses.py push a token, over its ratio rho.

    python tests/tools/losses.py

A panel for each loss. The push is d J / d log pi, which autograd computes from the functions of
forks/losses.py themselves, with their own clip ranges. The advantages are those of a group of eight
episodes: two succeed (solid lines), or six (dashed; only where A differs from GRPO's, and for GRPO).
All tokens of a response have the same rho, but for the dotted line: there the rest of the response has
become very unlikely.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

import torch  # noqa: E402

from forks import losses  # noqa: E402
from svg import Panel, picture  # noqa: E402

WIDTH, HEIGHT = 850, 476
PANEL_WIDTH, PANEL_HEIGHT = 168, 136  # of a panel's axes
COLUMNS, ROWS = (44, 250, 456, 662), (98, 308)  # left and upper edges of the panels
FARTHEST = 2.0  # rho at the right end of the axes
HIGHEST = 4.0   # push at their upper end; at the lower end it is the negative
STEP = 1e-4     # between the values of rho that are computed
# {--loss: (column, row, title, what differs)}
PANELS = {
    "grpo": (0, 0, "GRPO", "A = (r − mean) / std"),
    "dr_grpo": (1, 0, "Dr. GRPO", "A = r − mean"),
    "maxrl": (2, 0, "MaxRL", "A = (r − mean) / mean"),
    "dapo": (0, 1, "DAPO", "clips at 0.8 and 1.28"),
    "gspo": (1, 1, "GSPO", "one ρ a response, ±0.0004"),
    "cispo": (2, 1, "CISPO", "never stops; flat from ρ = 5"),
    "masked": (3, 1, "masked", "drifted failures are dropped"),
}
OTHER_ADVANTAGES = ("grpo", "dr_grpo", "maxrl")  # these are also drawn for a group with six successes
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24211d; } .title { font-size: 14px; font-weight: 600; }
.soft { fill: #6d675f; } .tick { font-size: 11px; fill: #6d675f; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .paper { fill: #fff; } .axis { stroke: #9a948a; } .grid { stroke: #ece8e0; }
path, polyline { fill: none; } polyline { stroke-width: 2.2; stroke-linejoin: round; }
.success { stroke: #12877a; } .failure { stroke: #cc5a1f; } text.failed { fill: #cc5a1f; }
.few-fail { stroke-width: 1.5; stroke-dasharray: 5 3; } .drifted { stroke-dasharray: 2 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e4dd; } .soft, .tick { fill: #a19a8f; } .paper { fill: #191817; }
  .axis { stroke: #7d776e; } .grid { stroke: #2d2a28; }
  .success { stroke: #45c4b3; } .failure { stroke: #f0935a; } text.failed { fill: #f0935a; }
}
</style>"""


def advantages(loss: str, successes: int) -> tuple[float, float]:
    """A of a success and of a failure, in a group of eight episodes."""
    r = torch.tensor([1.0] * successes + [0.0] * (8 - successes), dtype=torch.float64)
    A = losses.LOSSES[loss][0](r)
    return A[0].item(), A[-1].item()


def pushes(loss: str, A: float, drifted: bool = False) -> list[tuple[float, float]]:
    """(rho, push) of a token with the advantage A. Each stands in a response of two tokens.

    The other token has the same rho; drifted: it is e^10 times as unlikely as when it was sampled.
    """
    cfg = losses.own_settings(losses.Config(loss=loss))
    rho_R = STEP * torch.arange(1, round(FARTHEST / STEP) + 1, dtype=torch.float64)
    other_R = rho_R.log()
    if drifted:
        other_R = torch.full_like(rho_R, -10.0)
    logp_N = torch.stack([rho_R.log(), other_R], dim=1).flatten()
    tokens = losses.Tokens(logp_N, torch.zeros_like(logp_N), torch.full_like(logp_N, A), [2] * len(rho_R))
    push_N = losses.push(losses.LOSSES[loss][1], tokens, cfg)
    return list(zip(rho_R.tolist(), push_N[::2].tolist()))


def corners(points: list[tuple]) -> list[tuple]:
    """The points, one step apart, without those on a straight line between their neighbors."""
    kept = [points[0]]
    for before, here, after in zip(points, points[1:], points[2:]):
        bend = (after[1] - here[1]) - (here[1] - before[1])
        if abs(bend) > 1e-9:
            kept.append(here)
    return [*kept, points[-1]]


def axes(panel: Panel, title: str, differs: str) -> list[str]:
    right = panel.left + PANEL_WIDTH
    bottom = panel.top + PANEL_HEIGHT
    svg = [f'<text class="title" x="{panel.left}" y="{panel.top - 26}">{title}</text>',
           f'<text class="soft" x="{panel.left}" y="{panel.top - 9}">{differs}</text>',
           f'<path class="grid" d="M{panel.x(1):.1f} {panel.top}V{bottom}"/>']
    for push, name in ((-3, "−3"), (0, "0"), (3, "3")):
        y = panel.y(push)
        kind = "grid" if push else "axis"
        svg.append(f'<path class="{kind}" d="M{panel.left} {y:.1f}H{right}"/>')
        svg.append(f'<text class="tick end" x="{panel.left - 6}" y="{y + 4:.1f}">{name}</text>')
    for rho, name in ((0, "0"), (1, "ρ = 1"), (2, "2")):
        svg.append(f'<text class="tick middle" x="{panel.x(rho):.1f}" y="{bottom + 14}">{name}</text>')
    return svg


def chart(loss: str) -> list[str]:
    column, row, title, differs = PANELS[loss]
    panel = Panel(COLUMNS[column], ROWS[row], PANEL_WIDTH, PANEL_HEIGHT, 0, FARTHEST, -HIGHEST, HIGHEST)
    svg = axes(panel, title, differs)
    groups = [(2, "")]
    if loss in OTHER_ADVANTAGES:
        groups.append((6, " few-fail"))
    for successes, kind in groups:
        success, failure = advantages(loss, successes)
        svg.append(panel.line(corners(pushes(loss, success)), "success" + kind))
        svg.append(panel.line(corners(pushes(loss, failure)), "failure" + kind))
    if loss == "masked":
        _, failure = advantages(loss, 2)
        svg.append(panel.line(corners(pushes(loss, failure, drifted=True)), "failure drifted"))
        svg.append(f'<text class="tick failed" x="{panel.x(1.27):.1f}" y="{panel.y(0) - 7:.1f}">drifted: 0</text>')
    return svg


def legend() -> list[str]:
    """In the room of the fourth panel of the first row."""
    x = COLUMNS[3] - 14
    y = ROWS[0] + 6
    svg = []
    for kind, name in (("success", "a success: A &gt; 0"), ("failure", "a failure: A &lt; 0"),
                       ("failure drifted", "in a response that drifted")):
        svg.append(f'<polyline class="{kind}" points="{x},{y} {x + 28},{y}"/>')
        svg.append(f'<text x="{x + 36}" y="{y + 4}">{name}</text>')
        y += 21
    y += 9
    for kind, name in (("", "2 of 8 episodes succeed"), (" few-fail", "6 of 8 succeed")):
        svg.append(f'<polyline class="success{kind}" points="{x},{y - 3} {x + 28},{y - 3}"/>')
        svg.append(f'<polyline class="failure{kind}" points="{x},{y + 3} {x + 28},{y + 3}"/>')
        svg.append(f'<text x="{x + 36}" y="{y + 4}">{name}</text>')
        y += 21
    return svg


def draw() -> str:
    old = '<tspan dy="3" font-size="9">old</tspan><tspan dy="-3">'
    svg = ['<text x="20" y="30">How hard a loss pushes a token up (above 0) or down (below 0), over its ratio '
           f"ρ = π / π{old}; at ρ = 1 the push is A</tspan></text>"]
    for loss in PANELS:
        svg += chart(loss)
    svg += legend()
    return picture(WIDTH, HEIGHT, STYLE, svg)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "assets/losses.svg")
    args = parser.parse_args()
    args.out.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

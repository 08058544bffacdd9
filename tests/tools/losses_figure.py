"""Draws assets/losses.svg: how hard the losses of forks/losses.py push a token, over its ratio rho.

    python tests/tools/losses_figure.py

A panel for each loss. The push is d J / d log pi, which autograd computes from the functions of
forks/losses.py themselves, with their own clip ranges. The advantages are those of a group of eight
episodes: two succeed (solid lines), or six (dashed; for GRPO, and where A depends on the group in another way).
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
from svg import Panel, picture, text  # noqa: E402

WIDTH = 850
HEIGHT = 522
PANEL_WIDTH = 168  # of a panel's axes
PANEL_HEIGHT = 136
COLUMNS = (44, 250, 456, 662)  # left edges of the panels
ROWS = (98, 308)               # ... and upper ones
FARTHEST = 2.0  # rho at the right end of the axes
HIGHEST = 4.0   # push at their upper end; at the lower end it is the negative
STEP = 1e-4     # between the values of rho that are computed
GROUP = 8       # episodes
# {--loss: (column, row, title, what differs)}
PANELS = {
    "grpo": (0, 0, "GRPO", "A = (r − mean) / std"),
    "dr_grpo": (1, 0, "Dr. GRPO", "A = r − mean"),
    "maxrl": (2, 0, "MaxRL", "A = (r − mean) / mean"),
    "raft": (3, 0, "RAFT", "A = r: failures do not push"),
    "dapo": (0, 1, "DAPO", "clips at 0.8 and 1.28"),
    "gspo": (1, 1, "GSPO, one ρ a response", "clips at 0.9997 and 1.0004"),
    "cispo": (2, 1, "CISPO", "never stops; flat from ρ = 5"),
    "masked": (3, 1, "masked", "drifted failures are dropped"),
}
OTHER_ADVANTAGES = ("grpo", "dr_grpo", "maxrl")  # these are also drawn for a group with six successes
Points = list[tuple[float, float]]  # (rho, push)
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
    rewards = [1.0] * successes + [0.0] * (GROUP - successes)
    r = torch.tensor(rewards, dtype=torch.float64)
    advantage, *_ = losses.LOSSES[loss]
    A = advantage(r).tolist()
    return A[0], A[-1]


def pushes(loss: str, A: float, drifted: bool = False) -> Points:
    """The pushes of a token with the advantage A. Each stands in a response of two tokens.

    The other token has the same rho; drifted: it is e^10 times as unlikely as when it was sampled.
    """
    count = round(FARTHEST / STEP)
    rho_R = STEP * torch.arange(1, count + 1, dtype=torch.float64)
    log_rho_R = rho_R.log()
    other_R = log_rho_R
    if drifted:
        other_R = torch.full_like(rho_R, -10.0)

    # With old log-probs of 0, a log-prob is a log rho.
    both_R2 = torch.stack([log_rho_R, other_R], dim=1)
    logp_N = both_R2.flatten()
    old_N = torch.zeros_like(logp_N)
    A_N = torch.full_like(logp_N, A)
    tokens = losses.Tokens(logp_N, old_N, A_N, lengths=[2] * count)

    cfg = losses.Config(loss=loss)
    cfg = losses.own_settings(cfg)
    _, J, *_ = losses.LOSSES[loss]
    push_N = losses.push(J, tokens, cfg)
    push_R = push_N[::2]  # of each response's first token
    return list(zip(rho_R.tolist(), push_R.tolist()))


def corners(points: Points) -> Points:
    """The points, one step apart, without those on a straight line between their neighbors."""
    kept = [points[0]]
    for before, here, after in zip(points, points[1:], points[2:]):
        _, y_before = before
        _, y = here
        _, y_after = after
        bend = (y_after - y) - (y - y_before)
        if abs(bend) > 1e-9:
            kept.append(here)
    kept.append(points[-1])
    return kept


def axes(panel: Panel, title: str, differs: str) -> list[str]:
    svg = [
        text(panel.left, panel.top - 26, title, "title"),
        text(panel.left, panel.top - 9, differs, "soft"),
        panel.plumb(1, "grid"),
    ]
    push_names = {-3: "−3", 0: "0", 3: "3"}
    for push, name in push_names.items():
        kind = "grid"
        if push == 0:
            kind = "axis"
        svg.append(panel.level(push, kind))
        middle = panel.y(push) + 4
        svg.append(text(panel.left - 6, middle, name, "tick end"))
    below = panel.bottom + 14
    rho_names = {0: "0", 1: "ρ = 1", 2: "2"}
    for rho, name in rho_names.items():
        svg.append(text(panel.x(rho), below, name, "tick middle"))
    return svg


def curve(panel: Panel, points: Points, kind: str) -> str:
    return panel.line(corners(points), kind)


def chart(loss: str) -> list[str]:
    column, row, title, differs = PANELS[loss]
    panel = Panel(
        left=COLUMNS[column],
        top=ROWS[row],
        width=PANEL_WIDTH,
        height=PANEL_HEIGHT,
        x_low=0,
        x_high=FARTHEST,
        y_low=-HIGHEST,
        y_high=HIGHEST,
    )
    svg = axes(panel, title, differs)

    groups = [(2, "")]
    if loss in OTHER_ADVANTAGES:
        groups.append((6, " few-fail"))
    for successes, kind in groups:
        success, failure = advantages(loss, successes)
        rising = pushes(loss, success)
        falling = pushes(loss, failure)
        svg.append(curve(panel, rising, "success" + kind))
        svg.append(curve(panel, falling, "failure" + kind))

    if loss == "masked":
        _, failure = advantages(loss, 2)
        nothing = pushes(loss, failure, drifted=True)
        svg.append(curve(panel, nothing, "failure drifted"))
        above = panel.y(0) - 7
        svg.append(text(panel.x(1.27), above, "drifted: 0", "tick failed"))
    return svg


def sample(x: int, y: int, kind: str) -> str:
    """A short line of that kind."""
    return f'<polyline class="{kind}" points="{x},{y} {x + 28},{y}"/>'


def legend() -> list[str]:
    """Below the panels: the colors, then the dashes."""
    svg = []
    outcomes = {
        "success": "a success",
        "failure": "a failure",
        "failure drifted": "a failure, in a response that drifted",
    }
    for x, (kind, name) in zip(COLUMNS, outcomes.items()):
        y = ROWS[1] + PANEL_HEIGHT + 40
        svg.append(sample(x, y, kind))
        svg.append(text(x + 36, y + 4, name))
    groups = {"": "2 of 8 episodes succeed", " few-fail": "6 of 8 succeed"}
    for x, (kind, name) in zip(COLUMNS, groups.items()):
        y = ROWS[1] + PANEL_HEIGHT + 61
        svg.append(sample(x, y - 3, "success" + kind))
        svg.append(sample(x, y + 3, "failure" + kind))
        svg.append(text(x + 36, y + 4, name))
    return svg


def draw() -> str:
    lowered = '<tspan dy="3" font-size="9">old</tspan><tspan dy="-3">'
    title = ("How hard a loss pushes a token up (above 0) or down (below 0), over its ratio "
             f"ρ = π / π{lowered}; at ρ = 1 the push is A</tspan>")
    svg = [text(20, 30, title)]
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

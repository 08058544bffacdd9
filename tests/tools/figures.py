"""Draws a figure for each equation, into assets/figures/:

    advantage.svg      the group advantage, by how many episodes of the group succeed
    clip.svg           what a token adds to the objective, over rho, and where its gradient ends
    loss-norms.svg     which tokens weigh what, in a short success and a long failure
    compression.svg    tokens in the context over the turns of an episode, with and without compression
    cache.svg          tokens that each turn computes, and those whose keys and values are still there

    python tests/tools/figures.py [--out assets/figures]

Every point is computed by the six files' functions. The last two follow the scripted expert's episode in
assets/episode.jsonl. (tests/tools/packing.py draws how training packs that episode.)
"""
import argparse
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

import torch  # noqa: E402

import mgrpo  # noqa: E402
from compress import Chat, Row, Trajectory, Turn, context, open_chat, replay  # noqa: E402
from model import load  # noqa: E402
from rollout import Engine, Request  # noqa: E402
from svg import Panel, picture, text  # noqa: E402

WIDTH = 850
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24211d; } .soft { fill: #6d675f; } .paper { fill: #fff; }
.title { font-size: 14px; font-weight: 600; } .tick { font-size: 11px; fill: #6d675f; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .axis { stroke: #9a948a; fill: none; } .grid { stroke: #ece8e0; fill: none; }
.up { fill: #2e7d5b; } .down { fill: #b5472f; } .kept { fill: #b3aa9b; } .new { fill: #1f6f9f; } .wash { fill: #f3f0e9; }
polyline { fill: none; stroke-width: 2.4; stroke-linejoin: round; } .thin { stroke-dasharray: 4 4; stroke-width: 1.6; }
polyline.up { stroke: #2e7d5b; fill: none; } polyline.down { stroke: #b5472f; fill: none; }
polyline.new { stroke: #1f6f9f; fill: none; } polyline.kept { stroke: #8b847a; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e4dd; } .soft, .tick { fill: #a19a8f; } .paper { fill: #191817; }
  .axis { stroke: #7d776e; } .grid { stroke: #2d2a28; } .wash { fill: #292725; }
  .up { fill: #6fc49b; } .down { fill: #e58a71; } .kept { fill: #6b645b; } .new { fill: #7cc4ee; }
  polyline.up { stroke: #6fc49b; } polyline.down { stroke: #e58a71; }
  polyline.new { stroke: #7cc4ee; } polyline.kept { stroke: #a19a8f; }
}
</style>"""


def axes(panel: Panel, title: str, x_name: str, x_marks: list, y_marks: dict) -> list[str]:
    """y_marks: {value: how it is written}"""
    svg = [text(panel.left, panel.top - 14, title, "title")]
    for value, name in y_marks.items():
        kind = "grid"
        if value == 0:
            kind = "axis"
        svg.append(across(panel, value, kind))
        middle = panel.y(value) + 4
        svg.append(label(panel.left - 7, middle, name, "tick end"))
    below = panel.bottom + 17
    for value in x_marks:
        svg.append(text(panel.x(value), below, f"{value:g}", "tick middle"))
    center = panel.left + panel.width / 2
    svg.append(text(center, below + 17, x_name, "tick middle"))
    return svg


def across(panel: Panel, value: float, kind: str) -> str:
    """A horizontal line through the panel."""
    y = panel.y(value)
    return f'<path class="{kind}" d="M{panel.left} {y:.1f}h{panel.width}"/>'


def label(x: float, y: float, words: str, kind: str = "") -> str:
    """Text at a place that is written with a decimal."""
    return text(float(x), float(y), words, kind)


def made_up(reward: float, lengths: tuple = (1,)) -> Trajectory:
    """An episode with a response of so many tokens in each turn."""
    task = {"task_id": 0, "intent": "x", "sites": []}
    tau = Trajectory(task, success=reward, reward=reward)
    for n in lengths:
        turn = Turn(
            url="",
            observation="a page",
            message_ids=[0],
            response_ids=[0] * n,
            logps=[0.0] * n,
            response="",
        )
        tau.turns.append(turn)
    return tau


# --------------------------------------------------------------------------------- the group advantage


def advantages(successes: int, G: int) -> tuple[float, float] | None:
    """(of a success, of a failure) in a group; None if the group is dropped."""
    group = []
    for i in range(G):
        reward = float(i < successes)
        group.append(made_up(reward))
    training = mgrpo.group_advantages(group)
    if not training:
        return None
    first = group[0]
    last = group[-1]
    return first.advantage, last.advantage


def dropped(panel: Panel, k: int) -> list[str]:
    """The column of a group whose rewards are all equal."""
    x = panel.x(k)
    y = panel.y(0.45)
    return [
        panel.box(k - 0.46, 0.92, panel.y_low, panel.y_high, "wash"),
        label(x, y, "all equal:", "tick middle"),
        label(x, y + 15, "dropped", "tick middle"),
    ]


def both_bars(panel: Panel, k: int, success: float, failure: float) -> list[str]:
    """The column of a group that trains: one bar up and one down, with their advantages."""
    x = panel.x(k)
    above = panel.y(success) - 5
    below = panel.y(failure) + 14
    return [
        panel.box(k - 0.3, 0.6, 0, success, "up"),
        panel.box(k - 0.3, 0.6, failure, 0, "down"),
        label(x, above, f"{success:+.2f}", "middle"),
        label(x, below, f"{failure:+.2f}", "middle"),
    ]


def explained(x: int, y: int, kind: str, name: str, meaning: str) -> list[str]:
    """What a color stands for, in two lines."""
    return [
        f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>',
        label(x + 18, y, name),
        label(x, y + 18, meaning, "soft"),
    ]


def advantage_figure(G: int = 8) -> str:
    panel = Panel(
        left=60,
        top=46,
        width=560,
        height=240,
        x_low=-0.5,
        x_high=G + 0.5,
        y_low=-2.8,
        y_high=2.8,
    )
    title = f"advantage in a group of {G} episodes"
    counts = list(range(G + 1))
    signs = {-2: "-2", -1: "-1", 0: "0", 1: "+1", 2: "+2"}
    svg = axes(panel, title, "episodes that succeed", counts, signs)
    for k in counts:
        both = advantages(k, G)
        if both is None:
            svg += dropped(panel, k)
        else:
            success, failure = both
            svg += both_bars(panel, k, success, failure)

    x = panel.right + 24
    svg += explained(x, 86, "up", "each success:", "its tokens become likelier")
    svg += explained(x, 206, "down", "each failure:", "its tokens become less likely")
    svg.append(label(x, 128, "the rarer the success,", "soft"))
    svg.append(label(x, 145, "the more it counts", "soft"))
    return picture(WIDTH, 340, STYLE, svg)


# ----------------------------------------------------------------------------------------------- clip


def surrogate(rho: float, A: float, eps: float) -> tuple[float, float]:
    """(what the token adds to the objective, its derivative by the log-prob), by mgrpo_loss."""
    log_rho = math.log(rho)
    logp_1 = torch.tensor([log_rho], dtype=torch.float64, requires_grad=True)
    zero_1 = torch.zeros(1, dtype=torch.float64)
    loss, _ = mgrpo.mgrpo_loss(
        logp_N=logp_1,
        logp_old_N=zero_1,
        logp_ref_N=zero_1,
        A_N=A,
        weight_N=1.0,
        eps=eps,
        beta=0.0,
    )
    objective = -loss
    objective.backward()
    return objective.item(), logp_1.grad.item()


def clip_panel(panel: Panel, title: str, A: float, eps: float) -> list[str]:
    """One token's share of the objective, over rho; the range where it has no gradient is shaded."""
    rhos = [step / 100 for step in range(1, 201)]
    unclipped = []
    clipped = []
    ended = []  # every rho at which the gradient is 0
    for rho in rhos:
        value, slope = surrogate(rho, A, eps)
        unclipped.append((rho, rho * A))
        clipped.append((rho, value))
        if slope == 0:
            ended.append(rho)
    first = ended[0]
    last = ended[-1]

    svg = [panel.box(first, last - first, panel.y_low, panel.y_high, "wash")]
    x_marks = [0, 0.5, 1 - eps, 1, 1 + eps, 1.5, 2]
    y_marks = {0: "0", A: f"{A:g}", 2 * A: f"{2 * A:g}"}
    x_name = "rho = probability now / when sampled"
    svg += axes(panel, title, x_name, x_marks, y_marks)
    kind = "up"
    height = 0.35
    if A < 0:
        kind = "down"
        height = -1.4
    svg.append(panel.line(unclipped, "kept thin"))
    svg.append(panel.line(clipped, kind))
    middle = (first + last) / 2
    x = panel.x(middle)
    y = panel.y(height) + 4
    svg.append(label(x, y, "no gradient:", "soft middle"))
    svg.append(label(x, y + 15, "moved enough", "soft middle"))
    return svg


def clip_figure(eps: float = 0.2) -> str:
    success = Panel(
        left=60,
        top=46,
        width=340,
        height=220,
        x_low=0,
        x_high=2,
        y_low=-0.2,
        y_high=2.2,
    )
    failure = replace(success, left=470, y_low=-2.2, y_high=0.2)
    svg = clip_panel(success, "a token of a success, A = +1", 1.0, eps)
    svg += clip_panel(failure, "a token of a failure, A = -1", -1.0, eps)
    solid = ("Solid: min(rho A, clip(rho, 1 - eps, 1 + eps) A), what the token adds to the objective, "
             f"with eps = {eps}.")
    dashed = ("Dashed: rho A, without clipping. Where a token has moved against its advantage, both are "
              "the same: it keeps its gradient.")
    svg.append(label(60, 326, solid, "soft"))
    svg.append(label(60, 343, dashed, "soft"))
    return picture(WIDTH, 360, STYLE, svg)


# ----------------------------------------------------------------------------------------- loss norms


SUCCESS = (8, 22)  # tokens of the responses
FAILURE = (20, 8, 22, 16, 8, 24, 12, 20)
GAP = 6  # tokens of room between responses


def weighed(norm: str, success: Trajectory, failure: Trajectory) -> list[Row]:
    """The rows of a group of two, with advantages and weights."""
    chat = open_chat(ROOT / "worlds/base", actions_help="")
    cfg = mgrpo.Config(loss_norm=norm, max_turns=16, max_new_tokens=24)
    training = mgrpo.group_advantages([success, failure])
    return mgrpo.weighted_rows([training], chat, cfg)


def blocks(panel: Panel, rows: list[Row]) -> list[str]:
    """A block for each response, as high as its tokens are pushed."""
    pushes = [row.weight * row.advantage for row in rows]
    hardest = max(abs(push) for push in pushes)
    svg = []
    x = 0
    for row, push in zip(rows, pushes):
        height = push / hardest
        width = row.n_action - 0.4
        if height > 0:
            block = panel.box(x, width, 0, height, "up")
        else:
            block = panel.box(x, width, height, 0, "down")
        svg.append(block)
        x += row.n_action + GAP
    return svg


def share_of(tau: Trajectory, rows: list[Row]) -> float:
    """How much of the rows' weight is on an episode's tokens."""
    own = 0.0
    whole = 0.0
    for row in rows:
        weight = row.weight * row.n_action
        whole += weight
        if row.tau is tau:
            own += weight
    return own / whole


def change_by_length(norm: str, rows: list[Row]) -> float:
    """How many times as much a token of the success weighs if the failure is twice as long."""
    success = made_up(1.0, SUCCESS)
    failure = made_up(0.0, 2 * FAILURE)
    longer = weighed(norm, success, failure)
    return longer[0].weight / rows[0].weight


def described(x: float, name: str, tau: Trajectory) -> list[str]:
    """The two lines above an episode's blocks."""
    turns = len(tau.turns)
    tokens = sum(len(turn.response_ids) for turn in tau.turns)
    return [
        label(x, 28, f"{name}, {tokens} tokens"),
        label(x, 45, f"{turns} turns, A = {tau.advantage:+.2f}", "soft"),
    ]


def loss_norms_figure() -> str:
    """A success of two turns and a failure of eight, token by token."""
    success = made_up(1.0, SUCCESS)
    failure = made_up(0.0, FAILURE)
    width_of_success = sum(SUCCESS) + GAP * len(SUCCESS)  # in tokens
    width_of_failure = sum(FAILURE) + GAP * len(FAILURE)
    panel = Panel(
        left=106,
        top=62,
        width=720,
        height=84,
        x_low=0,
        x_high=width_of_success + width_of_failure,
        y_low=-1.05,
        y_high=1.05,
    )
    x = panel.x(width_of_success)  # where the failure begins
    svg = []
    for norm in ("token", "paper", "constant"):
        rows = weighed(norm, success, failure)
        svg.append(across(panel, 0, "axis"))
        y = panel.y(0)
        svg.append(label(20, y + 5, norm, "title"))
        svg += blocks(panel, rows)

        share = share_of(failure, rows)
        change = change_by_length(norm, rows)
        weight = f"The failure has {share:.0%} of the weight. If it were twice as long,"
        weight_if_longer = f"a token of the success would weigh {change:.2f} times as much."
        svg.append(label(x, y - 24, weight, "soft"))
        svg.append(label(x, y - 8, weight_if_longer, "soft"))
        panel = replace(panel, top=panel.top + 118)

    svg += described(panel.left, "success", success)
    svg += described(x, "failure", failure)
    block = ("A block is a response: its width is its number of tokens, its height how hard each token "
             "is pushed (weight times A),")
    area = "its area how hard the response is pushed. Each row is scaled to its strongest token."
    svg.append(label(20, 414, block, "soft"))
    svg.append(label(20, 431, area, "soft"))
    return picture(WIDTH, 446, STYLE, svg)


# ---------------------------------------------------------------------------- an episode's contexts


def expert_episode(chat: Chat) -> Trajectory:
    file = ROOT / "assets/episode.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[0])
    return replay(chat, record)


def two_chats() -> tuple[Chat, Chat]:
    """(with compression, without it)."""
    chat = open_chat(ROOT / "worlds/base", actions_help="")
    whole_chat = Chat(chat.tokenizer, chat.system, chat.think, compress=False)
    return chat, whole_chat


def lengths(chat: Chat) -> list[int]:
    """Ids in the context of each turn of the expert's episode."""
    tau = expert_episode(chat)
    sizes = []
    for t in range(len(tau.turns)):
        h_j = context(chat, tau, t)
        sizes.append(len(h_j))
    return sizes


def round_up(value: float) -> int:
    """To one digit and zeros."""
    digits = len(str(int(value)))
    unit = 10 ** (digits - 1)
    return math.ceil(value / unit) * unit


def quarters(highest: int) -> dict[int, str]:
    """The marks of an axis from 0 on, with a line at every quarter."""
    marks = {}
    for i in range(5):
        value = highest * i // 4
        marks[value] = str(value)
    return marks


def compression_curve(panel: Panel, values: list[int], kind: str, name: str) -> list[str]:
    """A line with a dot for each turn; on its right the last value and the name."""
    points = list(enumerate(values, start=1))
    svg = [panel.line(points, kind)]
    for turn, value in points:
        x = panel.x(turn)
        y = panel.y(value)
        svg.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
    last = values[-1]
    beside = panel.right + 14
    y = panel.y(last) + 4
    svg.append(label(beside, y, f"{last:,} ids"))
    svg.append(label(beside, y + 17, name, "soft"))
    return svg


def compression_figure() -> str:
    chat, whole_chat = two_chats()
    compressed = lengths(chat)
    whole = lengths(whole_chat)
    turns = len(whole)
    highest = round_up(max(whole))
    panel = Panel(
        left=70,
        top=46,
        width=560,
        height=230,
        x_low=1,
        x_high=turns,
        y_low=0,
        y_high=highest,
    )
    x_marks = list(range(1, turns + 1))
    svg = axes(panel, "ids in the context of each turn", "turn", x_marks, quarters(highest))
    svg += compression_curve(panel, whole, "kept", "every page stays")
    svg += compression_curve(panel, compressed, "new", "past pages replaced")
    said = f"The scripted expert's episode in assets/episode.jsonl, {turns} turns."
    svg.append(label(panel.left, 336, said, "soft"))
    return picture(WIDTH, 352, STYLE, svg)


class Counter:
    """Stands in for the model in an Engine: it only counts the tokens of forward passes."""

    def __init__(self):
        self.tokens = 0

    def __call__(self, tokens_BT, *_, **__):
        self.tokens += tokens_BT.numel()


Reuse = list[tuple[int, int]]  # of each turn: (ids kept from the turn before, ids computed)


def reuse(chat: Chat, model) -> Reuse:
    """What is kept and computed before each response of the expert's episode, by rollout.Engine."""
    tau = expert_episode(chat)
    engine = Engine(model, chat.end_id, n_slots=1, length=4096, max_new_tokens=64)
    counter = Counter()
    engine.model = counter
    turns = []
    for t, turn in enumerate(tau.turns):
        h_j = context(chat, tau, t)
        before = counter.tokens
        request = Request(0, h_j, random.Random(0))
        engine.prefill(request)
        computed = counter.tokens - before
        kept = len(h_j) - 1 - computed  # prefill leaves the last id to `decode`
        turns.append((kept, computed))
        # While it decodes, the engine feeds the last id of the context and all of the response but its last.
        engine.held[0] += [h_j[-1], *turn.response_ids[:-1]]
    return turns


def cache_panel(panel: Panel, title: str, turns: Reuse) -> list[str]:
    """A bar for each turn: what is kept, and on top of it what is computed."""
    x_marks = list(range(1, len(turns) + 1))
    svg = axes(panel, title, "turn", x_marks, quarters(panel.y_high))
    total = 0
    alone = 0
    for t, (kept, computed) in enumerate(turns):
        both = kept + computed
        svg.append(panel.box(t + 0.7, 0.6, 0, kept, "kept"))
        svg.append(panel.box(t + 0.7, 0.6, kept, both, "new"))
        total += computed
        alone += both
    said = f"computes {total:,} ids; without a cache {alone:,}"
    svg.append(label(panel.left, 316, said, "soft"))
    return svg


def cache_figure() -> str:
    chat, whole_chat = two_chats()
    model = load(ROOT / "worlds/base")
    compressed = reuse(chat, model)
    whole = reuse(whole_chat, model)
    sizes = [kept + computed for kept, computed in compressed + whole]
    highest = round_up(max(sizes))
    count = len(whole)
    on_the_left = Panel(
        left=70,
        top=46,
        width=330,
        height=220,
        x_low=0.5,
        x_high=count + 0.5,
        y_low=0,
        y_high=highest,
    )
    on_the_right = replace(on_the_left, left=470)
    svg = cache_panel(on_the_left, "past pages replaced (compression)", compressed)
    svg += cache_panel(on_the_right, "every page stays", whole)

    x = 70
    legend = {
        "kept": "keys and values kept from the turn before",
        "new": "computed before the response",
    }
    for kind, name in legend.items():
        svg.append(f'<rect class="{kind}" x="{x}" y="336" width="12" height="12" rx="2"/>')
        svg.append(label(x + 18, 346, name, "soft"))
        x += 290
    said = f"The scripted expert's episode in assets/episode.jsonl, {count} turns."
    svg.append(label(70, 369, said, "soft"))
    return picture(WIDTH, 387, STYLE, svg)


FIGURES = {
    "advantage": advantage_figure,
    "clip": clip_figure,
    "loss-norms": loss_norms_figure,
    "compression": compression_figure,
    "cache": cache_figure,
}


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "assets/figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        file = args.out / f"{name}.svg"
        file.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

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
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

import random  # noqa: E402

import torch  # noqa: E402

import mgrpo  # noqa: E402
from compress import Chat, Row, Trajectory, Turn, context, open_chat, replay  # noqa: E402
from model import load  # noqa: E402
from rollout import Engine, Request  # noqa: E402
from svg import Panel, picture  # noqa: E402

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


def axes(panel: Panel, title: str, x_marks: list, y_marks: list, x_name: str, names: dict = {}) -> list[str]:
    """names: how values of the vertical axis are written; by default as numbers."""
    bottom = panel.top + panel.height
    svg = [f'<text class="title" x="{panel.left}" y="{panel.top - 14}">{title}</text>']
    for value in y_marks:
        kind = "axis" if value == 0 else "grid"
        svg.append(f'<path class="{kind}" d="M{panel.left} {panel.y(value):.1f}h{panel.width}"/>')
        svg.append(label(panel.left - 7, panel.y(value) + 4, names.get(value, f"{value:g}"), "tick end"))
    for value in x_marks:
        svg.append(f'<text class="tick middle" x="{panel.x(value):.1f}" y="{bottom + 17}">{value:g}</text>')
    svg.append(f'<text class="tick middle" x="{panel.left + panel.width / 2}" y="{bottom + 34}">{x_name}</text>')
    return svg


def label(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def made_up(reward: float, lengths: tuple = (1,)) -> Trajectory:
    """An episode with a response of so many tokens in each turn."""
    tau = Trajectory({"task_id": 0, "intent": "x", "sites": []}, success=reward, reward=reward)
    for n in lengths:
        tau.turns.append(Turn("", "a page", observation_ids=[0], action_ids=[0] * n, logps=[0.0] * n, response=""))
    return tau


# --------------------------------------------------------------------------------- the group advantage


def advantages(successes: int, G: int) -> tuple[float, float] | None:
    """(of a success, of a failure) in a group; None if the group is dropped."""
    group = [made_up(float(i < successes)) for i in range(G)]
    if not mgrpo.group_advantages(group):
        return None
    return group[0].advantage, group[-1].advantage


def advantage_figure(G: int = 8) -> str:
    panel = Panel(60, 46, 560, 240, -0.5, G + 0.5, -2.8, 2.8)
    signs = {-2: "-2", -1: "-1", 0: "0", 1: "+1", 2: "+2"}
    svg = axes(panel, f"advantage in a group of {G} episodes", list(range(G + 1)), list(signs), "episodes that succeed", signs)
    for k in range(G + 1):
        both = advantages(k, G)
        if both is None:
            svg.append(panel.box(k - 0.46, 0.92, panel.y_low, panel.y_high, "wash"))
            for i, word in enumerate(("all equal:", "dropped")):
                svg.append(label(panel.x(k), panel.y(0.45) + 15 * i, word, "tick middle"))
            continue
        success, failure = both
        svg.append(panel.box(k - 0.3, 0.6, 0, success, "up"))
        svg.append(panel.box(k - 0.3, 0.6, failure, 0, "down"))
        svg.append(label(panel.x(k), panel.y(success) - 5, f"{success:+.2f}", "middle"))
        svg.append(label(panel.x(k), panel.y(failure) + 14, f"{failure:+.2f}", "middle"))
    x = panel.left + panel.width + 24
    for y, kind, words in ((86, "up", ("each success:", "its tokens become likelier")),
                           (206, "down", ("each failure:", "its tokens become less likely"))):
        svg.append(f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12"/>')
        svg.append(label(x + 18, y, words[0]))
        svg.append(label(x, y + 18, words[1], "soft"))
    svg.append(label(x, 128, "the rarer the success,", "soft"))
    svg.append(label(x, 145, "the more it counts", "soft"))
    return picture(850, 340, STYLE, svg)


# ----------------------------------------------------------------------------------------------- clip


def surrogate(rho: float, A: float, eps: float) -> tuple[float, float]:
    """(what the token adds to the objective, its derivative by the log-prob), by mgrpo_loss."""
    logp_1 = torch.tensor([math.log(rho)], dtype=torch.float64, requires_grad=True)
    zero_1 = torch.zeros(1, dtype=torch.float64)
    loss, _ = mgrpo.mgrpo_loss(logp_1, zero_1, zero_1, A_N=A, weight_N=1.0, eps=eps, beta=0.0)
    loss.backward()
    return -loss.item(), -logp_1.grad.item()


def clip_figure(eps: float = 0.2) -> str:
    svg = []
    for i, (A, title) in enumerate(((1.0, "a token of a success, A = +1"), (-1.0, "a token of a failure, A = -1"))):
        low, high = (-0.2, 2.2) if A > 0 else (-2.2, 0.2)
        panel = Panel(60 + 410 * i, 46, 340, 220, 0, 2, low, high)
        points = [step / 100 for step in range(1, 201)]
        values = [surrogate(rho, A, eps) for rho in points]
        ended = [rho for rho, (_, slope) in zip(points, values) if slope == 0]
        svg.append(panel.box(ended[0], ended[-1] - ended[0], low, high, "wash"))
        svg += axes(panel, title, [0, 0.5, 1 - eps, 1, 1 + eps, 1.5, 2], [0, A, 2 * A], "rho = probability now / when sampled")
        svg.append(panel.line([(rho, rho * A) for rho in points], "kept thin"))
        svg.append(panel.line([(rho, value) for rho, (value, _) in zip(points, values)], "up" if A > 0 else "down"))
        middle = panel.x((ended[0] + ended[-1]) / 2)
        y = panel.y(0.35 if A > 0 else -1.4) + 4
        svg.append(label(middle, y, "no gradient:", "soft middle"))
        svg.append(label(middle, y + 15, "moved enough", "soft middle"))
    svg.append(label(60, 326, f"Solid: min(rho A, clip(rho, 1 - eps, 1 + eps) A), what the token adds to the objective, "
                     f"with eps = {eps}.", "soft"))
    svg.append(label(60, 343, "Dashed: rho A, without clipping. Where a token has moved against its advantage, both are "
                     "the same: it keeps its gradient.", "soft"))
    return picture(850, 360, STYLE, svg)


# ----------------------------------------------------------------------------------------- loss norms


SUCCESS = (8, 22)  # tokens of the responses
FAILURE = (20, 8, 22, 16, 8, 24, 12, 20)


def weighed(norm: str, success: Trajectory, failure: Trajectory) -> list[Row]:
    """The rows of a group of two, with advantages and weights."""
    chat = open_chat(ROOT / "worlds/base", actions_help="")
    cfg = mgrpo.Config(loss_norm=norm, max_turns=16, max_new_tokens=24)
    return mgrpo.weigh([mgrpo.group_advantages([success, failure])], chat, cfg)


def loss_norms_figure() -> str:
    """A success of two turns and a failure of eight, token by token."""
    success, failure = made_up(1.0, SUCCESS), made_up(0.0, FAILURE)
    gap = 6  # tokens of room between responses
    lengths_of_both = SUCCESS + FAILURE
    whole = sum(lengths_of_both) + gap * len(lengths_of_both)
    svg = []
    for i, norm in enumerate(("token", "paper", "constant")):
        rows = weighed(norm, success, failure)
        longer = weighed(norm, made_up(1.0, SUCCESS), made_up(0.0, 2 * FAILURE))
        change = longer[0].weight / rows[0].weight
        highest = max(row.weight * abs(row.advantage) for row in rows)
        panel = Panel(106, 62 + 118 * i, 720, 84, 0, whole, -1.05, 1.05)
        svg.append(f'<path class="axis" d="M{panel.left} {panel.y(0):.1f}h{panel.width}"/>')
        svg.append(label(20, panel.y(0) + 5, norm, "title"))
        held = {"success": 0.0, "failure": 0.0}
        x = 0.0
        for row in rows:
            name = "success" if row.tau is success else "failure"
            push = row.weight * row.advantage / highest
            kind = "up" if push > 0 else "down"
            svg.append(panel.box(x, row.n_action - 0.4, min(push, 0), max(push, 0), kind))
            held[name] += row.weight * row.n_action
            x += row.n_action + gap
        share = held["failure"] / (held["success"] + held["failure"])
        begin_of_failure = panel.x(sum(SUCCESS) + len(SUCCESS) * gap)
        svg.append(label(begin_of_failure, panel.y(0) - 24, f"The failure has {share:.0%} of the weight. If it were twice as long,", "soft"))
        svg.append(label(begin_of_failure, panel.y(0) - 8, f"a token of the success would weigh {change:.2f} times as much.", "soft"))
    for x, name, tau in ((panel.left, "success", success), (begin_of_failure, "failure", failure)):
        tokens = sum(len(turn.action_ids) for turn in tau.turns)
        svg.append(label(x, 28, f"{name}, {tokens} tokens"))
        svg.append(label(x, 45, f"{len(tau.turns)} turns, A = {tau.advantage:+.2f}", "soft"))
    left = 20
    svg.append(label(left, 414, "A block is a response: its width is its number of tokens, its height how hard each token "
                     "is pushed (weight times A),", "soft"))
    svg.append(label(left, 431, "its area how hard the response is pushed. Each row is scaled to its strongest token.", "soft"))
    return picture(850, 446, STYLE, svg)


# ---------------------------------------------------------------------------- an episode's contexts


def expert_episode(chat: Chat) -> Trajectory:
    line = (ROOT / "assets/episode.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return replay(chat, json.loads(line))


def two_chats() -> tuple[Chat, Chat]:
    """(with compression, without it)."""
    chat = open_chat(ROOT / "worlds/base", actions_help="")
    return chat, Chat(chat.tokenizer, chat.system, chat.think, compress=False)


def lengths(chat: Chat) -> list[int]:
    """Ids in the context of each turn of the expert's episode."""
    tau = expert_episode(chat)
    return [len(context(chat, tau, t)) for t in range(len(tau.turns))]


def round_up(value: float) -> int:
    unit = 10 ** (len(str(int(value))) - 1)
    return math.ceil(value / unit) * unit


def compression_figure() -> str:
    chat, whole_chat = two_chats()
    compressed, whole = lengths(chat), lengths(whole_chat)
    turns = len(whole)
    highest = round_up(max(whole))
    panel = Panel(70, 46, 560, 230, 1, turns, 0, highest)
    marks = [highest * i // 4 for i in range(5)]
    svg = axes(panel, "ids in the context of each turn", list(range(1, turns + 1)), marks, "turn")
    names = ((whole, "kept", "every page stays"), (compressed, "new", "past pages replaced"))
    for values, kind, name in names:
        points = list(zip(range(1, turns + 1), values))
        svg.append(panel.line(points, kind))
        for turn, value in points:
            svg.append(f'<circle class="{kind}" cx="{panel.x(turn):.1f}" cy="{panel.y(value):.1f}" r="3.5"/>')
        x = panel.left + panel.width + 14
        svg.append(label(x, panel.y(values[-1]) + 4, f"{values[-1]:,} ids"))
        svg.append(label(x, panel.y(values[-1]) + 21, name, "soft"))
    svg.append(label(panel.left, 336, f"The scripted expert's episode in assets/episode.jsonl, {turns} turns.", "soft"))
    return picture(850, 352, STYLE, svg)


class Counter:
    """Stands in for the model in an Engine: it only counts the tokens of forward passes."""

    def __init__(self):
        self.tokens = 0

    def __call__(self, tokens_BT, *_, **__):
        self.tokens += tokens_BT.numel()


def reuse(chat: Chat, model) -> list[tuple[int, int]]:
    """(ids kept from the turn before, ids computed) before each response of the expert's episode, by rollout.Engine."""
    tau = expert_episode(chat)
    engine = Engine(model, chat.end_id, slots=1, length=4096, max_new_tokens=64)
    counter = Counter()
    engine.model = counter
    out = []
    for t, turn in enumerate(tau.turns):
        h_t = context(chat, tau, t)
        before = counter.tokens
        engine.prefill(Request(0, h_t, random.Random(0)))
        computed = counter.tokens - before
        out.append((len(h_t) - 1 - computed, computed))
        # While it decodes, the engine feeds the last id of the context and all of the response but its last.
        engine.held[0] += [h_t[-1], *turn.action_ids[:-1]]
    return out


def cache_figure() -> str:
    chat, whole_chat = two_chats()
    model = load(ROOT / "worlds/base")
    svg = []
    both = (("past pages replaced (compression)", reuse(chat, model)), ("every page stays", reuse(whole_chat, model)))
    highest = round_up(max(kept + computed for _, turns in both for kept, computed in turns))
    for i, (title, turns) in enumerate(both):
        panel = Panel(70 + 400 * i, 46, 330, 220, 0.5, len(turns) + 0.5, 0, highest)
        svg += axes(panel, title, list(range(1, len(turns) + 1)), [highest * j // 4 for j in range(5)], "turn")
        for t, (kept, computed) in enumerate(turns):
            svg.append(panel.box(t + 0.7, 0.6, 0, kept, "kept"))
            svg.append(panel.box(t + 0.7, 0.6, kept, kept + computed, "new"))
        total = sum(computed for _, computed in turns)
        alone = sum(kept + computed for kept, computed in turns)
        svg.append(label(panel.left, 316, f"computes {total:,} ids; without a cache {alone:,}", "soft"))
    x = 70
    for kind, name in (("kept", "keys and values kept from the turn before"), ("new", "computed before the response")):
        svg.append(f'<rect class="{kind}" x="{x}" y="336" width="12" height="12" rx="2"/>')
        svg.append(label(x + 18, 346, name, "soft"))
        x += 290
    svg.append(label(70, 369, f"The scripted expert's episode in assets/episode.jsonl, {len(turns)} turns.", "soft"))
    return picture(850, 387, STYLE, svg)


FIGURES = {"advantage": advantage_figure, "clip": clip_figure, "loss-norms": loss_norms_figure,
           "compression": compression_figure, "cache": cache_figure}


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, default=ROOT / "assets/figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (args.out / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The error of training an episode under context compression as one flat sequence.

Plays episodes, scores their responses in three ways, and compares with the log-probs of the rollout:

    flat     one sequence per trajectory with every page replaced: no response sees the page it answered
             (the released code keeps the last page, but its mask hides it; see "masked")
    masked   the same, with the loss mask as attention mask: after the first user message only responses are
             visible (and the token that opens a response, which is kinder than hiding that as well)
    ours     each response in the context it was sampled from, packed

    python tests/tools/flat_sequence.py --model runs/bc --episodes 64 --out assets/flat_sequence
    python tests/tools/flat_sequence.py --redraw assets/flat_sequence    # the picture alone, from the figures in the .json
"""
import argparse
import asyncio
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import run  # noqa: F401  first: it sets up OpenMP before torch loads

import torch

from compress import Chat, Trajectory, micro_batches, open_chat, pack, trajectory_rows, trunk
from evaluate import Environment, SiteSettings
from model import Transformer, load, token_logprobs
from rollout import actions_help, rollout
from svg import Panel, picture, text
from worlds import load_tasks, open_sites

WAYS = {  # way: its name in the figure
    "flat": "flat sequence, pages replaced",
    "masked": "… and loss mask as attention mask",
    "ours": "ours: each response in its context",
}
WIDTH = 720
HEIGHT = 208
ROW_HEIGHT = 36
TICKS = {-7: "10⁻⁷", -6: "10⁻⁶", -5: "10⁻⁵", -4: "10⁻⁴", -3: "0.001", -2: "0.01", -1: "0.1", 0: "1"}  # by decade
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24211d; } .title { font-size: 14px; font-weight: 600; }
.tick { font-size: 11px; fill: #6d675f; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.paper { fill: #fff; } path { fill: none; } .axis { stroke: #9a948a; } .grid { stroke: #ece8e0; }
circle { fill: #cc5a1f; } circle.ours { fill: #12877a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e4dd; } .tick { fill: #a19a8f; } .paper { fill: #191817; }
  .axis { stroke: #7d776e; } .grid { stroke: #2d2a28; } circle { fill: #f0935a; } circle.ours { fill: #45c4b3; }
}
</style>"""


@torch.no_grad()
def flat(model: Transformer, chat: Chat, tau: Trajectory, masked: bool) -> list[list[float]]:
    """Log-probs of each turn's response in the flat sequence of the trajectory."""
    ids = trunk(chat, tau, len(tau.turns))
    logps = []
    seen = []  # positions that the loss mask leaves visible
    for t, turn in enumerate(tau.turns):
        # 1) Where the response stands.
        closed = chat.past_response(turn.response_ids)
        start = len(trunk(chat, tau, t + 1)) - len(closed)
        stop = start + len(turn.response_ids)
        response = list(range(start, stop))

        # 2) What it sees.
        context = list(range(start))
        if t == 0:
            seen = context
        if masked:
            opening = start - 1
            context = sorted({*seen, opening})
        seen = seen + response

        # 3) Score it. Leaving the other tokens out, at unchanged positions, masks them.
        kept = context + response
        kept_ids = [ids[i] for i in kept]
        action = [False] * len(context) + [True] * len(response)
        tokens_1T = torch.tensor([kept_ids])
        positions_1T = torch.tensor([kept])
        action_1T = torch.tensor([action])
        logp_N, _, _ = token_logprobs(model, tokens_1T, action_1T, positions_BT=positions_1T)
        logps.append(logp_N.tolist())
    return logps


@torch.no_grad()
def ours(model: Transformer, chat: Chat, tau: Trajectory) -> list[list[float]]:
    """Log-probs of each turn's response as training scores it."""
    rows = trajectory_rows(chat, tau)
    batch = micro_batches(rows, max_tokens=10**9)[0]
    logp_N, _, _ = token_logprobs(model, **pack(batch))
    counts = [row.n_action for row in batch]
    found = {}
    for row, logp in zip(batch, logp_N.split(counts)):
        found[row] = logp.tolist()
    return [found[row] for row in rows]


def score(way: str, model: Transformer, chat: Chat, tau: Trajectory) -> list[list[float]]:
    """Log-probs of each turn's response. way: one of WAYS."""
    if way == "ours":
        return ours(model, chat, tau)
    masked = way == "masked"
    return flat(model, chat, tau, masked)


def differences(way: str, model: Transformer, chat: Chat, episodes: list[Trajectory]) -> list[list[float]]:
    """Log-prob in training - log-prob in rollout: a list for each turn, over all episodes."""
    longest = max(len(tau.turns) for tau in episodes)
    by_turn = [[] for _ in range(longest)]
    for tau in episodes:
        scored = score(way, model, chat, tau)
        pairs = zip(tau.turns, scored, strict=True)
        for t, (turn, logps) in enumerate(pairs):
            for logp, logp_old in zip(logps, turn.logps, strict=True):
                by_turn[t].append(logp - logp_old)
    return by_turn


def mean_size(numbers: list[float]) -> float:
    return sum(map(abs, numbers)) / len(numbers)


def compare(model: Transformer, chat: Chat, episodes: list[Trajectory], eps: float = 0.2) -> dict:
    """For each way: mean |difference| to the rollout, in total and by turn; share outside 1 ± eps."""
    result = {}
    for way in WAYS:
        by_turn = differences(way, model, chat, episodes)
        delta_N = torch.tensor(sum(by_turn, []), dtype=torch.float64)
        gap_N = delta_N.abs()
        rho_N = delta_N.exp()
        outside_N = (rho_N - 1).abs() > eps
        result[way] = {
            "mean": gap_N.mean().item(),
            "max": gap_N.max().item(),
            "tokens": len(delta_N),
            "outside_clip": outside_N.double().mean().item(),
            "by_turn": [mean_size(turn) for turn in by_turn],
        }
    return result


def axis(panel: Panel) -> list[str]:
    """A vertical line and a number at each decade."""
    svg = []
    for decade, name in TICKS.items():
        svg.append(panel.plumb(decade, "grid"))
        svg.append(text(panel.x(decade), panel.bottom + 16, name, "tick middle"))
    svg.append(panel.level(0, "axis"))
    return svg


def figure(result: dict) -> str:
    """A dot for each way on a logarithmic axis, as SVG."""
    panel = Panel(
        left=240,
        top=44,
        width=400,
        height=ROW_HEIGHT * len(WAYS),
        x_low=min(TICKS),
        x_high=max(TICKS) + 0.1,
        y_low=0,
        y_high=len(WAYS),
    )
    svg = [text(16, 26, "mean |log-prob in training − log-prob in rollout| per action token", "title")]
    svg += axis(panel)
    for i, (way, name) in enumerate(WAYS.items()):
        mean = result[way]["mean"]
        x = panel.x(math.log10(mean))
        y = panel.y(len(WAYS) - i - 0.5)
        written = f"{mean:.2g}"
        if mean < 0.001:
            written = f"{mean:.1e}"
        svg.append(text(panel.left - 12, y + 4, name, "end"))
        svg.append(f'<circle class="{way}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        svg.append(text(x + 11, y + 4, written))
    tokens = result["ours"]["tokens"]
    said = f"{result['episodes']} episodes, {tokens:,} action tokens, float32; logarithmic axis"
    svg.append(text(16, HEIGHT - 14, said, "tick"))
    return picture(WIDTH, HEIGHT, STYLE, svg)


def play(model: Transformer, chat: Chat, count: int) -> list[Trajectory]:
    """Sampled episodes of the sandbox's test split, without those that broke before their first turn."""
    settings = SiteSettings(max_turns=10, max_new_tokens=64, max_context=1536)
    with open_sites("sandbox:test") as sites:
        tasks = load_tasks(f"sandbox:test:{count}", sites)
        env = Environment(sites, "runs/flat_sequence", settings)
        env.begin_batch(tasks)
        played = asyncio.run(rollout(model, chat, tasks, env, settings))
    return [tau for tau in played if tau.turns]


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--model", default="worlds/base")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--out", help="write OUT.json and OUT.svg")
    parser.add_argument("--redraw", metavar="OUT", help="write OUT.svg from OUT.json, and play nothing")
    args = parser.parse_args()

    if args.redraw:
        result = json.loads(Path(args.redraw + ".json").read_text())
        Path(args.redraw + ".svg").write_text(figure(result), encoding="utf-8")
        return

    chat = open_chat(args.model, actions_help())
    model = load(args.model)
    episodes = play(model, chat, args.episodes)
    result = compare(model, chat, episodes)

    tokens = result["ours"]["tokens"]
    said = f"{len(episodes)} episodes of {args.model}, {tokens} action tokens, float32"
    print(said)
    print()
    print(f"{'':8}  mean |Δ|   max |Δ|  ratio outside 1 ± 0.2")
    for name, row in result.items():
        print(f"{name:8} {row['mean']:9.1e} {row['max']:9.1e} {row['outside_clip']:22.1%}")

    if args.out:
        result["episodes"] = len(episodes)
        result["model"] = args.model
        figures = json.dumps(result, indent=1) + "\n"
        Path(args.out + ".json").write_text(figures)
        Path(args.out + ".svg").write_text(figure(result), encoding="utf-8")


if __name__ == "__main__":
    main()

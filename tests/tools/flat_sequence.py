"""The error of training an episode under context compression as one flat sequence.

Plays episodes, scores their responses in three ways, and compares with the log-probs of the rollout:

    flat     one sequence per trajectory with every page replaced: no response sees the page it answered
             (the released code keeps the last page, but its mask hides it; see "masked")
    masked   the same, with the loss mask as attention mask: after the first user message only responses are
             visible (and the token that opens a response, which is kinder than hiding that as well)
    ours     each response in the context it was sampled from, packed

    python tests/tools/flat_sequence.py --model runs/bc --episodes 64 --out assets/flat_sequence
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
from worlds import load_tasks, open_sites

WAYS = {  # way: (its name in the figure, its color there)
    "flat": ("one flat sequence, pages replaced", "#d1495b"),
    "masked": ("... and loss mask as attention mask", "#8d2e3c"),
    "ours": ("ours: each in its context", "#2a9d8f"),
}


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


def bar(y: int, name: str, mean: float, color: str) -> list[str]:
    """38 pixels a decade, from 1e-8 on; name on the left, figure on the right."""
    decades = math.log10(mean) + 8
    length = max(2, 38 * decades)
    end = 260 + length
    return [
        f'<text x="250" y="{y + 17}" text-anchor="end">{name}</text>',
        f'<rect x="260" y="{y}" width="{length:.0f}" height="24" fill="{color}"/>',
        f'<text x="{end + 8:.0f}" y="{y + 17}">{mean:.1e}</text>',
    ]


def figure(result: dict, said: str) -> str:
    """Bars on a logarithmic scale from 1e-8, as SVG."""
    svg = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="190" font-family="sans-serif" font-size="14">',
        '<rect width="720" height="190" fill="white"/>',
        '<text x="16" y="26" font-weight="bold">',
        "mean |log-prob in training − log-prob in rollout| per action token</text>",
    ]
    y = 46
    for way, (name, color) in WAYS.items():
        svg += bar(y, name, result[way]["mean"], color)
        y += 36
    said += "; bars on a logarithmic scale from 1e-8"
    svg.append(f'<text x="16" y="176" font-size="12" fill="#555">{said}</text>')
    svg.append("</svg>\n")
    return "\n".join(svg)


def play(model: Transformer, chat: Chat, count: int) -> list[Trajectory]:
    """Sampled episodes of the sandbox's test split, without those that broke before their first turn."""
    settings = SiteSettings(max_turns=10, max_new_tokens=64, max_context=1536)
    with open_sites("sandbox:test") as sites:
        tasks = load_tasks(f"sandbox:test:{count}", sites)
        env = Environment(sites, "runs/flat_sequence", settings)
        env.reset(tasks)
        played = asyncio.run(rollout(model, chat, tasks, env, settings))
    return [tau for tau in played if tau.turns]


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--model", default="worlds/base")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--out", help="write OUT.json and OUT.svg")
    args = parser.parse_args()

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
        picture = figure(result, said)
        Path(args.out + ".json").write_text(figures)
        Path(args.out + ".svg").write_text(picture)


if __name__ == "__main__":
    main()

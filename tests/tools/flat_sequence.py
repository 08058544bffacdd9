"""The error of training an episode under context compression as one flat sequence.

Plays episodes, scores their responses in three ways, and compares with the log-probs of the rollout:

    flat     one sequence per trajectory with every page replaced: no response sees the page it answered
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
from evaluate import SiteSettings, Environment
from model import Transformer, load, token_logprobs
from rollout import actions_help, rollout
from worlds import load_tasks, open_sites


@torch.no_grad()
def flat(model: Transformer, chat: Chat, tau: Trajectory, masked: bool) -> list[list[float]]:
    """Log-probs of each turn's response in the flat sequence of the trajectory."""
    ids, out, seen = trunk(chat, tau, len(tau.turns)), [], []  # seen: what the loss mask leaves visible
    for t, turn in enumerate(tau.turns):
        begin = len(trunk(chat, tau, t + 1)) - len(chat.past_response(turn.action_ids))
        response = list(range(begin, begin + len(turn.action_ids)))
        seen = seen or list(range(begin))
        context = sorted({*seen, begin - 1}) if masked else list(range(begin))
        kept = context + response  # leaving the others out, at unchanged positions, masks them
        tokens_BT, positions_BT = torch.tensor([[ids[i] for i in kept]]), torch.tensor([kept])
        action_BT = torch.tensor([[False] * len(context) + [True] * len(response)])
        logp_N, _, _ = token_logprobs(model, tokens_BT, action_BT, positions_BT=positions_BT)
        out.append(logp_N.tolist())
        seen = seen + response
    return out


@torch.no_grad()
def ours(model: Transformer, chat: Chat, tau: Trajectory) -> list[list[float]]:
    rows = trajectory_rows(chat, tau)
    batch = micro_batches(rows, 10**9)[0]
    logp_N, _, _ = token_logprobs(model, **pack(batch))
    found = {}
    for row, logp in zip(batch, logp_N.split([row.n_action for row in batch])):
        found[id(row)] = logp.tolist()
    return [found[id(row)] for row in rows]


def compare(model: Transformer, chat: Chat, episodes: list[Trajectory], eps: float = 0.2) -> dict:
    """For each way: mean |difference| to the rollout, in total and by turn; share outside 1 ± eps."""
    ways = {"flat": lambda tau: flat(model, chat, tau, False),
            "masked": lambda tau: flat(model, chat, tau, True), "ours": lambda tau: ours(model, chat, tau)}
    result = {}
    for name, way in ways.items():
        by_turn: list[list[float]] = [[] for _ in range(max(len(tau.turns) for tau in episodes))]
        for tau in episodes:
            for t, (turn, logps) in enumerate(zip(tau.turns, way(tau), strict=True)):
                by_turn[t] += [a - b for a, b in zip(logps, turn.logps, strict=True)]
        delta_N = torch.tensor(sum(by_turn, []), dtype=torch.float64)
        result[name] = {"mean": float(delta_N.abs().mean()), "max": float(delta_N.abs().max()),
                        "tokens": len(delta_N),
                        "outside_clip": float(((delta_N.exp() - 1).abs() > eps).double().mean()),
                        "by_turn": [sum(map(abs, turn)) / len(turn) for turn in by_turn]}
    return result


def figure(result: dict, said: str) -> str:
    """Bars on a logarithmic scale from 1e-8, as SVG."""
    svg = ['<svg xmlns="http://www.w3.org/2000/svg" width="720" height="190" font-family="sans-serif" '
           'font-size="14">', '<rect width="720" height="190" fill="white"/>',
           '<text x="16" y="26" font-weight="bold">',
           "mean |log-prob in training − log-prob in rollout| per action token</text>"]
    for y, way, name, color in ((46, "flat", "one flat sequence, pages replaced", "#d1495b"),
                                (82, "masked", "... and loss mask as attention mask", "#8d2e3c"),
                                (118, "ours", "ours: each in its context", "#2a9d8f")):
        mean = result[way]["mean"]
        length = max(2, 38 * (8 + math.log10(mean)))
        svg += [f'<text x="250" y="{y + 17}" text-anchor="end">{name}</text>',
                f'<rect x="260" y="{y}" width="{length:.0f}" height="24" fill="{color}"/>',
                f'<text x="{268 + length:.0f}" y="{y + 17}">{mean:.1e}</text>']
    said += "; bars on a logarithmic scale from 1e-8"
    return "\n".join([*svg, f'<text x="16" y="176" font-size="12" fill="#555">{said}</text>', "</svg>\n"])


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--model", default="worlds/base")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--out", help="write OUT.json and OUT.svg")
    args = parser.parse_args()
    chat, model = open_chat(args.model, actions_help()), load(args.model)
    settings = SiteSettings(max_turns=10, max_new_tokens=64, max_context=1536)
    with open_sites("sandbox:test") as sites:
        tasks = load_tasks(f"sandbox:test:{args.episodes}", sites)
        env = Environment(sites, "runs/flat_sequence", settings)
        env.reset(tasks)
        played = asyncio.run(rollout(model, chat, tasks, env, settings))
    episodes = [tau for tau in played if tau.turns]
    result = compare(model, chat, episodes)
    said = f"{len(episodes)} episodes of {args.model}, {result['ours']['tokens']} action tokens, float32"
    print(f"{said}\n\n{'':8}  mean |Δ|   max |Δ|  ratio outside 1 ± 0.2")
    for name, row in result.items():
        print(f"{name:8} {row['mean']:9.1e} {row['max']:9.1e} {row['outside_clip']:22.1%}")
    if args.out:
        result |= {"episodes": len(episodes), "model": args.model}
        Path(args.out + ".json").write_text(json.dumps(result, indent=1) + "\n")
        Path(args.out + ".svg").write_text(figure(result, said))


if __name__ == "__main__":
    main()

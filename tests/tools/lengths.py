"""Prints how many turns episodes take and how long their contexts get, compressed and with every page kept.

    python bc.py --split long-train --demos 110 --max-turns 20 --max-context 4096 --epochs 0.01 --out runs/long-train
    python tests/tools/lengths.py runs/long-train/demos.jsonl

A context is what a response is sampled from: history, page, and the opening of the response. The largest that a run
can have is --max-context less --max-new-tokens.
"""
import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

from compress import Chat, Trajectory, context, open_chat, replay  # noqa: E402

TURNS = (1, 5, 10, 15)


def middle(counts: list[int]) -> str:
    """median (largest)"""
    median = statistics.median(counts)
    return f"{median:.0f} ({max(counts)})"


def turns_table(records: list[dict]) -> list[str]:
    """Turns per template."""
    turns = defaultdict(list)
    for record in records:
        template = record["template"]
        turns[template].append(len(record["turns"]))

    lines = ["template  episodes  turns: min  median  max"]
    for template, counts in turns.items():
        episodes = len(counts)
        median = statistics.median(counts)
        lines.append(f"{template:8}  {episodes:8}  {min(counts):10}  {median:6.1f}  {max(counts):3}")
    return lines


def contexts(chat: Chat, episodes: list[Trajectory]) -> list[list[int]]:
    """Tokens of the context of every turn of every episode: a list for each episode."""
    of_episodes = []
    for episode in episodes:
        of_turns = []
        for t in range(len(episode.turns)):
            h_j = context(chat, episode, t)
            of_turns.append(len(h_j))
        of_episodes.append(of_turns)
    return of_episodes


def at_turn(lengths: list[list[int]], turn: int) -> list[int]:
    """The contexts of one turn (from 1), of the episodes that reach it."""
    return [of_turns[turn - 1] for of_turns in lengths if len(of_turns) >= turn]


def lengths_row(name: str, compressed: list[int], whole: list[int]) -> str:
    """compressed, whole: tokens, a number for each episode."""
    episodes = len(compressed)
    return f"{name:24}  {episodes:8}  {middle(compressed):>12}  {middle(whole):>15}"


def lengths_table(chat: Chat, episodes: list[Trajectory]) -> list[str]:
    """Contexts at some turns, the largest of an episode, and all that an episode's turns add up to."""
    everything = Chat(chat.tokenizer, chat.system, chat.think, compress=False)
    compressed = contexts(chat, episodes)
    whole = contexts(everything, episodes)

    lines = ["tokens: median (largest)  episodes    compressed  every page kept"]
    for turn in TURNS:
        short = at_turn(compressed, turn)
        long = at_turn(whole, turn)
        if short:
            lines.append(lengths_row(f"context at turn {turn}", short, long))

    short = [max(of_turns) for of_turns in compressed]
    long = [max(of_turns) for of_turns in whole]
    lines.append(lengths_row("largest context", short, long))

    short = [sum(of_turns) for of_turns in compressed]
    long = [sum(of_turns) for of_turns in whole]
    lines.append(lengths_row("all contexts, summed", short, long))
    return lines


def responses_line(episodes: list[Trajectory]) -> str:
    responses = []
    pages = []
    for episode in episodes:
        for turn in episode.turns:
            responses.append(len(turn.response_ids))
            pages.append(len(turn.message_ids))
    return f"tokens of a response: {middle(responses)}; of a page: {middle(pages)}"


def report(chat: Chat, path: Path) -> str:
    """All about the episodes of one file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    episodes = [replay(chat, record) for record in records]
    parts = [
        str(path),
        "\n".join(turns_table(records)),
        "\n".join(lengths_table(chat, episodes)),
        responses_line(episodes),
    ]
    return "\n\n".join(parts)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("trajectories", nargs="+", type=Path, help="demos.jsonl or trajectories.jsonl of runs")
    parser.add_argument("--model", default=str(ROOT / "worlds/base"), help="whose tokenizer and prompt to use")
    args = parser.parse_args()
    chat = open_chat(args.model, actions_help="")
    for path in args.trajectories:
        print(report(chat, path), end="\n\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"lengths.py: {error}")

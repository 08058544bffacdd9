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


def middle(numbers: list[int]) -> str:
    return f"{statistics.median(numbers):.0f} ({max(numbers)})"


def turns_table(records: list[dict]) -> list[str]:
    """Turns per template."""
    turns = defaultdict(list)
    for record in records:
        turns[record["template"]].append(len(record["turns"]))
    lines = ["template  episodes  turns: min  median  max"]
    for template, counts in turns.items():
        median = statistics.median(counts)
        lines.append(f"{template:8}  {len(counts):8}  {min(counts):10}  {median:6.1f}  {max(counts):3}")
    return lines


def contexts(chat: Chat, episodes: list[Trajectory]) -> list[list[int]]:
    """Tokens of the context of every turn of every episode."""
    lengths = []
    for episode in episodes:
        lengths.append([len(context(chat, episode, t)) for t in range(len(episode.turns))])
    return lengths


def lengths_table(chat: Chat, episodes: list[Trajectory]) -> list[str]:
    """Contexts at some turns, the largest of an episode, and all that an episode's turns add up to."""
    everything = Chat(chat.tokenizer, chat.system, chat.think, compress=False)
    compressed = contexts(chat, episodes)
    whole = contexts(everything, episodes)

    lines = ["tokens: median (largest)  episodes    compressed  every page kept"]
    for turn in TURNS:
        short = [lengths[turn - 1] for lengths in compressed if len(lengths) >= turn]
        long = [lengths[turn - 1] for lengths in whole if len(lengths) >= turn]
        if short:
            lines.append(f"{f'context at turn {turn}':24}  {len(short):8}  {middle(short):>12}  {middle(long):>15}")
    for name, measure in (("largest context", max), ("all contexts, summed", sum)):
        short = [measure(lengths) for lengths in compressed]
        long = [measure(lengths) for lengths in whole]
        lines.append(f"{name:24}  {len(short):8}  {middle(short):>12}  {middle(long):>15}")
    return lines


def responses_line(episodes: list[Trajectory]) -> str:
    lengths = [len(turn.action_ids) for episode in episodes for turn in episode.turns]
    pages = [len(turn.observation_ids) for episode in episodes for turn in episode.turns]
    return f"tokens of a response: {middle(lengths)}; of a page: {middle(pages)}"


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("trajectories", nargs="+", type=Path, help="demos.jsonl or trajectories.jsonl of runs")
    parser.add_argument("--model", default=str(ROOT / "worlds/base"), help="whose tokenizer and prompt to use")
    args = parser.parse_args()
    chat = open_chat(args.model, actions_help="")
    for path in args.trajectories:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        episodes = [replay(chat, record) for record in records]
        parts = [[str(path)], turns_table(records), lengths_table(chat, episodes), [responses_line(episodes)]]
        print("\n\n".join("\n".join(part) for part in parts), end="\n\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"lengths.py: {error}")

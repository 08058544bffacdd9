"""Prints what compression and packing save on an episode, in tokens.

    python tests/tools/savings.py                     # the scripted expert's episode in assets/episode.jsonl
    python tests/tools/savings.py runs/x/trajectories.jsonl --model runs/x
"""
import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

from compress import Chat, context, micro_batches, open_chat, pack, replay, trajectory_rows  # noqa: E402


def table(chat: Chat, record: dict) -> str:
    """A line for each turn of an episode, and what training on it takes."""
    episode = replay(chat, record)
    everything = Chat(chat.tokenizer, chat.system, chat.think, compress=False)
    lines = [f"{episode.task['intent']}\n", "turn    page  every page kept  compressed  (tokens)"]
    for t, turn in enumerate(episode.turns):
        kept = len(context(everything, episode, t))
        compressed = len(context(chat, episode, t))
        lines.append(f"{t:4} {len(turn.observation_ids):7} {kept:16} {compressed:11}")

    rows = trajectory_rows(chat, episode)
    alone = sum(len(row.ids) for row in rows)
    packed = pack(micro_batches(rows, max_tokens=10**9)[0])["tokens_BT"].numel()
    lines.append(f"\ntraining on it: {alone} tokens with one row per turn, {packed} packed "
                 f"({alone / packed:.2f} times fewer)")
    return "\n".join(lines)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("trajectories", nargs="?", type=Path, default=ROOT / "assets/episode.jsonl",
                        help="a trajectories.jsonl, whose longest episode is shown")
    parser.add_argument("--model", default=str(ROOT / "worlds/base"), help="whose tokenizer and prompt to use")
    args = parser.parse_args()
    chat = open_chat(args.model, actions_help="")
    lines = args.trajectories.read_text(encoding="utf-8").splitlines()
    record = max((json.loads(line) for line in lines), key=lambda record: len(record["turns"]))
    print(table(chat, record))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"savings.py: {error}")

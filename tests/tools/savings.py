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

from compress import Chat, Trajectory, context, micro_batches, open_chat, pack, replay  # noqa: E402
from compress import trajectory_rows  # noqa: E402


def contexts_table(chat: Chat, episode: Trajectory) -> list[str]:
    """A line for each turn: tokens of its page, and of its context with every page kept and compressed."""
    everything = Chat(chat.tokenizer, chat.system, chat.think, compress=False)
    lines = ["turn    page  every page kept  compressed  (tokens)"]
    for t, turn in enumerate(episode.turns):
        page = len(turn.message_ids)
        kept = len(context(everything, episode, t))
        compressed = len(context(chat, episode, t))
        lines.append(f"{t:4} {page:7} {kept:16} {compressed:11}")
    return lines


def training_line(chat: Chat, episode: Trajectory) -> str:
    """What training on the episode takes, before and after packing."""
    rows = trajectory_rows(chat, episode)
    alone = sum(len(row.ids) for row in rows)
    batch = micro_batches(rows, max_tokens=10**9)[0]
    packed = pack(batch)["tokens_BT"].numel()
    times = alone / packed
    return f"training on it: {alone} tokens with one row per turn, {packed} packed ({times:.2f} times fewer)"


def report(chat: Chat, record: dict) -> str:
    """record: a line of trajectories.jsonl."""
    episode = replay(chat, record)
    lines = [episode.task["intent"], ""]
    lines += contexts_table(chat, episode)
    lines += ["", training_line(chat, episode)]
    return "\n".join(lines)


def length(record: dict) -> int:
    return len(record["turns"])


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("trajectories", nargs="?", type=Path, default=ROOT / "assets/episode.jsonl",
                        help="a trajectories.jsonl, whose longest episode is shown")
    parser.add_argument("--model", default=str(ROOT / "worlds/base"), help="whose tokenizer and prompt to use")
    args = parser.parse_args()
    chat = open_chat(args.model, actions_help="")
    lines = args.trajectories.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    longest = max(records, key=length)
    print(report(chat, longest))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"savings.py: {error}")

"""Draws assets/packing.svg: how compress.pack writes an episode, to scale.

    python tests/tools/packing.py                       # the scripted expert's episode in assets/episode.jsonl
    python tests/tools/packing.py runs/x/trajectories.jsonl --model runs/x --out packing.svg

Above, a line for each turn, in the order of `pack`. The first one is written whole. Of every other turn only that is
written which the line above it does not have; it attends to the rest, which the dashed box spans. Below, the same
tokens as one flat row, and what one row per turn would take.
"""
import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

from compress import Chat, Trajectory, micro_batches, open_chat, pack, past_turn, replay  # noqa: E402
from compress import trajectory_rows  # noqa: E402
from svg import picture, text  # noqa: E402

WIDTH = 850
LEFT = 92    # of the bars
RIGHT = 24   # room beside the longest bar
TOP = 78     # of the first bar
BAR = 17     # height of a bar
STEP = 27    # from one turn's bar to the next
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24211d; } .soft { fill: #6d675f; } .paper { fill: #fff; }
.system { fill: #b3aa9b; } .placeholder { fill: #b48ad6; } .page { fill: #efcf8d; }
.trained { fill: #1f6f9f; } .context { fill: #a3c8dd; }
.seen { fill: none; stroke: #b3aa9b; stroke-dasharray: 3 3; } .line { stroke: #9a948a; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8e4dd; } .soft { fill: #a19a8f; } .paper { fill: #191817; }
  .system { fill: #6b645b; } .placeholder { fill: #8659ad; } .page { fill: #94742f; }
  .trained { fill: #7cc4ee; } .context { fill: #33627c; }
  .seen { stroke: #6b645b; } .line { stroke: #8a847a; }
}
</style>"""
LEGEND = (
    ("system", "system prompt"),
    ("placeholder", "placeholder"),
    ("context", "past response"),
    ("page", "page"),
    ("trained", "trained response"),
    ("seen", "attended to, not repeated"),
)
Parts = list[tuple[str, int]]  # [(kind, a key of LEGEND; tokens)]


@dataclass
class Line:
    """One turn in the picture."""
    turn: int     # from 0
    parts: Parts  # of its row
    seen: int     # how many of the row's tokens the line above has


def row_parts(chat: Chat, episode: Trajectory, t: int) -> Parts:
    """Turn t's row: system prompt, then what it remembers of each earlier turn, its page, its response."""
    past_page = "page"
    if chat.compress:
        past_page = "placeholder"

    parts = [("system", len(chat.system_ids()))]
    for k in range(t):
        remembered = len(past_turn(chat, episode, k))
        response = len(chat.past_response(episode.turns[k].response_ids))
        parts.append((past_page, remembered - response))
        parts.append(("context", response))
    turn = episode.turns[t]
    parts.append(("page", len(turn.message_ids)))
    parts.append(("trained", len(turn.response_ids)))
    return parts


def count(parts: Parts) -> int:
    return sum(tokens for _, tokens in parts)


def after(parts: Parts, seen: int) -> Parts:
    """What is left of the parts behind the first `seen` tokens."""
    left = []
    for kind, tokens in parts:
        skipped = min(seen, tokens)
        seen -= skipped
        if tokens > skipped:
            left.append((kind, tokens - skipped))
    return left


def bars(x: float, y: float, parts: Parts, scale: float, height: int = BAR) -> list[str]:
    """Boxes side by side from x on; scale: pixels a token."""
    svg = []
    for kind, tokens in parts:
        width = max(tokens * scale - 1, 0.6)
        size = f'width="{width:.1f}" height="{height}"'
        svg.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" {size} rx="2"/>')
        x += tokens * scale
    return svg


def legend() -> list[str]:
    svg = []
    x = 20
    for kind, name in LEGEND:
        svg.append(f'<rect class="{kind}" x="{x}" y="16" width="12" height="12" rx="2"/>')
        svg.append(f'<text class="soft" x="{x + 17}" y="26">{name}</text>')
        x += 36 + 6.4 * len(name)  # wide enough for any system's font
    return svg


def turns(lines: list[Line]) -> list[str]:
    """A line for each turn."""
    longest = max(count(line.parts) for line in lines)
    scale = (WIDTH - LEFT - RIGHT) / longest
    note = ("each turn is written from where it differs from the turn above "
            "(the first placeholder comes with the task)")
    svg = [text(LEFT, TOP - 17, note, "soft")]
    y = TOP
    for line in lines:
        start = LEFT + line.seen * scale
        svg.append(text(20, y + 13, f"turn {line.turn + 1}"))
        if line.seen:
            above = y - STEP + BAR + 1
            svg.append(f'<path class="line" d="M{start - 0.5:.1f} {above}V{y - 1}"/>')
            svg += bars(LEFT, y, [("seen", line.seen)], scale)
        written = after(line.parts, line.seen)
        svg += bars(start, y, written, scale)
        y += STEP
    return svg


def flat_row(y: int, name: str, parts: Parts, scale: float, said: str) -> list[str]:
    """One long row, its name on its left and a sentence below it."""
    svg = [text(20, y + 13, name)]
    svg += bars(LEFT, y, parts, scale)
    svg.append(text(LEFT, y + BAR + 16, said, "soft"))
    return svg


def comparison(lines: list[Line], written: int, top: int) -> list[str]:
    """The tokens as `pack` writes them, and with one row per turn, at one scale."""
    whole = []
    packed = []
    for line in lines:
        whole += line.parts
        packed += after(line.parts, line.seen)
    alone = count(whole)
    assert written == count(packed)

    scale = (WIDTH - LEFT - RIGHT) / alone
    times = alone / written
    said = f"{written:,} tokens in one row"
    said_of_whole = f"{alone:,} tokens with one row per turn: {times:.1f} times as many"
    svg = flat_row(top, "packed", packed, scale, said)
    svg += flat_row(top + 52, "unpacked", whole, scale, said_of_whole)
    return svg


def draw(chat: Chat, record: dict) -> str:
    """A line of trajectories.jsonl as SVG."""
    episode = replay(chat, record)
    rows = trajectory_rows(chat, episode)
    batch = micro_batches(rows, max_tokens=10**9)[0]
    packed = pack(batch)
    lines = []
    for row, (start, stop, *_) in zip(batch, packed["segments"]):
        t = rows.index(row)
        parts = row_parts(chat, episode, t)
        written = stop - start
        seen = len(row.ids) - written
        lines.append(Line(t, parts, seen))

    below = TOP + STEP * len(lines) + 22
    tokens = packed["tokens_BT"].numel()
    svg = legend()
    svg += turns(lines)
    svg += comparison(lines, tokens, below)
    return picture(WIDTH, below + 102, STYLE, svg)


def length(record: dict) -> int:
    return len(record["turns"])


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("trajectories", nargs="?", type=Path, default=ROOT / "assets/episode.jsonl",
                        help="a trajectories.jsonl; its longest episode is drawn")
    parser.add_argument("--model", default=str(ROOT / "worlds/base"), help="the checkpoint whose tokenizer counts")
    parser.add_argument("--out", type=Path, default=ROOT / "assets/packing.svg")
    args = parser.parse_args()
    lines = args.trajectories.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    longest = max(records, key=length)
    chat = open_chat(args.model, actions_help="")
    args.out.write_text(draw(chat, longest), encoding="utf-8")


if __name__ == "__main__":
    main()

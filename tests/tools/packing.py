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
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

from compress import (PLACEHOLDER, Chat, Trajectory, micro_batches, open_chat, pack, past, replay,  # noqa: E402
                      trajectory_rows)
from svg import picture  # noqa: E402

WIDTH, LEFT, RIGHT = 850, 92, 24
BAR, STEP = 17, 27  # height of a bar, and from one turn's bar to the next, in pixels
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
LEGEND = (("system", "system prompt"), ("placeholder", "placeholder"), ("context", "past response"), ("page", "page"),
          ("trained", "trained response"), ("seen", "attended to, not repeated"))


def parts_of(chat: Chat, episode: Trajectory, t: int) -> list[tuple[str, int]]:
    """Turn t's row as (kind, tokens): system prompt, then what it remembers of each earlier turn, its page, its response."""
    parts = [("system", len(chat.system_ids()))]
    for k in range(t):
        placeholder = len(chat.user_ids(episode.task, k, PLACEHOLDER))
        parts.append(("placeholder", placeholder))
        parts.append(("context", len(past(chat, episode, k)) - placeholder))
    turn = episode.turns[t]
    return parts + [("page", len(turn.observation_ids)), ("trained", len(turn.action_ids))]


def after(parts: list[tuple[str, int]], seen: int) -> list[tuple[str, int]]:
    """What is left of the parts behind the first `seen` tokens."""
    left = []
    for kind, tokens in parts:
        skipped = min(seen, tokens)
        seen -= skipped
        if tokens > skipped:
            left.append((kind, tokens - skipped))
    return left


def bars(x: float, y: float, parts: list[tuple[str, int]], scale: float, height: int = BAR) -> list[str]:
    """Boxes side by side from x on; scale: pixels a token."""
    svg = []
    for kind, tokens in parts:
        width = max(tokens * scale - 1, 0.6)
        svg.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2"/>')
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


def turns(lines: list[tuple], top: int) -> list[str]:
    """A line for each turn. lines: (turn, the parts of its row, how many tokens of it the line above has)."""
    longest = max(sum(tokens for _, tokens in parts) for _, parts, _ in lines)
    scale = (WIDTH - LEFT - RIGHT) / longest
    svg = [f'<text class="soft" x="{LEFT}" y="{top - 17}">each turn is written from where it differs from the turn above '
           "(the first placeholder comes with the task)</text>"]
    for i, (t, parts, seen) in enumerate(lines):
        y = top + STEP * i
        start = LEFT + seen * scale
        svg.append(f'<text x="20" y="{y + 13}">turn {t + 1}</text>')
        if seen:
            svg.append(f'<path class="line" d="M{start - 0.5:.1f} {y - STEP + BAR + 1}V{y - 1}"/>')
            svg += bars(LEFT, y, [("seen", seen)], scale)
        svg += bars(start, y, after(parts, seen), scale)
    return svg


def comparison(lines: list[tuple], written: int, top: int) -> list[str]:
    """The tokens as `pack` writes them, and with one row per turn, at one scale."""
    whole = []
    packed = []
    for _, parts, seen in lines:
        whole += parts
        packed += after(parts, seen)
    alone = sum(tokens for _, tokens in whole)
    assert written == sum(tokens for _, tokens in packed)
    scale = (WIDTH - LEFT - RIGHT) / alone
    svg = []
    for y, name, parts, tokens in ((top, "packed", packed, written), (top + 52, "unpacked", whole, alone)):
        svg.append(f'<text x="20" y="{y + 13}">{name}</text>')
        svg += bars(LEFT, y, parts, scale)
        said = f"{tokens:,} tokens in one row"
        if parts is whole:
            said = f"{tokens:,} tokens with one row per turn: {alone / written:.1f} times as many"
        svg.append(f'<text class="soft" x="{LEFT}" y="{y + BAR + 16}">{said}</text>')
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
        seen = len(row.ids) - (stop - start)
        lines.append((t, parts_of(chat, episode, t), seen))
    top = 78
    below = top + STEP * len(lines) + 22
    svg = legend()
    svg += turns(lines, top)
    svg += comparison(lines, packed["tokens_BT"].numel(), below)
    return picture(WIDTH, below + 102, STYLE, svg)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("trajectories", nargs="?", type=Path, default=ROOT / "assets/episode.jsonl",
                        help="a trajectories.jsonl; its longest episode is drawn")
    parser.add_argument("--model", default=str(ROOT / "worlds/base"), help="the checkpoint whose tokenizer counts")
    parser.add_argument("--out", type=Path, default=ROOT / "assets/packing.svg")
    args = parser.parse_args()
    lines = args.trajectories.read_text(encoding="utf-8").splitlines()
    record = max((json.loads(line) for line in lines), key=lambda record: len(record["turns"]))
    chat = open_chat(args.model, actions_help="")
    args.out.write_text(draw(chat, record), encoding="utf-8")


if __name__ == "__main__":
    main()

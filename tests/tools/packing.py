"""Draws assets/packing.svg: how compress.pack writes an episode, to scale.

    python tests/tools/packing.py                       # the scripted expert's episode in assets/episode.jsonl
    python tests/tools/packing.py runs/x/trajectories.jsonl --model runs/x --out packing.svg

Above, a line for each turn, the last one first, as `pack` orders them. The last turn is written whole and so
holds the shared history of all others. Of every other turn only its page and response are written; it
attends to the part of the history that the dashed box spans. Below, the same tokens as one flat row, and
what one row per turn would take.
"""
import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402,F401  first: it sets up OpenMP before torch loads

from compress import (PLACEHOLDER, Chat, Row, Trajectory, micro_batches, open_chat, pack, past, replay,  # noqa: E402
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


def history(chat: Chat, episode: Trajectory, t: int) -> list[tuple[str, int]]:
    """What turn t remembers, as (kind, tokens): the system prompt, then of each earlier turn two parts."""
    parts = [("system", len(chat.system_ids()))]
    for k in range(t):
        placeholder = len(chat.user_ids(episode.task, k, PLACEHOLDER))
        parts.append(("placeholder", placeholder))
        parts.append(("context", len(past(chat, episode, k)) - placeholder))
    return parts


def leaf(row: Row) -> list[tuple[str, int]]:
    """What only this turn sees: its page, whole, and its response."""
    return [("page", len(row.leaf) - row.n_action), ("trained", row.n_action)]


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


def turns(chat: Chat, episode: Trajectory, order: list[tuple[int, Row]], top: int) -> list[str]:
    """A line for each turn. order: (turn, its row) as `pack` writes them, the last turn first."""
    last, longest = order[0]
    scale = (WIDTH - LEFT - RIGHT) / len(longest.ids)
    end = LEFT + longest.prefix * scale
    svg = [f'<path class="line" d="M{LEFT} {top - 6}v-5H{end:.1f}v5"/>',
           f'<text class="soft" x="{LEFT}" y="{top - 17}">the shared history, written once, inside the last turn '
           "(the first placeholder comes with the task)</text>"]
    for i, (t, row) in enumerate(order):
        y = top + STEP * i
        start = LEFT + row.prefix * scale
        svg.append(f'<text x="20" y="{y + 13}">turn {t + 1}</text>')
        if t == last:
            svg += bars(LEFT, y, history(chat, episode, t), scale)
        else:
            svg.append(f'<path class="line" d="M{start - 0.5:.1f} {top + BAR + 1}V{y - 1}"/>')
            svg += bars(LEFT, y, [("seen", row.prefix)], scale)
        svg += bars(start, y, leaf(row), scale)
    return svg


def comparison(chat: Chat, episode: Trajectory, order: list[tuple[int, Row]], top: int) -> list[str]:
    """The tokens as `pack` writes them, and with one row per turn, at one scale."""
    whole = []
    for t, row in order:
        whole += history(chat, episode, t) + leaf(row)
    packed = history(chat, episode, order[0][0])
    for _, row in order:
        packed += leaf(row)
    alone = sum(tokens for _, tokens in whole)
    written = sum(tokens for _, tokens in packed)
    assert written == pack([row for _, row in order])["tokens_BT"].numel()
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
    order = [(rows.index(row), row) for row in batch]
    top = 78
    below = top + STEP * len(order) + 22
    svg = legend()
    svg += turns(chat, episode, order, top)
    svg += comparison(chat, episode, order, below)
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

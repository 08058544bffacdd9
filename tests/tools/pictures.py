"""Draws two of the README's pictures from a run: an episode, turn by turn, and the report.

    python tests/tools/pictures.py runs/demo-0/r1

The run is one that `make demo` leaves. For another checkpoint, play with pictures first:

    python evaluate.py --model DIR --tasks sandbox:test:60 --screenshots 60 --out runs/pictures
"""
import argparse
import base64
import json
import os
import re
import sys
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from worlds.browser import find_chromium  # noqa: E402

# ------------------------------------------------------------------------------ an episode, turn by turn

WIDTH = 350   # of a turn's window onto its page, in CSS pixels
HEIGHT = 152
SCALE = 580 / 1280  # of the page in it
ROOM = 8      # between the window's edge and the element that the frame is for
AGENT = """<!doctype html><meta charset="utf-8"><style>
:root { color-scheme: light dark; --paper: #fff; --ink: #24211d; --soft: #6d675f; --line: #e2ded5;
  --wash: #f5f2ec; --accent: #2b6a8f; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #191817; --ink: #e8e4dd; --soft: #a19a8f; --line: #3a3734; --wash: #262422;
    --accent: #7fb8d8; }
}
body { margin: 0; padding: 18px 20px; width: 800px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 17px; font-weight: 600; margin: 0 0 14px; }
h1 span { color: var(--soft); font-weight: 400; }
section { display: grid; grid-template-columns: 350px 1fr; gap: 18px; padding: 12px 0;
  border-top: 1px solid var(--line); }
.shot { position: relative; overflow: hidden; height: 152px; border-radius: 8px;
  box-shadow: 0 0 0 1px var(--line); }
.shot div { position: absolute; width: 580px; } .shot img { display: block; width: 100%; }
.shot i { position: absolute; box-sizing: border-box; border: 2.5px solid #e8622c; border-radius: 4px;
  box-shadow: 0 0 0 3px #e8622c33; }
dl { margin: 0; display: grid; grid-template-columns: 46px 1fr; gap: 6px 10px; align-content: start; }
dt { color: var(--soft); font-size: 12px; padding-top: 2px; } dd { margin: 0; min-width: 0; }
pre { margin: 0; font: 12px/1.45 ui-monospace, Menlo, monospace; overflow: hidden;
  text-overflow: ellipsis; }
pre.page { background: var(--wash); border-radius: 6px; padding: 6px 9px; color: var(--soft); }
pre.does { color: var(--accent); font-weight: 600; white-space: pre-wrap; }
mark { background: none; color: #d8511c; font-weight: 600; }
</style>"""


def is_clean(record: dict) -> bool:
    """Whether every turn has a picture, and none failed."""
    for turn in record["turns"]:
        if "shot" not in turn or turn["error"]:
            return False
    return True


def fits(record: dict) -> bool:
    """Whether it is a success in three or four turns, each with a picture, none of which failed or came twice."""
    turns = record["turns"]
    if record["success"] != 1 or not 3 <= len(turns) <= 4:
        return False
    different = {(turn["url"], turn["action"]) for turn in turns}
    return len(different) == len(turns) and is_clean(record)


def variety(record: dict) -> tuple[int, int, int]:
    """How many kinds of actions, pages and turns an episode has."""
    kinds = set()
    urls = set()
    for turn in record["turns"]:
        kind, *_ = turn["action"].split(",")
        kinds.add(kind)
        urls.add(turn["url"])
    return len(kinds), len(urls), len(record["turns"])


def choose(records: list[dict]) -> dict:
    """The episode that fits and has the most variety."""
    found = [record for record in records if fits(record)]
    if not found:
        raise SystemExit("pictures.py: no picture shows a success in three or four turns; see --help.")
    return max(found, key=variety)


def element_text(page: str, element: str) -> str:
    """The element as the page's text writes it, tags included; empty if the page lacks it."""
    pattern = rf"<(\w+)>[^<>\n]* <{element}>[^<>\n]*</\1>"
    found = re.search(pattern, page)
    if not found:
        return ""
    return found[0]


def excerpt(page: str, element: str | None, count: int = 4) -> str:
    """The lines of a page around an element, as HTML with the element marked.

    Without an element, or with one that the page lacks: the page's first lines.
    """
    lines = page.split("\n")
    found = ""
    if element:
        found = element_text(page, element)
    here = 0
    while found not in lines[here]:
        here += 1

    last = len(lines) - count
    first = max(0, min(here - count // 2, last))
    shown = lines[first:first + count]
    if first > 0:
        shown.insert(0, "…")
    if first < last:
        shown.append("…")

    text = escape("\n".join(shown))
    if not found:
        return text
    mark = escape(found)
    return text.replace(mark, f"<mark>{mark}</mark>", 1)


def window(turn: dict, run: Path) -> str:
    """The middle of the page's top, moved as far as the frame asks."""
    frame = turn["shot"]["frame"] or (640, 0, 0, 0)
    x, y, w, h = [SCALE * number for number in frame]
    middle = 640 * SCALE - WIDTH / 2
    least = x + w + ROOM - WIDTH  # from here on the frame's right edge is inside
    most = x - ROOM               # ... and up to here its left one
    left = min(max(middle, least), most)
    top = max(0, y + h + ROOM - HEIGHT)

    border = ""
    if w:
        border = f'<i style="left:{x - 4}px;top:{y - 4}px;width:{w + 8}px;height:{h + 8}px"></i>'
    picture = run / turn["shot"]["file"]
    jpeg = base64.b64encode(picture.read_bytes()).decode()
    return (f'<div class="shot"><div style="left:{-left}px;top:{-top}px">'
            f'<img src="data:image/jpeg;base64,{jpeg}">{border}</div></div>')


def turn_html(turn: dict, run: Path) -> str:
    """A turn's window, and beside it what the policy read, thought and did."""
    said = re.fullmatch(r"(?s)(?:<think>(.*?)</think>)?(?:<answer>)?(.*?)(?:</answer>)?", turn["response"])
    thought = said[1] or ""
    action = said[2].strip()
    element = None
    named = re.search(r"element='(\d+)'", turn["action"])
    if named:
        element = named[1]
    read = excerpt(turn["observation"], element)
    return (f'<section>{window(turn, run)}<dl>'
            f'<dt>reads</dt><dd><pre class="page">{read}</pre></dd>'
            f'<dt>thinks</dt><dd>{escape(thought)}</dd>'
            f'<dt>does</dt><dd><pre class="does">{escape(action)}</pre></dd>'
            '</dl></section>')


def agent_html(record: dict, run: Path) -> str:
    html = AGENT
    html += f'<h1><span>Task:</span> {escape(record["intent"])}</h1>'
    for turn in record["turns"]:
        html += turn_html(turn, run)
    return html


# ------------------------------------------------------------------------------------------------ drawing


def photograph(page_at: str, file: Path, width: int, height: int, scale: float, whole=True):
    """FILE.png in light colors and FILE-dark.png in dark ones. whole: the page, not only the window."""
    flags = []
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    with sync_playwright() as playwright:
        program = find_chromium(playwright)
        chromium = playwright.chromium.launch(executable_path=program, args=flags)
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            page = chromium.new_page(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                device_scale_factor=scale,
            )
            page.goto(page_at)
            if not whole:
                page.evaluate("scrollTo(0, document.getElementById('episodes').offsetTop)")
            name = file.with_name(f"{file.name}{suffix}.png")
            page.screenshot(path=name, full_page=whole)
            size = name.stat().st_size
            print(f"{name}: {size / 1000:.0f} kB")
        chromium.close()


def draw_agent(record: dict, run: Path, out: Path):
    html = out / "agent.tmp.html"
    html.write_text(agent_html(record, run), encoding="utf-8")
    address = html.resolve().as_uri()
    photograph(address, out / "agent", width=840, height=400, scale=1.5)
    html.unlink()


def teaches(record: dict) -> bool:
    """Whether M-GRPO made the episode likelier, it has a second turn to open, and every turn can be shown."""
    return record["advantage"] > 0 and len(record["turns"]) > 1 and is_clean(record)


def long_and_late(record: dict) -> tuple[int, int]:
    turns = min(len(record["turns"]), 4)
    step = record["step"] or 0
    return turns, step


def fragment(record: dict) -> str:
    """What opens the report at the second turn of an episode."""
    where = {}
    names = {"split": "split", "step": "step", "task_id": "task", "member": "member"}
    for key, name in names.items():
        if record.get(key) is not None:
            where[name] = record[key]
    where["turn"] = 2
    return urlencode(where)


def draw_report(record: dict, run: Path, out: Path):
    report = run / "report.html"
    address = f"{report.resolve().as_uri()}#{fragment(record)}"
    photograph(address, out / "report", width=1280, height=1030, scale=1, whole=False)


def draw_run(run: Path, out: Path):
    file = run / "trajectories.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    evaluated = [record for record in records if record.get("step") is None]
    best = choose(evaluated or records)
    draw_agent(best, run, out)
    # The report shows a success that M-GRPO learned from, if the run has pictures of one; a late one, since
    # the report leaves out old episodes.
    taught = [record for record in records if teaches(record)]
    shown = max(taught, key=long_and_late, default=best)
    draw_report(shown, run, out)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("run", type=Path, help="a run with screenshots")
    parser.add_argument("--out", type=Path, default=ROOT / "assets")
    args = parser.parse_args()
    if not (args.run / "trajectories.jsonl").exists():
        raise SystemExit(f"pictures.py: {args.run} holds no episodes (trajectories.jsonl); "
                         "run make demo, or see --help.")
    draw_run(args.run, args.out)


if __name__ == "__main__":
    main()

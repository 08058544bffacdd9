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

WIDTH, HEIGHT, SCALE = 350, 152, 580 / 1280  # of a turn's window onto its page, in CSS pixels
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


def choose(records: list[dict]) -> dict:
    """A success in three or four turns, each with a picture and none wasted; variety first."""
    def fits(record):
        turns = record["turns"]
        different = {(turn["url"], turn["action"]) for turn in turns}
        return (record["success"] == 1 and 3 <= len(turns) <= 4 and len(different) == len(turns)
                and all("shot" in turn and not turn["error"] for turn in turns))

    def variety(record):
        kinds = {turn["action"].split(",")[0] for turn in record["turns"]}
        return len(kinds), len({turn["url"] for turn in record["turns"]}), len(record["turns"])

    found = [record for record in records if fits(record)]
    if not found:
        raise SystemExit("pictures.py: no picture shows a success in three or four turns; see --help.")
    return max(found, key=variety)


def excerpt(page: str, element: str | None, count: int = 4) -> str:
    """The lines of a page around an element, as HTML with the element marked."""
    pattern, lines = rf"<(\w+)>[^<>\n]* <{element}>[^<>\n]*</\1>", page.split("\n")
    found = re.search(pattern, page)[0] if element else ""
    here = next((i for i, line in enumerate(lines) if found and found in line), 0)
    first = max(0, min(here - count // 2, len(lines) - count))
    shown = ["…"] * (first > 0) + lines[first:first + count] + ["…"] * (first + count < len(lines))
    text, mark = escape("\n".join(shown)), escape(found)
    return text.replace(mark, f"<mark>{mark}</mark>", 1) if found else text


def window(turn: dict, run: Path) -> str:
    """The middle of the page's top, moved as far as the frame asks."""
    x, y, w, h = (SCALE * number for number in turn["shot"]["frame"] or (640, 0, 0, 0))
    left = min(max(640 * SCALE - WIDTH / 2, x + w + 8 - WIDTH), x - 8)
    top = max(0, y + h + 8 - HEIGHT)
    frame = f'<i style="left:{x - 4}px;top:{y - 4}px;width:{w + 8}px;height:{h + 8}px"></i>' if w else ""
    jpeg = base64.b64encode((run / turn["shot"]["file"]).read_bytes()).decode()
    return (f'<div class="shot"><div style="left:{-left}px;top:{-top}px">'
            f'<img src="data:image/jpeg;base64,{jpeg}">{frame}</div></div>')


def agent_html(record: dict, run: Path) -> str:
    html = [AGENT, f'<h1><span>Task:</span> {escape(record["intent"])}</h1>']
    for turn in record["turns"]:
        said = re.fullmatch(r"(?s)(?:<think>(.*?)</think>)?(?:<answer>)?(.*?)(?:</answer>)?",
                            turn["response"])
        element = re.search(r"element='(\d+)'", turn["action"])
        html += [f'<section>{window(turn, run)}<dl><dt>reads</dt><dd><pre class="page">',
                 f'{excerpt(turn["observation"], element and element[1])}</pre></dd>',
                 f'<dt>thinks</dt><dd>{escape(said[1] or "")}</dd>',
                 f'<dt>does</dt><dd><pre class="does">{escape(said[2].strip())}</pre></dd></dl></section>']
    return "".join(html)


# ------------------------------------------------------------------------------------------------ drawing


def photograph(page_at: str, file: Path, width: int, height: int, scale: float, whole=True):
    """FILE.png in light colors and FILE-dark.png in dark ones. whole: the page, not only the window."""
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=find_chromium(playwright), args=flags)
        for scheme, suffix in (("light", ""), ("dark", "-dark")):
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme,
                                     device_scale_factor=scale)
            page.goto(page_at)
            if not whole:
                page.evaluate("scrollTo(0, document.getElementById('episodes').offsetTop)")
            name = file.with_name(f"{file.name}{suffix}.png")
            page.screenshot(path=name, full_page=whole)
            print(f"{name}: {name.stat().st_size / 1000:.0f} kB")
        chromium.close()


def draw_run(run: Path, out: Path):
    lines = (run / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    record = choose([r for r in records if r.get("step") is None] or records)
    html = out / "agent.tmp.html"
    html.write_text(agent_html(record, run), encoding="utf-8")
    photograph(html.resolve().as_uri(), out / "agent", 840, 400, 1.5)
    html.unlink()
    # The report shows a success that M-GRPO learned from, if the run has pictures of one; a late one, for
    # it leaves out old episodes.
    taught = [r for r in records if r["advantage"] > 0 and len(r["turns"]) > 1
              and all("shot" in turn and not turn["error"] for turn in r["turns"])]
    shown = max(taught, key=lambda r: (min(len(r["turns"]), 4), r["step"] or 0), default=record)
    names = {"split": "split", "step": "step", "task_id": "task", "member": "member"}
    where = {name: shown[key] for key, name in names.items() if shown.get(key) is not None} | {"turn": 2}
    photograph(f"{(run / 'report.html').resolve().as_uri()}#{urlencode(where)}", out / "report",
               1280, 1030, 1, whole=False)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("run", type=Path, help="a run with screenshots")
    parser.add_argument("--out", type=Path, default=ROOT / "assets")
    args = parser.parse_args()
    if not (args.run / "trajectories.jsonl").exists():
        raise SystemExit(f"pictures.py: {args.run} holds no episodes (trajectories.jsonl); run make demo, or see --help.")
    draw_run(args.run, args.out)


if __name__ == "__main__":
    main()

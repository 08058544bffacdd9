"""For people watching: screenshots of what the agent does, a window to watch it in, progress lines."""
import asyncio
import base64
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from playwright.async_api import Error as PlaywrightError

PACE = 2.0  # seconds that --watch leaves a person to see what comes


class Onlooker:
    """rollout.py awaits this before each action of every episode. It changes nothing in the page.

    aim(session, turn): where the action will land, as page.js's `locate` says; a page may return
    anything. run, name: the run's directory and what its pictures are called. episodes: the
    (task id, member) that get pictures. visible: show a window and keep a person's pace instead.
    """

    def __init__(self, aim, run: Path, name: str, episodes: set, visible: bool = False):
        self.aim, self.run, self.name, self.episodes, self.visible = aim, run, name, episodes, visible
        if visible and not {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}:
            raise ValueError("--watch opens a window, but this machine has no display (DISPLAY is not set); "
                             "--screenshots 8 puts pictures into the report instead.")

    async def __call__(self, session, trajectory):
        if self.visible:
            await self.show(session, trajectory)
        elif (trajectory.task["task_id"], trajectory.member) in self.episodes:
            await self.photograph(session, trajectory)

    async def frame(self, session, turn) -> list[float] | None:
        """[left, top, width, height] of the element acted upon, in pixels of the window."""
        spot = await self.aim(session, turn)
        spot = [spot.get(key) for key in ("x", "y", "width", "height")] if isinstance(spot, dict) else []
        if spot and all(isinstance(number, (int, float)) and abs(number) < 1e5 for number in spot):
            x, y, width, height = spot
            return [round(x - width / 2, 1), round(y - height / 2, 1), round(width, 1), round(height, 1)]

    async def photograph(self, session, trajectory):
        """Keeps the window as a JPEG; the report draws the frame."""
        turn, task = trajectory.turns[-1], trajectory.task["task_id"]
        name = f"{self.name}-{task}-{trajectory.member}-{len(trajectory.turns)}"
        file = Path("screenshots") / (re.sub(r"\W", "-", name)[-150:] + ".jpg")
        frame = await self.frame(session, turn)
        with suppress(PlaywrightError):  # a page whose script is in a loop cannot be painted
            await session.page.screenshot(path=self.run / file, type="jpeg", quality=55, timeout=5000)
            turn.shot = {"file": str(file), "frame": frame}

    async def show(self, session, trajectory):
        """Prints thought and action and frames the element, in a layer above the page."""
        turn, first = trajectory.turns[-1], len(trajectory.turns) == 1
        said = re.sub(r"</?(think|answer)>", "\n", f"{turn.url}\n{turn.response}")
        title = f"\n== {trajectory.task['intent']}\n" if first else ""
        said = f"{title}\n-- turn {len(trajectory.turns)}: " + re.sub(r"\n+", "\n   ", said.strip())
        print("".join(c for c in said if c.isprintable() or c == "\n"))  # no codes for the terminal
        frame = await self.frame(session, turn)
        with suppress(PlaywrightError, KeyError):  # a new tab may have no connection yet
            devtools = session.devtools[session.page]
            if frame:
                place = dict(zip(("x", "y", "width", "height"), map(round, frame)))
                color = {"color": {"r": 224, "g": 80, "b": 40, "a": 0.15},
                         "outlineColor": {"r": 224, "g": 80, "b": 40, "a": 1}}
                await devtools.send("DOM.enable")
                await devtools.send("Overlay.enable")
                await devtools.send("Overlay.highlightRect", place | color)
            await asyncio.sleep(PACE)
            if frame:
                await devtools.send("Overlay.hideHighlight")


def embed(records: list[dict], run: Path, room: int = 40_000_000):
    """Puts the pictures of a run's records into them, the newest first, `room` bytes at most."""
    for turn in (turn for record in reversed(records) for turn in record["turns"] if "shot" in turn):
        file = run / turn["shot"]["file"]
        if file.exists() and (room := room - file.stat().st_size) > 0:
            turn["shot"]["jpeg"] = base64.b64encode(file.read_bytes()).decode()


def ticker(begin: str = "", pause: float = 10.0):
    """A `log` for progress: one line that is rewritten on a terminal, else a plain line now and then.

    A line with "(100%)" is the last: it is always shown and stays. pause: seconds between plain lines.
    """
    shown = -pause

    def log(line: str):
        nonlocal shown
        live, last, now = sys.stdout.isatty(), "(100%)" in line, time.monotonic()
        if not last and now - shown < (0.2 if live else pause):
            return
        shown, line = now, begin + line
        if live:
            width = None if last else shutil.get_terminal_size().columns - 1
            line = f"\r\033[K{line[:width]}"
        print(line, end="" if live and not last else "\n", flush=True)

    return log

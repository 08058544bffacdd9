"""For people who watch: pictures of what the agent does, or a window in which they see it.

evaluate.Environment calls them before each action. Finding the frame may scroll the page to the
element and changes nothing else. A frame is [left, top, width, height] of the element that the
action is for, in pixels of the window.
"""
import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path

from playwright.async_api import Error as PlaywrightError

PACE = 2.0  # seconds that --watch leaves a person to see what comes
TINT = {"r": 224, "g": 80, "b": 40, "a": 0.15}
ORANGE = {"color": TINT, "outlineColor": TINT | {"a": 1}}


def require_display(flag: str, remedy: str):
    """Raises ValueError where no window can open. flag: what asks for one."""
    if "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ:
        return
    raise ValueError(
        f"{flag} opens a window, but this machine has no display (DISPLAY is not set); {remedy}."
    )


def frame_of(spot) -> list[float] | None:
    """The frame of what page/actions.js's `locate` found. None: it found nothing, or the page lies."""
    if not isinstance(spot, dict):
        return None
    numbers = [spot.get(key) for key in ("x", "y", "width", "height")]
    for number in numbers:
        if not isinstance(number, (int, float)):
            return None
        if not abs(number) < 1e5:  # NaN is not below it
            return None

    x, y, width, height = numbers  # (x, y) is the middle
    left = x - width / 2
    top = y - height / 2
    return [round(edge, 1) for edge in (left, top, width, height)]


async def photograph(session, turn, frame: list[float] | None, directory: Path, name: str):
    """Keeps the window as a JPEG in a run's directory and notes it in the turn; the report draws the frame."""
    safe = re.sub(r"\W", "-", name)
    safe = safe.encode()[-150:].decode(errors="ignore")  # a file's name may have 255 bytes
    file = Path("screenshots") / f"{safe}.jpg"
    with suppress(PlaywrightError, OSError):  # a page whose script is in a loop cannot be painted; a full disk
        await session.page.screenshot(
            path=directory / file,
            type="jpeg",
            quality=55,
            timeout=5000,
        )
        turn.shot = {"file": str(file), "frame": frame}


def harmless(text: str) -> str:
    """Text of a page or a policy without codes that a terminal would follow."""
    return "".join(c for c in text if c.isprintable() or c == "\n")


def tell(trajectory):
    """Prints what the agent thinks and is about to do."""
    turns = trajectory.turns
    turn = turns[-1]

    said = f"{turn.url}\n{turn.response}"
    said = re.sub(r"</?(think|answer)>", "\n", said).strip()
    said = re.sub(r"\n+", "\n   ", said)

    text = ""
    if len(turns) == 1:
        text = f"\n== {trajectory.task['intent']}\n"
    elif turns[-2].error:
        text = f"\n   error: {turns[-2].error}"
    text += f"\n-- turn {len(turns)}: {said}"

    print(harmless(text))


async def highlight(session, frame: list[float] | None):
    """Shows the frame for a moment, in a layer above the page."""
    with suppress(PlaywrightError, KeyError):  # a new tab may have no connection yet
        devtools = session.devtools[session.page]
        if frame is not None:
            left, top, width, height = map(round, frame)
            place = {"x": left, "y": top, "width": width, "height": height}
            await devtools.send("DOM.enable")
            await devtools.send("Overlay.enable")
            await devtools.send("Overlay.highlightRect", place | ORANGE)
        await asyncio.sleep(PACE)
        if frame is not None:
            await devtools.send("Overlay.hideHighlight")

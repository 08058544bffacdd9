"""A recording in a real window: Xvfb, Chromium with windows, and xdotool's mouse and keyboard.

    python tests/tools/recording.py CLONE OUT     # six tasks of one application of WebArena-Infinity
    python bc.py --data OUT/demos.jsonl ...

Needs Debian's xvfb, xdotool and chromium. Nothing reaches the page but what xdotool does to the screen: this
script only asks the page where an element is. Each demonstration is judged by the check that the recording
has made up and by the application's own verifier.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import run  # noqa: E402, F401

import asyncio  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402

import one_task  # noqa: E402
import worlds  # noqa: E402
from compress import replay as read_record  # noqa: E402
from compress import open_chat  # noqa: E402
from evaluate import Environment  # noqa: E402
from rollout import actions_help, play  # noqa: E402
from worlds.recorder import Person  # noqa: E402

APP = "linear-account-settings"
DISPLAY = ":99"
# The application's task -> what the hand does: a selector to click, or a text to type.
TASKS = {
    "e12": ["text=Preferences", "#pref-notif-badge"],
    "e15": ["text=Preferences", "#pref-spell-check"],
    "e17": ["text=Preferences", "#pref-pointer-cursor"],
    "e4": ["text=Profile", "[data-action=editUsername]", "#modal-input-field", "type amorgan",
           "[data-action=confirmEditField]"],
    "e10": ["text=Preferences", ".dropdown-trigger[data-dropdown-id=pref-font-size]",
            ".dropdown-item[data-dropdown-id=pref-font-size][data-value=Large]"],
    "m4": ["text=Security & access", "[data-action=createApiKey]", "#modal-input-api-label",
           "type Staging Environment", "[data-action=confirmCreateApiKey]"],
}


def xdotool(*given):
    subprocess.run(["xdotool", *map(str, given)], check=True, env={**os.environ, "DISPLAY": DISPLAY})


async def click(page, selector: str):
    """Moves the mouse there in steps, as a hand does, and clicks."""
    element = page.locator(selector).first
    await element.scroll_into_view_if_needed()
    box = await element.bounding_box()
    left, top = await page.evaluate("[screenX + (outerWidth - innerWidth) / 2, screenY + outerHeight - innerHeight]")
    x, y = left + box["x"] + box["width"] / 2, top + box["y"] + box["height"] / 2
    for part in (0.5, 0.9, 1.0):
        xdotool("mousemove", round(part * x), round(part * y))
        await asyncio.sleep(0.1)
    xdotool("click", 1)


async def do(page, motion: str):
    await asyncio.sleep(0.7)  # until the page says what it has to say
    if motion.startswith("type "):
        xdotool("key", "ctrl+a")
        xdotool("type", "--delay", 40, motion.removeprefix("type "))
    elif motion.startswith("key "):
        xdotool("key", motion.removeprefix("key "))
    else:
        await click(page, motion)


def record(clone: str, out: Path, name: str, instruction: str):
    """Records one task with the hand."""
    motions = iter([*TASKS[name], "key ctrl+w"])
    listen = Person.listen

    async def work(page):
        for motion in motions:
            await do(page, motion)
            if not motion.startswith("key "):
                await asyncio.sleep(0.8)

    async def listen_and_work(person):
        if person not in working:
            working[person] = asyncio.ensure_future(work(person.session.page))
        return await listen(person)

    working = {}
    Person.listen = listen_and_work
    try:
        one_task.main(one_task.Config(
            url="http://127.0.0.1:{port}/", task=instruction, record=str(out / "demos.jsonl"),
            serve=f"{sys.executable} server.py --port {{port}}", cwd=f"{clone}/apps/{APP}",
            max_context=8192, max_new_tokens=256))
    finally:
        Person.listen = listen


def verified(clone: str, record: dict, name: str) -> float:
    """Plays a demonstration's responses again, under the application's own verifier."""
    chat = open_chat("worlds/base", actions_help())
    every = worlds.load_tasks(f"infinity:{clone}/{APP}", {})
    task = next(task for task in every if task["task_id"] == f"{APP}/{name}")
    responses = [turn.response_ids for turn in read_record(chat, record).turns]

    async def act(trajectory, slot):
        return responses[len(trajectory.turns) - 1], [], True

    cfg = one_task.Config(max_context=8192, max_new_tokens=256)
    [played] = asyncio.run(play(act, chat, [task], env=Environment({}, "runs/recording", cfg), settings=cfg))
    return played.success


def main(clone: str, out: str):
    directory = Path(out)
    screen = subprocess.Popen(["Xvfb", DISPLAY, "-screen", "0", "1400x1000x24"], stderr=subprocess.DEVNULL)
    os.environ["DISPLAY"] = DISPLAY
    os.environ["GTK_MODULES"] = ""
    time.sleep(1)
    sys.stdin = open(os.devnull)  # no answer
    rows = json.loads(Path(clone, "apps", APP, "real-tasks.json").read_text())
    try:
        for name in TASKS:
            instruction = next(row["instruction"] for row in rows if row["id"] == f"task_{name}")
            start = time.monotonic()
            record(clone, directory, name, instruction)
            print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
        records = [json.loads(line) for line in (directory / "demos.jsonl").read_text().splitlines()]
        verdicts = [verified(clone, record, name) for record, name in zip(records, TASKS)]
        print(f"recorded and replayed {len(records)} of {len(TASKS)}; the application's verifiers: {verdicts}")
    finally:
        screen.terminate()
        screen.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""WebArena-Infinity, measured: needs a clone of web-arena-x/webarena-infinity.

    python tests/tools/infinity.py CLONE sweep 4     # nothing done: which verifiers say True? 25 min
    python tests/tools/infinity.py CLONE groups 8    # 56 episodes (7 tasks, groups of 8) by a policy that fails half of the time
"""
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import run  # noqa: E402, F401

import asyncio  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402

from conftest import descendants  # noqa: E402

import worlds  # noqa: E402
from compress import Chat, system_prompt  # noqa: E402
from evaluate import SiteSettings, Environment  # noqa: E402
from model import load_tokenizer  # noqa: E402
from rollout import actions_help, play  # noqa: E402

# Tasks of linear-account-settings and the toggle that each is about, by its name in the observation.
TOGGLES = {"e2": "Convert text emoticons into emojis", "e5": "Auto-assign on create", "e12": "Notification badge",
           "e15": "Spell check", "e17": "Use pointer cursor", "e18": "Open in desktop app", "e20": "Display full names"}


def click(page: str, name: str) -> str:
    element = re.search(re.escape(name) + r" <([0-9]+)>", page)[1]
    return f'do(action="Click", element="{element}")'


def respond(tau) -> str:
    """Solves the task if the member's number is even; else it changes something else."""
    name = tau.task["task_id"].partition("/")[2]
    page = tau.turns[-1].observation
    if len(tau.turns) == 1:
        return click(page, "Preferences")
    if len(tau.turns) == 2:
        return click(page, TOGGLES[name] if tau.member % 2 == 0 else "Auto-assign on started")
    return "exit('done')"


def memory(processes) -> int:
    """Their proportional share of memory, in MiB."""
    kib = 0
    for process in processes:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            kib += int(re.search(r"Pss:\s+(\d+)", text)[1])
        except (OSError, TypeError):
            pass
    return kib // 1024


def main(clone: str, what: str, concurrency: int):
    chat = Chat(load_tokenizer(Path(worlds.__file__).parent / "base"), system_prompt(actions_help(), think=False), think=False)
    if what == "sweep":
        tasks, group = worlds.load_tasks(f"infinity:{clone}", {}), 1
    else:
        every = worlds.load_tasks(f"infinity:{clone}/linear-account-settings:easy", {})
        tasks, group = [task for task in every if TOGGLES.get(task["task_id"].partition("/")[2])], 8

    async def act(tau, slot):
        text = "exit('done')" if what == "sweep" else respond(tau)
        return [*chat.encode(text), chat.end_id], [], True

    cfg = SiteSettings(concurrency=concurrency)
    env = Environment({}, tempfile.mkdtemp(), cfg)
    start, seen = time.monotonic(), []

    def tick(line, last=False):
        print(line, f"; MiB of the run {memory([os.getpid()])}, of its children {memory(descendants())}", flush=True)

    played = asyncio.run(play(act, chat, tasks, env=env, settings=cfg, group_size=group, tick=tick))
    seconds = time.monotonic() - start
    for tau in played:
        expected = tau.task.get("flaw") == "true from the start" if what == "sweep" else tau.member % 2 == 0
        if tau.status != "ok" or tau.success != expected:
            seen.append((tau.task["task_id"], tau.member, tau.status, tau.success, tau.checks))
    print(f"{len(played)} episodes in {seconds:.0f} s, {60 * len(played) / seconds:.0f} a minute; "
          f"{Counter((tau.status, tau.success) for tau in played)}; not as expected: {seen}; left: {descendants()}")


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""The embedded world: stateful websites, seeded tasks in WebArena's schema, scripted experts.

These need the standard library only.

    with sandbox.start() as sites:                # {"SHOPPING": "http://127.0.0.1:PORT/shop", "REDDIT": ...}
        for task in sandbox.tasks("train", 600):  # dicts; task["world"] seeds the world of its episodes
            act = sandbox.expert(task)            # observation -> (thought, action), stateful over one episode
"""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from .experts import expert
from .tasks import tasks

__all__ = ["start", "tasks", "expert"]


@contextmanager
def start():
    """Serve the sites from a process of their own, yield their addresses. It ends with this block or this process."""
    # In a session of its own Ctrl-C does not reach it: it ends when its standard input closes, after whoever uses it.
    process = subprocess.Popen([sys.executable, "-m", "worlds.sandbox", "--pipe"], cwd=Path(__file__).parents[2], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    with process:  # leaving closes the pipes and waits
        line = process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the sandbox did not start (exit status {process.wait()}): "
                                    "try `python -m worlds.sandbox`")
        yield json.loads(line)

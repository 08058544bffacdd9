"""A task's own judge: a Python file that defines verify(server_url) -> (bool, str).

    "eval": {"eval_types": ["verify"], "verify": "verifiers/task_1.py"}     # relative to the task file

It runs in a process of its own with a time limit, once an episode has ended. The text goes into the
episode's checks. If it raises, takes too long or returns anything else, that is no verdict on the
agent: the episode is void. requests.py is for files that import `requests` where it is missing.
"""
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from ..browser import EnvError, bounded

TIMEOUT = 60.0  # seconds


async def verify(file: str, server_url: str) -> tuple[bool, str]:
    """The verdict of a file on a server, and its reason. Raises EnvError if there is none."""
    # -B: write no __pycache__ beside somebody else's file.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-B", str(Path(__file__).parent), os.path.abspath(file), server_url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, start_new_session=True)
    try:
        # One line, which has a limit: the file may find the pipe and flood it.
        text = await bounded(process.stdout.readline(), TIMEOUT, f"the verifier {file}")
    except ValueError:  # the line is longer than any verdict
        text = b"?"
    finally:
        with contextlib.suppress(OSError):  # it has ended, and so has all that it started
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if not text:
        raise EnvError(f"the verifier {file} ended without a verdict")
    try:
        verdict = json.loads(text)
        error = verdict.get("error")
        outcome = error or (verdict["passed"], verdict["reason"])
    except (ValueError, LookupError, AttributeError):  # the file itself has written where the verdict goes
        raise EnvError(f"the verifier {file} wrote something else than a verdict") from None
    if error:
        raise EnvError(f"the verifier {file} failed: {error}")
    return outcome

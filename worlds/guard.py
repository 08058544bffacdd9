"""Ends what its parent has started, however the parent ends: by Ctrl-C, by SIGKILL, by a crash.

    guard.py FOLDER      serve.py's temporary folder; it may not exist

serve.py runs this in a session of its own, so that no signal to the parent reaches it. Its standard
input is a pipe whose other end the parent holds. A line "+ 123" names a process group to watch over,
"- 123" one that has ended. When the parent closes the pipe or dies, the groups left are killed and the
folder is deleted.
"""
import os
import shutil
import signal
import sys
import time
from contextlib import suppress

groups = set()
for line in sys.stdin:
    sign, group = line.split()
    if sign == "+":
        groups.add(int(group))
    else:
        groups.discard(int(group))

for group in groups:
    with suppress(OSError):  # it has just ended
        os.killpg(group, signal.SIGKILL)

folder = sys.argv[1]
for attempt in range(40):
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        break
    time.sleep(0.05)  # a process that is being killed may have written meanwhile

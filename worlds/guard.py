"""Ends what its parent has started, however the parent ends: by Ctrl-C, by SIGKILL, by a crash.

serve.py runs this in a session of its own, so that no signal to the parent reaches it. Its standard
input is a pipe whose other end the parent holds. A line "+ 123" names a process group to watch over,
"- 123" one that has ended. When the parent dies the pipe closes, and the groups left are killed.
"""
import os
import signal
import sys
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

"""The worlds that agents act in, and where tasks come from.

    browser.py    Chromium: what the agent sees and does; onlooker.py: for people who watch;
                  recorder.py: for a person who shows how a task is done
    sandbox/      the embedded sites; base/: the small model
    webarena.py   WebArena's task files, sites and logins
    infinity.py   WebArena-Infinity; miniwob.py: MiniWoB++
    serve.py      a site started by a command, one copy for each episode (guard.py, loopback.py)
    verifier/     a task's own judge, in a process of its own
    words.py      how the benchmark cuts text into words
    endpoint.py   models behind a URL: a policy to evaluate, or the judge

A leaf: nothing here imports the six files (two helpers come from run.py).
"""
import contextlib
import os
import re
from pathlib import Path

from . import infinity, miniwob, sandbox, webarena


def sources(*specs: str | None) -> list[str]:
    """--tasks and --held-out split at their commas, but not at those between the names of MiniWoB++ tasks."""
    found = []
    for spec in filter(None, specs):
        # A comma ends a source if a kind of tasks follows, or a file: something with a dot or a slash.
        found += re.split(r",(?=sandbox|miniwob|infinity:|[^,]*[./])", spec)
    return found


def check_files(*specs: str | None):
    """Raises ValueError if a source is misspelled or cannot be read. Quick: call it before a model is loaded."""
    for source in sources(*specs):
        kind, _, rest = source.partition(":")
        if kind == "sandbox":
            sandbox_tasks(source, check_only=True)
        elif kind == "miniwob":
            miniwob.tasks(rest)
        elif kind == "infinity":
            infinity.tasks(rest)
        else:
            webarena.read_rows(source)


@contextlib.contextmanager
def open_sites(*specs: str | None):
    """Yields {SITE: address} and serves what the specs ask for until the block ends.

    WebArena's sites come from the environment's variables. The sandbox's own {SITE: address} stands
    under "sandbox", so that a task file next to it in the spec keeps its sites.
    """
    sites = {name: os.environ[name] for name in webarena.HOSTS if os.environ.get(name)}
    kinds = {source.partition(":")[0] for source in sources(*specs)}
    with contextlib.ExitStack() as stack:
        if "sandbox" in kinds:
            sites["sandbox"] = stack.enter_context(sandbox.start())
        if "miniwob" in kinds:
            sites["MINIWOB"] = stack.enter_context(miniwob.serve())
        yield sites


def sandbox_tasks(source: str, check_only=False) -> list[dict]:
    """The tasks of sandbox:SPLIT[/TEMPLATE][:N]. check_only: makes none, since they take seconds."""
    found = re.fullmatch(r"sandbox:([a-z-]+)(?:/(\d{1,9}))?(?::(\d{1,9}))?", source)
    if not found:
        raise ValueError(f"{source}: write sandbox:SPLIT[/TEMPLATE][:N], such as "
                         "sandbox:test:50 or sandbox:test/28.")
    split, template, n = found.groups()  # None stands for what the source leaves out
    if template is not None:
        template = int(template)
    if n is not None:
        n = int(n)
        if n > 100_000:  # each is made at once
            raise ValueError(f"{source}: ask for at most 100000 tasks.")
    if check_only:
        n = 0
    return sandbox.tasks(split, n=n, template=template)


def validate(source: str) -> int:
    """Prints what a task file, or a clone of WebArena-Infinity, holds; returns the exit status."""
    kind, _, rest = source.partition(":")
    if kind in ("sandbox", "miniwob"):
        raise ValueError(f"--validate checks task files and infinity:PATH; the tasks of {source} come with the code.")
    if kind == "infinity":
        found = webarena.check_rows(infinity.tasks(rest), Path())
    else:
        found = webarena.read_tasks(source)
    return webarena.describe(source, *found)


def load_tasks(spec: str, sites: dict, reach=True, judge=False) -> list[dict]:
    """Tasks ready to play, as dicts in WebArena's schema.

    spec: one or more of these, separated by commas: sandbox:SPLIT[/TEMPLATE][:N], a task file,
    miniwob[:NAME,...][:FIRST-LAST], infinity:PATH[/APP,...][:easy|medium|hard|function][:N].
    reach: check that their sites answer. judge: keep the tasks that need a language model as judge.

    Tasks of the second and later sources of a spec have their source's number under "source": their
    ids may occur in another source, and an episode's random numbers come from its task's id.
    """
    if not spec:
        raise ValueError("no tasks are named; give sandbox:test, a task file, or several of them with commas.")
    tasks = []
    for number, source in enumerate(sources(spec)):
        kind, _, rest = source.partition(":")
        known = sites
        if kind == "sandbox":
            known = sites.get("sandbox", {})
            found = sandbox_tasks(source)
        elif kind == "miniwob":
            found = miniwob.tasks(rest)
        elif kind == "infinity":
            found = infinity.tasks(rest)
        else:
            found = webarena.playable(source, sites, judge)
        found = webarena.site_urls(found, known)
        if reach:
            webarena.check_reach(found, known)
        for task in found:
            task.pop("source", None)  # a file's own would mean something else
            if number > 0:
                task["source"] = number
        tasks += found
    if not tasks:
        raise ValueError(f"{spec} leaves no task to play; choose another split or file.")
    return tasks

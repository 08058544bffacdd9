"""The worlds that agents act in, and where tasks come from.

sandbox/: the embedded sites; base/: the small model; webarena.py, miniwob.py: the benchmarks' tasks;
words.py: how the benchmark cuts text into words; endpoint.py: models behind a URL; onlooker.py:
screenshots, --watch, progress. A leaf: nothing here imports the six files.
"""
import contextlib
import os
import re

from . import miniwob, sandbox, webarena


def sources(spec: str) -> list[str]:
    """--tasks split at its commas, but not at those between the names of MiniWoB++ tasks."""
    return re.split(r",(?=sandbox|miniwob|[^,]*[./])", spec)


@contextlib.contextmanager
def open_sites(spec: str):
    """Yields {SITE: address} and serves what the spec asks for until the block ends.

    WebArena's sites come from the environment's variables. The sandbox's own {SITE: address} stands
    under "sandbox", so that a task file next to it in the spec keeps its sites.
    """
    sites = {name: os.environ[name] for name in webarena.HOSTS if os.environ.get(name)}
    kinds = {part.partition(":")[0] for part in sources(spec)}
    with contextlib.ExitStack() as stack:
        if "sandbox" in kinds:
            sites["sandbox"] = stack.enter_context(sandbox.start())
        if "miniwob" in kinds:
            sites["MINIWOB"] = stack.enter_context(miniwob.serve())
        yield sites


def load_tasks(spec: str, sites: dict, reach=True, judge=False, log=print) -> list[dict]:
    """Tasks ready to play, as dicts in WebArena's schema.

    spec: sandbox:SPLIT[/TEMPLATE][:N], miniwob[:NAME,...][:FIRST-LAST], task files, with commas.
    reach: check that their sites answer. judge: keep the tasks that need a language model as judge.
    """
    tasks = []
    for part in sources(spec):
        kind, _, rest = part.partition(":")
        known = sites.get("sandbox", {}) if kind == "sandbox" else sites
        if kind == "sandbox":
            found = re.fullmatch(r"([a-z-]+)(?:/(\d+))?(?::(\d+))?", rest)
            if not found:
                raise ValueError(f"--tasks {part}: write sandbox:SPLIT[/TEMPLATE][:N], such as "
                                 "sandbox:test:50 or sandbox:test/28.")
            template, n = (number and int(number) for number in found.group(2, 3))
            some = sandbox.tasks(found[1], n, template)
        elif kind == "miniwob":
            some = miniwob.tasks(rest)
        else:
            some = webarena.playable(part, sites, judge, log)
        some = webarena.site_urls(some, known)
        if reach:
            webarena.check_reach(some, known)
        tasks += some
    if not tasks:
        raise ValueError(f"--tasks {spec} leaves no task to play; choose another split or file.")
    return tasks

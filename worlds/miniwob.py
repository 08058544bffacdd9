"""MiniWoB++ as tasks in WebArena's schema: the pages of the pip package `miniwob`, none of its Python.

    with miniwob.serve() as url:                     # the package's html folder on loopback
        for task in miniwob.tasks("click-button,enter-text:100-119"):
            ...                        # one episode: __MINIWOB__/miniwob/click-button.html?seed=100

A script added to each page seeds it and starts the episode. At its end the page itself judges.
"""

import functools
import http.server
import importlib.util
import re
import threading
from contextlib import contextmanager
from pathlib import Path

SEEDS = "0-9"
RANGE = re.compile(r"(\d+)-(\d+)")
UTTERANCE = "(u => u.utterance || u)(core.getUtterance())"  # some tasks add fields to it
START = """\
<style>#query, #reward-display, #sync-task-cover, #click-canvas {display: none !important}</style>\
<script>
addEventListener('load', function start() {
  if (!core.cover_div) return setTimeout(start, 5);  // the page is still setting itself up
  Math.seedrandom(new URLSearchParams(location.search).get('seed'));
  core.EPISODE_MAX_TIME = 1e9;  // turns are counted here, not seconds
  const end = core.endEpisode;
  core.endEpisode = (...verdict) => { end(...verdict); document.title = 'the task is over'; };
  core.startEpisodeReal();
});
</script>"""


def folder() -> Path:
    """The package's html folder."""
    spec = importlib.util.find_spec("miniwob")  # importing it would need gymnasium and selenium
    if spec is None:
        raise ValueError("MiniWoB++ is not installed; run: pip install --no-deps miniwob")
    return Path(spec.origin).parent / "html"


# ------------------------------------------------------------------------------------- the pages --


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # these two as in sandbox/server.py
    wbufsize = -1

    def do_GET(self):
        page = Path(self.translate_path(self.path))
        if page.suffix != ".html" or not page.is_file():
            return super().do_GET()
        body = page.read_bytes() + START.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *ignored):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # dozens of browser contexts may connect in the same moment

    def handle_error(self, request, address):
        """A browser that left before its answer is no news."""


@contextmanager
def serve():
    """Serves the pages for the length of the block; yields their address."""
    server = Server(("127.0.0.1", 0), functools.partial(Handler, directory=folder()))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# ------------------------------------------------------------------------------------- the tasks --


def episode(name: str, seed: int) -> dict:
    """One task with one seed, in WebArena's schema. The page holds its own verdict."""
    verdict = {
        "url": "last",
        "locator": "document.defaultView.WOB_RAW_REWARD_GLOBAL",
        "required_contents": {"exact_match": "1"},
    }
    return {
        "task_id": f"{name}-{seed}",
        "sites": ["miniwob"],
        "intent": "what the page asks for",
        "intent_from": UTTERANCE,
        "intent_template_id": name,
        "intent_template": name,
        "storage_state": None,
        "start_url": f"__MINIWOB__/miniwob/{name}.html?seed={seed}",
        "eval": {"eval_types": ["program_html"], "program_html": [verdict]},
    }


def tasks(spec: str) -> list[dict]:
    """"[NAME,...][:FIRST-LAST]": the tasks of those names (all without any), once for each seed."""
    names, _, seeds = spec.partition(":")
    if RANGE.fullmatch(spec):
        names = ""
        seeds = spec

    known = sorted(page.stem for page in (folder() / "miniwob").glob("*.html"))
    chosen = names.split(",") if names else known
    for name in chosen:
        if name not in known:
            raise ValueError(f"MiniWoB++ has no task {name!r}; see {folder() / 'miniwob'}.")
        if chosen.count(name) > 1:
            raise ValueError(f"miniwob:{spec} names {name} twice.")

    found = RANGE.fullmatch(seeds or SEEDS)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"miniwob:{spec}: the seeds are a range such as {SEEDS}.")
    first, last = int(found[1]), int(found[2])
    if len(chosen) * (last + 1 - first) > 100_000:  # each is made at once
        raise ValueError(f"miniwob:{spec}: ask for at most 100000 tasks.")
    episodes = []
    for name in chosen:
        for seed in range(first, last + 1):
            episodes.append(episode(name, seed))
    return episodes

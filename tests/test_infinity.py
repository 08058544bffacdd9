"""WebArena-Infinity as tasks: a tiny application in the benchmark's layout, with the benchmark's traps."""
import asyncio
import json
import socket

import pytest
from conftest import scripted

import evaluate
import infinity_experts
import rollout
import worlds
from evaluate import SiteSettings, Environment, summarize
from rollout import parse
from worlds import infinity

# As the benchmark's: state is None until the page sends it, threads may swap PUTs (the first of two takes longest),
# it listens on all interfaces, imports a file beside it and serves its own folder.
SERVER = '''
import http.server, json, socketserver, sys, time
import neighbour
class Threaded(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
state = None
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_PUT(self):
        global state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["n"] == 1: time.sleep(0.5)
        state = body
        self.send_response(200)
        self.end_headers()
    def do_GET(self):
        if self.path != "/api/state": return super().do_GET()
        self.send_response(404 if state is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(state).encode())
    def log_message(self, *_): pass
if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    Threaded(("", port), Handler).serve_forever()
'''
PAGE = '''<title>notes</title><button onclick="add(); add()">twice</button> <a href=/real-tasks/task_e1.py>how to</a>
<script>
  let n = 0, day = new Date().toDateString();
  const send = () => fetch('/api/state', {method: 'PUT', body: JSON.stringify({n, day})});
  const add = () => { n++; send(); };
  send();
  document.write(day);
</script>'''
VERIFIER = '''import requests
def verify(server_url: str) -> tuple[bool, str]:
    resp = requests.get(f"{server_url}/api/state")
    if resp.status_code != 200:
        return False, f"HTTP {resp.status_code}"
    state = resp.json()
    return state["n"] == NUMBER, f"n is {state['n']} on {state['day']}"
'''


@pytest.fixture
def clone(tmp_path):
    """A clone of the benchmark with two applications; one has the name of one with known flaws."""
    for app in ("notes", "xero-invoicing"):
        folder = tmp_path / "apps" / app
        for name in ("real-tasks", "function-tasks"):
            (folder / name).mkdir(parents=True)
        (folder / "server.py").write_text(SERVER)
        (folder / "neighbour.py").write_text("")
        (folder / "index.html").write_text(PAGE)
        real = []
        for name, difficulty in (("e1", "easy"), ("e2", "easy"), ("m20", "medium"), ("h1", "hard")):
            real.append({"id": f"task_{name}", "difficulty": difficulty, "instruction": f"do {name}",
                         "verify": f"real-tasks/task_{name}.py"})
            (folder / f"real-tasks/task_{name}.py").write_text(VERIFIER.replace("NUMBER", "0" if name == "m20" else "2"))
        (folder / "function-tasks/task_1.py").write_text(VERIFIER.replace("NUMBER", "2"))
        function = [{"id": "task_1", "instruction": "do f1", "verify": "function-tasks/task_1.py"}]
        (folder / "real-tasks.json").write_text(json.dumps(real))
        (folder / "function-tasks.json").write_text(json.dumps(function))
    (tmp_path / "apps" / "ablations").mkdir()
    return tmp_path


def ids(spec):
    return [task["task_id"] for task in worlds.load_tasks(spec, {})]


def play(tasks, texts, out, chat, group_size=1):
    settings = SiteSettings(timeout=10, concurrency=2)
    env = Environment({}, out, settings)
    return rollout.play(scripted(chat, texts), chat, tasks, env=env, settings=settings, group_size=group_size)


def test_tasks_are_chosen_by_application_kind_and_number(clone):
    names = ["e1", "e2", "m20", "h1", "function_1"]
    assert ids(f"infinity:{clone}") == [f"{app}/{name}" for app in ("notes", "xero-invoicing") for name in names]
    assert ids(f"infinity:{clone}/notes") == [f"notes/{name}" for name in names]
    assert ids(f"infinity:{clone}/notes,xero-invoicing:hard") == ["notes/h1", "xero-invoicing/h1"]
    assert ids(f"infinity:{clone}:function:1") == ["notes/function_1"]
    assert ids(f"infinity:{clone}:easy:2") == ["notes/e1", "xero-invoicing/e1"]
    assert ids(f"infinity:{clone}/notes,xero-invoicing:4")[2] == "xero-invoicing/e1"
    both = worlds.load_tasks(f"infinity:{clone}/notes:easy:1,infinity:{clone}/xero-invoicing:1", {})
    assert [(task["task_id"], task.get("source")) for task in both] == [("notes/e1", None), ("xero-invoicing/e1", 1)]


@pytest.mark.parametrize("rest, says", [
    ("/nowhere", "there is no application nowhere; there are notes, xero-invoicing"), (":tricky", "write infinity:PATH"),
    ("/notes,notes", "names notes twice"),
    ("/apps/notes", "applications are neither in .*/apps/notes/apps nor in .*; clone https://github.com")])
def test_a_wrong_choice_is_one_sentence(clone, rest, says):
    with pytest.raises(ValueError, match=says):
        ids(f"infinity:{clone}{rest}")


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1", '[{"id": "task_1"}]'])
def test_a_damaged_file_of_the_clone_is_named(clone, text):
    (clone / "apps/notes/function-tasks.json").write_text(text)
    with pytest.raises(ValueError, match="cannot use .*/notes/function-tasks.json"):
        ids(f"infinity:{clone}/notes")


def test_an_episode_is_judged_by_the_benchmarks_own_file(clone, tmp_path, chat, run):
    """Also: the day is the benchmark's, and of two PUTs at once the last counts, though the server is slower with the first."""
    task = worlds.load_tasks(f"infinity:{clone}/notes:easy:1", {})[0]
    twice = ['do(action="Click", element="0")', "exit('done')"]
    done, = run(play([task], twice, tmp_path, chat))
    assert (done.success, done.checks[0].detail) == (1.0, "n is 2 on Sat Mar 07 2026")
    undone, = run(play([task], ["exit('done')"], tmp_path, chat))
    assert (undone.success, undone.checks[0].detail) == (0.0, "n is 0 on Sat Mar 07 2026")
    del task["script"]
    swapped, = run(play([task], twice, tmp_path, chat))
    assert swapped.checks[0].detail.startswith("n is 1"), "this test's server does not show the trap"


def test_the_agent_cannot_read_the_verifier_and_nobody_outside_the_server(clone, tmp_path, chat, run, monkeypatch):
    heard = []

    async def outside(task, *_, **__):
        """Asks at another address of this machine, as a neighbour in the network would."""
        port = int(task["start_url"].split(":")[2].strip("/"))
        for host in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as probe:
                heard.append(probe.connect_ex((host, port)) == 0)
        return 1.0

    monkeypatch.setattr(evaluate, "score", outside)
    task = worlds.load_tasks(f"infinity:{clone}/notes:easy:1", {})[0]
    tau, = run(play([task], ['do(action="Click", element="1")', "exit('done')"], tmp_path, chat))
    assert "not for visitors" in tau.turns[1].observation and "def verify" not in tau.turns[1].observation
    assert heard == [True, False]


def test_nothing_is_written_into_the_clone(clone, tmp_path, chat, run):
    before = sorted(map(str, clone.glob("apps/**/*")))
    run(play(worlds.load_tasks(f"infinity:{clone}/notes:easy", {}), ["exit('done')"], tmp_path / "out", chat))
    assert sorted(map(str, clone.glob("apps/**/*"))) == before


def test_a_script_finds_elements_as_people_name_them():
    page = ("<a>Acme &amp; Sons <3></a> | <button>Edit <4></button> | open\n<a>Mar 10 <5></a> | <button>Edit all <6></button> "
            "<button>Edit <7></button> | Acme\n<input>Name <8> = Edit</input> <div>Edit <9></div>")

    def acts_on(step):
        return parse(infinity_experts.response_to(page, step)[1]).element

    click = infinity_experts.click
    assert acts_on(click("Edit")) == "4"
    assert acts_on(click("Edit", after="Mar 10")) == "7"
    assert acts_on(click("Edit", after=("Acme & Sons", "Acme"))) == "9"
    assert acts_on(click("Edit", before="Name")) == "7"
    assert acts_on(click("Edit", row="Mar 10")) == "7"
    assert acts_on(click("Edit a")) == "6"
    assert acts_on(click("Sons")) == "3"
    assert acts_on(click("Edit", kind="div")) == "9"
    _, action = infinity_experts.response_to(page, infinity_experts.type_into("Name", 'a "b"'))
    assert parse(action).argument == 'a "b"'
    with pytest.raises(infinity_experts.Lost, match="Delete"):
        acts_on(click("Delete"))


def test_flawed_tasks_are_named_and_the_rest_is_counted_apart(clone, tmp_path, chat, run, capsys):
    assert worlds.validate(f"infinity:{clone}") == 0
    said = capsys.readouterr().out
    assert "10 usable tasks, 0 broken rows" in said and "verify 10" in said
    assert "true from the start: 1 tasks: xero-invoicing/m20" in said
    tasks = worlds.load_tasks(f"infinity:{clone}/xero-invoicing:medium,infinity:{clone}/xero-invoicing:easy", {})
    summary = summarize(run(play(tasks, ["exit('done')"], tmp_path, chat)))
    assert (summary["n"], summary["success_rate"]) == (3, pytest.approx(1 / 3))
    assert (summary["sound"]["n"], summary["sound"]["success_rate"]) == (2, 0.0)
    assert list(summary["per_template"]) == ["medium", "easy"]


def test_known_flaws_are_those_of_the_benchmark():
    assert sum(map(len, infinity.TRUE_FROM_THE_START.values())) == 14
    assert infinity.flaw("figma-slides", "h1", "Resolve Marcus's comment") == "likely broken in the application"
    assert infinity.flaw("figma-slides", "h1", "Rename the deck") == ""
    broken = {instruction: infinity.flaw("figma-slides", "h1", instruction) != "" for instruction in (
        "Set the background to #2d2d2d", "Set the background to dark blue (#0052CC)", "Set all three to #FFFFFF and #383838",
        "Disable the Presentation Icons Pack library", "Remove the Brand Assets 2025 library", "Make the deck available offline",
        "Remove everyone who's currently offline", "Set the duration to 800 milliseconds", "Move in from the bottom (400ms)")}
    assert list(broken.values()) == [True, False, True, True, False, True, False, True, False]
    assert infinity.flaw("paypal-my-wallet", "e9", "Let my card issuer convert") == "likely broken in the application"
    assert infinity.flaw("notes", "e19", "") == ""

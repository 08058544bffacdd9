"""A site started by a command: every episode has a fresh one, and nothing is left running, however things end."""
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, act, answer, chromium, descendants, redirect, require_ipv6, scripted, task_at

import evaluate
import rollout
import worlds
from evaluate import SiteSettings, Environment, by_task, score
from worlds import serve, verifier, webarena
from worlds.browser import SERVED_PORTS, Browser, BrowserSettings, EnvError, origin, sites_of

# A shop that counts: /add adds one. Its second argument says how it misbehaves.
SERVER = '''
import http.server, json, os, signal, socket, subprocess, sys, threading, time
port, how = int(sys.argv[1]), sys.argv[2]
if how == "crashes":
    print("first line")
    sys.exit("no such table: goods")
if how == "never answers":
    time.sleep(60)
class IPv6(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
if how == "is mute":
    listener = socket.create_server(("127.0.0.1", port))
    time.sleep(60)
if how == "floods at the start":
    while True: print("x" * 1000)
if how == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "has a child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", __file__])
def flood():
    while True: print("y" * 1000)
if how == "floods":
    threading.Thread(target=flood, daemon=True).start()
if how == "talks":
    print("sold 3 lamps")
n = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global n
        page = b"<title>shop</title> <a href=/add>add</a> <a href=/api/state>state</a> n is %d"
        if self.path == "/add": n += 1
        if self.path == "/api/state": page = b'{"n": %d}'
        if self.path == "/die": os._exit(7)
        page %= n
        self.send_response(503 if self.path == "/down" else 200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page)
    def log_message(self, *_): pass
if how == "listens at ::1":
    IPv6(("::1", port), Handler).serve_forever()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''
VERIFIER = '''
import requests
def verify(server_url):
    print("hello")
    n = requests.get(server_url + "/api/state").json()["n"]
    return n == 1, f"n is {n}"
'''
ADD = 'do(action="Click", element="0")'
CFG = SiteSettings(timeout=60, concurrency=2)


@pytest.fixture
def shop(tmp_path):
    """shop(how="works", **changes): a served task, as loading yields it."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "verify.py").write_text(VERIFIER)

    def shop(how="works", **changes):
        return {"task_id": 1, "sites": ["shop"], "intent": "add one", "cwd": str(tmp_path),
                "serve": f"exec {sys.executable} {tmp_path}/server.py {{port}} '{how}'",
                "start_url": "http://127.0.0.1:{port}/",
                "eval": {"eval_types": ["verify"], "verify": str(tmp_path / "verify.py")}, **changes}
    return shop


def running(mark) -> list[str]:
    """The command lines of all processes of the machine that name a file."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(mark) in command:
                found.append(command)
    return found


def guards() -> list[str]:
    return [command for command in descendants().values() if "guard.py" in command]


def nothing_left(tmp_path) -> bool:
    until = time.monotonic() + 60
    while running(tmp_path) or guards():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def serve_one(task, tmp_path, use=None, seconds=60.0):
    """Serves one task and awaits use(played) meanwhile."""
    async def go():
        async with serve.Servers(tmp_path).serve(task, seconds) as played:
            return await use(played) if use else None
    return asyncio.run(go())


def play(tasks, texts, tmp_path, chat, group_size=1, settings=CFG):
    env = Environment({}, tmp_path, settings)
    acting = texts if callable(texts) else scripted(chat, texts)
    return rollout.play(acting, chat, tasks, env=env, settings=settings, group_size=group_size)


# ------------------------------------------------------------------------------------------ episodes


def test_every_episode_has_a_fresh_site_and_none_is_left(shop, tmp_path, chat, run):
    played = run(play([shop(), shop() | {"task_id": 2}], [ADD, "exit('done')"], tmp_path, chat, group_size=3))
    assert [(tau.status, tau.success, tau.fault) for tau in played] == 6 * [("ok", 1.0, "")]
    assert [tuple(check) for check in played[0].checks] == [("verify verify.py", True, "n is 1")]
    assert len({tau.turns[0].url for tau in played}) > 1
    assert "n is 0" in played[-1].turns[0].observation
    assert nothing_left(tmp_path)
    assert not (tmp_path / "servers.log").exists()


def test_the_verifier_sees_what_was_not_done(shop, tmp_path, chat, run):
    tau, = run(play([shop()], ["exit('done')"], tmp_path, chat))
    assert (tau.success, tau.checks[0].detail) == (0.0, "n is 0")


def test_a_task_may_start_in_two_tabs(shop, tmp_path, chat, run):
    starts = "http://127.0.0.1:{port} |AND| http://127.0.0.1:{port}/add"
    tau, = run(play([shop(start_url=starts)], ["exit('done')"], tmp_path, chat))
    assert (tau.status, tau.success) == ("ok", 1.0)
    assert "this is tab 0 of 2" in tau.turns[0].observation


def test_the_port_stands_in_start_page_checks_and_intent(shop, tmp_path, chat, run):
    """Each episode has an intent of its own then; the statistics still know that it is one task."""
    spec = {"eval_types": ["url_match"], "reference_url": "http://localhost:{port}/add"}
    task = shop(intent="open http://127.0.0.1:{port}/add", eval=spec)
    played = run(play([task], [ADD, "exit('done')"], tmp_path, chat, group_size=2))
    assert [tau.success for tau in played] == [1.0, 1.0]
    assert played[0].task["intent"] == "open " + played[0].turns[1].url
    assert len(by_task(played)) == 1


def test_a_server_that_dies_voids_the_episode_and_its_output_is_kept(shop, tmp_path, chat, run):
    tau, = run(play([shop()], lambda tau, slot: kill_server(tau, chat), tmp_path, chat))
    assert tau.status == "env_error"
    assert "server did not answer any more when the episode ended" in tau.fault
    assert "SIGKILL" in (tmp_path / "servers.log").read_text()
    assert nothing_left(tmp_path)


def test_a_server_that_cannot_be_started_voids_its_episode_alone(shop, tmp_path, chat, run):
    """Its directory has gone since the task was loaded. The run ended with FileNotFoundError."""
    lost = shop(task_id=2, cwd=str(tmp_path / "gone"))
    played = run(play([lost, shop()], [ADD, "exit('done')"], tmp_path, chat))
    assert [tau.status for tau in played] == ["env_error", "ok"]
    assert "the site's server could not be started: [Errno 2]" in played[0].broken_by
    assert nothing_left(tmp_path)


def test_a_guard_that_cannot_be_started_voids_the_episode(shop, tmp_path, chat, run, monkeypatch):
    def full(self):
        raise OSError(11, "no more processes")

    monkeypatch.setattr(serve.Servers, "hold_guard", full)
    tau, = run(play([shop()], [ADD, "exit('done')"], tmp_path, chat))
    assert tau.broken_by == "the site's server could not be started: [Errno 11] no more processes"


async def kill_server(tau, chat):
    """An Act: kills the server behind the page, then exits."""
    port = tau.turns[0].url.split(":")[2].strip("/")
    for process, command in descendants().items():
        if f"server.py {port} " in command:
            os.kill(process, signal.SIGKILL)
    return [*chat.encode("exit('done')"), chat.end_id], [], True


def stop_server(tau):
    """Stops the process behind the page: it goes on running and answers nobody."""
    for process, command in descendants().items():
        if f"server.py {port_of(tau)} " in command:
            os.kill(process, signal.SIGSTOP)


def test_a_server_that_hangs_voids_the_episode_and_its_output_is_kept(shop, tmp_path, chat, run, monkeypatch):
    stopped = []
    limits = iter((3, 60))  # seconds that the stopped server has to answer, and the one of the second attempt
    require_answer = serve.require_answer

    async def hurried(task, seconds):
        assert seconds == ONE.timeout
        await require_answer(task, next(limits))

    monkeypatch.setattr(serve, "require_answer", hurried)

    async def acting(tau, slot):
        if not stopped:
            stopped.append(port_of(tau))
            stop_server(tau)
        return [*chat.encode("exit('done')"), chat.end_id], [], True

    tau, = run(play([shop("talks")], acting, tmp_path, chat, settings=ONE))
    assert stopped and "asking the task's server took more than 3 s" in tau.fault and tau.status == "ok"
    log = (tmp_path / "servers.log").read_text()
    assert log.count("== task") == 1
    assert "did not answer at / any more" in log and "sold 3 lamps" in log
    assert nothing_left(tmp_path)


def test_the_output_of_a_server_that_hangs_is_kept_without_a_verdict(shop, tmp_path):
    """As when the start page does not come: such an episode is not judged."""
    async def use(played):
        for process, command in descendants().items():
            if "server.py" in command:
                os.kill(process, signal.SIGSTOP)
    serve_one(shop("talks"), tmp_path, use)
    assert "sold 3 lamps" in (tmp_path / "servers.log").read_text()
    assert nothing_left(tmp_path)


def test_what_a_server_printed_is_kept_if_its_start_page_has_an_error(shop, tmp_path, chat, run):
    tau, = run(play([shop("talks", start_url="http://127.0.0.1:{port}/down")], ["exit()"], tmp_path, chat))
    assert "/down answered 503" in tau.broken_by
    log = (tmp_path / "servers.log").read_text()
    assert log.count("/down answered 503") == 2  # it was tried twice
    assert log.count("sold 3 lamps") == 2
    assert nothing_left(tmp_path)


def test_a_killed_chromium_leaves_no_server(shop, tmp_path, chat):
    killed = []
    others = chromium("browser")  # the one that tests share

    async def acting(tau, slot):
        if not killed:
            for process in set(chromium("browser")) - set(others):
                killed.append(process)
                os.kill(process, signal.SIGKILL)
        return [*chat.encode("exit('done')"), chat.end_id], [], True

    tau, = asyncio.run(play([shop()], acting, tmp_path, chat))
    assert killed and tau.fault and tau.status == "ok"
    assert nothing_left(tmp_path)


def test_the_run_goes_on_without_the_guard_that_somebody_killed(shop, tmp_path, chat, run):
    async def acting(tau, slot):
        if tau.member == 0:
            for process, command in descendants().items():
                if "guard.py" in command:
                    os.kill(process, signal.SIGKILL)
        return [*chat.encode("exit('done')"), chat.end_id], [], True

    played = run(play([shop()], acting, tmp_path, chat, group_size=5))
    assert [tau.status for tau in played] == 5 * ["ok"]
    assert nothing_left(tmp_path)


# ------------------------------------------------------------------ the next server, during the verdict

ONE = SiteSettings(timeout=60, concurrency=1)


def ports_up(tmp_path) -> list[int]:
    """The ports of the servers that run now."""
    commands = [command.split() for command in running(tmp_path)]
    return [int(command[2]) for command in commands if command[1].endswith("server.py")]


def port_of(tau) -> int:
    return int(origin(tau.turns[0].url).rpartition(":")[2])


def test_the_next_server_is_up_before_the_verdict_on_the_last_episode(shop, tmp_path, chat, run, monkeypatch):
    ready = []

    async def verdict(task, *_, **__):
        own = int(origin(task["start_url"]).rpartition(":")[2])
        until = time.monotonic() + 60
        while task["task_id"] < 3 and time.monotonic() < until:
            others = [port for port in ports_up(tmp_path) if port != own]
            if others and await serve.answers("127.0.0.1", others[0], "/"):
                ready.append(others[0])
                break
            await asyncio.sleep(0.05)
        return 1.0

    monkeypatch.setattr(evaluate, "score", verdict)
    tasks = [shop(task_id=number) for number in (1, 2, 3)]
    played = run(play(tasks, ["exit('done')"], tmp_path, chat, settings=ONE))
    assert [(tau.task["task_id"], tau.status) for tau in played] == [(1, "ok"), (2, "ok"), (3, "ok")]
    assert ready == [port_of(tau) for tau in played[1:]]
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("group", [1, 3])
def test_a_verdict_that_fails_changes_neither_order_nor_number_of_the_episodes(shop, tmp_path, chat, run, monkeypatch, group):
    judged, started = [], []
    start = serve.Servers.start

    async def count(servers, task, seconds):
        started.append(task["task_id"])
        return await start(servers, task, seconds)

    async def verdict(task, *_, **__):
        judged.append(task["task_id"])
        if len(judged) == 1:
            raise EnvError("the verifier broke")
        return 1.0

    monkeypatch.setattr(serve.Servers, "start", count)
    monkeypatch.setattr(evaluate, "score", verdict)
    tasks = [shop(task_id=number) for number in range(3 // group)]
    played = run(play(tasks, ["exit('done')"], tmp_path, chat, group_size=group, settings=ONE))
    wanted = [task["task_id"] for task in tasks for _ in range(group)]
    assert judged == [wanted[0], *wanted] and sorted(started) == sorted(judged)
    assert [tau.fault for tau in played] == ["the verifier broke", "", ""]
    assert nothing_left(tmp_path)


def test_a_log_that_cannot_be_written_hides_no_cause(shop, tmp_path):
    (tmp_path / "servers.log").mkdir()  # as on a full disk, opening it fails
    with pytest.raises(EnvError, match="no such table: goods"):
        serve_one(shop("crashes"), tmp_path)


def test_a_prepared_server_that_does_not_come_up_costs_an_attempt(shop, tmp_path, chat, run):
    """The second start fails: that of the second episode, while the first is judged."""
    command = shop()["serve"]
    fail_once = f"if mkdir first; then {command}; elif mkdir second; then echo no stock; exit 3; else {command}; fi"
    played = run(play([shop(serve=fail_once)], [ADD, "exit('done')"], tmp_path, chat, group_size=3, settings=ONE))
    assert [(tau.status, tau.success) for tau in played] == 3 * [("ok", 1.0)]
    assert "exit status 3" in played[1].fault and not played[0].fault and not played[2].fault
    assert "no stock" in (tmp_path / "servers.log").read_text()
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("how", ["a worker raises", "the run is cancelled"])
def test_what_was_prepared_and_is_not_played_ends_with_the_batch(shop, tmp_path, chat, run, monkeypatch, how):
    async def verdict(*_, **__):
        until = time.monotonic() + 60
        while len(ports_up(tmp_path)) < 2 and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert len(ports_up(tmp_path)) == 2
        if how == "a worker raises":
            raise RuntimeError("a bug")
        playing.cancel()
        await asyncio.sleep(600)

    async def go():
        nonlocal playing
        tasks = [shop(task_id=1), shop(task_id=2)]
        playing = asyncio.ensure_future(play(tasks, ["exit('done')"], tmp_path, chat, settings=ONE))
        await asyncio.wait([playing])
        return ports_up(tmp_path)

    playing = None
    monkeypatch.setattr(evaluate, "score", verdict)
    assert run(go()) == []
    assert playing.cancelled() == (how == "the run is cancelled")
    if not playing.cancelled():
        assert "a bug" in str(playing.exception())
    assert nothing_left(tmp_path)


# ------------------------------------------------------------------------------- a folder of its own


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The machine's folder for temporary files, for one test. A path may hold a space."""
    folder = tmp_path / "temporary files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_every_server_has_an_empty_folder_of_its_own_that_ends_with_it(shop, tmp_path, temporary):
    """Even if it still writes into the folder when it is asked to end."""
    command = "ls {tmp} | wc -l >> counts; touch {tmp}/goods.db; trap 'mkdir {tmp}/late' TERM; "
    task = shop(serve=command + shop()["serve"].removeprefix("exec ") + " & wait")

    async def go():
        servers = serve.Servers(tmp_path)
        async with servers.serve(task, 60), servers.serve(task, 60):
            folder, = temporary.iterdir()
            assert folder.stat().st_mode & 0o77 == 0
            assert [[file.name for file in own.iterdir()] for own in folder.iterdir()] == 2 * [["goods.db"]]
        assert list(folder.parent.iterdir()) == []
        async with servers.serve(task, 60):  # the guard is another one now
            assert len(list(folder.iterdir())) == 1

    asyncio.run(go())
    assert (tmp_path / "counts").read_text().split() == ["0", "0", "0"]
    assert list(temporary.iterdir()) == []


def test_no_folder_is_made_for_a_command_that_names_none(shop, tmp_path, temporary):
    async def use(played):
        assert list(temporary.iterdir()) == []
    serve_one(shop(), tmp_path, use)


def test_a_server_that_does_not_come_up_leaves_no_folder(shop, tmp_path, temporary):
    with pytest.raises(EnvError, match="exit status 3"):
        serve_one(shop(serve="touch {tmp}/x; exit 3 # {port}"), tmp_path)
    assert list(temporary.iterdir()) == []


# ----------------------------------------------------------------------------------- servers that fail


@pytest.mark.parametrize("how, says", [
    ("crashes", "ended before it answered (exit status 1): no such table: goods"),
    ("never answers", "took more than 1 s: it wrote nothing"),
    ("is mute", "took more than 1 s: it wrote nothing"),
    ("floods at the start", "took more than 5 s: xxxx")])
def test_a_server_that_does_not_come_up_is_one_sentence_and_its_output_is_kept(shop, tmp_path, how, says):
    seconds = {"crashes": 60, "floods at the start": 5}.get(how, 1)  # the others may need it all for their start
    with pytest.raises(EnvError) as caught:
        serve_one(shop(how), tmp_path, seconds=seconds)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    log = (tmp_path / "servers.log").read_text()
    assert "task 1" in log and "server.py" in log and len(log) < 6000
    assert ("first line" in log) == (how == "crashes")
    assert nothing_left(tmp_path)


def test_a_server_that_goes_to_the_background_is_told_to_stay(shop, tmp_path):
    with pytest.raises(EnvError, match="exit status 0.; start it in the foreground"):
        serve_one(shop(serve="sleep {port} &"), tmp_path)


def test_a_command_that_does_not_exist_is_one_sentence(shop, tmp_path):
    with pytest.raises(EnvError, match="exit status 127.*no-such-program"):
        serve_one(shop(serve="no-such-program {port}"), tmp_path)


def test_a_server_is_up_once_its_ready_path_answers_without_an_error(shop, tmp_path):
    with pytest.raises(EnvError, match="at /down took more than 1 s"):
        serve_one(shop(ready="/down"), tmp_path, seconds=1)


@pytest.mark.parametrize("status, is_up", [(b"200", True), (b"404", True), (b"500", False), (b"2" * 5000, False),
                                           (b"20", False), (b"-1", False), (b"", False)])
def test_a_status_line_of_nonsense_is_no_answer(status, is_up):
    """Five thousand digits ended the run with Python's own words about them."""
    async def asked():
        async def answer(reader, writer):
            writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            _, port = server.sockets[0].getsockname()
            return await serve.answers("127.0.0.1", port, "/")
    assert asyncio.run(asked()) == is_up


def test_a_server_has_time_to_end(shop, tmp_path, monkeypatch):
    """Where sh is dash, the shell ended at once, and SIGKILL followed."""
    monkeypatch.setattr(serve, "GRACE", 60.0)
    goodbye = tmp_path / "goodbye"
    ends_slowly = f"trap 'sleep 0.3; echo bye > {goodbye}; exit' TERM; while true; do sleep 0.05; done"
    (tmp_path / "site.sh").write_text(f"{shop()['serve'].replace('{port}', '$1')} & {ends_slowly}")
    serve_one(shop(serve=f"sh {tmp_path}/site.sh {{port}}"), tmp_path)
    assert goodbye.read_text() == "bye\n"
    assert nothing_left(tmp_path)


def test_a_server_that_is_mute_is_told_from_one_at_another_address(shop, tmp_path):
    with pytest.raises(EnvError, match="first answer of the server at / took more than 1 s"):
        serve_one(shop("is mute"), tmp_path, seconds=1)


@pytest.mark.parametrize("how", ["works", "listens at ::1"])
def test_localhost_is_both_of_its_addresses(shop, tmp_path, chat, run, how):
    """Development servers such as Vite's listen at ::1 alone where localhost means that first."""
    if how == "listens at ::1":
        require_ipv6()
    judged = {"eval_types": ["url_match"], "reference_url": "http://localhost:{port}/add"}
    task = shop(how, start_url="http://localhost:{port}/", eval=judged)
    played, = run(play([task], [ADD, "exit('done')"], tmp_path, chat))
    assert (played.fault, played.success) == ("", 1.0)
    assert "n is 1" in played.turns[1].observation


def test_a_server_at_the_other_address_is_told_from_a_dead_one(shop, tmp_path):
    require_ipv6()
    with pytest.raises(EnvError, match=r"answers at localhost, not at 127.0.0.1; write http://localhost:\{port\}"):
        serve_one(shop("listens at ::1"), tmp_path, seconds=5)


@pytest.mark.parametrize("how", ["ignores SIGTERM", "has a child", "floods"])
def test_the_whole_group_ends_whatever_it_does(shop, tmp_path, how):
    async def use(played):
        await asyncio.sleep(0.3)
        assert len(running(tmp_path)) == (2 if how == "has a child" else 1)
    serve_one(shop(how), tmp_path, use)
    assert nothing_left(tmp_path)


def test_commands_of_a_shell_work_too(shop, tmp_path):
    async def use(played):
        port = int(played["start_url"].split(":")[2].strip("/"))
        assert await serve.answers("127.0.0.1", port, "/")
    serve_one(shop(serve="cd / && true; " + shop()["serve"].removeprefix("exec ") + " & wait"), tmp_path, use)
    assert nothing_left(tmp_path)


def test_a_port_that_somebody_takes_first_is_left_to_them(shop, tmp_path, site, monkeypatch):
    """The stranger answers at once, long before our server finds its port taken."""
    taken = int(site({"/": "a stranger's page"}).rpartition(":")[2])
    offered = []

    def free_port(ports):
        offered.append(next(ports) if offered else taken)
        return offered[-1]

    async def use(played):
        assert played["start_url"] != f"http://127.0.0.1:{taken}/"
    monkeypatch.setattr(serve, "free_port", free_port)
    if Path("/proc/net/tcp").exists():  # the system tells whose port it is, however long our server takes to start
        monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=itertools.count(0.0, 0.01).__next__))
    serve_one(shop(), tmp_path, use)
    assert len(offered) == 2


def test_ports_in_use_are_not_offered(site):
    taken = int(site({"/": "x"}).rpartition(":")[2])
    assert serve.free_port(iter([taken, *SERVED_PORTS])) in SERVED_PORTS
    with pytest.raises(EnvError, match="is free"):
        serve.free_port(iter([taken] * 999))


# -------------------------------------------------------------------------------- when the run is killed

RUN = '''
import asyncio, json, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from worlds import serve
from worlds.verifier import verify
task = json.loads({task!r})
servers = serve.Servers(Path({out!r}))
async def one():
    async with servers.serve(task, 60) as played:
        print("up", servers.guard.pid, flush=True)
        await verify({verifier!r}, "x")
async def main():
    servers.prepare(dict(task), 60)  # nobody takes it
    await asyncio.gather(one(), one())
if {early}:
    def drain(self):
        print("up", servers.guard.pid, flush=True)
        os.kill(os.getpid(), 9)
    serve.Server.drain = drain
asyncio.run(main())
'''


def has_ended(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "SIGTERM", "SIGKILL right after the start"])
def test_servers_and_verifiers_end_with_the_run_however_it_ends(shop, tmp_path, how):
    """So do their folders."""
    (tmp_path / "hang.py").write_text("import time\ndef verify(url): time.sleep(60)")
    (tmp_path / "temporary").mkdir()
    task = shop("ignores SIGTERM")
    task["serve"] += " {tmp}"
    script = RUN.format(root=str(ROOT), task=json.dumps(task), out=str(tmp_path),
                        verifier=str(tmp_path / "hang.py"), early="right" in how)
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                           env={**os.environ, "TMPDIR": str(tmp_path / "temporary")})
    with run:
        guard = int(run.stdout.readline().split()[1])
        if "right" not in how:
            run.stdout.readline()
            until = time.monotonic() + 40
            while len(running(tmp_path)) < 7 and time.monotonic() < until:  # the run, its guard, 3 servers, 2 verifiers
                time.sleep(0.05)
            assert len(running(tmp_path)) == 7
            run.send_signal(getattr(signal, how))
    until = time.monotonic() + 60
    while (running(tmp_path) or not has_ended(guard)) and time.monotonic() < until:
        time.sleep(0.05)
    assert running(tmp_path) == [] and has_ended(guard)
    assert list((tmp_path / "temporary").iterdir()) == []


# ------------------------------------------------------------------------------------------- verifiers


def judge(tmp_path, text, url="http://127.0.0.1:9"):
    (tmp_path / "judge.py").write_text(text)
    return asyncio.run(verifier.verify(str(tmp_path / "judge.py"), url))


@pytest.mark.parametrize("body, says", [
    ("raise KeyError('goods')", "KeyError: 'goods' (line 2)"),
    ("import json; json.loads('{')", "(line 2)"),  # of this file, not of json's
    ("import time; time.sleep(60)", "took more than 1 s"),
    ("while True: print('x' * 9999)", "took more than 1 s"),
    ("return 1, 'one'", "returned (1, 'one'), not (bool, str)"),
    ("return None", "returned None"),
    ("pass\ndel verify", "it has no verify(server_url) -> (bool, str)"),
    ("exit(3)", "SystemExit: 3"),
    ("import os; os._exit(0)", "without a verdict"),
    ("import os\n    for end in range(1, 20):\n        try: os.write(end, b'junk')\n        except OSError: pass\n    return True, ''",
     "wrote something else than a verdict"),
    ("import os\n    for end in range(3, 20):\n        try: os.write(end, b'x' * 99999)\n        except OSError: pass\n    return True, ''",
     "wrote something else than a verdict"),
    ("import os\n    for end in range(3, 20):\n        try: os.write(end, b'{}')\n        except OSError: pass\n    os._exit(0)",
     "wrote something else than a verdict")])
def test_a_verifier_without_a_verdict_is_an_environment_error(tmp_path, monkeypatch, body, says):
    if "took more" in says:  # the others must have started before it is over
        monkeypatch.setattr(verifier, "TIMEOUT", 1.0)
    with pytest.raises(EnvError) as caught:
        judge(tmp_path, f"def verify(url):\n    {body}")
    assert says in str(caught.value)
    assert running(tmp_path) == []


def test_a_verifier_that_starts_something_leaves_nothing(tmp_path):
    text = ("import subprocess, sys\ndef verify(url):\n    subprocess.Popen([sys.executable, '-c', "
            "'import time; time.sleep(60)', __file__])\n    return True, 'yes'")
    assert judge(tmp_path, text) == (True, "yes")
    assert nothing_left(tmp_path)


def test_a_process_that_a_verifier_leaves_delays_no_verdict(tmp_path):
    """It holds the pipe for the verdict, in a session of its own."""
    ends = tmp_path / "ends"
    text = ("import os, time\ndef verify(url):\n    if os.fork() == 0:\n        os.setsid()\n"
            f"        while not os.path.exists({str(ends)!r}): time.sleep(0.05)\n        os._exit(0)\n    return True, 'yes'")
    try:
        assert judge(tmp_path, text) == (True, "yes")
        assert not ends.exists()
    finally:
        ends.touch()


def test_verifiers_may_import_their_neighbours_and_leave_no_files(tmp_path):
    (tmp_path / "helper.py").write_text("word = 'neighbour'")
    assert judge(tmp_path, "import helper\ndef verify(url): return True, helper.word") == (True, "neighbour")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["helper.py", "judge.py"]


def test_the_stand_in_does_what_verifiers_need_of_requests(site, tmp_path, monkeypatch):
    def echo(request):
        length = int(request.headers.get("Content-Length") or 0)
        answer(request, json.dumps([request.command, request.path, request.rfile.read(length).decode()]).encode())

    def gone(request):
        answer(request, b"gone", status=404)

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    text = f"""
import sys
sys.path.append({str(ROOT / 'worlds/verifier')!r})
import requests
def verify(url):
    assert requests.get(url + "/", params={{"a": "b c"}}).json() == ["GET", "/?a=b+c", ""]
    assert requests.post(url + "/", json={{"a": 1}}).json()[2] == '{{"a": 1}}'
    reply = requests.get(url + "/gone")
    assert reply.status_code == 404 and reply.text == "gone" and not reply.ok
    try:
        reply.raise_for_status()
    except requests.HTTPError:
        pass
    try:
        requests.get("http://127.0.0.1:9/")
    except requests.exceptions.ConnectionError as error:
        return True, str(error)
"""
    passed, reason = judge(tmp_path, text, site({"/": echo, "/gone": gone}))
    assert passed and "refused" in reason


def test_a_real_requests_goes_first(tmp_path):
    (tmp_path / "requests.py").write_text("real = True")
    assert judge(tmp_path, "import requests\ndef verify(url): return requests.real, ''") == (True, "")


# ------------------------------------------------------------------------------------- what pages reach


def test_private_paths_are_closed_to_the_agent_and_open_to_the_application(site, browse):
    documents = []

    def secret(request):
        if request.headers.get("Sec-Fetch-Dest") == "document":
            documents.append(request.path)
        answer(request, b"the solution")

    links = ["/api/state", "/x/../%61PI//state", "/hop", "/api", "/x/..//api/state?x#y", "/.%2fapi/state"]
    page = "".join(f"<a href='{link}'>{number}</a>" for number, link in enumerate(links))
    page += """<form action=/api/reset method=post><button>send</button></form>
               <button onclick="location = '/api/state'">go</button>
               <iframe src=/api/frame></iframe> still here
               <p></p><script>fetch('/api/own').then(r => r.text()).then(t => document.querySelector('p').append(t + '!'))</script>"""
    base = site({"/": page, "/hop": redirect("/api/state"), "/apis": "<a href=/>harmless</a>"}
                | {path: secret for path in ("/api", "/api/state", "/api/reset", "/api/frame", "/api/own")})

    async def test(session):
        seen = (await session.observe())[1]
        assert "the solution!" in seen and seen.count("the solution") == 1
        for element in range(len(links) + 2):
            seen = await act(session, f'do(action="Click", element="{element}")')
            assert "is not for visitors and was not opened" in seen and "still here" in seen, (element, seen)
            assert "title: not found" not in seen
        await session.page.goto(base + "/apis")
        assert "harmless" in (await session.observe())[1]
    browse(test, base + "/", private=["/api/"])
    assert documents == []


def test_a_new_tab_with_a_private_page_is_closed_before_it_is_read(site, browse):
    base = site({"/": "<a href=/api/state target=_blank>tab</a> still here", "/api/state": "the solution"})

    async def test(session):
        await session.observe()
        seen = await act(session, 'do(action="Click", element="0")')
        assert "not for visitors" in seen and "still here" in seen and "solution" not in seen
        assert len(session.browser_context.pages) == 1
    browse(test, base + "/", private=["/api/"])


def test_the_judge_may_open_private_pages(shop, tmp_path, chat, run):
    target = {"url": "http://127.0.0.1:{port}/api/state", "locator": "", "required_contents": {"must_include": ['"n": 1']}}
    task = shop(private=["/api/"], eval={"eval_types": ["program_html"], "program_html": [target]})
    tau, = run(play([task], [ADD, 'do(action="Click", element="1")', "exit('done')"], tmp_path, chat))
    assert tau.success == 1.0, tau.checks
    assert "not for visitors" in tau.turns[2].observation


def test_a_served_task_reaches_the_ports_of_servers_and_no_others(shop, site):
    task = shop(intent="write http://elsewhere.org/ and http://localhost:{port}/")
    assert sites_of([task, shop()]) == {f"http://127.0.0.1:{port}" for port in SERVED_PORTS}
    outside = site({"/": "x"})

    async def go():
        async with Browser(BrowserSettings(timeout=5), sites_of([task])) as browser:
            async with serve.Servers(Path(task["cwd"])).serve(task, 60) as played:
                session = await browser.open(played)
                reach = "url => fetch(url, {mode: 'no-cors'}).then(() => true, () => false)"
                reached = [await session.page.evaluate(reach, url) for url in (played["start_url"], outside)]
                await session.close()
                return reached
    assert asyncio.run(go()) == [True, False]


def test_the_page_has_the_tasks_clock_and_it_ticks(site, browse):
    base = site({"/": "<script>document.write(new Date(2026, 2, 7) - new Date() < 864e5)</script><p>"
                      "<script>setTimeout(() => document.querySelector('p').append('later'), 300)</script>"})

    async def test(session):
        assert "later" in (await session.observe())[1]
        first, day = await session.page.evaluate("[Date.now(), new Date().toISOString()]")
        assert day.startswith("2026-03-07T")
        await asyncio.sleep(0.1)
        assert first + 50 < await session.page.evaluate("Date.now()") < first + 60_000
    browse(test, base + "/", clock="2026-03-07T12:00:00")


# ------------------------------------------------------------------------------------------- task files


def test_a_task_file_names_its_folder_and_verifier_relative_to_itself(shop, tmp_path):
    row = shop(cwd=".", eval={"eval_types": ["verify"], "verify": "verify.py"})
    (tmp_path / "tasks.json").write_text(json.dumps([row]))
    task, = worlds.load_tasks(str(tmp_path / "tasks.json"), {})
    assert (task["cwd"], task["eval"]["verify"]) == (str(tmp_path), str(tmp_path / "verify.py"))


@pytest.mark.parametrize("changes, says", [
    ({"eval": {"eval_types": ["url_match"], "reference_url": "http://localhost:8000/done"}},
     "eval names http://localhost:8000, where this task's server is not; write its port as {port}, at the host of start_url"),
    ({"serve": "python3 server.py"}, "{port}"), ({"serve": 5}, "serve is 5"),
    ({"ready": "/{tmp}"}, "ready names {tmp}"), ({"start_url": "http://127.0.0.1:{port}/?data={tmp}"}, "start_url names {tmp}"),
    ({"start_url": "http://127.0.0.1:8000/"}, "starts at"), ({"ready": "up"}, "ready is 'up'"),
    ({"cwd": "nowhere"}, "is not a folder"), ({"cwd": 3}, "cwd is 3"), ({"cwd": "a\0b"}, "cwd is 'a"),
    ({"serve": "python3 server.py {port}\0"}, "serve is 'python3"), ({"clock": "noon"}, "clock is 'noon'"),
    ({"private": "/api/"}, "private is '/api/'"), ({"private": ["api"]}, "private is ['api']"),
    ({"script": 1}, "script is 1"), ({"eval": {"eval_types": ["verify"]}}, "eval.verify is None"),
    ({"eval": {"eval_types": ["verify"], "verify": "no.py"}}, "does not exist")])
def test_what_is_wrong_with_a_served_task_is_said(shop, tmp_path, capsys, changes, says):
    (tmp_path / "tasks.json").write_text(json.dumps([shop(**changes)]))
    assert worlds.validate(str(tmp_path / "tasks.json")) == 1
    assert says in capsys.readouterr().out.replace("\n    ", " ")


@pytest.mark.parametrize("host, is_remarked", [("localhost", True), ("127.0.0.1", False)])
def test_a_check_at_another_host_than_the_start_page_is_remarked(shop, tmp_path, capsys, host, is_remarked):
    """It would look at the page without the agent's login."""
    looks = {"url": f"http://{host}:{{port}}/", "locator": "", "required_contents": {"must_include": ["n is 1"]}}
    row = shop(eval={"eval_types": ["program_html"], "program_html": [looks]})
    (tmp_path / "tasks.json").write_text(json.dumps([row]))
    assert worlds.validate(str(tmp_path / "tasks.json")) == 0
    said = capsys.readouterr().out.replace("\n    ", " ")
    assert ("eval looks at http://localhost:{port}, which does not share the cookies" in said) == is_remarked


def test_a_login_of_localstorage_alone_is_refused_for_a_served_task(shop, tmp_path, capsys):
    place = {"origin": "http://127.0.0.1:5000", "localStorage": [{"name": "token", "value": "ada"}]}
    expired = {"domain": "127.0.0.1", "name": "s", "expires": 1.7e9}
    (tmp_path / "tasks.json").write_text(json.dumps([shop(storage_state="ada.json")]))

    def said(cookies, place):
        (tmp_path / "ada.json").write_text(json.dumps({"cookies": cookies, "origins": [place]}))
        is_wrong = worlds.validate(str(tmp_path / "tasks.json"))
        return is_wrong, capsys.readouterr().out.replace("\n    ", " ")

    is_wrong, text = said([], place)
    assert is_wrong and "only localStorage, which a copy of the site on another port does not see" in text
    is_wrong, text = said([expired], place)
    assert is_wrong and "has expired; log in" in text
    is_wrong, _ = said([], place | {"origin": "http://login.example.com"})  # of a site that stays where it is
    assert not is_wrong


def test_verify_counts_among_the_checks_of_a_task(site, tmp_path, browse):
    """Without serve as well: the address of the site is that of the start page."""
    (tmp_path / "v.py").write_text("def verify(url): return url.startswith('http://127.0.0.1:'), url")
    base = site({"/": "x"})
    spec = {"eval_types": ["string_match", "verify"], "verify": str(tmp_path / "v.py"),
            "reference_answers": {"exact_match": "red"}}
    task = task_at(base + "/") | {"eval": spec}

    async def test(session):
        why = []
        assert await score(task, "red", session.page, why) == 1.0
        assert why[1].detail == origin(base)
        assert await score(task, "blue", session.page) == 0.0
    browse(test, base + "/")

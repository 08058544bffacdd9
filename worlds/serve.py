"""A site started by a command: a fresh copy for each episode, and nothing is left running.

    {"serve": "python3 server.py --port {port} --data {tmp}",    started for each episode
     "cwd": "shop",                       where; relative to the task file
     "ready": "/",                        the server is up when this path answers
     "clock": "2026-03-07T12:00:00",      the page's clock starts here
     "private": ["/api/", "/solutions/"], paths that the agent cannot open
     "start_url": "http://127.0.0.1:{port}/", ...}

    servers = Servers(out)
    async with servers.serve(task, seconds=30) as played:     # played: the task with its port
        ...                                                   # play it and judge it

    servers.prepare(task, seconds=30)   # starts a server now; the next `serve` of this task takes it
    await servers.end_prepared()        # ends those that nobody has taken

{tmp} is an empty folder for what a server writes, such as a SQLite file, since copies must not share
it. A command that does not name it gets none. It is deleted when the server ends.

Each server runs in its own process group, which is killed when the block ends. If this process dies
first, guard.py kills the group and deletes the folders. Ports come from browser.SERVED_PORTS, the only
ones that pages can reach.

Two things can leave a server running: one that leaves its process group (a daemon), and SIGKILL of
this process and of the guard together. So let your server run in the foreground.
"""
import asyncio
import contextlib
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

from .browser import ENV_FAILED, SERVED_PORTS, EnvError, TookTooLong, bounded, first_line, origin, start_pages

GRACE = 1.0   # seconds: to answer after an episode; to end before it is killed
TRIES = 5     # ports that a start tries
KEPT = 4000   # bytes: the end of a server's output
LOG_BYTES = 1_000_000  # at which servers.log stops growing


# ------------------------------------------------------------------------------------------ ports --


def can_bind(port: int, reuse: bool) -> bool:
    """Whether a server could listen at a port. reuse: with SO_REUSEADDR, which most servers set."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port(ports) -> int:
    """The next port that nobody uses. ports: an iterator that goes round SERVED_PORTS."""
    # For a minute after a server has ended, its port is free only to servers that set SO_REUSEADDR.
    for reuse in (False, True):
        for port in itertools.islice(ports, len(SERVED_PORTS)):
            if can_bind(port, reuse):
                return port
    raise EnvError(f"none of the {len(SERVED_PORTS)} ports for servers is free")


def listens(group: int, port: int) -> bool:
    """Whether a process of the group listens at the port. Only Linux tells; elsewhere False."""
    # 1) The sockets that listen at the port.
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(table).read_text().splitlines()
            for line in lines[1:]:  # below the heads of the columns
                fields = line.split()
                address = fields[1]  # 0100007F:1F90, IP and port
                state = fields[3]
                if state == "0A" and address.endswith(f":{port:04X}"):  # 0A: it listens
                    inode = fields[9]
                    sockets.add(f"socket:[{inode}]")

    # 2) Does a process of the group hold one of them?
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.getpgid(int(process.name)) != group:
                continue
            for handle in (process / "fd").iterdir():
                if os.readlink(handle) in sockets:
                    return True
    return False


def host_of(task: dict) -> str:
    """Where pages look for a task's server: 127.0.0.1 or localhost."""
    first, *_ = start_pages(task)
    return urlsplit(first).hostname


async def connect(host: str, port: int):
    """(reader, writer) of a connection. Raises OSError. localhost is either of its addresses, as for Chromium."""
    if host == "localhost":
        with contextlib.suppress(OSError):
            return await asyncio.open_connection("::1", port)
        host = "127.0.0.1"
    return await asyncio.open_connection(host, port)


async def answers(host: str, port: int, path: str) -> bool:
    """Whether an HTTP server there answers, with anything but an error of its own."""
    try:
        reader, writer = await connect(host, port)
        try:
            request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n"
            writer.write(request.encode())
            line = await reader.readline()
        finally:
            writer.close()
    except (OSError, ValueError):  # the second: a line without end
        return False
    words = line.split()
    status = words[1] if len(words) > 1 else b""
    return status.isdigit() and len(status) == 3 and int(status) < 500


# ------------------------------------------------------------------------------------- one server --


class Server:
    """A running command, in a process group of its own."""

    def __init__(self, task: dict, port: int, folder: Path, guard: subprocess.Popen):
        """folder: becomes {tmp}, if the task's command names it. guard: guard.py's process, which
        hears of the new group.
        """
        command = task["serve"]
        self.command = command.replace("{port}", str(port)).replace("{tmp}", shlex.quote(str(folder)))
        self.host = host_of(task)
        self.port = port
        self.ready = task.get("ready", "/")
        self.folder = folder
        self.output = b""  # its end
        if "{tmp}" in command:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir()
        # The shell itself tells the guard its group, by its standard input, before it runs the
        # command. Were it told from here, this process could be killed in between.
        # The trap keeps the shell until a command in its foreground has ended. Without it, SIGKILL would
        # follow SIGTERM at once.
        script = f'echo "+ $$" >&0; exec </dev/null; trap "exit 143" TERM\n{self.command}'
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", script], cwd=task.get("cwd", "."), start_new_session=True,
            stdin=guard.stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"})
        self.draining = asyncio.ensure_future(self.drain())

    async def drain(self):
        """Keeps the end of the server's output. It reads seldom: a server that prints without end has to wait."""
        reader = asyncio.StreamReader(limit=2**14)

        def protocol():
            return asyncio.StreamReaderProtocol(reader)

        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(protocol, self.process.stdout)
        try:
            while not reader.at_eof():
                read = await reader.read(2**18)
                self.output = (self.output + read)[-KEPT:]
                await asyncio.sleep(0.05)
        finally:
            transport.close()

    async def answer_within(self, seconds: float):
        """Waits for the first answer. Raises EnvError if it does not come."""
        try:
            await bounded(self.first_answer(), seconds, f"the first answer of the server at {self.ready}")
        except TookTooLong:
            if self.host != "localhost" and await self.answers_soon("::1"):
                raise EnvError(f"the server answers at localhost, not at {self.host}; "
                               "write http://localhost:{port} in the task") from None
            raise

    async def first_answer(self):
        start = time.monotonic()
        pause = 0.01
        while True:
            if self.process.poll() is not None:
                said = f"the server ended before it answered ({self.ending()})"
                if self.process.returncode == 0:
                    said += "; start it in the foreground"
                raise EnvError(said)
            if await answers(self.host, self.port, self.ready):
                # Is it ours that answers? If the system does not tell (macOS, Docker), wait for a
                # second: a server that found its port taken has ended by then.
                if listens(self.process.pid, self.port) or time.monotonic() - start > 1:
                    return
            await asyncio.sleep(pause)  # a foreign program tells nobody that it listens now
            pause = min(2 * pause, 0.1)

    async def answers_soon(self, host: str) -> bool:
        """Whether it answers there within GRACE."""
        with contextlib.suppress(TookTooLong):
            return await bounded(answers(host, self.port, self.ready), GRACE, "asking a server")
        return False

    async def problem(self) -> str:
        """What is wrong with it once its episode has ended; "" if it still answers."""
        if self.process.poll() is not None:
            return f"ended ({self.ending()}) before the episode did"
        if await self.answers_soon(self.host):
            return ""
        return f"did not answer at {self.ready} any more when the episode ended"

    def ending(self) -> str:
        """How its first process ended."""
        status = self.process.returncode
        if status < 0:
            return signal.Signals(-status).name
        return f"exit status {status}"

    def kill(self):
        """Ends the whole group; returns when the first process has ended. Deletes the folder."""
        group = self.process.pid
        with contextlib.suppress(OSError):  # nobody is left
            os.killpg(group, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        self.process.wait()
        # If the rest of the group still writes, the guard deletes what is left.
        shutil.rmtree(self.folder, ignore_errors=True)

    async def end(self):
        await asyncio.to_thread(self.kill)
        await asyncio.wait([self.draining], timeout=1)  # the rest of its output
        self.draining.cancel()

    def last_line(self) -> str:
        lines = self.output.decode(errors="replace").strip().splitlines()
        return first_line(lines[-1]) if lines else "it wrote nothing"


# ------------------------------------------------------------------------------------ all servers --


def with_port(task: dict, port: int) -> dict:
    """The task with its port in start page, checks and intent."""
    filled = dict(task)
    for key in ("start_url", "eval", "intent"):
        filled[key] = json.loads(json.dumps(task[key]).replace("{port}", str(port)))
    return filled


async def require_answer(task: dict, seconds: float):
    """Raises EnvError if the server of a played task does not answer any more."""
    first, *_ = start_pages(task)
    port = int(origin(first).rpartition(":")[2])
    asking = answers(host_of(task), port, task.get("ready", "/"))
    if not await bounded(asking, seconds, "asking the task's server"):
        raise EnvError("the task's server did not answer any more when the episode ended")


class Servers:
    """Starts and ends the servers of a run's episodes."""

    def __init__(self, out: Path):
        """out: the run's directory. servers.log there gets the last output of those that fail."""
        self.log = out / "servers.log"
        self.folders = Path(tempfile.gettempdir()) / f"servers-{uuid.uuid4().hex}"  # one for each {tmp}
        self.guard = None  # its process while there are servers
        self.running = 0
        self.prepared = []  # (task, its start) of the servers that `serve` has not taken yet
        first = random.SystemRandom().randrange(len(SERVED_PORTS))  # ranks begin at different ports
        self.ports = itertools.cycle(SERVED_PORTS[first:] + SERVED_PORTS[:first])

    @contextlib.asynccontextmanager
    async def serve(self, task: dict, seconds: float):
        """Yields the task with its port, while its own server runs. Raises EnvError if none comes up.

        seconds: the time that a server has until its first answer.
        """
        start = self.take(task, seconds)
        try:
            server = await start
            try:
                yield with_port(task, server.port)
            except ENV_FAILED as error:  # the server may have printed why
                problem = await server.problem() or first_line(error)
                self.keep_output(task, server, problem)
                raise
            problem = await server.problem()
            if problem:
                self.keep_output(task, server, problem)
        finally:
            await self.undo(start)

    def prepare(self, task: dict, seconds: float):
        """Starts a server for the next `serve` of this task, and returns at once."""
        start = asyncio.ensure_future(self.start(task, seconds))
        self.prepared.append((task, start))

    def take(self, task: dict, seconds: float) -> asyncio.Future:
        """The start of a server for this task: a prepared one, or one that begins now."""
        for number, (prepared, start) in enumerate(self.prepared):
            if prepared is task:
                del self.prepared[number]
                return start
        return asyncio.ensure_future(self.start(task, seconds))

    async def end_prepared(self):
        """Ends the prepared servers that nobody has taken."""
        while self.prepared:
            _, start = self.prepared.pop()
            await self.undo(start)

    async def undo(self, start: asyncio.Future):
        """Ends the server of a start, whether it is up, on its way or has failed."""
        start.cancel()  # does nothing if it is up
        await asyncio.wait([start])
        if not start.cancelled() and start.exception() is None:
            await self.end(start.result())
            self.release_guard()

    def hold_guard(self):
        """Counts one more server. Starts the guard if there is none, or if somebody has killed it."""
        if self.guard is None or self.guard.poll() is not None:
            script = Path(__file__).parent / "guard.py"
            self.guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(self.folders)], start_new_session=True,
                bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.running += 1

    def release_guard(self):
        """Counts one server less. Without any, the guard's input is closed, and it ends."""
        self.running -= 1
        if self.running == 0:
            self.guard.stdin.close()
            self.guard.wait()
            self.guard = None

    async def start(self, task: dict, seconds: float) -> Server:
        """A server that answers; `undo` ends it."""
        try:
            self.hold_guard()
            try:
                return await self.try_ports(task, seconds)
            except BaseException:  # no server came up, or the run ends
                self.release_guard()
                raise
        except OSError as error:  # its directory is gone, or there are too many processes
            raise EnvError(f"the site's server could not be started: {error}") from error

    async def try_ports(self, task: dict, seconds: float) -> Server:
        """As `start`. If another program takes its port, a further port is tried."""
        for _ in range(TRIES):
            port = free_port(self.ports)
            folder = self.folders / uuid.uuid4().hex
            server = Server(task, port, folder, self.guard)
            try:
                await server.answer_within(seconds)
                return server
            except EnvError as error:
                problem = first_line(error)
            except BaseException:  # the run ends
                await self.end(server)
                raise
            ended = server.process.returncode is not None
            said = server.last_line()
            await self.end(server)
            if ended:  # by itself: its last words may have come only now. Else its shell adds "Terminated"
                said = server.last_line()
            port_was_taken = ended and not can_bind(port, reuse=True)
            if not port_was_taken:
                break
        self.keep_output(task, server, problem)
        raise EnvError(f"{problem}: {said}")

    async def end(self, server: Server):
        await server.end()
        with contextlib.suppress(OSError):  # somebody killed the guard
            self.guard.stdin.write(f"- {server.process.pid}\n".encode())

    def keep_output(self, task: dict, server: Server, problem: str):
        """Appends the last lines of a failed server's output to servers.log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            return
        output = server.output.decode(errors="replace")
        with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as file:  # the disk may be full
            file.write(f"== task {task['task_id']}: {problem}\n$ {server.command}\n{output}\n")

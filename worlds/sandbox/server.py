"""The embedded web server: worlds, sessions, and plain HTTP on the loopback address.

Every episode sends `X-World: SEED-UNIQUE`. SEED picks the data (catalogue, users, posts), UNIQUE a copy of it, made
at the first request: siblings of a group start identical and cannot see each other's writes. A header rather than a
cookie names the world, so logging out, which clears the session cookie, keeps it. The default is "0-default".
"""

import re
import secrets
import sys
import threading
from collections import OrderedDict
from functools import lru_cache
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from urllib.parse import parse_qsl, unquote, urlsplit

from . import admin, code, forum, shop
from . import map as atlas
from .page import NOT_FOUND, KEEP, Redirect, Request, document, items, link
from .words import NAMES

SITES = {
    "shop": shop,
    "forum": forum,
    "admin": admin,
    "code": code,
    "map": atlas,
}
PLACEHOLDERS = {  # WebArena's names for the roles of these sites
    "SHOPPING": shop,
    "REDDIT": forum,
    "SHOPPING_ADMIN": admin,
    "GITLAB": code,
    "MAP": atlas,
}
MAX_BODY = 64 * 1024  # bytes of a posted form
MAX_WORLDS = 1024  # live at once; the least recently used goes first


@lru_cache(maxsize=512)
def seeded(seed: int) -> tuple[str, dict]:
    """The main user and each site's data in the worlds of this seed. Shared by all of them: copy before writing."""
    people = Random(seed).sample(NAMES, 8)
    data = {}
    for name, site in SITES.items():
        # A generator per site: a site added later leaves the data of the others as it was.
        rng = Random(f"{seed} {name}")
        data[name] = site.seed(rng, people, data)
    return people[0], data


def copy_data(data: dict) -> dict:
    """Rows are immutable, so copying the dicts that hold them is enough: a few microseconds instead of a deep copy.

    A dict that two sites share is copied once: what one of them writes, the other shows.
    """
    copies = {}  # by the id of the original
    for tables in data.values():
        for table in vars(tables).values():
            if id(table) not in copies:
                copies[id(table)] = table.copy()

    copied = {}
    for name, tables in data.items():
        own = [copies[id(table)] for table in vars(tables).values()]
        copied[name] = type(tables)(*own)
    return copied


class World:
    """One private, writable copy of the seeded data, and who is logged in where."""

    def __init__(self, seed: int):
        self.lock = threading.Lock()
        self.user, data = seeded(seed)
        self.sites = copy_data(data)
        self.sessions = {}  # (site, token): user
        self.greeted = set()  # sites that have been visited; the first visitor of each is logged in

    def respond(
        self,
        name: str,
        method: str,
        path: str,
        request: Request,
        token: str | None,
    ):
        """(status, headers, html) of one request to the site `name`."""
        site = SITES[name]
        headers = {}

        known = (name, token) in self.sessions
        if not known and name not in self.greeted:
            token = self.log_in(name, self.user)
            headers["Set-Cookie"] = cookie(name, token)
        self.greeted.add(name)

        user = self.sessions.get((name, token))
        request = request._replace(user=user)
        reply = self.route(name, method, path, request)

        if not isinstance(reply, Redirect):
            html = document(reply.title, site.nav(user), reply.body)
            return reply.status, headers, html

        if reply.user is not KEEP:
            self.sessions.pop((name, token), None)
            if reply.user:
                token = self.log_in(name, reply.user)
                headers["Set-Cookie"] = cookie(name, token)
            else:
                headers["Set-Cookie"] = cookie(name, "", "; Max-Age=0")
        headers["Location"] = site.ROOT + reply.path
        return 303, headers, ""

    def route(self, name: str, method: str, path: str, request: Request):
        """What the handler of the first route that fits says."""
        tables = self.sites[name]
        for wanted, pattern, handler in SITES[name].ROUTES:
            match = re.fullmatch(pattern, path)
            if match and wanted == method:
                return handler(tables, request, *match.groups())
        return NOT_FOUND

    def log_in(self, name: str, user: str) -> str:
        """The token of a new session."""
        token = secrets.token_hex(8)
        self.sessions[name, token] = user
        return token


def cookie(name: str, token: str, age: str = "") -> str:
    return f"{name}_session={token}; Path={SITES[name].ROOT}; HttpOnly; SameSite=Lax{age}"


class Worlds:
    """The live worlds by their full name, SEED-UNIQUE."""

    def __init__(self):
        self.lock = threading.Lock()
        self.live = OrderedDict()

    def get(self, header: str) -> World | None:
        """None when the header is malformed."""
        match = re.fullmatch(r"([0-9]{1,9})-[A-Za-z0-9_.-]{1,80}", header)
        if match is None:
            return None
        seed = int(match[1])
        with self.lock:
            world = self.live.get(header) or World(seed)
            self.live[header] = world
            self.live.move_to_end(header)
            if len(self.live) > MAX_WORLDS:
                self.live.popitem(last=False)
        return world


def parse(text: str) -> dict[str, str]:
    """The fields of a query or of a posted form. Raises ValueError when there are too many."""
    pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=99)
    return dict(pairs)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "sandbox"
    sys_version = ""
    # With Nagle's algorithm, or headers and body written apart, a page waits 30-40 ms for a delayed acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self):
        self.answer()

    do_HEAD = do_GET

    def do_POST(self):
        self.answer()

    def answer(self):
        length = self.headers.get("Content-Length", "0")
        is_number = length.isascii() and length.isdigit() and len(length) < 12
        if not is_number or "Transfer-Encoding" in self.headers:
            return self.refuse("Content-Length must be a number")
        if int(length) > MAX_BODY:
            return self.refuse(f"a request body may have at most {MAX_BODY} bytes")
        posted = self.rfile.read(int(length))

        try:
            address = urlsplit(self.path)
            query = parse(address.query)
            form = parse(posted.decode("utf-8", "replace"))
        except ValueError as problem:
            return self.refuse(str(problem))

        world = self.server.worlds.get(self.headers.get("X-World", "0-default"))
        if world is None:
            return self.refuse("X-World must be SEED-UNIQUE, as in 7-a1: a number, a hyphen, letters and digits")

        path = unquote(address.path)
        name, below = re.fullmatch("/?([^/]*)(.*)", path, re.DOTALL).groups()
        if not name:
            return self.send(200, {}, index(world))
        if name not in SITES:
            return self.send(404, {}, "not found")

        method = "POST" if self.command == "POST" else "GET"
        cookies = self.headers.get("Cookie", "")
        session = re.search(rf"(?:^|;\s*){name}_session=([0-9a-f]+)", cookies)
        token = session[1] if session else None
        request = Request(None, query, form)
        with world.lock:
            reply = world.respond(name, method, below.rstrip("/"), request, token)
        self.send(*reply)

    def send(self, status: int, headers: dict, html: str):
        body = html.encode()
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")  # the same address shows another page in another world
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, problem: str):
        self.close_connection = True  # the body may be unread, so the next request could not be found
        body = f"<h1>bad request</h1><p>{escape(problem)}</p>"
        html = document("bad request", "", body)
        self.send(400, {"Connection": "close"}, html)

    def log_message(self, *ignored):
        pass


def index(world: World) -> str:
    """The page for a person: where the sites are and how to log in again."""
    rows = []
    for name, tables in world.sites.items():
        account = tables.accounts[world.user]
        address = link(name, SITES[name].ROOT)
        rows.append(f"{address} logged in as {world.user}, password {account.password}")
    body = "<h1>sandbox</h1><p>stateful websites for web agents</p>"
    body += items(rows)
    return document("sandbox", "", body)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # dozens of browser contexts may connect in the same moment

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.worlds = Worlds()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.sites = {}
        for placeholder, site in PLACEHOLDERS.items():
            self.sites[placeholder] = self.url + site.ROOT

    def handle_error(self, request, client_address):
        """A browser that closes its connection half-way is no news; anything else is a bug and keeps its traceback."""
        problem = sys.exc_info()[1]
        if not isinstance(problem, ConnectionError):
            super().handle_error(request, client_address)

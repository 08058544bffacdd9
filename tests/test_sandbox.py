"""The embedded websites: separate worlds, sessions, hostile requests, tasks that experts solve."""
import contextlib
import hashlib
import http.client
import itertools
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.parse import urlencode, urlsplit

import pytest

from conftest import ROOT
from worlds import sandbox
from worlds.sandbox import long, words
from worlds.sandbox import server as web
from worlds.sandbox.experts import ELEMENT, SCRIPTS, Page, done, to_row
from worlds.sandbox.tasks import EASY, FULL_SEEN, FULL_UNSEEN, HARD, SEEN, SPLITS, UNSEEN
from worlds.sandbox.tasks import task as draw
from worlds.sandbox.vocabulary import with_id


@pytest.fixture(scope="module")
def server():
    running = web.Server()
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()


class Visitor:
    """A browser in a few lines: one kept connection, a world, a cookie jar; follows redirects."""

    def __init__(self, server, world=None):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        self.cookies = {}
        self.headers = {}
        if world:
            self.headers["X-World"] = world

    def request(self, method, path, form=None, **headers):
        sent = dict(self.headers)
        if self.cookies:
            pairs = [f"{name}={value}" for name, value in self.cookies.items()]
            sent["Cookie"] = "; ".join(pairs)
        sent.update(headers)
        body = form
        if isinstance(form, dict):
            body = urlencode(form)

        self.connection.request(method, path, body, sent)
        reply = self.connection.getresponse()
        text = reply.read().decode()

        set_cookie = reply.getheader("Set-Cookie", "")
        for name, value in re.findall(r"(\w+_session)=(\w*)", set_cookie):
            self.cookies.pop(name, None)
            if value:
                self.cookies[name] = value
        return reply.status, reply.getheader("Location"), text

    def get(self, path):
        reply = self.request("GET", path)
        return self.follow(*reply)

    def post(self, path, **form):
        reply = self.request("POST", path, form)
        return self.follow(*reply)

    def follow(self, status, location, text):
        if status == 303:
            return self.get(location)
        return text


# ---- worlds and sessions
def test_siblings_start_identical_and_cannot_see_each_others_writes(server):
    one = Visitor(server, "5-a")
    two = Visitor(server, "5-b")
    other_seed = Visitor(server, "6-a")
    page = one.get("/forum")
    assert page == two.get("/forum")
    assert page != other_seed.get("/forum")

    one.post("/forum/edit", bio="quiet river")
    two.post("/forum/edit", bio="loud rain")

    address = f"/forum/user/{web.World(5).user}"
    profile = one.get(address)
    assert "quiet river" in profile
    assert "loud rain" not in profile
    assert "loud rain" in two.get(address)
    three = Visitor(server, "5-c")
    assert "quiet river" not in three.get(address)


def test_a_world_starts_logged_in_and_survives_logging_out(server):
    visitor = Visitor(server, "7-a")
    visitor.post("/shop/account/edit", name="mira", city="rome")
    assert visitor.cookies
    assert "log in" in visitor.post("/shop/logout")
    assert not visitor.cookies
    assert "<h1>log in</h1>" in visitor.get("/shop/account")  # only a world's first visitor is logged in

    world = web.World(7)
    account = world.sites["shop"].accounts[world.user]
    refused = visitor.post("/shop/login", username=account.user, password="guess")
    assert "wrong username or password" in refused
    visitor.post("/shop/login", username=account.user, password=account.password)
    assert '<span id="city">rome</span>' in visitor.get("/shop/account")  # still the same world


def test_the_trap_cannot_be_walked_out_of(server):
    visitor = Visitor(server, "8-a")
    visitor.post("/forum/logout")
    assert "<h1>log in</h1>" in visitor.post("/forum/edit", bio="quiet river")
    user = web.World(8).user
    assert "quiet river" not in visitor.get(f"/forum/user/{user}")


def test_a_reset_costs_well_under_a_millisecond():
    def cost():
        start = time.thread_time()
        web.World(9)
        return time.thread_time() - start
    cost()  # the seed's data is generated once
    costs = [cost() for _ in range(100)]
    assert min(costs) < 5e-4


def test_a_page_does_not_wait_for_delayed_acknowledgements(server):
    visitor = Visitor(server, "9-a")

    def cost():
        start = time.perf_counter()
        visitor.get("/shop/category/kitchen")
        return time.perf_counter() - start
    costs = [cost() for _ in range(30)]
    assert min(costs) < 0.03  # the wait would be there every time


def test_the_number_of_live_worlds_is_bounded(monkeypatch):
    monkeypatch.setattr(web, "MAX_WORLDS", 3)
    worlds = web.Worlds()
    first = worlds.get("1-0")
    for i in (1, 2, 0, 3):
        worlds.get(f"1-{i}")
    assert len(worlds.live) == 3
    assert worlds.get("1-0") is first  # it was used again, so 1-1 had to go


def test_what_the_administration_changes_the_shop_of_the_same_world_shows(server):
    here = Visitor(server, "14-a")
    sibling = Visitor(server, "14-b")
    products = web.World(14).sites["admin"].products
    slug = next(iter(products))
    here.post(f"/admin/products/{slug}/edit", price="77", stock="88")
    page = here.get(f"/shop/product/{slug}")
    assert "price $77" in page
    assert "stock 88" in page
    assert "price $77" not in sibling.get(f"/shop/product/{slug}")


def test_nothing_is_sold_that_the_administration_has_taken_out_of_stock(server):
    visitor = Visitor(server, "16-stock")
    products = web.World(16).sites["shop"].products
    slug = next(iter(products))
    product = f"/shop/product/{slug}"
    edit = f"/admin/products/{slug}/edit"

    visitor.post(edit, price="7", stock="1")
    assert f'id="{slug}"' in visitor.post(product, size="large")
    assert "the cart holds all that is in stock" in visitor.post(product, size="small")

    visitor.post("/shop/checkout", shipping="express")
    visitor.post(edit, price="7", stock="0")
    assert "the cart holds more than is in stock" in visitor.post("/shop/checkout/review")


def test_a_login_counts_on_its_own_site_only(server):
    visitor = Visitor(server, "17-login")
    visitor.get("/code")
    visitor.get("/admin")
    visitor.cookies["admin_session"] = visitor.cookies["code_session"]
    assert "<h1>log in</h1>" in visitor.get("/admin/reports")


# ---- roles
def world_of_a(role):
    """(seed, world) of the first world whose user has this role in the administration."""
    for seed in range(1000):
        world = web.World(seed)
        account = world.sites["admin"].accounts[world.user]
        if account.role == role:
            return seed, world


def project_of(world, role):
    """The first project in which the world's user has this role."""
    members = world.sites["code"].members
    for (slug, user), their_role in members.items():
        if user == world.user and their_role == role:
            return slug


def test_a_clerk_reads_and_ships_and_is_refused_the_rest(server):
    seed, world = world_of_a("clerk")
    admin = world.sites["admin"]
    visitor = Visitor(server, f"{seed}-clerk")
    slug = next(iter(admin.products))
    pending = [number for number, order in admin.sales.items() if order.status == "pending"]
    one = pending[0]
    two = pending[1]

    # What a clerk may do.
    assert "only a manager" not in visitor.get(f"/admin/products/{slug}")
    assert "only a manager" not in visitor.get("/admin/reports")
    assert '<span id="status">shipped</span>' in visitor.post(f"/admin/orders/{one}/ship")

    # What only a manager may do.
    assert "only a manager" in visitor.post(f"/admin/orders/{two}/cancel")
    assert '<span id="status">pending</span>' in visitor.get(f"/admin/orders/{two}")
    for path in (f"/admin/products/{slug}/edit", "/admin/new", "/admin/new/price", "/admin/new/review"):
        assert "only a manager" in visitor.get(path)
        assert "only a manager" in visitor.post(path, price="5", stock="5")
    assert "only a manager" in visitor.post(f"/admin/staff/{world.user}", role="manager")

    visitor.post("/admin/logout")
    assert "<h1>log in</h1>" in visitor.get("/admin/reports")


@pytest.mark.parametrize("role, may", [
    ("guest", {"comment"}),
    ("developer", {"comment", "turn", "edit"}),
    ("owner", {"comment", "turn", "edit", "invite", "delete"}),
])
def test_a_role_in_a_project_says_what_may_be_done(server, role, may):
    world = web.World(15)
    visitor = Visitor(server, f"15-{role}")
    slug = project_of(world, role)
    issues = world.sites["code"].issues.values()
    issue = next(each for each in issues if each.project == slug)
    members = f"/code/p/{slug}/members"
    here = f"/code/p/{slug}/issues/{issue.number}"

    pages = {
        "comment": visitor.post(f"{here}/comment", comment="calm river"),
        "turn": visitor.post(f"{here}/turn"),
        "edit": visitor.post(f"{here}/edit", title="sky", priority="low", assignee="nobody"),
        "invite": visitor.post(members, username="nobody", role="guest"),
        "delete": visitor.post(f"{here}/delete"),
    }
    allowed = {name for name, page in pages.items() if "this needs the role" not in page}
    assert allowed == may


def test_a_merge_request_wants_the_approval_of_somebody_else(server):
    world = web.World(16)
    code = world.sites["code"]
    visitor = Visitor(server, "16-a")
    slug = project_of(world, "owner")
    merges = code.merges.values()
    merge = next(each for each in merges if each.project == slug and each.state == "open")
    here = f"/code/p/{slug}/merges/{merge.number}"

    def log_in_as(user):
        password = code.accounts[user].password
        visitor.post("/code/logout")
        visitor.post("/code/login", username=user, password=password)

    visitor.post(f"/code/p/{slug}/members/{merge.author}", role="developer")
    log_in_as(merge.author)
    assert "a merge request of his own" in visitor.post(f"{here}/approve")

    log_in_as(world.user)
    if not merge.approved:
        assert "somebody must approve it first" in visitor.post(f"{here}/merge")
    assert world.user in visitor.post(f"{here}/approve")
    assert '<span id="state">merged</span>' in visitor.post(f"{here}/merge")


# ---- what a page does with what it is given
def test_choices_stay_while_one_turns_the_pages(server):
    visitor = Visitor(server, "17-a")
    first = visitor.get("/admin/orders?status=any&customer=&sort=oldest")
    next_page = re.search('<a href="([^"]*)">next page', first)[1]
    second = visitor.get(next_page.replace("&amp;", "&"))
    orders = re.findall(r"order (\d+)<", first) + re.findall(r"order (\d+)<", second)

    admin = web.World(17).sites["admin"]
    oldest_first = reversed(web.admin.every_order(admin))
    numbers = [str(order.number) for order in oldest_first]
    assert orders == numbers[:40]


def test_forms_say_what_is_wrong_and_keep_what_was_typed(server):
    seed, _ = world_of_a("manager")
    visitor = Visitor(server, f"{seed}-forms")
    assert "choose a forum" in visitor.post("/forum/new", title="quiet river")
    assert 'value="quiet river"' in visitor.post("/forum/new", title="quiet river")
    assert "city must not be empty" in visitor.post("/shop/account/edit", name="mira", city=" ")
    assert "must be between 1 and" in visitor.post("/shop/cart", q0="9999")
    assert "choose a shipping option" in visitor.post("/shop/checkout", shipping="choose")
    assert "<h1>checkout</h1>" in visitor.post("/shop/checkout/review")  # an order without shipping

    assert "choose a department" in visitor.post("/admin/new", name="quiet river")
    visitor.post("/admin/new", name="quiet river", department="music")
    assert "price must be a whole number" in visitor.post("/admin/new/price", price="free", stock="5")
    assert "<h1>new product</h1>" in visitor.get("/admin/new/review")  # a step is left out
    assert "choose a report and a month" in visitor.get("/admin/reports?report=bestsellers&month=now")

    assert "no place is called here" in visitor.get("/map/directions?from=here&to=there&by=walk")
    visitor.post("/map/trips/new", name="way")
    assert "a trip has at least 2 stops" in visitor.get("/map/trips/finish")
    assert "write the name of a place" in visitor.post("/map/trips/stops", stop="nowhere")


def test_typed_markup_stays_text(server):
    visitor = Visitor(server, "11-a")
    page = visitor.post("/forum/new", forum="books", title="<b>bold</b>", body="<script>1</script>")
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<script>" not in page
    assert "<b>" not in visitor.get("/shop/search?q=%3Cb%3E")
    assert "<b>" not in visitor.post("/shop/login", username='"><b>')


@pytest.mark.parametrize("headers", [
    {"X-World": "x"},
    {"X-World": "1"},
    {"X-World": "-1-a"},
    {"X-World": "1-" + "a" * 99},
    {"X-World": "1-../.."},
    {"X-World": "9" * 99 + "-a"},
    {"X-World": ""},
    {"Content-Length": "-5"},
    {"Content-Length": "x"},
    {"Content-Length": "9999999"},
])
def test_malformed_requests_get_one_sentence(server, headers, capfd):
    visitor = Visitor(server)
    status, _, text = visitor.request("GET", "/shop", **headers)
    assert status == 400
    assert "<h1>bad request</h1>" in text
    assert "Traceback" not in capfd.readouterr().err


GARBAGE = [
    b"\x00\xff" * 40 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /shop HTTP/9.9\r\n\r\n",
    b"BREW /shop HTTP/1.1\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /shop HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    b"GET /shop HT",
    b"POST /shop HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /shop HTTP/1.1\r\nContent-Length: 900\r\n\r\nhalf",
    b"POST /shop HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /shop HTTP/1.1\r\nX-World: ../../x\r\n\r\n",
]


def throw(port, garbage):
    """Sends it over a connection of its own; returns what comes back before the server closes it."""
    with (socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
          contextlib.suppress(ConnectionError)):
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").read()


@pytest.mark.parametrize("requests", [1600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_32_worlds_stay_apart_under_load_and_garbage(requests, capfd):
    """Every tenth request is malformed. Each world writes and reads a text of its own."""
    user = web.World(12).user
    times = []

    def visit(number, port):
        server = SimpleNamespace(server_port=port)
        visitor = Visitor(server, f"12-load{number}")
        for i in range(requests // 64):  # 32 worlds, two requests each time
            text = f"river {number} stone {i} end"
            began = time.monotonic()
            visitor.request("POST", "/forum/edit", {"bio": text})
            page = visitor.get(f"/forum/user/{user}")
            took = time.monotonic() - began
            times.append(took / 2)
            assert re.findall("river .*? end", page) == [text]
            if i % 5 == number % 5:  # after ten well-formed requests
                kind = (i + number) % len(GARBAGE)
                throw(port, GARBAGE[kind])

    with sandbox.start() as sites, ThreadPoolExecutor(32) as pool:
        port = urlsplit(sites["SHOPPING"]).port
        visits = pool.map(visit, range(32), [port] * 32)
        list(visits)  # raises what a visit has raised
        assert b" 400 " in throw(port, GARBAGE[-1])
    assert "Traceback" not in capfd.readouterr().err
    assert statistics.median(times) < 0.1  # seconds a request; 0.001 was measured


FIELDS = """forum title body bio comment cast name city size shipping q0 line q username password price
stock role department report month priority assignee state sort kind from to by note stop customer
status""".split()


def test_no_route_falls_over_whatever_is_posted_to_it(server, capfd):
    """Each request comes first in a world of its own, so it is logged in and gets past the door."""
    # 1) What fills the groups of a route's pattern: something that exists, something that does not.
    tables = web.World(12).sites
    post = tables["forum"].posts[10]
    issue = tables["code"].issues[10]
    product = next(iter(tables["shop"].products.values()))
    place = next(iter(tables["map"].places))
    member = next(user for slug, user in tables["code"].members if slug == issue.project)
    real = {  # in this order: a later group is a part of an earlier one
        "/f/([a-z]+)/([0-9]{1,6})": f"/f/{post.forum}/10",
        "/place/([a-z-]+)": f"/place/{place}",
        "/p/([a-z-]+)": f"/p/{issue.project}",
        "([a-z-]+)": product.slug,
        "([0-9]{1,6})": "10",
        "/category/([a-z]+)": "/category/music",
        "/f/([a-z]+)": "/f/books",
        "/kind/([a-z]+)": "/kind/cafe",
        "([a-z]+)": member,
        "(approve|merge|close)": "merge",
    }
    wrong = {
        "([0-9]{1,6})": "999999",
        "([a-z-]+)": "zz",
        "([a-z]+)": "zz",
    }

    # 2) Addresses: every route filled in both ways, and some that are none.
    addresses = [
        "/",
        "/nowhere",
        "//",
        "/shop/",
        "/shop/../..",
        "/shop/product/%2e%2e",
        "/shop/orders/%D9%A3",
        "/%00",
    ]
    for site in web.SITES.values():
        for _, pattern, _ in site.ROUTES:
            for values in (real, wrong):
                path = pattern
                for group, value in values.items():
                    path = path.replace(group, value)
                addresses.append(site.ROOT + path)

    # 3) What is posted: nothing, odd texts in every field, what is no form.
    bodies = [
        {},
        dict.fromkeys(FIELDS, "\x00<'\"%s"),
        dict.fromkeys(FIELDS, "-1"),
        dict.fromkeys(FIELDS, "1" * 4000),
        "%ff&=&;q=%zz",
        "&".join(["a=1"] * 200),
    ]

    query = "?page=-9&q=%00&sort=%00&from=%00&month=x"
    for number, (path, body) in enumerate(itertools.product(addresses, bodies)):
        methods = ["GET", "POST"]
        if not body:
            methods.append("HEAD")
        for method in methods:
            visitor = Visitor(server, f"12-{number}{method}")
            status, _, _ = visitor.request(method, path + query, body)
            assert status in (200, 303, 400, 403, 404), (method, path, body)
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkout_moves_the_cart_into_an_order(server):
    visitor = Visitor(server, "13-a")
    products = web.World(13).sites["shop"].products
    product = next(iter(products.values()))
    visitor.post(f"/shop/product/{product.slug}", size="large")
    assert product.name in visitor.post("/shop/checkout", shipping="express")
    page = visitor.post("/shop/checkout/review")
    assert "status pending" in page
    assert f"1 large {product.name}" in page
    assert "shipping express" in page
    assert "the cart is empty" in visitor.get("/shop/cart")


# ---- the process
def test_the_sites_end_with_whoever_started_them():
    process = subprocess.Popen(
        [sys.executable, "-m", "worlds.sandbox", "--pipe"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    sites = json.loads(process.stdout.readline())
    assert sites.keys() == {"SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP"}
    process.stdin.close()  # what the system does for a parent that was killed
    assert process.wait(timeout=120) == 0


def test_a_taken_port_is_one_sentence(server):
    taken = str(server.server_port)
    command = [sys.executable, "-m", "worlds.sandbox", "--port", taken]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


# ---- tasks
def template_of(task):
    return task["intent_template_id"]


def slug_of(name):
    return name.replace(" ", "-")


def test_no_word_means_two_things():
    every = []
    for name, value in vars(words).items():
        if name.isupper():
            every.extend(value)  # a dict gives its keys
    repeated = [word for word, count in Counter(every).items() if count > 1]
    assert repeated == []

    labels = set()
    for name in web.SITES:
        source = (ROOT / f"worlds/sandbox/{name}.py").read_text()
        labels.update(re.findall("[a-z]+", source))
    contents = words.NOUNS + words.TOPICS + words.SCENERY + words.CITIES + words.FORUMS
    assert labels & set(contents) == set()


@pytest.mark.parametrize("split, digest", [
    ("train", "b10cb4b6523eaf2c682b6d016a2b187aff6d43acd68728ebfa228fd9370ad60e"),
    ("test", "f2e0ec23929510d1ef31eafad7ea650f52d5389066822e029df0e144bea4252c"),
    ("test-unseen", "34b7975a39bc8ac23e0a0a9f84ee70e29f1836a0c8c58c555701f76afd71d9d7"),
])
def test_the_tasks_behind_published_results_stay_as_they_are(split, digest):
    text = json.dumps(sandbox.tasks(split))  # 600, 200 and 100 of them
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_the_dev_split_holds_every_template_as_often():
    """Its success rate is a mean over templates, so steps of training are comparable."""
    counts = Counter(map(template_of, sandbox.tasks("dev")))
    assert counts == dict.fromkeys(SEEN, 5)


def required(task):
    """What the task's first page must include."""
    target = task["eval"]["program_html"][0]
    return target["required_contents"]["must_include"]


def bought_names(lines):
    """The names of the products in a cart or an order."""
    return [line.slug.replace("-", " ") for line in lines]


@pytest.mark.parametrize("split, template", [("train", 9), ("full-train", 9), ("full-train", 71)])
def test_no_old_order_passes_for_buying(split, template):
    numbers = list(SPLITS[split][1])
    position = numbers.index(template)
    for i in range(40):
        task = draw(split, position + i * len(numbers))
        world = web.World(task["world"])
        for order in world.sites["shop"].orders.values():
            shown = [f"shipping {order.shipping}", *bought_names(order.lines)]
            text = " ".join(shown)
            missing = [part for part in required(task) if part not in text]
            assert missing, (task["intent"], order)


def drawn(split, template, n):
    """The first n tasks of a template, and the data of their worlds."""
    return [(task, web.World(task["world"])) for task in sandbox.tasks(split, n, template)]


def test_the_page_and_the_reward_mean_the_same():
    for task, world in drawn("full-train", 71, 300):  # the bestseller is not in the cart already
        cart = world.sites["shop"].carts[world.user]
        assert required(task)[0] not in bought_names(cart)

    for task, world in drawn("full-train", 33, 100):  # only orders of 2023 have dates to compare
        assert task["instantiation_dict"]["customer"] != world.user

    routes = drawn("full-train", 62, 60) + drawn("full-train", 63, 60) + drawn("full-test-unseen", 162, 60)
    for task, world in routes:
        slots = task["instantiation_dict"]
        ends = (slots["start"], slots["end"])
        places = world.sites["map"].places.values()
        only_by_ferry = {place.name: place.ferry for place in places}
        assert impossible(task) == any(only_by_ferry[end] for end in ends), task["intent"]


def test_the_full_splits_hold_all_templates_and_share_no_world_with_any_other():
    # 1) Worlds.
    worlds = []
    for split in SPLITS:
        worlds += [task["world"] for task in sandbox.tasks(split, 20)]
    assert len(set(worlds)) == len(worlds)

    # 2) Templates.
    assert not FULL_SEEN.keys() & FULL_UNSEEN.keys()
    templates = [*FULL_SEEN, *FULL_UNSEEN, *long.SEEN, *long.UNSEEN]
    assert sorted(templates) == sorted(SCRIPTS)
    assert len(FULL_SEEN) + len(FULL_UNSEEN) >= 40
    assert len(FULL_UNSEEN) >= 8

    # 3) The tiers, by how many turns a task takes.
    assert EASY | HARD <= SCRIPTS.keys()
    assert not EASY & HARD
    for kind in ("train", "test", "test-unseen"):
        whole = SPLITS[f"full-{kind}"][1]
        easy = SPLITS[f"full-{kind}-easy"][1]
        medium = SPLITS[f"full-{kind}-medium"][1]
        hard = SPLITS[f"full-{kind}-hard"][1]
        assert easy
        assert medium
        assert hard
        assert len(easy) + len(medium) + len(hard) == len(whole)

    # 4) Sites.
    sites = Counter()
    for task in sandbox.tasks("full-train", len(FULL_SEEN)):
        sites.update(task["sites"])
    assert sites.keys() == {"shopping", "shopping_admin", "reddit", "gitlab", "map"}
    assert min(sites.values()) >= 7


def test_tasks_are_deterministic_and_splits_share_nothing():
    train = sandbox.tasks("train")
    test = sandbox.tasks("test")
    unseen = sandbox.tasks("test-unseen")
    assert len(train) == 600
    assert len(test) == 200
    assert len(unseen) == 100
    assert sandbox.tasks("train", 40) == train[:40]
    for tasks in (train, test, unseen):
        assert json.loads(json.dumps(tasks)) == tasks

    train_worlds = {task["world"] for task in train}
    test_worlds = {task["world"] for task in test}
    unseen_worlds = {task["world"] for task in unseen}
    assert len(train_worlds) == len(train)
    assert len(test_worlds) == len(test)
    assert len(unseen_worlds) == len(unseen)
    assert not train_worlds & test_worlds
    assert not train_worlds & unseen_worlds
    assert not test_worlds & unseen_worlds

    train_templates = {task["intent_template"] for task in train}
    test_templates = {task["intent_template"] for task in test}
    unseen_templates = {task["intent_template"] for task in unseen}
    assert train_templates == test_templates
    assert not train_templates & unseen_templates
    assert len(SEEN) >= 12
    assert len(UNSEEN) >= 4
    assert not SEEN.keys() & UNSEEN.keys()


def test_the_tasks_of_one_template_are_those_of_its_split_and_go_on_beyond_it():
    test = sandbox.tasks("test")
    of_28 = [task for task in test if template_of(task) == 28]
    assert sandbox.tasks("test", template=28) == of_28
    assert len(test) == 200

    more = sandbox.tasks("test", 30, 28)
    assert set(map(template_of, more)) == {28}
    assert len({task["world"] for task in more}) == 30
    with pytest.raises(ValueError, match="no template 28 in test-unseen: it has 101, 102"):
        sandbox.tasks("test-unseen", template=28)


def test_every_kind_of_evaluator_occurs():
    kinds = set()
    answers = set()
    notes = set()
    targets = []
    for task in sandbox.tasks("train", len(SEEN)):
        check = task["eval"]
        kinds.add(tuple(check["eval_types"]))
        answers.update(check["reference_answers"] or ())
        notes.add(check.get("url_note"))
        targets += check["program_html"]
    assert kinds == {("string_match",), ("url_match",), ("program_html",), ("url_match", "program_html")}
    assert answers == {"exact_match", "must_include"}
    assert notes == {None, "EXACT", "GOLD in PRED"}
    assert {target["url"] == "last" for target in targets} == {True, False}
    assert {bool(target["locator"]) for target in targets} == {True, False}


def test_names_are_unique_in_their_world():
    for seed in range(50):
        sites = web.World(seed).sites
        names = [product.name for product in sites["shop"].products.values()]
        names += [post.title for post in sites["forum"].posts.values()]
        nouns = [name.split()[1] for name in names]
        assert len(set(nouns)) == len(nouns)


# ---- tasks in a real browser
def rewards(played):
    """{(template, task): success}; no episode may have failed for another reason than the policy."""
    broken = [tau.checks for tau in played if tau.status != "ok"]
    assert broken == []
    successes = {}
    for tau in played:
        key = (template_of(tau.task), tau.task["task_id"])
        successes[key] = tau.success
    return successes


def unsolved(played):
    return {key for key, success in rewards(played).items() if success < 1}


def errors(played):
    """What actions have gone wrong, in all turns of all episodes."""
    found = []
    for tau in played:
        found += [turn.error for turn in tau.turns if turn.error]
    return found


def say(message):
    """A policy that ends each episode at once, with this message."""
    def act(observation):
        return "", f'exit(message="{message}")'

    def policy(task):
        return act
    return policy


def test_experts_solve_and_doing_nothing_scores_nothing(solve):
    """One task of every template; test_bounds_on_300_tasks plays many of each."""
    tasks = sandbox.tasks("test", len(SEEN)) + sandbox.tasks("test-unseen", len(UNSEEN))
    played = solve(tasks, sandbox.expert)
    assert unsolved(played) == set()
    assert errors(played) == []

    idle = solve(tasks, say("done"))
    assert not any(rewards(idle).values())


def impossible(task):
    return task["eval"]["reference_answers"] == {"exact_match": "N/A"}


@pytest.mark.slow
def test_experts_solve_what_the_three_further_sites_add(solve):
    every = sandbox.tasks("full-test", len(FULL_SEEN)) + sandbox.tasks("full-test-unseen", len(FULL_UNSEEN))
    old = SEEN.keys() | UNSEEN.keys()
    tasks = [task for task in every if template_of(task) not in old]
    tasks.append(next(filter(impossible, sandbox.tasks("full-train", 600))))
    played = solve(tasks, sandbox.expert)
    assert unsolved(played) == set()
    assert errors(played) == []

    asked = set()
    for tau in played:
        if any("showed a confirm" in turn.observation for turn in tau.turns):
            asked.add(template_of(tau.task))
    assert {37, 47, 161} <= asked  # cancelling an order, deleting an issue, forgetting a place

    for tau in played:
        most = 6
        if template_of(tau.task) in EASY:
            most = 4
        elif template_of(tau.task) in HARD:
            most = 12
        assert len(tau.turns) <= most
    lengths = [len(tau.turns) for tau in played]
    assert max(lengths) >= 11

    idle = solve(tasks, say("done"))
    assert not any(rewards(idle).values())


def test_renaming_an_old_issue_does_not_pass_for_creating_one(solve):
    def rename(task):
        page = Page()
        slots = task["instantiation_dict"]
        project = slots["project"]
        issues = web.World(task["world"]).sites["code"].issues.values()
        old = next(issue.title for issue in issues if issue.project == slug_of(project))

        def script():
            yield from to_row(page, old, project, "issues")
            yield page.click("edit issue")
            if page.find("title"):
                yield page.type("title", slots["title"])
                yield page.choose("priority", slots["priority"])
                yield page.click("save")
            yield done()

        steps = script()

        def act(observation):
            page.text = observation
            return next(steps)
        return act

    def may_edit(task):
        world = web.World(task["world"])
        project = slug_of(task["instantiation_dict"]["project"])
        role = world.sites["code"].members.get((project, world.user))
        return role in ("developer", "owner")

    editable = list(filter(may_edit, sandbox.tasks("full-train", 12, 44)))
    tasks = editable[:2]
    played = solve(tasks, rename)
    for tau in played:
        title = tau.task["instantiation_dict"]["title"]
        assert title in tau.turns[-1].observation  # it was renamed
    assert len(played) == 2
    assert not any(rewards(played).values())

    played_by_experts = solve(tasks, sandbox.expert)
    assert all(rewards(played_by_experts).values())


def test_long_thoughts_lead_to_the_same_actions(solve):
    def thinking(task):
        return sandbox.expert(task, cot=True)

    tasks = sandbox.tasks("full-train", 100)
    task = next(each for each in tasks if template_of(each) == 31)
    short, = solve([task], sandbox.expert)
    long, = solve([task], thinking)

    assert long.success == 1
    assert [turn.action for turn in long.turns] == [turn.action for turn in short.turns]
    for at_length, in_short in zip(long.turns, short.turns):
        assert len(at_length.response) > len(in_short.response) + 100
    last = long.turns[-1].response
    assert task["intent"] in last
    assert "show report" in last


def test_two_browsers_on_one_task_write_at_once_and_do_not_see_each_other(solve):
    """Each sibling sets another bio; each profile then shows its own, judged in the browser contexts."""
    tasks = sandbox.tasks("train", len(SEEN))
    task = next(each for each in tasks if SEEN[template_of(each)].__name__ == "set_bio")

    def wanting(bio):
        spec = task["eval"]
        target = spec["program_html"][0] | {"required_contents": {"exact_match": bio}}
        changed = dict(task)
        changed["instantiation_dict"] = {"bio": bio}
        changed["eval"] = spec | {"program_html": [target]}
        return changed

    siblings = [wanting(f"{adjective} river") for adjective in words.ADJECTIVES[:4]]
    assert len({sibling["world"] for sibling in siblings}) == 1
    successes = [tau.success for tau in solve(siblings, sandbox.expert)]
    assert successes == [1.0] * 4


def random_policy(seed):
    """A callable that acts at random on whatever it sees and, now and then, answers with a word of the page."""
    rng = random.Random(seed)

    def act(observation: str) -> tuple[str, str]:
        elements = ELEMENT.findall(observation)
        text = re.sub("<[^>]*>", " ", observation)
        words = re.findall(r"\$?\w+", text) or ["done"]
        if not elements or rng.random() < 0.1:
            return done(rng.choice(words))

        tag, name, number, value = rng.choice(elements)
        call = 'action="Click"'
        if tag == "select":
            _, _, listed = value.partition("(")  # size = small (small | large)
            options = re.findall(r"[^(|)]+", listed) or words
            option = rng.choice(options).strip()
            call = f'action="Select Dropdown Option", argument="{option}"'
        elif tag in ("input", "textarea"):
            action = rng.choice(("Type", "Search"))
            word = rng.choice(words)
            call = f'action="{action}", argument="{word}"'
        return "", f'# Element: {with_id(name, number)}\ndo({call}, element="{number}")'
    return act


@pytest.mark.slow
@pytest.mark.parametrize("split", [
    "train", "test", "test-unseen",
    "full-train", "full-test", "full-test-unseen",
    "long-train", "long-test", "long-test-unseen",
])
def test_bounds_on_300_tasks(solve, split):
    def by_chance(task):
        return random_policy(task["task_id"])

    tasks = sandbox.tasks(split, 300)
    by_experts = solve(tasks, sandbox.expert)
    assert all(rewards(by_experts).values())
    idle = solve(tasks, say(""))
    assert not any(rewards(idle).values())
    successes = rewards(solve(tasks, by_chance))
    assert statistics.mean(successes.values()) < 0.05

"""The embedded websites: separate worlds, sessions, hostile requests, tasks that experts solve."""
import contextlib
import hashlib
import http.client
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
from urllib.parse import urlencode

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
        self.connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        self.headers, self.cookies = {"X-World": world} if world else {}, {}

    def request(self, method, path, form=None, **headers):
        body = urlencode(form) if isinstance(form, dict) else form
        cookies = {"Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())} if self.cookies else {}
        self.connection.request(method, path, body, self.headers | cookies | headers)
        reply = self.connection.getresponse()
        text = reply.read().decode()
        for name, value in re.findall(r"(\w+_session)=(\w*)", reply.getheader("Set-Cookie") or ""):
            self.cookies.pop(name, None)
            self.cookies |= {name: value} if value else {}
        return reply.status, reply.getheader("Location"), text

    def get(self, path):
        status, location, text = self.request("GET", path)
        return self.get(location) if status == 303 else text

    def post(self, path, **form):
        status, location, text = self.request("POST", path, form)
        return self.get(location) if status == 303 else text


# ---- worlds and sessions
def test_siblings_start_identical_and_cannot_see_each_others_writes(server):
    one, two, three = Visitor(server, "5-a"), Visitor(server, "5-b"), Visitor(server, "6-a")
    assert one.get("/forum") == two.get("/forum") != three.get("/forum")
    one.post("/forum/edit", bio="quiet river")
    two.post("/forum/edit", bio="loud rain")
    user = web.World(5).user
    profile = one.get(f"/forum/user/{user}")
    assert "quiet river" in profile and "loud rain" not in profile
    assert "loud rain" in two.get(f"/forum/user/{user}")
    assert "quiet river" not in Visitor(server, "5-c").get(f"/forum/user/{user}")


def test_a_world_starts_logged_in_and_survives_logging_out(server):
    visitor = Visitor(server, "7-a")
    visitor.post("/shop/account/edit", name="mira", city="rome")
    assert visitor.cookies and "log in" in visitor.post("/shop/logout")
    assert not visitor.cookies
    assert "<h1>log in</h1>" in visitor.get("/shop/account")  # only a world's first visitor is logged in
    account = web.World(7).sites["shop"].accounts[web.World(7).user]
    refused = visitor.post("/shop/login", username=account.user, password="guess")
    assert "wrong username or password" in refused
    visitor.post("/shop/login", username=account.user, password=account.password)
    assert '<span id="city">rome</span>' in visitor.get("/shop/account")  # still the same world


def test_the_trap_cannot_be_walked_out_of(server):
    visitor = Visitor(server, "8-a")
    visitor.post("/forum/logout")
    assert "<h1>log in</h1>" in visitor.post("/forum/edit", bio="quiet river")
    assert "quiet river" not in visitor.get(f"/forum/user/{web.World(8).user}")


def test_a_reset_costs_well_under_a_millisecond():
    def cost():
        start = time.thread_time()
        web.World(9)
        return time.thread_time() - start
    cost()  # the seed's data is generated once
    assert statistics.median(cost() for _ in range(100)) < 5e-4


def test_a_page_does_not_wait_for_delayed_acknowledgements(server):
    visitor = Visitor(server, "9-a")

    def cost():
        start = time.perf_counter()
        visitor.get("/shop/category/kitchen")
        return time.perf_counter() - start
    assert min(cost() for _ in range(30)) < 0.03  # the wait would be there every time


def test_the_number_of_live_worlds_is_bounded(monkeypatch):
    monkeypatch.setattr(web, "MAX_WORLDS", 3)
    worlds = web.Worlds()
    first = worlds.get("1-0")
    for i in (1, 2, 0, 3):
        worlds.get(f"1-{i}")
    assert len(worlds.live) == 3 and worlds.get("1-0") is first  # it was used again, so 1-1 had to go


def test_what_the_administration_changes_the_shop_of_the_same_world_shows(server):
    here, sibling = Visitor(server, "14-a"), Visitor(server, "14-b")
    slug = next(iter(web.World(14).sites["admin"].products))
    here.post(f"/admin/products/{slug}/edit", price="77", stock="88")
    page = here.get(f"/shop/product/{slug}")
    assert "price $77" in page and "stock 88" in page
    assert "price $77" not in sibling.get(f"/shop/product/{slug}")


def test_nothing_is_sold_that_the_administration_has_taken_out_of_stock(server):
    visitor, slug = Visitor(server, "16-stock"), next(iter(web.World(16).sites["shop"].products))
    visitor.post(f"/admin/products/{slug}/edit", price="7", stock="1")
    assert f'id="{slug}"' in visitor.post(f"/shop/product/{slug}", size="large")
    assert "the cart holds all that is in stock" in visitor.post(f"/shop/product/{slug}", size="small")
    visitor.post("/shop/checkout", shipping="express")
    visitor.post(f"/admin/products/{slug}/edit", price="7", stock="0")
    assert "the cart holds more than is in stock" in visitor.post("/shop/checkout/review")


def test_a_login_counts_on_its_own_site_only(server):
    visitor = Visitor(server, "17-login")
    visitor.get("/code")
    visitor.get("/admin")
    visitor.cookies["admin_session"] = visitor.cookies["code_session"]
    assert "<h1>log in</h1>" in visitor.get("/admin/reports")


# ---- roles
def world_where(test):
    return next((seed, world) for seed in range(1000) if test(world := web.World(seed)))


def test_a_clerk_reads_and_ships_and_is_refused_the_rest(server):
    seed, world = world_where(lambda w: w.sites["admin"].accounts[w.user].role == "clerk")
    visitor, admin = Visitor(server, f"{seed}-clerk"), world.sites["admin"]
    slug = next(iter(admin.products))
    one, two = [number for number, order in admin.sales.items() if order.status == "pending"][:2]
    assert "only a manager" not in visitor.get(f"/admin/products/{slug}") + visitor.get("/admin/reports")
    assert '<span id="status">shipped</span>' in visitor.post(f"/admin/orders/{one}/ship")
    assert "only a manager" in visitor.post(f"/admin/orders/{two}/cancel")
    assert '<span id="status">pending</span>' in visitor.get(f"/admin/orders/{two}")
    for path in (f"/admin/products/{slug}/edit", "/admin/new", "/admin/new/price", "/admin/new/review"):
        assert "only a manager" in visitor.get(path)
        assert "only a manager" in visitor.post(path, price="5", stock="5")
    assert "only a manager" in visitor.post(f"/admin/staff/{world.user}", role="manager")
    visitor.post("/admin/logout")
    assert "<h1>log in</h1>" in visitor.get("/admin/reports")


@pytest.mark.parametrize("role, may", [("guest", {"comment"}), ("developer", {"comment", "turn", "edit"}),
                                       ("owner", {"comment", "turn", "edit", "invite", "delete"})])
def test_a_role_in_a_project_says_what_may_be_done(server, role, may):
    world = web.World(15)
    code, visitor = world.sites["code"], Visitor(server, f"15-{role}")
    slug = next(slug for (slug, user), mine in code.members.items() if (user, mine) == (world.user, role))
    issue = next(i for i in code.issues.values() if i.project == slug)
    here = f"/code/p/{slug}"
    done = {"comment": visitor.post(f"{here}/issues/{issue.number}/comment", comment="calm river"),
            "turn": visitor.post(f"{here}/issues/{issue.number}/turn"),
            "edit": visitor.post(f"{here}/issues/{issue.number}/edit", title="sky", priority="low",
                                 assignee="nobody"),
            "invite": visitor.post(f"{here}/members", username="nobody", role="guest"),
            "delete": visitor.post(f"{here}/issues/{issue.number}/delete")}
    assert {name for name, page in done.items() if "this needs the role" not in page} == may


def test_a_merge_request_wants_the_approval_of_somebody_else(server):
    world = web.World(16)
    code, visitor = world.sites["code"], Visitor(server, "16-a")
    slug = next(slug for (slug, user), role in code.members.items() if user == world.user and role == "owner")
    merge = next(m for m in code.merges.values() if m.project == slug and m.state == "open")
    here = f"/code/p/{slug}/merges/{merge.number}"
    visitor.post(f"/code/p/{slug}/members/{merge.author}", role="developer")
    visitor.post("/code/logout")
    visitor.post("/code/login", username=merge.author, password=code.accounts[merge.author].password)
    assert "a merge request of his own" in visitor.post(f"{here}/approve")
    visitor.post("/code/logout")
    visitor.post("/code/login", username=world.user, password=code.accounts[world.user].password)
    if not merge.approved:
        assert "somebody must approve it first" in visitor.post(f"{here}/merge")
    assert world.user in visitor.post(f"{here}/approve")
    assert '<span id="state">merged</span>' in visitor.post(f"{here}/merge")


# ---- what a page does with what it is given
def test_choices_stay_while_one_turns_the_pages(server):
    visitor = Visitor(server, "17-a")
    first = visitor.get("/admin/orders?status=any&customer=&sort=oldest")
    second = visitor.get(re.search('<a href="([^"]*)">next page', first)[1].replace("&amp;", "&"))
    orders = [number for page in (first, second) for number in re.findall(r"order (\d+)<", page)]
    newest_last = web.admin.every_order(web.World(17).sites["admin"])
    assert orders == [str(order.number) for order in reversed(newest_last)][:40]


def test_forms_say_what_is_wrong_and_keep_what_was_typed(server):
    seed, _ = world_where(lambda w: w.sites["admin"].accounts[w.user].role == "manager")
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
    assert "&lt;b&gt;bold&lt;/b&gt;" in page and "<script>" not in page
    assert "<b>" not in visitor.get("/shop/search?q=%3Cb%3E") + visitor.post("/shop/login", username='"><b>')


@pytest.mark.parametrize("headers", [{"X-World": "x"}, {"X-World": "1"}, {"X-World": "-1-a"},
                                     {"X-World": "1-" + "a" * 99}, {"X-World": "1-../.."},
                                     {"X-World": "9" * 99 + "-a"}, {"X-World": ""}, {"Content-Length": "-5"},
                                     {"Content-Length": "x"}, {"Content-Length": "9999999"}])
def test_malformed_requests_get_one_sentence(server, headers, capfd):
    status, _, text = Visitor(server).request("GET", "/shop", **headers)
    assert status == 400 and "<h1>bad request</h1>" in text and "Traceback" not in capfd.readouterr().err


GARBAGE = [b"\x00\xff" * 40 + b"\r\n\r\n", b"GET\r\n\r\n", b"GET /shop HTTP/9.9\r\n\r\n",
           b"BREW /shop HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
           b"GET /shop HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"GET /shop HT",
           b"POST /shop HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
           b"POST /shop HTTP/1.1\r\nContent-Length: 900\r\n\r\nhalf",
           b"POST /shop HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
           b"GET /shop HTTP/1.1\r\nX-World: ../../x\r\n\r\n"]


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
    times, user = [], web.World(12).user

    def visit(number):
        visitor = Visitor(SimpleNamespace(server_port=port), f"12-load{number}")
        for i in range(requests // 64):
            began = time.monotonic()
            visitor.request("POST", "/forum/edit", {"bio": f"river {number} stone {i} end"})
            page = visitor.get(f"/forum/user/{user}")
            times.append((time.monotonic() - began) / 2)
            assert re.findall("river .*? end", page) == [f"river {number} stone {i} end"]
            if i % 5 == number % 5:  # after ten well-formed requests
                throw(port, GARBAGE[(i + number) % len(GARBAGE)])

    with sandbox.start() as sites, ThreadPoolExecutor(32) as pool:
        port = int(sites["SHOPPING"].split(":")[2].split("/")[0])
        list(pool.map(visit, range(32)))
        assert b" 400 " in throw(port, GARBAGE[-1])
    assert "Traceback" not in capfd.readouterr().err
    assert statistics.median(times) < 0.1  # seconds a request; 0.001 was measured


def test_no_route_falls_over_whatever_is_posted_to_it(server, capfd):
    """Each request comes first in a world of its own, so it is logged in and gets past the door."""
    tables = web.World(12).sites
    post, product = tables["forum"].posts[10], next(iter(tables["shop"].products.values()))
    issue, place = tables["code"].issues[10], next(iter(tables["map"].places))
    real = {"/f/([a-z]+)/([0-9]{1,6})": f"/f/{post.forum}/10", "/place/([a-z-]+)": f"/place/{place}",
            "/p/([a-z-]+)": f"/p/{issue.project}", "([a-z-]+)": product.slug, "([0-9]{1,6})": "10",
            "/category/([a-z]+)": "/category/music", "/f/([a-z]+)": "/f/books",
            "/kind/([a-z]+)": "/kind/cafe",
            "([a-z]+)": next(user for slug, user in tables["code"].members if slug == issue.project),
            "(approve|merge|close)": "merge"}
    wrong = {"([0-9]{1,6})": "999999", "([a-z-]+)": "zz", "([a-z]+)": "zz"}
    fields = """forum title body bio comment cast name city size shipping q0 line q username password price
        stock role department report month priority assignee state sort kind from to by note stop customer
        status""".split()
    bodies = [{}, *({f: text for f in fields} for text in ("\x00<'\"%s", "-1", "1" * 4000)),
              "%ff&=&;q=%zz", "&".join(["a=1"] * 200)]
    addresses = ["/", "/nowhere", "//", "/shop/", "/shop/../..", "/shop/product/%2e%2e",
                 "/shop/orders/%D9%A3", "/%00"]
    for site in web.SITES.values():
        for _, pattern, _ in site.ROUTES:
            for values in (real, wrong):
                path = pattern
                for group, value in values.items():
                    path = path.replace(group, value)
                addresses.append(site.ROOT + path)
    for number, (path, body) in enumerate((path, body) for path in addresses for body in bodies):
        for method in ("GET", "POST", "HEAD")[:2 if body else 3]:
            query = "?page=-9&q=%00&sort=%00&from=%00&month=x"
            status, _, _ = Visitor(server, f"12-{number}{method}").request(method, path + query, body)
            assert status in (200, 303, 400, 403, 404), (method, path, body)
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkout_moves_the_cart_into_an_order(server):
    visitor, shop = Visitor(server, "13-a"), web.World(13).sites["shop"]
    product = next(iter(shop.products.values()))
    visitor.post(f"/shop/product/{product.slug}", size="large")
    assert product.name in visitor.post("/shop/checkout", shipping="express")
    page = visitor.post("/shop/checkout/review")
    assert "status pending" in page and f"1 large {product.name}" in page and "shipping express" in page
    assert "the cart is empty" in visitor.get("/shop/cart")


# ---- the process
def test_the_sites_end_with_whoever_started_them():
    process = subprocess.Popen([sys.executable, "-m", "worlds.sandbox", "--pipe"], cwd=ROOT, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    sites = json.loads(process.stdout.readline())
    assert sites.keys() == {"SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP"}
    process.stdin.close()  # what the system does for a parent that was killed
    assert process.wait(timeout=10) == 0


def test_a_taken_port_is_one_sentence(server):
    command = [sys.executable, "-m", "worlds.sandbox", "--port", str(server.server_port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "--port" in done.stderr and "Traceback" not in done.stderr


# ---- tasks
def test_no_word_means_two_things():
    sources = "".join((ROOT / f"worlds/sandbox/{name}.py").read_text() for name in web.SITES)
    labels = set(re.findall("[a-z]+", sources))
    lists = [value for name, value in vars(words).items() if name.isupper()]  # a dict gives its keys
    every = [word for value in lists for word in value]
    assert [word for word, n in Counter(every).items() if n > 1] == []
    assert labels & set(words.NOUNS + words.TOPICS + words.SCENERY + words.CITIES + words.FORUMS) == set()


@pytest.mark.parametrize("split, digest", [
    ("train", "b10cb4b6523eaf2c682b6d016a2b187aff6d43acd68728ebfa228fd9370ad60e"),
    ("test", "f2e0ec23929510d1ef31eafad7ea650f52d5389066822e029df0e144bea4252c"),
    ("test-unseen", "34b7975a39bc8ac23e0a0a9f84ee70e29f1836a0c8c58c555701f76afd71d9d7")])
def test_the_tasks_behind_published_results_stay_as_they_are(split, digest):
    text = json.dumps(sandbox.tasks(split))  # 600, 200 and 100 of them
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_the_dev_split_holds_every_template_as_often():
    """Its success rate is a mean over templates, so steps of training are comparable."""
    counts = Counter(task["intent_template_id"] for task in sandbox.tasks("dev"))
    assert counts == dict.fromkeys(SEEN, 5)


@pytest.mark.parametrize("split, template", [("train", 9), ("full-train", 9), ("full-train", 71)])
def test_no_old_order_passes_for_buying(split, template):
    numbers = list(SPLITS[split][1])
    for i in range(40):
        task = draw(split, numbers.index(template) + i * len(numbers))
        must = task["eval"]["program_html"][0]["required_contents"]["must_include"]
        for order in web.World(task["world"]).sites["shop"].orders.values():
            names = [line.slug.replace("-", " ") for line in order.lines]
            text = " ".join([f"shipping {order.shipping}", *names])
            assert not all(part in text for part in must), (task["intent"], order)


def drawn(split, template, n):
    """The first n tasks of a template, and the data of their worlds."""
    return [(task, web.World(task["world"])) for task in sandbox.tasks(split, n, template)]


def test_the_page_and_the_reward_mean_the_same():
    for task, world in drawn("full-train", 71, 300):  # the bestseller is not in the cart already
        name = task["eval"]["program_html"][0]["required_contents"]["must_include"][0]
        assert name not in [line.slug.replace("-", " ") for line in world.sites["shop"].carts[world.user]]
    for task, world in drawn("full-train", 33, 100):  # only orders of 2023 have dates to compare
        assert task["instantiation_dict"]["customer"] != world.user
    for split, template in (("full-train", 62), ("full-train", 63), ("full-test-unseen", 162)):
        for task, world in drawn(split, template, 60):
            places = {place.name: place for place in world.sites["map"].places.values()}
            ferry = any(places[task["instantiation_dict"][end]].ferry for end in ("start", "end"))
            assert impossible(task) == ferry, task["intent"]


def test_the_full_splits_hold_all_templates_and_share_no_world_with_any_other():
    splits = {split: sandbox.tasks(split, 20) for split in SPLITS}
    worlds = [row["world"] for rows in splits.values() for row in rows]
    assert len(set(worlds)) == len(worlds)
    assert not FULL_SEEN.keys() & FULL_UNSEEN.keys()
    tiers = [FULL_SEEN, FULL_UNSEEN, long.SEEN, long.UNSEEN]
    assert sorted(number for tier in tiers for number in tier) == sorted(SCRIPTS)
    assert len(FULL_SEEN) + len(FULL_UNSEEN) >= 40 and len(FULL_UNSEEN) >= 8
    assert EASY | HARD <= SCRIPTS.keys() and not EASY & HARD
    for kind in ("train", "test", "test-unseen"):
        tiers = [SPLITS[f"full-{kind}-{tier}"][1] for tier in ("easy", "medium", "hard")]
        assert all(tiers) and sum(map(len, tiers)) == len(SPLITS[f"full-{kind}"][1])
    sites = Counter(site for row in sandbox.tasks("full-train", len(FULL_SEEN)) for site in row["sites"])
    assert sites.keys() == {"shopping", "shopping_admin", "reddit", "gitlab", "map"}
    assert min(sites.values()) >= 7


def test_tasks_are_deterministic_and_splits_share_nothing():
    splits = {split: sandbox.tasks(split) for split in ("train", "test", "test-unseen")}
    assert [len(rows) for rows in splits.values()] == [600, 200, 100]
    assert sandbox.tasks("train", 40) == splits["train"][:40] and json.loads(json.dumps(splits)) == splits
    worlds = {split: {row["world"] for row in rows} for split, rows in splits.items()}
    assert all(len(worlds[split]) == len(splits[split]) for split in splits)
    assert not worlds["train"] & worlds["test"]
    assert not (worlds["train"] | worlds["test"]) & worlds["test-unseen"]
    templates = {split: {row["intent_template"] for row in rows} for split, rows in splits.items()}
    assert templates["train"] == templates["test"] and not templates["train"] & templates["test-unseen"]
    assert len(SEEN) >= 12 and len(UNSEEN) >= 4 and not SEEN.keys() & UNSEEN.keys()


def test_the_tasks_of_one_template_are_those_of_its_split_and_go_on_beyond_it():
    test = sandbox.tasks("test")
    assert sandbox.tasks("test", template=28) == [row for row in test if row["intent_template_id"] == 28]
    assert len(test) == 200
    more = sandbox.tasks("test", 30, 28)
    assert {row["intent_template_id"] for row in more} == {28} and len({row["world"] for row in more}) == 30
    with pytest.raises(ValueError, match="no template 28 in test-unseen: it has 101, 102"):
        sandbox.tasks("test-unseen", template=28)


def test_every_kind_of_evaluator_occurs():
    checks = [row["eval"] for row in sandbox.tasks("train", len(SEEN))]
    kinds = {tuple(check["eval_types"]) for check in checks}
    targets = [target for check in checks for target in check["program_html"]]
    assert kinds == {("string_match",), ("url_match",), ("program_html",), ("url_match", "program_html")}
    answers = {key for check in checks for key in check["reference_answers"] or ()}
    assert answers == {"exact_match", "must_include"}
    assert {check.get("url_note") for check in checks} == {None, "EXACT", "GOLD in PRED"}
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
    assert [t.checks for t in played if t.status != "ok"] == []
    return {(t.task["intent_template_id"], t.task["task_id"]): t.success for t in played}


def say(message):
    return lambda task: lambda observation: ("", f'exit(message="{message}")')


def test_experts_solve_and_doing_nothing_scores_nothing(solve):
    """One task of every template; test_bounds_on_300_tasks plays many of each."""
    tasks = sandbox.tasks("test", len(SEEN)) + sandbox.tasks("test-unseen", len(UNSEEN))
    played = solve(tasks, sandbox.expert)
    assert {key for key, reward in rewards(played).items() if reward < 1} == set()
    assert not any(turn.error for t in played for turn in t.turns)
    assert not any(rewards(solve(tasks, say("done"))).values())


def impossible(task):
    return task["eval"]["reference_answers"] == {"exact_match": "N/A"}


@pytest.mark.slow
def test_experts_solve_what_the_three_further_sites_add(solve):
    drawn = sandbox.tasks("full-test", len(FULL_SEEN)) + sandbox.tasks("full-test-unseen", len(FULL_UNSEEN))
    tasks = [task for task in drawn if task["intent_template_id"] not in SEEN.keys() | UNSEEN.keys()]
    tasks += [next(task for task in sandbox.tasks("full-train", 600) if impossible(task))]
    played = solve(tasks, sandbox.expert)
    assert {key for key, reward in rewards(played).items() if reward < 1} == set()
    assert not any(turn.error for t in played for turn in t.turns)
    asked = {t.task["intent_template_id"] for t in played
             if any("showed a confirm" in turn.observation for turn in t.turns)}
    assert {37, 47, 161} <= asked  # cancelling an order, deleting an issue, forgetting a place
    for t in played:
        number = t.task["intent_template_id"]
        assert len(t.turns) <= (4 if number in EASY else 12 if number in HARD else 6)
    assert max(len(t.turns) for t in played) >= 11
    assert not any(rewards(solve(tasks, say("done"))).values())


def test_renaming_an_old_issue_does_not_pass_for_creating_one(solve):
    def rename(task):
        page, slots = Page(), task["instantiation_dict"]
        issues = web.World(task["world"]).sites["code"].issues.values()
        old = next(row.title for row in issues if row.project == slots["project"].replace(" ", "-"))

        def script():
            yield from to_row(page, old, slots["project"], "issues")
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
        project = task["instantiation_dict"]["project"].replace(" ", "-")
        return world.sites["code"].members.get((project, world.user)) in ("developer", "owner")

    tasks = [task for task in sandbox.tasks("full-train", 12, 44) if may_edit(task)][:2]
    played = solve(tasks, rename)
    for t in played:
        assert t.task["instantiation_dict"]["title"] in t.turns[-1].observation  # it was renamed
    assert len(played) == 2 and not any(rewards(played).values())
    assert all(rewards(solve(tasks, sandbox.expert)).values())


def test_long_thoughts_lead_to_the_same_actions(solve):
    task = [next(t for t in sandbox.tasks("full-train", 100) if t["intent_template_id"] == 31)]
    (short,), (long,) = (solve(task, lambda task: sandbox.expert(task, cot)) for cot in (False, True))
    assert long.success == 1 and [turn.action for turn in long.turns] == [turn.action for turn in short.turns]
    assert all(len(a.response) > len(b.response) + 100 for a, b in zip(long.turns, short.turns))
    assert task[0]["intent"] in long.turns[-1].response and "show report" in long.turns[-1].response


def test_two_browsers_on_one_task_write_at_once_and_do_not_see_each_other(solve):
    """Each sibling sets another bio; each profile then shows its own, judged in the browser contexts."""
    task = next(task for task in sandbox.tasks("train", len(SEEN))
                if SEEN[task["intent_template_id"]].__name__ == "set_bio")

    def wanting(bio):
        target = task["eval"]["program_html"][0] | {"required_contents": {"exact_match": bio}}
        return task | {"instantiation_dict": {"bio": bio}, "eval": task["eval"] | {"program_html": [target]}}
    siblings = [wanting(f"{adjective} river") for adjective in words.ADJECTIVES[:4]]
    assert len({t["world"] for t in siblings}) == 1
    assert [t.success for t in solve(siblings, sandbox.expert)] == [1.0] * 4


def random_policy(seed):
    """A callable that acts at random on whatever it sees and, now and then, answers with a word of the page."""
    rng = random.Random(seed)

    def act(observation: str) -> tuple[str, str]:
        elements = ELEMENT.findall(observation)
        words = re.findall(r"\$?\w+", re.sub("<[^>]*>", " ", observation)) or ["done"]
        if not elements or rng.random() < 0.1:
            return done(rng.choice(words))
        tag, name, number, value = rng.choice(elements)
        call = 'action="Click"'
        if tag == "select":
            option = rng.choice(re.findall(r"[^(|)]+", value.partition("(")[2]) or words).strip()
            call = f'action="Select Dropdown Option", argument="{option}"'
        elif tag in ("input", "textarea"):
            call = f'action="{rng.choice(("Type", "Search"))}", argument="{rng.choice(words)}"'
        return "", f'# Element: {with_id(name, number)}\ndo({call}, element="{number}")'
    return act


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test", "test-unseen",
                                   "full-train", "full-test", "full-test-unseen",
                                   "long-train", "long-test", "long-test-unseen"])
def test_bounds_on_300_tasks(solve, split):
    tasks = sandbox.tasks(split, 300)
    assert all(rewards(solve(tasks, sandbox.expert)).values())
    assert not any(rewards(solve(tasks, say(""))).values())
    chance = rewards(solve(tasks, lambda task: random_policy(task["task_id"])))
    assert statistics.mean(chance.values()) < 0.05

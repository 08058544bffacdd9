"""Seeded task templates, drawn as dicts in WebArena's JSON schema plus one key, "world": the seed of the sites' data.

A template is a function (world, rng) -> Draft that picks its slots from the data of one world. Every task has a world
of its own, so no product, post or order is known from another task, and no two splits share a world. Whatever a task
names exists once in its world, and the world as it starts never satisfies the task's check.

    train, dev, test, test-unseen             the small tier: 25 templates on shop and forum, up to 8 actions each
    full-train, full-test, full-test-unseen   all templates on all five sites, up to 12 actions
    full-train-easy ... full-test-unseen-hard one tier of difficulty of these
    long-train, long-dev, long-test,          the long tier: shop and forum, 8 to 17 actions; its templates are in long.py
    long-test-unseen

Some tasks of the full splits cannot be done, for want of a role or of a route: their answer is "N/A".
"""

import re
from random import Random

from . import admin, code, forum, long, shop
from . import map as atlas
from .drafts import (ADMIN, CODE, FORUM, MAP, SHOP, Draft, PostSlots, ProductSlots, answer, at, both, cart_names, either,
                     shows, text_of, unused_shipping)
from .server import World
from .words import CITIES, MONTHS, NAMES, PLACES, phrase


# ---- the shop
def price(world, rng):
    p = ProductSlots(world, rng)
    return Draft("what is the price of the {{section}} item {{name}} in dollars", p.slots, p.starts,
                 answer(exact_match=f"${p.row.price}"))


def stock(world, rng):
    p = ProductSlots(world, rng)
    return Draft("how many of the {{section}} item {{name}} are in stock", p.slots, p.starts,
                 answer(exact_match=str(p.row.stock)))


def open_product(world, rng):
    p = ProductSlots(world, rng)
    return Draft("open the page of the {{section}} item {{name}} in the shop", p.slots, p.starts, at(p.url))


def search_product(world, rng):
    p = ProductSlots(world, rng)
    return Draft('search for "{{name}}" and open its page', {"name": p.row.name}, [SHOP, f"{SHOP}/orders"], at(p.url))


def count_search(world, rng):
    first_words = [p.name.split()[0] for p in world.sites["shop"].products.values()]
    word = rng.choice(sorted(set(first_words)))
    return Draft('how many items does a search for "{{word}}" find', {"word": word},
                 [SHOP, f"{SHOP}/orders", f"{SHOP}/cart"], answer(exact_match=str(first_words.count(word))))


def add_to_cart(world, rng):
    p = ProductSlots(world, rng)
    return Draft("add the {{section}} item {{name}} to the cart", p.slots, [p.url, *p.starts],
                 shows((f"{SHOP}/cart", text_of("#cart"), {"must_include": [p.row.name]})))


def add_size(world, rng):
    p, size = ProductSlots(world, rng), rng.choice(shop.SIZES[1:])  # the first one is preselected
    return Draft('add the {{section}} item {{name}} to the cart in size "{{size}}"', p.slots | {"size": size},
                 [p.url, *p.starts], shows((f"{SHOP}/cart", text_of(f"#{p.row.slug} .size"), {"exact_match": size})))


def add_two(world, rng):
    p = ProductSlots(world, rng)
    other = rng.choice([o for o in p.fresh if o.category == p.row.category and o != p.row]).name
    return Draft("add the {{section}} items {{name}} and {{other}} to the cart", p.slots | {"other": other},
                 [p.listing], shows((f"{SHOP}/cart", text_of("#cart"), {"must_include": [p.row.name, other]})))


def buy(world, rng):
    p = ProductSlots(world, rng)
    shipping = unused_shipping(world, rng, p.row.slug)
    return Draft('buy the {{section}} item {{name}} with "{{shipping}}" shipping', p.slots | {"shipping": shipping},
                 [p.url, p.listing],
                 both(at(f"{SHOP}/orders/", "GOLD in PRED"),
                      shows(("last", text_of("#order"), {"must_include": [p.row.name, f"shipping {shipping}"]}))))


def remove_from_cart(world, rng):
    held = cart_names(world)
    gone = rng.choice(held)
    left = "[...document.querySelectorAll('#cart .name')].map(e => e.innerText).join(', ')"
    return Draft("remove {{name}} from the cart", {"name": gone}, [SHOP, f"{SHOP}/cart"],
                 shows((f"{SHOP}/cart", left, {"exact_match": ", ".join(name for name in held if name != gone)})))


def set_quantity(world, rng):
    name, quantity = rng.choice(cart_names(world)), str(rng.randint(2, 6))
    field = f"document.querySelector('#{shop.slug_of(name)} input').value"
    return Draft('set the quantity of {{name}} in the cart to "{{quantity}}"', {"name": name, "quantity": quantity},
                 [SHOP, f"{SHOP}/cart"], shows((f"{SHOP}/cart", field, {"exact_match": quantity})))


def order_status(world, rng):
    order = rng.choice(list(world.sites["shop"].orders.values()))
    return Draft("what is the status of order {{number}} in the shop", {"number": order.number},
                 [SHOP, f"{SHOP}/orders"], answer(exact_match=order.status))


def order_total(world, rng):
    order = rng.choice(list(world.sites["shop"].orders.values()))
    return Draft("what is the total of order {{number}} in dollars", {"number": order.number},
                 [SHOP, f"{SHOP}/orders"], answer(exact_match=f"${order.total}"))


def set_city(world, rng):
    city = rng.choice([c for c in CITIES if c != world.sites["shop"].accounts[world.user].city])
    return Draft('set my city to "{{city}}" in the shop', {"city": city}, [SHOP, f"{SHOP}/account"],
                 shows((f"{SHOP}/account", text_of("#city"), {"exact_match": city})))


def set_name(world, rng):
    name = rng.choice([n for n in NAMES if n != world.user])
    return Draft('set my name to "{{name}}" in the shop', {"name": name}, [SHOP, f"{SHOP}/account"],
                 shows((f"{SHOP}/account", text_of("#name"), {"exact_match": name})))


# ---- the forum
def open_post(world, rng):
    post = PostSlots(world, rng)
    return Draft("open the post {{name}} in the {{section}} forum", post.slots, post.starts, at(post.url))


def who_wrote(world, rng):
    post = PostSlots(world, rng)
    return Draft("who wrote the post {{name}} in the {{section}} forum", post.slots, post.starts,
                 answer(must_include=[post.row.author]))


def count_votes(world, rng):
    post = PostSlots(world, rng)
    return Draft("how many votes does the post {{name}} in the {{section}} forum have", post.slots, post.starts,
                 answer(exact_match=str(post.row.votes)))


def upvote(world, rng):
    post = PostSlots(world, rng)
    return Draft("upvote the post {{name}} in the {{section}} forum", post.slots, [post.url, *post.starts],
                 shows((post.url, text_of("#votes"), {"exact_match": str(post.row.votes + 1)})))


def downvote(world, rng):
    post = PostSlots(world, rng)
    return Draft("downvote the post {{name}} in the {{section}} forum", post.slots, [post.url, *post.starts],
                 shows((post.url, text_of("#votes"), {"exact_match": str(post.row.votes - 1)})))


def comment(world, rng):
    post, text = PostSlots(world, rng), phrase(rng)
    return Draft('comment "{{text}}" on the post {{name}} in the {{section}} forum', post.slots | {"text": text},
                 [post.url, *post.starts], shows((post.url, "", {"must_include": [text]})))


def create_post(world, rng):
    title, section = phrase(rng), rng.choice(forum.FORUMS)
    return Draft('create a post titled "{{title}}" in the forum "{{section}}"', {"title": title, "section": section},
                 [FORUM, f"{FORUM}/f/{section}"],
                 both(at(f"{FORUM}/f/{section}/", "GOLD in PRED"),
                      shows(("last", text_of("#title"), {"exact_match": title}))))


LOGGED_OUT = (FORUM, text_of("nav"), {"must_include": ["log in"]})


def log_out_and_open(world, rng):
    """Logging out leads to the home page, so here it comes first ..."""
    post = PostSlots(world, rng)
    return Draft("log out of the forum and open the post {{name}} in the {{section}} forum", post.slots,
                 [post.url, *post.starts], both(at(post.url), shows(LOGGED_OUT)))


def log_out_and_set_bio(world, rng):
    """... and here last: the paper's trap. An agent that follows the word order locks itself out of the profile."""
    return set_bio(world, rng, 'log out of the forum and set my bio to "{{bio}}" in the forum', LOGGED_OUT)


def set_bio(world, rng, intent='set my bio to "{{bio}}" in the forum', *more):
    bio, mine = phrase(rng), f"{FORUM}/user/{world.user}"
    while bio == world.sites["forum"].accounts[world.user].bio:
        bio = phrase(rng)
    return Draft(intent, {"bio": bio}, [FORUM, mine], shows((mine, text_of("#bio"), {"exact_match": bio}), *more))


# ---- the shop's administration
def is_manager(world) -> bool:
    return world.sites["admin"].accounts[world.user].role == "manager"


def top_products(world, rng):
    month = rng.choice(MONTHS)
    best = admin.figures(world.sites["admin"], "bestsellers", month).most_common(3)
    return Draft("what are the top-3 best-selling products in {{month}} 2023", {"month": month},
                 [ADMIN, f"{ADMIN}/reports"], answer(must_include=[name for name, _ in best]))


def open_report(world, rng):
    report, month = rng.choice(["customers", "departments"]), rng.choice(MONTHS)  # the first one is preselected
    return Draft('show the report on "{{report}}" in {{month}} 2023', {"report": report, "month": month},
                 [ADMIN, f"{ADMIN}/orders"], at(f"{ADMIN}/reports?report={report}&month={month}"))


def newest_order(world, rng):
    newest = {order.user: order for order in reversed(admin.every_order(world.sites["admin"]))}
    customer = rng.choice(sorted(newest.keys() - {world.user}))  # whose own orders' dates do not follow their numbers
    return Draft("what is the status of the newest order of the customer {{customer}}", {"customer": customer},
                 [ADMIN, f"{ADMIN}/orders"], answer(exact_match=newest[customer].status))


def count_orders(world, rng):
    status = rng.choice(shop.STATUSES)
    count = sum(order.status == status for order in admin.every_order(world.sites["admin"]))
    return Draft('how many orders of the whole shop are "{{status}}"', {"status": status}, [ADMIN, f"{ADMIN}/orders"],
                 answer(exact_match=str(count)))


def set_stock(world, rng):
    p = rng.choice(list(world.sites["admin"].products.values()))
    stock, url = str(p.stock + rng.randint(1, 30)), f"{ADMIN}/products/{p.slug}"
    return Draft('set the stock of the product {{name}} to "{{stock}}"', {"name": p.name, "stock": stock},
                 [ADMIN, url], either(is_manager(world), shows((url, text_of("#stock"), {"exact_match": stock}))))


def turn_order(world, rng, intent, status, possible):
    waiting = [o for o in world.sites["admin"].sales.values() if o.status in ("pending", "paid")]
    number = rng.choice(waiting).number
    url = f"{ADMIN}/orders/{number}"
    return Draft(intent, {"number": number}, [ADMIN, f"{ADMIN}/products"],
                 either(possible, shows((url, text_of("#status"), {"exact_match": status}))))


def ship_order(world, rng):
    return turn_order(world, rng, "ship order {{number}} of the shop's customers", "shipped", True)


def cancel_order(world, rng):
    return turn_order(world, rng, "cancel order {{number}} of the shop's customers", "cancelled", is_manager(world))


def new_product(world, rng):
    name, department = phrase(rng), rng.choice(list(shop.CATEGORIES))
    price, stock = str(rng.randint(10, 99)), str(rng.randint(10, 99))
    slots = {"name": name, "department": department, "price": price, "stock": stock}
    url = f"{ADMIN}/products/{shop.slug_of(name)}"
    return Draft('publish a new product named "{{name}}" in the department "{{department}}" for "{{price}}" dollars '
                 'with a stock of "{{stock}}"', slots, [ADMIN],
                 either(is_manager(world), shows((url, text_of("#department"), {"exact_match": department}),
                                                 (url, text_of("#price"), {"exact_match": f"${price}"}),
                                                 (url, text_of("#stock"), {"exact_match": stock}))))


def best_customer(world, rng):
    rankings = {month: admin.figures(world.sites["admin"], "customers", month).most_common(2) for month in MONTHS}
    month = rng.choice([month for month, best in rankings.items() if best[0][1] > best[-1][1]])
    return Draft("which customer spent the most in {{month}} 2023", {"month": month}, [ADMIN, f"{ADMIN}/reports"],
                 answer(must_include=[rankings[month][0][0]]))


def promote(world, rng):
    clerks = [a.user for a in world.sites["admin"].accounts.values() if a.role == "clerk" and a.user != world.user]
    user = rng.choice(clerks)
    return Draft("make {{user}} a manager in the shop's administration", {"user": user}, [ADMIN, f"{ADMIN}/staff"],
                 either(is_manager(world), shows((f"{ADMIN}/staff/{user}", text_of("#has-the-role"),
                                                  {"exact_match": "manager"}))))


# ---- the code host
class ProjectSlots:
    """A project in which the main user has one of these roles, and what templates say about it."""

    def __init__(self, world, rng, *roles):
        self.tables = world.sites["code"]
        self.row = rng.choice([p for p in self.tables.projects.values()
                               if code.role_of(self.tables, p.slug, world.user) in (roles or code.ROLES)])
        self.slots = {"project": self.row.name}
        self.url = f"{CODE}/p/{self.row.slug}"
        self.starts = [CODE, self.url]
        self.team = [user for slug, user in self.tables.members if slug == self.row.slug]

    def pick(self, rng, rows):
        """An open issue or merge request of the project, which joins the slots."""
        row = rng.choice([row for row in rows.values() if row.project == self.row.slug and row.state == "open"])
        self.slots |= {"name": row.title}
        self.starts += [f"{self.url}/{'issues' if rows is self.tables.issues else 'merges'}"]
        return row, CODE + code.address(row)


def sometimes_as(rng, lower: str, *roles) -> tuple[bool, tuple]:
    """(whether it can be done, roles): one time in five the user's role is too low."""
    possible = rng.random() < 0.8
    return possible, roles if possible else (lower,)


def count_issues(world, rng):
    p, priority = ProjectSlots(world, rng), rng.choice(code.PRIORITIES)
    count = sum((i.project, i.state, i.priority) == (p.row.slug, "open", priority) for i in p.tables.issues.values())
    return Draft('how many open issues of "{{priority}}" priority does the project {{project}} have',
                 p.slots | {"priority": priority}, p.starts, answer(exact_match=str(count)))


def open_issue(world, rng):
    p = ProjectSlots(world, rng)
    _, url = p.pick(rng, p.tables.issues)
    return Draft("open the issue {{name}} of the project {{project}}", p.slots, p.starts, at(url))


def assignee(world, rng):
    p = ProjectSlots(world, rng)
    row, _ = p.pick(rng, p.tables.issues)
    return Draft("who is the assignee of the issue {{name}} of the project {{project}}", p.slots, p.starts,
                 answer(exact_match=row.assignee))


def is_new(table) -> tuple:
    """The last page is of a row that the world did not begin with: renaming an old one must not pass for creating."""
    number = f"document.location.pathname.split('/').pop() > {max(table)} ? 'new' : 'old'"
    return "last", number, {"exact_match": "new"}


def create_issue(world, rng):
    p, title, priority = ProjectSlots(world, rng), phrase(rng), rng.choice(("low", "high", "urgent"))
    return Draft('create an issue titled "{{title}}" of "{{priority}}" priority in the project {{project}}',
                 p.slots | {"title": title, "priority": priority}, p.starts,
                 both(at(f"{p.url}/issues/", "GOLD in PRED"),
                      shows(is_new(p.tables.issues), ("last", text_of("#title"), {"exact_match": title}),
                            ("last", text_of("#priority"), {"exact_match": priority}))))


def close_issue(world, rng):
    possible, roles = sometimes_as(rng, "guest", "developer", "owner")
    p = ProjectSlots(world, rng, *roles)
    _, url = p.pick(rng, p.tables.issues)
    return Draft("close the issue {{name}} of the project {{project}}", p.slots, [*p.starts, url],
                 either(possible, shows((url, text_of("#state"), {"exact_match": "closed"}))))


def assign_issue(world, rng):
    p = ProjectSlots(world, rng, "developer", "owner")
    row, url = p.pick(rng, p.tables.issues)
    user = rng.choice([user for user in p.team if user != row.assignee])
    return Draft('assign the issue {{name}} of the project {{project}} to "{{user}}"', p.slots | {"user": user},
                 [*p.starts, url], shows((url, text_of("#assignee"), {"exact_match": user})))


def delete_issue(world, rng):
    possible, roles = sometimes_as(rng, "developer", "owner")
    p = ProjectSlots(world, rng, *roles)
    _, url = p.pick(rng, p.tables.issues)
    return Draft("delete the issue {{name}} of the project {{project}}", p.slots, [*p.starts, url],
                 either(possible, shows((url, text_of("h1"), {"exact_match": "not found"}))))


def merge(world, rng):
    possible, roles = sometimes_as(rng, "guest", "developer", "owner")
    p = ProjectSlots(world, rng, *roles)
    _, url = p.pick(rng, p.tables.merges)
    return Draft("merge the merge request {{name}} of the project {{project}} and approve it if nobody has", p.slots,
                 p.starts, either(possible, shows((url, text_of("#state"), {"exact_match": "merged"}))))


def follow(world, rng):
    p = ProjectSlots(world, rng)
    return Draft("follow the project {{project}}", p.slots, p.starts,
                 shows((p.url, text_of("#followers"), {"exact_match": str(p.row.followers + 1)})))


def invite(world, rng):
    p, role = ProjectSlots(world, rng, "owner"), rng.choice(code.ROLES[1:])
    user = rng.choice([user for user in p.tables.accounts if user not in p.team])
    return Draft('invite {{user}} to the project {{project}} as "{{role}}"', p.slots | {"user": user, "role": role},
                 p.starts, shows((f"{p.url}/members", text_of(f"#role-{user}"), {"exact_match": role})))


def member_role(world, rng):
    p = ProjectSlots(world, rng)
    user = rng.choice(p.team)
    return Draft("what is the role of {{user}} in the project {{project}}", p.slots | {"user": user}, p.starts,
                 answer(exact_match=p.tables.members[p.row.slug, user]))


def change_role(world, rng):
    p = ProjectSlots(world, rng, "owner")
    user = rng.choice([user for user in p.team if user != world.user])
    role = rng.choice([role for role in code.ROLES[1:] if role != p.tables.members[p.row.slug, user]])
    return Draft('change the role of {{user}} in the project {{project}} to "{{role}}"',
                 p.slots | {"user": user, "role": role}, [*p.starts, f"{p.url}/members"],
                 shows((f"{p.url}/members", text_of(f"#role-{user}"), {"exact_match": role})))


def approve_as(world, rng):
    """In another account: the user's own has to be left first."""
    p = ProjectSlots(world, rng)
    row, url = p.pick(rng, p.tables.merges)
    user = rng.choice([user for user in p.team if user not in (row.author, *row.approved, world.user)
                       and p.tables.members[p.row.slug, user] != "guest"])
    return Draft('log in to the code host as "{{user}}" with the password "{{password}}" and approve the merge request '
                 "{{name}} of the project {{project}}",
                 p.slots | {"user": user, "password": p.tables.accounts[user].password}, [CODE],
                 shows((url, text_of("#approved-by"), {"must_include": [user]})))


# ---- the map
class PlaceSlots:
    """A place, what templates say about it, and another one to go to."""

    def __init__(self, world, rng):
        self.places = world.sites["map"].places
        self.row = rng.choice(list(self.places.values()))
        self.slots = {"name": self.row.name}
        self.url = f"{MAP}/place/{self.row.slug}"
        self.starts = [MAP, f"{MAP}/kind/{self.row.kind}"]


def two_places(world, rng):
    """Two places and whether a street leads from the one to the other."""
    one, two = rng.sample(list(world.sites["map"].places.values()), 2)
    return one, two, {"start": one.name, "end": two.name}, not (one.ferry or two.ferry)


def phone(world, rng):
    p = PlaceSlots(world, rng)
    return Draft("what is the phone number of the {{name}}", p.slots, [p.url, *p.starts],
                 answer(exact_match=p.row.phone))


def how_far(world, rng):
    one, two, slots, possible = two_places(world, rng)
    return Draft("how many km is the way from the {{start}} to the {{end}}", slots, [MAP, f"{MAP}/directions"],
                 either(possible, answer(must_include=[str(atlas.distance(one, two))])))


def how_long(world, rng):
    (one, two, slots, possible), by = two_places(world, rng), rng.choice(("bike", "drive"))  # walk is preselected
    return Draft('how many minutes does it take to "{{by}}" from the {{start}} to the {{end}}', slots | {"by": by},
                 [MAP], either(possible, answer(must_include=[str(atlas.distance(one, two) * atlas.SPEED[by])])))


def save_place(world, rng):
    p, note = PlaceSlots(world, rng), phrase(rng)
    return Draft('save the {{name}} with the note "{{note}}"', p.slots | {"note": note}, [p.url, *p.starts],
                 shows((f"{MAP}/saved", text_of(f"#{p.row.slug}"), {"exact_match": note})))


def by_distance(world, place, kind=None):
    """(km, name) of the other places, the nearest first."""
    return sorted((atlas.distance(place, p), p.name) for p in world.sites["map"].places.values()
                  if p != place and kind in (None, p.kind))


def nearest(world, rng):
    while True:  # until one of the kind is nearer than all others
        p, kind = PlaceSlots(world, rng), rng.choice(PLACES)
        (least, name), (second, _) = by_distance(world, p.row, kind)[:2]
        if least < second:
            return Draft("which {{kind}} is nearest to the {{name}}", p.slots | {"kind": kind}, [p.url, *p.starts],
                         answer(must_include=[name]))


def best_rated(world, rng):
    kind = rng.choice(PLACES)
    best = max((p for p in world.sites["map"].places.values() if p.kind == kind), key=lambda p: p.rating)
    return Draft("which {{kind}} has the best rating", {"kind": kind}, [MAP, f"{MAP}/kind/{kind}"],
                 answer(must_include=[best.name]))


def plan_trip(world, rng):
    _, _, slots, _ = two_places(world, rng)
    title, by = phrase(rng), rng.choice(list(atlas.SPEED))
    stops = "[...document.querySelectorAll('#stops a')].map(e => e.innerText).join(', ')"
    return Draft('plan a trip named "{{title}}" from the {{start}} to the {{end}} by "{{by}}"',
                 slots | {"title": title, "by": by}, [MAP, f"{MAP}/trips"],
                 both(at(f"{MAP}/trips/", "GOLD in PRED"),
                      shows(("last", text_of("#name"), {"exact_match": title}),
                            ("last", text_of("#by"), {"exact_match": by}),
                            ("last", stops, {"exact_match": f"{slots['start']}, {slots['end']}"}))))


def remove_saved(world, rng):
    held = [world.sites["map"].places[slug] for _, slug in world.sites["map"].saved]
    gone = rng.choice(held)
    left = "[...document.querySelectorAll('main td a')].map(e => e.innerText).join(', ')"
    return Draft("remove the {{name}} from my saved places", {"name": gone.name}, [MAP, f"{MAP}/saved"],
                 shows((f"{MAP}/saved", left, {"exact_match": ", ".join(p.name for p in held if p != gone)})))


def show_route(world, rng):
    (one, two, slots, possible), by = two_places(world, rng), rng.choice(list(atlas.SPEED))
    query = f"from={one.slug}&to={two.slug}&by={by}".replace("-", "+")
    return Draft('show the way from the {{start}} to the {{end}} by "{{by}}"', slots | {"by": by},
                 [MAP, f"{MAP}/directions"], either(possible, at(f"{MAP}/directions?{query}")))


def nearer(world, rng):
    p = PlaceSlots(world, rng)
    near, far = sorted(rng.sample(by_distance(world, p.row), 2))
    while near[0] == far[0]:
        near, far = sorted(rng.sample(by_distance(world, p.row), 2))
    one, two = rng.sample([near[1], far[1]], 2)
    return Draft("which is nearer to the {{name}} : the {{one}} or the {{two}}", p.slots | {"one": one, "two": two},
                 [p.url], answer(must_include=[near[1]], must_exclude=[far[1]]))


# ---- two sites, each in a tab of its own; the first one is in front
def buy_bestseller(world, rng):
    while True:  # until the cart does not hold it yet
        month = rng.choice(MONTHS)
        (name, _), = admin.figures(world.sites["admin"], "bestsellers", month).most_common(1)
        if name not in cart_names(world):
            break
    shipping = unused_shipping(world, rng, shop.slug_of(name))
    return Draft("tab 0 is the shop's administration and tab 1 the shop : buy the best-selling product of {{month}} "
                 '2023 with "{{shipping}}" shipping', {"month": month, "shipping": shipping}, [f"{ADMIN} |AND| {SHOP}"],
                 both(at(f"{SHOP}/orders/", "GOLD in PRED"),
                      shows(("last", text_of("#order"), {"must_include": [name, f"shipping {shipping}"]}))))


def post_to_issue(world, rng):
    p, section = ProjectSlots(world, rng), rng.choice(forum.FORUMS)
    newest = max(post for post in world.sites["forum"].posts.values() if post.forum == section)
    return Draft("tab 0 is the forum and tab 1 the code host : create an issue in the project {{project}} with the "
                 "title of the newest post in the {{section}} forum", p.slots | {"section": section},
                 [f"{FORUM}/f/{section} |AND| {CODE}"],
                 both(at(f"{p.url}/issues/", "GOLD in PRED"),
                      shows(is_new(p.tables.issues), ("last", text_of("#title"), {"exact_match": newest.title}))))


def comment_phone(world, rng):
    post, place = PostSlots(world, rng), PlaceSlots(world, rng)
    return Draft("tab 0 is the map and tab 1 the forum : comment the phone number of the {{place}} on the post",
                 {"place": place.row.name}, [f"{MAP} |AND| {post.url}"],
                 shows((post.url, "", {"must_include": [place.row.phone]})))


# ---- splits
SEEN = {1: price, 2: open_product, 3: search_product, 4: count_search, 5: add_to_cart, 6: add_size, 7: remove_from_cart,
        8: set_quantity, 9: buy, 10: order_status, 11: set_city,
        21: open_post, 22: who_wrote, 23: upvote, 24: comment, 25: create_post, 26: set_bio, 27: log_out_and_open,
        28: log_out_and_set_bio}
UNSEEN = {101: stock, 102: add_two, 103: order_total, 104: set_name, 121: count_votes, 122: downvote}
FULL_SEEN = SEEN | {
    31: top_products, 32: open_report, 33: newest_order, 34: count_orders, 35: set_stock, 36: ship_order,
    37: cancel_order, 38: new_product,
    41: count_issues, 42: open_issue, 43: assignee, 44: create_issue, 45: close_issue, 46: assign_issue,
    47: delete_issue, 48: merge, 49: follow, 50: invite,
    61: phone, 62: how_far, 63: how_long, 64: save_place, 65: nearest, 66: best_rated, 67: plan_trip,
    71: buy_bestseller, 72: post_to_issue}
FULL_UNSEEN = UNSEEN | {131: best_customer, 132: promote, 141: member_role, 142: change_role, 143: approve_as,
                        161: remove_saved, 162: show_route, 163: nearer, 171: comment_phone}
# By the expert's longest way: at most 4 actions are easy, 7 and more are hard, what lies between is medium.
EASY = {1, 2, 3, 4, 7, 8, 10, 21, 22, 23, 27, 31, 33, 34, 36, 37, 49, 61, 66, 101, 103, 121, 122, 141, 161}
HARD = {9, 38, 44, 45, 46, 47, 48, 50, 67, 71, 72, 102, 142, 143}
SPLITS = {"train": (600, SEEN), "test": (200, SEEN), "test-unseen": (100, UNSEEN),  # default size and templates
          "dev": (5 * len(SEEN), SEEN)}  # held out, to watch training and choose by; test is for the end
SPLITS |= {"long-train": (600, long.SEEN), "long-dev": (5 * len(long.SEEN), long.SEEN),
           "long-test": (20 * len(long.SEEN), long.SEEN), "long-test-unseen": (25 * len(long.UNSEEN), long.UNSEEN)}
for kind, size, templates in (("train", 600, FULL_SEEN), ("test", 300, FULL_SEEN), ("test-unseen", 150, FULL_UNSEEN)):
    SPLITS[f"full-{kind}"] = size, templates
    for tier, numbers in {"easy": EASY, "medium": templates.keys() - EASY - HARD, "hard": HARD}.items():
        SPLITS[f"full-{kind}-{tier}"] = size, {n: template for n, template in templates.items() if n in numbers}


def tasks(split: str, n: int | None = None, template: int | None = None) -> list[dict]:
    """The first n tasks of a split, or of one template in it. Templates take turns, so that every prefix is balanced."""
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: the sandbox has {', '.join(SPLITS)}")
    size, templates = SPLITS[split][0], list(SPLITS[split][1])
    if template is None:
        first, step = 0, 1
    elif template in templates:
        first, step = templates.index(template), len(templates)
    else:
        raise ValueError(f"no template {template} in {split}: it has {', '.join(map(str, templates))}")
    return [task(split, i) for i in range(first, size if n is None else first + n * step, step)]


FIRST_WORLD = {"small": 0, "full": 500_000_000, "long": 600_000_000}  # by tier


def tier_of(split: str) -> str:
    first, _, _ = split.partition("-")
    return first if first in FIRST_WORLD else "small"


def world_seed(split: str, i: int) -> int:
    """Splits never share a world, however many tasks are drawn."""
    if split == "dev":  # it came last, and the other splits keep the worlds of published results
        return 400_000_000 + i
    tier = tier_of(split)
    kin = [name for name in SPLITS if tier_of(name) == tier and name != "dev"]
    return FIRST_WORLD[tier] + len(kin) * (i + 1) + kin.index(split)


def task(split: str, i: int) -> dict:
    templates, seed = SPLITS[split][1], world_seed(split, i)
    number = list(templates)[i % len(templates)]
    rng = Random(f"{split} {i}")
    draft = templates[number](World(seed), rng)
    intent = draft.intent
    for slot, value in draft.slots.items():
        intent = intent.replace("{{" + slot + "}}", str(value))
    start = rng.choice(draft.starts)
    sites = [name.lower() for name in re.findall("__([A-Z_]+?)__", start)]
    return {"sites": sites, "task_id": i, "require_login": True,
            "storage_state": None, "start_url": start, "geolocation": None, "intent_template": draft.intent,
            "instantiation_dict": draft.slots, "intent": intent, "require_reset": False,
            "eval": {"reference_answers": None, "reference_url": "", "program_html": []} | draft.check,
            "intent_template_id": number, "world": seed}

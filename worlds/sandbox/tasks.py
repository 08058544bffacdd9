"""Seeded task templates, drawn as dicts in WebArena's JSON schema plus one key, "world": the seed of the sites' data.

A template is a function (world, rng) -> Draft that picks its slots from the data of one world. Every task has a world
of its own, so what holds for a product, post or order in one task says nothing about another, and no two splits share
a world. Whatever a task names exists once in its world, and the world as it starts never satisfies the task's check.

    train, dev, test, test-unseen             the small tier: 25 templates on shop and forum, up to 8 actions each
    full-train, full-test, full-test-unseen   all templates on all five sites, up to 12 actions
    full-train-easy ... full-test-unseen-hard one tier of difficulty of these
    long-train, long-dev, long-test,          the long tier: shop and forum, 8 to 17 actions;
    long-test-unseen                          its templates are in long.py

Some tasks of the full splits cannot be done, for want of a role or of a route: their answer is "N/A".
"""

import re
from random import Random

from . import admin, code, forum, long, shop
from . import map as atlas
from .drafts import (
    ADMIN, CODE, FORUM, MAP, SHOP,
    ACCOUNT, CART, ORDERS,
    Draft, PostSlots, ProductSlots,
    cart_names, draw_bio, draw_city, draw_name, draw_order, draw_size, unused_shipping,
    answer, at, below, both, either, shows,
    page_has, text_has, text_is, texts_of,
)
from .server import World
from .words import MONTHS, PLACES, phrase


# ---- the shop
def price(world, rng):
    product = ProductSlots(world, rng)
    return Draft(
        intent="what is the price of the {{section}} item {{name}} in dollars",
        slots=product.slots,
        starts=product.starts,
        check=answer(exact_match=f"${product.row.price}"),
    )


def stock(world, rng):
    product = ProductSlots(world, rng)
    return Draft(
        intent="how many of the {{section}} item {{name}} are in stock",
        slots=product.slots,
        starts=product.starts,
        check=answer(exact_match=str(product.row.stock)),
    )


def open_product(world, rng):
    product = ProductSlots(world, rng)
    return Draft(
        intent="open the page of the {{section}} item {{name}} in the shop",
        slots=product.slots,
        starts=product.starts,
        check=at(product.url),
    )


def search_product(world, rng):
    product = ProductSlots(world, rng)
    return Draft(
        intent='search for "{{name}}" and open its page',
        slots={"name": product.row.name},
        starts=[SHOP, ORDERS],
        check=at(product.url),
    )


def count_search(world, rng):
    products = world.sites["shop"].products.values()
    first_words = [product.name.split()[0] for product in products]
    word = rng.choice(sorted(set(first_words)))
    count = first_words.count(word)
    return Draft(
        intent='how many items does a search for "{{word}}" find',
        slots={"word": word},
        starts=[SHOP, ORDERS, CART],
        check=answer(exact_match=str(count)),
    )


def add_to_cart(world, rng):
    product = ProductSlots(world, rng)
    return Draft(
        intent="add the {{section}} item {{name}} to the cart",
        slots=product.slots,
        starts=[product.url, *product.starts],
        check=shows(text_has(CART, "#cart", product.row.name)),
    )


def add_size(world, rng):
    product = ProductSlots(world, rng)
    size = draw_size(rng)
    return Draft(
        intent='add the {{section}} item {{name}} to the cart in size "{{size}}"',
        slots=product.slots | {"size": size},
        starts=[product.url, *product.starts],
        check=shows(text_is(CART, f"#{product.row.slug} .size", size)),
    )


def add_two(world, rng):
    product = ProductSlots(world, rng)
    name = product.row.name

    others = []  # of the same department
    for row in product.fresh:
        if row.category == product.row.category and row != product.row:
            others.append(row)
    other = rng.choice(others).name

    return Draft(
        intent="add the {{section}} items {{name}} and {{other}} to the cart",
        slots=product.slots | {"other": other},
        starts=[product.listing],
        check=shows(text_has(CART, "#cart", name, other)),
    )


def buy(world, rng):
    product = ProductSlots(world, rng)
    shipping = unused_shipping(world, rng, product.row.slug)
    order = text_has("last", "#order", product.row.name, f"shipping {shipping}")
    return Draft(
        intent='buy the {{section}} item {{name}} with "{{shipping}}" shipping',
        slots=product.slots | {"shipping": shipping},
        starts=[product.url, product.listing],
        check=both(below(f"{ORDERS}/"), shows(order)),
    )


def remove_from_cart(world, rng):
    held = cart_names(world)
    gone = rng.choice(held)
    left = [name for name in held if name != gone]
    names_left = (CART, texts_of("#cart .name"), {"exact_match": ", ".join(left)})
    return Draft(
        intent="remove {{name}} from the cart",
        slots={"name": gone},
        starts=[SHOP, CART],
        check=shows(names_left),
    )


def set_quantity(world, rng):
    name = rng.choice(cart_names(world))
    quantity = str(rng.randint(2, 6))
    value = f"document.querySelector('#{shop.slug_of(name)} input').value"
    return Draft(
        intent='set the quantity of {{name}} in the cart to "{{quantity}}"',
        slots={"name": name, "quantity": quantity},
        starts=[SHOP, CART],
        check=shows((CART, value, {"exact_match": quantity})),
    )


def order_status(world, rng):
    order = draw_order(world, rng)
    return Draft(
        intent="what is the status of order {{number}} in the shop",
        slots={"number": order.number},
        starts=[SHOP, ORDERS],
        check=answer(exact_match=order.status),
    )


def order_total(world, rng):
    order = draw_order(world, rng)
    return Draft(
        intent="what is the total of order {{number}} in dollars",
        slots={"number": order.number},
        starts=[SHOP, ORDERS],
        check=answer(exact_match=f"${order.total}"),
    )


def set_city(world, rng):
    city = draw_city(world, rng)
    return Draft(
        intent='set my city to "{{city}}" in the shop',
        slots={"city": city},
        starts=[SHOP, ACCOUNT],
        check=shows(text_is(ACCOUNT, "#city", city)),
    )


def set_name(world, rng):
    name = draw_name(world, rng)
    return Draft(
        intent='set my name to "{{name}}" in the shop',
        slots={"name": name},
        starts=[SHOP, ACCOUNT],
        check=shows(text_is(ACCOUNT, "#name", name)),
    )


# ---- the forum
def open_post(world, rng):
    post = PostSlots(world, rng)
    return Draft(
        intent="open the post {{name}} in the {{section}} forum",
        slots=post.slots,
        starts=post.starts,
        check=at(post.url),
    )


def who_wrote(world, rng):
    post = PostSlots(world, rng)
    return Draft(
        intent="who wrote the post {{name}} in the {{section}} forum",
        slots=post.slots,
        starts=post.starts,
        check=answer(must_include=[post.row.author]),
    )


def count_votes(world, rng):
    post = PostSlots(world, rng)
    return Draft(
        intent="how many votes does the post {{name}} in the {{section}} forum have",
        slots=post.slots,
        starts=post.starts,
        check=answer(exact_match=str(post.row.votes)),
    )


def upvote(world, rng):
    post = PostSlots(world, rng)
    votes = post.row.votes + 1
    return Draft(
        intent="upvote the post {{name}} in the {{section}} forum",
        slots=post.slots,
        starts=[post.url, *post.starts],
        check=shows(text_is(post.url, "#votes", str(votes))),
    )


def downvote(world, rng):
    post = PostSlots(world, rng)
    votes = post.row.votes - 1
    return Draft(
        intent="downvote the post {{name}} in the {{section}} forum",
        slots=post.slots,
        starts=[post.url, *post.starts],
        check=shows(text_is(post.url, "#votes", str(votes))),
    )


def comment(world, rng):
    post = PostSlots(world, rng)
    text = phrase(rng)
    return Draft(
        intent='comment "{{text}}" on the post {{name}} in the {{section}} forum',
        slots=post.slots | {"text": text},
        starts=[post.url, *post.starts],
        check=shows(page_has(post.url, text)),
    )


def create_post(world, rng):
    title = phrase(rng)
    section = rng.choice(forum.FORUMS)
    url = f"{FORUM}/f/{section}"
    created = text_is("last", "#title", title)
    return Draft(
        intent='create a post titled "{{title}}" in the forum "{{section}}"',
        slots={"title": title, "section": section},
        starts=[FORUM, url],
        check=both(below(f"{url}/"), shows(created)),
    )


LOGGED_OUT = text_has(FORUM, "nav", "log in")


def log_out_and_open(world, rng):
    """Logging out leads to the home page, so here it comes first ..."""
    post = PostSlots(world, rng)
    return Draft(
        intent="log out of the forum and open the post {{name}} in the {{section}} forum",
        slots=post.slots,
        starts=[post.url, *post.starts],
        check=both(at(post.url), shows(LOGGED_OUT)),
    )


def log_out_and_set_bio(world, rng):
    """... and here last: the paper's trap. An agent that follows the word order locks itself out of the profile."""
    intent = 'log out of the forum and set my bio to "{{bio}}" in the forum'
    return set_bio(world, rng, intent, LOGGED_OUT)


def set_bio(world, rng, intent='set my bio to "{{bio}}" in the forum', *more):
    """more: further targets of `shows`."""
    bio = draw_bio(world, rng)
    profile = f"{FORUM}/user/{world.user}"
    return Draft(
        intent=intent,
        slots={"bio": bio},
        starts=[FORUM, profile],
        check=shows(text_is(profile, "#bio", bio), *more),
    )


# ---- the shop's administration
def is_manager(world) -> bool:
    """Whether the main user is one. Clerks may not do everything."""
    account = world.sites["admin"].accounts[world.user]
    return account.role == "manager"


def top_products(world, rng):
    month = rng.choice(MONTHS)
    sold = admin.figures(world.sites["admin"], "bestsellers", month)
    best = [name for name, _ in sold.most_common(3)]
    return Draft(
        intent="what are the top-3 best-selling products in {{month}} 2023",
        slots={"month": month},
        starts=[ADMIN, f"{ADMIN}/reports"],
        check=answer(must_include=best),
    )


def open_report(world, rng):
    report = rng.choice(["customers", "departments"])  # not the bestsellers, which are preselected
    month = rng.choice(MONTHS)
    url = f"{ADMIN}/reports?report={report}&month={month}"
    return Draft(
        intent='show the report on "{{report}}" in {{month}} 2023',
        slots={"report": report, "month": month},
        starts=[ADMIN, f"{ADMIN}/orders"],
        check=at(url),
    )


def newest_order(world, rng):
    newest = {}
    for order in reversed(admin.every_order(world.sites["admin"])):
        newest[order.user] = order

    customers = newest.keys() - {world.user}  # whose own orders' dates do not follow their numbers
    customer = rng.choice(sorted(customers))
    return Draft(
        intent="what is the status of the newest order of the customer {{customer}}",
        slots={"customer": customer},
        starts=[ADMIN, f"{ADMIN}/orders"],
        check=answer(exact_match=newest[customer].status),
    )


def count_orders(world, rng):
    status = rng.choice(shop.STATUSES)
    orders = admin.every_order(world.sites["admin"])
    count = sum(order.status == status for order in orders)
    return Draft(
        intent='how many orders of the whole shop are "{{status}}"',
        slots={"status": status},
        starts=[ADMIN, f"{ADMIN}/orders"],
        check=answer(exact_match=str(count)),
    )


def set_stock(world, rng):
    products = world.sites["admin"].products
    product = rng.choice(list(products.values()))
    stock = str(product.stock + rng.randint(1, 30))
    url = f"{ADMIN}/products/{product.slug}"

    done = shows(text_is(url, "#stock", stock))
    return Draft(
        intent='set the stock of the product {{name}} to "{{stock}}"',
        slots={"name": product.name, "stock": stock},
        starts=[ADMIN, url],
        check=either(is_manager(world), done),
    )


def set_order_status(world, rng, intent, status, possible):
    """A task that gives an order, which is neither shipped nor cancelled yet, this status."""
    orders = world.sites["admin"].sales.values()
    waiting = [order for order in orders if order.status in ("pending", "paid")]
    number = rng.choice(waiting).number

    done = shows(text_is(f"{ADMIN}/orders/{number}", "#status", status))
    return Draft(
        intent=intent,
        slots={"number": number},
        starts=[ADMIN, f"{ADMIN}/products"],
        check=either(possible, done),
    )


def ship_order(world, rng):
    intent = "ship order {{number}} of the shop's customers"
    return set_order_status(world, rng, intent, "shipped", possible=True)


def cancel_order(world, rng):
    intent = "cancel order {{number}} of the shop's customers"
    return set_order_status(world, rng, intent, "cancelled", possible=is_manager(world))


def new_product(world, rng):
    name = phrase(rng)
    department = rng.choice(list(shop.CATEGORIES))
    price = str(rng.randint(10, 99))
    stock = str(rng.randint(10, 99))

    url = f"{ADMIN}/products/{shop.slug_of(name)}"
    done = shows(
        text_is(url, "#department", department),
        text_is(url, "#price", f"${price}"),
        text_is(url, "#stock", stock),
    )
    return Draft(
        intent=(
            'publish a new product named "{{name}}" in the department "{{department}}" for "{{price}}" dollars '
            'with a stock of "{{stock}}"'
        ),
        slots={
            "name": name,
            "department": department,
            "price": price,
            "stock": stock,
        },
        starts=[ADMIN],
        check=either(is_manager(world), done),
    )


def best_customer(world, rng):
    best = {}  # by month, where one customer spent more than all others
    for month in MONTHS:
        spent = admin.figures(world.sites["admin"], "customers", month)
        ranking = spent.most_common(2)
        name, most = ranking[0]
        _, second = ranking[-1]
        if most > second:
            best[month] = name

    month = rng.choice(list(best))
    return Draft(
        intent="which customer spent the most in {{month}} 2023",
        slots={"month": month},
        starts=[ADMIN, f"{ADMIN}/reports"],
        check=answer(must_include=[best[month]]),
    )


def promote(world, rng):
    clerks = []
    for account in world.sites["admin"].accounts.values():
        if account.role == "clerk" and account.user != world.user:
            clerks.append(account.user)
    user = rng.choice(clerks)

    done = shows(text_is(f"{ADMIN}/staff/{user}", "#has-the-role", "manager"))
    return Draft(
        intent="make {{user}} a manager in the shop's administration",
        slots={"user": user},
        starts=[ADMIN, f"{ADMIN}/staff"],
        check=either(is_manager(world), done),
    )


# ---- the code host
class ProjectSlots:
    """A project in which the main user has one of these roles, and what templates say about it."""

    def __init__(self, world, rng, *roles):
        self.tables = world.sites["code"]

        projects = []
        for project in self.tables.projects.values():
            role = code.role_of(self.tables, project.slug, world.user)
            if role in (roles or code.ROLES):
                projects.append(project)
        self.row = rng.choice(projects)

        slug = self.row.slug
        self.slots = {"project": self.row.name}
        self.url = f"{CODE}/p/{slug}"
        self.starts = [CODE, self.url]
        self.team = [user for project, user in self.tables.members if project == slug]

    def pick(self, rng, rows):
        """An open issue or merge request of the project, which joins the slots."""
        candidates = []
        for row in rows.values():
            if row.project == self.row.slug and row.state == "open":
                candidates.append(row)
        row = rng.choice(candidates)

        self.slots["name"] = row.title
        kind = "issues" if rows is self.tables.issues else "merges"
        self.starts.append(f"{self.url}/{kind}")
        return row, CODE + code.address(row)

    def role(self, user: str) -> str:
        """The role of somebody on the team."""
        return self.tables.members[self.row.slug, user]


def sometimes_as(rng, lower: str, *roles) -> tuple[bool, tuple]:
    """(whether it can be done, roles): one time in five the user's role is too low."""
    possible = rng.random() < 0.8
    if possible:
        return True, roles
    return False, (lower,)


def count_issues(world, rng):
    project = ProjectSlots(world, rng)
    priority = rng.choice(code.PRIORITIES)

    count = 0
    wanted = (project.row.slug, "open", priority)
    for issue in project.tables.issues.values():
        if (issue.project, issue.state, issue.priority) == wanted:
            count += 1

    return Draft(
        intent='how many open issues of "{{priority}}" priority does the project {{project}} have',
        slots=project.slots | {"priority": priority},
        starts=project.starts,
        check=answer(exact_match=str(count)),
    )


def open_issue(world, rng):
    project = ProjectSlots(world, rng)
    _, url = project.pick(rng, project.tables.issues)
    return Draft(
        intent="open the issue {{name}} of the project {{project}}",
        slots=project.slots,
        starts=project.starts,
        check=at(url),
    )


def assignee(world, rng):
    project = ProjectSlots(world, rng)
    issue, _ = project.pick(rng, project.tables.issues)
    return Draft(
        intent="who is the assignee of the issue {{name}} of the project {{project}}",
        slots=project.slots,
        starts=project.starts,
        check=answer(exact_match=issue.assignee),
    )


def is_new(table) -> tuple:
    """A target of `shows`: the last page is of a row that the world did not begin with.

    Renaming an old row must not pass for creating one.
    """
    age = f"document.location.pathname.split('/').pop() > {max(table)} ? 'new' : 'old'"
    return "last", age, {"exact_match": "new"}


def create_issue(world, rng):
    project = ProjectSlots(world, rng)
    title = phrase(rng)
    priority = rng.choice(("low", "high", "urgent"))

    created = shows(
        is_new(project.tables.issues),
        text_is("last", "#title", title),
        text_is("last", "#priority", priority),
    )
    return Draft(
        intent='create an issue titled "{{title}}" of "{{priority}}" priority in the project {{project}}',
        slots=project.slots | {"title": title, "priority": priority},
        starts=project.starts,
        check=both(below(f"{project.url}/issues/"), created),
    )


def close_issue(world, rng):
    possible, roles = sometimes_as(rng, "guest", "developer", "owner")
    project = ProjectSlots(world, rng, *roles)
    _, url = project.pick(rng, project.tables.issues)

    closed = shows(text_is(url, "#state", "closed"))
    return Draft(
        intent="close the issue {{name}} of the project {{project}}",
        slots=project.slots,
        starts=[*project.starts, url],
        check=either(possible, closed),
    )


def assign_issue(world, rng):
    project = ProjectSlots(world, rng, "developer", "owner")
    issue, url = project.pick(rng, project.tables.issues)
    user = rng.choice([user for user in project.team if user != issue.assignee])
    return Draft(
        intent='assign the issue {{name}} of the project {{project}} to "{{user}}"',
        slots=project.slots | {"user": user},
        starts=[*project.starts, url],
        check=shows(text_is(url, "#assignee", user)),
    )


def delete_issue(world, rng):
    possible, roles = sometimes_as(rng, "developer", "owner")
    project = ProjectSlots(world, rng, *roles)
    _, url = project.pick(rng, project.tables.issues)

    deleted = shows(text_is(url, "h1", "not found"))
    return Draft(
        intent="delete the issue {{name}} of the project {{project}}",
        slots=project.slots,
        starts=[*project.starts, url],
        check=either(possible, deleted),
    )


def merge(world, rng):
    possible, roles = sometimes_as(rng, "guest", "developer", "owner")
    project = ProjectSlots(world, rng, *roles)
    _, url = project.pick(rng, project.tables.merges)

    merged = shows(text_is(url, "#state", "merged"))
    return Draft(
        intent="merge the merge request {{name}} of the project {{project}} and approve it if nobody has",
        slots=project.slots,
        starts=project.starts,
        check=either(possible, merged),
    )


def follow(world, rng):
    project = ProjectSlots(world, rng)
    followers = project.row.followers + 1
    return Draft(
        intent="follow the project {{project}}",
        slots=project.slots,
        starts=project.starts,
        check=shows(text_is(project.url, "#followers", str(followers))),
    )


def invite(world, rng):
    project = ProjectSlots(world, rng, "owner")
    role = rng.choice(code.ROLES[1:])
    strangers = [user for user in project.tables.accounts if user not in project.team]
    user = rng.choice(strangers)

    members = f"{project.url}/members"
    return Draft(
        intent='invite {{user}} to the project {{project}} as "{{role}}"',
        slots=project.slots | {"user": user, "role": role},
        starts=project.starts,
        check=shows(text_is(members, f"#role-{user}", role)),
    )


def member_role(world, rng):
    project = ProjectSlots(world, rng)
    user = rng.choice(project.team)
    return Draft(
        intent="what is the role of {{user}} in the project {{project}}",
        slots=project.slots | {"user": user},
        starts=project.starts,
        check=answer(exact_match=project.role(user)),
    )


def change_role(world, rng):
    project = ProjectSlots(world, rng, "owner")
    others = [user for user in project.team if user != world.user]
    user = rng.choice(others)
    roles = [role for role in code.ROLES[1:] if role != project.role(user)]
    role = rng.choice(roles)

    members = f"{project.url}/members"
    return Draft(
        intent='change the role of {{user}} in the project {{project}} to "{{role}}"',
        slots=project.slots | {"user": user, "role": role},
        starts=[*project.starts, members],
        check=shows(text_is(members, f"#role-{user}", role)),
    )


def approve_as(world, rng):
    """In another account: the user's own has to be left first."""
    project = ProjectSlots(world, rng)
    request, url = project.pick(rng, project.tables.merges)

    ruled_out = (request.author, *request.approved, world.user)
    candidates = []
    for user in project.team:
        if user not in ruled_out and project.role(user) != "guest":
            candidates.append(user)
    user = rng.choice(candidates)

    password = project.tables.accounts[user].password
    return Draft(
        intent=(
            'log in to the code host as "{{user}}" with the password "{{password}}" and approve the merge request '
            "{{name}} of the project {{project}}"
        ),
        slots=project.slots | {"user": user, "password": password},
        starts=[CODE],
        check=shows(text_has(url, "#approved-by", user)),
    )


# ---- the map
class PlaceSlots:
    """A place, and what templates say about it."""

    def __init__(self, world, rng):
        self.places = world.sites["map"].places
        self.row = rng.choice(list(self.places.values()))
        self.slots = {"name": self.row.name}
        self.url = f"{MAP}/place/{self.row.slug}"
        self.starts = [MAP, f"{MAP}/kind/{self.row.kind}"]


def two_places(world, rng):
    """(one place, another, the slots that name them, whether a street leads from the one to the other)."""
    places = world.sites["map"].places
    one, two = rng.sample(list(places.values()), 2)
    slots = {"start": one.name, "end": two.name}
    possible = not (one.ferry or two.ferry)
    return one, two, slots, possible


def phone(world, rng):
    place = PlaceSlots(world, rng)
    return Draft(
        intent="what is the phone number of the {{name}}",
        slots=place.slots,
        starts=[place.url, *place.starts],
        check=answer(exact_match=place.row.phone),
    )


def how_far(world, rng):
    one, two, slots, possible = two_places(world, rng)
    km = atlas.distance(one, two)
    return Draft(
        intent="how many km is the way from the {{start}} to the {{end}}",
        slots=slots,
        starts=[MAP, f"{MAP}/directions"],
        check=either(possible, answer(must_include=[str(km)])),
    )


def how_long(world, rng):
    one, two, slots, possible = two_places(world, rng)
    by = rng.choice(("bike", "drive"))  # walk is preselected
    minutes = atlas.distance(one, two) * atlas.SPEED[by]
    return Draft(
        intent='how many minutes does it take to "{{by}}" from the {{start}} to the {{end}}',
        slots=slots | {"by": by},
        starts=[MAP],
        check=either(possible, answer(must_include=[str(minutes)])),
    )


def save_place(world, rng):
    place = PlaceSlots(world, rng)
    note = phrase(rng)
    return Draft(
        intent='save the {{name}} with the note "{{note}}"',
        slots=place.slots | {"note": note},
        starts=[place.url, *place.starts],
        check=shows(text_is(f"{MAP}/saved", f"#{place.row.slug}", note)),
    )


def by_distance(world, place, kind=None):
    """(km, name) of the other places, the nearest first. kind: only places of this kind."""
    found = []
    for other in world.sites["map"].places.values():
        if other != place and kind in (None, other.kind):
            km = atlas.distance(place, other)
            found.append((km, other.name))
    return sorted(found)


def nearest(world, rng):
    while True:  # until one of the kind is nearer than all others
        place = PlaceSlots(world, rng)
        kind = rng.choice(PLACES)
        ranking = by_distance(world, place.row, kind)
        (least, name), (second, _) = ranking[:2]
        if least < second:
            break

    return Draft(
        intent="which {{kind}} is nearest to the {{name}}",
        slots=place.slots | {"kind": kind},
        starts=[place.url, *place.starts],
        check=answer(must_include=[name]),
    )


def best_rated(world, rng):
    kind = rng.choice(PLACES)
    places = world.sites["map"].places.values()
    of_kind = [place for place in places if place.kind == kind]
    best = max(of_kind, key=lambda place: place.rating)
    return Draft(
        intent="which {{kind}} has the best rating",
        slots={"kind": kind},
        starts=[MAP, f"{MAP}/kind/{kind}"],
        check=answer(must_include=[best.name]),
    )


def plan_trip(world, rng):
    one, two, slots, _ = two_places(world, rng)
    title = phrase(rng)
    by = rng.choice(list(atlas.SPEED))

    planned = shows(
        text_is("last", "#name", title),
        text_is("last", "#by", by),
        ("last", texts_of("#stops a"), {"exact_match": f"{one.name}, {two.name}"}),
    )
    return Draft(
        intent='plan a trip named "{{title}}" from the {{start}} to the {{end}} by "{{by}}"',
        slots=slots | {"title": title, "by": by},
        starts=[MAP, f"{MAP}/trips"],
        check=both(below(f"{MAP}/trips/"), planned),
    )


def remove_saved(world, rng):
    tables = world.sites["map"]
    held = [tables.places[slug] for _, slug in tables.saved]
    gone = rng.choice(held)
    left = [place.name for place in held if place != gone]

    page = f"{MAP}/saved"
    names_left = (page, texts_of("main td a"), {"exact_match": ", ".join(left)})
    return Draft(
        intent="remove the {{name}} from my saved places",
        slots={"name": gone.name},
        starts=[MAP, page],
        check=shows(names_left),
    )


def show_route(world, rng):
    one, two, slots, possible = two_places(world, rng)
    by = rng.choice(list(atlas.SPEED))
    query = f"from={one.slug}&to={two.slug}&by={by}".replace("-", "+")

    page = f"{MAP}/directions"
    return Draft(
        intent='show the way from the {{start}} to the {{end}} by "{{by}}"',
        slots=slots | {"by": by},
        starts=[MAP, page],
        check=either(possible, at(f"{page}?{query}")),
    )


def nearer(world, rng):
    place = PlaceSlots(world, rng)
    others = by_distance(world, place.row)
    near, far = sorted(rng.sample(others, 2))
    while near[0] == far[0]:
        near, far = sorted(rng.sample(others, 2))

    _, near_name = near
    _, far_name = far
    one, two = rng.sample([near_name, far_name], 2)
    return Draft(
        intent="which is nearer to the {{name}} : the {{one}} or the {{two}}",
        slots=place.slots | {"one": one, "two": two},
        starts=[place.url],
        check=answer(must_include=[near_name], must_exclude=[far_name]),
    )


# ---- two sites, each in a tab of its own; the first one is in front
def buy_bestseller(world, rng):
    while True:  # until the cart does not hold it yet
        month = rng.choice(MONTHS)
        sold = admin.figures(world.sites["admin"], "bestsellers", month)
        [(name, _)] = sold.most_common(1)
        if name not in cart_names(world):
            break

    shipping = unused_shipping(world, rng, shop.slug_of(name))
    order = text_has("last", "#order", name, f"shipping {shipping}")
    return Draft(
        intent=(
            "tab 0 is the shop's administration and tab 1 the shop : buy the best-selling product of {{month}} "
            '2023 with "{{shipping}}" shipping'
        ),
        slots={"month": month, "shipping": shipping},
        starts=[f"{ADMIN} |AND| {SHOP}"],
        check=both(below(f"{ORDERS}/"), shows(order)),
    )


def post_to_issue(world, rng):
    project = ProjectSlots(world, rng)
    section = rng.choice(forum.FORUMS)
    posts = world.sites["forum"].posts.values()
    newest = max(post for post in posts if post.forum == section)

    created = shows(
        is_new(project.tables.issues),
        text_is("last", "#title", newest.title),
    )
    return Draft(
        intent=(
            "tab 0 is the forum and tab 1 the code host : create an issue in the project {{project}} with the "
            "title of the newest post in the {{section}} forum"
        ),
        slots=project.slots | {"section": section},
        starts=[f"{FORUM}/f/{section} |AND| {CODE}"],
        check=both(below(f"{project.url}/issues/"), created),
    )


def comment_phone(world, rng):
    post = PostSlots(world, rng)
    place = PlaceSlots(world, rng)
    return Draft(
        intent="tab 0 is the map and tab 1 the forum : comment the phone number of the {{place}} on the post",
        slots={"place": place.row.name},
        starts=[f"{MAP} |AND| {post.url}"],
        check=shows(page_has(post.url, place.row.phone)),
    )


# ---- splits
SEEN = {
    # the shop
    1: price,
    2: open_product,
    3: search_product,
    4: count_search,
    5: add_to_cart,
    6: add_size,
    7: remove_from_cart,
    8: set_quantity,
    9: buy,
    10: order_status,
    11: set_city,
    # the forum
    21: open_post,
    22: who_wrote,
    23: upvote,
    24: comment,
    25: create_post,
    26: set_bio,
    27: log_out_and_open,
    28: log_out_and_set_bio,
}
UNSEEN = {
    # the shop
    101: stock,
    102: add_two,
    103: order_total,
    104: set_name,
    # the forum
    121: count_votes,
    122: downvote,
}
FULL_SEEN = SEEN | {
    # the shop's administration
    31: top_products,
    32: open_report,
    33: newest_order,
    34: count_orders,
    35: set_stock,
    36: ship_order,
    37: cancel_order,
    38: new_product,
    # the code host
    41: count_issues,
    42: open_issue,
    43: assignee,
    44: create_issue,
    45: close_issue,
    46: assign_issue,
    47: delete_issue,
    48: merge,
    49: follow,
    50: invite,
    # the map
    61: phone,
    62: how_far,
    63: how_long,
    64: save_place,
    65: nearest,
    66: best_rated,
    67: plan_trip,
    # two sites
    71: buy_bestseller,
    72: post_to_issue,
}
FULL_UNSEEN = UNSEEN | {
    # the shop's administration
    131: best_customer,
    132: promote,
    # the code host
    141: member_role,
    142: change_role,
    143: approve_as,
    # the map
    161: remove_saved,
    162: show_route,
    163: nearer,
    # two sites
    171: comment_phone,
}

# By the expert's longest way: at most 4 actions are easy, 7 and more are hard, what lies between is medium.
EASY = {
    1, 2, 3, 4, 7, 8, 10, 101, 103,  # the shop
    21, 22, 23, 27, 121, 122,  # the forum
    31, 33, 34, 36, 37,  # the shop's administration
    49, 141,  # the code host
    61, 66, 161,  # the map
}
HARD = {
    9, 102,  # the shop
    38,  # the shop's administration
    44, 45, 46, 47, 48, 50, 142, 143,  # the code host
    67,  # the map
    71, 72,  # two sites
}

SPLITS = {  # default size and templates
    "train": (600, SEEN),
    "test": (200, SEEN),
    "test-unseen": (100, UNSEEN),
    "dev": (5 * len(SEEN), SEEN),  # held out, to watch training and choose by; test is for the end
    "long-train": (600, long.SEEN),
    "long-dev": (5 * len(long.SEEN), long.SEEN),
    "long-test": (20 * len(long.SEEN), long.SEEN),
    "long-test-unseen": (25 * len(long.UNSEEN), long.UNSEEN),
}


def add_full_split(name: str, size: int, templates: dict) -> None:
    """Adds a split of the full tier, and after it one split for each tier of difficulty."""
    SPLITS[name] = (size, templates)
    tiers = {
        "easy": EASY,
        "medium": templates.keys() - EASY - HARD,
        "hard": HARD,
    }
    for tier, numbers in tiers.items():
        in_tier = {number: template for number, template in templates.items() if number in numbers}
        SPLITS[f"{name}-{tier}"] = (size, in_tier)


add_full_split("full-train", 600, FULL_SEEN)
add_full_split("full-test", 300, FULL_SEEN)
add_full_split("full-test-unseen", 150, FULL_UNSEEN)


def tasks(
    split: str,
    n: int | None = None,
    template: int | None = None,
) -> list[dict]:
    """The first n tasks of a split, or of one template in it.

    Templates take turns, so that every prefix is balanced.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: the sandbox has {', '.join(SPLITS)}")
    size, templates = SPLITS[split]
    numbers = list(templates)

    if template is None:
        first = 0
        step = 1
    elif template in numbers:
        first = numbers.index(template)
        step = len(numbers)
    else:
        known = ", ".join(map(str, numbers))
        raise ValueError(f"no template {template} in {split}: it has {known}")

    end = size if n is None else first + n * step
    return [task(split, i) for i in range(first, end, step)]


FIRST_WORLD = {  # by tier
    "small": 0,
    "full": 500_000_000,
    "long": 600_000_000,
}


def tier_of(split: str) -> str:
    """The tier whose worlds a split draws from: small, full or long."""
    first, _, _ = split.partition("-")
    return first if first in FIRST_WORLD else "small"


def world_seed(split: str, i: int) -> int:
    """Splits never share a world, however many tasks are drawn."""
    if split == "dev":  # it came last, and the other splits keep the worlds of published results
        return 400_000_000 + i

    tier = tier_of(split)
    kin = [name for name in SPLITS if tier_of(name) == tier and name != "dev"]
    start = FIRST_WORLD[tier] + len(kin) * (i + 1)
    return start + kin.index(split)


def task(split: str, i: int) -> dict:
    """Task i of a split, in WebArena's schema."""
    _, templates = SPLITS[split]
    seed = world_seed(split, i)
    numbers = list(templates)
    number = numbers[i % len(numbers)]
    template = templates[number]

    rng = Random(f"{split} {i}")
    draft = template(World(seed), rng)
    start = rng.choice(draft.starts)

    intent = draft.intent
    for slot, value in draft.slots.items():
        intent = intent.replace("{{" + slot + "}}", str(value))

    sites = [name.lower() for name in re.findall("__([A-Z_]+?)__", start)]
    defaults = {
        "reference_answers": None,
        "reference_url": "",
        "program_html": [],
    }
    return {
        "sites": sites,
        "task_id": i,
        "require_login": True,
        "storage_state": None,
        "start_url": start,
        "geolocation": None,
        "intent_template": draft.intent,
        "instantiation_dict": draft.slots,
        "intent": intent,
        "require_reset": False,
        "eval": defaults | draft.check,
        "intent_template_id": number,
        "world": seed,
    }

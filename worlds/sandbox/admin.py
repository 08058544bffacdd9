"""The shop's administration: sales reports, orders, stock, new products, staff. It works on the shop's own products."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple

from .page import (
    LOGIN_ROUTES, NOT_FOUND, Page, Redirect,
    error, fact, items, link, table,
    field, form, press, search_box, select,
    members_only, navigation, paginate, refused, whole_number,
)
from .shop import SHIPPING, SIZES, STATUSES
from .shop import Line, Order, Product, slug_of
from .words import CATEGORIES, MONTHS, password

ROOT = "/admin"
ROLES = ("clerk", "manager")  # what a clerk may not do says so
REPORTS = {  # the heads of their columns
    "bestsellers": ("product", "sold"),
    "customers": ("customer", "spent"),
    "departments": ("department", "revenue"),
}
ALL, ANY = "all of 2023", "any"
WAITING = ("pending", "paid")  # orders that are still to be sent
PER_PAGE = 20


class Account(NamedTuple):
    user: str
    password: str
    role: str


@dataclass
class Admin:
    accounts: dict[str, Account]
    products: dict[str, Product]  # the shop's table, shared
    orders: dict[int, Order]  # the shop's, shared: those of the main user's account, without a year
    sales: dict[int, Order]  # of 2023, by everybody
    drafts: dict[str, Product]  # new products under way, by who makes them


def seed(rng, people: list[str], sites: dict) -> Admin:
    shop = sites["shop"]

    main_role = "clerk" if rng.random() < 0.15 else "manager"
    roles = [main_role, "manager", "clerk", "clerk", rng.choice(ROLES)]
    accounts = {}
    for user, role in zip(people, roles):
        accounts[user] = Account(user, password(rng), role)

    sales = {}
    for month in MONTHS:
        # Products and quantities of a month all differ, so that no two products share a place in its ranking.
        days = sorted(rng.sample(range(1, 29), 8))
        slugs = rng.sample(sorted(shop.products), 8)
        quantities = rng.sample(range(1, 13), 8)
        for day, slug, quantity in zip(days, slugs, quantities):
            number = 100 + len(sales)
            shipping = rng.choice(list(SHIPPING))
            line = Line(slug, rng.choice(SIZES), quantity)
            goods = shop.products[slug].price * quantity
            sales[number] = Order(
                number,
                user=rng.choice(people),
                date=f"{day} {month} 2023",
                status=rng.choice(STATUSES),
                shipping=shipping,
                lines=(line,),
                total=goods + SHIPPING[shipping],
            )
    return Admin(accounts, shop.products, shop.orders, sales, {})


def nav(user: str | None) -> str:
    links = [
        ("home", ROOT),
        ("orders", "/admin/orders"),
        ("products", "/admin/products"),
        ("reports", "/admin/reports"),
        ("staff", "/admin/staff"),
        ("new product", "/admin/new"),
    ]
    search = search_box(ROOT) if user else ""
    return navigation(ROOT, user, links) + search


def managers_only(handler):
    """Sends visitors to the login form, and tells clerks that they may not."""
    @wraps(handler)
    @members_only
    def guarded(admin, request, *groups):
        account = admin.accounts[request.user]
        if account.role != "manager":
            return refused("only a manager can do this and you are a clerk")
        return handler(admin, request, *groups)
    return guarded


@members_only
def home(admin, request):
    role = admin.accounts[request.user].role
    waiting = sum(order.status in WAITING for order in every_order(admin))
    scarce = sorted(admin.products.values(), key=by_stock)
    body = f"<h1>shop admin</h1><p>{request.user} is {role}</p>"
    body += fact("orders to ship", waiting)
    body += fact("products", len(admin.products))
    body += "<h2>low stock</h2>"
    body += product_table(scarce[:5])
    return Page("shop admin", body)


# ---- products
def by_name(p):
    return p.name


def by_price(p):
    return p.price, p.name


def by_stock(p):
    return p.stock, p.name


SORTS = {
    "name": by_name,
    "cheapest": by_price,
    "lowest stock": by_stock,
}


def product_table(products) -> str:
    rows = []
    for p in products:
        name = link(p.name, f"/admin/products/{p.slug}")
        rows.append((name, p.category, f"${p.price}", p.stock))
    return table(("product", "department", "price", "stock"), rows)


@members_only
def products(admin, request):
    department = request.query.get("department", ANY)
    order = request.query.get("sort", "name")
    found = [p for p in admin.products.values() if department in (ANY, p.category)]
    found.sort(key=SORTS.get(order, by_name))
    shown, links = paginate(found, request, PER_PAGE, "/admin/products")

    choices = form(
        select("department", (ANY, *CATEGORIES), department),
        select("sort", SORTS, order),
        submit="filter",
        method="get",
    )
    body = f"<h1>products</h1>{choices}<p>{len(found)} found</p>"
    body += product_table(shown)
    return Page("products", body + links)


@members_only
def search(admin, request):
    """Products by their words, orders by their number or customer."""
    text = request.query.get("q", "").lower()
    wanted = set(text.split())
    goods, orders = [], []
    if wanted:
        for p in admin.products.values():
            if wanted <= set(p.name.split()):
                goods.append(p)
        for o in every_order(admin):
            if wanted <= {str(o.number), o.user}:
                orders.append(o)

    body = "<h1>search</h1><h2>products</h2>"
    body += product_table(goods[:PER_PAGE])
    body += "<h2>orders</h2>"
    body += order_table(orders[:PER_PAGE])
    return Page("search", body)


@members_only
def product(admin, request, slug):
    p = admin.products.get(slug)
    if p is None:
        return NOT_FOUND
    edit = link("edit product", f"/admin/products/{slug}/edit")
    body = f"<h1>{p.name}</h1>"
    body += fact("department", p.category)
    body += fact("price", f"${p.price}")
    body += fact("stock", p.stock)
    body += f"<p>{edit}</p>"
    return Page(p.name, body)


def amounts(request) -> tuple[int, int, str]:
    """(price, stock, what is wrong with them)."""
    price = whole_number(request.form.get("price", ""))
    stock = whole_number(request.form.get("stock", ""))
    if price is None or not 0 < price < 1000:
        return 0, 0, "price must be a whole number between 1 and 999"
    if stock is None:
        return price, stock, "stock must be a whole number"
    return price, stock, ""


@managers_only
def product_form(admin, request, slug, problem=""):
    p = admin.products.get(slug)
    if p is None:
        return NOT_FOUND
    price = request.form.get("price", p.price)
    stock = request.form.get("stock", p.stock)
    body = f"<h1>edit product</h1><p>{p.name}</p>{error(problem)}"
    body += form(field("price", price), field("stock", stock), submit="save")
    return Page("edit product", body)


@managers_only
def edit_product(admin, request, slug):
    price, stock, problem = amounts(request)
    if problem or slug not in admin.products:
        return product_form(admin, request, slug, problem)
    old = admin.products[slug]
    admin.products[slug] = old._replace(price=price, stock=stock)
    return Redirect(f"/products/{slug}")


# ---- a new product, over three pages
@managers_only
def new_form(admin, request, problem=""):
    name = request.form.get("name", "")
    department = request.form.get("department", "")
    body = f"<h1>new product</h1><p>step 1 of 3</p>{error(problem)}"
    body += form(
        field("name", name),
        select("department", ("choose", *CATEGORIES), department),
        submit="continue",
    )
    return Page("new product", body)


@managers_only
def new_product(admin, request):
    name = request.form.get("name", "").strip()
    department = request.form.get("department", "")

    problem = ""
    if not re.fullmatch("[a-z]{1,20}( [a-z]{1,20}){0,3}", name):
        problem = "name must be one to four words in small letters"
    elif slug_of(name) in admin.products:
        problem = "there is a product of this name"
    elif department not in CATEGORIES:
        problem = "choose a department"
    if problem:
        return new_form(admin, request, problem)

    admin.drafts[request.user] = Product(
        slug_of(name),
        name,
        department,
        price=0,
        stock=0,
        rating=0,
    )
    return Redirect("/new/price")


@managers_only
def price_form(admin, request, problem=""):
    if request.user not in admin.drafts:
        return Redirect("/new")
    price = request.form.get("price", "")
    stock = request.form.get("stock", "")
    body = f"<h1>price and stock</h1><p>step 2 of 3</p>{error(problem)}"
    body += form(field("price", price), field("stock", stock), submit="continue")
    return Page("price and stock", body)


@managers_only
def set_price(admin, request):
    price, stock, problem = amounts(request)
    draft = admin.drafts.get(request.user)
    if problem or draft is None:
        return price_form(admin, request, problem)
    admin.drafts[request.user] = draft._replace(price=price, stock=stock)
    return Redirect("/new/review")


@managers_only
def review(admin, request):
    p = admin.drafts.get(request.user)
    if p is None or not p.price:
        return Redirect("/new")
    body = "<h1>review</h1><p>step 3 of 3</p>"
    body += fact("name", p.name)
    body += fact("department", p.category)
    body += fact("price", f"${p.price}")
    body += fact("stock", p.stock)
    body += form(submit="publish product")
    return Page("review", body)


@managers_only
def publish(admin, request):
    p = admin.drafts.get(request.user)
    if p is None or not p.price:
        return Redirect("/new")
    admin.products[p.slug] = admin.drafts.pop(request.user)
    return Redirect(f"/products/{p.slug}")


# ---- orders
def every_order(admin) -> list[Order]:
    """Newest first: the account's orders of this year, then those of 2023."""
    this_year = sorted(admin.orders.values(), reverse=True)
    last_year = sorted(admin.sales.values(), reverse=True)
    return this_year + last_year


def order_table(orders) -> str:
    rows = []
    for o in orders:
        name = link(f"order {o.number}", f"/admin/orders/{o.number}")
        rows.append((name, o.date, o.user, o.status, f"${o.total}"))
    return table(("order", "date", "customer", "status", "total"), rows)


@members_only
def orders(admin, request):
    status = request.query.get("status", ANY)
    customer = request.query.get("customer", "").strip().lower()
    sort = request.query.get("sort", "")

    found = every_order(admin)
    found = [o for o in found if status in (ANY, o.status)]
    found = [o for o in found if customer in ("", o.user)]
    if sort == "oldest":
        found.reverse()
    shown, links = paginate(found, request, PER_PAGE, "/admin/orders")

    choices = form(
        select("status", (ANY, *STATUSES, "cancelled"), status),
        field("customer", customer),
        select("sort", ("newest", "oldest"), sort),
        submit="filter",
        method="get",
    )
    body = f"<h1>orders</h1>{choices}<p>{len(found)} found</p>"
    body += order_table(shown)
    return Page("orders", body + links)


def held_by(admin, number: str) -> dict[int, Order]:
    """The table that holds this order; empty if none does."""
    for held in (admin.sales, admin.orders):
        if int(number) in held:
            return held
    return {}


@members_only
def order(admin, request, number):
    o = held_by(admin, number).get(int(number))
    if o is None:
        return NOT_FOUND

    buttons = ""
    if o.status in WAITING:
        here = f"/admin/orders/{o.number}"
        buttons += press("ship order", f"{here}/ship")
        buttons += press("cancel order", f"{here}/cancel", "cancel this order?")

    bought = []
    for line in o.lines:
        name = admin.products[line.slug].name
        bought.append(f"{line.quantity} {line.size} {name}")

    body = f"<h1>order {o.number}</h1>"
    body += fact("customer", o.user)
    body += fact("date", o.date)
    body += fact("status", o.status)
    body += items(bought)
    body += fact("shipping", o.shipping)
    body += fact("total", f"${o.total}")
    return Page("order", body + buttons)


def turn(admin, number, status):
    """Moves an order that waits to be sent on to `status`."""
    held = held_by(admin, number)
    number = int(number)
    if number not in held or held[number].status not in WAITING:
        return NOT_FOUND
    held[number] = held[number]._replace(status=status)
    return Redirect(f"/orders/{number}")


@members_only
def ship(admin, request, number):
    return turn(admin, number, "shipped")


@managers_only
def cancel(admin, request, number):
    return turn(admin, number, "cancelled")


# ---- reports
def figures(admin, report: str, month: str) -> Counter:
    """Units by product, or dollars by customer or department; cancelled orders do not count."""
    sums = Counter()
    for o in admin.sales.values():
        _, sold_in, _ = o.date.split()
        if o.status == "cancelled" or month not in (ALL, sold_in):
            continue
        line = o.lines[0]  # a sale has no other
        p = admin.products[line.slug]
        counted = {
            "bestsellers": (p.name, line.quantity),
            "customers": (o.user, o.total),
            "departments": (p.category, o.total),
        }
        name, amount = counted[report]
        sums[name] += amount
    return sums


@members_only
def reports(admin, request):
    report = request.query.get("report", "bestsellers")
    month = request.query.get("month", ALL)
    months = (ALL, *MONTHS)
    body = "<h1>reports</h1>"
    choices = form(
        select("report", REPORTS, report),
        select("month", months, month),
        submit="show report",
        method="get",
    )
    if report not in REPORTS or month not in months:
        problem = error("choose a report and a month")
        return Page("reports", body + problem + choices)
    body += choices
    if not request.query:
        return Page("reports", body)

    sums = figures(admin, report, month)
    unit = "" if report == "bestsellers" else "$"
    rows = [(name, f"{unit}{amount}") for name, amount in sums.most_common()]
    body += f"<h2>{report} in {month}</h2>"
    body += table(REPORTS[report], rows)
    body += fact("sum", f"{unit}{sums.total()}")
    return Page("reports", body)


# ---- staff
@members_only
def staff(admin, request):
    rows = []
    for a in admin.accounts.values():
        name = link(a.user, f"/admin/staff/{a.user}")
        rows.append((name, a.role))
    body = "<h1>staff</h1>"
    body += table(("person", "role"), rows)
    return Page("staff", body)


@members_only
def person(admin, request, user, problem=""):
    if user not in admin.accounts:
        return NOT_FOUND
    role = admin.accounts[user].role
    body = f"<h1>{user}</h1>{error(problem)}"
    body += fact("has the role", role)
    body += form(select("role", ROLES, role), submit="save")
    return Page(user, body)


@managers_only
def set_role(admin, request, user):
    role = request.form.get("role")
    if user == request.user:
        return person(admin, request, user, "you cannot change your own role")
    if user not in admin.accounts or role not in ROLES:
        return person(admin, request, user, "choose a role")
    old = admin.accounts[user]
    admin.accounts[user] = old._replace(role=role)
    return Redirect("/staff")


ROUTES = LOGIN_ROUTES + [
    ("GET", "", home),
    ("GET", "/search", search),
    ("GET", "/products", products),
    ("GET", "/products/([a-z-]+)", product),
    ("GET", "/products/([a-z-]+)/edit", product_form),
    ("POST", "/products/([a-z-]+)/edit", edit_product),
    ("GET", "/new", new_form),
    ("POST", "/new", new_product),
    ("GET", "/new/price", price_form),
    ("POST", "/new/price", set_price),
    ("GET", "/new/review", review),
    ("POST", "/new/review", publish),
    ("GET", "/orders", orders),
    ("GET", "/orders/([0-9]{1,6})", order),
    ("POST", "/orders/([0-9]{1,6})/ship", ship),
    ("POST", "/orders/([0-9]{1,6})/cancel", cancel),
    ("GET", "/reports", reports),
    ("GET", "/staff", staff),
    ("GET", "/staff/([a-z]+)", person),
    ("POST", "/staff/([a-z]+)", set_role),
]

"""The shop's administration: sales reports, orders, stock, new products, staff. It works on the shop's own products."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple

from .page import (LOGIN_ROUTES, NOT_FOUND, Page, Redirect, error, fact, field, form, items, link, members_only,
                   navigation, paginate, press, refused, search_box, select, table, whole_number)
from .shop import SHIPPING, SIZES, STATUSES, Line, Order, Product, slug_of
from .words import CATEGORIES, MONTHS, password

ROOT = "/admin"
ROLES = ("clerk", "manager")  # what a clerk may not do says so
REPORTS = {"bestsellers": ("product", "sold"), "customers": ("customer", "spent"),
           "departments": ("department", "revenue")}
ALL, ANY = "all of 2023", "any"
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
    roles = ["clerk" if rng.random() < 0.15 else "manager", "manager", "clerk", "clerk", rng.choice(ROLES)]
    accounts = {user: Account(user, password(rng), role) for user, role in zip(people, roles)}
    sales = {}
    for month in MONTHS:
        # Products and quantities of a month all differ, so that no two products share a place in its ranking.
        days, slugs = sorted(rng.sample(range(1, 29), 8)), rng.sample(sorted(shop.products), 8)
        for day, slug, quantity in zip(days, slugs, rng.sample(range(1, 13), 8)):
            number, shipping = 100 + len(sales), rng.choice(list(SHIPPING))
            line = Line(slug, rng.choice(SIZES), quantity)
            sales[number] = Order(number, rng.choice(people), f"{day} {month} 2023", rng.choice(STATUSES), shipping,
                                  (line,), shop.products[slug].price * quantity + SHIPPING[shipping])
    return Admin(accounts, shop.products, shop.orders, sales, {})


def nav(user: str | None) -> str:
    links = [("home", ROOT), ("orders", "/admin/orders"), ("products", "/admin/products"),
             ("reports", "/admin/reports"), ("staff", "/admin/staff"), ("new product", "/admin/new")]
    return navigation(ROOT, user, links) + (search_box(ROOT) if user else "")


def managers_only(handler):
    @wraps(handler)
    @members_only
    def guarded(admin, request, *groups):
        if admin.accounts[request.user].role != "manager":
            return refused("only a manager can do this and you are a clerk")
        return handler(admin, request, *groups)
    return guarded


@members_only
def home(admin, request):
    waiting = sum(order.status in ("pending", "paid") for order in every_order(admin))
    scarce = sorted(admin.products.values(), key=lambda p: (p.stock, p.name))[:5]
    return Page("shop admin", f'<h1>shop admin</h1><p>{request.user} is {admin.accounts[request.user].role}</p>'
                + fact("orders to ship", waiting) + fact("products", len(admin.products))
                + "<h2>low stock</h2>" + product_table(scarce))


# ---- products
def product_table(products) -> str:
    return table(("product", "department", "price", "stock"), [
        (link(p.name, f"/admin/products/{p.slug}"), p.category, f"${p.price}", p.stock) for p in products])


SORTS = {"name": lambda p: p.name, "cheapest": lambda p: (p.price, p.name), "lowest stock": lambda p: (p.stock, p.name)}


@members_only
def products(admin, request):
    department, order = request.query.get("department", ANY), request.query.get("sort", "name")
    found = [p for p in admin.products.values() if department in (ANY, p.category)]
    shown, links = paginate(sorted(found, key=SORTS.get(order, SORTS["name"])), request, PER_PAGE, "/admin/products")
    choices = form(select("department", (ANY, *CATEGORIES), department), select("sort", SORTS, order),
                   submit="filter", method="get")
    return Page("products", f"<h1>products</h1>{choices}<p>{len(found)} found</p>{product_table(shown)}{links}")


@members_only
def search(admin, request):
    """Products by their words, orders by their number or customer."""
    wanted = request.query.get("q", "").lower().split()
    goods = [p for p in admin.products.values() if wanted and set(wanted) <= set(p.name.split())]
    orders = [o for o in every_order(admin) if wanted and set(wanted) <= {str(o.number), o.user}]
    return Page("search", f"<h1>search</h1><h2>products</h2>{product_table(goods[:PER_PAGE])}"
                          f"<h2>orders</h2>{order_table(orders[:PER_PAGE])}")


@members_only
def product(admin, request, slug):
    p = admin.products.get(slug)
    if p is None:
        return NOT_FOUND
    return Page(p.name, f"<h1>{p.name}</h1>" + fact("department", p.category) + fact("price", f"${p.price}")
                + fact("stock", p.stock) + f'<p>{link("edit product", f"/admin/products/{slug}/edit")}</p>')


def amounts(request) -> tuple[int, int, str]:
    """(price, stock, what is wrong with them)."""
    price, stock = (whole_number(request.form.get(name, "")) for name in ("price", "stock"))
    if price is None or not 0 < price < 1000:
        return 0, 0, "price must be a whole number between 1 and 999"
    return price, stock, "" if stock is not None else "stock must be a whole number"


@managers_only
def product_form(admin, request, slug, problem=""):
    p = admin.products.get(slug)
    if p is None:
        return NOT_FOUND
    shown = {"price": p.price, "stock": p.stock} | request.form
    return Page("edit product", f"<h1>edit product</h1><p>{p.name}</p>{error(problem)}"
                + form(field("price", shown["price"]), field("stock", shown["stock"]), submit="save"))


@managers_only
def edit_product(admin, request, slug):
    price, stock, problem = amounts(request)
    if problem or slug not in admin.products:
        return product_form(admin, request, slug, problem)
    admin.products[slug] = admin.products[slug]._replace(price=price, stock=stock)
    return Redirect(f"/products/{slug}")


# ---- a new product, over three pages
@managers_only
def new_form(admin, request, problem=""):
    name, department = request.form.get("name", ""), request.form.get("department", "")
    return Page("new product", f"<h1>new product</h1><p>step 1 of 3</p>{error(problem)}"
                + form(field("name", name), select("department", ("choose", *CATEGORIES), department),
                       submit="continue"))


@managers_only
def new_product(admin, request):
    name, department = request.form.get("name", "").strip(), request.form.get("department", "")
    problem = "choose a department" if department not in CATEGORIES else ""
    if not re.fullmatch("[a-z]{1,20}( [a-z]{1,20}){0,3}", name):
        problem = "name must be one to four words in small letters"
    elif slug_of(name) in admin.products:
        problem = "there is a product of this name"
    if problem:
        return new_form(admin, request, problem)
    admin.drafts[request.user] = Product(slug_of(name), name, department, 0, 0, 0)
    return Redirect("/new/price")


@managers_only
def price_form(admin, request, problem=""):
    if request.user not in admin.drafts:
        return Redirect("/new")
    fields = (field(name, request.form.get(name, "")) for name in ("price", "stock"))
    return Page("price and stock", f"<h1>price and stock</h1><p>step 2 of 3</p>{error(problem)}"
                + form(*fields, submit="continue"))


@managers_only
def set_price(admin, request):
    price, stock, problem = amounts(request)
    if problem or request.user not in admin.drafts:
        return price_form(admin, request, problem)
    admin.drafts[request.user] = admin.drafts[request.user]._replace(price=price, stock=stock)
    return Redirect("/new/review")


@managers_only
def review(admin, request):
    p = admin.drafts.get(request.user)
    if p is None or not p.price:
        return Redirect("/new")
    return Page("review", "<h1>review</h1><p>step 3 of 3</p>" + fact("name", p.name) + fact("department", p.category)
                + fact("price", f"${p.price}") + fact("stock", p.stock) + form(submit="publish product"))


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
    return sorted(admin.orders.values(), reverse=True) + sorted(admin.sales.values(), reverse=True)


def order_table(orders) -> str:
    return table(("order", "date", "customer", "status", "total"), [
        (link(f"order {o.number}", f"/admin/orders/{o.number}"), o.date, o.user, o.status, f"${o.total}")
        for o in orders])


@members_only
def orders(admin, request):
    status, customer = request.query.get("status", ANY), request.query.get("customer", "").strip().lower()
    found = [o for o in every_order(admin) if status in (ANY, o.status) and customer in ("", o.user)]
    if request.query.get("sort") == "oldest":
        found.reverse()
    shown, links = paginate(found, request, PER_PAGE, "/admin/orders")
    choices = form(select("status", (ANY, *STATUSES, "cancelled"), status), field("customer", customer),
                   select("sort", ("newest", "oldest"), request.query.get("sort", "")), submit="filter", method="get")
    return Page("orders", f"<h1>orders</h1>{choices}<p>{len(found)} found</p>{order_table(shown)}{links}")


def held_by(admin, number: str) -> dict[int, Order]:
    """The table that holds this order; empty if none does."""
    return next((orders for orders in (admin.sales, admin.orders) if int(number) in orders), {})


@members_only
def order(admin, request, number):
    o = held_by(admin, number).get(int(number))
    if o is None:
        return NOT_FOUND
    here, buttons = f"/admin/orders/{o.number}", ""
    if o.status in ("pending", "paid"):
        buttons = press("ship order", f"{here}/ship") + press("cancel order", f"{here}/cancel", "cancel this order?")
    bought = items(f"{line.quantity} {line.size} {admin.products[line.slug].name}" for line in o.lines)
    return Page("order", f"<h1>order {o.number}</h1>" + fact("customer", o.user) + fact("date", o.date)
                + fact("status", o.status) + bought + fact("shipping", o.shipping) + fact("total", f"${o.total}")
                + buttons)


def turn(admin, number, status):
    """Moves an order that waits to be sent on to `status`."""
    table, number = held_by(admin, number), int(number)
    if number not in table or table[number].status not in ("pending", "paid"):
        return NOT_FOUND
    table[number] = table[number]._replace(status=status)
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
        if o.status != "cancelled" and month in (ALL, o.date.split()[1]):
            p = admin.products[o.lines[0].slug]
            name, amount = {"bestsellers": (p.name, o.lines[0].quantity), "customers": (o.user, o.total),
                            "departments": (p.category, o.total)}[report]
            sums[name] += amount
    return sums


@members_only
def reports(admin, request):
    report, month = request.query.get("report", "bestsellers"), request.query.get("month", ALL)
    choices = form(select("report", REPORTS, report), select("month", (ALL, *MONTHS), month),
                   submit="show report", method="get")
    if report not in REPORTS or month not in (ALL, *MONTHS):
        return Page("reports", f'<h1>reports</h1>{error("choose a report and a month")}{choices}')
    if not request.query:
        return Page("reports", f"<h1>reports</h1>{choices}")
    sums, unit = figures(admin, report, month), "" if report == "bestsellers" else "$"
    ranking = table(REPORTS[report], [(name, f"{unit}{amount}") for name, amount in sums.most_common()])
    return Page("reports", f"<h1>reports</h1>{choices}<h2>{report} in {month}</h2>{ranking}"
                + fact("sum", f"{unit}{sums.total()}"))


# ---- staff
@members_only
def staff(admin, request):
    return Page("staff", "<h1>staff</h1>" + table(("person", "role"), [
        (link(a.user, f"/admin/staff/{a.user}"), a.role) for a in admin.accounts.values()]))


@members_only
def person(admin, request, user, problem=""):
    if user not in admin.accounts:
        return NOT_FOUND
    return Page(user, f"<h1>{user}</h1>{error(problem)}" + fact("has the role", admin.accounts[user].role)
                + form(select("role", ROLES, admin.accounts[user].role), submit="save"))


@managers_only
def set_role(admin, request, user):
    role = request.form.get("role")
    if user not in admin.accounts or role not in ROLES or user == request.user:
        problem = "you cannot change your own role" if user == request.user else "choose a role"
        return person(admin, request, user, problem)
    admin.accounts[user] = admin.accounts[user]._replace(role=role)
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

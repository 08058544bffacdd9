"""The shop: departments, products with options, search, a cart, a checkout over several pages, orders, an account."""

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .page import (LOGIN_ROUTES, NOT_FOUND, Page, Redirect, error, field, form, items, link, members_only, navigation,
                   paginate, search_box, select, unfit, whole_number)
from .words import ADJECTIVES, CATEGORIES, CITIES, MONTHS, names, password

ROOT = "/shop"
SIZES = ("small", "medium", "large")
SHIPPING = {"standard": 2, "express": 6, "pickup": 0}  # option: dollars
STATUSES = ("pending", "paid", "shipped", "delivered", "returned")
CHOOSE = "choose"  # what a select shows before anything is chosen
PER_PAGE = 6


class Product(NamedTuple):
    slug: str
    name: str
    category: str
    price: int
    stock: int
    rating: int


class Line(NamedTuple):
    slug: str
    size: str
    quantity: int


class Order(NamedTuple):
    number: int
    user: str
    date: str
    status: str
    shipping: str
    lines: tuple[Line, ...]
    total: int


class Account(NamedTuple):
    user: str
    password: str
    name: str
    city: str


@dataclass
class Shop:
    products: dict[str, Product]
    accounts: dict[str, Account]
    carts: dict[str, tuple[Line, ...]]
    shipping: dict[str, str]  # chosen in a checkout that is under way
    orders: dict[int, Order]


def slug_of(name: str) -> str:
    """The name in addresses and element ids."""
    return name.replace(" ", "-")


def seed(rng, people: list[str], sites: dict) -> Shop:
    adjectives = rng.sample(ADJECTIVES, 16)  # few, so that a search for one of them finds several products
    products = {}
    for category, nouns in CATEGORIES.items():
        for name in names(rng, nouns, rng.choice((5, 6, 6, 8)), adjectives):
            slug, price, stock = slug_of(name), rng.randint(3, 79), rng.randint(6, 60)
            products[slug] = Product(slug, name, category, price, stock, rng.randint(1, 5))
    accounts = {user: Account(user, password(rng), user, rng.choice(CITIES)) for user in people}
    lines = [Line(slug, rng.choice(SIZES), 1) for slug in rng.sample(sorted(products), 8)]
    carts = {user: () for user in people} | {people[0]: tuple(lines[:3])}
    orders = {}
    for number, line in zip(sorted(rng.sample(range(10, 90), 5)), lines[3:]):
        shipping = rng.choice(list(SHIPPING))
        date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
        orders[number] = Order(number, people[0], date, rng.choice(STATUSES), shipping, (line,),
                               products[line.slug].price + SHIPPING[shipping])
    return Shop(products, accounts, carts, {}, orders)


def nav(user: str | None) -> str:
    links = [("home", ROOT), ("cart", "/shop/cart"), ("orders", "/shop/orders"), ("account", "/shop/account")]
    return navigation(ROOT, user, links) + search_box(ROOT)


# ---- the catalogue
def product_list(products) -> str:
    return items(f'{link(p.name, f"/shop/product/{p.slug}")} ${p.price}' for p in products)


def home(shop, request):
    departments = items(link(name, f"/shop/category/{name}") for name in CATEGORIES)
    return Page("shop", "<h1>shop</h1><h2>departments</h2>" + departments)


def category(shop, request, name):
    if name not in CATEGORIES:
        return NOT_FOUND
    products = [p for p in shop.products.values() if p.category == name]
    shown, links = paginate(products, request, PER_PAGE, f"/shop/category/{name}")
    return Page(name, f"<h1>{name}</h1>" + product_list(shown) + links)


def search(shop, request):
    wanted = request.query.get("q", "").lower().split()
    found = [p for p in shop.products.values() if wanted and set(wanted) <= set(p.name.split())]
    head = f"<h1>search</h1><p>{len(found)} found for {escape(' '.join(wanted))}</p>" if wanted else "<h1>search</h1>"
    return Page("search", head + product_list(found[:12]))


def product(shop, request, slug, problem=""):
    p = shop.products.get(slug)
    if p is None:
        return NOT_FOUND
    buy = form(select("size", SIZES), submit="add to cart") if request.user else "<p>log in to buy</p>"
    return Page(p.name, f"<h1>{p.name}</h1>{error(problem)}<p>price ${p.price}</p><p>stock {p.stock}</p>"
                        f"<p>rating {p.rating} of 5</p>" + buy)


@members_only
def add_to_cart(shop, request, slug):
    if slug not in shop.products:
        return NOT_FOUND
    size, lines = request.form.get("size"), list(shop.carts[request.user])
    if size not in SIZES:
        return product(shop, request, slug, "choose a size")
    if sum(line.quantity for line in lines if line.slug == slug) >= shop.products[slug].stock:
        return product(shop, request, slug, "the cart holds all that is in stock")
    for i, line in enumerate(lines):
        if (line.slug, line.size) == (slug, size):
            lines[i] = line._replace(quantity=line.quantity + 1)
            break
    else:
        lines.append(Line(slug, size, 1))
    shop.carts[request.user] = tuple(lines)
    return Redirect("/cart")


# ---- the cart and the checkout
def value_of(shop, lines) -> int:
    return sum(shop.products[line.slug].price * line.quantity for line in lines)


@members_only
def cart(shop, request, problem=""):
    lines = shop.carts[request.user]
    if not lines:
        return Page("cart", f"<h1>cart</h1>{error(problem)}<p>the cart is empty</p>")
    rows = ""
    for i, line in enumerate(lines):
        p = shop.products[line.slug]
        # Two forms, tied by their ids: inside one, Enter in a quantity field would press the first "remove" button.
        rows += (f'<tr id="{p.slug}"><td><label class="name" for="q{i}">{p.name}</label> '
                 f'<input form="update" id="q{i}" name="q{i}" type="number" value="{line.quantity}"></td>'
                 f'<td class="size">{line.size}</td><td>${p.price}</td>'
                 f'<td><button form="remove" name="line" value="{i}">remove {p.name}</button></td></tr>')
    return Page("cart", f'<h1>cart</h1>{error(problem)}<table id="cart">{rows}</table>'
                        f"<p>total ${value_of(shop, lines)}</p>"
                        '<form id="remove" method="post" action="/shop/cart/remove"></form>'
                        '<form id="update" method="post" action="/shop/cart"><p><button>update cart</button></p></form>'
                        f'<p>{link("checkout", "/shop/checkout")}</p>')


@members_only
def update_cart(shop, request):
    lines = []
    for i, line in enumerate(shop.carts[request.user]):
        p, wanted = shop.products[line.slug], whole_number(request.form.get(f"q{i}", str(line.quantity)))
        if wanted is None or not 0 < wanted <= p.stock:
            return cart(shop, request, f"the quantity of {p.name} must be between 1 and {p.stock}")
        lines.append(line._replace(quantity=wanted))
    shop.carts[request.user] = tuple(lines)
    return Redirect("/cart")


@members_only
def remove_from_cart(shop, request):
    gone = request.form.get("line")
    shop.carts[request.user] = tuple(line for i, line in enumerate(shop.carts[request.user]) if str(i) != gone)
    return Redirect("/cart")


@members_only
def checkout(shop, request, problem=""):
    if not shop.carts[request.user]:
        return Redirect("/cart")
    shipping = select("shipping", (CHOOSE, *SHIPPING))
    return Page("checkout", f"<h1>checkout</h1>{error(problem)}" + form(shipping, submit="continue"))


@members_only
def choose_shipping(shop, request):
    if request.form.get("shipping") not in SHIPPING:
        return checkout(shop, request, "choose a shipping option")
    shop.shipping[request.user] = request.form["shipping"]
    return Redirect("/checkout/review")


def describe(shop, lines, shipping, total) -> str:
    bought = items(f"{line.quantity} {line.size} {shop.products[line.slug].name}" for line in lines)
    return f'<div id="order">{bought}<p>shipping {shipping}</p><p>total ${total}</p></div>'


@members_only
def review(shop, request):
    lines, shipping = shop.carts[request.user], shop.shipping.get(request.user)
    if not lines or shipping is None:
        return Redirect("/checkout")
    body = describe(shop, lines, shipping, value_of(shop, lines) + SHIPPING[shipping])
    return Page("review", f"<h1>review</h1>{body}" + form(submit="place order"))


@members_only
def place_order(shop, request):
    lines, shipping = shop.carts[request.user], shop.shipping.get(request.user)
    if not lines or shipping is None:
        return Redirect("/checkout")
    if any(line.quantity > shop.products[line.slug].stock for line in lines):  # the administration may have changed it
        return cart(shop, request, "the cart holds more than is in stock")
    number = max(shop.orders, default=9) + 1
    total = value_of(shop, lines) + SHIPPING[shipping]
    shop.orders[number] = Order(number, request.user, "today", "pending", shipping, lines, total)
    shop.carts[request.user] = ()
    del shop.shipping[request.user]
    return Redirect(f"/orders/{number}")


# ---- orders and the account
@members_only
def orders(shop, request):
    mine = [o for o in shop.orders.values() if o.user == request.user]
    rows = items(link(f"order {o.number}", f"/shop/orders/{o.number}") + " " + o.date for o in mine)
    return Page("orders", "<h1>orders</h1>" + rows)


@members_only
def order(shop, request, number):
    o = shop.orders.get(int(number))
    if o is None or o.user != request.user:
        return NOT_FOUND
    return Page("order", f"<h1>order {o.number}</h1><p>date {o.date}</p><p>status {o.status}</p>"
                + describe(shop, o.lines, o.shipping, o.total))


@members_only
def account(shop, request):
    a = shop.accounts[request.user]
    return Page("account", f'<h1>account</h1><p>name <span id="name">{escape(a.name)}</span></p>'
                           f'<p>city <span id="city">{escape(a.city)}</span></p>'
                           f'<p>{link("edit account", "/shop/account/edit")}</p>')


@members_only
def account_form(shop, request, problem=""):
    a = shop.accounts[request.user]
    shown = {"name": a.name, "city": a.city} | request.form
    return Page("edit account", f"<h1>edit account</h1>{error(problem)}"
                + form(field("name", shown["name"]), field("city", shown["city"]), submit="save"))


@members_only
def edit_account(shop, request):
    name, city = request.form.get("name", ""), request.form.get("city", "")
    problem = unfit("name", name) or unfit("city", city)
    if problem:
        return account_form(shop, request, problem)
    shop.accounts[request.user] = shop.accounts[request.user]._replace(name=name.strip(), city=city.strip())
    return Redirect("/account")


ROUTES = LOGIN_ROUTES + [
    ("GET", "", home),
    ("GET", "/category/([a-z]+)", category),
    ("GET", "/search", search),
    ("GET", "/product/([a-z-]+)", product),
    ("POST", "/product/([a-z-]+)", add_to_cart),
    ("GET", "/cart", cart),
    ("POST", "/cart", update_cart),
    ("POST", "/cart/remove", remove_from_cart),
    ("GET", "/checkout", checkout),
    ("POST", "/checkout", choose_shipping),
    ("GET", "/checkout/review", review),
    ("POST", "/checkout/review", place_order),
    ("GET", "/orders", orders),
    ("GET", "/orders/([0-9]{1,6})", order),
    ("GET", "/account", account),
    ("GET", "/account/edit", account_form),
    ("POST", "/account/edit", edit_account),
]

"""The shop: departments, products with options, search, a cart, a checkout over several pages, orders, an account."""

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .page import (
    LOGIN_ROUTES, NOT_FOUND, Page, Redirect,
    error, items, link,
    field, form, search_box, select,
    members_only, navigation, paginate, unfit, whole_number,
)
from .words import ADJECTIVES, CATEGORIES, CITIES, MONTHS
from .words import names, password

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
    main_user = people[0]

    adjectives = rng.sample(ADJECTIVES, 16)  # few, so that a search for one of them finds several products
    products = {}
    for category, nouns in CATEGORIES.items():
        count = rng.choice((5, 6, 6, 8))
        for name in names(rng, nouns, count, adjectives):
            slug = slug_of(name)
            products[slug] = Product(
                slug,
                name,
                category,
                price=rng.randint(3, 79),
                stock=rng.randint(6, 60),
                rating=rng.randint(1, 5),
            )

    accounts = {}
    for user in people:
        secret = password(rng)
        city = rng.choice(CITIES)
        accounts[user] = Account(user, secret, name=user, city=city)

    # The main user's cart has three lines, and each of their five orders has one.
    slugs = rng.sample(sorted(products), 8)
    lines = [Line(slug, rng.choice(SIZES), quantity=1) for slug in slugs]
    in_cart, ordered = lines[:3], lines[3:]
    carts = {user: () for user in people}
    carts[main_user] = tuple(in_cart)

    orders = {}
    numbers = sorted(rng.sample(range(10, 90), 5))
    for number, line in zip(numbers, ordered):
        shipping = rng.choice(list(SHIPPING))
        day = rng.randint(1, 28)
        month = rng.choice(MONTHS)
        price = products[line.slug].price
        orders[number] = Order(
            number,
            main_user,
            date=f"{day} {month}",
            status=rng.choice(STATUSES),
            shipping=shipping,
            lines=(line,),
            total=price + SHIPPING[shipping],
        )
    return Shop(products, accounts, carts, {}, orders)


def nav(user: str | None) -> str:
    links = [
        ("home", ROOT),
        ("cart", "/shop/cart"),
        ("orders", "/shop/orders"),
        ("account", "/shop/account"),
    ]
    return navigation(ROOT, user, links) + search_box(ROOT)


# ---- the catalogue
def product_list(products) -> str:
    rows = []
    for p in products:
        name = link(p.name, f"/shop/product/{p.slug}")
        rows.append(f"{name} ${p.price}")
    return items(rows)


def home(shop, request):
    departments = items(link(name, f"/shop/category/{name}") for name in CATEGORIES)
    return Page("shop", f"<h1>shop</h1><h2>departments</h2>{departments}")


def category(shop, request, name):
    if name not in CATEGORIES:
        return NOT_FOUND
    products = [p for p in shop.products.values() if p.category == name]
    shown, links = paginate(products, request, PER_PAGE, f"/shop/category/{name}")
    body = f"<h1>{name}</h1>"
    body += product_list(shown)
    return Page(name, body + links)


def search(shop, request):
    """Products by the words of their names."""
    wanted = request.query.get("q", "").lower().split()
    body = "<h1>search</h1>"
    found = []
    if wanted:
        for p in shop.products.values():
            if set(wanted) <= set(p.name.split()):
                found.append(p)
        text = escape(" ".join(wanted))
        body += f"<p>{len(found)} found for {text}</p>"
    body += product_list(found[:12])
    return Page("search", body)


def product(shop, request, slug, problem=""):
    p = shop.products.get(slug)
    if p is None:
        return NOT_FOUND
    body = f"<h1>{p.name}</h1>{error(problem)}"
    body += f"<p>price ${p.price}</p>"
    body += f"<p>stock {p.stock}</p>"
    body += f"<p>rating {p.rating} of 5</p>"
    if request.user:
        body += form(select("size", SIZES), submit="add to cart")
    else:
        body += "<p>log in to buy</p>"
    return Page(p.name, body)


@members_only
def add_to_cart(shop, request, slug):
    if slug not in shop.products:
        return NOT_FOUND
    size = request.form.get("size")
    if size not in SIZES:
        return product(shop, request, slug, "choose a size")

    lines = list(shop.carts[request.user])
    held = sum(line.quantity for line in lines if line.slug == slug)
    if held >= shop.products[slug].stock:
        return product(shop, request, slug, "the cart holds all that is in stock")

    for i, line in enumerate(lines):
        if (line.slug, line.size) == (slug, size):
            lines[i] = line._replace(quantity=line.quantity + 1)
            break
    else:
        lines.append(Line(slug, size, quantity=1))
    shop.carts[request.user] = tuple(lines)
    return Redirect("/cart")


# ---- the cart and the checkout
def value_of(shop, lines) -> int:
    """Dollars, without shipping."""
    return sum(shop.products[line.slug].price * line.quantity for line in lines)


@members_only
def cart(shop, request, problem=""):
    head = f"<h1>cart</h1>{error(problem)}"
    lines = shop.carts[request.user]
    if not lines:
        return Page("cart", f"{head}<p>the cart is empty</p>")

    rows = ""
    for i, line in enumerate(lines):
        p = shop.products[line.slug]
        # Two forms, tied by their ids: inside one, Enter in a quantity field would press the first "remove" button.
        rows += (
            f'<tr id="{p.slug}">'
            f'<td><label class="name" for="q{i}">{p.name}</label> '
            f'<input form="update" id="q{i}" name="q{i}" type="number" value="{line.quantity}"></td>'
            f'<td class="size">{line.size}</td>'
            f"<td>${p.price}</td>"
            f'<td><button form="remove" name="line" value="{i}">remove {p.name}</button></td>'
            "</tr>"
        )

    checkout_link = link("checkout", "/shop/checkout")
    body = f'{head}<table id="cart">{rows}</table>'
    body += f"<p>total ${value_of(shop, lines)}</p>"
    body += '<form id="remove" method="post" action="/shop/cart/remove"></form>'
    body += '<form id="update" method="post" action="/shop/cart"><p><button>update cart</button></p></form>'
    body += f"<p>{checkout_link}</p>"
    return Page("cart", body)


@members_only
def update_cart(shop, request):
    lines = []
    for i, line in enumerate(shop.carts[request.user]):
        p = shop.products[line.slug]
        typed = request.form.get(f"q{i}", str(line.quantity))
        wanted = whole_number(typed)
        if wanted is None or not 0 < wanted <= p.stock:
            return cart(shop, request, f"the quantity of {p.name} must be between 1 and {p.stock}")
        lines.append(line._replace(quantity=wanted))
    shop.carts[request.user] = tuple(lines)
    return Redirect("/cart")


@members_only
def remove_from_cart(shop, request):
    gone = request.form.get("line")
    kept = []
    for i, line in enumerate(shop.carts[request.user]):
        if str(i) != gone:
            kept.append(line)
    shop.carts[request.user] = tuple(kept)
    return Redirect("/cart")


@members_only
def checkout(shop, request, problem=""):
    if not shop.carts[request.user]:
        return Redirect("/cart")
    shipping = select("shipping", (CHOOSE, *SHIPPING))
    body = f"<h1>checkout</h1>{error(problem)}"
    body += form(shipping, submit="continue")
    return Page("checkout", body)


@members_only
def choose_shipping(shop, request):
    shipping = request.form.get("shipping")
    if shipping not in SHIPPING:
        return checkout(shop, request, "choose a shipping option")
    shop.shipping[request.user] = shipping
    return Redirect("/checkout/review")


def describe(shop, lines, shipping, total) -> str:
    """What an order says of its lines and its price."""
    rows = []
    for line in lines:
        name = shop.products[line.slug].name
        rows.append(f"{line.quantity} {line.size} {name}")
    bought = items(rows)
    return f'<div id="order">{bought}<p>shipping {shipping}</p><p>total ${total}</p></div>'


@members_only
def review(shop, request):
    lines = shop.carts[request.user]
    shipping = shop.shipping.get(request.user)
    if not lines or shipping is None:
        return Redirect("/checkout")
    total = value_of(shop, lines) + SHIPPING[shipping]
    body = "<h1>review</h1>"
    body += describe(shop, lines, shipping, total)
    body += form(submit="place order")
    return Page("review", body)


@members_only
def place_order(shop, request):
    lines = shop.carts[request.user]
    shipping = shop.shipping.get(request.user)
    if not lines or shipping is None:
        return Redirect("/checkout")
    for line in lines:
        if line.quantity > shop.products[line.slug].stock:  # the administration may have changed it
            return cart(shop, request, "the cart holds more than is in stock")

    number = max(shop.orders, default=9) + 1
    shop.orders[number] = Order(
        number,
        request.user,
        date="today",
        status="pending",
        shipping=shipping,
        lines=lines,
        total=value_of(shop, lines) + SHIPPING[shipping],
    )
    shop.carts[request.user] = ()
    del shop.shipping[request.user]
    return Redirect(f"/orders/{number}")


# ---- orders and the account
@members_only
def orders(shop, request):
    rows = []
    for o in shop.orders.values():
        if o.user == request.user:
            name = link(f"order {o.number}", f"/shop/orders/{o.number}")
            rows.append(f"{name} {o.date}")
    body = "<h1>orders</h1>"
    body += items(rows)
    return Page("orders", body)


@members_only
def order(shop, request, number):
    o = shop.orders.get(int(number))
    if o is None or o.user != request.user:
        return NOT_FOUND
    body = f"<h1>order {o.number}</h1>"
    body += f"<p>date {o.date}</p>"
    body += f"<p>status {o.status}</p>"
    body += describe(shop, o.lines, o.shipping, o.total)
    return Page("order", body)


@members_only
def account(shop, request):
    a = shop.accounts[request.user]
    edit = link("edit account", "/shop/account/edit")
    body = "<h1>account</h1>"
    body += f'<p>name <span id="name">{escape(a.name)}</span></p>'
    body += f'<p>city <span id="city">{escape(a.city)}</span></p>'
    body += f"<p>{edit}</p>"
    return Page("account", body)


@members_only
def account_form(shop, request, problem=""):
    a = shop.accounts[request.user]
    name = request.form.get("name", a.name)
    city = request.form.get("city", a.city)
    body = f"<h1>edit account</h1>{error(problem)}"
    body += form(field("name", name), field("city", city), submit="save")
    return Page("edit account", body)


@members_only
def edit_account(shop, request):
    name = request.form.get("name", "")
    city = request.form.get("city", "")
    problem = unfit("name", name) or unfit("city", city)
    if problem:
        return account_form(shop, request, problem)
    old = shop.accounts[request.user]
    new = old._replace(name=name.strip(), city=city.strip())
    shop.accounts[request.user] = new
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

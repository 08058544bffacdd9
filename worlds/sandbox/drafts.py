"""What the tables of templates are written with: a draft of a task, its checks, slots of the shop and the forum."""

from typing import NamedTuple

from . import forum, shop
from .words import CITIES, NAMES, phrase

# What stands for a site's address in a task.
SHOP = "__SHOPPING__"
FORUM = "__REDDIT__"
ADMIN = "__SHOPPING_ADMIN__"
CODE = "__GITLAB__"
MAP = "__MAP__"

# Pages of the shop that many templates name.
CART = f"{SHOP}/cart"
ORDERS = f"{SHOP}/orders"
ACCOUNT = f"{SHOP}/account"


class Draft(NamedTuple):
    """What a template says about a task."""

    intent: str  # with {{slots}}, which are also all that the expert is told
    slots: dict[str, object]
    starts: list[str]  # one of them is drawn: the deeper it lies, the shorter the way; " |AND| " opens several tabs
    check: dict  # what this template sets of WebArena's "eval"


# ---- checks
def answer(**reference) -> dict:
    """The agent's answer fits the reference, such as exact_match="$5"."""
    return {
        "eval_types": ["string_match"],
        "reference_answers": reference,
    }


def at(url: str, note: str = "EXACT") -> dict:
    """The episode ends on this page."""
    return {
        "eval_types": ["url_match"],
        "reference_url": url,
        "url_note": note,
    }


def below(url: str) -> dict:
    """The episode ends on a page whose address contains this one, such as that of any order."""
    return at(url, note="GOLD in PRED")


def shows(*targets) -> dict:
    """Every target is (url or "last", locator or "" for the whole page, required_contents)."""
    html = []
    for url, locator, contents in targets:
        target = {
            "url": url,
            "locator": locator,
            "required_contents": contents,
        }
        html.append(target)

    return {
        "eval_types": ["program_html"],
        "program_html": html,
    }


def text_of(css: str) -> str:
    """A locator: the text of the first element."""
    return f"document.querySelector('{css}').innerText"


def texts_of(css: str) -> str:
    """A locator: the texts of all such elements, with commas between them."""
    return f"[...document.querySelectorAll('{css}')].map(e => e.innerText).join(', ')"


def text_is(url: str, css: str, text: str) -> tuple:
    """A target of `shows`: the element has this text and no other."""
    return url, text_of(css), {"exact_match": text}


def text_has(url: str, css: str, *parts: str) -> tuple:
    """A target of `shows`: the element's text includes these parts."""
    return url, text_of(css), {"must_include": list(parts)}


def page_has(url: str, *parts: str) -> tuple:
    """A target of `shows`: the text of the whole page includes these parts."""
    return url, "", {"must_include": list(parts)}


def both(first: dict, second: dict) -> dict:
    """Both checks in one."""
    types = first["eval_types"] + second["eval_types"]
    return first | second | {"eval_types": types}


def either(possible: bool, check: dict) -> dict:
    """The check of what can be done; otherwise the agent must find out that it cannot, and say so."""
    if possible:
        return check
    return answer(exact_match="N/A")


# ---- the shop
def fresh_products(world) -> list:
    """Those that the cart does not hold yet."""
    tables = world.sites["shop"]
    held = {line.slug for line in tables.carts[world.user]}
    return [product for product in tables.products.values() if product.slug not in held]


class ProductSlots:
    """A product that the cart does not hold yet, and what templates say about it."""

    def __init__(self, world, rng):
        self.fresh = fresh_products(world)
        self.row = rng.choice(self.fresh)
        self.slots = {
            "section": self.row.category,
            "name": self.row.name,
        }
        self.url = f"{SHOP}/product/{self.row.slug}"
        self.listing = f"{SHOP}/category/{self.row.category}"
        self.starts = [SHOP, self.listing]


def unused_shipping(world, rng, slug):
    """A way of shipping in which no order holds the product yet: opening an old order must not pass for buying."""
    drawn = rng.choice(list(shop.SHIPPING))

    used = set()
    for order in world.sites["shop"].orders.values():
        slugs = [line.slug for line in order.lines]
        if slug in slugs:
            used.add(order.shipping)

    if drawn not in used:
        return drawn
    return next(way for way in shop.SHIPPING if way not in used)


def cart_names(world) -> list[str]:
    """The names of the products that the cart holds."""
    tables = world.sites["shop"]
    lines = tables.carts[world.user]
    return [tables.products[line.slug].name for line in lines]


def draw_order(world, rng):
    """One of the main user's orders."""
    orders = world.sites["shop"].orders
    return rng.choice(list(orders.values()))


def draw_size(rng) -> str:
    return rng.choice(shop.SIZES[1:])  # the first one is preselected


def draw_city(world, rng) -> str:
    """Another city than that of the main user's account."""
    account = world.sites["shop"].accounts[world.user]
    return rng.choice([city for city in CITIES if city != account.city])


def draw_name(world, rng) -> str:
    """Another name than that of the main user's account."""
    return rng.choice([name for name in NAMES if name != world.user])


# ---- the forum
def draw_bio(world, rng) -> str:
    """Another bio than that of the main user's account."""
    old = world.sites["forum"].accounts[world.user].bio
    bio = old
    while bio == old:
        bio = phrase(rng)
    return bio


class PostSlots:
    """A post, and what templates say about it."""

    def __init__(self, world, rng):
        posts = world.sites["forum"].posts
        self.row = rng.choice(list(posts.values()))
        self.slots = {
            "name": self.row.title,
            "section": self.row.forum,
        }
        self.url = FORUM + forum.address(self.row)
        self.starts = [FORUM, f"{FORUM}/f/{self.row.forum}"]

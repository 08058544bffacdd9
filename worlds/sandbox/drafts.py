"""What the tables of templates are written with: a draft of a task, its checks, slots of the shop and the forum."""

from typing import NamedTuple

from . import forum, shop

SHOP, FORUM, ADMIN, CODE, MAP = (f"__{name}__" for name in ("SHOPPING", "REDDIT", "SHOPPING_ADMIN", "GITLAB", "MAP"))


class Draft(NamedTuple):
    intent: str  # with {{slots}}, which are also all that the expert is told
    slots: dict[str, object]
    starts: list[str]  # one of them is drawn: the deeper it lies, the shorter the way; " |AND| " opens several tabs
    check: dict  # what this template sets of WebArena's "eval"


# ---- checks
def answer(**reference) -> dict:
    return {"eval_types": ["string_match"], "reference_answers": reference}


def at(url: str, note: str = "EXACT") -> dict:
    return {"eval_types": ["url_match"], "reference_url": url, "url_note": note}


def shows(*targets) -> dict:
    """Every target is (url or "last", locator or "" for the whole page, required_contents)."""
    html = [{"url": url, "locator": locator, "required_contents": contents} for url, locator, contents in targets]
    return {"eval_types": ["program_html"], "program_html": html}


def both(first: dict, second: dict) -> dict:
    return first | second | {"eval_types": first["eval_types"] + second["eval_types"]}


def either(possible: bool, check: dict) -> dict:
    """The check of what can be done; otherwise the agent must find out that it cannot, and say so."""
    return check if possible else answer(exact_match="N/A")


def text_of(css: str) -> str:
    return f"document.querySelector('{css}').innerText"


# ---- the shop
def fresh_products(world) -> list:
    """Those that the cart does not hold yet."""
    tables = world.sites["shop"]
    held = {line.slug for line in tables.carts[world.user]}
    return [p for p in tables.products.values() if p.slug not in held]


class ProductSlots:
    """A product that the cart does not hold yet, and what templates say about it."""

    def __init__(self, world, rng):
        self.fresh = fresh_products(world)
        self.row = rng.choice(self.fresh)
        self.slots = {"section": self.row.category, "name": self.row.name}
        self.url = f"{SHOP}/product/{self.row.slug}"
        self.listing = f"{SHOP}/category/{self.row.category}"
        self.starts = [SHOP, self.listing]


def unused_shipping(world, rng, slug):
    """A way of shipping in which no order holds the product yet: opening an old order must not pass for buying."""
    drawn = rng.choice(list(shop.SHIPPING))
    orders = world.sites["shop"].orders.values()
    used = {order.shipping for order in orders if slug in [line.slug for line in order.lines]}
    return drawn if drawn not in used else next(way for way in shop.SHIPPING if way not in used)


def cart_names(world) -> list[str]:
    return [world.sites["shop"].products[line.slug].name for line in world.sites["shop"].carts[world.user]]


# ---- the forum
class PostSlots:
    """A post, and what templates say about it."""

    def __init__(self, world, rng):
        self.row = rng.choice(list(world.sites["forum"].posts.values()))
        self.slots = {"name": self.row.title, "section": self.row.forum}
        self.url = FORUM + forum.address(self.row)
        self.starts = [FORUM, f"{FORUM}/f/{self.row.forum}"]

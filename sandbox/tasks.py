"""Seeded task templates, drawn as dicts in WebArena's JSON schema plus one key, "world": the seed of the sites' data.

A template is a function (world, rng) -> Draft that picks its slots from the data of one world. Every task has a world
of its own, so no product, post or order is known from another task, and no two splits share a world. Whatever a task
names exists once in its world, and the world as it starts never satisfies the task's check.
"""

from random import Random
from typing import NamedTuple

from . import forum, shop
from .server import World
from .words import CITIES, NAMES, phrase

SPLITS = {"train": 600, "test": 200, "test-unseen": 100}  # default sizes
SHOP, FORUM = "__SHOPPING__", "__REDDIT__"


class Draft(NamedTuple):
    intent: str  # with {{slots}}, which are also all that the expert is told
    slots: dict[str, object]
    starts: list[str]  # one of them is drawn: the deeper it lies, the shorter the way
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


def text_of(css: str) -> str:
    return f"document.querySelector('{css}').innerText"


# ---- the shop
class ProductSlots:
    """A product that the cart does not hold yet, and what templates say about it."""

    def __init__(self, world, rng):
        tables = world.sites["shop"]
        held = {line.slug for line in tables.carts[world.user]}
        self.fresh = [p for p in tables.products.values() if p.slug not in held]
        self.row = rng.choice(self.fresh)
        self.slots = {"section": self.row.category, "name": self.row.name}
        self.url = f"{SHOP}/product/{self.row.slug}"
        self.listing = f"{SHOP}/category/{self.row.category}"
        self.starts = [SHOP, self.listing]


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
    p, shipping = ProductSlots(world, rng), rng.choice(list(shop.SHIPPING))
    return Draft('buy the {{section}} item {{name}} with "{{shipping}}" shipping', p.slots | {"shipping": shipping},
                 [p.url, p.listing],
                 both(at(f"{SHOP}/orders/", "GOLD in PRED"),
                      shows(("last", text_of("#order"), {"must_include": [p.row.name, f"shipping {shipping}"]}))))


def cart_names(world) -> list[str]:
    return [world.sites["shop"].products[line.slug].name for line in world.sites["shop"].carts[world.user]]


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
class PostSlots:
    """A post, and what templates say about it."""

    def __init__(self, world, rng):
        self.row = rng.choice(list(world.sites["forum"].posts.values()))
        self.slots = {"name": self.row.title, "section": self.row.forum}
        self.url = FORUM + forum.address(self.row)
        self.starts = [FORUM, f"{FORUM}/f/{self.row.forum}"]


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
    """... and here last: the paper's trap. Who follows the order of the words is locked out of the profile form."""
    return set_bio(world, rng, 'log out of the forum and set my bio to "{{bio}}" in the forum', LOGGED_OUT)


def set_bio(world, rng, intent='set my bio to "{{bio}}" in the forum', *more):
    bio, mine = phrase(rng), f"{FORUM}/user/{world.user}"
    while bio == world.sites["forum"].accounts[world.user].bio:
        bio = phrase(rng)
    return Draft(intent, {"bio": bio}, [FORUM, mine], shows((mine, text_of("#bio"), {"exact_match": bio}), *more))


SEEN = {1: price, 2: open_product, 3: search_product, 4: count_search, 5: add_to_cart, 6: add_size, 7: remove_from_cart,
        8: set_quantity, 9: buy, 10: order_status, 11: set_city,
        21: open_post, 22: who_wrote, 23: upvote, 24: comment, 25: create_post, 26: set_bio, 27: log_out_and_open,
        28: log_out_and_set_bio}
UNSEEN = {101: stock, 102: add_two, 103: order_total, 104: set_name, 121: count_votes, 122: downvote}


def tasks(split: str, n: int | None = None) -> list[dict]:
    """The first n tasks of a split. Templates take turns, so that every prefix is balanced."""
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: the sandbox has {', '.join(SPLITS)}")
    return [task(split, i) for i in range(SPLITS[split] if n is None else n)]


def task(split: str, i: int) -> dict:
    templates = UNSEEN if split == "test-unseen" else SEEN
    number = list(templates)[i % len(templates)]
    seed = len(SPLITS) * (i + 1) + list(SPLITS).index(split)  # splits never share one, however many tasks are drawn
    rng = Random(f"{split} {i}")
    draft = templates[number](World(seed), rng)
    intent = draft.intent
    for slot, value in draft.slots.items():
        intent = intent.replace("{{" + slot + "}}", str(value))
    start = rng.choice(draft.starts)
    return {"sites": ["shopping" if start.startswith(SHOP) else "reddit"], "task_id": i, "require_login": True,
            "storage_state": None, "start_url": start, "geolocation": None, "intent_template": draft.intent,
            "instantiation_dict": draft.slots, "intent": intent, "require_reset": False,
            "eval": {"reference_answers": None, "reference_url": "", "program_html": []} | draft.check,
            "intent_template_id": number, "world": seed}

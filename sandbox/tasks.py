"""Seeded task templates, drawn as dicts in WebArena's JSON schema plus one key, "world": the seed of the sites' data.

A template is a function (world, rng) -> Draft that picks its slots from the data of one world. Each task has a world of its own,
so no product, post or order is known from another task, and the three splits never share a world. The initial world
never satisfies a task's check, and each named thing exists once in its world.
"""

from random import Random
from typing import NamedTuple

from . import forum, shop
from .server import World
from .words import CITIES, NAMES, phrase

SPLITS = {"train": 600, "test": 200, "test-unseen": 100}  # default sizes
SHOP, FORUM = "__SHOPPING__", "__REDDIT__"


class Draft(NamedTuple):
    intent: str  # with {{slots}}
    slots: dict[str, object]
    start: str
    check: dict  # the keys of WebArena's "eval" that this template sets


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


# ---- what templates pick from
def some_product(world, rng):
    p = rng.choice(list(world.sites["shop"].products.values()))
    return p, {"category": p.category, "product": p.name}


def some_post(world, rng):
    post = rng.choice(list(world.sites["forum"].posts.values()))
    return post, {"post": post.title, "forum": post.forum}


def product_start(rng, p) -> str:
    return rng.choice([SHOP, f"{SHOP}/category/{p.category}"])


def post_start(rng, post) -> str:
    return rng.choice([FORUM, f"{FORUM}/f/{post.forum}"])


def product_url(p) -> str:
    return f"{SHOP}/product/{p.slug}"


def post_url(post) -> str:
    return FORUM + forum.address(post)


def row_of(p) -> str:
    return text_of(f"[id=\"{p.slug}\"]")


# ---- the shop
def price(world, rng):
    p, slots = some_product(world, rng)
    return Draft("what is the price of the {{category}} item {{product}} in dollars", slots, product_start(rng, p),
                 answer(exact_match=f"${p.price}"))


def stock(world, rng):
    p, slots = some_product(world, rng)
    return Draft("how many of the {{category}} item {{product}} are in stock", slots, product_start(rng, p),
                 answer(exact_match=str(p.stock)))


def open_product(world, rng):
    p, slots = some_product(world, rng)
    return Draft("open the page of the {{category}} item {{product}} in the shop", slots, product_start(rng, p), at(product_url(p)))


def search_product(world, rng):
    p, slots = some_product(world, rng)
    return Draft('search for "{{product}}" and open its page', {"product": p.name}, SHOP, at(product_url(p)))


def count_search(world, rng):
    products = world.sites["shop"].products.values()
    word = rng.choice(sorted({p.name.split()[0] for p in products}))
    found = sum(word == p.name.split()[0] for p in products)
    return Draft('how many items does a search for "{{word}}" find', {"word": word},
                 rng.choice([SHOP, f"{SHOP}/orders", f"{SHOP}/cart"]), answer(exact_match=str(found)))


def add_to_cart(world, rng):
    p, slots = fresh_product(world, rng)
    return Draft("add the {{category}} item {{product}} to the cart", slots,
                 rng.choice([product_start(rng, p), product_url(p)]), shows((f"{SHOP}/cart", text_of("#cart"), {"must_include": [p.name]})))


def add_size(world, rng):
    p, slots = fresh_product(world, rng)
    size = rng.choice(shop.SIZES[1:])  # the first one is chosen already
    return Draft('add the {{category}} item {{product}} to the cart in size "{{size}}"', slots | {"size": size},
                 rng.choice([product_start(rng, p), product_url(p)]), shows((f"{SHOP}/cart", row_of(p), {"must_include": [size]})))


def add_two(world, rng):
    p, slots = fresh_product(world, rng)
    other = rng.choice([o for o in fresh_products(world) if o.category == p.category and o != p])
    return Draft("add the {{category}} items {{product}} and {{other}} to the cart", slots | {"other": other.name},
                 f"{SHOP}/category/{p.category}",
                 shows((f"{SHOP}/cart", text_of("#cart"), {"must_include": [p.name, other.name]})))


def fresh_products(world) -> list:
    """What the cart does not hold yet."""
    shop_ = world.sites["shop"]
    held = {line.slug for line in shop_.carts[world.user]}
    return [p for p in shop_.products.values() if p.slug not in held]


def fresh_product(world, rng):
    p = rng.choice(fresh_products(world))
    return p, {"category": p.category, "product": p.name}


def cart_names(world) -> list[str]:
    return [world.sites["shop"].products[line.slug].name for line in world.sites["shop"].carts[world.user]]


def remove_from_cart(world, rng):
    held = cart_names(world)
    gone = rng.choice(held)
    left = ", ".join(name for name in held if name != gone)
    return Draft("remove {{product}} from the cart", {"product": gone}, rng.choice([SHOP, f"{SHOP}/cart"]),
                 shows((f"{SHOP}/cart", "[...document.querySelectorAll('#cart .name')].map(e => e.innerText).join(', ')",
                        {"exact_match": left})))


def set_quantity(world, rng):
    name, quantity = rng.choice(cart_names(world)), rng.randint(2, 6)
    slug = name.replace(" ", "-")
    return Draft('set the quantity of {{product}} in the cart to "{{quantity}}"', {"product": name, "quantity": quantity},
                 rng.choice([SHOP, f"{SHOP}/cart"]),
                 shows((f"{SHOP}/cart", f"document.querySelector('[id=\"{slug}\"] input').value", {"exact_match": str(quantity)})))


def buy(world, rng):
    p, slots = fresh_product(world, rng)
    shipping = rng.choice(list(shop.SHIPPING))
    return Draft('buy the {{category}} item {{product}} with "{{shipping}}" shipping', slots | {"shipping": shipping},
                 rng.choice([f"{SHOP}/category/{p.category}", product_url(p)]),
                 both(at(f"{SHOP}/orders/", "GOLD in PRED"),
                      shows(("last", text_of("#order"), {"must_include": [p.name, f"shipping {shipping}"]}))))


def some_order(world, rng):
    return rng.choice(list(world.sites["shop"].orders.values()))


def order_status(world, rng):
    o = some_order(world, rng)
    return Draft("what is the status of order {{number}} in the shop", {"number": o.number}, rng.choice([SHOP, f"{SHOP}/orders"]),
                 answer(exact_match=o.status))


def order_total(world, rng):
    o = some_order(world, rng)
    return Draft("what is the total of order {{number}} in dollars", {"number": o.number}, rng.choice([SHOP, f"{SHOP}/orders"]),
                 answer(exact_match=f"${o.total}"))


def set_city(world, rng):
    city = rng.choice([c for c in CITIES if c != world.sites["shop"].accounts[world.user].city])
    return Draft('set my city to "{{city}}" in the shop', {"city": city}, rng.choice([SHOP, f"{SHOP}/account"]),
                 shows((f"{SHOP}/account", text_of("#city"), {"exact_match": city})))


def set_name(world, rng):
    name = rng.choice([n for n in NAMES if n != world.user])
    return Draft('set my name to "{{name}}" in the shop', {"name": name}, rng.choice([SHOP, f"{SHOP}/account"]),
                 shows((f"{SHOP}/account", text_of("#name"), {"exact_match": name})))


# ---- the forum
def open_post(world, rng):
    post, slots = some_post(world, rng)
    return Draft("open the post {{post}} in the {{forum}} forum", slots, post_start(rng, post), at(post_url(post)))


def who_wrote(world, rng):
    post, slots = some_post(world, rng)
    return Draft("who wrote the post {{post}} in the {{forum}} forum", slots, post_start(rng, post),
                 answer(must_include=[post.author]))


def count_votes(world, rng):
    post, slots = some_post(world, rng)
    return Draft("how many votes does the post {{post}} in the {{forum}} forum have", slots, post_start(rng, post),
                 answer(exact_match=str(post.votes)))


def upvote(world, rng):
    post, slots = some_post(world, rng)
    return Draft("upvote the post {{post}} in the {{forum}} forum", slots, rng.choice([post_start(rng, post), post_url(post)]),
                 shows((post_url(post), text_of("#votes"), {"exact_match": str(post.votes + 1)})))


def downvote(world, rng):
    post, slots = some_post(world, rng)
    return Draft("downvote the post {{post}} in the {{forum}} forum", slots, rng.choice([post_start(rng, post), post_url(post)]),
                 shows((post_url(post), text_of("#votes"), {"exact_match": str(post.votes - 1)})))


def comment(world, rng):
    post, slots = some_post(world, rng)
    text = phrase(rng)
    return Draft('comment "{{text}}" on the post {{post}} in the {{forum}} forum', slots | {"text": text},
                 rng.choice([post_start(rng, post), post_url(post)]), shows((post_url(post), "", {"must_include": [text]})))


def new_bio(world, rng) -> tuple[str, tuple]:
    bio = phrase(rng)
    while bio == world.sites["forum"].accounts[world.user].bio:
        bio = phrase(rng)
    return bio, (f"{FORUM}/user/{world.user}", text_of("#bio"), {"exact_match": bio})


def set_bio(world, rng):
    bio, target = new_bio(world, rng)
    return Draft('set my bio to "{{bio}}" in the forum', {"bio": bio}, rng.choice([FORUM, f"{FORUM}/user/{world.user}"]), shows(target))


LOGGED_OUT = (FORUM, text_of("nav"), {"must_include": ["log in"]})


def log_out(world, rng):
    post, _ = some_post(world, rng)
    return Draft("log out of the forum", {}, rng.choice([FORUM, post_url(post), f"{FORUM}/new"]), shows(LOGGED_OUT))


def log_out_and_set_bio(world, rng):
    """The paper's trap: whoever follows the order of the words is locked out before the profile is saved."""
    bio, target = new_bio(world, rng)
    return Draft('log out of the forum and set my bio to "{{bio}}" in the forum', {"bio": bio},
                 rng.choice([FORUM, f"{FORUM}/user/{world.user}"]), shows(target, LOGGED_OUT))


def create_post(world, rng):
    title, name = phrase(rng), rng.choice(forum.FORUMS)
    return Draft('create a post titled "{{title}}" in the forum "{{forum}}"', {"title": title, "forum": name},
                 rng.choice([FORUM, f"{FORUM}/f/{name}"]),
                 both(at(f"{FORUM}/f/{name}/", "GOLD in PRED"), shows(("last", text_of("#title"), {"exact_match": title}))))


SEEN = {1: price, 2: open_product, 3: search_product, 4: count_search, 5: add_to_cart, 6: add_size, 7: remove_from_cart,
        8: set_quantity, 9: buy, 10: order_status, 11: set_city, 20: open_post, 21: who_wrote, 22: upvote, 23: comment, 24: set_bio,
        25: log_out, 26: log_out_and_set_bio, 27: create_post}
UNSEEN = {101: stock, 102: order_total, 103: set_name, 104: add_two, 120: count_votes, 121: downvote}


def tasks(split: str, n: int | None = None) -> list[dict]:
    """The first n tasks of a split; a longer list begins with the shorter one. Templates take turns, so any prefix is balanced."""
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}: the sandbox has {', '.join(SPLITS)}")
    return [task(split, i) for i in range(SPLITS[split] if n is None else n)]


def task(split: str, i: int) -> dict:
    templates = UNSEEN if split == "test-unseen" else SEEN
    number, template = list(templates.items())[i % len(templates)]
    seed = len(SPLITS) * (i + 1) + list(SPLITS).index(split)  # so the splits' worlds are disjoint, however many are drawn
    draft = template(World(seed), Random(f"{split} {i}"))
    intent = draft.intent
    for name, value in draft.slots.items():
        intent = intent.replace("{{" + name + "}}", str(value))
    check = {"reference_answers": None, "reference_url": "", "program_html": []} | draft.check
    return {"sites": ["shopping" if draft.start.startswith(SHOP) else "reddit"], "task_id": i, "require_login": True,
            "storage_state": None, "start_url": draft.start, "geolocation": None, "intent_template": draft.intent,
            "instantiation_dict": draft.slots, "intent": intent, "require_reset": False, "eval": check,
            "intent_template_id": number, "world": seed}

"""The long tier: tasks of 8 to 17 actions on the shop and the forum, each made of several tasks of the small tier.

Pages, words and controls are those of the small tier. New is the length. A part may be forgotten. A fact that is read
early is needed late, and the history keeps responses but no pages. Many tasks start astray, on a page that has nothing
to do with them. A check wants the whole: a cart or an order must hold just the lines that were asked for.

A task that compares or decides can be guessed without looking, such as one of three products. Others take every part.
"""

from . import forum, shop
from .drafts import (FORUM, SHOP, Draft, answer, at, both, fresh_products, shows, text_of, unused_shipping)
from .words import CATEGORIES, CITIES, FORUMS, NAMES, phrase

NUMBERS = ("one", "two", "three", "four")  # slots of tasks that name several things of a kind
BOTH_OPEN = "the shop and the forum are both open : "  # each in a tab of its own; the shop is in front


# ---- the shop
CART_LINES = ("[...document.querySelectorAll('#cart tr')].map(row => [row.querySelector('input').value, "
              "row.querySelector('.size').innerText, row.querySelector('.name').innerText].join(' '))"
              ".sort().join(', ')")
ORDER_LINES = "[...document.querySelectorAll('#order li')].map(line => line.innerText).sort().join(', ')"


def held_lines(world) -> list:
    """What the cart holds at the start: one each of three products."""
    return list(world.sites["shop"].carts[world.user])


def new_line(product, size=shop.SIZES[0], quantity=1):
    return shop.Line(product.slug, size, quantity)


def described(world, lines) -> str:
    """As CART_LINES and ORDER_LINES read them, whatever their order: "1 large red lamp, 2 small blue mug"."""
    products = world.sites["shop"].products
    return ", ".join(sorted(f"{line.quantity} {line.size} {products[line.slug].name}" for line in lines))


def cart_holds(world, lines) -> dict:
    return shows((f"{SHOP}/cart", CART_LINES, {"exact_match": described(world, lines)}))


def bought(world, lines, shipping: str, *more) -> dict:
    """The episode ends on an order of these lines and no others. more: further targets of `shows`."""
    return both(at(f"{SHOP}/orders/", "GOLD in PRED"),
                shows(("last", ORDER_LINES, {"exact_match": described(world, lines)}),
                      ("last", text_of("#order"), {"must_include": [f"shipping {shipping}"]}), *more))


def account_shows(label: str, value: str) -> tuple:
    """A target of `shows`."""
    return f"{SHOP}/account", text_of(f"#{label}"), {"exact_match": value}


def astray_in_shop(world) -> list[str]:
    """Pages that lead nowhere: a product that the cart holds already, a form, a checkout that comes too early."""
    held = held_lines(world)[0]
    return [f"{SHOP}/product/{held.slug}", f"{SHOP}/account/edit", f"{SHOP}/checkout"]


def draw_size(rng) -> str:
    return rng.choice(shop.SIZES[1:])  # the first one is preselected


def draw_shipping(rng) -> str:
    return rng.choice(list(shop.SHIPPING))


def draw_city(world, rng) -> str:
    return rng.choice([city for city in CITIES if city != world.sites["shop"].accounts[world.user].city])


# ---- the forum
LAST_COMMENT = "[...document.querySelectorAll('main li')].pop().innerText"


def address(post) -> str:
    return FORUM + forum.address(post)


def next_address(world, section: str) -> str:
    """The address of the first post that somebody creates in a forum."""
    return f"{FORUM}/f/{section}/{max(world.sites['forum'].posts) + 1}"


def draw_posts(world, rng, count: int) -> list:
    return rng.sample(list(world.sites["forum"].posts.values()), count)


def post_slots(posts) -> dict:
    slots = {}
    for number, post in zip(NUMBERS, posts):
        slots |= {number: post.title, f"section_{number}": post.forum}
    return slots


def votes_are(post, votes: int) -> tuple:
    """A target of `shows`; so are the next two."""
    return address(post), text_of("#votes"), {"exact_match": str(votes)}


def commented(world, url: str, text: str) -> tuple:
    return url, LAST_COMMENT, {"exact_match": f"{world.user} : {text}"}


def bio_is(world, bio: str) -> tuple:
    return f"{FORUM}/user/{world.user}", text_of("#bio"), {"exact_match": bio}


def astray_in_forum(world, *wanted) -> list[str]:
    """Pages that lead nowhere: the newest post that is not `wanted`, a form."""
    other = max(post for post in world.sites["forum"].posts.values() if post not in wanted)
    return [address(other), f"{FORUM}/edit"]


def draw_bio(world, rng) -> str:
    bio = old = world.sites["forum"].accounts[world.user].bio
    while bio == old:
        bio = phrase(rng)
    return bio


# ---- several things in a row
def buy_three(world, rng):
    products = rng.sample(fresh_products(world), 3)
    sizes = [draw_size(rng) for _ in products]
    shipping = draw_shipping(rng)
    slots = {"shipping": shipping}
    for number, product, size in zip(NUMBERS, products, sizes):
        slots |= {number: product.name, f"size_{number}": size}
    return Draft('buy {{one}} in size "{{size_one}}" , {{two}} in size "{{size_two}}" and {{three}} in size '
                 '"{{size_three}}" with "{{shipping}}" shipping', slots, [SHOP, *astray_in_shop(world)],
                 bought(world, [*held_lines(world), *map(new_line, products, sizes)], shipping))


def change_cart(world, rng):
    more, gone, rest = rng.sample(held_lines(world), 3)
    products = world.sites["shop"].products
    product = rng.choice(fresh_products(world))
    size = draw_size(rng)
    quantity = rng.randint(2, 6)
    slots = {"held": products[more.slug].name, "quantity": str(quantity), "gone": products[gone.slug].name,
             "section": product.category, "name": product.name, "size": size}
    return Draft('set the quantity of {{held}} in the cart to "{{quantity}}" , remove {{gone}} from it and add the '
                 '{{section}} item {{name}} in size "{{size}}"', slots, [SHOP, *astray_in_shop(world)],
                 cart_holds(world, [more._replace(quantity=quantity), rest, new_line(product, size)]))


def set_accounts(world, rng):
    name = rng.choice([name for name in NAMES if name != world.user])
    city = draw_city(world, rng)
    bio = draw_bio(world, rng)
    return Draft(BOTH_OPEN + 'set my name to "{{name}}" and my city to "{{city}}" in the shop and my bio to "{{bio}}" '
                 "in the forum", {"name": name, "city": city, "bio": bio},
                 [f"{start} |AND| {FORUM}" for start in (SHOP, *astray_in_shop(world))],
                 shows(account_shows("name", name), account_shows("city", city), bio_is(world, bio)))


def three_posts(world, rng):
    up, down, third = posts = draw_posts(world, rng, 3)
    text = phrase(rng)
    return Draft("upvote the post {{one}} in the {{section_one}} forum , downvote {{two}} in the {{section_two}} forum "
                 'and comment "{{text}}" on {{three}} in the {{section_three}} forum',
                 post_slots(posts) | {"text": text},
                 [FORUM, *astray_in_forum(world, *posts)],
                 shows(votes_are(up, up.votes + 1), votes_are(down, down.votes - 1),
                       commented(world, address(third), text)))


def post_and_bio(world, rng):
    title = phrase(rng)
    text = phrase(rng)
    bio = draw_bio(world, rng)
    section = rng.choice(FORUMS)
    url = next_address(world, section)
    return Draft('create a post titled "{{title}}" in the forum "{{section}}" , comment "{{text}}" on it and set my '
                 'bio to "{{bio}}"', {"title": title, "section": section, "text": text, "bio": bio},
                 [FORUM, *astray_in_forum(world)],
                 shows((url, text_of("#title"), {"exact_match": title}), commented(world, url, text),
                       bio_is(world, bio)))


def buy_several(world, rng):
    product = rng.choice(fresh_products(world))
    quantity = rng.randint(2, 6)
    city = draw_city(world, rng)
    shipping = draw_shipping(rng)
    lines = [*held_lines(world), new_line(product, quantity=quantity)]
    return Draft('set my city to "{{city}}" and buy "{{quantity}}" of {{name}} with "{{shipping}}" shipping',
                 {"city": city, "quantity": str(quantity), "name": product.name, "shipping": shipping},
                 [SHOP, *astray_in_shop(world)], bought(world, lines, shipping, account_shows("city", city)))


# ---- the cart is wrong at the start
def buy_alone(world, rng):
    product = rng.choice(fresh_products(world))
    size = draw_size(rng)
    shipping = unused_shipping(world, rng, product.slug)
    return Draft('empty the cart and buy nothing but the {{section}} item {{name}} in size "{{size}}" with '
                 '"{{shipping}}" shipping',
                 {"section": product.category, "name": product.name, "size": size, "shipping": shipping},
                 [SHOP, *astray_in_shop(world)], bought(world, [new_line(product, size)], shipping))


def buy_instead(world, rng):
    """It starts in the checkout, with something wrong in the cart."""
    gone, *rest = rng.sample(held_lines(world), 3)
    product = rng.choice(fresh_products(world))
    size = draw_size(rng)
    shipping = draw_shipping(rng)
    slots = {"gone": world.sites["shop"].products[gone.slug].name, "name": product.name, "size": size,
             "shipping": shipping}
    return Draft('buy what the cart holds with "{{shipping}}" shipping , but {{name}} in size "{{size}}" instead of '
                 "{{gone}}", slots, [f"{SHOP}/checkout"], bought(world, [*rest, new_line(product, size)], shipping))


# ---- compare, count, decide
def draw_apart(rng, rows: list, value) -> tuple[list, object]:
    """Three rows, of which one has the largest value; and that one. value: of a row."""
    while True:
        drawn = rng.sample(rows, 3)
        second, most = sorted(drawn, key=value)[1:]
        if value(second) < value(most):
            return drawn, most


def add_most_in_stock(world, rng):
    products, best = draw_apart(rng, fresh_products(world), lambda product: product.stock)
    return Draft("of {{one}} , {{two}} and {{three}} add the item with the most in stock to the cart",
                 dict(zip(NUMBERS, [product.name for product in products])), [SHOP, *astray_in_shop(world)],
                 cart_holds(world, [*held_lines(world), new_line(best)]))


def comment_on_most_votes(world, rng):
    everything = list(world.sites["forum"].posts.values())
    text = phrase(rng)
    posts, best = draw_apart(rng, everything, lambda post: post.votes)
    return Draft("of the posts {{one}} in the {{section_one}} forum , {{two}} in the {{section_two}} forum and "
                 '{{three}} in the {{section_three}} forum comment "{{text}}" on the one with the most votes',
                 post_slots(posts) | {"text": text}, astray_in_forum(world, *posts),
                 shows(commented(world, address(best), text)))


def count_items(world, rng):
    sections = rng.sample(list(CATEGORIES), 4)
    count = sum(product.category in sections for product in world.sites["shop"].products.values())
    return Draft("how many items are in the departments {{one}} , {{two}} , {{three}} and {{four}} in all",
                 dict(zip(NUMBERS, sections)), [SHOP, *astray_in_shop(world)], answer(exact_match=str(count)))


def dearest_order(world, rng):
    most = max(order.total for order in world.sites["shop"].orders.values())
    return Draft("what is the total of my order that costs the most in dollars", {}, [SHOP, *astray_in_shop(world)],
                 answer(exact_match=f"${most}"))


def buy_if(world, rng):
    order = rng.choice(list(world.sites["shop"].orders.values()))
    status = rng.choice([order.status, rng.choice([status for status in shop.STATUSES if status != order.status])])
    one, other = rng.sample(fresh_products(world), 2)
    wanted = one if order.status == status else other
    shipping = draw_shipping(rng)
    return Draft('if the status of order {{number}} is "{{status}}" buy {{name}} , else buy {{other}} , with '
                 '"{{shipping}}" shipping',
                 {"number": order.number, "status": status, "name": one.name, "other": other.name,
                  "shipping": shipping},
                 [SHOP, *astray_in_shop(world)], bought(world, [*held_lines(world), new_line(wanted)], shipping))


# ---- carry a fact from one site to the other
def comment_price(world, rng):
    product = rng.choice(fresh_products(world))
    [post] = draw_posts(world, rng, 1)
    away, *_ = astray_in_forum(world, post)
    return Draft(BOTH_OPEN + "comment the price of the {{item_section}} item {{item}} on the post {{name}} in the "
                 "{{section}} forum",
                 {"item_section": product.category, "item": product.name, "name": post.title, "section": post.forum},
                 [f"{start} |AND| {away}" for start in astray_in_shop(world)],
                 shows(commented(world, address(post), f"${product.price}")))


def post_total(world, rng):
    order = rng.choice(list(world.sites["shop"].orders.values()))
    section = rng.choice(FORUMS)
    return Draft(BOTH_OPEN + 'create a post titled with the total of order {{number}} in the forum "{{section}}"',
                 {"number": order.number, "section": section},
                 [f"{start} |AND| {FORUM}" for start in (SHOP, *astray_in_shop(world))],
                 shows((next_address(world, section), text_of("#title"), {"exact_match": f"${order.total}"})))


SEEN = {81: buy_three, 82: change_cart, 83: buy_alone, 84: add_most_in_stock, 85: comment_price, 86: count_items,
        87: set_accounts, 88: three_posts, 89: buy_instead, 90: buy_if, 91: post_and_bio}
UNSEEN = {181: dearest_order, 182: post_total, 183: buy_several, 184: comment_on_most_votes}

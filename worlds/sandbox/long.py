"""The long tier: tasks of 8 to 17 actions on the shop and the forum, each made of several tasks of the small tier.

Pages, words and controls are those of the small tier. New is the length. A part may be forgotten. A fact that is read
early is needed late, and the history keeps responses but no pages. Many tasks start astray, on a page that has nothing
to do with them. A check wants the whole: a cart or an order must hold just the lines that were asked for.

A task that compares or decides can be guessed without looking: one of three products is the right one. The other tasks
cannot: each of their parts has to be done.
"""

from . import forum, shop
from .drafts import (
    FORUM, SHOP,
    ACCOUNT, CART, ORDERS,
    Draft,
    draw_bio, draw_city, draw_name, draw_order, draw_size, fresh_products, unused_shipping,
    answer, below, both, shows,
    text_has, text_is,
)
from .words import CATEGORIES, FORUMS, phrase

NUMBERS = ("one", "two", "three", "four")  # slots of tasks that name several things of a kind
BOTH_OPEN = "the shop and the forum are both open : "  # each in a tab of its own; the shop is in front


# ---- the shop
CART_LINES = (
    "[...document.querySelectorAll('#cart tr')].map(row => [row.querySelector('input').value, "
    "row.querySelector('.size').innerText, row.querySelector('.name').innerText].join(' '))"
    ".sort().join(', ')"
)
ORDER_LINES = "[...document.querySelectorAll('#order li')].map(line => line.innerText).sort().join(', ')"


def held_lines(world) -> list:
    """What the cart holds at the start: one each of three products."""
    return list(world.sites["shop"].carts[world.user])


def new_line(product, size=shop.SIZES[0], quantity=1):
    return shop.Line(product.slug, size, quantity)


def described(world, lines) -> str:
    """As CART_LINES and ORDER_LINES read them, whatever their order: "1 large red lamp, 2 small blue mug"."""
    products = world.sites["shop"].products
    texts = []
    for line in lines:
        name = products[line.slug].name
        texts.append(f"{line.quantity} {line.size} {name}")
    return ", ".join(sorted(texts))


def cart_holds(world, lines) -> dict:
    """The cart holds these lines and no others."""
    wanted = {"exact_match": described(world, lines)}
    return shows((CART, CART_LINES, wanted))


def bought(world, lines, shipping: str, *more) -> dict:
    """The episode ends on an order of these lines and no others. more: further targets of `shows`."""
    wanted = {"exact_match": described(world, lines)}
    order = shows(
        ("last", ORDER_LINES, wanted),
        text_has("last", "#order", f"shipping {shipping}"),
        *more,
    )
    return both(below(f"{ORDERS}/"), order)


def account_shows(label: str, value: str) -> tuple:
    """A target of `shows`."""
    return text_is(ACCOUNT, f"#{label}", value)


def astray_in_shop(world) -> list[str]:
    """Pages that lead nowhere: a product that the cart holds already, a form, a checkout that comes too early."""
    held = held_lines(world)[0]
    return [
        f"{SHOP}/product/{held.slug}",
        f"{SHOP}/account/edit",
        f"{SHOP}/checkout",
    ]


def shop_starts(world) -> list[str]:
    """The home page, and the pages that lead nowhere."""
    return [SHOP, *astray_in_shop(world)]


def draw_shipping(rng) -> str:
    return rng.choice(list(shop.SHIPPING))


# ---- the forum
LAST_COMMENT = "[...document.querySelectorAll('main li')].pop().innerText"


def address(post) -> str:
    """The address of a post."""
    return FORUM + forum.address(post)


def next_address(world, section: str) -> str:
    """The address of the first post that somebody creates in a forum."""
    newest = max(world.sites["forum"].posts)
    return f"{FORUM}/f/{section}/{newest + 1}"


def draw_posts(world, rng, count: int) -> list:
    posts = world.sites["forum"].posts
    return rng.sample(list(posts.values()), count)


def post_slots(posts) -> dict:
    """{"one": title, "section_one": forum, "two": ...}"""
    slots = {}
    for number, post in zip(NUMBERS, posts):
        slots[number] = post.title
        slots[f"section_{number}"] = post.forum
    return slots


def votes_are(post, votes: int) -> tuple:
    """A target of `shows`; so are the next two."""
    return text_is(address(post), "#votes", str(votes))


def commented(world, url: str, text: str) -> tuple:
    """The last comment is this one, by the main user."""
    return url, LAST_COMMENT, {"exact_match": f"{world.user} : {text}"}


def bio_is(world, bio: str) -> tuple:
    return text_is(f"{FORUM}/user/{world.user}", "#bio", bio)


def astray_in_forum(world, *wanted) -> list[str]:
    """Pages that lead nowhere: the newest post that is not `wanted`, a form."""
    posts = world.sites["forum"].posts.values()
    other = max(post for post in posts if post not in wanted)
    return [address(other), f"{FORUM}/edit"]


# ---- several things in a row
def buy_three(world, rng):
    products = rng.sample(fresh_products(world), 3)
    sizes = [draw_size(rng) for _ in products]
    shipping = draw_shipping(rng)

    slots = {"shipping": shipping}
    lines = held_lines(world)
    for number, product, size in zip(NUMBERS, products, sizes):
        slots[number] = product.name
        slots[f"size_{number}"] = size
        lines.append(new_line(product, size))

    return Draft(
        intent=(
            'buy {{one}} in size "{{size_one}}" , {{two}} in size "{{size_two}}" and {{three}} in size '
            '"{{size_three}}" with "{{shipping}}" shipping'
        ),
        slots=slots,
        starts=shop_starts(world),
        check=bought(world, lines, shipping),
    )


def change_cart(world, rng):
    more, gone, rest = rng.sample(held_lines(world), 3)
    product = rng.choice(fresh_products(world))
    size = draw_size(rng)
    quantity = rng.randint(2, 6)

    products = world.sites["shop"].products
    slots = {
        "held": products[more.slug].name,
        "quantity": str(quantity),
        "gone": products[gone.slug].name,
        "section": product.category,
        "name": product.name,
        "size": size,
    }
    lines = [
        more._replace(quantity=quantity),
        rest,
        new_line(product, size),
    ]
    return Draft(
        intent=(
            'set the quantity of {{held}} in the cart to "{{quantity}}" , remove {{gone}} from it and add the '
            '{{section}} item {{name}} in size "{{size}}"'
        ),
        slots=slots,
        starts=shop_starts(world),
        check=cart_holds(world, lines),
    )


def set_accounts(world, rng):
    name = draw_name(world, rng)
    city = draw_city(world, rng)
    bio = draw_bio(world, rng)

    all_set = shows(
        account_shows("name", name),
        account_shows("city", city),
        bio_is(world, bio),
    )
    return Draft(
        intent=BOTH_OPEN + (
            'set my name to "{{name}}" and my city to "{{city}}" in the shop and my bio to "{{bio}}" '
            "in the forum"
        ),
        slots={"name": name, "city": city, "bio": bio},
        starts=[f"{start} |AND| {FORUM}" for start in shop_starts(world)],
        check=all_set,
    )


def three_posts(world, rng):
    posts = draw_posts(world, rng, 3)
    up, down, third = posts
    text = phrase(rng)

    done = shows(
        votes_are(up, up.votes + 1),
        votes_are(down, down.votes - 1),
        commented(world, address(third), text),
    )
    return Draft(
        intent=(
            "upvote the post {{one}} in the {{section_one}} forum , downvote {{two}} in the {{section_two}} forum "
            'and comment "{{text}}" on {{three}} in the {{section_three}} forum'
        ),
        slots=post_slots(posts) | {"text": text},
        starts=[FORUM, *astray_in_forum(world, *posts)],
        check=done,
    )


def post_and_bio(world, rng):
    title = phrase(rng)
    text = phrase(rng)
    bio = draw_bio(world, rng)
    section = rng.choice(FORUMS)

    url = next_address(world, section)
    done = shows(
        text_is(url, "#title", title),
        commented(world, url, text),
        bio_is(world, bio),
    )
    return Draft(
        intent=(
            'create a post titled "{{title}}" in the forum "{{section}}" , comment "{{text}}" on it and set my '
            'bio to "{{bio}}"'
        ),
        slots={
            "title": title,
            "section": section,
            "text": text,
            "bio": bio,
        },
        starts=[FORUM, *astray_in_forum(world)],
        check=done,
    )


def buy_several(world, rng):
    product = rng.choice(fresh_products(world))
    quantity = rng.randint(2, 6)
    city = draw_city(world, rng)
    shipping = draw_shipping(rng)

    lines = [*held_lines(world), new_line(product, quantity=quantity)]
    moved = account_shows("city", city)
    return Draft(
        intent='set my city to "{{city}}" and buy "{{quantity}}" of {{name}} with "{{shipping}}" shipping',
        slots={
            "city": city,
            "quantity": str(quantity),
            "name": product.name,
            "shipping": shipping,
        },
        starts=shop_starts(world),
        check=bought(world, lines, shipping, moved),
    )


# ---- the cart is wrong at the start
def buy_alone(world, rng):
    product = rng.choice(fresh_products(world))
    size = draw_size(rng)
    shipping = unused_shipping(world, rng, product.slug)
    return Draft(
        intent=(
            'empty the cart and buy nothing but the {{section}} item {{name}} in size "{{size}}" with '
            '"{{shipping}}" shipping'
        ),
        slots={
            "section": product.category,
            "name": product.name,
            "size": size,
            "shipping": shipping,
        },
        starts=shop_starts(world),
        check=bought(world, [new_line(product, size)], shipping),
    )


def buy_instead(world, rng):
    """It starts in the checkout, with something wrong in the cart."""
    gone, *rest = rng.sample(held_lines(world), 3)
    product = rng.choice(fresh_products(world))
    size = draw_size(rng)
    shipping = draw_shipping(rng)

    products = world.sites["shop"].products
    lines = [*rest, new_line(product, size)]
    return Draft(
        intent=(
            'buy what the cart holds with "{{shipping}}" shipping , but {{name}} in size "{{size}}" instead of '
            "{{gone}}"
        ),
        slots={
            "gone": products[gone.slug].name,
            "name": product.name,
            "size": size,
            "shipping": shipping,
        },
        starts=[f"{SHOP}/checkout"],
        check=bought(world, lines, shipping),
    )


# ---- compare, count, decide
def draw_apart(rng, rows: list, value) -> tuple[list, object]:
    """(three rows, the one of them with the largest value), without a tie for it. value(row) -> number."""
    while True:
        drawn = rng.sample(rows, 3)
        _, second, most = sorted(drawn, key=value)
        if value(second) < value(most):
            return drawn, most


def add_most_in_stock(world, rng):
    products = fresh_products(world)
    drawn, best = draw_apart(rng, products, value=lambda product: product.stock)
    names = [product.name for product in drawn]
    lines = [*held_lines(world), new_line(best)]
    return Draft(
        intent="of {{one}} , {{two}} and {{three}} add the item with the most in stock to the cart",
        slots=dict(zip(NUMBERS, names)),
        starts=shop_starts(world),
        check=cart_holds(world, lines),
    )


def comment_on_most_votes(world, rng):
    everything = list(world.sites["forum"].posts.values())
    text = phrase(rng)
    posts, best = draw_apart(rng, everything, value=lambda post: post.votes)
    return Draft(
        intent=(
            "of the posts {{one}} in the {{section_one}} forum , {{two}} in the {{section_two}} forum and "
            '{{three}} in the {{section_three}} forum comment "{{text}}" on the one with the most votes'
        ),
        slots=post_slots(posts) | {"text": text},
        starts=astray_in_forum(world, *posts),
        check=shows(commented(world, address(best), text)),
    )


def count_items(world, rng):
    sections = rng.sample(list(CATEGORIES), 4)
    products = world.sites["shop"].products.values()
    count = sum(product.category in sections for product in products)
    return Draft(
        intent="how many items are in the departments {{one}} , {{two}} , {{three}} and {{four}} in all",
        slots=dict(zip(NUMBERS, sections)),
        starts=shop_starts(world),
        check=answer(exact_match=str(count)),
    )


def dearest_order(world, rng):
    orders = world.sites["shop"].orders.values()
    most = max(order.total for order in orders)
    return Draft(
        intent="what is the total of my order that costs the most in dollars",
        slots={},
        starts=shop_starts(world),
        check=answer(exact_match=f"${most}"),
    )


def buy_if(world, rng):
    order = draw_order(world, rng)
    other_status = rng.choice([status for status in shop.STATUSES if status != order.status])
    status = rng.choice([order.status, other_status])
    one, other = rng.sample(fresh_products(world), 2)
    shipping = draw_shipping(rng)

    wanted = one if order.status == status else other
    lines = [*held_lines(world), new_line(wanted)]
    return Draft(
        intent=(
            'if the status of order {{number}} is "{{status}}" buy {{name}} , else buy {{other}} , with '
            '"{{shipping}}" shipping'
        ),
        slots={
            "number": order.number,
            "status": status,
            "name": one.name,
            "other": other.name,
            "shipping": shipping,
        },
        starts=shop_starts(world),
        check=bought(world, lines, shipping),
    )


# ---- carry a fact from one site to the other
def comment_price(world, rng):
    product = rng.choice(fresh_products(world))
    [post] = draw_posts(world, rng, 1)
    away, *_ = astray_in_forum(world, post)

    told = commented(world, address(post), f"${product.price}")
    return Draft(
        intent=BOTH_OPEN + (
            "comment the price of the {{item_section}} item {{item}} on the post {{name}} in the "
            "{{section}} forum"
        ),
        slots={
            "item_section": product.category,
            "item": product.name,
            "name": post.title,
            "section": post.forum,
        },
        starts=[f"{start} |AND| {away}" for start in astray_in_shop(world)],
        check=shows(told),
    )


def post_total(world, rng):
    order = draw_order(world, rng)
    section = rng.choice(FORUMS)

    url = next_address(world, section)
    told = text_is(url, "#title", f"${order.total}")
    return Draft(
        intent=BOTH_OPEN + 'create a post titled with the total of order {{number}} in the forum "{{section}}"',
        slots={"number": order.number, "section": section},
        starts=[f"{start} |AND| {FORUM}" for start in shop_starts(world)],
        check=shows(told),
    )


SEEN = {
    81: buy_three,
    82: change_cart,
    83: buy_alone,
    84: add_most_in_stock,
    85: comment_price,
    86: count_items,
    87: set_accounts,
    88: three_posts,
    89: buy_instead,
    90: buy_if,
    91: post_and_bio,
}
UNSEEN = {
    181: dearest_order,
    182: post_total,
    183: buy_several,
    184: comment_on_most_votes,
}

"""The map: places of several kinds, what is near them, directions between them, a list of saved places, trips."""

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .page import (
    LOGIN_ROUTES, NOT_FOUND, Page, Redirect,
    error, fact, items, link, table,
    field, form, press, search_box, select,
    members_only, navigation, paginate, unfit,
)
from .shop import slug_of
from .words import ADJECTIVES, PLACES, SCENERY, password

ROOT = "/map"
SPEED = {"walk": 12, "bike": 4, "drive": 2}  # minutes a kilometre
PER_PAGE = 8
SIDE = 24  # kilometres; streets run along a grid


class Account(NamedTuple):
    user: str
    password: str


class Place(NamedTuple):
    slug: str
    name: str
    kind: str
    x: int  # kilometres to the east
    y: int  # to the north
    ferry: bool  # no street leads there
    street: str
    phone: str
    opens: int
    rating: float


class Trip(NamedTuple):
    number: int
    user: str
    name: str
    stops: tuple[str, ...]
    by: str


@dataclass
class Map:
    accounts: dict[str, Account]
    places: dict[str, Place]
    saved: dict[tuple[str, str], str]  # (user, place): note
    trips: dict[int, Trip]
    drafts: dict[str, Trip]  # under way, by who plans them


def seed(rng, people: list[str], sites: dict) -> Map:
    spots = iter(rng.sample(range(SIDE * SIDE), 60))  # no two places share one
    places = {}
    for kind in PLACES:
        count = rng.randint(5, 9)
        ratings = rng.sample(range(10, 50), count)  # a kind's ratings all differ, so one of them is the best
        adjectives = rng.sample(ADJECTIVES, count)
        for adjective, rating in zip(adjectives, ratings):
            name = f"{adjective} {kind}"
            slug = slug_of(name)
            y, x = divmod(next(spots), SIDE)
            street = f"{rng.choice(SCENERY)} street"
            places[slug] = Place(
                slug,
                name,
                kind,
                x,
                y,
                ferry=rng.random() < 0.1,
                street=street,
                phone=str(rng.randint(1000, 9999)),
                opens=rng.randint(6, 12),
                rating=rating / 10,
            )

    saved = {}
    for slug in rng.sample(sorted(places), 3):
        saved[people[0], slug] = f"a {rng.choice(ADJECTIVES)} one"

    accounts = {user: Account(user, password(rng)) for user in people}
    return Map(accounts, places, saved, {}, {})


def nav(user: str | None) -> str:
    links = [
        ("home", ROOT),
        ("directions", "/map/directions"),
        ("saved places", "/map/saved"),
        ("trips", "/map/trips"),
    ]
    return navigation(ROOT, user, links) + search_box(ROOT)


def distance(a: Place, b: Place) -> int:
    """Kilometres by the streets of the grid."""
    return abs(a.x - b.x) + abs(a.y - b.y)


def link_to(place: Place) -> str:
    return link(place.name, f"/map/place/{place.slug}")


# ---- places
def home(atlas, request):
    kinds = items(link(kind, f"/map/kind/{kind}") for kind in PLACES)
    return Page("map", f"<h1>map</h1><h2>kinds of places</h2>{kinds}")


def kind(atlas, request, name):
    if name not in PLACES:
        return NOT_FOUND
    order = request.query.get("sort", "name")
    found = [p for p in atlas.places.values() if p.kind == name]
    found.sort(key=lambda p: p.name)
    if order == "best":
        found.sort(key=lambda p: -p.rating)
    shown, links = paginate(found, request, 5, f"/map/kind/{name}")

    rows = [(link_to(p), p.street, f"{p.rating} of 5") for p in shown]
    choice = select("sort", ("name", "best"), order)
    body = f"<h1>{name}</h1>"
    body += form(choice, submit="apply", method="get")
    body += table(("place", "street", "rating"), rows)
    return Page(name, body + links)


def search(atlas, request):
    """Places by the words of their names and streets."""
    text = request.query.get("q", "").lower()
    wanted = set(text.split())
    found = []
    if wanted:
        for p in atlas.places.values():
            if wanted <= set(f"{p.name} {p.street}".split()):
                found.append(p)
    shown, links = paginate(found, request, PER_PAGE, "/map/search")

    body = f"<h1>search</h1><p>{len(found)} found</p>"
    body += items(f"{link_to(p)} {p.street}" for p in shown)
    return Page("search", body + links)


def place(atlas, request, slug, problem=""):
    p = atlas.places.get(slug)
    if p is None:
        return NOT_FOUND
    body = f"<h1>{p.name}</h1>{error(problem)}"
    body += fact("kind", p.kind)
    body += fact("street", p.street)
    body += fact("phone", p.phone)
    body += fact("opens at", p.opens)
    body += fact("rating", p.rating)
    if p.ferry:
        body += "<p>only a ferry goes there</p>"
    around = link("nearby", f"/map/place/{slug}/nearby")
    body += f"<p>{around}</p>"
    if request.user:
        old = atlas.saved.get((request.user, slug), "")
        note = request.form.get("note", old)
        body += form(field("note", note), submit="save place")
    return Page(p.name, body)


def nearby(atlas, request, slug):
    here = atlas.places.get(slug)
    if here is None:
        return NOT_FOUND
    chosen = request.query.get("kind", "any")
    others = [p for p in atlas.places.values() if p != here]
    others = [p for p in others if chosen in ("any", p.kind)]
    others.sort(key=lambda p: (distance(here, p), p.name))
    shown, links = paginate(others, request, PER_PAGE, f"/map/place/{slug}/nearby")

    rows = [(link_to(p), p.kind, f"{distance(here, p)} km") for p in shown]
    choice = select("kind", ("any", *PLACES), chosen)
    body = f"<h1>nearby</h1><p>near {here.name}</p>"
    body += form(choice, submit="filter", method="get")
    body += table(("place", "kind", "distance"), rows)
    return Page("nearby", body + links)


# ---- directions
def steps(a: Place, b: Place) -> list[str]:
    """The way from a to b in words."""
    way = []
    east = b.x - a.x
    if east:
        way.append(f"go {abs(east)} km {'east' if east > 0 else 'west'}")
    north = b.y - a.y
    if north:
        way.append(f"go {abs(north)} km {'north' if north > 0 else 'south'}")
    way.append(f"arrive at {b.name}")
    return way


def directions(atlas, request):
    start = request.query.get("from", "").strip().lower()
    end = request.query.get("to", "").strip().lower()
    by = request.query.get("by", "").strip().lower()
    head = "<h1>directions</h1>"
    choices = form(
        field("from", start),
        field("to", end),
        select("by", SPEED, by),
        submit="find route",
        method="get",
    )
    if not request.query:
        return Page("directions", head + choices)

    named = {p.name: p for p in atlas.places.values()}
    problem = ""
    if start not in named:
        problem = f"no place is called {start or 'nothing'}"
    elif end not in named:
        problem = f"no place is called {end or 'nothing'}"
    elif by not in SPEED:
        problem = "choose how to go"
    if problem:
        return Page("directions", head + error(problem) + choices)

    a = named[start]
    b = named[end]
    body = head + choices
    if a.ferry or b.ferry:
        body += "<p>there is no route : only a ferry goes there</p>"
        return Page("directions", body)
    km = distance(a, b)
    body += f"<h2>from {a.name} to {b.name}</h2>"
    body += fact("distance", f"{km} km")
    body += fact("time", f"{km * SPEED[by]} minutes")
    body += items(steps(a, b))
    return Page("directions", body)


# ---- saved places
@members_only
def saved(atlas, request):
    rows = []
    for (user, slug), note in atlas.saved.items():
        if user != request.user:
            continue
        p = atlas.places[slug]
        shown = f'<span id="{slug}">{escape(note)}</span>'
        button = press(f"remove {p.name}", f"/map/place/{slug}/remove", "remove this place?")
        rows.append((link_to(p), shown, button))
    body = "<h1>saved places</h1>"
    body += table(("place", "note", ""), rows)
    return Page("saved places", body)


@members_only
def save(atlas, request, slug):
    note = request.form.get("note", "")
    problem = unfit("note", note, 200)
    if problem or slug not in atlas.places:
        return place(atlas, request, slug, problem)
    atlas.saved[request.user, slug] = note.strip()
    return Redirect("/saved")


@members_only
def remove(atlas, request, slug):
    atlas.saved.pop((request.user, slug), None)
    return Redirect("/saved")


# ---- trips, planned over three pages
@members_only
def trips(atlas, request):
    mine = [trip for trip in atlas.trips.values() if trip.user == request.user]
    new = link("new trip", "/map/trips/new")
    body = f"<h1>trips</h1><p>{new}</p>"
    body += items(link(trip.name, f"/map/trips/{trip.number}") for trip in mine)
    return Page("trips", body)


@members_only
def trip_form(atlas, request, problem=""):
    name = request.form.get("name", "")
    body = f"<h1>new trip</h1><p>step 1 of 3</p>{error(problem)}"
    body += form(field("name", name), submit="continue")
    return Page("new trip", body)


@members_only
def new_trip(atlas, request):
    name = request.form.get("name", "").strip()
    problem = unfit("name", name)
    if problem:
        return trip_form(atlas, request, problem)
    number = max(atlas.trips, default=9) + 1
    draft = Trip(number, request.user, name, stops=(), by="")
    atlas.drafts[request.user] = draft
    return Redirect("/trips/stops")


@members_only
def stops(atlas, request, problem=""):
    draft = atlas.drafts.get(request.user)
    if draft is None:
        return Redirect("/trips/new")
    stop = request.form.get("stop", "")
    further = link("continue", "/map/trips/finish")
    body = f"<h1>stops</h1><p>step 2 of 3</p>{error(problem)}"
    body += items(map(escape, draft.stops))
    body += form(field("stop", stop), submit="add stop")
    body += f"<p>{further}</p>"
    return Page("stops", body)


@members_only
def add_stop(atlas, request):
    stop = request.form.get("stop", "").strip().lower()
    draft = atlas.drafts.get(request.user)
    if draft is None or slug_of(stop) not in atlas.places or len(draft.stops) == 9:
        return stops(atlas, request, "write the name of a place; a trip has at most 9 stops")
    atlas.drafts[request.user] = draft._replace(stops=(*draft.stops, stop))
    return Redirect("/trips/stops")


@members_only
def finish(atlas, request, problem=""):
    draft = atlas.drafts.get(request.user)
    if draft is None or len(draft.stops) < 2:
        return stops(atlas, request, "a trip has at least 2 stops")
    choice = select("by", ("choose", *SPEED))
    body = f"<h1>finish</h1><p>step 3 of 3</p>{error(problem)}"
    body += items(map(escape, draft.stops))
    body += form(choice, submit="save trip")
    return Page("finish", body)


@members_only
def save_trip(atlas, request):
    draft = atlas.drafts.get(request.user)
    by = request.form.get("by")
    if draft is None or len(draft.stops) < 2 or by not in SPEED:
        return finish(atlas, request, "choose how to go")
    atlas.trips[draft.number] = draft._replace(by=by)
    del atlas.drafts[request.user]
    return Redirect(f"/trips/{draft.number}")


@members_only
def trip(atlas, request, number):
    t = atlas.trips.get(int(number))
    if t is None or t.user != request.user:
        return NOT_FOUND
    visited = [atlas.places[slug_of(stop)] for stop in t.stops]
    legs = zip(visited, visited[1:])
    km = sum(distance(a, b) for a, b in legs)
    body = f'<h1 id="name">{escape(t.name)}</h1>'
    body += f'<div id="stops">{items(map(link_to, visited))}</div>'
    body += fact("by", t.by)
    body += fact("distance", f"{km} km")
    return Page("trip", body)


ROUTES = LOGIN_ROUTES + [
    ("GET", "", home),
    ("GET", "/kind/([a-z]+)", kind),
    ("GET", "/search", search),
    ("GET", "/place/([a-z-]+)", place),
    ("POST", "/place/([a-z-]+)", save),
    ("GET", "/place/([a-z-]+)/nearby", nearby),
    ("POST", "/place/([a-z-]+)/remove", remove),
    ("GET", "/directions", directions),
    ("GET", "/saved", saved),
    ("GET", "/trips", trips),
    ("GET", "/trips/new", trip_form),
    ("POST", "/trips/new", new_trip),
    ("GET", "/trips/stops", stops),
    ("POST", "/trips/stops", add_stop),
    ("GET", "/trips/finish", finish),
    ("POST", "/trips/finish", save_trip),
    ("GET", "/trips/([0-9]{1,6})", trip),
]

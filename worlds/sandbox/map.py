"""The map: places of several kinds, what is near them, directions between them, a list of saved places, trips."""

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .page import (LOGIN_ROUTES, NOT_FOUND, Page, Redirect, error, fact, field, form, items, link, members_only,
                   navigation, paginate, press, search_box, select, table, unfit)
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
        for adjective, rating in zip(rng.sample(ADJECTIVES, count), ratings):
            name, spot, street = f"{adjective} {kind}", next(spots), f"{rng.choice(SCENERY)} street"
            places[slug_of(name)] = Place(slug_of(name), name, kind, spot % SIDE, spot // SIDE, rng.random() < 0.1,
                                          street, str(rng.randint(1000, 9999)), rng.randint(6, 12), rating / 10)
    saved = {(people[0], slug): f"a {rng.choice(ADJECTIVES)} one" for slug in rng.sample(sorted(places), 3)}
    return Map({user: Account(user, password(rng)) for user in people}, places, saved, {}, {})


def nav(user: str | None) -> str:
    links = [("home", ROOT), ("directions", "/map/directions"), ("saved places", "/map/saved"), ("trips", "/map/trips")]
    return navigation(ROOT, user, links) + search_box(ROOT)


def distance(a: Place, b: Place) -> int:
    return abs(a.x - b.x) + abs(a.y - b.y)


def link_to(place: Place) -> str:
    return link(place.name, f"/map/place/{place.slug}")


# ---- places
def home(atlas, request):
    kinds = items(link(kind, f"/map/kind/{kind}") for kind in PLACES)
    return Page("map", "<h1>map</h1><h2>kinds of places</h2>" + kinds)


def kind(atlas, request, name):
    if name not in PLACES:
        return NOT_FOUND
    order = request.query.get("sort", "name")
    found = sorted((p for p in atlas.places.values() if p.kind == name),
                   key=lambda p: (-p.rating if order == "best" else 0, p.name))
    shown, links = paginate(found, request, 5, f"/map/kind/{name}")
    rows = [(link_to(p), p.street, f"{p.rating} of 5") for p in shown]
    return Page(name, f"<h1>{name}</h1>" + form(select("sort", ("name", "best"), order), submit="apply", method="get")
                + table(("place", "street", "rating"), rows) + links)


def search(atlas, request):
    wanted = request.query.get("q", "").lower().split()
    found = [p for p in atlas.places.values() if wanted and set(wanted) <= set(f"{p.name} {p.street}".split())]
    shown, links = paginate(found, request, PER_PAGE, "/map/search")
    return Page("search", f"<h1>search</h1><p>{len(found)} found</p>"
                + items(f"{link_to(p)} {p.street}" for p in shown) + links)


def place(atlas, request, slug, problem=""):
    p = atlas.places.get(slug)
    if p is None:
        return NOT_FOUND
    note = atlas.saved.get((request.user, slug))
    save = form(field("note", request.form.get("note", note or "")), submit="save place") if request.user else ""
    reach = "<p>only a ferry goes there</p>" if p.ferry else ""
    return Page(p.name, f"<h1>{p.name}</h1>{error(problem)}" + fact("kind", p.kind) + fact("street", p.street)
                + fact("phone", p.phone) + fact("opens at", p.opens) + fact("rating", p.rating) + reach
                + f'<p>{link("nearby", f"/map/place/{slug}/nearby")}</p>' + save)


def nearby(atlas, request, slug):
    here, chosen = atlas.places.get(slug), request.query.get("kind", "any")
    if here is None:
        return NOT_FOUND
    others = sorted((p for p in atlas.places.values() if p != here and chosen in ("any", p.kind)),
                    key=lambda p: (distance(here, p), p.name))
    shown, links = paginate(others, request, PER_PAGE, f"/map/place/{slug}/nearby")
    rows = [(link_to(p), p.kind, f"{distance(here, p)} km") for p in shown]
    return Page("nearby", f"<h1>nearby</h1><p>near {here.name}</p>"
                + form(select("kind", ("any", *PLACES), chosen), submit="filter", method="get")
                + table(("place", "kind", "distance"), rows) + links)


# ---- directions
def steps(a: Place, b: Place) -> list[str]:
    legs = [(b.x - a.x, "east", "west"), (b.y - a.y, "north", "south")]
    way = [f"go {abs(km)} km {there if km > 0 else back}" for km, there, back in legs if km]
    return [*way, f"arrive at {b.name}"]


def directions(atlas, request):
    start, end, by = (request.query.get(key, "").strip().lower() for key in ("from", "to", "by"))
    form_ = form(field("from", start), field("to", end), select("by", SPEED, by), submit="find route", method="get")
    if not request.query:
        return Page("directions", f"<h1>directions</h1>{form_}")
    named = {p.name: p for p in atlas.places.values()}
    problem = next((f"no place is called {name or 'nothing'}" for name in (start, end) if name not in named), "")
    if problem or by not in SPEED:
        return Page("directions", f'<h1>directions</h1>{error(problem or "choose how to go")}{form_}')
    a, b = named[start], named[end]
    if a.ferry or b.ferry:
        return Page("directions", f"<h1>directions</h1>{form_}<p>there is no route : only a ferry goes there</p>")
    km = distance(a, b)
    return Page("directions", f"<h1>directions</h1>{form_}<h2>from {a.name} to {b.name}</h2>"
                + fact("distance", f"{km} km") + fact("time", f"{km * SPEED[by]} minutes") + items(steps(a, b)))


# ---- saved places
@members_only
def saved(atlas, request):
    mine = [(atlas.places[slug], note) for (user, slug), note in atlas.saved.items() if user == request.user]
    rows = [(link_to(p), f'<span id="{p.slug}">{escape(note)}</span>',
             press(f"remove {p.name}", f"/map/place/{p.slug}/remove", "remove this place?")) for p, note in mine]
    return Page("saved places", "<h1>saved places</h1>" + table(("place", "note", ""), rows))


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
    return Page("trips", f'<h1>trips</h1><p>{link("new trip", "/map/trips/new")}</p>'
                + items(link(trip.name, f"/map/trips/{trip.number}") for trip in mine))


@members_only
def trip_form(atlas, request, problem=""):
    return Page("new trip", f"<h1>new trip</h1><p>step 1 of 3</p>{error(problem)}"
                + form(field("name", request.form.get("name", "")), submit="continue"))


@members_only
def new_trip(atlas, request):
    name = request.form.get("name", "").strip()
    if problem := unfit("name", name):
        return trip_form(atlas, request, problem)
    atlas.drafts[request.user] = Trip(max(atlas.trips, default=9) + 1, request.user, name, (), "")
    return Redirect("/trips/stops")


@members_only
def stops(atlas, request, problem=""):
    draft = atlas.drafts.get(request.user)
    if draft is None:
        return Redirect("/trips/new")
    return Page("stops", f"<h1>stops</h1><p>step 2 of 3</p>{error(problem)}" + items(map(escape, draft.stops))
                + form(field("stop", request.form.get("stop", "")), submit="add stop")
                + f'<p>{link("continue", "/map/trips/finish")}</p>')


@members_only
def add_stop(atlas, request):
    stop, draft = request.form.get("stop", "").strip().lower(), atlas.drafts.get(request.user)
    if draft is None or slug_of(stop) not in atlas.places or len(draft.stops) == 9:
        return stops(atlas, request, "write the name of a place; a trip has at most 9 stops")
    atlas.drafts[request.user] = draft._replace(stops=(*draft.stops, stop))
    return Redirect("/trips/stops")


@members_only
def finish(atlas, request, problem=""):
    draft = atlas.drafts.get(request.user)
    if draft is None or len(draft.stops) < 2:
        return stops(atlas, request, "a trip has at least 2 stops")
    return Page("finish", f"<h1>finish</h1><p>step 3 of 3</p>{error(problem)}" + items(map(escape, draft.stops))
                + form(select("by", ("choose", *SPEED)), submit="save trip"))


@members_only
def save_trip(atlas, request):
    draft = atlas.drafts.get(request.user)
    if draft is None or len(draft.stops) < 2 or request.form.get("by") not in SPEED:
        return finish(atlas, request, "choose how to go")
    atlas.trips[draft.number] = atlas.drafts.pop(request.user)._replace(by=request.form["by"])
    return Redirect(f"/trips/{draft.number}")


@members_only
def trip(atlas, request, number):
    t = atlas.trips.get(int(number))
    if t is None or t.user != request.user:
        return NOT_FOUND
    visited = [atlas.places[slug_of(stop)] for stop in t.stops]
    km = sum(distance(a, b) for a, b in zip(visited, visited[1:]))
    return Page("trip", f'<h1 id="name">{escape(t.name)}</h1><div id="stops">{items(map(link_to, visited))}</div>'
                + fact("by", t.by) + fact("distance", f"{km} km"))


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

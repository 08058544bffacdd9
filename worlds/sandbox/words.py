"""The vocabulary of the embedded websites: every name on them is drawn from these lists.

No word stands in two lists, and no noun, topic, city or forum is one of the sites' own labels, so that a name in an
instruction means one thing on a page. Names are two words, an adjective and a noun; within one world no two names
share their noun.
"""

ADJECTIVES = """amber ancient black blue brave bright broken brown calm clever cold cosy crimson curly dusty early
fancy gentle giant golden green grey heavy hollow humble icy jolly kind lazy light lucky mellow mighty modern narrow
noble odd olive pale plain polite proud purple quick quiet rapid red round royal rusty shiny silent silver simple
smooth soft solid spare steady striped sunny sweet swift tall tiny tough velvet warm white wild wise yellow
young""".split()

CATEGORIES = {  # the shop's departments and what each of them sells
    "kitchen": "bowl grater jar kettle ladle mug pan plate spoon whisk".split(),
    "garden": "barrow bench fence gnome hose pot rake shovel spade trowel".split(),
    "office": "binder chair desk eraser folder lamp marker pencil ruler stapler".split(),
    "music": "banjo cello drum flute guitar harp piano tuba viola zither".split(),
    "sports": "ball glove helmet kayak net paddle puck racket saddle skate".split(),
    "travel": "anorak backpack canteen compass hammock lantern parka suitcase tent torch".split(),
}
NOUNS = [noun for nouns in CATEGORIES.values() for noun in nouns]

FORUMS = "books cooking films history nature science".split()

TOPICS = """answer apple battle bread bridge camera castle cheese chapter cloud comet dragon engine farmer fossil
goose hero honey hunter insect island jungle kitten lizard magnet meadow monkey mystery novel onion orchid owl palace
pasta penguin pepper pirate planet poem potato puzzle recipe robot rocket salad soldier soup spider stew story sultan
temple theory tiger turtle village volcano whale wizard wolf""".split()  # what posts are about

SCENERY = """autumn beach breeze brook canyon cliff coast dawn desert dusk fjord flood fog forest frost glacier harbor
hill lagoon lake marsh mist moon ocean pebble pond prairie rain reef ridge river shore sky snow spring star storm
summer sunset thunder valley wave wind winter""".split()  # what is typed ends in one, so no page shows it before

NAMES = """ada amir anna bela bruno carl cleo dana dora elif emil enzo fritz gita hana hugo ines ivan jana jens kaya
kira lars lena luca mara milo mira nadia nils noor olga omar otto pia rosa sami tara theo uma vera yara yusuf
zoe""".split()

CITIES = """athens basel berlin bogota cairo cork dakar delhi dublin geneva havana hanoi kyoto lagos lima lisbon lyon
madrid milan nairobi osaka oslo paris perth porto prague quito riga rome seoul sofia tallinn tokyo tunis turin vienna
warsaw zagreb""".split()

PLACES = "cafe hotel library museum park station".split()  # kinds of places on the map

MONTHS = "january february march april june july august september october november december".split()


def names(rng, nouns: list[str], count: int, adjectives: list[str] = ADJECTIVES) -> list[str]:
    """`count` two-word names with distinct nouns; adjectives repeat, so the first word alone identifies nothing."""
    return [f"{rng.choice(adjectives)} {noun}" for noun in rng.sample(nouns, count)]


def password(rng) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(SCENERY)}"


def phrase(rng) -> str:
    """A text for somebody to type."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}"

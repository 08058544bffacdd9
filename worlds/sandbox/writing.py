"""What exercises are written with: random content, elements as an observation shows them, responses."""
from random import Random
from typing import NamedTuple

from .vocabulary import FILLERS, MENUS, MORE, OTHER
from .words import ADJECTIVES, CITIES, MONTHS, NAMES, NOUNS, SCENERY, TOPICS

THINGS = NOUNS + TOPICS


class Element(NamedTuple):
    kind: str
    name: str
    value: str = ""      # what a control holds
    options: tuple = ()  # of a select
    beside: str = ""     # what stands behind it on its line
    to: tuple = ()       # where it leads, on a website
    number: int = -1

    def html(self) -> str:
        shown = f"{self.value} ({' | '.join(self.options)})" if self.options else self.value
        text = f"<{self.kind}>{self.name} {self.number}{shown and ' = ' + shown}</{self.kind}>"
        return f"{text} {self.beside}" if self.beside else text


# ---- content


def draw(rng: Random, shares: dict):
    return rng.choices(list(shares), list(shares.values()))[0]


def maybe(rng: Random, share: float, value, otherwise=""):
    return value if rng.random() < share else otherwise


def unknown(rng: Random) -> str:
    """A word that is none of the vocabulary: one token a letter."""
    syllable = lambda: rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiouy")
    word = "".join(syllable() for _ in range(rng.randint(1, 3))) + rng.choice("nrstlxm ").strip()
    return rng.choice((word, word, word, f"{word}{rng.randint(1, 99)}", f"{word}-{rng.choice(NOUNS)}"))


def number(rng: Random) -> str:
    """Of one to four digits, each length as often."""
    digits = rng.randint(1, 4)
    return str(rng.randint(10 ** (digits - 1), 10 ** digits - 1))


def name_maker(rng: Random, size: int):
    """Draws two-word names from so few words that both words of a name occur in others."""
    firsts = rng.sample(ADJECTIVES, max(2, size // 2))
    seconds = rng.sample(THINGS, max(2, size // 2 + 1))
    if rng.random() < 0.15:
        seconds = seconds[:1] + [unknown(rng) for _ in seconds[1:]]
    return lambda: f"{rng.choice(firsts)} {rng.choice(seconds)}"


def phrase(rng: Random) -> str:
    """A text to type: one to six words, or a number."""
    words = ADJECTIVES + SCENERY + TOPICS + OTHER + MORE
    return rng.choice((lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}",
                       lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}",
                       lambda: rng.choice(NAMES + CITIES + ADJECTIVES + SCENERY),
                       lambda: number(rng), lambda: unknown(rng),
                       lambda: " ".join(rng.sample(words, rng.randint(2, 6))),
                       lambda: f"{rng.choice(words)} {unknown(rng)}"))()


def quoted(rng: Random, text: str) -> str:
    """In quotes, unless it is short and plain enough to end by itself."""
    plain = len(text.split()) < 3 and not {*FILLERS, *OTHER, *MORE} & {*text.split()}
    return text if plain and rng.random() < 0.3 else f'"{text}"'


def kind_of_value(rng: Random):
    """Draws what stands beside a name or behind a label, all of one kind."""
    states = rng.choice(list(MENUS.values())).split()
    return rng.choice((lambda: f"${number(rng)}", lambda: f"${rng.randint(1, 99)}",
                       lambda: number(rng), lambda: str(rng.randint(0, 99)),
                       lambda: rng.choice(states), lambda: f"{rng.randint(1, 31)} {rng.choice(MONTHS)}",
                       lambda: rng.choice(NAMES), lambda: rng.choice(CITIES), lambda: unknown(rng),
                       lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}"))


def some_value(rng: Random) -> str:
    return kind_of_value(rng)()


# ---- responses


def element_line(e: Element) -> str:
    return f"# Element: {e.name} {e.number}"


def act(thought: str, action: str, e: Element, argument: str | None = None) -> str:
    words = "" if argument is None else f'argument="{argument}", '
    call = f'do(action="{action}", {words}element="{e.number}")'
    return f"<think>{thought}</think><answer>{element_line(e)}\n{call}</answer>"


def click(e: Element) -> str:
    return act(f"click {e.name}", "Click", e)


def say(text: str, thought: str = "") -> str:
    """Thoughts quote the page up to the answer: reading is then copying on from a name, as pointing is."""
    return f'<think>{thought or text}</think><answer>exit(message="{text}")</answer>'

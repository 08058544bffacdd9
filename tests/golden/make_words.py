"""Stores random texts and page sources with the words that nltk 3.8.1 cuts them into, for the tests.

Texts in which we differ for a reason that worlds/words.py names are left out.

    python tests/golden/make_words.py      needs nltk 3.8.1 and its model "punkt"
"""
import json
import random
import re
from pathlib import Path

import nltk

LETTERS = "ab1 .,:;!?'\"`()[]{}<>-/\n*@#$%&’“”«»_\xa0"
PIECES = """lamp cat's don't they're i'll i'd we've cannot gonna wanna lemme gimme more'n d'ye 'tis inc. st.
    p.m. u.s. e.g. c. b. 5. 3.5 1,000 10:30 170/171 state-of-art $7.50 5% #3 a@b.c http://h:80/a?b=1&c=2
    ... .. . , : ; ! ? -- - – — ( ) [ ] { } < > " ' '' `` ` « » “ ” ‘ ’ * & (lamps.) ::foo ,,foo 'yjlou'
    o'brien o'b é 2020–present u.k.) 12-inc. n't x. "so."
    <p> </p> <td> </td> <a href="/x."> </a> <b>lamp.</b> (foo.)</p> &amp; &nbsp; <input value="5."> <br>""".split()
PAGE = """<html><head><title>{}</title><script>var a = "{}";</script></head>\n<body class="page.">
<h1>{}.</h1><p>{}</p>\n<p>({}.)</p><p>it is '{}' now</p>\n<td>{}</td><a href="/{}">{}, {}</a></body></html>"""


def texts(rng):
    for _ in range(200):
        yield "".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 16)))
    for _ in range(260):
        yield "".join(rng.choice(PIECES) + rng.choice(["", " ", " ", "\n"]) for _ in range(rng.randrange(1, 10)))
    for _ in range(25):
        yield PAGE.format(*(" ".join(rng.choices(PIECES, k=3)) for _ in range(10)))


named = re.compile(r"""(?<!\S)[.?!][)";}\]*:@'({\[?!]|'tis'twas""")
assert nltk.__version__ == "3.8.1"
rows = [[text.lower(), " ".join(nltk.word_tokenize(text.lower()))] for text in texts(random.Random(0))
        if not named.search(text)]
text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
(Path(__file__).parent / "words.json").write_text(f"[{text}]\n")

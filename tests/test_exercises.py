"""The small base's vocabulary and exercises."""
import json
import math
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from compress import PLACEHOLDER, Chat, replay, trajectory_rows
from model import load
from rollout import parse
from worlds import sandbox
from worlds.sandbox import exercises as ex
from worlds.sandbox import experts, vocabulary, weights, writing
from worlds.sandbox.websites import Visit

BASE = Path(ex.__file__).parent.parent / "base"
ANY_TEXT = [
    "",
    " ",
    "red lamp 12",
    "  two  spaces\n\n\tand a tab ",
    "Ünïcödé 日本語 🙂",
    "a<b>c</d >&amp;<|im_end|>",
    "\x00\x7f",
    "x" * 300,
    '<a>order 17 <7></a> $178 | 007',
    'do(action="Click", element="5")',
    '# Element: a 1\n# Note: b',
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(BASE / "tokenizer.json"))


def pieces(tokenizer, text) -> list[str]:
    """The text of each token."""
    return [tokenizer.decode([i]) for i in tokenizer.encode(text).ids]


@pytest.mark.parametrize("text", ANY_TEXT)
def test_any_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_word_carries_its_space_and_numbers_stand_alone(tokenizer):
    shown = pieces(tokenizer, "<a>red lamp <12></a> $178\n")
    assert shown == ["<a>", "red ", "lamp ", "<12>", "</a> ", "$", "17", "8", "\n"]


def test_the_committed_tokenizer_is_what_the_code_builds(tokenizer):
    built = vocabulary.tokenizer()
    assert json.loads(built.to_str()) == json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint that has learned nothing yet."""
    path = tmp_path_factory.mktemp("exercises") / "start"
    vocabulary.write_base(path, seed=0)
    return path


def test_a_new_base_has_the_committed_files_and_overwrites_nothing(start):
    for name in ("tokenizer.json", "tokenizer_config.json", "agent.json", "config.json"):
        new = json.loads((start / name).read_text())
        committed = json.loads((BASE / name).read_text())
        assert new.items() <= committed.items()  # the committed config.json also says how it was trained
    with pytest.raises(FileExistsError):
        vocabulary.write_base(start)


def test_initial_weights_depend_on_the_seed_alone():
    first = weights.initial_weights(50, seed=1)
    again = weights.initial_weights(50, seed=1)
    other = weights.initial_weights(50, seed=2)
    for name in first:
        assert torch.equal(first[name], again[name])
    embeddings = "model.embed_tokens.weight"
    assert not torch.equal(first[embeddings], other[embeddings])


def test_the_weights_start_as_gpt2s_do(start):
    """Nothing is laid out by hand: normal with 0.02, smaller where a block writes into the residual stream."""
    for name, weight in load(start).state_dict().items():
        expected = 0.02
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            expected = 0.02 / 12 ** 0.5
        if name.endswith("bias"):
            assert not weight.any()
        elif "norm" in name:
            assert (weight == 1).all()
        else:
            assert abs(weight.std() / expected - 1) < 0.02, name
            assert abs(weight.mean()) < 0.05 * expected, name


def test_an_id_is_one_token_right_behind_its_name(tokenizer):
    """With a token between name and id, a model of this size does not learn to look ids up."""
    written = vocabulary.ID.format(12)
    for line in ("<a>red lamp {}</a>", "# Element: red lamp {}\n"):
        shown = pieces(tokenizer, line.format(written))
        behind = shown.index("lamp ") + 1
        assert shown[behind] == written
    text = vocabulary.with_id("red lamp", 1234)
    assert tokenizer.decode(tokenizer.encode(text).ids) == "red lamp <1234>"


def records_in(manner, count=60, **how) -> list[dict]:
    rng = Random(f"manner {manner}")
    return [ex.exercise(rng, manner=manner, **how) for _ in range(count)]


def responses_in(manner, count=60) -> list[str]:
    found = []
    for record in records_in(manner, count):
        for turn in record["turns"]:
            found.append(turn["response"])
    return found


def test_a_row_says_how_it_is_written():
    for manner in vocabulary.MANNERS:
        for compress in (True, False):
            [record] = records_in(manner, 1, kind="visit", compress=compress)
            assert record["agent"] == vocabulary.agent(manner, compress)
    systems = [agent["system"] for agent in vocabulary.MANNERS.values()]
    assert len(set(systems)) == 3


def test_the_manners_think_as_they_say():
    """The same page, the same action; only the thought differs."""
    for response in responses_in("none"):
        assert response.startswith(("# ", "exit(", "do("))
        assert "think" not in response
    for response in responses_in("long", 200):
        written = re.match(r"<think>(.*)</think><answer>.*</answer>$", response, re.DOTALL)
        parts = written[1].split(" . ")
        assert len(parts) >= 4

    visit = Visit(Random(3))
    actions = [parse(moment.action) for moment in visit.moments]
    for manner in ("short", "none", "long"):
        record = ex.record(Random(0), "visit", visit.task, visit.moments, manner=manner)
        turns = record["turns"]
        assert [parse(turn["response"]) for turn in turns] == actions
        if manner == "long":
            for turn, moment in zip(turns, visit.moments):
                assert f"{moment.thought}</think>" in turn["response"]


def test_long_thoughts_are_long_and_say_what_is_there_and_what_is_missing(tokenizer):
    lengths = []
    for response in responses_in("long", 200):
        thought, *_ = response.split("</think>")
        lengths.append(len(tokenizer.encode(thought).ids))
    lengths.sort()
    middle = len(lengths) // 2
    assert 60 <= lengths[middle] <= 140
    one_in_twenty = math.ceil(len(lengths) / 20)
    assert lengths[-one_in_twenty] <= 180

    moment = writing.Moment(
        page="title: shop\n<a>red lamp <1></a>",
        thought="click red lamp",
        action="",
        task="buy red lamp in kitchen",
        wanted=["red lamp", "kitchen"],
    )
    before = ["click home", "click shop", "click more"]
    parts = writing.Voice(Random(0)).think(moment, before).split(" . ")
    assert len(parts) == 7
    task, _, page, shown, missing, told, thought = parts
    assert task.endswith("buy red lamp in kitchen")
    assert page.endswith("shop")
    assert "red lamp" in shown
    assert "kitchen" not in shown
    assert "kitchen" in missing
    assert "red lamp" not in missing
    assert told.endswith("click shop , click more")
    assert thought.endswith(": click red lamp")


def is_one_token(tokenizer, text) -> bool:
    return len(tokenizer.encode(text).ids) == 1


def test_every_word_of_a_long_thought_is_one_token(tokenizer):
    words = []
    for wordings in writing.WORDINGS.values():
        for wording in wordings:
            words += wording.split()
    for agent in vocabulary.MANNERS.values():
        words += agent["system"].replace(".", "").split()
    for word in words:
        if word.isalpha():
            assert is_one_token(tokenizer, word + " "), word


def test_pages_stay_in_whole_histories_and_leave_compressed_ones(tokenizer):
    """bc.py scores a row as its own agent.json would have it, whatever the checkpoint's says."""
    chat = Chat(tokenizer, "the checkpoint's", think=True, compress=True)
    records = records_in("none", 20, kind="visit")
    record = next(record for record in records if len(record["turns"]) > 2)
    pages = [turn["observation"] for turn in record["turns"]]
    page = next(page for page in pages if page)
    for compress in (True, False):
        record["agent"] = vocabulary.agent("none", compress)
        trajectory = replay(chat, record)
        own_chat = chat.for_task(trajectory.task)
        row = trajectory_rows(own_chat, trajectory)[-1]
        last = tokenizer.decode(row.ids, skip_special_tokens=False)
        assert "Do not think." in last
        assert "the checkpoint's" not in last
        assert (page in last) == (not compress)
        assert (PLACEHOLDER in last) == compress

    del record["agent"]
    trajectory = replay(chat, record)
    assert chat.for_task(trajectory.task) is chat


def test_every_word_of_every_instruction_is_one_token(tokenizer):
    words = set()
    for split in ("train", "test", "test-unseen"):
        for task in sandbox.tasks(split):
            words.update(re.findall("[a-z]+", task["intent"]))
    broken = set()
    for word in words:
        for form in (word, word + " "):
            if not is_one_token(tokenizer, form):
                broken.add(word)
    assert not broken, "add them to vocabulary.OTHER and train the base again"


def test_responses_name_what_is_on_the_page():
    """What is called by id carries that name and id on the page. What is answered stands there or in the task."""
    for record in islice(ex.exercises(7, visits=0), 300):
        kinds = record["template"].split("+")
        for turn, kind in zip(record["turns"], kinds, strict=True):
            assert_named_on_its_page(turn)
            if kind not in ex.FULL:
                continue
            call = parse(turn["response"])
            if kind in ("fact", "beside", "value"):
                assert call.argument in turn["observation"]
            elif call.argument is not None and kind != "present":
                assert call.argument in record["intent"]


def assert_named_on_its_page(turn):
    any_id = vocabulary.ID.format("(.+)")
    for name, number in re.findall(rf"# Element: (.*) {any_id}$", turn["response"], re.M):
        named = re.escape(vocabulary.with_id(name, number))
        assert re.search(rf">{named}( = [^<]*)?</", turn["observation"])


def test_visits_act_on_their_pages_and_end_with_an_answer():
    counted = Counter()
    for record in islice(ex.exercises(8, visits=1), 300):
        turns = record["turns"]
        for turn in turns:
            if turn["observation"] is None:  # a slip stands in the history and is not learned
                counted["slips"] += 1
            else:
                assert_named_on_its_page(turn)

        assert len(turns) <= 16
        last = parse(turns[-1]["response"])
        assert last.name == "exit"
        if last.argument in ("done", "N/A"):
            counted[last.argument] += 1
        else:
            counted["read"] += 1
            there = last.argument in turns[-1]["observation"]
            intent = record["intent"]
            assert there or "list" in intent or "first page" in intent
    for kind in ("slips", "done", "N/A", "read"):
        assert counted[kind] > 15


def pattern_of(task) -> str:
    """What matches all instructions of a task's template."""
    template = re.escape(task["intent_template"])
    return re.sub(r"\\{\\{\w+\\}\\}", ".+", template)


def test_same_seed_same_rows_and_no_task_among_them():
    rows = list(islice(ex.exercises(3), 400))
    again = list(islice(ex.exercises(3), 400))
    other = list(islice(ex.exercises(4), 400))
    assert rows == again
    assert again != other

    tasks = sandbox.tasks("full-train") + sandbox.tasks("full-test-unseen")
    for task in tasks[:50]:
        assert re.fullmatch(pattern_of(task), task["intent"])
    patterns = {pattern_of(task) for task in tasks}
    for row in rows:
        for pattern in patterns:
            assert not re.search(pattern, row["intent"])


@pytest.mark.parametrize("phrase", [
    r"all is done",
    r".+ is in .+ so click .+",
    r".+ is not here so click .+",
    r"click .+",
    r"type .+ into .+",
    r"choose .+ as .+",
    r"search for .+",
])
def test_experts_think_in_the_phrases_of_the_exercises(phrase):
    """In words of their own, cloning undid the reading: 47% instead of 60%."""
    rng = Random("phrases")
    thoughts = []
    for _ in range(200):
        for moment in Visit(rng).moments:
            thoughts.append(moment.thought)
    assert any(re.fullmatch(phrase, thought) for thought in thoughts)

    source = Path(experts.__file__).read_text()
    filled_in = re.sub(r"\{[^}]*\}", "x", source)
    texts = re.findall('"([^"]*)"', filled_in)
    assert any(re.fullmatch(phrase, text) for text in texts)

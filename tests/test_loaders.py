"""Damaged files: every reader gives a good value, or one sentence that names the file."""
import copy
import json
import random
import time

import pytest
import torch
from conftest import GOOD, make_task, target, tiny_config, tiny_model
from test_bc import RECORD

import evaluate
import mgrpo
from bc import read_demonstrations
from compress import open_chat, trajectory_rows
from model import load, load_tokenizer, save
from run import load_training, open_run, report, save_training
import worlds
from worlds import load_tasks, webarena
from worlds.browser import sites_of

# What a value is replaced by.
FOREIGN = [
    None,
    True,
    False,
    0,
    -1,
    3,
    0.5,
    "",
    "a",
    "../../etc/passwd",
    "é\u202e",
    "x" * 100,
    [],
    {},
    [None],
    [[]],
    {"": {}},
    [1] * 1000,
    {"a": {"b": [None, "c"]}},
]


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    inner = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, child in inner:
        place = (*path, key)
        yield place
        yield from places(child, place)


def change(value, rng):
    """Removes a value somewhere inside a JSON value, or puts another in its place."""
    value = copy.deepcopy(value)
    every = list(places(value))
    *path, last = rng.choice(every)
    parent = value
    for key in path:
        parent = parent[key]
    if rng.random() < 0.3:
        del parent[last]
    else:
        parent[last] = rng.choice(FOREIGN)
    return value


def damage(data: bytes, rng) -> bytes:
    """What disks, networks and copies do to a file: cut it, flip bits, lose or repeat or zero a block."""
    at = rng.randrange(len(data) + 1)
    length = rng.randrange(1, 64)
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 9)):
            place = rng.randrange(len(data))
            bit = rng.randrange(8)
            flipped[place] ^= 1 << bit
        return bytes(flipped)
    blocks = [
        b"",                       # lost
        data[at:at + length] * 2,  # repeated
        bytes(length),             # zeroed
        rng.randbytes(length),     # overwritten
    ]
    return data[:at] + blocks[kind - 2] + data[at + length:]


def change_json(text, rng) -> str:
    return json.dumps(change(json.loads(text), rng))


def change_header(data: bytes, rng) -> bytes:
    """A safetensors file, whose header then lies about its tensors."""
    size = int.from_bytes(data[:8], "little")
    header = data[8:8 + size]
    tensors = data[8 + size:]
    changed = change_json(header, rng).encode()
    return len(changed).to_bytes(8, "little") + changed + tensors


def broken(data: bytes, rng) -> bytes:
    """A damaged file or, where it is JSON or begins with JSON, one with other values."""
    if rng.random() < 0.4:
        return damage(data, rng)
    if data[:1] not in b"{[":
        return change_header(data, rng)
    text = data.decode()
    lines = [text]
    if "\n{" in text:  # one JSON value a line
        lines = text.splitlines()
    i = rng.randrange(len(lines))
    lines[i] = change_json(lines[i], rng)
    return "\n".join(lines).encode() + b"\n"


def open_checkpoint(directory):
    open_chat(directory, "").message("user", "a red lamp")
    load(directory)


def open_tokenizer(directory):
    tokenizer = load_tokenizer(directory)
    encoded = tokenizer.encode("a red lamp <|im_end|> é 5")
    tokenizer.decode(encoded.ids)


def resume(directory):
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    load_training(directory / "state", model, optimizer)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    model(tokens).sum().backward()
    optimizer.step()


def clone(directory):
    chat = open_chat(directory, "")
    path = str(directory / "demos.jsonl")
    for trajectory in read_demonstrations(path, chat):
        trajectory_rows(chat, trajectory)


def play(directory):
    sites = {name: "http://127.0.0.1:1" for name in webarena.HOSTS}
    path = str(directory / "tasks.json")
    tasks = load_tasks(path, sites, reach=False)
    sites_of(tasks, "")
    worlds.validate(path)


def continue_run(directory):
    cfg = mgrpo.Config(out=str(directory))
    run = open_run(cfg, torch.device("cpu"), first_step=2)
    run.begin(tiny_config(), first_step=2)
    report(directory)


def compare(directory):
    evaluate.compare([str(directory)])


CASES = {  # the file that is broken -> its reader
    "config.json": open_checkpoint,
    "tokenizer.json": open_tokenizer,
    "agent.json": open_checkpoint,
    "model.safetensors": open_checkpoint,
    "state/00001/state.json": resume,
    "state/00001/part-0.safetensors": resume,
    "demos.jsonl": clone,
    "tasks.json": play,
    "metrics.jsonl": continue_run,
    "trajectories.jsonl": continue_run,
    "summary.json": compare,
}
WRITTEN = ("config.json", "metrics.jsonl", "trajectories.jsonl")  # by continue_run


def write_lines(path, rows):
    """A .jsonl file."""
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def task_of_every_kind() -> dict:
    """A task with all the checks that a task can have."""
    pages = [
        target("last", "", must_include=["x"]),
        target("func:reddit_get_post_url('__last_url__')", "", exact_match="y"),
    ]
    program_html = []
    for task in pages:
        program_html += task["eval"]["program_html"]
    return make_task(
        eval_types=["string_match", "url_match", "program_html"],
        reference_url="__SHOPPING__/x",
        url_note="GOLD in PRED",
        reference_answers={"must_include": ["a"], "required_values": ["> 3"]},
        program_html=program_html,
    )


@pytest.fixture(scope="module")
def good(tokenizer, tmp_path_factory):
    """{name: content} of one good file of every kind."""
    path = tmp_path_factory.mktemp("good")

    # 1) A checkpoint and the state of its training.
    model = tiny_model()
    save(model, path, settings={"max_turns": 3})
    tokenizer.save(str(path / "tokenizer.json"))
    agent = {"system": "You browse.", "think": True, "compress": True}
    (path / "agent.json").write_text(json.dumps(agent))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    progress = {"step": 3, "config": {"lr": 1e-3, "G": 8}}
    save_training(path / "state", model, optimizer, progress)

    # 2) Demonstrations and tasks.
    write_lines(path / "demos.jsonl", [RECORD, RECORD])
    tasks = [GOOD, task_of_every_kind() | {"task_id": 8}]
    (path / "tasks.json").write_text(json.dumps(tasks))

    # 3) What a run writes.
    steps = []
    for i in range(4):
        steps.append({"step": i, "reward": 0.5, "kl": None})
    write_lines(path / "metrics.jsonl", steps)
    more = {
        "split": "train",
        "status": "ok",
        "checks": [],
        "answer": None,
        "member": 0,
    }
    trajectory = RECORD | more
    trajectories = [trajectory | {"step": i} for i in range(4)]
    write_lines(path / "trajectories.jsonl", trajectories)
    figures = {
        "success_rate": 0.5,
        "ci95": [0.1, 0.9],
        "n": 4,
        "turns": 2.0,
    }
    summary = figures | {"splits": {"sandbox:test": figures}}
    (path / "summary.json").write_text(json.dumps(summary))

    for read in set(CASES.values()):
        read(path)
    contents = {}
    for file in path.rglob("*"):
        if file.is_file():
            name = str(file.relative_to(path))
            contents[name] = file.read_bytes()
    return contents


def fault_of(complaint: str, directory) -> str:
    """What is wrong with a reader's sentence; "" if nothing is."""
    if "\n" in complaint or str(directory) not in complaint or len(complaint) > 600:
        return f"says {complaint[:300]!r}"
    return ""


@pytest.mark.parametrize("variants", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_gives_one_sentence_that_names_it(name, variants, good, tmp_path, capfd):
    """And it hangs no reader: each takes less than 5 s of CPU."""
    read = CASES[name]
    rng = random.Random(name)
    accepted = 0
    complaints = []
    for number in range(variants):
        # 1) Good files but for one. After the first variant, most are there already.
        for file, data in good.items():
            rewritten = read is continue_run and file in WRITTEN
            if number == 0 or rewritten:
                path = tmp_path / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        (tmp_path / name).write_bytes(broken(good[name], rng))

        # 2) What the reader says.
        problem = ""
        began = time.process_time()
        try:
            read(tmp_path)
            accepted += 1
        except ValueError as error:
            problem = fault_of(str(error), tmp_path)
        except BaseException as error:  # a panic in Rust is no Exception
            problem = f"raises {error!r:.300}"
        took = time.process_time() - began
        if took > 5:
            problem = "hangs"
        if problem:
            complaints.append(f"variant {number} {problem}")

    capfd.readouterr()
    assert not complaints, "\n".join(complaints)
    assert accepted < variants * 0.9  # the variants are broken enough to test something

"""Contexts, rows and packing: trained on exactly what the policy saw."""
import itertools
import json
import random
import re
import shutil

import pytest
import torch
from conftest import ROOT, SPECIAL, TEXT, pad, tiny_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import lengths
import savings
from compress import (CUT, FORMATS, PLACEHOLDER, Chat, Row, Trajectory, Turn, action_text, context, fit_page,
                      format_response, messages, micro_batches, open_chat, pack, replay, system_prompt,
                      to_record, trajectory_rows, trunk)
from model import load_tokenizer, token_logprobs


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.")


def make_trajectory(chat, n_turns=3, seed=0, ended=True):
    generator = torch.Generator().manual_seed(seed)
    task = {"intent": "add the red lamp to the cart", "task_id": 0, "sites": ["shopping"]}
    trajectory = Trajectory(task)
    for k in range(n_turns):
        page = f"title: page {k}\n<a>red lamp <{k}></a> ${k}"
        message_ids = chat.user_ids(task, k, page)
        ids = torch.randint(3, 300, (5 + k,), generator=generator).tolist()
        response_ids = list(ids)
        if ended:
            response_ids.append(chat.end_id)
        logps = [-1.0] * len(response_ids)
        response = chat.decode(ids)
        turn = Turn("http://x/", page, message_ids, response_ids, logps, response, ended)
        trajectory.turns.append(turn)
    return trajectory


def model_for(chat):
    return tiny_model(vocab_size=chat.tokenizer.get_vocab_size())


def whole_text(chat, ids) -> str:
    """What ids say, control tokens included."""
    return chat.tokenizer.decode(ids, skip_special_tokens=False)


def test_the_context_is_the_chat_written_out(chat):
    """Every past page is the placeholder; past responses and the current page are whole."""
    trajectory = make_trajectory(chat)
    a0 = chat.decode(trajectory.turns[0].response_ids)
    a1 = chat.decode(trajectory.turns[1].response_ids)

    expected = (
        "<|im_start|>system\nYou browse the web.<|im_end|>\n"
        f"<|im_start|>user\nTask: add the red lamp to the cart\n\nRound 0\n\n{PLACEHOLDER}<|im_end|>\n"
        f"<|im_start|>assistant\n{a0}<|im_end|>\n"
        f"<|im_start|>user\nRound 1\n\n{PLACEHOLDER}<|im_end|>\n"
        f"<|im_start|>assistant\n{a1}<|im_end|>\n"
        "<|im_start|>user\nRound 2\n\ntitle: page 2\n<a>red lamp <2></a> $2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert whole_text(chat, context(chat, trajectory, 2)) == expected


def test_thoughts_are_the_familys_own_tokens_where_we_write_them_and_never_on_a_page():
    """Qwen3 has tokens for <think> and </think>: a policy samples those, and a page must not contain them."""
    chat = Chat(family_tokenizer("qwen3"), "Write <think> first </think>.")
    tags = [chat.tokenizer.token_to_id("<think>"), chat.tokenizer.token_to_id("</think>")]

    def tags_among(ids):
        return [i for i in ids if i in tags]

    text = "<think>hm</think><answer>exit()</answer>"
    ids = chat.encode(text, tags=True)
    assert tags_among(ids) == tags
    assert chat.decode(ids) == text

    # Task, page and response all hold the tags. The system prompt's and the response's become tokens.
    turn = {"url": "", "observation": text, "response": text}
    record = {"intent": text, "task_id": 0, "sites": [], "turns": [turn]}
    [row] = trajectory_rows(chat, replay(chat, record))
    assert tags_among(row.ids) == tags * 2
    assert tags_among(row.ids[-row.n_action:]) == tags

    plain = Chat(family_tokenizer("qwen2.5"), "")
    assert plain.encode(text, tags=True) == plain.encode(text)


def test_the_small_bases_own_tags_are_no_tokens_of_a_task():
    """Its vocabulary holds <think> as an ordinary entry, so the copy without added tokens still has it."""
    chat = open_chat("worlds/base", "")
    tags = {chat.tokenizer.token_to_id("<think>"), chat.tokenizer.token_to_id("</think>")}
    text = "is <think>so</think> a tag?"
    assert None not in tags
    assert tags <= set(chat.encode(text, tags=True))
    assert tags.isdisjoint(chat.user_ids({"intent": text}, 0, text))


def test_truncation_and_padding_set_in_a_tokenizer_file_are_ignored(checkpoint, tmp_path):
    """Trainers leave such files behind. They would cut a page in silence, or fill it with control tokens."""
    copy = tmp_path / "c"
    file = str(copy / "tokenizer.json")
    shutil.copytree(checkpoint, copy)
    tokenizer = load_tokenizer(copy)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=40)
    tokenizer.save(file)

    page = "lamp 7 " * 30
    original = load_tokenizer(checkpoint)
    for opened in (Tokenizer.from_file(file), load_tokenizer(copy)):
        assert Chat(opened, "").encode(page) == Chat(original, "").encode(page)
    assert load_tokenizer(copy).encode(page).ids == original.encode(page).ids


@pytest.mark.parametrize("compress", [True, False])
def test_messages_for_a_remote_model_say_what_a_checkpoint_reads(chat, compress):
    chat = Chat(chat.tokenizer, chat.system, compress=compress)
    for n in (1, 3):
        trajectory = make_trajectory(chat, n)
        ids = chat.control(chat.format.begin)
        for message in messages(chat, trajectory):
            ids += chat.message(message["role"], message["content"])
        ids += chat.opening("assistant")

        expected = context(chat, trajectory, n - 1)
        assert whole_text(chat, ids) == whole_text(chat, expected)


def random_history(number: int):
    """(messages, trajectory) of a few turns; contents begin and end with all sorts of white space."""
    draw = random.Random(number)
    pieces = ["lamp", "Orders 7", "<a>", "</a>", " ", "\n", "\n\n", "\t", "$24", "née", "日本", "🙂", "{{x}}"]

    def text():
        length = draw.randint(1, 6)
        return "".join(draw.choices(pieces, k=length))

    system = "You" + text()
    intent = text()
    history = [{"role": "system", "content": system}]
    tau = Trajectory({"intent": intent, "task_id": 0, "sites": []})
    n_turns = draw.randint(1, 4)
    for k in range(n_turns):
        page = text()
        response = f"go {text()}."
        tau.turns.append(Turn("", page, [], [], [], response))

        last = k == n_turns - 1
        shown = PLACEHOLDER
        if last:
            shown = page
        content = f"Round {k}\n\n{shown}"
        if k == 0:
            content = f"Task: {intent}\n\n{content}"
        history.append({"role": "user", "content": content})
        if not last:
            history.append({"role": "assistant", "content": response})
    return history, tau


def test_a_tokenizer_of_no_known_family_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<|im_start|>": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="neither Qwen .* nor Llama 3 .*; use an instruct checkpoint"):
        Chat(tokenizer, "")


@pytest.mark.parametrize("family, number", [("qwen2.5", 0), ("qwen3", 0), ("llama3.1", 1), ("llama3", 2)])
def test_a_family_is_known_by_its_control_tokens(family, number):
    assert Chat(family_tokenizer(family), "").format is FORMATS[number]


@pytest.mark.parametrize("family", ["qwen2.5", "llama3.1"])
def test_prompts_equal_the_checkpoints_own_templates(family):
    """Id for id on 200 random histories; chat_templates.json says where the expected strings come from."""
    tokenizer = family_tokenizer(family)
    fixture = ROOT / "tests/fixtures/chat_templates.json"
    expected = json.loads(fixture.read_text())[family]
    for number, string in zip(range(200), expected, strict=True):
        history, tau = random_history(number)
        chat = Chat(tokenizer, system=history[0]["content"])
        for k, turn in enumerate(tau.turns):
            turn.message_ids = chat.user_ids(tau.task, k, turn.observation)
            turn.response_ids = chat.encode(turn.response) + [chat.end_id]
        last = len(tau.turns) - 1

        ids = tokenizer.encode(string, add_special_tokens=False).ids
        assert context(chat, tau, last) == ids, number


def test_sampled_ids_are_kept_even_where_encoding_again_would_change_them(chat):
    trajectory = make_trajectory(chat)
    letters = [chat.tokenizer.token_to_id(c) for c in "lamp"]  # no encoder writes single letters
    assert chat.encode("lamp") != letters

    odd = letters + [chat.end_id]
    trajectory.turns[0].response_ids = odd
    ids = context(chat, trajectory, 1)
    windows = [ids[i:i + 5] for i in range(len(ids))]
    assert odd in windows


def test_a_forced_end_of_turn_is_context_but_never_trained(chat):
    trajectory = make_trajectory(chat, ended=False)
    for t, row in enumerate(trajectory_rows(chat, trajectory)):
        trained = row.ids[-row.n_action:]
        assert trained == trajectory.turns[t].response_ids
        assert chat.end_id not in trained

    after = trunk(chat, trajectory, 1)
    newline = chat.encode("\n")
    assert after[-1 - len(newline)] == chat.end_id


def padded_logprobs(model, rows):
    """Log-probs of all rows' actions, each row padded to the longest."""
    logp_N, _, _ = token_logprobs(model, *pad(rows))
    return logp_N


def test_perturbing_one_page_token_changes_the_next_actions_logprob(chat):
    """The released trainer hid the pages from attention by using the loss mask as attention mask."""
    model = model_for(chat)

    def logprobs_by_row(rows):
        logp_N, _, _ = token_logprobs(model, **pack(rows))
        return logp_N.split([row.n_action for row in rows])

    for perturbed in range(3):
        samples = trajectory_rows(chat, make_trajectory(chat))
        row = samples[perturbed]
        before = logprobs_by_row(samples)
        before_alone = padded_logprobs(model, [row])

        row.ids[row.n_context - 8] += 1

        after = logprobs_by_row(samples)
        after_alone = padded_logprobs(model, [row])
        assert (after_alone - before_alone).abs().min() > 1e-4
        for i in range(3):
            moved = (after[i] - before[i]).abs()
            if i == perturbed:
                assert moved.min() > 1e-4
            else:  # no other turn saw that page
                assert moved.max() < 1e-5


def test_masks_come_from_recorded_lengths_not_from_token_values(chat):
    trajectory = make_trajectory(chat)
    response = [0, chat.end_id, 0, chat.end_id]  # pad id and end id in a response
    trajectory.turns[1].response_ids = response
    samples = trajectory_rows(chat, trajectory)

    tokens, action = pad(samples)
    assert action.sum(1).tolist() == [len(turn.response_ids) for turn in trajectory.turns]
    assert tokens[1][action[1]].tolist() == [0, chat.end_id, 0, chat.end_id]

    packed = pack(samples)
    trained = packed["tokens_BT"][packed["action_BT"]].tolist()
    expected = []
    for turn in trajectory.turns:
        expected += turn.response_ids
    assert trained == expected


def test_the_head_runs_on_action_tokens_alone(chat):
    """Logits of whole pages never exist; those of responses only `chunk` at a time."""
    model = model_for(chat)
    samples = trajectory_rows(chat, make_trajectory(chat))
    head = model.logits
    sizes = []

    def watched_head(x):
        sizes.append(x.shape[:-1].numel())
        return head(x)

    model.logits = watched_head
    with torch.no_grad():
        token_logprobs(model, **pack(samples), chunk=10)
    assert sum(sizes) == sum(row.n_action for row in samples)
    assert max(sizes) == 10


def test_padding_does_not_change_logprobs(chat):
    model = model_for(chat)
    samples = []
    for seed in range(3):
        trajectory = make_trajectory(chat, n_turns=1 + 2 * seed, seed=seed)
        samples += trajectory_rows(chat, trajectory)

    together = padded_logprobs(model, samples)
    alone = torch.cat([padded_logprobs(model, [row]) for row in samples])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def bracketed(names: str) -> list[str]:
    return [f"<|{name}|>" for name in names.split()]


# The families' added tokens, from their tokenizer files. Qwen's from <tool_call> on are not "special".
QWEN25 = [
    *SPECIAL,
    *bracketed("object_ref_start object_ref_end box_start box_end quad_start quad_end"),
    *bracketed("vision_start vision_end vision_pad image_pad video_pad"),
    "<tool_call>",
    "</tool_call>",
    *bracketed("fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep"),
]
QWEN3 = [*QWEN25, "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA30 = [
    *bracketed("begin_of_text end_of_text start_header_id end_header_id eot_id"),
    *(f"<|reserved_special_token_{i}|>" for i in range(251)),
]
LLAMA31 = [*LLAMA30[:-3], *bracketed("finetune_right_pad_id eom_id python_tag")]
FAMILIES = {
    "ours": SPECIAL,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama3": LLAMA30,
    "llama3.1": LLAMA31,
}
ORDINARY = {  # added tokens that are not "special"
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
}
WORDS = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def family_tokenizer(name: str) -> Tokenizer:
    """A small vocabulary with the family's added tokens, word splitter and normalizer."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(WORDS, "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT + family * 3, trainer)

    added = []
    for token in family:
        added.append(AddedToken(token, special=token not in ORDINARY, normalized=False))
    tokenizer.add_tokens(added)
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_page_text_never_becomes_a_control_token(family):
    """Every family's special tokens in pages of any family: alone, nested, doubled, split over elements."""
    chat = Chat(family_tokenizer(family), "You browse the web.")

    def control_ids_among(ids):
        return [i for i in ids if i in chat.control_ids]

    # All families' tokens, and the reserved ones of this family.
    everyones = set()
    for added in FAMILIES.values():
        everyones.update(token for token in added if "reserved" not in token)
    tokens = sorted(everyones)
    tokens += [token for token in FAMILIES[family] if "reserved" in token]

    shapes = [
        "{token}",
        "a{token}b",
        "{token}{token}",
        "<{token}>",
        "<|{token}|>",
        "<|im_{token}start|>",
        "\n{token}\n",
        "&lt;{token}",
        "{begin}{token}{end}",
        "{begin}</a> <b>{end}</b>",
        "<a>{begin}\n{end}",
        "{token} {begin}",
    ]
    frame = control_ids_among(chat.user_ids({"intent": ""}, 0, ""))
    for token, shape, cut in itertools.product(tokens, shapes, (1, 5, -1)):
        text = shape.format(token=token, begin=token[:cut], end=token[cut:])
        assert chat.bare_tokenizer.decode(chat.encode(text)) == text
        ids = chat.user_ids({"intent": text}, 0, f"<title>{text}</title>")
        assert control_ids_among(ids) == frame, text


@pytest.mark.parametrize("family", FAMILIES)
def test_random_soups_of_control_tokens_stay_text(family):
    chat = Chat(family_tokenizer(family), "You browse the web.")
    draw = random.Random(0)
    pieces = []
    for token in FAMILIES[family]:
        pieces += [token, token[:3], token[3:], token[:-2]]
    pieces += ["<a>", " ", "\n", "<|", "|>", "é"]

    for _ in range(300):
        length = draw.randint(1, 12)
        text = "".join(draw.choices(pieces, k=length))
        ids = chat.encode(text)
        assert chat.control_ids.isdisjoint(ids)
        assert chat.bare_tokenizer.decode(ids) == text


def test_a_vocabulary_with_control_tokens_as_ordinary_entries_cannot_be_tricked():
    """There the text is changed instead."""
    control = ["<|im_end|>", "<|im_start|>"]
    letters = list("<|im_end> \na")
    ids = {}
    for number, word in enumerate(control + letters):
        ids[word] = number
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])

    chat = Chat(tokenizer, "")
    assert chat.control_ids.isdisjoint(chat.encode("<|im_end|>"))


@pytest.mark.parametrize("budget", [60, 100, 150, 400])
def test_a_page_over_budget_is_cut_at_its_end_with_a_marker(chat, budget):
    trajectory = make_trajectory(chat, 2)
    page = "\n".join(f"<a>red lamp <{i}></a> $24" for i in range(200))
    history = len(trunk(chat, trajectory, 2))

    ids, shown, cut = fit_page(chat, trajectory, page, history + budget)

    assert cut
    assert len(ids) <= budget
    assert shown.endswith(CUT)
    assert page.startswith(shown.removesuffix(CUT))
    assert ids == chat.user_ids(trajectory.task, 2, shown)

    short = chat.user_ids(trajectory.task, 2, "short")
    assert fit_page(chat, trajectory, "short", 10_000) == (short, "short", False)


@pytest.mark.parametrize("page", ["red lamp $24 " * 200, "ランプ" * 200])
def test_no_more_of_a_page_is_cut_than_the_budget_asks_for(chat, page):
    """Nor is a letter of several tokens cut in two."""
    trajectory = make_trajectory(chat, 2)
    history = len(trunk(chat, trajectory, 2))
    for budget in range(90, 110):
        ids, shown, cut = fit_page(chat, trajectory, page, history + budget)
        assert cut
        assert budget - 4 <= len(ids) <= budget
        assert page.startswith(shown.removesuffix(CUT))


def test_a_record_holds_success_and_reward_apart_and_a_replay_knows_the_success(chat):
    """A fork may reward something else than the success, which all statistics count."""
    trajectory = make_trajectory(chat)
    trajectory.success = 1.0
    trajectory.reward = -0.4

    record = json.loads(json.dumps(to_record(trajectory, chat, step=3)))

    assert record["success"] == 1.0
    assert record["reward"] == -0.4
    assert record["step"] == 3
    assert record["source"] is None
    assert "advantage" not in record["turns"][0]
    trajectory.turns[0].advantage = -0.8  # a turn's own, as in forks/gigpo.py
    assert to_record(trajectory, chat)["turns"][0]["advantage"] == -0.8
    trajectory.task = trajectory.task | {"source": 1}  # of the second source of --tasks
    assert to_record(trajectory, chat)["source"] == 1
    assert replay(chat, record).success == 1.0
    del record["success"]  # as in demonstrations from elsewhere
    assert replay(chat, record).success == 0.0


def test_a_replay_reads_what_a_record_wrote(chat):
    """Pages, responses and their end; ids are those of the text, which an encoder might write otherwise."""
    trajectory = make_trajectory(chat, 3)
    for k, turn in enumerate(trajectory.turns):
        turn.response = f"go to {k}."
        turn.ended = k != 1
        turn.response_ids = chat.encode(turn.response)
        if turn.ended:
            turn.response_ids.append(chat.end_id)
        turn.logps = [-1.0] * len(turn.response_ids)

    record = to_record(trajectory, chat)
    recorded = [turn["context_tokens"] for turn in record["turns"]]
    assert recorded == [len(context(chat, trajectory, k)) for k in range(3)]

    again = replay(chat, record)
    for ours, theirs in zip(again.turns, trajectory.turns, strict=True):
        assert ours.message_ids == theirs.message_ids
        assert ours.response_ids == theirs.response_ids
        assert ours.observation == theirs.observation
        assert ours.response == theirs.response
        assert ours.ended == theirs.ended

    record["turns"][0]["observation"] = None  # its page is not known, its response stays
    unknown = replay(chat, record)
    assert unknown.turns[0].observation == PLACEHOLDER
    assert trunk(chat, unknown, 3) == trunk(chat, trajectory, 3)
    assert [row.turn for row in trajectory_rows(chat, unknown)] == unknown.turns[1:]


def test_a_page_that_reads_like_the_placeholder_is_trained_on(chat):
    """Text on pages is data. Such a turn once trained nothing, and the weights of a batch no longer summed to 1."""
    trajectory = make_trajectory(chat, 2)
    trajectory.turns[0].observation = PLACEHOLDER
    rows = trajectory_rows(chat, trajectory)
    assert [row.turn for row in rows] == trajectory.turns


@pytest.mark.parametrize("agent, says", [
    ({"system": "x"}, "its agent has no compress and no think"),
    ({"system": 5, "think": True, "compress": True}, "system is 5"),
    ({"system": "\ud800", "think": True, "compress": True}, "surrogates not allowed"),
])
def test_a_record_whose_agent_cannot_be_followed_is_refused(chat, agent, says):
    record = to_record(make_trajectory(chat, 1), chat)
    with pytest.raises(ValueError, match=says):
        replay(chat, record | {"agent": agent})


def test_a_row_is_the_context_and_the_response_id_for_id(chat):
    trajectory = make_trajectory(chat, 4, ended=False)
    for t, row in enumerate(trajectory_rows(chat, trajectory)):
        seen = context(chat, trajectory, t)
        assert row.ids == seen + trajectory.turns[t].response_ids
        assert row.n_context == len(seen)


def ragged(chat):
    """Trajectories of 1 to 15 turns, responses and pages of unequal length."""
    rows = []
    for n in (1, 2, 3, 6, 15):
        trajectory = make_trajectory(chat, n, seed=n, ended=n % 3 != 0)
        rows += trajectory_rows(chat, trajectory)
    return rows


def test_packed_equals_one_row_per_turn(chat):
    """Log-probs, entropies and gradients, float32, 1e-5; the reference runs each turn alone."""
    model = model_for(chat)
    samples = ragged(chat)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for row in samples:
        weights[id(row)] = torch.rand(row.n_action, generator=generator)

    def padded(batch):
        return token_logprobs(model, *pad(batch))

    def packed(batch):
        return token_logprobs(model, **pack(batch))

    def scored(batches, lay_out):
        """Log-probs and entropies in the order of samples, and the gradient of each parameter."""
        model.zero_grad()
        logps = {}
        entropies = {}
        for batch in batches:
            logp_N, entropy_N, _ = lay_out(batch)
            weight_N = torch.cat([weights[id(row)] for row in batch])
            loss = (logp_N * weight_N).sum() / len(samples)
            loss.backward()
            n_actions = [row.n_action for row in batch]
            logp_parts = logp_N.detach().split(n_actions)
            entropy_parts = entropy_N.split(n_actions)
            for row, logp, entropy in zip(batch, logp_parts, entropy_parts):
                logps[id(row)] = logp
                entropies[id(row)] = entropy

        logp = torch.cat([logps[id(row)] for row in samples])
        entropy = torch.cat([entropies[id(row)] for row in samples])
        gradients = {}
        for name, parameter in model.named_parameters():
            gradients[name] = parameter.grad.clone()
        return logp, entropy, gradients

    alone = [[row] for row in samples]
    logp, entropy, gradients = scored(alone, padded)
    for budget in (1, 300, 1000, 10**6):
        batches = micro_batches(samples, budget)
        packed_logp, packed_entropy, packed_gradients = scored(batches, packed)
        torch.testing.assert_close(packed_logp, logp, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed_entropy, entropy, atol=1e-5, rtol=1e-5)
        for name, gradient in gradients.items():
            where = f"{name}, budget {budget}"
            torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-5, rtol=1e-4, msg=where)


def test_packing_an_episode_writes_its_history_once_and_every_page_and_response_at_its_place(chat):
    trajectory = make_trajectory(chat, 3)
    samples = trajectory_rows(chat, trajectory)
    [batch] = micro_batches(samples, 10**6)
    packed = pack(batch)

    action = packed["action_BT"][0].tolist()
    for row, segment, seen in zip(batch, packed["segments"], rebuilt(packed), strict=True):
        ids, positions = seen
        assert ids == row.ids
        assert positions == list(range(len(row.ids)))
        start, stop, _, _ = segment
        before = stop - start - row.n_action
        assert action[start:stop] == [False] * before + [True] * row.n_action

    most = len(trunk(chat, trajectory, 2))
    for turn in trajectory.turns:
        most += len(turn.message_ids)
        most += len(turn.response_ids)
    assert packed["tokens_BT"].numel() <= most


def rebuilt(packed):
    """What each segment sees and is, as (ids, positions): its context, with that one's context, and itself."""
    ids = packed["tokens_BT"][0].tolist()
    positions = packed["positions_BT"][0].tolist()
    whole = []
    contexts = {}  # by a segment's start
    for start, stop, first, last in packed["segments"]:
        seen_ids = []
        seen_positions = []
        if first < last:
            earlier_ids, earlier_positions = contexts[first]
            seen_ids = earlier_ids + ids[first:last]
            seen_positions = earlier_positions + positions[first:last]
        contexts[start] = (seen_ids, seen_positions)
        whole_ids = seen_ids + ids[start:stop]
        whole_positions = seen_positions + positions[start:stop]
        whole.append((whole_ids, whole_positions))
    return whole


def fewest_ids(rows):
    """Each different beginning of a context once, and of each row what predicts its actions, and these.

    It takes still fewer where one row's actions are part of another's context.
    """
    beginnings = set()
    own = 0
    for row in rows:
        predictor = len(row.ids) - row.n_action - 1
        for n in range(predictor):
            beginnings.add(tuple(row.ids[:n + 1]))
        own += 1 + row.n_action
    return len(beginnings) + own


def test_the_example_of_pack():
    a, b, c, d, e, f, g, h = range(8)
    first = Row([a, b, c, d], 1)
    second = Row([a, b, e, f], 1)
    third = Row([a, b, e, g, h], 1)
    batch = [first, second, third]

    packed = pack(batch)
    assert packed["tokens_BT"][0].tolist() == [a, b, c, d, e, f, g, h]
    assert packed["positions_BT"][0].tolist() == [0, 1, 2, 3, 2, 3, 3, 4]
    assert packed["segments"] == [(0, 4, 0, 0), (4, 6, 0, 2), (6, 8, 4, 5)]
    assert packed["action_BT"][0].tolist() == [False, False, False, True, False, True, False, True]

    for order in itertools.permutations(batch):
        rows = list(order)
        assert micro_batches(rows, 8) == [batch]
        assert micro_batches(rows, 7) == [[first, second], [third]]
        assert micro_batches(rows, 5) == [[first], [second], [third]]


def random_words() -> list[Row]:
    """Short rows of three different ids: many begin alike."""
    draw = random.Random(0)
    words = []
    for _ in range(300):
        length = draw.randint(2, 9)
        ids = [draw.randrange(3) for _ in range(length)]
        words.append(Row(ids, 1))
    for row in words:
        row.n_action = draw.randint(1, len(row.ids) - 1)
    return words


def test_what_rows_have_in_common_is_written_once(chat):
    """The same episodes, the same pages with other answers, other tasks: never an id more than needed."""
    twins = [trajectory_rows(chat, make_trajectory(chat, 3)) for _ in range(3)]
    for row in twins[1]:  # the same contexts, other responses
        row.ids[-row.n_action:] = [7 + k for k in range(row.n_action)]
    group = twins[0] + twins[1] + twins[2]
    whole = sum(len(row.ids) for row in group)
    other_tasks = twins[0] + ragged(chat)[1:3]
    words = random_words()

    for rows in (group, ragged(chat), other_tasks, words):
        [batch] = micro_batches(rows, 10**6)
        packed = pack(batch)
        for row, (ids, positions) in zip(batch, rebuilt(packed), strict=True):
            assert ids == row.ids
            assert positions == list(range(len(row.ids)))

        trained = packed["tokens_BT"][packed["action_BT"]].tolist()
        actions = []
        for row in batch:
            actions += row.ids[-row.n_action:]
        assert trained == actions

        written = packed["tokens_BT"].numel()
        if rows is words:  # there one row's actions are part of another's context
            assert written <= fewest_ids(rows)
        else:
            assert written == fewest_ids(rows)
    assert fewest_ids(group) < whole / 2

    # A row without a page, as of a value function: what predicts its action stays its own.
    bare = [Row([*range(10), 20], 1) for _ in range(2)]
    packed = pack(bare)
    assert packed["segments"] == [(0, 11, 0, 0), (11, 13, 0, 9)]
    assert packed["tokens_BT"][0, 11:].tolist() == [9, 20]
    assert micro_batches(bare, 13) == [bare]
    assert len(micro_batches(bare, 12)) == 2


def test_rows_of_a_group_that_share_pages_and_responses_have_the_gradient_of_each_alone(chat):
    """Log-probs and gradients, float32; among them a row that is another's beginning and one twice."""
    model = model_for(chat)
    samples = []
    for _ in range(2):
        samples += trajectory_rows(chat, make_trajectory(chat, 3))
    first = samples[0]
    samples.append(Row(first.ids[:-1], first.n_action - 1))
    samples.append(Row(first.ids + [5, 6], 2))  # as without compression: its context holds a trained response
    weights = [0.3 * i - 1 for i in range(len(samples))]

    def padded(batch):
        return token_logprobs(model, *pad(batch))

    def packed(batch):
        return token_logprobs(model, **pack(batch))

    def scored(batches, lay_out):
        """(the log-probs in the order of samples, the gradient of their weighted sum)."""
        model.zero_grad()
        found = {}
        for batch in batches:
            logp_N, _, _ = lay_out(batch)
            parts = logp_N.split([row.n_action for row in batch])
            loss = 0
            for row, part in zip(batch, parts):
                number = samples.index(row)
                loss += weights[number] * part.sum()
                found[number] = part.detach()
            loss.backward()
        logps = torch.cat([found[i] for i in range(len(samples))])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        return logps, gradient

    each_alone = [[row] for row in samples]
    logps, gradient = scored(each_alone, padded)
    for budget in (200, 10**6):
        batches = micro_batches(samples, budget)
        packed_logps, packed_gradient = scored(batches, packed)
        torch.testing.assert_close(packed_logps, logps, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed_gradient, gradient, atol=1e-5, rtol=1e-4)


def test_a_full_batch_is_followed_by_one_that_is_whole_again():
    history = list(range(100))
    later = Row(history[:90] + [1] * 10, 5)
    earlier = Row(history[:40] + [2] * 10, 5)
    assert micro_batches([later, earlier], 110) == [[earlier, later]]
    assert micro_batches([later, earlier], 109) == [[earlier], [later]]
    assert pack([later])["tokens_BT"][0].tolist() == later.ids


@pytest.mark.parametrize("budget", [150, 400, 1500])
def test_a_trajectory_of_any_length_trains_within_the_budget(chat, budget):
    samples = ragged(chat)
    batches = micro_batches(samples, budget)

    batched = []
    for batch in batches:
        batched += [id(row) for row in batch]
    assert sorted(batched) == sorted(id(row) for row in samples)

    for batch in batches:
        written = pack(batch)["tokens_BT"].numel()
        assert written <= budget or len(batch) == 1  # a single turn may be longer,
    assert max(len(row.ids) for row in samples) > 400  # as here
    if budget > 150:
        assert len(batches) < len(samples)


@pytest.mark.parametrize("settings", [{"think": "false"}, {"thinks": False}, {"system": 3}, {"keep_thoughts": True}])
def test_an_agent_json_that_cannot_be_followed_is_refused(chat, tmp_path, settings):
    (tmp_path / "agent.json").write_text(json.dumps(settings))
    chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    [key] = settings
    with pytest.raises(ValueError, match=f"agent.json: {key} is .*true or false"):
        open_chat(tmp_path, "")


def test_agent_json_sets_the_chat(chat, tmp_path):
    settings = {"system": "Do it.", "think": False, "compress": False}
    (tmp_path / "agent.json").write_text(json.dumps(settings))
    chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_chat(tmp_path, "")
    for name, value in settings.items():
        assert getattr(opened, name) == value


def test_an_empty_prompt_is_a_prompt(chat, tmp_path):
    (tmp_path / "agent.json").write_text('{"system": ""}')
    chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert open_chat(tmp_path, "- go_back(): goes back").system == ""


def test_without_an_agent_json_a_checkpoint_thinks_and_compresses(chat, tmp_path):
    chat.tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_chat(tmp_path, "- go_back(): goes back")
    assert opened.think
    assert opened.compress
    assert "- go_back(): goes back" in opened.system


def output_of_savings(monkeypatch, capsys) -> list[str]:
    """The lines that savings.py prints about its own episode."""
    monkeypatch.setattr("sys.argv", ["savings.py"])
    savings.main()
    return capsys.readouterr().out.splitlines()


def table_of_savings(lines) -> list[list[int]]:
    """For each of the seven turns: [turn, tokens of its page, every page kept, compressed]."""
    table = []
    for line in lines[3:10]:
        table.append([int(cell) for cell in line.split()])
    return table


def test_the_demonstration_prints_how_much_compression_and_packing_save(monkeypatch, capsys):
    lines = output_of_savings(monkeypatch, capsys)
    table = table_of_savings(lines)
    assert [row[0] for row in table] == list(range(7))

    first, *later = table
    _, _, kept, compressed = first
    assert kept == compressed
    for _, _, kept, compressed in later:
        assert kept > compressed

    times = lines[-1].split("(")[1].split()[0]  # it ends with "packed (... times fewer)"
    assert float(times) > 1.5


def test_the_table_of_context_lengths_says_what_the_demonstration_says(monkeypatch, capsys):
    table = table_of_savings(output_of_savings(monkeypatch, capsys))
    kept = [row[2] for row in table]
    compressed = [row[3] for row in table]
    monkeypatch.setattr("sys.argv", ["lengths.py", str(ROOT / "assets/episode.jsonl")])
    lengths.main()
    text = capsys.readouterr().out

    def row(name):
        """[episodes, compressed: median, largest, every page kept: median, largest]"""
        rest = re.search(f"^{name} (.*)", text, re.MULTILINE)[1]
        return [int(number) for number in re.findall("[0-9]+", rest)]

    def of_one_episode(compressed, kept):
        """Such a row, where the median is the largest."""
        return [1, compressed, compressed, kept, kept]

    assert row("context at turn 1") == of_one_episode(compressed[0], kept[0])
    assert row("context at turn 5") == of_one_episode(compressed[4], kept[4])
    assert row("largest context") == of_one_episode(max(compressed), max(kept))
    assert row("all contexts, summed") == of_one_episode(sum(compressed), sum(kept))
    assert row("       9") == [1, 7, 7, 0, 7]  # its template and turns
    assert "context at turn 10" not in text


def test_the_episode_to_read_is_an_experts_and_comes_from_compact_pages():
    """It once held the gibberish of a policy that had not learned anything."""
    [line] = (ROOT / "assets/episode.jsonl").read_text().splitlines()
    episode = json.loads(line)
    turns = episode["turns"]
    assert episode["reward"] == 1
    assert 5 <= len(turns) <= 8

    for turn in turns:
        assert turn["observation"].startswith("title: ")
        assert turn["action"]
        assert not turn["error"]
    pages = {turn["observation"] for turn in turns}
    assert len(pages) == len(turns)


@pytest.mark.parametrize("think", [True, False])
def test_action_text_inverts_format_response(think):
    action = '# Element: red lamp <5>\ndo(action="Click", element="5")'
    assert action_text(format_response("find the lamp", action, think)) == action


def test_the_answer_is_what_follows_the_thoughts():
    assert action_text("<think><answer>exit()</answer></think><answer>go_back()</answer>") == "go_back()"
    assert action_text("<think>so</think>go_forward()") == "go_forward()"
    assert action_text("so</think>go_forward()") == "go_forward()"  # its template has opened the thought
    assert action_text('<think>what if\nexit(message="N/A")') is None  # cut in its thought: that acts no more than
    assert action_text("<think>so</think><think>or\nexit()") is None  # and so in a second thought
    assert action_text("<think>so</think><answer>exit(") is None  # cut before its end: neither action nor exit
    assert action_text("<think>in <answer> tags</think>go_back()") == "go_back()"  # a thought may name a tag
    assert action_text("<think>so<answer>go_back()</answer></think>\n") == "go_back()"


def test_the_system_prompt_lists_the_actions_and_the_tags():
    assert "- a: b" in system_prompt("- a: b", True)
    assert "<think>" in system_prompt("", True)
    assert "<think>" not in system_prompt("", False)

"""Learn from what the world says back (ECHO, arXiv 2605.24517): M-GRPO, and predict the next page.

    L = L_mgrpo - lambda mean_o( log pi(o | h_j, a_j, o_before) )

The mean is over the tokens o that tell what a response a_j changed, up to --feedback-tokens a page: the lines
of the next page that a diff with this page calls inserted or changed, its errors, notes and title among them. A
line that moved counts as new. o_before are the earlier ones of these tokens. All o are the site's tokens and not
the policy's, so they have no advantage, no ratio and no clip. It is the cross-entropy of pre-training, but at
the sampling temperature, as all log-probs in mgrpo.py. Each of a step's updates has the term.

In PyTorch terms: M-GRPO ignores what the site answered, and learns nothing at all from a group that fails
as a whole. But each answer shows what a click does, or why it failed, and it is there already. Predicting it
trains the policy's layers to know the site.

    row of turn j:   h_j   response a_j   Round j+1   changed lines of s_{j+1}
                     -- mgrpo.py's ---  unscored    scored by the new term

Under compression no later context shows s_j whole, so the lines are appended to the row of the turn that
caused them. They come after the response: by causality its log-probs stay as they were. The diff ignores the
ids of elements, but the policy has to predict them. Mostly it can: elements are numbered from the top, so this
page's ids and the new lines above tell the number. Lines that vanished are not shown.

    python forks/feedback.py --model runs/bc --out runs/feedback

Differs from the paper (of which we had the abstract and summaries): only changed lines, since a page
mostly repeats the last one, and --feedback-tokens of a page at most; the mean is over the tokens of the
step, not of an episode, so an episode with many changes weighs more; lambda is 0.002, in the paper about 0.1.
As there, all valid episodes teach, those of dropped groups as well, but only by this term. Metrics such as
the entropy also count the responses of dropped groups, and each update computes them, which mgrpo.py's does not.

feedback_loss is the mean over the n_feedback tokens, in nats per token. A model that never learned to write
pages, such as the sandbox's small base, starts at 14. There a weight of 0.05 outdoes the policy loss: sampled
success fell from 61 to 21% in six steps (seed 31). With 0.002 it rose from 61 to 71% in nine.

Differs from mgrpo.py: `training_rows` appends, `logprobs` scores the appended, `loss` adds the term.
"""
import re
import sys
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import torch

import mgrpo
from compress import CUT, Chat, Row, shared_length, trajectory_rows, user_text
from forks.shared import without_messages
from model import token_logprobs


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/feedback"   # the run's directory; at the end it is also the checkpoint
    # Feedback
    feedback: float = 0.002      # lambda, the weight of the next page's cross-entropy
    feedback_tokens: int = 64    # the most tokens of one page to predict


# As worlds/page/ writes it: <a>red lamp <5></a>. A page's own < is &lt; there, so nothing else looks like it.
ID = re.compile(r" <\d+>")


def without_ids(line: str) -> str:
    """A line of a page without the ids of its elements. Other numbers stay."""
    return ID.sub("", line)


def whole_lines(page: str) -> list[str]:
    """The lines of a page. Of one that was cut, the last is left out: it may be half a line."""
    lines = page.removesuffix(CUT).split("\n")
    if page.endswith(CUT):
        lines = lines[:-1]
    return lines


def news(before: str, after: str) -> str:
    """The lines of a page that a diff with the page before it calls inserted or changed.

    Ids do not count: each page has its own. Errors and notes about the last action always count. Lines below the
    place where the page before was cut do not: that page may have had them.
    """
    lines = whole_lines(after)
    old = [without_ids(line) for line in whole_lines(without_messages(before))]
    new = [without_ids(line) for line in lines]
    changed = []
    diff = SequenceMatcher(None, old, new)
    for kind, place, _, start, stop in diff.get_opcodes():  # place: in old; start, stop: in new
        below_the_cut = before.endswith(CUT) and kind == "insert" and place == len(old)
        if kind in ("insert", "replace") and not below_the_cut:
            changed += lines[start:stop]
    return "\n".join(changed)


def append_feedback(chat: Chat, row: Row, limit: int, max_context: int) -> int:
    """Appends to a row what its response changed; returns how many of the appended tokens are scored.

    At most `limit` are, fewer if the row would become longer than max_context ids. row.after is True for
    these, and False for what comes before them: the end of the response's message and the frame.
    """
    turns = row.tau.turns
    t = turns.index(row.turn)
    if t + 1 == len(turns):
        return 0  # the last turn: no page was read after it
    text = news(row.turn.observation, turns[t + 1].observation)
    if not text:
        return 0  # nothing changed
    # 1) The next message: a frame ("Round 2 ...") and the news. To find where the frame ends, we write the
    #    message once more, with a character that no news begins with. What the two share is the frame.
    message = chat.opening("user", user_text(row.tau.task, t + 1, text))
    other = chat.opening("user", user_text(row.tau.task, t + 1, "\0"))
    n_frame = shared_length(other, message)

    # 2) As much of the news as there is room for, after what closes the response.
    closing = chat.past_response(row.turn.response_ids)[row.n_action:]
    n_unscored = len(closing) + n_frame
    room = min(limit, max_context - len(row.ids) - n_unscored)
    if room <= 0:
        return 0
    message = message[:n_frame + room]
    n_news = len(message) - n_frame

    # 3) Append it.
    row.ids = row.ids + closing + message
    row.after = [False] * n_unscored + [True] * n_news
    return n_news


class Feedback(mgrpo.MGRPO):
    @staticmethod
    def check(cfg):
        if cfg.feedback < 0 or cfg.feedback_tokens < 1:
            raise ValueError(f"--feedback {cfg.feedback:g} --feedback-tokens {cfg.feedback_tokens}: "
                             "give a weight of at least 0, and at least 1 token.")

    def training_rows(self, episodes, step):
        rows, metrics = super().training_rows(episodes, step)
        # 1) The valid episodes of the groups that were dropped: their actions weigh nothing.
        training = {id(row.tau) for row in rows}
        for tau in episodes:
            if tau.status == "ok" and id(tau) not in training:
                dropped = trajectory_rows(self.chat, tau)
                for row in dropped:
                    row.weight = 0.0
                rows += dropped

        # 2) What the world said, appended to each row.
        n_news = 0
        for row in rows:
            n_news += append_feedback(self.chat, row, self.cfg.feedback_tokens, self.cfg.max_context)
        n_actions = sum(row.n_action for row in rows)
        n_news, n_actions = run.all_sum([n_news, n_actions])
        self.n_news = max(n_news, 1)
        self.n_actions = n_actions
        metrics["n_feedback"] = int(n_news)
        return rows, metrics

    def logprobs(self, micro_batch, inputs):
        """Scores actions and feedback in one pass; keeps the feedback's log-probs for `loss`.

        M: the tokens of both, in the order of the row. Returns those of the N action tokens.
        """
        action_BT = inputs["action_BT"]
        news_BT = torch.zeros_like(action_BT)
        for row, segment in zip(micro_batch, inputs["segments"]):
            _, stop, _, _ = segment  # start, stop, and those of its context
            start = stop - len(row.after)
            news_BT[0, start:stop] = torch.tensor(row.after, device=self.device)
        both_BT = action_BT | news_BT
        scored = {**inputs, "action_BT": both_BT}
        logp_M, entropy_M, hidden_MD = token_logprobs(self.model, **scored, temperature=self.cfg.temperature)
        is_action_M = action_BT[both_BT]
        self.logp_news = logp_M[~is_action_M]
        return logp_M[is_action_M], entropy_M[is_action_M], hidden_MD[is_action_M]

    def loss(self, micro_batch, logp_N, logp_ref_N, hidden_ND):
        loss, metrics = super().loss(micro_batch, logp_N, logp_ref_N, hidden_ND)
        total = -self.logp_news.sum()  # of the micro-batch
        # `update` divides metrics by the number of action tokens.
        metrics["feedback_loss"] = total.item() * self.n_actions / self.n_news
        return loss + self.cfg.feedback * total / self.n_news, metrics


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Feedback)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")

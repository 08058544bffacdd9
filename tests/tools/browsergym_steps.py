"""browsergym-core's environment steps a second. bench.py runs this in an environment that has the package:

    python tests/tools/browsergym_steps.py CHROMIUM URL STEPS DELAY

A step clicks a random link by its id, sleeps DELAY seconds (its default is 0.5), waits until the DOM has
loaded and extracts the whole observation: it marks every element, takes a DOM snapshot, the accessibility
tree, the focused element and a screenshot, and removes the marks again. A step of ours clicks, waits for
what the click began, and writes the page as text.
"""
import random
import sys
import time

from browsergym.core.action.highlevel import HighLevelActionSet
from browsergym.core.env import BrowserEnv
from browsergym.core.task import OpenEndedTask
from playwright.sync_api import BrowserType


def links(snapshot: dict) -> list[str]:
    """The ids of the links in a DOM snapshot. Names and values in it are indices into its strings."""
    strings, found = snapshot["strings"], []
    for document in snapshot["documents"]:
        for name, numbers in zip(document["nodes"]["nodeName"], document["nodes"]["attributes"]):
            attributes = {strings[key]: strings[value] for key, value in zip(numbers[::2], numbers[1::2])}
            if strings[name] == "A" and {"bid", "href"} <= set(attributes):
                found.append(attributes["bid"])
    return found


chromium, url, steps, delay = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
launch = BrowserType.launch  # the environment and its chat window each launch a browser
BrowserType.launch = lambda self, **options: launch(self, executable_path=chromium, **options)
env = BrowserEnv(OpenEndedTask, task_kwargs={"start_url": url}, headless=True, pre_observation_delay=delay,
                 action_mapping=HighLevelActionSet(["bid"]).to_python_code)
observation, _ = env.reset()
rng, began = random.Random(0), time.perf_counter()
for _ in range(steps):
    observation, *_ = env.step(f"click('{rng.choice(links(observation['dom_object']))}')")
    assert not observation["last_action_error"], observation["last_action_error"]
print(steps / (time.perf_counter() - began))
env.close()

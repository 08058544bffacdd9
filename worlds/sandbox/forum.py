"""The forum: subforums, posts with votes and comments, a form for new posts, profiles that can be edited."""

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .page import (
    LOGIN_ROUTES, NOT_FOUND, Page, Redirect,
    error, items, link,
    area, field, form, select,
    members_only, navigation, paginate, unfit,
)
from .words import ADJECTIVES, FORUMS, TOPICS
from .words import names, password, phrase

ROOT = "/forum"
CHOOSE = "choose"
PER_PAGE = 6


class Post(NamedTuple):
    number: int
    forum: str
    title: str
    author: str
    body: str
    votes: int  # at the start of the world; what its users cast since is in Forum.votes


class Comment(NamedTuple):
    author: str
    text: str


class Account(NamedTuple):
    user: str
    password: str
    bio: str


@dataclass
class Forum:
    accounts: dict[str, Account]
    posts: dict[int, Post]
    comments: dict[int, tuple[Comment, ...]]
    votes: dict[tuple[str, int], int]  # (user, post): +1 or -1


def seed(rng, people: list[str], sites: dict) -> Forum:
    accounts = {}
    for user in people:
        accounts[user] = Account(user, password(rng), phrase(rng))

    homes = []  # the forum of each post
    for forum in FORUMS:
        homes += [forum] * rng.randint(4, 7)
    rng.shuffle(homes)
    titles = names(rng, TOPICS, len(homes))

    posts, comments = {}, {}
    for number, (forum, title) in enumerate(zip(homes, titles), start=10):
        one = rng.choice(ADJECTIVES)
        other = rng.choice(ADJECTIVES)
        posts[number] = Post(
            number,
            forum,
            title,
            author=rng.choice(people),
            body=f"what do you think of the {one} one and the {other} one",
            votes=rng.randint(1, 60),
        )
        said = []
        for _ in range(rng.randint(0, 2)):
            author = rng.choice(people)
            text = f"too {rng.choice(ADJECTIVES)} for me"
            said.append(Comment(author, text))
        comments[number] = tuple(said)
    return Forum(accounts, posts, comments, {})


def nav(user: str | None) -> str:
    links = [
        ("home", ROOT),
        ("new post", "/forum/new"),
        ("profile", f"/forum/user/{user}"),
    ]
    return navigation(ROOT, user, links)


# ---- reading
def address(post) -> str:
    """The path of a post, below ROOT."""
    return f"/f/{post.forum}/{post.number}"


def post_list(posts) -> str:
    return items(link(post.title, ROOT + address(post)) for post in posts)


def home(forum, request):
    newest_first = sorted(forum.posts.values(), reverse=True)
    shown, links = paginate(newest_first, request, PER_PAGE, ROOT)
    tiles = " ".join(link(name, f"/forum/f/{name}") for name in FORUMS)
    body = f'<h1>forum</h1><p class="tiles">{tiles}</p>'
    body += "<h2>new posts</h2>"
    body += post_list(shown)
    return Page("forum", body + links)


def subforum(forum, request, name):
    if name not in FORUMS:
        return NOT_FOUND
    posts = [post for post in forum.posts.values() if post.forum == name]
    posts.sort(reverse=True)  # newest first
    shown, links = paginate(posts, request, 2 * PER_PAGE, f"/forum/f/{name}")
    body = f"<h1>{name}</h1>"
    body += post_list(shown)
    return Page(name, body + links)


def user_page(forum, request, name):
    if name not in forum.accounts:
        return NOT_FOUND
    posts = [post for post in forum.posts.values() if post.author == name]
    posts.sort(reverse=True)  # newest first
    shown, links = paginate(posts, request, PER_PAGE, f"/forum/user/{name}")

    bio = escape(forum.accounts[name].bio)
    body = f"<h1>{name}</h1>"
    body += f'<p>bio <span id="bio">{bio}</span></p>'
    if name == request.user:
        edit = link("edit profile", "/forum/edit")
        body += f"<p>{edit}</p>"
    body += "<h2>posts</h2>"
    body += post_list(shown)
    return Page(name, body + links)


def find(forum, name, number):
    """The post of this number, None where it is not in this subforum."""
    post = forum.posts.get(int(number))
    if post is None or post.forum != name:
        return None
    return post


def votes_of(forum, post) -> int:
    cast_since = 0
    for (_, number), cast in forum.votes.items():
        if number == post.number:
            cast_since += cast
    return post.votes + cast_since


def post_page(forum, request, name, number, problem=""):
    post = find(forum, name, number)
    if post is None:
        return NOT_FOUND

    said = []
    for comment in forum.comments[post.number]:
        said.append(f"{comment.author} : {escape(comment.text)}")

    buttons = "<p>log in to vote and comment</p>"
    write = ""
    if request.user:
        here = ROOT + address(post)
        buttons = (
            f'<form method="post" action="{here}/vote">'
            '<p><button name="cast" value="1">upvote</button> '
            '<button name="cast" value="-1">downvote</button></p></form>'
        )
        typed = request.form.get("comment", "")
        write = form(area("comment", typed), submit="send", action=f"{here}/comment")

    author = link(post.author, f"/forum/user/{post.author}")
    body = f'<h1 id="title">{escape(post.title)}</h1>{error(problem)}'
    body += f"<p>author {author}</p>"
    body += f'<p>votes <span id="votes">{votes_of(forum, post)}</span></p>'
    body += f"<p>{escape(post.body)}</p>{buttons}"
    body += f"<h2>comments</h2>{items(said)}{write}"
    return Page("post", body)


# ---- writing
@members_only
def vote(forum, request, name, number):
    post = find(forum, name, number)
    cast = request.form.get("cast")
    if post is None or cast not in ("1", "-1"):
        return NOT_FOUND
    forum.votes[request.user, post.number] = int(cast)  # one vote a user; the other button turns it
    return Redirect(address(post))


@members_only
def add_comment(forum, request, name, number):
    post = find(forum, name, number)
    if post is None:
        return NOT_FOUND
    text = request.form.get("comment", "")
    problem = unfit("comment", text, 200)
    if problem:
        return post_page(forum, request, name, number, problem)
    comment = Comment(request.user, text.strip())
    forum.comments[post.number] += (comment,)
    return Redirect(address(post))


@members_only
def post_form(forum, request, problem=""):
    name = request.form.get("forum", "")
    title = request.form.get("title", "")
    text = request.form.get("body", "")
    body = f"<h1>new post</h1>{error(problem)}"
    body += form(
        select("forum", (CHOOSE, *FORUMS), name),
        field("title", title),
        area("body", text),
        submit="create post",
    )
    return Page("new post", body)


@members_only
def create_post(forum, request):
    name = request.form.get("forum", "").strip()
    title = request.form.get("title", "").strip()
    text = request.form.get("body", "").strip()

    problem = unfit("title", title)
    if name not in FORUMS:
        problem = "choose a forum"
    elif len(text) > 500 and not problem:
        problem = "body must have at most 500 characters"
    if problem:
        return post_form(forum, request, problem)

    number = max(forum.posts, default=9) + 1
    post = Post(number, name, title, request.user, text, votes=1)
    forum.posts[number] = post
    forum.comments[number] = ()
    return Redirect(address(post))


@members_only
def profile_form(forum, request, problem=""):
    old = forum.accounts[request.user].bio
    bio = request.form.get("bio", old)
    body = f"<h1>edit profile</h1>{error(problem)}"
    body += form(field("bio", bio), submit="save")
    return Page("edit profile", body)


@members_only
def edit_profile(forum, request):
    bio = request.form.get("bio", "")
    problem = unfit("bio", bio, 200)
    if problem:
        return profile_form(forum, request, problem)
    old = forum.accounts[request.user]
    forum.accounts[request.user] = old._replace(bio=bio.strip())
    return Redirect(f"/user/{request.user}")


ROUTES = LOGIN_ROUTES + [
    ("GET", "", home),
    ("GET", "/f/([a-z]+)", subforum),
    ("GET", "/f/([a-z]+)/([0-9]{1,6})", post_page),
    ("POST", "/f/([a-z]+)/([0-9]{1,6})/vote", vote),
    ("POST", "/f/([a-z]+)/([0-9]{1,6})/comment", add_comment),
    ("GET", "/user/([a-z]+)", user_page),
    ("GET", "/new", post_form),
    ("POST", "/new", create_post),
    ("GET", "/edit", profile_form),
    ("POST", "/edit", edit_profile),
]

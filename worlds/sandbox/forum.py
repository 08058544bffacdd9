"""The forum: subforums, posts with votes and comments, a form for new posts, profiles that can be edited."""

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from .page import (LOGIN_ROUTES, NOT_FOUND, Page, Redirect, area, error, field, form, items, link, members_only,
                   navigation, paginate, select, unfit)
from .words import ADJECTIVES, FORUMS, TOPICS, names, password, phrase

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
    accounts = {user: Account(user, password(rng), phrase(rng)) for user in people}
    homes = [forum for forum in FORUMS for _ in range(rng.randint(4, 7))]
    rng.shuffle(homes)
    posts, comments = {}, {}
    for number, (forum, title) in enumerate(zip(homes, names(rng, TOPICS, len(homes))), start=10):
        body = f"what do you think of the {rng.choice(ADJECTIVES)} one and the {rng.choice(ADJECTIVES)} one"
        posts[number] = Post(number, forum, title, rng.choice(people), body, rng.randint(1, 60))
        comments[number] = tuple(Comment(rng.choice(people), f"too {rng.choice(ADJECTIVES)} for me")
                                 for _ in range(rng.randint(0, 2)))
    return Forum(accounts, posts, comments, {})


def nav(user: str | None) -> str:
    return navigation(ROOT, user, [("home", ROOT), ("new post", "/forum/new"), ("profile", f"/forum/user/{user}")])


# ---- reading
def address(post) -> str:
    return f"/f/{post.forum}/{post.number}"


def post_list(posts) -> str:
    return items(link(post.title, ROOT + address(post)) for post in posts)


def home(forum, request):
    shown, links = paginate(sorted(forum.posts.values(), reverse=True), request, PER_PAGE, ROOT)
    forums = '<p class="tiles">' + " ".join(link(name, f"/forum/f/{name}") for name in FORUMS) + "</p>"
    return Page("forum", f"<h1>forum</h1>{forums}<h2>new posts</h2>" + post_list(shown) + links)


def subforum(forum, request, name):
    if name not in FORUMS:
        return NOT_FOUND
    newest_first = sorted((post for post in forum.posts.values() if post.forum == name), reverse=True)
    shown, links = paginate(newest_first, request, 2 * PER_PAGE, f"/forum/f/{name}")
    return Page(name, f"<h1>{name}</h1>" + post_list(shown) + links)


def user_page(forum, request, name):
    if name not in forum.accounts:
        return NOT_FOUND
    theirs = sorted((post for post in forum.posts.values() if post.author == name), reverse=True)
    shown, links = paginate(theirs, request, PER_PAGE, f"/forum/user/{name}")
    edit = f'<p>{link("edit profile", "/forum/edit")}</p>' if name == request.user else ""
    return Page(name, f'<h1>{name}</h1><p>bio <span id="bio">{escape(forum.accounts[name].bio)}</span></p>{edit}'
                      "<h2>posts</h2>" + post_list(shown) + links)


def find(forum, name, number):
    post = forum.posts.get(int(number))
    return post if post and post.forum == name else None


def post_page(forum, request, name, number, problem=""):
    post = find(forum, name, number)
    if post is None:
        return NOT_FOUND
    votes = post.votes + sum(cast for (_, voted), cast in forum.votes.items() if voted == post.number)
    said = items(f"{comment.author} : {escape(comment.text)}" for comment in forum.comments[post.number])
    here, buttons, write = ROOT + address(post), "<p>log in to vote and comment</p>", ""
    if request.user:
        buttons = (f'<form method="post" action="{here}/vote"><p><button name="cast" value="1">upvote</button> '
                   '<button name="cast" value="-1">downvote</button></p></form>')
        write = form(area("comment", request.form.get("comment", "")), submit="send", action=f"{here}/comment")
    return Page("post", f'<h1 id="title">{escape(post.title)}</h1>{error(problem)}'
                        f'<p>author {link(post.author, f"/forum/user/{post.author}")}</p>'
                        f'<p>votes <span id="votes">{votes}</span></p><p>{escape(post.body)}</p>{buttons}'
                        f"<h2>comments</h2>{said}{write}")


# ---- writing
@members_only
def vote(forum, request, name, number):
    post, cast = find(forum, name, number), {"1": 1, "-1": -1}.get(request.form.get("cast"))
    if post is None or cast is None:
        return NOT_FOUND
    forum.votes[request.user, post.number] = cast  # one vote a user; the other button turns it
    return Redirect(address(post))


@members_only
def add_comment(forum, request, name, number):
    post, text = find(forum, name, number), request.form.get("comment", "")
    if post is None:
        return NOT_FOUND
    problem = unfit("comment", text, 200)
    if problem:
        return post_page(forum, request, name, number, problem)
    forum.comments[post.number] += (Comment(request.user, text.strip()),)
    return Redirect(address(post))


@members_only
def post_form(forum, request, problem=""):
    name, title, body = (request.form.get(key, "") for key in ("forum", "title", "body"))
    fields = select("forum", (CHOOSE, *FORUMS), name), field("title", title), area("body", body)
    return Page("new post", f"<h1>new post</h1>{error(problem)}" + form(*fields, submit="create post"))


@members_only
def create_post(forum, request):
    name, title, body = (request.form.get(key, "").strip() for key in ("forum", "title", "body"))
    problem = "choose a forum" if name not in FORUMS else unfit("title", title)
    if problem or len(body) > 500:
        return post_form(forum, request, problem or "body must have at most 500 characters")
    number = max(forum.posts, default=9) + 1
    forum.posts[number], forum.comments[number] = Post(number, name, title, request.user, body, 1), ()
    return Redirect(address(forum.posts[number]))


@members_only
def profile_form(forum, request, problem=""):
    bio = request.form.get("bio", forum.accounts[request.user].bio)
    return Page("edit profile", f"<h1>edit profile</h1>{error(problem)}" + form(field("bio", bio), submit="save"))


@members_only
def edit_profile(forum, request):
    bio = request.form.get("bio", "")
    problem = unfit("bio", bio, 200)
    if problem:
        return profile_form(forum, request, problem)
    forum.accounts[request.user] = forum.accounts[request.user]._replace(bio=bio.strip())
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

"""A stand-in for the package `requests`, for verifiers on machines without it. The real one goes first.

Holds what verifiers use: get, post, put, delete, and a response's status_code, text, content,
headers, ok, json() and raise_for_status().
"""
import json as _json
import sys
import urllib.error
import urllib.parse
import urllib.request


class RequestException(OSError):
    pass


class HTTPError(RequestException):
    pass


class ConnectionError(RequestException):
    pass


class Response:
    def __init__(self, url: str, status_code: int, headers, content: bytes):
        self.url = url
        self.status_code = status_code
        self.headers = headers
        self.content = content
        self.ok = status_code < 400

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self):
        return _json.loads(self.content)

    def raise_for_status(self):
        if not self.ok:
            raise HTTPError(f"{self.status_code} for url {self.url}")


def request(method: str, url: str, params=None, data=None, json=None, headers=None, timeout=30):
    if params:
        url += ("&" if "?" in url else "?") + urllib.parse.urlencode(params)
    headers = dict(headers or {})
    if json is not None:
        data = _json.dumps(json)
        headers.setdefault("Content-Type", "application/json")
    if isinstance(data, dict):
        data = urllib.parse.urlencode(data)
    if isinstance(data, str):
        data = data.encode()
    asked = urllib.request.Request(url, data, headers, method=method)
    try:
        reply = urllib.request.urlopen(asked, timeout=timeout)
    except urllib.error.HTTPError as error:  # an answer as well
        reply = error
    except OSError as error:
        raise ConnectionError(f"{url}: {error}") from None
    with reply:
        return Response(url, reply.status, reply.headers, reply.read())


def get(url, **more):
    return request("GET", url, **more)


def post(url, **more):
    return request("POST", url, **more)


def put(url, **more):
    return request("PUT", url, **more)


def delete(url, **more):
    return request("DELETE", url, **more)


exceptions = sys.modules[__name__]  # requests.exceptions.HTTPError ...

"""The small model and the prompt that come with the package, so that everything can be tried offline."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

DEMO_PROMPT = '''\
import json
import logging
import urllib.request
from urllib.parse import urlencode, urlparse


class HTTPClient:
    """A simple client for HTTP requests."""

    def __init__(self, base_url, timeout=None, headers=None):
        self.base_url = base_url
        self.timeout = timeout
        self.headers = headers or {}

    def get(self, path, params=None):
        """Send a GET request."""
        return self.request("GET", path, params=params)

    def post(self, path, data=None):
        """Send a POST request."""
        return self.request("POST", path, data=data)

    def request(self, method, path, params=None, data=None):'''
"""The beginning of a Python class. What follows it takes up names and shapes that it has used before, which is what
on which lookahead decoding pays. It ends without a line break: the model's tokens join a break to the indentation."""


def demo_model_path() -> Path:
    """Folder of the demonstration model: a Llama of 5.9 million parameters trained on Python code.

    It loads with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, offline.
    """
    return Path(str(files("lookahead") / "demo_model"))

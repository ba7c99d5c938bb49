"""The small model and the prompt that come with the package, so that everything can be tried offline."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

DEMO_PROMPT = '''\
import json
import os


class Settings:
    """Settings of a program, read from a file."""

    def __init__(self, path, name=None, values=None):
        self.path = path
        self.name = name
        self.values = values or {}

    def get_path(self):
        return self.path

    def get_name(self):
'''
"""The beginning of a Python class whose continuation repeats names and shapes that it has used before."""


def demo_model_path() -> Path:
    """Folder of the demonstration model: a Llama of 5.9 million parameters trained on Python code.

    It loads with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, offline.
    """
    return Path(str(files("lookahead") / "demo_model"))

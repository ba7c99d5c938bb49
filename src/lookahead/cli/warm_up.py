"""`lookahead warm-up`: compile loops, try a model and time its steps, before the first call."""

from __future__ import annotations

import torch

from lookahead.backends.transformers.snapshots import fingerprint
from lookahead.bench.tuning import CONTEXTS, NODE_COUNTS
from lookahead.cli import process, signals
from lookahead.cli.loading import load_for_decoding
from lookahead.cli.rendering import Consoles, print_json
from lookahead.cli.settings import WarmUpSettings
from lookahead.cli.tune import fitting_contexts, keep_curve, measured_steps
from lookahead.core.compiled import are_kept, loops_folder
from lookahead.core.files import OWN_FOLDER, user_cache
from lookahead.errors import InvalidArgumentError

_REPEATS = 3
"""Timed steps of each size; fewer than in `tune`, as decoding corrects the curve."""


def run(settings: WarmUpSettings, consoles: Consoles) -> int:
    """Compile, try and measure, print the folders of the results, and return the exit code."""
    own = user_cache() / OWN_FOLDER
    loaded = load_for_decoding(settings, consoles.notes)
    fingerprint(torch.zeros(1))  # compiles the loop that finds changes of packed weights
    if not are_kept():
        raise InvalidArgumentError(f"{own} cannot keep compiled loops; name another folder by XDG_CACHE_HOME")
    paths = {"loops": str(loops_folder()), "trials": str(own / "findings")}
    config = settings.config
    if settings.price and loaded.is_transformers and not config.invariant:  # `tune` cannot measure invariant steps
        contexts = fitting_contexts(None, loaded, consoles.notes)
        contexts = contexts[: len(CONTEXTS) - 1]  # without the longest, which takes most of the time
        try:
            points = measured_steps(loaded, NODE_COUNTS, contexts, _REPEATS, config.pack_weights, consoles.notes)
        except KeyboardInterrupt:
            consoles.notes.print("interrupted; no prices are kept")
            return signals.INTERRUPTED
        paths["costs"] = str(keep_curve(loaded, points, config.pack_weights))
    if settings.json:
        print_json(consoles.out, {"model": loaded.origin or str(loaded.path), **paths, "versions": process.versions()})
    else:
        for name, place in paths.items():
            consoles.out.print(f"{name:6}  {place}", soft_wrap=True)
    return process.OK

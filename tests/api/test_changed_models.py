"""A model that changes after its first call gets a new trial: its text equals `generate`, or it is refused with the
message for a fresh model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import lookahead
from lookahead import Engine, LookaheadConfig, LookaheadError
from lookahead.backends.transformers.cache_names import CACHE
from model_zoo import build
from preloaded import preloaded
from quick import diagonal
from tiny.families import build as build_family
from tiny.variant import Variant

PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
DRAFTS = LookaheadConfig(step_budget=16)

Change = Callable[[PreTrainedModel], Any]
Hook = Callable[..., Any]


def shifted(where: Callable[[torch.Tensor], Any]) -> Hook:
    """Return a hook that adds to the hidden states at the indices chosen by `where`."""

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        states = (output[0] if isinstance(output, tuple) else output).clone()
        places = where(states)
        if places is not None:
            states[:, places] += 1.5
        return (states, *output[1:]) if isinstance(output, tuple) else states

    return hook


EVERYWHERE = shifted(lambda states: slice(None))
LAST = shifted(lambda states: slice(-1, None))
SINGLE = shifted(lambda states: slice(None) if states.shape[1] == 1 else None)
SEVERAL = shifted(lambda states: slice(None) if states.shape[1] > 1 else None)


def hooked(hook: Hook) -> Change:
    return lambda model: model.model.layers[1].register_forward_hook(hook).remove


def pre_hooked(model: PreTrainedModel) -> Any:
    def double(module: Any, inputs: Any) -> Any:
        return (inputs[0] * 2,) if inputs[0].shape[1] == 1 else None

    return model.lm_head.register_forward_pre_hook(double).remove


def hooked_for_all(model: PreTrainedModel) -> Any:
    layer = model.model.layers[1].mlp

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return SINGLE(module, inputs, output) if isinstance(module, type(layer)) else None

    return torch_module.register_module_forward_hook(hook).remove


def forward_replaced(model: PreTrainedModel) -> Any:
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        if output.logits.shape[1] == 1:
            output.logits = output.logits.flip(-1)
        return output

    model.forward = forward


def layer_forward_replaced(model: PreTrainedModel) -> Any:
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda states: plain(states) + states.mean(1, keepdim=True)


class Mixing(torch.nn.Module):
    """A layer that mixes all positions of a pass."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.inner(states) + states.mean(1, keepdim=True)
        return mixed


def module_swapped(model: PreTrainedModel) -> Any:
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)


class FlipsSingles(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.logits.shape[1] == 1:
            output.logits = output.logits.flip(-1)
        return output


def class_assigned(model: PreTrainedModel) -> Any:
    model.__class__ = FlipsSingles


def function_of_the_file_replaced(model: PreTrainedModel) -> Any:
    plain = modeling_llama.LlamaMLP.forward

    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = plain(self, states) + states.mean(1, keepdim=True)
        return mixed

    modeling_llama.LlamaMLP.forward = forward
    return lambda: setattr(modeling_llama.LlamaMLP, "forward", plain)


def body_of_a_method_replaced(model: PreTrainedModel) -> Any:
    """IPython's autoreload edits methods in this way."""
    method, body = modeling_llama.LlamaMLP.forward, modeling_llama.LlamaMLP.forward.__code__

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + x.mean(1, keepdim=True)
        return mixed

    method.__code__ = forward.__code__
    return lambda: setattr(method, "__code__", body)


def body_of_attention_replaced(model: PreTrainedModel) -> Any:
    function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    body = function.__code__

    def mean(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        return value.mean(2, keepdim=True).repeat(1, query.shape[1] // value.shape[1], query.shape[2], 1), None

    function.__code__ = mean.__code__
    return lambda: setattr(function, "__code__", body)


def attributes_replaced(model: PreTrainedModel) -> Any:
    layer = model.model.layers[0].mlp
    layer.__dict__ = {**vars(layer), "forward": Mixing(copy.copy(layer)).forward}


def prompt_without_a_causal_mask(model: PreTrainedModel) -> Any:
    """This setting has an effect in passes without a mask, over several tokens."""
    model.model.layers[0].self_attn.is_causal = False


def training_with_dropout(model: PreTrainedModel) -> Any:
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout(0.5))
    model.train()


def checkpointed(model: PreTrainedModel) -> Any:
    model.gradient_checkpointing_enable()
    model.train()


CHANGES: dict[str, Change] = {
    "hook everywhere": hooked(EVERYWHERE),
    "hook on the last place": hooked(LAST),
    "hook on single tokens": hooked(SINGLE),
    "hook on several tokens": hooked(SEVERAL),
    "pre-hook": pre_hooked,
    "global hook": hooked_for_all,
    "forward of the model": forward_replaced,
    "forward of a layer": layer_forward_replaced,
    "module": module_swapped,
    "class": class_assigned,
    "code of a class": function_of_the_file_replaced,
    "body of a method": body_of_a_method_replaced,
    "body of attention": body_of_attention_replaced,
    "all attributes of a module": attributes_replaced,
    "prompt without a causal mask": prompt_without_a_causal_mask,
    "dropout": training_with_dropout,
    "gradient checkpointing": checkpointed,
}


UNDONE = [name for name in CHANGES if "hook" in name or name.startswith(("code", "body"))]
"""Changes that `changed` undoes at its end."""


@contextmanager
def changed(model: PreTrainedModel, name: str) -> Iterator[None]:
    undo = CHANGES[name](model)
    try:
        yield
    finally:
        if callable(undo):
            undo()


def fresh() -> PreTrainedModel:
    return copy.deepcopy(build("llama"))


def outcome(call: Callable[[], torch.Tensor]) -> list[int] | str:
    try:
        return call()[0].tolist()
    except LookaheadError as refusal:
        return str(refusal)


def by_generate(model: PreTrainedModel) -> torch.Tensor:
    text: torch.Tensor = lookahead.generate(model, PROMPT, lookahead_config=DRAFTS, **GREEDY)
    return text


def by_attachment(model: PreTrainedModel) -> torch.Tensor:
    if "generate" not in vars(model):
        lookahead.attach(model, DRAFTS)
    text: torch.Tensor = model.generate(PROMPT, **GREEDY)
    return text


def by_hook_of_transformers(model: PreTrainedModel) -> torch.Tensor:
    text: torch.Tensor = model.generate(PROMPT, custom_generate=lookahead.generate, lookahead_config=DRAFTS, **GREEDY)
    return text


def by_rows(model: PreTrainedModel) -> torch.Tensor:
    text: torch.Tensor = lookahead.generate(model, PROMPT.repeat(2, 1), lookahead_config=DRAFTS, **GREEDY)
    assert torch.equal(text[0], text[1]) or model.training
    return text


def served(engine: Engine) -> torch.Tensor:
    handle = engine.submit(PROMPT, **GREEDY)
    try:
        engine.run()
    except LookaheadError:
        handle.result()  # raises the same error
        raise
    text: torch.Tensor = handle.result()
    return text


def by_engine(model: PreTrainedModel) -> torch.Tensor:
    return served(Engine(model, DRAFTS))


DOORS = {"generate": by_generate, "attach": by_attachment, "custom_generate": by_hook_of_transformers, "rows": by_rows}


def plainly(model: PreTrainedModel) -> list[int]:
    torch.manual_seed(0)
    text: list[int] = type(model).generate(model, PROMPT, **GREEDY)[0].tolist()
    return text


def check(result: list[int] | str, model: PreTrainedModel, door: Callable[[PreTrainedModel], torch.Tensor]) -> None:
    """Check an outcome: the text of `generate`, or the refusal of a model without earlier calls."""
    if isinstance(result, str):
        twin = copy.deepcopy(model)
        vars(twin).pop("generate", None)
        assert result == outcome(lambda: door(twin))
    else:
        assert result == plainly(model)


@pytest.mark.parametrize(("name", "door"), diagonal(CHANGES, DOORS))
def test_a_changed_model_is_tried_anew(name: str, door: str) -> None:
    model, call = fresh(), DOORS[door]
    assert outcome(lambda: call(model)) == plainly(model)
    with changed(model, name):
        check(outcome(lambda: call(model)), model, call)
    if name in UNDONE:
        assert outcome(lambda: call(model)) == plainly(model), "the change is undone"


def test_a_hook_that_changes_inside_is_tried_anew_after_forget() -> None:
    model, settings = fresh(), {"shifts": False}
    hooked(shifted(lambda states: slice(None) if settings["shifts"] and states.shape[1] == 1 else None))(model)
    assert outcome(lambda: by_generate(model)) == plainly(model)
    settings["shifts"] = True
    lookahead.forget(model)
    check(outcome(lambda: by_generate(model)), model, by_generate)


@pytest.mark.parametrize("name", CHANGES)
def test_a_live_engine_tries_a_changed_model_anew(name: str) -> None:
    model = fresh()
    engine = Engine(model, DRAFTS)
    assert outcome(lambda: served(engine)) == plainly(model)
    with changed(model, name):
        check(outcome(lambda: served(engine)), model, by_engine)


@pytest.mark.parametrize("name", ["hook on single tokens", "global hook", "class", "dropout"])
def test_fallback_plain_decodes_a_changed_model(name: str) -> None:
    model = fresh()
    by_generate(model)
    config = LookaheadConfig(step_budget=16, fallback="plain")
    with changed(model, name):
        expected = plainly(model)
        torch.manual_seed(0)
        with pytest.warns(lookahead.LookaheadWarning, match="decoded plainly"):
            text = lookahead.generate(model, PROMPT, lookahead_config=config, **GREEDY)
    assert text[0].tolist() == expected


def test_a_model_that_changes_while_it_writes_is_an_error() -> None:
    """The change happens in a callback; another thread could cause it as well."""
    model = fresh()
    handles: list[Any] = []

    def change(record: Any) -> None:
        if not handles:
            handles.append(model.model.layers[0].register_forward_hook(EVERYWHERE))

    with pytest.raises(lookahead.ModelChangedError, match="changed during decoding"):
        lookahead.generate(model, PROMPT, lookahead_config=DRAFTS, on_step=change, **GREEDY)
    handles[0].remove()
    assert outcome(lambda: by_generate(model)) == plainly(model)


def test_a_hook_that_comes_and_goes_is_tried_once() -> None:
    model = fresh()
    passes: list[int] = []

    def count(module: Any, inputs: Any, output: Any) -> None:
        passes.append(1)

    def call(is_hooked: bool) -> int:
        counter = model.lm_head.register_forward_hook(count) if is_hooked else None
        passes.clear()
        by_generate(model)
        if counter is not None:
            counter.remove()
        return len(passes)

    call(False)
    tried = call(True)
    call(False)
    assert call(True) < tried, "the same hook was tried before"


def test_trials_do_not_keep_a_changed_model_alive() -> None:
    model = copy.deepcopy(build("llama", attention="eager"))
    by_generate(model)
    model.model.layers[0].register_forward_hook(lambda module, inputs, output, kept=model: None)
    by_generate(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class Steered(torch.nn.Module):
    """A layer with the usual switches of a steering vector, acting on the last position of a pass."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.alpha, self.names, self.mode = inner, 0.0, ["off"], 0
        self.vector: torch.Tensor | None = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(states)
        is_on = self.vector is not None or self.alpha > 0 or "on" in self.names or self.mode == 1
        steered: torch.Tensor = LAST(self, (), output) if is_on else output
        return steered


@pytest.mark.parametrize(("name", "value"), [("vector", torch.ones(1)), ("alpha", 0.5), ("names", ["on"]), ("mode", 1)])
def test_switches_of_a_module_are_seen(name: str, value: Any) -> None:
    model = fresh()
    layer = model.model.layers[1].mlp = Steered(model.model.layers[1].mlp)
    before = getattr(layer, name)
    assert outcome(lambda: by_generate(model)) == plainly(model)
    setattr(layer, name, value)
    check(outcome(lambda: by_generate(model)), model, by_generate)
    setattr(layer, name, before)
    assert outcome(lambda: by_generate(model)) == plainly(model)


def test_dropout_that_is_switched_on_in_training_mode_is_seen() -> None:
    model = fresh().train()
    assert outcome(lambda: by_generate(model)) == plainly(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.4
    assert "differ" in str(outcome(lambda: by_generate(model)))


def test_one_hook_in_another_place_is_another_hook() -> None:
    model = fresh()

    def mix(module: Any, inputs: Any, output: Any) -> Any:
        return None if isinstance(output, tuple) else output + output.mean(1, keepdim=True)

    for part in (model.model.layers[0].self_attn, model.model.layers[0].mlp):
        handle = part.register_forward_hook(mix)
        check(outcome(lambda: by_generate(model)), model, by_generate)
        handle.remove()


def test_a_trial_puts_no_hook_back_that_was_removed() -> None:
    model = fresh()
    handle = model.model.layers[0].register_forward_hook(lambda *args: handle.remove(), with_kwargs=True)
    with pytest.raises(lookahead.ModelChangedError):
        by_generate(model)
    assert outcome(lambda: by_generate(model)) == plainly(model)


class Counting(torch.nn.Module):
    """A layer that stores numbers, names and functions in each pass."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.passes, self.is_prompt, self.last = inner, 0, True, ""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.is_prompt = states.shape[1] > 1
        self.last = f"pass {self.passes}"
        self.made = lambda: states
        output: torch.Tensor = self.inner(states)
        return output


def test_notes_that_passes_make_in_a_model_are_no_change() -> None:
    model = fresh()
    model.model.layers[1].mlp = Counting(model.model.layers[1].mlp)
    for _ in range(2):
        assert outcome(lambda: by_generate(model)) == plainly(model)
    engine = Engine(model, DRAFTS)
    handles = [engine.submit(PROMPT, **GREEDY) for _ in range(2)]
    engine.run()
    assert [handle.result()[0].tolist() for handle in handles] == [plainly(model)] * 2


def test_loading_another_model_is_no_change(tmp_path: Path) -> None:
    """While transformers loads a model, it replaces methods of all models."""
    model = fresh()
    model.save_pretrained(tmp_path)
    engine = Engine(model, DRAFTS)
    longer = {**GREEDY, "max_new_tokens": 150}
    expected = model.generate(PROMPT, **longer)
    handle = engine.submit(PROMPT, **longer)
    engine.step()
    loading = Thread(target=lambda: [LlamaForCausalLM.from_pretrained(tmp_path) for _ in range(5)])
    loading.start()
    while loading.is_alive():
        engine.step()
        assert outcome(lambda: by_generate(model)) == plainly(model)
    engine.run()
    assert torch.equal(handle.result(), expected)


def test_a_configuration_that_differs_between_layers_is_compared() -> None:
    model = build_family("gemma4", Variant(seed=1), "sdpa")
    for _ in range(2):
        assert outcome(lambda: by_generate(model)) == plainly(model)


def test_a_patched_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = fresh(), DynamicLayer.update
    assert outcome(lambda: by_generate(model)) == plainly(model)

    def halved(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, keys * 0.5, values, *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", halved)
    check(outcome(lambda: by_generate(model)), model, by_generate)


def test_values_that_cannot_be_copied_in_a_configuration_are_refused() -> None:
    model = fresh()
    model.config.extra = Lock()
    assert "could be tried" in str(outcome(lambda: by_generate(model)))


class OtherBehindACache(LlamaForCausalLM):
    """A model with another head if the cache is not empty."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        goes_on = cache is not None and cache.get_seq_length() > 0
        output = super().forward(*args, **kwargs)
        if goes_on:
            output.logits = output.logits.flip(-1)
        return output


def test_an_engine_refuses_a_model_that_reads_prompts_in_parts_otherwise() -> None:
    """Requests with a common prefix read the rest of their prompts after the cached part."""
    model = fresh()
    model.__class__ = OtherBehindACache
    with pytest.raises(lookahead.UnsupportedModelError, match="read in parts"):
        Engine(model, DRAFTS)
    assert outcome(lambda: by_generate(model)) == plainly(model)


def _compile_and_call() -> None:
    model = build("llama")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(PROMPT, **options)
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    assert torch.equal(lookahead.generate(model, PROMPT, **options), expected)


@pytest.mark.slow_by_nature("only the first compilation of a process replaces methods of torch's modules")
def test_the_first_compilation_of_a_process_may_happen_in_a_call() -> None:
    process = preloaded().Process(target=_compile_and_call)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_the_first_copy_of_a_cache_is_no_change() -> None:
    """Python keeps names of slots in a class when an object of it is first copied."""
    kind: Any = DynamicLayer
    if "__slotnames__" in vars(kind):
        del kind.__slotnames__
    model = fresh()
    expected = plainly(model)
    options = {**GREEDY, "on_step": lambda _: copy.copy(kind())}
    output = lookahead.generate(model, PROMPT, lookahead_config=DRAFTS, **options)
    assert "__slotnames__" in vars(kind)
    assert output[0].tolist() == expected


class Switched(torch.nn.Module):
    """A layer that mixes positions if one of its switches is set."""

    mode = "plain"

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.switches = {"mixes": False}
        self.space = SimpleNamespace(mixes=False)
        self.nested = [["plain"]]
        self.names = frozenset[str]()

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in self._modules else getattr(self._modules["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = self.layer(*args, **kwargs)
        mixes = self.switches["mixes"] or self.space.mixes or self.nested[0][0] == "mixes" or "mixes" in self.names
        return states + states.mean(-2, keepdim=True) if mixes or self.mode == "mixes" else states


def _set_in_list(layer: Switched) -> None:
    layer.nested[0][0] = "mixes"


SWITCHES: dict[str, Callable[[Any], Any]] = {
    "in a dict": lambda layer: layer.switches.update(mixes=True),
    "another dict": lambda layer: setattr(layer, "switches", {"mixes": True}),
    "in an object": lambda layer: setattr(layer.space, "mixes", True),
    "in a list": _set_in_list,
    "another set": lambda layer: setattr(layer, "names", frozenset({"mixes"})),
    "of the class": lambda layer: setattr(type(layer), "mode", "mixes"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_in_a_container_is_seen(switch: str) -> None:
    model = fresh()
    layer = Switched(model.model.layers[0])
    layer.__class__ = type("Own", (Switched,), {"mode": "plain"})  # no test changes the class of another
    model.model.layers[0] = layer
    idle, running = Engine(model, DRAFTS), Engine(model, LookaheadConfig(step_budget=4))
    assert by_generate(model)[0].tolist() == served(idle)[0].tolist() == plainly(model)
    begun = running.submit(PROMPT, **GREEDY)
    running.step()
    SWITCHES[switch](layer)
    check(outcome(lambda: by_generate(model)), model, by_generate)
    check(outcome(lambda: served(idle)), model, by_engine)
    with pytest.raises(LookaheadError):
        begun.result()
    assert begun.finish_reason == "error"

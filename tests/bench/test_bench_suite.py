"""Suite files of benchmarks: contents, defaults, and refusals that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_suite import AUTO, MODEL, PLAIN, SAMPLED, TASK, write_prompts
from lookahead import InvalidArgumentError, LookaheadConfig
from lookahead.bench.rows import read_prompts
from lookahead.bench.suite import SamplingSpec, TaskSpec, read_suite
from lookahead.cli import main

CONFIGS = sorted((Path(__file__).parents[2] / "benchmarks" / "configs").glob("*.toml"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    write_prompts(tmp_path)
    return tmp_path


def test_every_key_of_the_file_is_read(folder: Path) -> None:
    path = folder / "suite.toml"
    random = '[[models]]\nname = "made"\nrandom = { hidden_size = 8 }\nseed = 4\n'
    assisted = '[[methods]]\nname = "assisted"\ntransformers = { num_beams_ = 1 }\nassistant = "demo"\n'
    path.write_text("repeats = 2\n" + MODEL + random + TASK + SAMPLED + "prompts = 7\n" + PLAIN + AUTO + assisted)
    suite = read_suite(path)
    assert suite.repeats == 2
    assert [(model.name, model.path, model.exact) for model in suite.models] == [
        ("tiny", folder / "tiny", True),
        ("made", None, True),
    ]
    assert suite.models[1].random == {"hidden_size": 8}
    assert suite.models[1].seed == 4
    greedy, sampled = suite.tasks
    assert (greedy.sampling, greedy.prompts, greedy.keep) == (None, None, "end")
    assert (sampled.sampling, sampled.prompts) == (SamplingSpec(temperature=0.8, seed=3), 7)
    assert sampled.data == folder / "words.jsonl"
    plain, auto, assisted_method = suite.methods
    assert plain.is_reference
    assert auto.lookahead == LookaheadConfig(preset="auto", memory="request")
    assert assisted_method.assistant == "demo"
    assert not assisted_method.keeps_draws(sampled)
    assert assisted_method.keeps_draws(greedy)
    assert auto.keeps_draws(sampled)


def test_each_makes_several_tables_of_one(folder: Path) -> None:
    path = folder / "suite.toml"
    tasks = '[[tasks]]\ndata = "words.jsonl"\nmax_new_tokens = 3\n'
    tasks += "[tasks.each]\ngreedy = {}\nlong = { max_new_tokens = 9 }\n"
    methods = '[[methods]]\nlookahead = { preset = "auto", memory = "process" }\n[methods.each]\n'
    methods += '"auto, 8".lookahead = { step_budget = 8 }\n"auto, 9".lookahead = { step_budget = 9 }\n'
    path.write_text(MODEL + tasks + PLAIN + methods)
    suite = read_suite(path)
    assert [(task.name, task.max_new_tokens) for task in suite.tasks] == [("greedy", 3), ("long", 9)]
    assert [method.name for method in suite.methods] == ["plain", "auto, 8", "auto, 9"]
    assert suite.methods[2].lookahead == LookaheadConfig(preset="auto", memory="process", step_budget=9)


def test_tasks_may_name_their_models(folder: Path) -> None:
    path = folder / "suite.toml"
    other = MODEL.replace('name = "tiny"', 'name = "other"')
    path.write_text(MODEL + other + TASK + SAMPLED + 'models = ["other"]\n' + PLAIN)
    suite = read_suite(path)
    assert [[task.name for task in suite.tasks_of(model)] for model in suite.models] == [["words"], ["words", "drawn"]]


def test_prompts_are_found_in_the_data_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("suites") / "suite.toml"
    path.write_text(MODEL.replace('"tiny"\n', '"demo"\n') + TASK + PLAIN)
    with pytest.raises(InvalidArgumentError, match=r"tasks\[0\].data='words.jsonl'.*--data"):
        read_suite(path)
    assert read_suite(path, folder).tasks[0].data == folder / "words.jsonl"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_suite_of_the_repository_is_valid(path: Path, folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    for name in ("humaneval", "classeval", "gsm8k", "spec_bench", "stories"):
        (data / f"{name}.jsonl").write_text('{"id": "a", "prompt": "b"}\n')
    model = folder / "models" / "stories260k"  # relative to the data, as in the suite
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    suite = read_suite(path, data)
    assert any(method.lookahead is not None for method in suite.methods)
    assert all(suite.tasks_of(model) for model in suite.models)


WHOLE = MODEL + TASK + PLAIN


@pytest.mark.parametrize(
    ("suite", "words"),
    [
        ("models = [", ["not a TOML file"]),
        (TASK + PLAIN, ["models", "at least one table"]),
        (MODEL + PLAIN, ["tasks", "at least one table"]),
        ("models = 3\n" + TASK + PLAIN, ["models", "[[models]]"]),
        ("repeats = 0\n" + WHOLE, ["repeats=0", "at least 1"]),
        ("repeat = 2\n" + WHOLE, ["repeat is not a key", "repeats"]),
        ("exact = 1\n" + WHOLE, ["exact=1", "true or false"]),
        (MODEL + MODEL + TASK + PLAIN, ["models[1].name='tiny'", "twice"]),
        (MODEL.replace('name = "tiny"', "") + TASK + PLAIN, ["models[0].name", "missing"]),
        (MODEL.replace('path = "tiny"', "") + TASK + PLAIN, ["models[0]", "`path` and `random`"]),
        (MODEL.replace('path = "tiny"', 'path = "none"') + TASK + PLAIN, ["models[0].path='none'", "config.json"]),
        (MODEL.replace('path = "tiny"', "random = { x = 1 }") + TASK + PLAIN, ["models[0].random.x", "LlamaConfig"]),
        (MODEL + 'dtype = "int8"\n' + TASK + PLAIN, ["models[0].dtype='int8'", "bfloat16"]),
        (MODEL + TASK.replace("words.jsonl", "none.jsonl") + PLAIN, ["tasks[0].data='none.jsonl'", "--data"]),
        (MODEL + TASK.replace("12", '"12"') + PLAIN, ["tasks[0].max_new_tokens='12'", "whole number"]),
        (MODEL + TASK + 'keep = "middle"\n' + PLAIN, ["tasks[0].keep='middle'", "beginning"]),
        (MODEL + TASK + "sampling = { temperature = 0 }\n" + PLAIN, ["tasks[0].sampling.temperature=0", "above 0"]),
        (MODEL + TASK + "sampling = { top_p = 2 }\n" + PLAIN, ["tasks[0].sampling.top_p=2", "at most 1"]),
        (MODEL + TASK + "sampling = { heat = 2 }\n" + PLAIN, ["tasks[0].sampling.heat is not a key", "temperature"]),
        (MODEL + TASK + "sampling = 1\n" + PLAIN, ["tasks[0].sampling=1", "table"]),
        (MODEL + TASK + 'models = ["none"]\n' + PLAIN, ["'words'", "none", "tiny"]),
        (MODEL + TASK + 'models = "tiny"\n' + PLAIN, ["tasks[0].models='tiny'", "list"]),
        (MODEL + TASK + "each = {}\n" + PLAIN, ["tasks[0] must have a name, or names"]),
        (MODEL + TASK + "each = { a = {} }\n" + PLAIN, ["tasks[0] must have a name, or names"]),
        (MODEL + TASK + AUTO, ["methods", "transformers = {}", "none"]),
        (WHOLE + PLAIN.replace('"plain"', '"again"'), ["methods", "exactly one", "'plain', 'again'"]),
        (WHOLE + '[[methods]]\nname = "x"\n', ["methods[1] ('x')", "`lookahead`", "`transformers`"]),
        (WHOLE + AUTO.replace("preset", "present"), ["methods[1].lookahead", "'present'"]),
        (WHOLE + AUTO.replace('"auto" }', '"fast" }'), ["methods[1].lookahead", "preset='fast'", "auto"]),
        (WHOLE + AUTO.replace(" }", ", step_budget = 0 }"), ["methods[1].lookahead", "step_budget=0"]),
        (WHOLE + AUTO.replace(" }", ', memory = "a.bin" }'), ["methods[1].lookahead.memory='a.bin'", "process"]),
        (WHOLE + PLAIN.replace("{}", "{ do_sample = true }"), ["methods[1].transformers.do_sample", "tasks"]),
        (WHOLE + AUTO + 'assistant = "demo"\n', ["methods[1].assistant applies to methods of transformers only"]),
    ],
)
def test_wrong_keys_and_values_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], suite: str, words: list[str]
) -> None:
    path = folder / "suite.toml"
    path.write_text(suite)
    assert main(["bench", "run", str(path), "--output", str(folder / "out.jsonl")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not (folder / "out.jsonl").exists()


def test_files_that_are_no_suite_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", "none.toml", "--output", "out.jsonl"]) == 2
    assert "cannot read the benchmark none.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "field", "message"),
    [
        ("", None, "contains no prompts"),
        ('{"id": "a"}\n', None, "line 1 needs a text in `prompt` or `turns`"),
        ('{"prompt": "x"}\n', None, "line 1 needs an `id`"),
        ('{"id": "a", "prompt": "x"}\nplain text\n', None, "line 2 is not JSON"),
        ('{"id": "a", "prompt": "x"}\n\n{"id": "a", "prompt": "y"}\n', None, "same `id` twice"),
        ('{"id": "a", "prompt": "x"}\n', "question", "needs a text in `question`, as task 'words' says"),
    ],
)
def test_unusable_prompt_files_are_refused(tmp_path: Path, lines: str, field: str | None, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(InvalidArgumentError, match=message):
        read_prompts(TaskSpec("words", path, field))


def test_prompts_are_read_from_the_named_field(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": 1, "question": "x", "prompt": "y"}\n{"id": 2, "question": ["z", "w"]}\n')
    prompts = read_prompts(TaskSpec("words", path, "question"))
    assert [(prompt.id, prompt.number, prompt.text) for prompt in prompts] == [("1", 0, "x"), ("2", 1, "z")]
    assert len(read_prompts(TaskSpec("words", path, "question", prompts=1))) == 1
    assert len(read_prompts(TaskSpec("words", path, "question"), limit=1)) == 1


def test_every_takes_each_nth_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"id": {number}, "prompt": "x"}}\n' for number in range(7)))
    prompts = read_prompts(TaskSpec("words", path, every=3, prompts=2))
    assert [(prompt.id, prompt.number) for prompt in prompts] == [("0", 0), ("3", 3)]


def test_only_takes_the_prompts_of_a_task(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    kinds = ("chat/long", "code", "chat/long", "chat", "chatter")
    path.write_text("".join(f'{{"id": {n}, "task": "{kind}", "prompt": "x"}}\n' for n, kind in enumerate(kinds)))
    prompts = read_prompts(TaskSpec("words", path, only="chat"))
    assert [(prompt.id, prompt.number) for prompt in prompts] == [("0", 0), ("2", 2), ("3", 3)]
    assert [prompt.id for prompt in read_prompts(TaskSpec("words", path, only="chat", every=2))] == ["0", "3"]
    with pytest.raises(InvalidArgumentError, match="no prompts of only='prose'"):
        read_prompts(TaskSpec("words", path, only="prose"))

"""The code keeps the shape that the design gives it: imports point one way, heavy ones wait, the script is the function."""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hsray
from hsray.flags import parse_bytes
from hsray.request import CHOICES
from pipelines.build import ESTIMATE, INSTEAD, main, make_parser
from pipelines.check import make_parser as make_check_parser

ROOT = Path(__file__).parent.parent

#: A module may import those before it.
ORDER = [
    "flags",
    "strict_json",
    "store",
    "tasks",
    "layers",
    "model",
    "describe",
    "pieces",
    "tokens",
    "chat",
    "shapes",
    "sources",
    "prompts",
    "seen",
    "plan",
    "float8",
    "digest",
    "shard",
    "containers",
    "shard_file",
    "manifest",
    "attempts",
    "lease",
    "cpu",
    "engine",
    "request",
    "raydata",
    "engine_transformers",
    "norm",
    "canary",
    "staging",
    "capture",
    "engine_sglang",
    "sglang_cpu",
    "report",
    "sentinel",
    "standstill",
    "worker",
    "events",
    "rounds",
    "pipeline",
    "audit",
    "estimator",
    "row_group",
    "batch_memory",
    "stream",
    "ray_view",
    "reader",
    "summary",
    "faults",
    "recompute",
    "verifier",
    "targets",
    "exporter",
    "converter",
]

#: `open_engine` opens an engine by name: it alone reaches forward, and only when called.
FORWARD = {
    ("engine", "engine_transformers"),
    ("engine", "engine_sglang"),
    ("stream", "reader"),  # for a type's name, as is
    ("ray_view", "reader"),
}

HEAVY = {"torch", "ray", "transformers", "sglang"}

MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted((ROOT / "hsray").glob("*.py"))}


def imports_of(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """The dotted names that a module imports: when it is imported itself, or ever."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not (_is_function(node) or _is_type_checking(node)):
            yield from imports_of(node, everywhere=everywhere)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def packages_of(tree: ast.AST, *, everywhere: bool) -> set[str]:
    return {name.split(".")[0] for name in imports_of(tree, everywhere=everywhere)}


def own_modules_of(tree: ast.AST, *, everywhere: bool) -> set[str]:
    names = [name.split(".") for name in imports_of(tree, everywhere=everywhere)]
    return {parts[1] for parts in names if parts[0] == "hsray" and len(parts) > 1 and parts[1] in MODULES}


def test_every_module_has_its_place_in_the_order():
    assert set(MODULES) - {"__init__"} <= set(ORDER)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__init__"])
def test_imports_between_our_modules_point_one_way(name):
    allowed = set(ORDER[: ORDER.index(name)])
    assert own_modules_of(MODULES[name], everywhere=False) <= allowed
    forward = own_modules_of(MODULES[name], everywhere=True) - allowed
    assert {(name, other) for other in forward} <= FORWARD


def test_only_the_pipeline_and_what_reads_prompts_or_whole_datasets_knows_ray():
    users = {name for name, tree in MODULES.items() if "ray" in packages_of(tree, everywhere=True)}
    assert users == {
        "attempts",
        "audit",
        "converter",
        "raydata",
        "events",
        "rounds",
        "pipeline",
        "sources",
        "prompts",
        "tasks",
        "exporter",
        "ray_view",
        "reader",
    }  # reader: a type


@pytest.mark.parametrize(
    "name", sorted(set(MODULES) - {"row_group", "batch_memory", "stream"})
)  # they give torch's own classes
def test_no_module_imports_a_heavy_package_when_it_is_imported(name):
    assert not packages_of(MODULES[name], everywhere=False) & HEAVY


def test_only_what_serves_its_engine_knows_sglang():
    users = {name for name, tree in MODULES.items() if "sglang" in packages_of(tree, everywhere=True)}
    assert users <= {"canary", "capture", "engine_sglang", "sglang_cpu", "model"}  # model: for the configs it knows


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_and_class_says_what_it_is(name):
    assert ast.get_docstring(MODULES[name])
    silent = [node.name for node in public_definitions(MODULES[name]) if not ast.get_docstring(node)]
    assert silent == []


def public_definitions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions, classes and methods without an underscore; not properties, nor `close`, whose contract says it."""
    for node in tree.body:
        named = isinstance(node, ast.ClassDef) or _is_function(node)
        if named and not node.name.startswith("_") and node.name != "close" and not _is_property(node):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node)


def _is_property(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


EVERY_ACTION = {action.dest: action for action in make_parser()._actions if action.dest != "help"}
ACTIONS = {name: action for name, action in EVERY_ACTION.items() if name not in (*INSTEAD, *ESTIMATE)}
KEYWORDS = inspect.signature(hsray.build).parameters


def test_each_flag_is_a_keyword_of_build_and_each_keyword_a_flag():
    assert set(ACTIONS) == set(KEYWORDS)
    for name, action in ACTIONS.items():
        assert action.option_strings[0] == "--" + name.replace("_", "-")


def test_the_other_flags_are_the_keywords_of_an_estimate():
    parameters = inspect.signature(hsray.estimate).parameters.values()
    assert [item.name for item in parameters if item.kind is item.KEYWORD_ONLY] == list(ESTIMATE)
    assert all(EVERY_ACTION[item.name].default == item.default for item in parameters if item.name in ESTIMATE)
    assert set(EVERY_ACTION) == {*KEYWORDS, *INSTEAD, *ESTIMATE}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_flag_left_out_is_a_keyword_left_out(name):
    action, keyword = ACTIONS[name], KEYWORDS[name]
    assert action.required == (keyword.default is inspect.Parameter.empty)
    if not action.required:
        assert action.default == keyword.default


def test_choices_are_those_of_the_function():
    for name in ("engine", *CHOICES):
        literal = inspect.get_annotations(hsray.build, eval_str=False)[name]
        assert list(ACTIONS[name].choices) == list(literal.__args__)
        assert name == "engine" or literal.__args__ == CHOICES[name]


def test_each_flag_of_a_check_is_a_keyword_of_it_with_its_default():
    keywords = inspect.signature(hsray.check).parameters
    actions = {action.dest: action for action in make_check_parser()._actions if action.dest != "help"}
    assert set(actions) == set(keywords)
    for name, keyword in keywords.items():
        assert actions[name].required or (actions[name].default or None) == (keyword.default or None)


def test_help_explains_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out.partition("options:")[2]
    for action in EVERY_ACTION.values():
        assert re.search(rf"^  {action.option_strings[0]}\b", shown, re.MULTILINE)
        assert action.help and action.help in shown


REQUIRED = ["--model", "m", "--dataset", "a.jsonl", "b/*.jsonl", "--out", "o"]


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--layers", "-1", "9", "final"], "layers", ["-1", "9", "final"]),
        (["--layers", "eagle3"], "dataset", ["a.jsonl", "b/*.jsonl"]),
        (["--layers", "0", "--shard-bytes", "1.5GB"], "shard_bytes", 1_500_000_000),
        (["--layers", "0", "--engine-args", '{"seed": 2}'], "engine_args", {"seed": 2}),
        (["--layers", "0", "--tensor-parallel", "2"], "tensor_parallel", 2),
        (["--layers", "0", "--columns", '{"id": "uuid"}'], "columns", {"id": "uuid"}),
        (["--layers", "0", "--no-progress"], "progress", False),
        (["--layers", "0"], "progress", True),
        (["--layers", "0", "--trust-remote-code"], "trust_remote_code", True),
    ],
)
def test_flags_are_read_as_values(flags, name, value):
    assert vars(make_parser().parse_args([*REQUIRED, *flags]))[name] == value


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000000", 10**6), ("256MiB", 256 << 20), ("1 GiB", 1 << 30), ("1.5GB", 1_500_000_000), ("8b", 8)],
)
def test_bytes_are_read_with_their_unit(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-1MB", "1e9", "1.2.3GB", "."])
def test_what_is_no_number_of_bytes_is_an_error_that_shows_it(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of bytes; write for example 256MiB"):
        parse_bytes(text)

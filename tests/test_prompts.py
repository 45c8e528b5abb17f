"""Any dataset becomes the same prompts in the same order, and a row that cannot is named with its file and line."""

import json
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray.chat import tokenize_chat, tokenize_text
from hsray.plan import PlanOptions, write_plan
from hsray.plan import digest_rows as digest_blocks
from hsray.prompts import PROMPTS_SCHEMA, PromptError, PromptOptions, digest_rows, read_rows, tokenize_rows
from hsray.store import Store

VOCAB_SIZE = 49152
PLAN_OPTIONS = PlanOptions(bytes_per_token=8, value_bytes_per_token=8, shard_bytes=100, max_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def ray_data(ray_session: None) -> Iterator[None]:
    """Ray Data as a build sets it."""
    from ray.data import DataContext

    context = DataContext.get_current()
    before = context.enable_progress_bars, context.execution_options.preserve_order
    context.enable_progress_bars, context.execution_options.preserve_order = False, True
    yield
    context.enable_progress_bars, context.execution_options.preserve_order = before


def blocks_of(dataset: Any) -> list[pa.Table]:
    """A Ray dataset's blocks that hold something."""
    blocks = dataset.iter_batches(batch_size=None, batch_format="pyarrow")
    return [block for block in blocks if block.num_rows]


def rows_of(dataset: Any) -> list[dict]:
    return [row for block in blocks_of(dataset) for row in block.to_pylist()]


def digest_of(dataset: Any) -> str:
    return digest_blocks(blocks_of(digest_rows(read_rows(dataset))))


@pytest.fixture(scope="module")
def options(demo_model: Path) -> PromptOptions:
    return PromptOptions(
        model=str(demo_model), trust_remote_code=False, vocab_size=VOCAB_SIZE, max_tokens=64, too_long="error"
    )


def prompts_of(dataset: Any, options: PromptOptions) -> list[dict]:
    return rows_of(tokenize_rows(read_rows(dataset), options))


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several blocks each, the largest first."""
    folder = tmp_path_factory.mktemp("rows")
    for number, count in enumerate([3000, 1, 1500, 700]):
        write_lines(folder / f"part-{number}.jsonl", [{"id": f"{number}-{i}", "text": "x"} for i in range(count)])
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[str, str]]:
    files = sorted(folder.glob("*.jsonl"))
    return [
        (f"{file}:{number}", line)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
    ]


class TestReadingRows:
    """Every row once, in order, with the place it came from."""

    def test_files_in_the_order_given(self, folder: Path, expected: list):
        files = [folder / f"part-{number}.jsonl" for number in (3, 0, 1, 2)]
        found = [(row["source"], row["row"]) for row in rows_of(read_rows(files))]
        assert found == [pair for file in files for pair in expected if pair[0].startswith(f"{file}:")]

    def test_a_glob_in_the_order_of_names(self, folder: Path, expected: list):
        found = [(row["source"], row["row"]) for row in rows_of(read_rows(f"{folder}/part-*.jsonl"))]
        assert found == expected

    def test_a_path_and_a_url(self, folder: Path):
        path = folder / "part-2.jsonl"
        rows = rows_of(read_rows(path))
        assert len(rows) == 1500
        assert rows_of(read_rows(str(path))) == rows
        assert rows_of(read_rows(f"file://{path}")) == rows

    def test_blank_lines_are_no_rows_but_count_as_lines(self, tmp_path: Path):
        path = tmp_path / "gaps.jsonl"
        path.write_text('\n{"text": "a"}\n\n   \n\t{"text": "b"}  \r\n{"text": "c"}')
        assert [(row["source"], row["row"]) for row in rows_of(read_rows(path))] == [
            (f"{path}:2", '{"text": "a"}'),
            (f"{path}:5", '{"text": "b"}'),
            (f"{path}:6", '{"text": "c"}'),
        ]

    def test_an_empty_file_has_no_rows(self, tmp_path: Path):
        for name in ("empty.jsonl", "void.jsonl"):
            (tmp_path / name).write_text("")
        full = write_lines(tmp_path / "full.jsonl", [{"text": "a"}])
        assert rows_of(read_rows(tmp_path / "empty.jsonl")) == []
        assert len(rows_of(read_rows([tmp_path / "empty.jsonl", full, tmp_path / "void.jsonl"]))) == 1
        with pytest.raises(ValueError, match="names .* twice; its prompts would be doubled"):
            read_rows([full, full])

    def test_unusual_names_and_contents(self, tmp_path: Path):
        path = write_lines(tmp_path / "a [b] ü 你.jsonl", [{"text": "naïve 🙂 \u2028 \x85 end"}])
        [row] = rows_of(read_rows(path))
        assert row["source"] == f"{path}:1"
        assert json.loads(row["row"]) == {"text": "naïve 🙂 \u2028 \x85 end"}

    def test_a_parquet_files_rows(self, tmp_path: Path):
        path = tmp_path / "rows.parquet"
        rows = [{"text": f"t{number}", "id": number} for number in range(3000)]
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
        found = rows_of(read_rows(path))
        assert [json.loads(row["row"]) for row in found] == rows
        assert [row["source"] for row in found] == [f"{path}: row {number}" for number in range(3000)]

    def test_a_lists_dicts(self):
        rows = [{"text": f"t{number}"} for number in range(2500)]
        found = rows_of(read_rows(rows))
        assert [json.loads(row["row"]) for row in found] == rows
        assert [row["source"] for row in found] == [f"dataset[{number}]" for number in range(2500)]

    def test_a_ray_datasets_rows(self):
        import ray.data

        rows = [{"input_ids": [number, 1], "id": f"r{number}"} for number in range(500)]
        found = rows_of(read_rows(ray.data.from_items(rows, override_num_blocks=7)))
        assert [json.loads(row["row"]) for row in found] == rows

    @pytest.mark.parametrize("pattern", ["nowhere.jsonl", "*.jsonl", ""])
    def test_a_path_that_names_no_file_is_an_error(self, tmp_path: Path, pattern: str):
        with pytest.raises(FileNotFoundError, match="names no file; give a JSONL or Parquet file, or a glob of them"):
            read_rows(str(tmp_path / pattern))

    def test_a_file_of_an_unknown_type_is_an_error(self, tmp_path: Path):
        (tmp_path / "rows.csv").write_text("text\na\n")
        with pytest.raises(
            ValueError, match=r"rows.csv' is of an unknown type; wanted .jsonl, .json \(lines\) or .parquet"
        ):
            read_rows(tmp_path / "*.csv")

    @pytest.mark.parametrize("dataset", [7, None, {"text": "a"}, [{"text": "a"}, "b.jsonl"], [1, 2]])
    def test_another_kind_of_dataset_is_an_error(self, dataset: Any):
        with pytest.raises(ValueError, match=f"a dataset of type {type(dataset).__name__} is not known; wanted JSONL"):
            read_rows(dataset)


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]

GOOD_ROWS = [
    {"text": "Once upon a time"},
    {"messages": MESSAGES},
    {"input_ids": [5, 6, 7]},
    {"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]},
    {"id": "a17", "text": "Once upon a time"},
    {"prompt_id": "b3", "id": "not this", "text": "x"},
    {"id": 12, "text": "y"},
    {"text": "no", "input_ids": [1], "messages": None},
    {"text": "no", "messages": MESSAGES, "input_ids": None, "unknown": {"a": [1]}},
    {"input_ids": [0, VOCAB_SIZE - 1]},
    {"input_ids": [1] * 64},
]


@pytest.fixture(scope="module")
def prompts(options: PromptOptions) -> list[dict]:
    return prompts_of(GOOD_ROWS, options)


class TestPrompts:
    """What a row's prompt is."""

    def test_prompts_of_many_blocks_keep_their_order_though_the_first_takes_longest(self, options: PromptOptions):
        rows = [{"id": number, "text": "word " * 400} for number in range(1000)]
        rows += [{"id": number, "input_ids": [number]} for number in range(1000, 6000)]
        prompts = prompts_of(rows, replace(options, too_long="drop"))
        assert [prompt["prompt_id"] for prompt in prompts] == [str(number) for number in range(6000)]

    def test_tokens_and_masks_are_those_of_the_row(self, prompts: list[dict], demo_tokenizer):
        text, chat = tokenize_text(demo_tokenizer, "Once upon a time"), tokenize_chat(demo_tokenizer, MESSAGES)
        assert [prompt["error"] for prompt in prompts] == [None] * len(GOOD_ROWS)
        assert [(prompt["input_ids"], prompt["loss_mask"]) for prompt in prompts] == [
            text,
            chat,
            ([5, 6, 7], [True, True, True]),
            ([5, 6, 7], [False, True, True]),
            text,
            tokenize_text(demo_tokenizer, "x"),
            tokenize_text(demo_tokenizer, "y"),
            ([1], [True]),
            chat,
            ([0, VOCAB_SIZE - 1], [True, True]),
            ([1] * 64, [True] * 64),
        ]
        assert {prompt["too_long"] for prompt in prompts} == {False}

    def test_a_rows_own_id_is_kept(self, prompts: list[dict]):
        assert [prompts[index]["prompt_id"] for index in (4, 5, 6)] == ["a17", "b3", "12"]

    def test_without_one_the_id_is_that_of_tokens_and_mask(self, prompts: list[dict]):
        ids = [prompt["prompt_id"] for prompt in prompts]
        assert all(ids[index].startswith("#") for index in (0, 1, 2, 3, 7, 8))
        assert ids[1] == ids[8]
        assert len({ids[0], ids[1], ids[2], ids[3], ids[7]}) == 5

    def test_the_same_rows_from_any_source_are_the_same_prompts(self, options: PromptOptions, prompts, tmp_path: Path):
        import ray.data

        rows = [row for row in GOOD_ROWS if "unknown" not in row]
        rows[3] = rows[3] | {"loss_mask": [0, 1, 1]}
        rows[6] = rows[6] | {"id": "12"}
        names = ["text", "messages", "input_ids", "loss_mask", "id", "prompt_id"]
        table = pa.Table.from_pylist([dict.fromkeys(names) | row for row in rows])
        pq.write_table(table, tmp_path / "rows.parquet")
        sources = [
            write_lines(tmp_path / "rows.jsonl", rows),
            tmp_path / "rows.parquet",
            ray.data.from_arrow([table.slice(0, 4), table.slice(4)]),
        ]
        content = operator.itemgetter("prompt_id", "input_ids", "loss_mask")
        wanted = [content(prompt) for prompt, row in zip(prompts, GOOD_ROWS, strict=True) if "unknown" not in row]
        for source in sources:
            assert [content(prompt) for prompt in prompts_of(source, options)] == wanted

    def test_a_model_without_a_tokenizer_serves_token_ids_alone(self, options: PromptOptions, tiny_llama: Path):
        rows = [{"input_ids": [1, 2]}, {"text": "a"}, {"messages": MESSAGES}]
        found = prompts_of(rows, replace(options, model=str(tiny_llama)))
        error = "the model's folder has no tokenizer; give 'input_ids', or a model with one"
        assert [prompt["error"] for prompt in found] == [None, error, error]

    def test_a_prompt_over_max_tokens_is_kept_to_be_dropped_where_that_is_allowed(self, options: PromptOptions):
        rows = [{"id": "just", "input_ids": [1] * 64}, {"id": "over", "input_ids": [1] * 65}]
        just, over = prompts_of(rows, replace(options, too_long="drop"))
        assert (just["too_long"], just["error"]) == (False, None)
        assert (over["too_long"], over["error"], over["prompt_id"]) == (True, None, "over")

    def test_a_prompt_is_never_shortened(self, options: PromptOptions):
        [prompt] = prompts_of([{"text": "word " * 100}], replace(options, too_long="drop"))
        assert prompt["too_long"]
        assert len(prompt["input_ids"]) > 64


NO_COLUMN = "has none of the columns 'input_ids', 'messages', 'text'; found {}: rename one"
NO_INTEGERS = "'input_ids' must be a list of integers"
EMPTY = "an empty prompt: it has no tokens; remove the row"
VOCABULARY = (
    f"token id {{}} is outside the model's vocabulary 0..{VOCAB_SIZE - 1}; was it made with another model's tokenizer?"
)
MASK = "'loss_mask' must be {} values of 0 or 1, one for each of 'input_ids'"
MESSAGES_WANTED = "'messages' must be a list of at least one {'role': .., 'content': ..}"

#: A line of a JSONL file, and the whole error it gives.
ODD_LINES: list[tuple[str | bytes, str]] = [
    (
        '{"text": "a"',
        "not JSON: Expecting ',' delimiter: line 1 column 13 (char 12); each line must be one JSON object",
    ),
    ("hello", "not JSON: Expecting value: line 1 column 1 (char 0); each line must be one JSON object"),
    (
        '{"text": "a"} {"text": "b"}',
        "not JSON: Extra data: line 1 column 15 (char 14); each line must be one JSON object",
    ),
    (b'{"text": "a"}\xff', "not UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 13: invalid start byte"),
    ('["text", "a"]', 'a row must be a JSON object; found ["text", "a"]'),
    ('"text"', 'a row must be a JSON object; found "text"'),
    ("{}", NO_COLUMN.format([])),
    ('{"prompt": "a", "body": 1}', NO_COLUMN.format(["body", "prompt"])),
    ('{"text": null, "messages": null}', NO_COLUMN.format(["messages", "text"])),
    ('{"text": ""}', EMPTY),
    ('{"input_ids": []}', EMPTY),
    ('{"text": 5}', "'text' must be a text; found int"),
    ('{"text": ["a"]}', "'text' must be a text; found list"),
    (f'{{"input_ids": [1, {VOCAB_SIZE}]}}', VOCABULARY.format(VOCAB_SIZE)),
    ('{"input_ids": [1, -1, 99999]}', VOCABULARY.format(-1)),
    ('{"input_ids": [99999999999999999999]}', VOCABULARY.format(99999999999999999999)),
    ('{"input_ids": [1, 2.0]}', NO_INTEGERS),
    ('{"input_ids": [true, 2]}', NO_INTEGERS),
    ('{"input_ids": ["1"]}', NO_INTEGERS),
    ('{"input_ids": [[1, 2]]}', NO_INTEGERS),
    ('{"input_ids": "1 2"}', NO_INTEGERS),
    ('{"input_ids": 7}', NO_INTEGERS),
    ('{"input_ids": [1, 2], "loss_mask": [1]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": [1, 1, 1]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": [1, null]}', MASK.format(2)),
    ('{"input_ids": [1, 2], "loss_mask": "01"}', MASK.format(2)),
    ('{"messages": []}', MESSAGES_WANTED),
    ('{"messages": {"role": "user", "content": "a"}}', MESSAGES_WANTED),
    ('{"messages": ["a"]}', "message 0 must be an object with a 'role'; found 'a'"),
    ('{"messages": [{"role": "user"}]}', "message 0 (user) must have a text as its 'content'"),
    (json.dumps({"input_ids": [1] * 65}), "65 tokens, over max_tokens=64; shorten it, or pass too_long='drop'"),
]


@pytest.fixture(scope="module")
def odd_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The odd lines, a good one before each."""
    path = tmp_path_factory.mktemp("odd") / "odd.jsonl"
    odd = [line if isinstance(line, bytes) else line.encode() for line, _ in ODD_LINES]
    path.write_bytes(b"".join(b'{"input_ids": [1]}\n' + line + b"\n" for line in odd))
    return path


@pytest.fixture(scope="module")
def odd_prompts(odd_file: Path, options: PromptOptions) -> list[dict]:
    return prompts_of(odd_file, options)


@pytest.mark.parametrize("number", range(len(ODD_LINES)), ids=[str(line)[:60] for line, _ in ODD_LINES])
def test_an_odd_row_gives_its_error_at_its_line(odd_prompts, odd_file, number):
    prompt, error = odd_prompts[2 * number + 1], ODD_LINES[number][1]
    assert (prompt["source"], prompt["error"]) == (f"{odd_file}:{2 * number + 2}", error)
    assert (prompt["prompt_id"], prompt["input_ids"], prompt["loss_mask"]) == (None, None, None)


def test_an_odd_row_disturbs_no_other(odd_prompts):
    assert len(odd_prompts) == 2 * len(ODD_LINES)
    assert {prompt["error"] for prompt in odd_prompts[::2]} == {None}
    assert all(prompt["input_ids"] == [1] for prompt in odd_prompts[::2])


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a\xffb"}',
        b'{"text": "a\xc3"}',
        b'{"id": "a\xff", "input_ids": [1]}',
        rb'{"text": "\ud800"}',
        rb'{"id": "\ud800", "input_ids": [1]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
    ],
)
def test_a_text_that_is_no_unicode_is_an_error_at_its_line(tmp_path, options, line):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'{"input_ids": [1]}\n' + line + b"\n")
    good, bad = prompts_of(path, options)
    assert good["error"] is None
    assert bad["source"] == f"{path}:2"
    assert bad["error"]


def test_bytes_are_no_text(tmp_path, options):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": b"hello"}]), path)
    [from_file], [from_list] = prompts_of(path, options), prompts_of([{"text": b"hello"}], options)
    assert from_file["source"] == f"{path}: row 0"
    assert from_file["error"] and from_list["error"]


def test_the_first_odd_row_ends_the_plan_and_is_named(odd_file, options, tmp_path):
    blocks = blocks_of(tokenize_rows(read_rows(odd_file), options))
    with pytest.raises(ValueError) as caught:
        write_plan(blocks, Store(tmp_path / "out"), PLAN_OPTIONS)
    assert str(caught.value) == f"{odd_file}:2: {ODD_LINES[0][1]}"


@pytest.mark.parametrize("ids", [["a", "b", "a"], ["#a", "b", "#a"], [7, 8, "7"], ["#a", "#a-2", "#a"]])
def test_one_own_id_for_two_rows_ends_the_plan(options, tmp_path, ids):
    rows = [{"id": own_id, "input_ids": [number]} for number, own_id in enumerate(ids)]
    with pytest.raises(PromptError, match=r"^dataset\[\d\]: .*id"):
        write_plan(blocks_of(tokenize_rows(read_rows(rows), options)), Store(tmp_path / "out"), PLAN_OPTIONS)


def test_prompts_have_the_schema_that_the_plan_wants(options):
    [block] = blocks_of(tokenize_rows(read_rows([{"input_ids": [1]}]), options))
    assert block.schema.equals(PROMPTS_SCHEMA)


DIGESTED_ROWS = [{"text": f"row {number}", "id": f"r{number}"} for number in range(40)]


@pytest.fixture(scope="module")
def digest() -> str:
    return digest_of(DIGESTED_ROWS)


class TestDigest:
    """The rows' digest tells a dataset from any other, and nothing else."""

    def test_equal_rows_have_equal_digests(self, digest: str):
        assert digest_of([dict(reversed(row.items())) for row in DIGESTED_ROWS]) == digest

    @pytest.mark.parametrize("num_blocks", [1, 3, 40])
    def test_blocks_do_not_matter(self, digest: str, num_blocks: int):
        import ray.data

        assert digest_of(ray.data.from_items(DIGESTED_ROWS, override_num_blocks=num_blocks)) == digest

    CHANGES: list[Callable[[list], list]] = [
        lambda rows: [*rows[:7], rows[7] | {"text": "row 7."}, *rows[8:]],
        lambda rows: [*rows[:7], rows[7] | {"id": "R7"}, *rows[8:]],
        lambda rows: [rows[1], rows[0], *rows[2:]],
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[0]],
    ]

    @pytest.mark.parametrize("change", CHANGES)
    def test_a_character_or_the_order_does(self, digest: str, change: Callable[[list], list]):
        assert digest_of(change(DIGESTED_ROWS)) != digest

    def test_the_plan_has_the_same_digest_without_tokenising(self, digest: str, options: PromptOptions, tmp_path: Path):
        blocks = blocks_of(tokenize_rows(read_rows(DIGESTED_ROWS), options))
        assert write_plan(blocks, Store(tmp_path), PLAN_OPTIONS).prompts_digest == digest

    def test_files_cut_otherwise_are_the_same_rows(self, tmp_path: Path):
        whole = write_lines(tmp_path / "whole.jsonl", DIGESTED_ROWS)
        parts = [
            write_lines(tmp_path / "a.jsonl", DIGESTED_ROWS[:11]),
            write_lines(tmp_path / "b.jsonl", DIGESTED_ROWS[11:12]),
            write_lines(tmp_path / "c.jsonl", DIGESTED_ROWS[12:]),
        ]
        assert digest_of(parts) == digest_of(whole)

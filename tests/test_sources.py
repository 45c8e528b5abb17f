"""Any dataset becomes the same rows in the same order, through Ray, each with the place it came from."""

import copy
import gzip
import json
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray import sources
from hsray.plan import PlanOptions, write_plan
from hsray.plan import digest_rows as digest_blocks
from hsray.prompts import PROMPTS_SCHEMA, PromptOptions, digest_rows, tokenize_rows
from hsray.sources import PromptError, expand, read_file, read_rows
from hsray.store import Store
from tests.chats import prompt_options

PLAN_OPTIONS = PlanOptions(bytes_per_token=8, value_bytes_per_token=8, shard_bytes=100, duplicates="keep")


@pytest.fixture(scope="module")
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


def through_ray(dataset: Any, options: PromptOptions) -> list[dict]:
    return rows_of(tokenize_rows(read_rows(dataset), options))


@pytest.fixture(scope="module")
def options(demo_model: Path) -> PromptOptions:
    return prompt_options(demo_model)


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


@pytest.mark.usefixtures("ray_data")
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

    def test_a_ray_datasets_own_settings_stay(self, options: PromptOptions):
        from ray.data import from_items

        dataset = from_items([{"input_ids": [1, 2, 3]}])
        before = copy.deepcopy(dataset.context)
        assert len(tokenize_rows(read_rows(dataset), options).take_all()) == 1
        assert dataset.context == before

    def test_a_ray_datasets_rows(self):
        import ray.data

        rows = [{"input_ids": [number, 1], "id": f"r{number}"} for number in range(500)]
        found = rows_of(read_rows(ray.data.from_items(rows, override_num_blocks=7)))
        assert [json.loads(row["row"]) for row in found] == rows

    @pytest.mark.parametrize("pattern", ["nowhere.jsonl", "*.jsonl"])
    def test_a_path_that_names_no_file_is_an_error(self, tmp_path: Path, pattern: str):
        with pytest.raises(FileNotFoundError, match="names no file; give a JSONL or Parquet file, or a glob of them"):
            read_rows(str(tmp_path / pattern))

    def test_a_file_of_an_unknown_type_is_an_error(self, tmp_path: Path):
        (tmp_path / "rows.csv").write_text("text\na\n")
        with pytest.raises(
            ValueError, match=r"rows.csv' is of an unknown type; wanted .jsonl, .ndjson or .json \(lines"
        ):
            read_rows(tmp_path / "*.csv")

    @pytest.mark.parametrize("dataset", [7, None, {"text": "a"}, [{"text": "a"}, "b.jsonl"], [1, 2]])
    def test_another_kind_of_dataset_is_an_error(self, dataset: Any):
        with pytest.raises(ValueError, match=f"a dataset of type {type(dataset).__name__} is not known; wanted JSONL"):
            read_rows(dataset)


SOME_ROWS = [{"text": f"t{number} ü 🙂", "n": {"a": [number, 1.5, None]}} for number in range(1500)]


def write_array(path: Path, rows: list[dict], **options: Any) -> Path:
    path.write_text(json.dumps(rows, ensure_ascii=False, **options))
    return path


def compressed(path: Path, suffix: str) -> Path:
    """A compressed sibling, of two members where the format has such."""
    data, out = path.read_bytes(), path.with_name(path.name + suffix)
    half = len(data) // 2
    compress = gzip.compress if suffix == ".gz" else lambda part: bytes(pa.compress(part, "zstd"))
    out.write_bytes(compress(data[:half]) + compress(data[half:]))
    return out


class TestFiles:
    """What a file holds, read without Ray."""

    @pytest.fixture(scope="class")
    def files(self, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        import datasets

        folder = tmp_path_factory.mktemp("files")
        table = pa.Table.from_pylist(SOME_ROWS)
        files = {
            "lines": write_lines(folder / "a.jsonl", SOME_ROWS),
            "json_lines": write_lines(folder / "a_lines.json", SOME_ROWS),
            "array": write_array(folder / "a_array.json", SOME_ROWS),
            "indented": write_array(folder / "a_indented.json", SOME_ROWS, indent=2),
            "parquet": folder / "a.parquet",
            "arrow_file": folder / "a_file.arrow",
            "arrow_stream": folder / "a_stream.arrow",
            "saved": folder / "saved",
        }
        pq.write_table(table, files["parquet"])
        with pa.ipc.new_file(files["arrow_file"], table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
        with pa.ipc.new_stream(files["arrow_stream"], table.schema) as writer:
            writer.write_table(table)
        datasets.disable_progress_bars()
        datasets.Dataset(table).save_to_disk(files["saved"], num_shards=2)
        for suffix in (".gz", ".zst"):
            files["lines" + suffix] = compressed(files["lines"], suffix)
            files["array" + suffix] = compressed(files["array"], suffix)
        return files

    KINDS = ["lines", "json_lines", "array", "indented", "parquet", "arrow_file", "arrow_stream", "saved"]
    KINDS += [kind + suffix for kind in ("lines", "array") for suffix in (".gz", ".zst")]

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_of_file_has_the_same_rows(self, files: dict, kind: str, monkeypatch):
        monkeypatch.setattr(sources, "ARRAY_CHARS", 777)
        rows = [row for url in expand(str(files[kind])) for row in read_file(url, None)]
        assert [json.loads(text) for _, text, _ in rows] == SOME_ROWS
        assert {error for _, _, error in rows} == {None}
        assert len({source for source, _, _ in rows}) == len(SOME_ROWS)

    def test_a_row_of_an_array_is_named_by_its_number(self, files: dict):
        [first, second, *_] = read_file(str(files["array"]), None)
        assert (first[0], second[0]) == (f"{files['array']}: item 0", f"{files['array']}: item 1")

    @pytest.mark.parametrize(
        ("text", "number", "error"),
        [
            ('[{"text": "a"}, {"text": "b"', 1, "the file ends within it"),
            ('[{"text": "a"}, ', 1, "the file ends within it"),
            ('[{"text": "a"}, {"text" "b"}]', 1, "Expecting ':' delimiter at character 8 of it"),
            ('[{"text": "a"}; {"text": "b"}]', 1, "';' follows item 0, where ',' or ']' must"),
            ("[", 0, "the file ends within it"),
        ],
    )
    def test_a_damaged_array_is_an_error_at_the_item(self, tmp_path: Path, text: str, number: int, error: str):
        path = tmp_path / "a.json"
        path.write_text(text)
        *_, (source, _, found) = read_file(str(path), None)
        assert source == f"{path}: item {number}"
        assert found.startswith("not JSON: ") and error in found

    @pytest.mark.parametrize("text", ['[{"text": "a"}]\n[{"text": "b"}]', '[{"text": "a"}] b', '[] {"text": "b"}'])
    def test_what_follows_an_array_is_an_error(self, tmp_path: Path, text: str, monkeypatch):
        monkeypatch.setattr(sources, "ARRAY_CHARS", 3)
        path = tmp_path / "a.json"
        path.write_text(text)
        *_, (source, _, found) = read_file(str(path), None)
        assert source == f"{path}: after the array"
        assert found.endswith("follows it; the file must hold one array of objects")

    def test_an_array_that_is_not_utf8_is_an_error_that_names_its_file(self, tmp_path: Path):
        path = tmp_path / "a.json"
        path.write_bytes('[{"text": "café"}]'.encode("latin-1"))
        with pytest.raises(PromptError, match=r"a.json cannot be read: 'utf-8' codec can't decode byte 0xe9"):
            list(read_file(str(path), None))

    @pytest.mark.parametrize("text", ["[]", " [ ]\n", "", "\n"])
    def test_an_empty_array_has_no_rows(self, tmp_path: Path, text: str):
        path = tmp_path / "a.json"
        path.write_text(text)
        assert list(read_file(str(path), None)) == []

    def test_a_byte_order_mark_is_no_part_of_the_first_row(self, tmp_path: Path):
        for name, text in (
            ("a.jsonl", b'{"text": "a"}\n'),
            ("a.json", b'{"text": "a"}\n'),
            ("b.json", b'[{"text": "a"}]'),
        ):
            path = tmp_path / name
            path.write_bytes(b"\xef\xbb\xbf" + text)
            assert [row[1] for row in read_file(str(path), None)] == ['{"text": "a"}']

    @pytest.mark.parametrize("kind", ["lines.gz", "lines.zst", "parquet", "arrow_file"])
    def test_a_file_that_was_cut_off_is_an_error_that_names_it(self, files: dict, tmp_path: Path, kind: str):
        path = tmp_path / files[kind].name
        path.write_bytes(files[kind].read_bytes()[:-100])
        with pytest.raises(PromptError, match=f"{path.name} cannot be read: .*; is it whole"):
            list(read_file(str(path), None))

    def test_a_dataset_on_another_filesystem(self, files: dict):
        import fsspec

        for name in ("lines.gz", "array", "parquet"):
            fs = fsspec.filesystem("memory")
            fs.pipe_file(f"/rows/{files[name].name}", files[name].read_bytes())
            [url] = expand(f"memory://rows/{files[name].name}")
            assert [json.loads(row[1]) for row in read_file(url, None)] == SOME_ROWS

    def test_a_folder_of_several_splits_names_them(self, tmp_path: Path):
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        with pytest.raises(ValueError, match=f"has the splits train, test; give one of them, {tmp_path}/train"):
            expand(str(tmp_path))

    def test_another_folder_is_an_error(self, tmp_path: Path):
        with pytest.raises(
            ValueError, match=f"is a folder, but none of datasets.save_to_disk; give a glob, {tmp_path}/"
        ):
            expand(str(tmp_path))


@pytest.mark.usefixtures("ray_data")
class TestThroughRay:
    """What a whole dataset becomes."""

    def test_prompts_of_many_blocks_keep_their_order_though_the_first_takes_longest(self, options: PromptOptions):
        rows = [{"id": number, "text": "word " * 400} for number in range(1000)]
        rows += [{"id": number, "input_ids": [number]} for number in range(1000, 6000)]
        prompts = through_ray(rows, replace(options, too_long="drop"))
        assert [prompt["prompt_id"] for prompt in prompts] == [str(number) for number in range(6000)]

    def test_the_same_rows_from_any_source_are_the_same_prompts(self, options: PromptOptions, tmp_path: Path):
        import datasets
        import ray.data

        rows = [{"id": f"r{number}", "text": f"text {number}", "input_ids": None} for number in range(30)]
        table = pa.Table.from_pylist(
            rows, schema=pa.schema([("id", pa.string()), ("text", pa.string()), ("input_ids", pa.list_(pa.int32()))])
        )
        pq.write_table(table, tmp_path / "rows.parquet")
        given = [
            write_lines(tmp_path / "rows.jsonl", rows),
            tmp_path / "rows.parquet",
            ray.data.from_arrow([table.slice(0, 4), table.slice(4)]),
            datasets.Dataset(table),
        ]
        content = operator.itemgetter("prompt_id", "input_ids", "loss_mask")
        wanted = [content(prompt) for prompt in through_ray(rows, options)]
        assert [prompt_id for prompt_id, _, _ in wanted] == [row["id"] for row in rows]
        for source in given:
            assert [content(prompt) for prompt in through_ray(source, options)] == wanted

    def test_a_hugging_face_datasets_rows_are_named_by_their_number(self):
        import datasets

        dataset = datasets.Dataset.from_list(SOME_ROWS).select(range(1499, -1, -1))
        rows = rows_of(read_rows(dataset))
        assert [row["source"] for row in rows] == [f"dataset[{number}]" for number in range(1500)]
        assert [json.loads(row["row"]) for row in rows] == SOME_ROWS[::-1]

    def test_sorted_prompts_are_longest_first_after_every_row_with_an_error(self, options: PromptOptions):
        lengths = [5, 30, 2, 30, 17, 1, 64, 5]
        rows = [{"id": f"r{number}", "input_ids": [number] * length} for number, length in enumerate(lengths)]
        prompts = through_ray([*rows[3:], {"text": ""}, *rows[:3]], replace(options, sort="length"))
        assert [prompt["error"] is None for prompt in prompts] == [False, *[True] * 8]
        assert [prompt["prompt_id"] for prompt in prompts[1:]] == ["r6", "r1", "r3", "r4", "r0", "r7", "r2", "r5"]
        assert prompts[0].keys() == set(PROMPTS_SCHEMA.names)


DIGESTED_ROWS = [{"text": f"row {number}", "id": f"r{number}"} for number in range(40)]


@pytest.fixture(scope="module")
def digest(ray_data: None) -> str:
    return digest_of(DIGESTED_ROWS)


@pytest.mark.usefixtures("ray_data")
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

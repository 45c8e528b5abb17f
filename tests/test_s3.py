"""A dataset on S3, over HTTP: whole or not there, whatever the network does, and no credential in it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hsray
from hsray.audit import check
from hsray.manifest import ManifestError, published_shards
from hsray.plan import shard_name
from hsray.sources import expand
from hsray.store import Store
from tests.builds import build_tiny, unique_prompts
from tests.s3 import KEY, SECRET, FaultProxy, options_for, reader_of, s3_server
from tests.synthetic import LENGTHS, assert_same, make_prompts, write_dataset


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def options(endpoint) -> dict:
    return options_for(endpoint)


def port_of(endpoint: str) -> int:
    return int(re.search(r":(\d+)$", endpoint)[1])


#: For a client that is to give up a stalled answer at once.
IMPATIENT = {"connect_timeout": 2, "read_timeout": 1}

PREFIX = "s3://bucket/a folder/ünïcode 你好"


def test_objects_are_published_listed_read_and_removed(options):
    store = Store(f"{PREFIX}/objects", options)
    store.check_writable()
    assert store.list() == {}
    store.publish("shards/000000.parquet", b"one")
    store.publish("shards/000000.parquet", b"three")
    other = Store(f"{PREFIX}/objects", options)
    assert other.read("shards/000000.parquet") == b"three"
    assert other.list("shards") == {"000000.parquet": 5}
    assert other.open("shards/000000.parquet").read_at(3, 2) == b"ree"
    store.remove_folder("shards")
    assert not other.exists("shards/000000.parquet")
    with pytest.raises(FileNotFoundError):
        other.read("shards/000000.parquet")


def test_a_target_that_is_not_there_or_lets_nobody_in_is_said_in_one_line(options, tmp_path, tiny_llama, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    nobody = {"endpoint_url": options["endpoint_url"]}
    with pytest.raises(
        ConnectionError, match=r"^'s3://bucket/x' cannot be reached: NoCredentialsError: .*storage_options$"
    ):
        build_tiny(tiny_llama, make_prompts(LENGTHS), "s3://bucket/x", storage_options=nobody)
    with pytest.raises(ConnectionError, match=r"^'s3://bucket/p.jsonl' cannot be reached: NoCredentialsError: "):
        list(expand("s3://bucket/p.jsonl", nobody))
    nowhere = {
        **options,
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    for ask in (Store.list, lambda store: store.read("x"), lambda store: store.publish("x", b"1")):
        with pytest.raises(ConnectionError, match=r"^'s3://bucket/x' cannot be reached: EndpointConnectionError: "):
            ask(Store("s3://bucket/x", nowhere))


def test_credentials_may_come_from_the_environment(endpoint, monkeypatch):
    for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("ENDPOINT_URL", endpoint)):
        monkeypatch.setenv(f"AWS_{name}", value)
    Store("s3://bucket/environment").publish("x", b"1")
    assert Store("s3://bucket/environment").list() == {"x": 1}


def test_a_bucket_that_does_not_exist_is_an_error_that_names_it(options):
    with pytest.raises(OSError, match="'s3://no-such-bucket/x' cannot be written: .*bucket does not exist"):
        Store("s3://no-such-bucket/x", options).check_writable()


def test_who_may_not_write_is_told_so_and_may_read(endpoint, options):
    prompts = make_prompts(LENGTHS)
    write_dataset(prompts, "s3://bucket/readable", **options)
    with reader_of(endpoint) as readers:
        with pytest.raises(
            PermissionError, match="'s3://bucket/readable' cannot be written: .*Denied.*give an out= that can"
        ):
            Store("s3://bucket/readable", readers).check_writable()
        assert_same(hsray.read("s3://bucket/readable", storage_options=readers)[5], prompts[5])
        with pytest.raises(OSError, match="InvalidAccessKeyId|does not exist|Forbidden"):
            hsray.read("s3://bucket/readable", storage_options=readers | {"key": "AKIANOBODY"})


def test_a_writer_that_raises_publishes_nothing(options):
    store = Store(f"{PREFIX}/raises", options)
    with pytest.raises(ValueError), store.staged("x") as sink:
        sink.write(b"half")
        raise ValueError
    assert store.list() == {}


def test_uploads_that_were_never_completed_are_aborted_in_this_folder_alone(options):
    store = Store("s3://bucket/uploads", options)
    for key in ("uploads/shards/000000.parquet", "uploads-of-others/x"):
        store._fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    store.sweep("")
    left = store._fs.call_s3("list_multipart_uploads", Bucket="bucket")["Uploads"]
    assert [upload["Key"] for upload in left] == ["uploads-of-others/x"]


def test_reading_one_layer_moves_the_bytes_of_that_layer(endpoint, options):
    lengths, hidden_size = [2048] * 4, 1024
    write_dataset(make_prompts(lengths, hidden_size=hidden_size), f"{PREFIX}/layers", shard_tokens=4096, **options)
    proxy = FaultProxy(port_of(endpoint), seed=0, share=0.0, stall_s=0.0)
    for prompt in hsray.read(f"{PREFIX}/layers", layers=[3], storage_options=options_for(proxy.endpoint)):
        assert prompt["hidden_states"][3].shape == (2048, hidden_size)
    proxy.close()
    layer_bytes = sum(lengths) * hidden_size * 2
    assert layer_bytes <= proxy.num_bytes_given < 1.05 * layer_bytes  # of four layers that is 26 % at the most


def test_a_build_on_s3_through_a_broken_network_is_right_and_nothing_of_it_holds_a_credential(
    ray_session, tiny_llama, endpoint, options, caplog
):
    import ray

    rows, out = unique_prompts(20, longest=50), f"{PREFIX}/build"
    proxy = FaultProxy(port_of(endpoint), seed=0, share=0.2, stall_s=2)
    try:
        through = options_for(proxy.endpoint, config_kwargs=IMPATIENT)
        report = build_tiny(tiny_llama, rows, out, shard_bytes=1 << 14, storage_options=through)
    finally:
        proxy.close()
    assert report.new_shards == report.shards > 2
    assert sum(count for name, count in proxy.faults.items() if name != "none") > 2
    again = build_tiny(tiny_llama, rows, out, shard_bytes=1 << 14, storage_options=options)
    assert again.new_shards == 0
    assert check(out, deep=True, storage_options=options, progress=False).ok
    found = hsray.read(out, storage_options=options)
    assert [prompt["prompt_id"] for prompt in found] == [row["id"] for row in rows]
    store = Store(out, options)
    names = ["manifest.json", *(f"{folder}/{name}" for folder in ("plan", "shards") for name in store.list(folder))]
    assert not [name for name in names if SECRET.encode() in store.read(name)]
    assert SECRET not in caplog.text
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    assert not [path for path in logs.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.timeout(3600)  # some five seconds each
def test_datasets_published_through_a_broken_network_are_right_and_no_object_is_ever_short(endpoint, options, request):
    prompts = make_prompts(LENGTHS, hidden_size=128)
    faults: dict[str, int] = {}
    for number in range(request.config.getoption("broken_builds")):
        proxy = FaultProxy(port_of(endpoint), seed=number, share=0.3, stall_s=2)
        try:
            write_dataset(
                prompts, f"s3://bucket/broken/{number}", **options_for(proxy.endpoint, config_kwargs=IMPATIENT)
            )
        finally:
            proxy.close()
        for name, count in proxy.faults.items():
            faults[name] = faults.get(name, 0) + count
        dataset = hsray.read(f"s3://bucket/broken/{number}", storage_options=options)
        assert dataset.complete
        for found, wanted in zip(dataset, prompts, strict=True):
            assert_same(found, wanted)
    assert sum(count for name, count in faults.items() if name != "none") > 5
    print(faults)


def test_very_many_shards_are_listed_in_parts_by_their_names(options, monkeypatch):
    monkeypatch.setattr("hsray.manifest.LISTED_TOGETHER", 10)
    store = Store(f"{PREFIX}/many", options)
    sizes = {shard: 1 + shard % 3 for shard in range(0, 130, 3)}
    for shard, num_bytes in sizes.items():
        store.publish(shard_name(shard), b"x" * num_bytes)
    assert published_shards(store, "parquet", num_planned=130) == published_shards(store, "parquet") == sizes
    assert published_shards(Store(f"{PREFIX}/none", options), "parquet", num_planned=130) == {}
    store.publish("shards/000004.parquet/000005.parquet", b"x")
    with pytest.raises(ManifestError, match=r"000004.parquet is empty"):
        published_shards(store, "parquet", num_planned=130)
    store.remove("shards/000004.parquet/000005.parquet")
    store.publish("shards/000007 copy.parquet", b"x")
    with pytest.raises(ManifestError, match="000007 copy.parquet is not of this dataset"):
        published_shards(store, "parquet", num_planned=130)

"""The few things asked of a filesystem: list a folder, read, and publish whole bytes or nothing.

Every URL is resolved here, by fsspec. An object appears under its final name complete or not at all: locally as a
temporary sibling, synced and renamed; elsewhere as one put of the finished bytes. (Closing a half-written fsspec
file publishes the half.)
"""

import copy
import errno
import inspect
import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any

import fsspec
import pyarrow as pa
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

#: Marks the temporary siblings, so that a later run can sweep what a killed one left.
TEMPORARY_PREFIX = ".hsray-tmp-"

#: How often a request to S3 is sent before it has failed; botocore's own number is 3 to 5.
S3_ATTEMPTS = 10

LIST_THREADS = 8


class Store:
    """A folder on some filesystem."""

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None):
        self.url = os.fspath(url)
        self._fs: fsspec.AbstractFileSystem
        self._fs, root = url_to_fs(self.url, **_patient(self.url, storage_options or {}))
        self._root = root.rstrip("/")
        if self.is_local:
            self.url = self._root  # absolute: a worker's own folder is another
        # A listing that fsspec remembers would hide what other processes publish.
        self._fs.use_listings_cache = False
        self._check: Callable[[], None] = _nothing

    def guarded(self, check: Callable[[], None]) -> "Store":
        """The same folder, where `check` is called before an object is published or removed, and raises if it must not be."""
        guarded = copy.copy(self)
        guarded._check = check
        return guarded

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a filesystem of this machine."""
        return isinstance(self._fs, LocalFileSystem)

    @property
    def is_private(self) -> bool:
        """Whether what is published is seen by this process alone, as in ``memory://``."""
        return isinstance(self._fs, MemoryFileSystem)

    def path(self, name: str) -> str:
        """The filesystem's own path of an object."""
        return f"{self._root}/{name}"

    def list(self, folder: str = "") -> dict[str, int]:
        """The objects and folders in a folder: name -> bytes (0 for a folder). A missing folder is empty."""
        path = self.path(folder) if folder else self._root
        self._fs.invalidate_cache()
        try:
            with client_errors(self.url):
                entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        names = {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry for entry in entries}
        return {
            name: entry.get("size") or 0
            for name, entry in names.items()
            if not name.startswith(TEMPORARY_PREFIX) and name and entry["name"].rstrip("/") != path
        }

    def list_prefixes(self, folder: str, prefixes: Sequence[str]) -> dict[str, int]:
        """As `list`, of a folder most of whose names begin with one of some prefixes; others may be left out.

        An object store lists a thousand names a request, and one request after the other: each prefix has a thread.
        """
        if "prefix" not in inspect.signature(self._fs.find).parameters:
            return self.list(folder)
        self._fs.invalidate_cache()
        path = self.path(folder)

        def sizes(prefix: str) -> dict[str, int]:
            found = self._fs.find(f"{path}/", prefix=prefix, detail=True)
            names = {name[name.index(path) + len(path) + 1 :]: entry["size"] for name, entry in found.items()}
            return {name.split("/")[0]: 0 if "/" in name else size for name, size in names.items()}

        with client_errors(self.url), ThreadPoolExecutor(LIST_THREADS) as threads:
            return dict(item for part in threads.map(sizes, prefixes) for item in part.items())

    def exists(self, name: str) -> bool:
        """Whether an object has been published."""
        self._fs.invalidate_cache()
        with client_errors(self.url):
            return self._fs.exists(self.path(name))

    def read(self, name: str) -> bytes:
        """An object's bytes."""
        try:
            with client_errors(self.url):
                return self._fs.cat_file(self.path(name))
        except IsADirectoryError as error:
            raise IsADirectoryError(
                errno.EISDIR,
                "a folder is where a file of hsray's belongs: move it away, or give another out",
                self.path(name),
            ) from error

    def read_or_empty(self, name: str) -> bytes:
        """An object's bytes; none if there is no such object."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return b""

    def open(self, name: str) -> pa.NativeFile:
        """An object opened for reading at random, by any number of threads."""
        if self.is_local:
            # A third faster than reading it (2.9 against 2.2 GB/s of a core, Parquet), and without Python's lock.
            return pa.memory_map(self.path(name))
        # What is asked for and no more: fsspec's cache would read 50 MB on, past the column or the row group.
        return pa.PythonFile(self._fs.open(self.path(name), "rb", cache_type="none"), "r")

    def open_private(self, name: str) -> pa.NativeFile:
        """A local object, mapped: reading copies nothing, and what is written to the memory stays the reader's own."""
        import torch

        path = self.path(name)
        pages = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)
        return pa.BufferReader(pa.py_buffer(pages.numpy()))

    def publish(self, name: str, data: bytes) -> None:
        """Makes `data` the object's whole content, at once."""
        with self.staged(name, num_bytes=len(data)) as sink:
            sink.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Publishes a small object unless there is one of that name; says whether `data` is now what is there.

        Of several that create it, one does, on local folders and where fsspec can ask for it (S3, GCS); elsewhere it looks
        before and after. A kill may leave it empty locally.
        """
        if self.is_local:
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            try:
                with open(self.path(name), "xb") as file:
                    file.write(data)
            except FileExistsError:
                return False
            return True
        try:
            self._fs.pipe_file(self.path(name), data, mode="create")
        except OSError:  # each filesystem has its own way to say that it is there
            if not self.exists(name):
                raise
        return self.read(name) == data

    def append(self, name: str, data: bytes) -> None:
        """Adds to an object, or begins it; for one writer's log. A kill may leave part of `data` locally; elsewhere the object
        is published anew."""
        if self.is_local:
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            with open(self.path(name), "ab") as file:
                file.write(data)
        else:
            self.publish(name, self.read_or_empty(name) + data)

    @contextmanager
    def staged(self, name: str, *, num_bytes: int | None = None) -> Iterator[IO[bytes]]:
        """A file to write an object into; published when the block ends, forgotten when it raises.

        Args:
            name: The object's.
            num_bytes: About how many it will have, for the error of a full disk.
        """
        with self._staged_local(name, num_bytes) if self.is_local else self._staged_remote(name) as sink:
            yield sink

    @contextmanager
    def _staged_local(self, name: str, num_bytes: int | None) -> Iterator[IO[bytes]]:
        final = self.path(name)
        folder = os.path.dirname(final)
        os.makedirs(folder, exist_ok=True)
        # The sibling's name is random: a writer that outlived its driver may be publishing the same object.
        temporary = f"{folder}/{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            # Arrow's own file: Parquet's pages go to it without a copy, and without Python's lock (0.99 against 0.83 GB/s).
            with pa.OSFile(temporary, "wb") as file:
                yield file
            _fsync(temporary)
            self._check()
            os.replace(temporary, final)
        except OSError as error:
            with suppress(FileNotFoundError):
                written = os.path.getsize(temporary)
                os.unlink(temporary)
            if error.errno == errno.ENOSPC:
                free, needed = shutil.disk_usage(folder).free, "more" if num_bytes is None else f"about {num_bytes:,}"
                raise OSError(
                    errno.ENOSPC,
                    f"no space for {final}: {needed} bytes are needed, {written:,} of them were written, {free:,} are free "
                    "now; make room, and build again to go on",
                ) from error
            raise OSError(error.errno, f"{error.strerror}, while publishing {final}") from error
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _fsync(folder)

    @contextmanager
    def _staged_remote(self, name: str) -> Iterator[IO[bytes]]:
        # S3's client takes `bytes` alone, and these give theirs without a copy.
        sink = io.BytesIO()
        yield sink
        self._check()
        with client_errors(self.url):
            self._fs.pipe_file(self.path(name), sink.getvalue())

    def remove(self, name: str) -> None:
        """Removes an object that exists."""
        self._check()
        self._fs.rm_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        """Removes a folder and what is in it, if it exists."""
        self._check()
        with suppress(FileNotFoundError):
            self._fs.rm(self.path(name), recursive=True)

    def sweep(self, folder: str) -> None:
        """Removes what killed writers left in a folder: temporary siblings, and on S3 uploads that were never completed."""
        self._check()
        path = self.path(folder) if folder else self._root
        if hasattr(self._fs, "abort_mpu"):
            bucket, key, _ = self._fs.split_path(f"{path}/")
            uploads = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", [])
            for upload in uploads:
                self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        if self.is_local and os.path.isdir(path):
            for entry in os.scandir(path):
                if entry.name.startswith(TEMPORARY_PREFIX):
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)

    def check_writable(self) -> None:
        """Raises PermissionError or OSError, naming the folder, where nothing can be published."""
        probe = f"{TEMPORARY_PREFIX}probe"
        try:
            self.publish(probe, b"hsray")
            with suppress(FileNotFoundError):  # another build's probe of the same folder was removed, and it with it
                self.remove(probe)
        except OSError as error:
            raise type(error)(f"{self.url!r} cannot be written: {error}; give an out= that can") from error


@contextmanager
def client_errors(url: str) -> Iterator[None]:
    """Raises ConnectionError for what is no OSError: a client's own words for an address, or for credentials, that will not do."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ConnectionError(
            f"{url!r} cannot be reached: {type(error).__name__}: {error}; see to its address and credentials, in the "
            "environment or in storage_options"
        ) from error


def _patient(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which an S3 client tries again, for about a minute, where the user's say nothing of it."""
    options = dict(storage_options)
    if url.startswith(("s3://", "s3a://")):
        retries = {"mode": "standard", "max_attempts": S3_ATTEMPTS}
        options["config_kwargs"] = {"retries": retries, **options.get("config_kwargs", {})}
    return options


def _nothing() -> None:
    """Stands in for a guard."""


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

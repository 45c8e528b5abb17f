"""An S3 server over HTTP on loopback, and a proxy before it that breaks what goes through."""

import json
import random
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KEY, SECRET = "AKIAHSRAYTEST", "s3cr3t-do-not-write-me-down"

ERRORS = {"500": b"500 Internal Server Error", "503": b"503 Slow Down"}
ERROR_BODY = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>injected</Message></Error>"


def options_for(endpoint: str, **more: Any) -> dict[str, Any]:
    """Storage options for a server."""
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, **more}


class FaultProxy:
    """Hands connections on to a server, but some it answers with an error, resets at a random byte, or lets wait."""

    def __init__(self, port: int, *, seed: int, share: float, stall_s: float):
        self._upstream = ("127.0.0.1", port)
        self._chosen, self._share, self._stall_s = random.Random(seed), share, stall_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults: dict[str, int] = {}
        """How often each was done."""
        self._given = [0]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_bytes_given(self) -> int:
        """What the server has answered so far, in bytes."""
        return self._given[0]

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            fault = self._chosen.choice(["500", "503", "reset", "reset", "stall"])
            fault = fault if self._chosen.random() < self._share else "none"
            # Connections are kept alive: each ends some time, or one that was lucky would carry everything.
            most = 1 << 18 if self._share else 1 << 40
            num_bytes = int(2 ** self._chosen.uniform(8, 17)) if fault == "reset" else most
            self.faults[fault] = self.faults.get(fault, 0) + 1
            threading.Thread(target=self._serve, args=(client, fault, num_bytes), daemon=True).start()

    def _serve(self, client: socket.socket, fault: str, num_bytes: int) -> None:
        with client:
            if fault in ERRORS:
                client.recv(1 << 16)
                body = ERROR_BODY % (b"SlowDown" if fault == "503" else b"InternalError")
                head = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (ERRORS[fault], len(body))
                client.sendall(head + body)
                return
            if fault == "stall":
                time.sleep(self._stall_s)
                return
            with socket.create_connection(self._upstream) as server:
                left = [num_bytes]
                back = threading.Thread(target=_pump, args=(server, client, left, self._given), daemon=True)
                back.start()
                _pump(client, server, left, [0])
                back.join()
                if left[0] <= 0:  # a reset, not an orderly end
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _pump(source: socket.socket, sink: socket.socket, left: list[int], moved: list[int]) -> None:
    """Hands bytes on and counts them until there are no more, or no more are `left`; then ends both."""
    try:
        while left[0] > 0 and (data := source.recv(min(left[0], 1 << 14))):
            left[0] -= len(data)
            moved[0] += len(data)
            sink.sendall(data)
    except OSError:
        pass  # the other direction has ended both
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


READ_ONLY = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}],
}


@contextmanager
def reader_of(endpoint: str) -> Iterator[dict[str, Any]]:
    """Storage options of a user who may read and not write; meanwhile the server asks everybody who they are."""
    import boto3

    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    iam = boto3.client("iam", endpoint_url=endpoint, **keys)
    iam.create_user(UserName="reader")
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=json.dumps(READ_ONLY))
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    before = _ask_after(endpoint, "0")
    try:
        yield options_for(endpoint) | {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
    finally:
        _ask_after(endpoint, before)


def _ask_after(endpoint: str, num_requests: str) -> str:
    """Sets after how many requests the server asks who is there; gives what was set before."""
    words, plain = num_requests.encode(), {"Content-Type": "text/plain"}  # a form's words would not arrive
    request = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", words, plain, method="POST")
    with urllib.request.urlopen(request) as answer:
        return str(json.loads(answer.read())["PREVIOUS_INITIAL_NO_AUTH_ACTION_COUNT"])


@contextmanager
def s3_server() -> Iterator[str]:
    """A server with the bucket ``bucket``; gives its endpoint."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
        )
        client.create_bucket(Bucket="bucket")
        yield endpoint
    finally:
        server.stop()

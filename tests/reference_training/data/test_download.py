"""``--download`` against a server on the loopback interface."""

from __future__ import annotations

import gc
import io
import shlex
import socket
import tarfile
from collections.abc import Iterator
from functools import partial
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
import pytest

from ebmguard.cli import main
from ebmguard.errors import ConfigError
from ebmguard.reference_training.data import download, load
from ebmguard.reference_training.data.files import PublishedFiles
from ebmguard.reference_training.data.published import CIFAR10, read_cifar10
from tests.reference_training.data.test_load import pickled
from tests.reference_training.parts import JEM

BATCHES = ("data_batch_1", "test_batch")
OWN = {"data": "cifar10", "iterations": 1, "depth": 10, "width": 1, "train_images": 8}
OWN |= {"valid_images": 2, "test_images": 4, "n_labelled": 4, "quality_samples": 0}


class Publisher:
    """Serves files, cut after some bytes of each answer where that is asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.cut, self.asked = files, 10**9, list[str]()

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        content = self.files[to.path.removeprefix("/")]
        begin = int(to.headers["Range"].removeprefix("bytes=").rstrip("-"))
        self.asked.append(f"{to.path} from {begin}")
        to.send_response(206)
        to.send_header("Content-Length", str(len(content) - begin))
        to.end_headers()
        to.wfile.write(content[begin : begin + self.cut])


def batch(rows: int) -> bytes:
    rng = np.random.default_rng(rows)
    images = rng.integers(0, 256, (rows, 3072), dtype=np.uint8)
    content: bytes = pickled({b"data": images, b"labels": list(range(rows))})
    return content


@pytest.fixture
def published(monkeypatch) -> Iterator[tuple[Publisher, PublishedFiles]]:
    """An archive of small batches as CIFAR-10, and who publishes it."""
    batches, packed = dict(zip(BATCHES, map(batch, (10, 4)), strict=True)), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"{CIFAR10.folders[0]}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    publisher = Publisher({"cifar.tar.gz": packed.getvalue(), **batches})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            publisher.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        sums = {name: md5(content).hexdigest() for name, content in batches.items()}
        whole = f"{address}cifar.tar.gz", md5(packed.getvalue()).hexdigest()
        files = PublishedFiles(CIFAR10.title, address, CIFAR10.folders, sums, whole)
        own = load._DataSet(partial(read_cifar10, files=files), files)
        monkeypatch.setitem(load._SETS, "cifar10", own)
        yield publisher, files
        server.shutdown()


def test_a_missing_data_set_is_fetched_for_a_run_once_and_on_request_alone(published, tmp_path):
    publisher, _ = published
    run, root = tmp_path / "run", tmp_path / "data"
    root.mkdir()

    def words(**own):
        return shlex.split(JEM.config_for(run, data_root=str(root), **OWN, **own).command())[1:]

    assert main(words()) == 2
    assert publisher.asked == []
    assert main(words(download=True)) == 0
    assert sorted(p.name for p in root.rglob("*")) == sorted([CIFAR10.folders[0], *BATCHES])
    load.kept_data("cifar10", str(root), download=True, valid_images=1)
    assert publisher.asked == ["/cifar.tar.gz from 0"]
    assert "download" not in (run / "config.json").read_text()


def test_what_was_cut_is_gone_on_with(published, tmp_path):
    publisher, files = published
    size = len(publisher.files["cifar.tar.gz"])
    publisher.cut = size // 2
    with pytest.raises(ConfigError, match=rf"data_batch_1, test_batch .* after {size // 2:,} of"):
        download.fetch(files, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar.tar.gz.part"]
    publisher.cut = size
    download.fetch(files, tmp_path)
    assert publisher.asked == ["/cifar.tar.gz from 0", f"/cifar.tar.gz from {size // 2}"]
    assert read_cifar10(tmp_path, files)["train"][0].shape == (10, 3, 32, 32)


@pytest.mark.parametrize("cut", [10**9, 1000])
def test_what_is_not_what_was_published_is_refused_and_removed(published, tmp_path, cut):
    """Corrupted on its way, or a rest of another file."""
    publisher, files = published
    good = publisher.files["cifar.tar.gz"]
    if cut < len(good):
        (tmp_path / "cifar.tar.gz.part").write_bytes(b"another file"[:12])
    else:
        publisher.files["cifar.tar.gz"] = good[:99] + bytes([good[99] ^ 1]) + good[100:]
    with pytest.raises(ConfigError, match="not what was published, by its md5, and is removed"):
        download.fetch(files, tmp_path)
    assert list(tmp_path.iterdir()) == []


ODD = {
    "a length of letters": (b"200 OK\r\nContent-Length: abc\r\n\r\nhello", ""),
    "a negative length": (b"200 OK\r\nContent-Length: -1\r\n\r\nhello", ""),
    "a length beyond floats": (b"200 OK\r\nContent-Length: 1" + b"0" * 400, "has more than"),
    "a length beyond all": (b"200 OK\r\nContent-Length: 1" + b"0" * 5000, "cannot be fetched"),
    "a redirect to nowhere": (b"302 F\r\nLocation: http://[", "Invalid IPv6 URL"),
    "a redirect to itself": (b"302 F\r\nLocation: /a.bin", "infinite loop"),
    "a redirect to a file": (b"302 F\r\nLocation: file:///etc/hostname", "not allowed"),
    "no end": (b"200 OK\r\n\r\n" + b"x" * 5000, "has more than 4,000 bytes"),
    "no HTTP": (b"\x1b[2J", "cannot be fetched"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of urllib
@pytest.mark.parametrize("what", ODD)
def test_whatever_a_server_says_the_download_ends(what, tmp_path, monkeypatch):
    answer, said = ODD[what]
    monkeypatch.setattr(download, "MOST", 4000)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test is over
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(
                        b"HTTP/1.1 " + answer + b"\r\n\r\n" * (b"hello" not in answer)
                    )

        Thread(target=serve, daemon=True).start()
        page = f"http://127.0.0.1:{server.getsockname()[1]}/"
        sums = {"a.bin": md5(b"hello").hexdigest()}
        files = PublishedFiles("T", page, ("t",), sums)
        if not said:
            download.fetch(files, tmp_path)
            assert (tmp_path / "t" / "a.bin").read_bytes() == b"hello"
            return
        with pytest.raises(ConfigError, match=said) as caught:
            download.fetch(files, tmp_path)
        assert "\x1b" not in str(caught.value)
        server.shutdown(socket.SHUT_RDWR)
    gc.collect()  # sockets that a redirect has left open

"""Damaged and hostile run folders through every command that reads them.

    python -m tests.report.fuzz

A mutation is made of a folder that was whole: bytes, lines, records and files are cut, exchanged or
replaced by what nobody wrote. Each command must then do its work or refuse the folder by an error
of ebmguard's in one line, within seconds. Every mutation has a number; `--only N` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ebmguard.check import show
from ebmguard.errors import EbmguardError, printable
from ebmguard.reference_training.jem.config import JemConfig
from ebmguard.report.page import CompareConfig, ReportConfig, compare, report
from ebmguard.report.problems import problems_of_run
from ebmguard.report.watch import WatchConfig, watch

from .folders import write

SECONDS = 60  # that a command may take, on a busy machine
_FILES = (
    *("metrics.jsonl", "alerts.jsonl", "recovery.jsonl", "accuracy.jsonl"),
    *("config.json", "results.json", "figures/samples_end.png"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, -1e308, 5e-324, 2**53, 10**400, -(10**400)),
    *("", "x", "NaN", "Infinity", "\x1b]0;owned\x07\x9b31m", "\u202etxt.exe", "\ud800", "{{ 7 }}"),
    *([], {}, [[]], [1, 2], ["a"], {"a": {"b": [None]}}, [0, "x"], "<script>", "a\nb\rc"),
)


class Hang(BaseException):
    """A command took too long."""


def make(path: Path) -> Path:
    """A whole run folder."""
    write(path)
    (path / "figures").mkdir()
    (path / "figures" / "samples_end.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    return path


def mutate(path: Path, draw: random.Random) -> None:
    """Damage one to three files of a run folder."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        file = path / draw.choice(_FILES)
        is_kept = file.is_file() and not file.is_symlink()
        kinds = [_of_bytes, _of_bytes, _of_records, _of_records, _of_files]
        kind = draw.choice(kinds if is_kept and file.suffix != ".png" else [_of_bytes, _of_files])
        if is_kept:
            kind(file, draw)


def _of_bytes(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at, length = draw.randrange(len(data) + 1), draw.choice((1, 3, 40, 4000))
    noise = draw.choice(
        (b"\0" * length, draw.randbytes(length), b"\xff\xfe\x80\xed\xa0\x80", b"\n")
    )
    deep = draw.choice((900, 5000, 200_000))
    match draw.randrange(8):
        case 0:
            data = data[:at]
        case 1:
            data[at : at + length] = noise
        case 2:
            data[at:at] = noise
        case 3:
            for _ in range(length):
                data[draw.randrange(len(data)) if data else 0 : len(data)] = data[at:]
                break
        case 4:
            data[at:at] = draw.choice((b'{"a":', b"[")) * deep
        case 5:
            opened, closed = draw.choice(((b'{"step":', b"}"), (b"[", b"]")))
            data = bytearray(opened * deep + b"1" + closed * deep + b"\n") + data
        case 6:
            number = draw.choice(
                (b"1" * 5000, b"1e999", b"-1e999", b"NaN", b"-Infinity", b"1e-999")
            )
            digits = [i for i, byte in enumerate(data) if byte in b"123456789"]
            i = draw.choice(digits) if digits else 0
            data[i : i + 1] = number
        case _:
            data = bytearray(
                draw.choice((b"", noise, b"\0" * 100_000, b"null", b"[]", b"{}\n" * 50))
            )
    file.write_bytes(data)


def _of_records(file: Path, draw: random.Random) -> None:
    text = file.read_bytes().decode("utf-8", "replace")
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    if draw.random() < 0.2:
        draw.shuffle(lines)
    for _ in range(draw.choice((1, 1, 5, 100))):
        i = draw.randrange(len(lines)) if lines else 0
        try:
            record = json.loads(lines[i])
            keys = list(record)
        except (IndexError, TypeError, ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or not keys:
            continue
        key, value = draw.choice(keys), draw.choice(_VALUES)
        match draw.randrange(6):
            case 0:
                del record[key]
            case 1:
                record[str(value)] = record.pop(key)
            case 2:
                record["step"] = value
            case _:
                record[key] = value
        lines[i] = json.dumps(record)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _of_files(file: Path, draw: random.Random) -> None:
    file.unlink()
    match draw.randrange(7):
        case 0:
            file.mkdir()
        case 1:
            file.symlink_to(file.name)
        case 2:
            file.symlink_to("nowhere")
        case 3:
            os.mkfifo(file)
        case 4:
            file.symlink_to("/dev/zero")
        case 5:
            with file.open("wb") as sparse:
                sparse.truncate(20 << 20)
        case _:
            pass


def _compare(path: Path, whole: Path, out: Path) -> None:
    compare(CompareConfig((path, whole), out / "compare.html"))


def _resume(path: Path, whole: Path, out: Path) -> None:
    JemConfig(out=path, resume=True).open()


READERS: dict[str, Callable[[Path, Path, Path], object]] = {
    "report": lambda path, whole, out: report(ReportConfig((path,), out / "report.html")),
    "watch": lambda path, whole, out: watch(WatchConfig(path, once=True)),
    "problems": lambda path, whole, out: show(problems_of_run(path)),
    "compare": _compare,
    "resume": _resume,
}


def outcome(command: Callable[[], object]) -> tuple[str, str]:
    """What became of a command, in a word, and in full where it is a fault."""
    said = io.StringIO()
    try:
        signal.alarm(SECONDS)
        with contextlib.redirect_stdout(said):
            command()
        text, kind = said.getvalue(), "read"
    except EbmguardError as error:
        text, kind = printable(error), "refused"
        # Wrong settings are listed, one a line.
        if text.count("\n") > text.count("\n  ") or len(text) > 2000:
            return "long-winded", text
    except Hang:
        return "hang", traceback.format_exc()
    except Exception:  # noqa: BLE001 - of whatever type, it is what is looked for
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
    return (kind, "") if printable(text) == text else ("escapes", text)


def run(numbers: Iterable[int], folder: Path) -> Iterator[tuple[int, str, str, str]]:
    """Mutations by their numbers: the number, the command, what became of it, and its fault."""

    def give_up(*_: object) -> None:
        raise Hang

    whole, path = make(folder / "whole"), folder / "run"
    for reader in READERS.values():  # which imports what they need, too
        with contextlib.redirect_stdout(io.StringIO()):
            reader(whole, whole, folder)
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        for number in numbers:
            shutil.copytree(whole, path)
            mutate(path, random.Random(number))
            for name, reader in READERS.items():
                found = outcome(lambda reader=reader: reader(path, whole, folder))  # type: ignore[misc]
                yield number, name, *found
            shutil.rmtree(path)
    finally:
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    one = given.only is not None
    first = given.only if one else given.start
    numbers = range(first, first + (1 if one else given.mutations))
    counts: Counter[tuple[str, str]] = Counter()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, name, kind, fault in run(numbers, Path(folder)):
            counts[name, kind] += 1
            if fault:
                print(f"mutation {number}, {name}: {kind}\n{fault}", flush=True)
            if name == "resume" and (number + 1) % 500 == 0:
                print(f"{number + 1:,} mutations, {time.perf_counter() - start:.0f} s", flush=True)
    kinds = ("read", "refused", "traceback", "hang", "escapes", "long-winded")
    print(f"\n{len(numbers):,} mutations, each through every command, pictures of every 50th:\n")
    print("| command |", " | ".join(kinds), "|\n|---|" + "---:|" * len(kinds))
    for name in READERS:
        print(f"| {name} |", " | ".join(f"{counts[name, kind]:,}" for kind in kinds), "|")
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    peak = next(int(words[1]) for words in lines if words[0] == "VmHWM:") / 2**10
    print(
        f"\n{time.perf_counter() - start:.0f} s; at most {peak:.0f} MiB, of which PyTorch, ", end=""
    )
    print("matplotlib and the like take most.")


if __name__ == "__main__":
    main()

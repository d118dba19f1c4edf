from __future__ import annotations

import base64
import json
import math
import os
import re
import socket
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imsave

from ebmguard import cli
from ebmguard.errors import ConfigError
from ebmguard.report.page import page
from ebmguard.report.plots import LEFT, RIGHT
from ebmguard.sinks import read_jsonl

from .folders import record, rows, write

VOID = {"meta", "link", "br", "img", "hr", "input"}
# Of HTML, these may be left open; the page closes them all the same.
RAW = {"script", "style"}


class Parsed(HTMLParser):
    """The page as a browser's reader sees it; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.raw: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert "svg" in self.open  # elsewhere HTML has no such tags
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in RAW:
            self.raw.append((self.open[-1], data))
        else:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "rescued")


def test_the_page_is_well_formed_and_needs_nothing_else(folder, tmp_path):
    parsed = Parsed(page([folder, write(tmp_path / "lost", rescued=False)]))
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert "src" not in attrs
        for name, value in attrs.items():
            if name.endswith("href"):
                assert str(value)[0] == "#"
                assert str(value)[1:] in ids
            assert not name.startswith("on")
    for _, raw in parsed.raw:
        assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|import ", raw)
    numbers = [raw for tag, raw in parsed.raw if raw.lstrip().startswith("{")]
    assert len(numbers) == len(parsed.of_class("plot"))
    for raw in numbers:
        json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_alerts_and_rollbacks_are_all_there(folder):
    parsed = Parsed(page([folder]))
    alerts = read_jsonl(folder / "alerts.jsonl")
    assert len(alerts) == 2
    for alert in alerts:
        sentence, _, _ = alert["message"].partition(" Likeliest")
        assert f"{alert['step']} {alert['level']} {alert['rule']}" in parsed.words
        assert sentence in parsed.words
    (record,) = read_jsonl(folder / "recovery.jsonl")
    assert record["message"] in parsed.words
    assert "beta_star 0 → 0.5" in parsed.words
    assert "No rule has fired since: begin the next run with these settings." in parsed.words
    # Each is marked in the chart of its own diagnostic, and linked with its line.
    targets = [attrs["href"] for tag, attrs in parsed.tags if tag == "a"]
    assert targets.count("#alert-0-0") == targets.count("#alert-0-1") == 1
    assert targets.count("#rollback-0-0") == len(parsed.of_class("plot"))


def test_samples_that_the_run_kept_are_shown_and_nothing_else_is(folder):
    figures = folder / "figures"
    figures.mkdir()
    picture = np.random.default_rng(0).random((4, 6, 3))
    imsave(figures / "samples_last_<healthy>.png", picture)
    imsave(figures / "other.png", picture)
    (figures / "samples_evil.png").write_text("<script>")
    kept = (figures / "samples_last_<healthy>.png").read_bytes()
    (figures / "samples_long.png").write_bytes(kept + bytes(4 << 20))
    parsed = Parsed(page([folder]))
    ((_, shown),) = [each for each in parsed.tags if each[0] == "img"]
    assert shown["alt"] == "last <healthy>"
    kind, text = str(shown["src"]).split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(text) == kept
    (figures / "samples_folder.png").mkdir()
    with pytest.raises(ConfigError, match=r"samples_folder\.png cannot be read: it is not a file"):
        page([folder])


def test_what_is_not_finite_is_a_gap_with_a_mark(tmp_path):
    found = list(rows(range(100), seed=1))
    for step in (40, 41, 60):
        found[step][1]["energy_gap"] = math.nan if step == 40 else math.inf
    text = page([record(tmp_path / "run", found)])
    assert re.findall(r"<title>not finite at step (\d+)</title>", text)[:3] == ["40", "41", "60"]
    (path, *_) = [a["d"] for a in Parsed(text).of_class("line") if "run0" in str(a["class"])]
    assert str(path).count("M") == 3
    assert "nan" not in str(path)
    assert "inf" not in str(path)


def test_a_chart_goes_from_step_0_to_the_last(tmp_path):
    text = page([record(tmp_path / "run", [(step, {"energy_gap": 1.0}) for step in range(3)])])
    (path,) = [a["d"] for a in Parsed(text).of_class("line") if "run0" in str(a["class"])]
    places = [float(x) for x in re.findall(r"[ML](\S+)", str(path))]
    assert places == [LEFT, (LEFT + RIGHT) / 2, RIGHT]


def test_text_is_escaped(tmp_path):
    evil = '<script>alert(1)</script> & "quotes" \' </title></svg>'
    path = write(tmp_path / '<b>run & "co"', rescued=True)
    (alert, *_) = read_jsonl(path / "alerts.jsonl")
    alert |= {"rule": "<i>rule", "message": evil, "remedies": [evil, "b"], "value": "NaN"}
    (record,) = read_jsonl(path / "recovery.jsonl")
    for name, line in (("alerts", alert), ("recovery", record | {"message": evil})):
        with (path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    (path / "config.json").write_text(json.dumps({"<u>key": evil}))
    plain = Parsed(page([write(tmp_path / "plain")]))
    parsed = Parsed(page([path]))
    assert not {tag for tag, _ in parsed.tags} & {"i", "u"} - {tag for tag, _ in plain.tags}
    count = {tag: sum(t == tag for t, _ in parsed.tags) for tag in ("script", "b", "figure")}
    extra = count["figure"] - sum(tag == "figure" for tag, _ in plain.tags)
    assert count["script"] == sum(tag == "script" for tag, _ in plain.tags) + extra
    assert evil in parsed.words
    assert "<i>rule" in parsed.words
    assert "<u>key" in parsed.words
    assert '<b>run & "co"' in parsed.words


def test_runs_are_compared_by_what_differs(folder, tmp_path):
    other = write(tmp_path / "lost", rescued=False)
    (other / "config.json").write_text(
        json.dumps({"beta_star": 2.0, "lr": 3e-3, "settings": {"iterations": 300, "new": [1]}})
    )
    words = Parsed(page([folder, other])).words
    _, _, differing = words.partition("What differs")
    differing, _, _ = differing.partition("Settings and results")
    assert "beta_star 0 2" in differing
    assert "settings.sgld_steps 5 —" in differing
    assert "settings.new — [1]" in differing
    assert "diverged_at none 180" in differing
    assert "lr" not in differing
    assert "accuracy" not in differing
    assert "What differs" not in Parsed(page([folder])).words


def test_without_jinja2_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"\.\[cli\]"):
        page([folder])


def test_the_page_goes_into_the_run_and_of_several_into_the_present_folder(tmp_path, monkeypatch):
    first, second = (write(tmp_path / "runs" / name) for name in "ab")
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    assert cli.main(["report", str(first)]) == 0
    assert cli.main(["compare", str(first.parent)]) == 0
    assert not [*here.iterdir()]
    assert (first / "report.html").is_file()
    assert (first.parent / "compare.html").is_file()
    assert cli.main(["compare", str(first), str(second)]) == 0
    assert [path.name for path in here.iterdir()] == ["compare.html"]
    # A folder with one run stands for that run.
    only = write(tmp_path / "one" / "run")
    assert cli.main(["report", str(only.parent)]) == 0
    assert (only / "report.html").is_file()


@pytest.mark.parametrize("what", ["a link out", "a link inside", "a pipe", "a socket", "a folder"])
def test_a_page_goes_through_no_link_and_waits_for_nobody(what, tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "run")
    (victim := tmp_path / "victim").write_text("precious")
    monkeypatch.chdir(path)  # the address of a socket must be short
    if what == "a pipe":
        os.mkfifo("report.html")
    elif what == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("report.html")
    elif what == "a folder":
        os.mkdir("report.html")
    else:
        os.symlink(victim if what == "a link out" else "config.json", "report.html")
    before = (path / "config.json").read_bytes()
    assert cli.main(["report", "."]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "report.html cannot be written" in line
    assert "Name another --out" in line
    assert ("it is a link" in line) == ("link" in what)
    assert victim.read_text() == "precious"
    assert (path / "config.json").read_bytes() == before


def _huge(name, change):
    def make(path):
        lines = (path / name).read_text().splitlines()
        own = change(json.loads(lines[0]))
        (path / name).write_text("\n".join([json.dumps(own), *lines[1:]]) + "\n")

    return make


HUGE = {
    "settings": lambda path: (path / "config.json").write_text(
        json.dumps({f"k{i}": i for i in range(200_000)})
    ),
    "an alert": _huge("alerts.jsonl", lambda own: own | {"message": "m" * (2 << 20)}),
    "a name": _huge("alerts.jsonl", lambda own: own | {"rule": "r" * (2 << 20)}),
    "a rollback": _huge(
        "recovery.jsonl",
        lambda own: own | {"changes": {f"c{i}": [1.0, 2.0] for i in range(100_000)}},
    ),
    "tags": _huge("metrics.jsonl", lambda own: own | {f"t{i}": 1.0 for i in range(30_000)}),
}


@pytest.mark.parametrize("what", HUGE)
def test_what_is_huge_is_shown_in_part(what, tmp_path, capsys):
    path, usual = write(tmp_path / "run"), len(page([write(tmp_path / "usual")]))
    HUGE[what](path)
    assert len(page([path])) < usual + 400_000
    assert cli.main(["check", str(path)]) in (0, 1)
    assert cli.main(["watch", str(path), "--once"]) == 0
    assert len(capsys.readouterr().out) < 100_000
    if what == "settings":
        assert "and more" in page([path])

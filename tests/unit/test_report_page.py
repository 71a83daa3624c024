"""The report's page: one valid file, for a phone, a printer and a screen reader; names in it do no harm."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import xml.dom.minidom
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from podgraph.report import figures
from podgraph.report.page import MOST_BUCKETS, render
from podgraph.workload.costs import Scope
from tests.reports_made import CATALOG, CONFIG, made
from tests.steps_made import histogram

VOID = {"meta", "br", "img"}
NASTY = "\"><img src=x onerror=alert(1)><script>alert('1')</script>"


class Page(HTMLParser):
    """Collects elements, and checks that they close in order and hold no attribute twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.found.append((tag, dict(attrs)))
        self.words.append(" " if tag in ("br", "td", "th") else "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag not in VOID
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.mark.parametrize(("scope", "path"), [("step", CONFIG), ("attention", CATALOG)], ids=["step", "catalog"])
def test_the_page_is_one_file_for_everybody(scope: Scope, path: Path) -> None:
    report = made(scope, path=path)
    text = render(report)
    page = Page(text)
    assert text.startswith("<!doctype html>\n<html lang=")
    assert {"script", "link", "iframe", "object"}.isdisjoint({tag for tag, _ in page.found})
    assert not re.search(r"@import|url\(|https?:", re.sub(r"data:[\w/+;,=]*", "", text))
    assert any(attributes.get("name") == "viewport" for attributes in page.all("meta"))
    pictures = page.all("img")
    assert len(pictures) == 5
    for picture in pictures:
        assert len(picture["alt"] or "") > 60
        assert (picture["src"] or "").startswith("data:image/svg+xml;base64,")
    headings = [tag for tag, _ in page.found if re.fullmatch("h[1-6]", tag)]
    assert headings == ["h1"] + ["h2"] * (len(headings) - 1)
    for attributes in page.all("div"):
        if attributes.get("class") == "scroll":  # reached by the keyboard, and named
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    assert render(made(scope, path=path, again=True)) == text, "equal input must give equal bytes"


def test_rows_of_tables_are_as_long_as_their_heads() -> None:
    for path, scope in ((CONFIG, "step"), (CATALOG, "attention")):
        text = render(made(scope, path=path))
        tables = re.findall(r"<table>(.*?)</table>", text, re.S)
        assert len(tables) == 7
        for table in tables:
            rows = re.findall(r"<tr.*?</tr>", table, re.S)
            widths = []
            for row in rows:
                cells = re.findall(r"<t[hd]( [^>]*)?>", row)
                spans = [re.search(r'colspan="(\d)"', cell) for cell in cells]
                widths.append(sum(int(span[1]) if span else 1 for span in spans))
            second = 'rowspan="2"' in table  # a head of two rows: its first cell counts in both
            assert len(set(widths[:1] + widths[1 + second :])) == 1, widths


def test_measured_and_modelled_are_told_apart() -> None:
    page = Page(render(made("attention", path=CATALOG)))
    assert "device memory, a graph for each bucket measured" in page.text
    assert "replay, us measured" in page.text
    assert "of time wasted modelled" in page.text
    assert "of steps in one replay logged" in page.text
    assert f"the file {CATALOG.stat().st_size:,} bytes measured" in page.text
    assert "Scope attention: a graph holds attention alone" in page.text
    page = Page(render(made("step", counted="simulated")))
    assert "of steps in one replay simulated" in page.text
    assert "device memory, a graph for each bucket modelled" in page.text
    assert "replay, us measured" not in page.text
    assert "Scope step: a graph holds the whole model" in page.text


def test_both_prices_of_an_eager_step_are_shown() -> None:
    report = made(steps=histogram((0, 0, 8, 50), (5000, 1, 0, 5)))
    text = Page(render(report)).text
    for eager in ("penalty", "hidden"):
        assert f"{report.now[eager].waste:.2%}".replace("%", " %") in text
    assert "prefill_len > 1024: 5 steps" in text


def test_names_from_files_are_escaped() -> None:
    text = render(made(name=NASTY + ".yaml", trace=NASTY + "$\\frac{1}$.csv"))
    assert "<script" not in text
    assert "onerror=alert(1)>" not in text
    assert "&lt;script&gt;" in text
    assert len(Page(text).all("img")) == 5


def test_long_lists_of_buckets_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(render.__globals__, "MOST_BUCKETS", 5)
    assert MOST_BUCKETS == 100
    assert "The 5 that serve most steps, of 12; the CSV has all" in render(made())


@pytest.mark.parametrize("scope", ["step", "attention"])
def test_figures_are_valid_and_have_no_date(scope: Scope) -> None:
    report = made(scope)
    draws = (
        figures.pareto_waste,
        figures.pareto_coverage,
        figures.steps_map,
        figures.hits_map,
        figures.waste_map,
    )
    for draw in draws:
        svg = draw(report)
        xml.dom.minidom.parseString(svg)
        assert b"dc:date" not in svg
        assert draw(report) == svg
    words = figures.pareto_waste(report).decode()
    assert all(name in words for name in figures.NAMES.values())


def test_a_picture_is_the_same_each_time() -> None:
    report = made()
    picture = figures.pareto_png(report)
    assert figures.pareto_png(report) == picture
    assert Image.open(io.BytesIO(picture)).size == (1440, 691)


def test_one_step_in_one_bucket_is_drawn() -> None:
    report = made(steps=histogram((0, 0, 5, 3)), eager="hidden", buckets=1)
    page = Page(render(report))
    assert "A bucket holds every step." in page.text
    assert base64.b64encode(figures.steps_map(report)).decode() in str(page.all("img"))


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [412, 1200], ids=["phone", "desktop"])
def test_a_browser_draws_it(tmp_path: Path, width: int) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render(made("attention", path=CATALOG)))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", f"--window-size={width},3000"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    image = Image.open(picture).convert("L")
    assert image.size == (width, 3000)
    shades = image.histogram()
    dark = sum(shades[:128]) / sum(shades)
    assert 0.01 < dark < 0.5, "text and figures, not an empty page"
    # nothing that is wider than the window pushes the page: its margins stay white
    margin = image.crop((width - 4, 0, width, 3000)).getextrema()
    assert margin == (255, 255)

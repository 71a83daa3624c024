"""The documentation says what the tool does: commands, options, files, code, and measured numbers.

A number quoted from a result file stands behind a marker, an HTML comment with the file and the path in its JSON:
``<!-- main_job.json metrics/catalogs/quickstart/buckets -->14``. ``python tests/cli/test_readme.py`` writes the numbers
anew, in the form (decimals, thousands, exponent) that each has.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from podgraph.build import build
from podgraph.cli import main
from podgraph.config import load_config

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = """\
specs:
  small: {num_qo_heads: 4, num_kv_heads: 1, head_dim: 64, page_size: 16}
buckets: {batch: [3], prefill_len: [128], decode_count: [2], families: [mixed]}
workspace: {max_pages: 512, max_kv_len: 4096}
"""
EVERYWHERE = {"-h", "--help"}  # of every command, and said once

MARKED = re.compile(r"(<!-- ([\w.]+\.json) ([^>]+?) -->)([-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)")
NUMBERS = "Numbers"  # the section whose tables hold nothing but quoted numbers
FOLDERS = ("benchmarks", "configs", "docs", "kernels", "podgraph", "tests")
NO_FILES = {"benchmarks/results/", "podgraph/kernels"}


def with_numbers(text: str) -> str:
    """The text with each marked number as the result file has it."""

    def rewritten(match: re.Match[str]) -> str:
        marker, file, path, number = match.groups()
        return marker + in_form(number, looked_up(file, path))

    return MARKED.sub(rewritten, text)


def looked_up(file: str, path: str) -> float:
    value: Any = json.loads((RESULTS / file).read_bytes())
    for key in path.split("/"):
        assert key in value, f"{file} has no {path}: nothing is called {key}"
        value = value[key]
    assert isinstance(value, (int, float)), f"{file}: {path} is no number"
    return value


def in_form(number: str, value: float) -> str:
    """``value`` with the decimals of ``number``, and its exponent or thousands separators."""
    mantissa, exponent, _ = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return f"{value:.{decimals}e}" if exponent else f"{value:,.{decimals}f}"


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = heading.split(" ")[0]
    assert f"\n{heading}\n" in text, f"the README has no heading {heading!r}"
    body = text.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", body, maxsplit=1, flags=re.M)[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def commands(group: click.Group, name: str = "podgraph") -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name, the group itself first."""
    yield name, group
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


COMMANDS = dict(commands(main))


def documented() -> dict[str, tuple[list[str], str]]:
    """Full name -> (arguments, section) of each command in the CLI reference."""
    reference = section(README.read_text(), "## CLI reference")
    found = {}
    for title in re.findall(r"^### `(.+)`$", reference, re.M):
        words = title.split()
        arguments = [word for word in words if word.isupper()]
        found[" ".join(word for word in words if not word.isupper())] = arguments, section(reference, f"### `{title}`")
    return found


def shell_lines() -> list[str]:
    lines = []
    for page in PAGES:
        for block in blocks(page.read_text(), "sh"):
            lines += [line for line in block.replace("\\\n", " ").splitlines() if shlex.split(line, comments=True)]
    return lines


def test_the_reference_has_every_command() -> None:
    assert set(documented()) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_has_every_option(name: str) -> None:
    command = COMMANDS[name]
    arguments, body = documented()[name]
    context = click.Context(command)
    options = {word for p in command.get_params(context) if p.param_type_name == "option" for word in p.opts}
    # only the first column, so that a sentence may name another option
    written = {
        word for row in re.findall(r"^\| (`.*?) \|", body, re.M) for word in re.findall(r"(?<!\w)--?[a-z][a-z-]*", row)
    }
    assert written - EVERYWHERE == options - EVERYWHERE
    assert arguments == [p.make_metavar(context) for p in command.get_params(context) if p.param_type_name != "option"]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "podgraph"])
def test_the_reference_says_what_is_required_and_the_choices(name: str) -> None:
    rows = re.findall(r"^\| (`.*?) \| (.+) \|$", documented()[name][1].replace(r"\|", "/"), re.M)
    for option in COMMANDS[name].params:
        if not isinstance(option, click.Option):
            continue
        (meaning,) = [(first, text) for first, text in rows if re.search(f"`{option.opts[-1]}[` ]", first)]
        assert ("Required" in meaning[1]) == option.required, option.name
        if isinstance(option.type, click.Choice):
            assert f"[{'/'.join(option.type.choices)}]" in meaning[0]


@pytest.mark.parametrize("line", shell_lines())
def test_shell_lines_parse(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        del words[0]
    for operator in ("&&", "||", ";", "|"):
        if operator in words:
            words = words[: words.index(operator)]
    match words:
        case ["podgraph", *arguments]:
            parse(main, "podgraph", arguments)
        case ["python" | "python3", "-m", "podgraph", *arguments] | ["python" | "python3", "cli.py", *arguments]:
            parse(main, "podgraph", arguments)
        case ["python" | "python3", "-m", "venv", _]:
            pass
        case ["python" | "python3", "-m", module, *_]:
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        case ["python" | "python3", script, *_]:
            assert (ROOT / script).is_file()
        case ["make", target, *_]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M)
        case ["pip", "install", *requirements]:
            extras = {e for r in requirements for group in re.findall(r"\[(.*)\]", r) for e in group.split(",")}
            table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1]
            assert extras <= set(re.findall(r"^([a-z]+) = \[", table.split("\n[")[0], re.M))
        case _:
            pytest.fail(f"no rule for {words[:1]}: add one, or leave the line out of the sh block")


def parse(command: click.Command, name: str, arguments: list[str]) -> None:
    """Parses a command line down to its last option, and runs nothing."""
    if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        assert arguments[0] in command.commands, f"{name} has no command {arguments[0]}"
        parse(command.commands[arguments[0]], f"{name} {arguments[0]}", arguments[1:])
        return
    with command.make_context(name, list(arguments)):
        pass


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page.read_text(), "python"):
        compile(block, str(page), "exec")


def test_the_api_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(SMALL)
    build(load_config(config), tmp_path / "quickstart.podcat", kernels=tmp_path, backend="cpu")
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(section(README.read_text(), "## The API in twenty lines"), "python")
    exec(compile(example, str(README), "exec"), {})
    assert capsys.readouterr().out.startswith("(batch=3, prefill_len=128, decode_count=2) {'plans': 1, 'runs': 1, ")


def test_configurations_load(tmp_path: Path) -> None:
    configs = [block for block in blocks(README.read_text(), "yaml") if block.startswith("specs:")]
    assert configs
    for block in configs:
        path = tmp_path / "readme.yaml"
        path.write_text(block)
        assert load_config(path).buckets


def test_every_shipped_configuration_is_named() -> None:
    text = README.read_text()
    assert [p.name for p in (ROOT / "configs").glob("*.yaml") if f"(configs/{p.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in {slug(title) for title in re.findall(r"^#+ (.+)$", path.read_text(), re.M)}, target


def slug(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", text))
    for line in shell_lines():
        named |= {word for word in shlex.split(line, comments=True) if re.match(rf"(?:{'|'.join(FOLDERS)})/", word)}
    assert [name for name in sorted(named - NO_FILES) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_numbers_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert text == with_numbers(text), "run python tests/cli/test_readme.py"
    assert len(MARKED.findall(text)) == len(re.findall(r"<!-- \S+\.json ", text)), "a marker without a number behind it"


def test_tables_of_numbers_hold_no_other_number() -> None:
    rows = re.findall(r"^\| [^|]+ \| (.+) \|$", section(README.read_text(), f"## {NUMBERS}"), re.M)
    cells = [cell for row in rows for cell in row.split(" | ")]
    unmarked = [cell for cell in cells if cell[0].isdigit()]
    assert len(cells) > 20
    assert unmarked == []


@pytest.mark.parametrize(
    ("number", "value", "want"),
    [("14", 14, "14"), ("1,000", 199088, "199,088"), ("0.00", 0.8543, "0.85"), ("1.0e-03", 0.002794, "2.8e-03")],
)
def test_numbers_keep_their_form(number: str, value: float, want: str) -> None:
    assert in_form(number, value) == want


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_numbers(path.read_text()))

"""Who may import whom, and what works where torch, FlashInfer and the CUDA driver are not installed."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "podgraph"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# these serve `podgraph buckets` and `podgraph inspect`, and a build farm's bookkeeping
LIGHT = [
    name
    for name in MODULES
    if name in ("podgraph", "podgraph.shapes", "podgraph.config", "podgraph.batch", "podgraph.errors")
    or name == "podgraph.dispatch.select"
    or name.startswith(("podgraph.catalog", "podgraph.cli", "podgraph.workload", "podgraph.report"))
]
CLI = {name for name in MODULES if f"{name}.".startswith("podgraph.cli.")}
BLOCK = "import sys\nfor name in ('torch', 'flashinfer', 'cuda'): sys.modules[name] = None\n"

CONFIG = """\
specs: {tiny: {num_qo_heads: 4, num_kv_heads: 1, head_dim: 128, page_size: 16}}
buckets: {batch: [2], prefill_len: [0], decode_count: [2]}
workspace: {max_pages: 64, max_kv_len: 512}
"""


def python(code: str, *arguments: str, cwd: Path = ROOT) -> str:
    """Runs a program in a fresh process, and gives what it printed."""
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", path + code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports_of(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """The absolute names that a file imports; only those at its top where not ``everywhere``."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if everywhere else _at_import(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            # "from podgraph import driver" names a module too
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements that run when the module is imported, those under TYPE_CHECKING left out."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
            yield from _at_import([s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)])


@functools.cache
def importers(name: str) -> set[str]:
    """Modules of the package that import a module or anything below it, wherever in the file."""
    return {
        module for module, path in MODULES.items() if any(f"{got}.".startswith(f"{name}.") for got in imports_of(path))
    }


def test_light_modules_import_without_torch() -> None:
    assert len(LIGHT) > 10
    printed = python(BLOCK + f"import importlib\nfor name in {LIGHT!r}: importlib.import_module(name)\nprint('done')")
    assert printed == "done\n"


def test_the_block_works() -> None:
    code = BLOCK + "try: import podgraph.dispatch.dispatcher\nexcept ImportError as e: print(e.name)"
    assert python(code) == "torch\n"


def test_importing_podgraph_imports_no_heavy_module() -> None:
    code = "import podgraph, sys\nprint(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(python(code).split())
    assert "podgraph" in loaded
    assert not loaded & {"torch", "flashinfer", "cuda", "yaml", "pydantic", "click", "rich", "polars", "ray"}


def test_the_runtime_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import podgraph, sys\n"
        "assert podgraph.open and podgraph.OpenCatalog and podgraph.Dispatcher\n"
        "print('torch' in sys.modules, 'podgraph.build' in sys.modules, 'flashinfer' in sys.modules)\n"
        "try: podgraph.nothing\n"
        "except AttributeError as e: print(e)"
    )
    assert python(code) == "True False False\nmodule 'podgraph' has no attribute 'nothing'\n"


def test_buckets_and_inspect_work_without_torch(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)
    code = BLOCK + (
        "from podgraph.catalog import store\n"
        "from podgraph.catalog.model import *\n"
        "from podgraph.cli import main\n"
        "from podgraph.config import load_config\n"
        "spec = load_config('tiny.yaml')\n"
        "entry = SpecEntry(spec.specs['tiny'], (Region('q', 0),))\n"
        "records = tuple(Record('tiny', b, 'interpreter', -1) for b in spec.buckets)\n"
        "store.write('tiny.podcat', Catalog(Fingerprint('cpu'), {'tiny': entry}, 64, 512, (), records, {}, {}))\n"
        "main(['buckets', '--config', 'tiny.yaml'], standalone_mode=False)\n"
        "main(['inspect', 'tiny.podcat'], standalone_mode=False)\n"
    )
    printed = python(code, cwd=tmp_path)
    assert "1 buckets: 1 decode, 0 mixed, 0 prefill" in printed
    assert "tiny.podcat: " in printed


@pytest.mark.parametrize(
    ("vendor", "owner"),
    [
        ("flashinfer", {"podgraph.providers.flashinfer"}),
        ("cuda", {"podgraph.driver"}),
        ("yaml", {"podgraph.strict_yaml"}),
        ("pydantic", {"podgraph.schema"}),
        ("pydantic_core", {"podgraph.schema"}),
        ("ray", {"podgraph.workload.ray_engine"}),
        ("prometheus_client", {"podgraph.dispatch.metrics"}),
        ("nvtx", {"podgraph.dispatch.nvtx"}),
        ("zstandard", {"podgraph.workload.log_files"}),
        ("click", CLI),
        ("rich", CLI),
        ("scipy", {"podgraph.workload.cover"}),
    ],
)
def test_one_file_knows_each_vendor(vendor: str, owner: set[str]) -> None:
    assert importers(vendor) <= owner


def test_flashinfer_is_imported_lazily() -> None:
    for module, path in MODULES.items():
        vendors = {name.split(".")[0] for name in imports_of(path, everywhere=False)}
        assert "flashinfer" not in vendors, module


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_name_no_torch_at_their_top(module: str) -> None:
    assert "torch" not in {name.split(".")[0] for name in imports_of(MODULES[module], everywhere=False)}


def test_only_the_launcher_imports_the_command_line() -> None:
    assert importers("podgraph.cli") - CLI == {"podgraph.__main__"}


def test_build_and_dispatch_do_not_import_each_other() -> None:
    assert not {name for name in importers("podgraph.build") if name.startswith("podgraph.dispatch")}
    assert "podgraph.build" not in importers("podgraph.dispatch")
    assert not {name for name in importers("podgraph.dispatch") if name.startswith("podgraph.capture")}


@pytest.mark.parametrize(("module", "other"), [("build", "dispatch"), ("dispatch.runtime", "build")])
def test_importing_one_does_not_load_the_other(module: str, other: str) -> None:
    code = f"import podgraph.{module}, sys\nprint([m for m in sys.modules if m.startswith('podgraph.{other}')])"
    assert python(code) == "[]\n"


def test_only_build_capture_and_dispatch_talk_to_the_driver() -> None:
    allowed = ("podgraph.build", "podgraph.capture", "podgraph.dispatch")
    assert not [name for name in importers("podgraph.driver") if not name.startswith(allowed)]

"""Compiles one kernel source into one cubin, and remembers what it compiled.

Needs nvcc, no GPU. A cubin is named for the digest of everything that went into it, so a folder of cubins can be copied
to another machine and is used there without a compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from podgraph.errors import CompileError
from podgraph.planner.args import layout_asserts

FLAGS = ("-std=c++17", "-O3", "-use_fast_math", "--expt-relaxed-constexpr", "-Xptxas", "-v")
TIMEOUT_S = 900
ARCHITECTURES = {"8.0": "sm_80", "9.0": "sm_90a"}  # by compute capability
IDENTITY = "podgraph_compiled_from"  # the constant in every cubin that holds its `Source.identity`


@dataclass(frozen=True)
class Source:
    """One kernel to compile.

    Attributes:
        file: name under ``kernels/``.
        defines: preprocessor definitions, in order.
        vendor: whose headers it needs, such as ``flashinfer-python 0.7.2.post1``: part of the digest.
        headers: finds their folder; called only where something has to be compiled.
    """

    file: str
    defines: tuple[tuple[str, str | int], ...]
    vendor: str = ""
    headers: Callable[[], Path] | None = field(default=None, compare=False)

    @property
    def identity(self) -> str:
        """Digest of what tells a kernel from others: file, definitions, vendor, and the structs that it takes.

        Its cubin says it too (`IDENTITY`), so that a reader knows what it was compiled from.
        """
        parts = [self.file, self.vendor, layout_asserts(), *(f"{k}={v}" for k, v in self.defines)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def text(self) -> str:
        """What the compiler is given: the file, checks of the structs that it takes, and what it is compiled from."""
        says = f'extern "C" __device__ const char {IDENTITY}[] = "{self.identity}";\n'
        return f'#include "{self.file}"\n{layout_asserts()}{says}'

    def digest(self, arch: str) -> str:
        parts = [self.vendor, arch, *FLAGS, self.text, *(f"{k}={v}" for k, v in self.defines)]
        parts += [f"{name}:{text}" for name, text in sorted(_included(self.file).items())]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _included(file: str) -> dict[str, str]:
    """A source and every header of ours that it includes, however deep: name -> text."""
    found: dict[str, str] = {}
    wanted = [file]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = (kernel_folder() / name).read_text()
            wanted += re.findall(r'^\s*#include "([^"]+)"', found[name], re.MULTILINE)
    return found


@dataclass(frozen=True)
class Compiled:
    """A cubin and what ptxas reported of its kernel."""

    cubin: bytes
    registers: int
    spill_bytes: int


def kernel_folder() -> Path:
    """The CUDA sources: package data where podgraph is installed, the top folder in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "args.h").is_file():
            return folder
    raise CompileError(f"podgraph's kernel sources are missing beside {package}: reinstall podgraph")


def find_nvcc() -> str | None:
    """Path of nvcc: on the PATH, else in /usr/local/cuda."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def compile_all(
    sources: list[Source], arch: str, folder: Path, on_done: Callable[[], None] = lambda: None
) -> dict[Source, Compiled]:
    """Compiles what the folder does not hold yet, one process per core.

    Args:
        arch: such as ``sm_90a``.
        folder: where cubins are kept, made if missing.
        on_done: called once for each source.

    Raises:
        CompileError: no compiler, or the compiler's own first error line.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def one(source: Source) -> Compiled:
        compiled = _load(folder, source.digest(arch)) or _compile(source, arch, folder)
        on_done()
        return compiled

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(sources, pool.map(one, sources), strict=True))


def _compile(source: Source, arch: str, folder: Path) -> Compiled:
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompileError(
            f"{source.file}: no compiled kernel in {folder} and no nvcc to make one: install the CUDA toolkit, or run "
            "`podgraph compile` where there is one and copy its folder here"
        )
    with tempfile.TemporaryDirectory() as scratch:
        text, output = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.cubin"
        text.write_text(source.text)
        virtual = arch.replace("sm_", "compute_")
        command = [nvcc, "-cubin", f"-gencode=arch={virtual},code={arch}", *FLAGS, f"-I{kernel_folder()}"]
        command += ([f"-I{source.headers()}"] if source.headers else []) + [f"-D{k}={v}" for k, v in source.defines]
        try:
            done = subprocess.run(
                [*command, str(text), "-o", str(output)], capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise CompileError(f"{source.file}: nvcc did not finish: {e}") from e
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
            raise CompileError(f"{source.file}: nvcc failed for {arch}: {lines[0]}")
        serialised = re.search(r".*\(C75\d\d\).*", done.stderr)
        if serialised:  # silently, at half the speed: worse than a failure
            raise CompileError(f"{source.file}: ptxas serialises wgmma for {arch}: {serialised[0].strip()}")
        registers = max(map(int, re.findall(r"Used (\d+) registers", done.stderr)), default=0)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
        compiled = Compiled(output.read_bytes(), registers, spills)
    _store(folder, source, arch, compiled)
    return compiled


def _store(folder: Path, source: Source, arch: str, compiled: Compiled) -> None:
    digest = source.digest(arch)
    report = {
        "file": source.file,
        "arch": arch,
        "defines": dict(source.defines),
        "vendor": source.vendor,
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
    }
    for suffix, data in ((".cubin", compiled.cubin), (".json", json.dumps(report, indent=1, sort_keys=True).encode())):
        temporary = folder / f".{digest}{suffix}.{os.getpid()}"
        temporary.write_bytes(data)
        temporary.replace(folder / f"{digest}{suffix}")


def _load(folder: Path, digest: str) -> Compiled | None:
    """A kernel compiled before, or None; a damaged one counts as missing."""
    try:
        report = json.loads((folder / f"{digest}.json").read_bytes())
        cubin = (folder / f"{digest}.cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() == report["sha256"]:
            return Compiled(cubin, int(report["registers"]), int(report["spill_bytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None

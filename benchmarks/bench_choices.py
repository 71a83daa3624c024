"""What each design choice of pod_sm90 and of its work lists buys: each is taken out by itself, and the rest is timed.

    python -m benchmarks.bench_choices --commit $(git rev-parse HEAD)

A choice of the kernel is taken out by a small edit of a copy of kernels/: a text that must stand there exactly once is
replaced, so that no edit can miss and leave the unchanged kernel to be measured. A choice of the lists is taken out of
the numpy planner, whose lists are copied over the GPU's; a list that comes out the same is not timed. Of the settings,
each is made to serve everything.

On the nine shapes of bench_kernels all of these take turns, as graph replays, each in the setting that the unchanged
kernel takes. A ratio is the time without the choice over the time with it. ``unchanged_again`` is the unchanged kernel
once more: how far its ratio is from 1 is what chance does. No catalog is verified first: every result is held against
the unchanged kernel's here, and one that is wrong is no figure and fails the run.

    python -m benchmarks.bench_choices --compile     # compiles all kernels into build/kernels; needs no GPU
    python -m benchmarks.bench_choices --document    # writes the table of docs/pod_sm90.md from the result; likewise
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks import bench_plan
from benchmarks.bench_kernels import KERNELS, ROOT, TOLERANCE
from benchmarks.bench_plan import Int32, _copy_lists, backend_of, host_lists, nine_spec, on_gpu, unverified
from benchmarks.kernel_shapes import MAIN, NINE, spec_name
from benchmarks.result import FOLDER, write_result
from benchmarks.shapes import Shape, interleaved
from podgraph import build as building
from podgraph import driver, samples
from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.errors import PodgraphError
from podgraph.planner import Layout, Policy, sm90
from podgraph.planner import policy as rules
from podgraph.planner.policy import SM90, SM90_SETTINGS, SM90_SPLIT_ROUNDS, Sm90Setting
from podgraph.planner.sm90 import Sm90WorkList
from podgraph.providers import nvcc, pod_sm90
from podgraph.shapes import AttentionSpec

ROUNDS = 40
PART_CHUNKS = 1024 // sm90.CHUNK  # of a decode in `_fixed_parts`
ROOM = 64  # rounds of the grid: room for its parts
RESULT = FOLDER / "choices.json"
PAGE = ROOT / "docs" / "pod_sm90.md"
BEGIN, END = "<!-- choices: table -->", "<!-- choices: end -->"

Edit = tuple[str, str, str]  # file under kernels/, text that it holds once, what stands there instead
Patch = tuple[object, str, object]  # whose attribute, its name, its value meanwhile


@dataclass(frozen=True)
class Choice:
    """One design choice, and how it is taken out.

    Attributes:
        name: in the result.
        what: the choice.
        instead: what is measured in its place.
        edits: of the kernel's sources.
        lists: of the numpy planner.
        room: rounds of the grid that the lists have room for (`SM90_SPLIT_ROUNDS`), where not the usual.
        promote: whether TMA promotes what it brings in to 256 bytes of L2, on both sides; None leaves both.
        setting: that serves every shape.
    """

    name: str
    what: str
    instead: str
    edits: tuple[Edit, ...] = ()
    lists: tuple[Patch, ...] = ()
    room: int = SM90_SPLIT_ROUNDS
    promote: bool | None = None
    setting: str = ""

    @property
    def has_catalog(self) -> bool:
        """Whether it takes kernels or regions of its own."""
        return bool(self.edits) or self.room != SM90_SPLIT_ROUNDS


# --- the choices -----------------------------------------------------------------------------------------------------

DECODE, PREFILL, MEMORY = "pod_sm90_decode.h", "pod_sm90_prefill.h", "pod_sm90_memory.h"
BY_HEAD = "% (tickets / heads) * heads + {0} / (tickets / heads)"  # tickets are items x heads: the other way round


def _fixed_parts(chunks: sm90.Int64, spec: AttentionSpec, policy: Policy) -> sm90.Int64:
    """Instead of `sm90._parts`."""
    return -(-chunks // PART_CHUNKS)


def _pack_in_order(work: Sm90WorkList, layout: Layout, step: Int32, pack: Any = Sm90WorkList.pack) -> None:
    """Instead of `Sm90WorkList.pack`: both lists in the order of the batch's rows, the parts of a row one by one."""
    by_row = [
        values[np.lexsort((values[:, number] & sm90.MOST_PARTS, values[:, row]))]
        for values, row, number in ((work.tiles, 2, 10), (work.units, 4, 6))
    ]
    pack(replace(work, tiles=by_row[0], units=by_row[1]), layout, step)


KERNEL_CHOICES = [
    Choice(
        "side_by_side",
        "decode and prefill on an SM at once",
        "an SM decodes once its prefill is done",
        edits=(
            (DECODE, "int slot = 0, parity = 1;", "sync<288>(8);\n  int slot = 0, parity = 1;"),
            (
                PREFILL,
                "if (warpgroup == 0) sync<256>(kTurn);",
                "if (warpgroup == 0) sync<256>(kTurn);\n  arrive<288>(8);",
            ),
        ),
    ),
    Choice(
        "turns",
        "prefill warpgroups take turns on the tensor cores",
        "each issues its products when it likes",
        edits=(
            (PREFILL, "if (warpgroup == 1) arrive<256>(kTurn);", ""),
            (PREFILL, "if (!shared) sync<256>(kTurn + warpgroup);", ""),
            (PREFILL, "if (!shared) arrive<256>(kTurn + (warpgroup ^ 1));", ""),
            (PREFILL, "if (!alone) sync<256>(kTurn + warpgroup);", ""),
            (PREFILL, "if (!alone) arrive<256>(kTurn + (warpgroup ^ 1));", ""),
            (PREFILL, "if (warpgroup == 0) sync<256>(kTurn);", ""),
        ),
    ),
    Choice(
        "values_behind",
        "prefill's product with V runs behind the softmax of the next block",
        "the softmax waits for it",
        edits=((PREFILL, "wgmma_wait<1>();", "wgmma_wait<0>();"),),
    ),
    Choice(
        "lag",
        "sums are rescaled once a maximum has grown by 2^8",
        "whenever it grows",
        edits=((MEMORY, "constexpr float kLag = 8.f;", "constexpr float kLag = 0.f;"),),
    ),
    Choice(
        "two_stages",
        "two K and two V blocks of prefill in flight (w64, w128)",
        "one of each",
        edits=(
            (
                MEMORY,
                "constexpr int kStages = PODGRAPH_STAGES;",
                "constexpr int kStages = PODGRAPH_STAGES == 2 ? 1 : PODGRAPH_STAGES;",
            ),
        ),
    ),
    Choice(
        "seven_slots",
        "seven chunks of decode in flight (w64)",
        "three, as in the other settings",
        edits=((MEMORY, "constexpr int kSlots = PODGRAPH_DECODE_SLOTS;", "constexpr int kSlots = 3;"),),
    ),
    Choice(
        "values_released",
        "decode gives V back before it waits for the next K",
        "it holds V until K is there",
        edits=(
            (
                DECODE,
                "    // never hold V while waiting for the next K",
                "    barrier_wait(full + 8 * slot, parity);",
            ),
        ),
    ),
    Choice(
        "first_key_early",
        "the first K of a tile comes in while the tile before is finished",
        "it comes once the queries' place is free",
        edits=(
            (PREFILL, "if (!end) bring(false, blocks - 1, page);", ""),
            (
                PREFILL,
                "barrier_wait(shared_address(&memory.query_empty), turn ^ 1);",
                "barrier_wait(shared_address(&memory.query_empty), turn ^ 1);\n"
                "    if (!end) bring(false, blocks - 1, page);",
            ),
        ),
    ),
    Choice(
        "drawn",
        "work is drawn from counters",
        "each CTA has its share from the start",
        edits=(
            (PREFILL, "next = atomicAdd(a.counters, 1) + gridDim.x;", "next = ticket += gridDim.x;"),
            (DECODE, "ticket = atomicAdd(a.counters + 1, 1) + gridDim.x;", "ticket = number * gridDim.x + blockIdx.x;"),
        ),
    ),
    Choice(
        "heads_together",
        "the KV heads of an item are drawn one after the other",
        "all items of one head, then the next head's",
        edits=(
            (
                PREFILL,
                "int ticket = blockIdx.x, stage = 0",
                "int ticket = blockIdx.x;\n"
                f"  if (ticket < tickets) ticket = ticket {BY_HEAD.format('ticket')};\n"
                "  int stage = 0",
            ),
            (
                PREFILL,
                "next = __shfl_sync(~0u, next, 0);",
                f"next = __shfl_sync(~0u, next, 0);\n    if (next < tickets) next = next {BY_HEAD.format('next')};",
            ),
            (
                DECODE,
                "ticket = __shfl_sync(~0u, ticket, 0);",
                "ticket = __shfl_sync(~0u, ticket, 0);\n"
                f"      if (ticket < tickets) ticket = ticket {BY_HEAD.format('ticket')};",
            ),
        ),
    ),
    Choice(
        "two_loaders",
        "two warps load a tile's queries",
        "one does",
        edits=(
            (PREFILL, "int i = lane + 32 * half_of_rows;", "int i = half_of_rows ? 1 << 20 : lane;"),
            (PREFILL, "i < warpgroups * 64 * kPieces; i += 64)", "i < warpgroups * 64 * kPieces; i += 32)"),
        ),
    ),
    Choice(
        "edge_masks",
        "only blocks at the causal edge are masked",
        "every block",
        edits=((PREFILL, "if (block * kBlock + kBlock - 1 > least_limit ||", "if (block >= 0 ||"),),
    ),
    Choice(
        "eviction",
        "L2 keeps prefill's KV and lets go of decode's first",
        "both as anything else",
        edits=(
            ("sm90.h", "kEvictFirst = 0x12F0000000000000ull", "kEvictFirst = 0x1000000000000000ull"),
            ("sm90.h", "kEvictLast = 0x14F0000000000000ull", "kEvictLast = 0x1000000000000000ull"),
        ),
    ),
]
MAP_CHOICES = [
    Choice("prefill_promoted", "prefill's KV is brought into L2 by 256 bytes", "by what is asked for", promote=False),
    Choice("decode_not_promoted", "decode's is brought by what is asked for", "by 256 bytes too", promote=True),
]
LIST_CHOICES = [
    Choice(
        "whole_pairs",
        "decodes are not split where whole ones balance",
        "all are, into parts of 1,024 tokens",
        lists=((sm90, "_parts", _fixed_parts),),
        room=ROOM,
    ),
    Choice(
        "split_pairs",
        "decodes are split where whole ones do not balance",
        "none is",
        lists=((sm90, "SPLITS", ((0, 1),)),),
    ),
    Choice(
        "longest_first",
        "tiles and units longest first",
        "in the order of the batch",
        lists=((Sm90WorkList, "pack", _pack_in_order),),
    ),
    Choice(
        "shared_tiles",
        "few tiles are each shared by both prefill warpgroups (w64d)",
        "each has rows of its own",
        lists=((Sm90Setting, "shares_tiles", False),),
    ),
    Choice(
        "split_tiles",
        "few tiles are split over CTAs (w64, w64d)",
        "whole tiles",
        lists=((Sm90Setting, "splits_tiles", False),),
    ),
]
SETTING_CHOICES = [
    Choice(f"only_{name}", "a setting for each kind of batch", f"`{name}` for all", setting=name)
    for name in SM90_SETTINGS
]
CONTROL = Choice("unchanged_again", "nothing is taken out", "the same kernel and lists")
CHOICES = [*KERNEL_CHOICES, *MAP_CHOICES, *LIST_CHOICES, *SETTING_CHOICES, CONTROL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--compile", action="store_true", help="compile what is missing, and stop; needs no GPU")
    parser.add_argument("--document", action="store_true", help="write the table of docs/pod_sm90.md, and stop")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--only",
        action="append",
        choices=[c.name for c in CHOICES],
        metavar="NAME",
        help="one choice, repeatable; nothing is written then",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    if options.compile or options.document:
        if options.compile:
            compile_all()
        if options.document:
            PAGE.write_text(with_table(PAGE.read_text()))
        return
    chosen = [c for c in CHOICES if options.only is None or c.name in options.only]
    start = time.perf_counter()
    with torch.no_grad(), contextlib.ExitStack() as stack:
        served = _serve(chosen, stack)
        print(f"{len(served)} ways are ready after {time.perf_counter() - start:.1f} s", flush=True)
        rows = {}
        for shape in NINE:
            rows[shape.name] = _time(shape, served, options.rounds)
            print(shape.name, json.dumps(rows[shape.name]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    figures = summarise(chosen, rows)
    print(table(figures))
    if options.only is None:
        metrics = {"rounds": options.rounds, "choices": figures, "shapes": rows}
        print(f"wrote {write_result('choices', options.commit, metrics, 'bench_choices')}", end=" ")
    print(f"after {time.perf_counter() - start:.1f} s")
    if wrong := [f"{shape}: {name} {row['errors'][name]:.1e}" for shape, row in rows.items() for name in row["wrong"]]:
        sys.exit(f"wrong results, relative to the unchanged kernel's: {', '.join(wrong)}")


# --- taking a choice out ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def edited(choice: Choice) -> Iterator[None]:
    """Has kernels compiled from a copy of the sources with the choice's edits.

    Raises:
        PodgraphError: an edit's text is not there, or more than once.
    """
    if not choice.edits:
        yield
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "kernels"
        shutil.copytree(nvcc.kernel_folder(), folder)
        for file, old, new in choice.edits:
            text = (folder / file).read_text()
            if (found := text.count(old)) != 1:
                raise PodgraphError(f"{choice.name}: {file}: {old!r} stands there {found} times, allowed: exactly once")
            (folder / file).write_text(text.replace(old, new))
        with mock.patch.object(nvcc, "kernel_folder", return_value=folder):
            yield


@contextlib.contextmanager
def with_room(choice: Choice) -> Iterator[None]:
    """Has catalogs built, and lists made, with the choice's room for parts of decodes."""
    with mock.patch.object(rules, "SM90_SPLIT_ROUNDS", choice.room):
        yield


@contextlib.contextmanager
def planned(choice: Choice) -> Iterator[None]:
    """Has the numpy planner make the choice's lists."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in choice.lists:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def promoted(choice: Choice) -> Iterator[None]:
    """Has TMA descriptors made with the choice's promotion."""
    if choice.promote is None:
        yield
        return
    make: Callable[..., bytes] = driver.tensor_map
    with mock.patch.object(driver, "tensor_map", lambda *described: make(*described[:-1], choice.promote)):
        yield


def compile_all() -> None:
    """Compiles every kernel of this benchmark.

    Raises:
        PodgraphError: registers are spilled without a choice, which would be timed along with it.
    """
    spilled = []
    for choice in [CONTROL, *(c for c in CHOICES if c.edits)]:
        with edited(choice):
            compiled = building.compile_kernels(nine_spec(), pod_sm90.ARCH, KERNELS)
        spills = sum(kernel.spill_bytes for kernel in compiled.values())
        print(f"{choice.name}: {len(compiled)} kernels, {spills} bytes spilled", flush=True)
        spilled += [choice.name] if spills else []
    if spilled:
        raise PodgraphError(f"registers are spilled in {', '.join(spilled)}: choose another edit")


def lists_without(
    choice: Choice, batch: Batch, record: Record, policy: Policy, layout: Layout, at: int
) -> Int32 | None:
    """The choice's lists, as `host_lists` makes them; None where they are the usual ones."""
    with with_room(choice):
        usual = host_lists(batch, record, policy, layout, at)
        with planned(choice):
            lists = host_lists(batch, record, policy, layout, at)
    return None if np.array_equal(usual, lists) else lists


# --- timing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """One way to serve everything: without a choice, or, without any, the unchanged one."""

    choice: Choice | None
    dispatcher: Dispatcher

    @property
    def name(self) -> str:
        return self.choice.name if self.choice else "unchanged"


def _serve(choices: list[Choice], stack: contextlib.ExitStack) -> list[Served]:
    """A dispatcher for each choice, since each keeps lists of its own; the unchanged one first."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    # kernels that something was taken out of are not to be found in the build folder afterwards
    stack.enter_context(mock.patch.object(bench_plan, "ROOT", scratch))
    catalog = unverified(nine_spec(), "sm90")
    served = [Served(None, stack.enter_context(catalog.bind()))]
    for choice in choices:
        own = catalog
        if choice.has_catalog:
            with edited(choice), with_room(choice):
                own = unverified(nine_spec(), "sm90")
        served.append(Served(choice, stack.enter_context(own.bind())))
    return served


def _time(shape: Shape, served: list[Served], rounds: int) -> dict[str, Any]:
    """One shape's row of the result; everything that it allocates is free again afterwards."""
    case = shape.make(MAIN)
    batch = Batch.of(*case.arrays, page_size=MAIN.page_size, max_kv_len=max(case.kv_lens))
    (record,) = served[0].dispatcher.plan(*case.arrays)
    indices = on_gpu((batch.kv_indices,))[0]
    outs: dict[str, torch.Tensor] = {}
    ways: dict[str, Callable[[], Any]] = {}
    for way in served:
        if way.choice is not None and not _plan(way.dispatcher, way.choice, batch, record, indices.data_ptr()):
            continue
        out = outs[way.name] = torch.full_like(case.q, math.nan)
        ways[way.name] = lambda d=way.dispatcher, out=out: d.run(case.q, case.cache, out)  # type: ignore[misc]
        print(way.name, end=" ", flush=True)  # whatever hangs or fails can be told by its name
        with promoted(way.choice or CONTROL):
            ways[way.name]()
        way.dispatcher.check()
    print()
    us = interleaved(ways, rounds)
    for way in served:
        way.dispatcher.check()
    want = outs.pop("unchanged").float()
    errors = {name: samples.relative_error(out, want) for name, out in outs.items()}
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE]
    return {
        "variant": record.variant,
        "us": us,
        "ratio": {name: us[name] / us["unchanged"] for name in outs if name not in wrong},
        "errors": errors,
        "wrong": wrong,
    }


def _plan(dispatcher: Dispatcher, choice: Choice, batch: Batch, record: Record, at: int) -> bool:
    """Plans the batch without the choice; false where that is the same as with it.

    Args:
        record: the unchanged kernel's.
        at: where kv_indices lie in device memory.
    """
    variant = SM90 + choice.setting if choice.setting else record.variant
    if choice.setting and variant == record.variant:
        return False
    (own,) = (r for r in dispatcher._records if r.bucket == record.bucket and r.variant == variant)
    dispatcher.plan_into(own, batch)
    if choice.lists:
        backend = backend_of(dispatcher)
        policy = dispatcher._catalog.policy(spec_name(MAIN))
        lists = lists_without(choice, batch, own, policy, backend.layout, at)
        if lists is None:
            return False
        _copy_lists(dispatcher, lists)
    return True


# --- the result ------------------------------------------------------------------------------------------------------


def summarise(choices: list[Choice], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each choice's ratios: by shape, null where it makes no difference or is wrong, and their mean over all shapes.

    What makes no difference on a shape counts with 1; a wrong result leaves no mean.
    """
    figures = {}
    for choice in choices:
        wrong = any(choice.name in row["wrong"] for row in rows.values())
        ratios = {shape: row["ratio"].get(choice.name) for shape, row in rows.items()}
        figures[choice.name] = {
            "what": choice.what,
            "instead": choice.instead,
            "geomean": None if wrong else statistics.geometric_mean(r or 1.0 for r in ratios.values()),
            "ratio": ratios,
        }
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures for a page: one row a choice, in the order of `CHOICES`."""
    lines = ["| choice | without it | nine shapes | from | to | on |", "|---|---|---|---|---|---|"]
    for row in figures.values():
        ratios = {shape: ratio for shape, ratio in row["ratio"].items() if ratio is not None}
        if row["geomean"] is None or not ratios:
            cells = ["wrong" if row["geomean"] is None else "no difference", "", "", ""]
        else:
            most = max(ratios, key=ratios.__getitem__)
            least = min(ratios.values()) if len(ratios) == len(row["ratio"]) else min(1.0, *ratios.values())
            cells = [f"{row['geomean']:.3f}", f"{least:.2f}", f"{ratios[most]:.2f}", f"`{most}`"]
        lines.append(f"| {row['what']} | {row['instead']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page with the table of the result file between its two marks, or with a word that there is none.

    Raises:
        PodgraphError: the page has not both marks once.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise PodgraphError(f"{PAGE.name}: the marks {BEGIN} and {END} must each stand there once")
    body = "Not measured yet."
    if RESULT.is_file():
        result = json.loads(RESULT.read_bytes())
        link = "[benchmarks/results/choices.json](../benchmarks/results/choices.json)"
        body = f"{result['device']}, {result['date'][:10]}, {link}:\n\n{table(result['metrics']['choices'])}"
    return re.sub(f"(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})", lambda _: f"\n{body}\n\n", text, flags=re.S)


if __name__ == "__main__":
    main()

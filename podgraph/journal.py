"""What earlier builds verified: an interrupted build goes on where it stopped, an unchanged bucket is not redone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import podgraph
from podgraph.catalog import store
from podgraph.catalog.model import Catalog, Record
from podgraph.errors import CatalogError

Result = dict[str, Any]


class Journal:
    """Results by key, from the catalog that a build will replace and from a file beside it.

    Args:
        out: the catalog to be built.
        candidate: what is about to be verified.
        fresh: forget everything.

    Attributes:
        note: why nothing of an existing catalog could be reused, empty where something was or there is none.
    """

    def __init__(self, out: Path, candidate: Catalog, fresh: bool) -> None:
        self._path = out.with_name(f".{out.name}.journal")
        self._candidate = candidate
        self._known: dict[str, Result] = {}
        self._chosen: set[str] = set()
        self.note = ""
        if fresh:
            self.discard()
            return
        self._read_catalog(out)
        self._read_journal()

    def known(self, record: Record) -> Result | None:
        """The result of the same bucket, verified before with the same kernels, parameters and limits."""
        return self._known.get(record_key(self._candidate, record))

    def chosen(self, record: Record) -> bool:
        """Whether the catalog that stands there holds this very record: its bucket's fastest variant."""
        return record_key(self._candidate, record) in self._chosen

    def add(self, record: Record, result: Result) -> None:
        """Remembers a result; a failed one is done again next time."""
        if not result["problem"]:
            with self._path.open("a") as f:
                f.write(json.dumps({"key": record_key(self._candidate, record), "result": result}) + "\n")

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)

    def _read_catalog(self, out: Path) -> None:
        if not out.exists():
            return
        try:
            old = store.read(out)
        except CatalogError as e:
            self.note = f"the catalog there cannot be read ({e}): every bucket is built anew"
            return
        changed = [
            f"{field.name} {getattr(old.fingerprint, field.name)} -> {getattr(self._candidate.fingerprint, field.name)}"
            for field in dataclasses.fields(old.fingerprint)
            if getattr(old.fingerprint, field.name) != getattr(self._candidate.fingerprint, field.name)
        ]
        if old.built_with.get("source") != code_digest():
            changed.append("podgraph itself")
        if changed:
            self.note = f"changed since the catalog there was built: {', '.join(changed)}: every bucket is built anew"
            return
        for record in old.records:
            result = {"problem": "", "error": record.max_error, "replay_us": record.replay_us}
            self._known[record_key(old, record)] = result
            self._chosen.add(record_key(old, record))

    def _read_journal(self) -> None:
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return
        for line in lines:
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError):  # the line that was being written when the build died
                continue


@functools.cache
def code_digest() -> str:
    """Digest of podgraph itself: another planner or runtime proves nothing for this one."""
    digest = hashlib.sha256()
    for path in sorted(Path(podgraph.__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def record_key(catalog: Catalog, record: Record) -> str:
    """Digest of everything that a bucket's verification depends on."""
    entry = catalog.specs[record.spec]
    graphs = [catalog.templates[index] for index in (record.template, entry.planner) if index >= 0]
    parts = (
        code_digest(),
        dataclasses.asdict(catalog.fingerprint),
        dataclasses.asdict(dataclasses.replace(entry, planner=-1)),  # an index means nothing in another catalog
        dataclasses.asdict(record.bucket),
        record.variant,
        catalog.max_pages,
        catalog.max_kv_len,
        catalog.partition,
        [dataclasses.asdict(graph) for graph in graphs],
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=bytes.hex).encode()).hexdigest()

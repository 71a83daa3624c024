"""Which of the verified ways to compute each bucket go into the file.

The runtime may put a batch into any setting of pod_sm90 that the catalog holds for the specification, whichever bucket
the batch is in. So a setting is only held where every bucket of the specification was verified in it.
"""

from __future__ import annotations

import dataclasses

from podgraph.catalog.model import Catalog, Record
from podgraph.journal import Journal, Result
from podgraph.planner import kernels_of
from podgraph.shapes import Bucket

NOISE = 0.02  # of a measured replay: a variant must win by more


def without_losers(candidate: Catalog, journal: Journal) -> Catalog:
    """The candidate without what an earlier build decided: what it chose for a bucket is that bucket's only record.

    The other buckets of such a specification keep to the settings that the earlier catalog holds: no others were
    verified in the buckets that it decided.
    """
    chosen = {(r.spec, r.bucket): r for r in candidate.records if journal.chosen(r)}
    held: dict[str, set[str]] = {}
    for record in chosen.values():
        held.setdefault(record.spec, set()).add(record.variant)
    records = [r for r in candidate.records if chosen.get((r.spec, r.bucket), r) is r]
    return dataclasses.replace(
        candidate,
        records=tuple(
            r for r in records if kernels_of(r.variant) != "sm90" or r.variant in held.get(r.spec, {r.variant})
        ),
    )


def with_evidence(candidate: Catalog, results: list[Result]) -> tuple[Catalog, list[str]]:
    """One record with its measurements for each bucket that verified, and what was wrong with the others.

    Args:
        candidate: one record for each way to compute a bucket.
        results: of verification, one for each record.
    """
    verified: list[Record] = []
    failures: list[str] = []
    failed: set[tuple[str, str]] = set()
    for record, result in zip(candidate.records, results, strict=True):
        if result["problem"]:
            failures.append(f"{record.spec} {record.bucket}: {result['problem']}")
            failed.add((record.spec, record.variant))
        else:
            verified.append(dataclasses.replace(record, replay_us=result["replay_us"], max_error=result["error"]))
    held = _held(verified, failed)
    chosen = _fastest([r for r in verified if r.variant in held[r.spec]])
    for spec, bucket in dict.fromkeys((r.spec, r.bucket) for r in verified):
        if (spec, bucket) not in chosen:
            failures.append(f"{spec} {bucket}: verified only in settings that failed in other buckets")
    return _only(candidate, list(chosen.values())), failures


def _held(verified: list[Record], failed: set[tuple[str, str]]) -> dict[str, set[str]]:
    """The variants of each specification that may go into the file; where all settings failed somewhere, the best."""
    held: dict[str, set[str]] = {}
    for spec in dict.fromkeys(r.spec for r in verified):
        counts: dict[str, int] = {}
        for record in verified:
            if record.spec == spec:
                counts[record.variant] = counts.get(record.variant, 0) + 1
        settings = {v for v in counts if kernels_of(v) == "sm90"}
        whole = {v for v in settings if (spec, v) not in failed}
        best = {max(settings, key=lambda v: (counts[v], v))} if settings else set()
        held[spec] = (whole or best) | (set(counts) - settings)
    return held


def _fastest(records: list[Record]) -> dict[tuple[str, Bucket], Record]:
    """The first record of each bucket, or one that beat it by more than noise."""
    best: dict[tuple[str, Bucket], Record] = {}
    for record in records:
        key = record.spec, record.bucket
        if key not in best or record.replay_us < best[key].replay_us * (1 - NOISE):
            best[key] = record
    return best


def _only(catalog: Catalog, records: list[Record]) -> Catalog:
    """The catalog with these records, and no template or image that none of them uses."""
    used = sorted({r.template for r in records} | {e.planner for e in catalog.specs.values()})
    used = [index for index in used if index >= 0]
    templates = tuple(catalog.templates[i] for i in used)
    images = {node.image for template in templates for node in template.nodes}
    place = {template: index for index, template in enumerate(used)}
    return dataclasses.replace(
        catalog,
        specs={
            name: dataclasses.replace(entry, planner=place.get(entry.planner, -1))
            for name, entry in catalog.specs.items()
        },
        records=tuple(dataclasses.replace(r, template=place.get(r.template, -1)) for r in records),
        templates=templates,
        images={digest: data for digest, data in catalog.images.items() if digest in images},
    )

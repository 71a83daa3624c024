"""The report's CSV: a row for each bucket, and column names that say how a figure was found."""

from __future__ import annotations

import csv
import io
import math

from podgraph.report.content import Report

COLUMNS = ("batch", "prefill_len", "decode_count", "family", "steps", "share", "padded_rows")


def csv_text(report: Report) -> str:
    """One row for each bucket of the set, in its order.

    ``steps``, ``share`` and ``padded_rows`` are counted. ``bucket_us`` (what depends on the bucket in a step's time)
    and ``padding_us`` (over all of its steps) are ``_modelled``, or ``_table`` where costs were given; ``bucket_us`` is
    empty for a bucket that the table does not list, ``replay_us_measured`` where nothing was measured.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*COLUMNS, f"bucket_us_{report.timed}", f"padding_us_{report.timed}", "replay_us_measured"))
    for use in report.now[report.eager].uses:
        b = use.bucket
        shape = (b.batch, b.prefill_len, b.decode_count, b.family)
        measured = report.replay_us.get(b, "")
        us = use.us if math.isfinite(use.us) else ""
        writer.writerow((*shape, use.steps, use.share, use.padded_rows, us, use.padding_us, measured))
    return text.getvalue()

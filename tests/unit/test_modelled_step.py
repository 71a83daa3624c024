"""The time of a simulated step agrees with the cost model that it is asked from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgraph.config import load_config
from podgraph.errors import ConfigError
from podgraph.workload.costs import StepCosts
from podgraph.workload.modelled_step import ModelledStep, modelled_step
from podgraph.workload.profile import load_profile
from podgraph.workload.scheduler import StepShape
from podgraph.workload.steps import COLUMNS, StepHistogram

CONFIGS = Path(__file__).parents[2] / "configs"


def costs(*windows: int) -> StepCosts:
    build = load_config(CONFIGS / "llama3-8b.yaml")
    assert build.model is not None
    (spec,) = build.specs.values()
    specs = tuple(replace(spec, window_left=window) for window in windows)
    return StepCosts(load_profile("h200"), build.model, specs)


def asked(model: StepCosts, shape: StepShape) -> float:
    row = (*shape[:3], 1, *shape[3:])
    columns = {name: np.array([value], dtype=np.int64) for name, value in zip(COLUMNS, row, strict=True)}
    step = StepHistogram(**columns, source="test")
    return float(model.own_us(step)[0] + model.exact_us(step)[0])


_shapes = st.builds(
    lambda requests, rows, decodes, kv, prefill_kv: StepShape(
        requests * rows, requests, decodes or (not requests), decodes * kv, requests * prefill_kv, 7 * prefill_kv
    ),
    *(st.integers(0, 4), st.integers(2, 512), st.integers(0, 256), st.integers(1, 10**5), st.integers(1, 10**6)),
)


@pytest.mark.parametrize(("windows", "allowed"), [((-1,), 1e-9), ((1023,), 0.02), ((-1, 1023), 0.02)])
@given(data=st.data())
def test_it_says_what_the_model_says(windows: tuple[int, ...], allowed: float, data: st.DataObject) -> None:
    model = costs(*windows)
    step = ModelledStep(model)
    for shape in data.draw(st.lists(_shapes, min_size=1, max_size=5)):
        assert step(shape) == pytest.approx(asked(model, shape), rel=allowed)
        assert step(shape) == step(shape)


def test_a_configuration_without_a_model(tmp_path: Path) -> None:
    text = (CONFIGS / "quickstart.yaml").read_text()
    assert "\nmodel:" not in text
    (tmp_path / "plain.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"plain\.yaml: model: is missing"):
        modelled_step("h200", tmp_path / "plain.yaml")

"""Updates of growing size are measured, and drawn so that every line and every name can be seen."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_delta_sync.bench import codings, curves
from vllm_delta_sync.bench.chart import HEIGHT, LINE_HEIGHT, WIDTH, Axis, line_chart
from vllm_delta_sync.cli.bench import app
from vllm_delta_sync.cli.bench_curves import COMMIT_CHART, DENSITY_CHART
from vllm_delta_sync.errors import BaseMismatch


def test_curves_are_measured_and_drawn(tmp_path: Path) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    save_file({"w": weight}, tmp_path / "model.safetensors")
    done = CliRunner().invoke(app, ["curves", str(tmp_path), "--rounds", "1", "--plot", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    points = json.loads(done.stdout)["points"]
    densities = [point["density"] for point in points]
    assert densities == sorted(densities) and len(points) == len(curves.SPREADS)
    for point in points:
        assert point["bytes_per_change"].keys() >= codings.CODINGS.keys()
        assert list(point["commit_ms"]) == ["ours", "ours, two threads", "index_copy_"]
        assert point["changed"] == pytest.approx(point["density"] * weight.numel())
    for name in (DENSITY_CHART, COMMIT_CHART):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


def test_a_checkpoint_of_other_dtypes_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(BaseMismatch, match="bf16 tensors only"):
        curves.measure(tmp_path)


def test_lines_lie_inside_and_names_do_not_overlap() -> None:
    chart = line_chart("a < b", "x", "y", {"one": [(1, 10), (100, 20)], "two": [(1, 12), (100, 20.1)]})
    lines = re.findall(r'points="([^"]+)"', chart)
    places = [tuple(map(float, place.split(","))) for line in lines for place in line.split()]
    assert len(lines) == 2 and all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)
    one, one_end, two, two_end = places
    assert one[0] == two[0] < one_end[0] == two_end[0]
    assert one[1] > two[1] > one_end[1] > two_end[1]  # y falls as the value grows
    names = {name: float(y) for y, name in re.findall(r'y="([\d.]+)"[^>]*>(one|two)<', chart)}
    assert abs(names["one"] - names["two"]) >= LINE_HEIGHT
    assert "a &lt; b" in chart


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.4, 3.0, [0.5, 1, 2]), (1, 1e6, [1, 10, 100, 1e3, 1e4, 1e5, 1e6])],
)
def test_ticks_are_round_numbers_between_the_ends(low: float, high: float, ticks: list[float]) -> None:
    assert Axis("x", low, high).ticks() == pytest.approx(ticks)

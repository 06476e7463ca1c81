"""The table of layouts: every one can be formed and cuts its model; the page shows what was measured."""

from __future__ import annotations

import pytest

from megatron_async.engine import platform
from megatron_async.engine.hf_config import HFConfig
from megatron_async.engine.model import check_model_fits
from megatron_async.rollout.environments.desk_checkpoint import write_tiny_checkpoint
from tools import benchmark_layouts
from tools.benchmark_layouts import KINDS, LAYOUTS, Errors


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFConfig]:
    folder = tmp_path_factory.mktemp("layouts")
    for kind, shape in benchmark_layouts.SHAPES.items():
        write_tiny_checkpoint(folder / kind, 0, shape)
    return {kind: HFConfig.from_pretrained(folder / kind) for kind in benchmark_layouts.SHAPES}


@pytest.mark.parametrize(("processes", "text"), [(n, text) for n, texts in LAYOUTS.items() for text in texts])
def test_every_layout_can_be_formed(models: dict[str, HFConfig], processes: int, text: str) -> None:
    kind, layout, _ = benchmark_layouts._options(text, processes)
    platform.check_layout(layout, processes)
    check_model_fits(models[kind], layout)
    assert layout.data_parallel_size >= 1


def test_the_page_and_the_figures_show_the_worst() -> None:
    found = [
        Errors("moe:tp2", 2, dtype, loss=1e-7 * scale, grad_norm=2e-7, logprobs=3e-7, weights=4e-7 * scale)
        for dtype, scale in (("float32", 1.0), ("bfloat16", 1e5))
    ]
    text = benchmark_layouts.page(found)
    assert "| 2 | `moe:tp2` | 1.0e-07 | 2.0e-07 | 3.0e-07 | 4.0e-07 | 1.0e-02 |" in text
    assert "the worst of all is 4.0e-07" in text
    rows = {row.figure: row for row in benchmark_layouts.rows(found)}
    assert len(rows) == 2 * len(KINDS)
    assert rows["layout_weights_error_fp32"].passed and rows["layout_weights_error_bf16"].passed is None


def test_the_page_lists_every_layout() -> None:
    text = benchmark_layouts.PAGE.read_text(encoding="utf-8")
    listed = [f"| {n} | `{layout}` |" for n, texts in LAYOUTS.items() for layout in texts]
    assert [line for line in listed if line not in text] == []

"""The explorer without a browser: choices, reasons, what it computes against `breakeven`, its widget and its export."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from labkit.breakeven import breakeven
from labkit.errors import InputError
from labkit.explorer import Choice, Explorer, explore
from labkit.publish.figures import save_figure
from tests.synthetic import CPU, GPU, acceptance_rows, loop_rows, write_run_of, write_runs

WORLD = dataclasses.replace(GPU, ks=(3, 7), contexts=(1024, 8192, 65536), num_rounds=6, num_prompts=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer")
    write_runs(folder, WORLD, ("loop", "acceptance"))
    write_run_of(loop_rows(CPU).assign(run_id="20260201T000000Z-eeeeee"), folder, CPU, "loop")
    return folder


@pytest.fixture(scope="module")
def explorer(folder):
    return Explorer.load(folder)


@pytest.fixture
def choice(explorer):
    return explorer.first()


def change(choice: Choice, **values: object) -> Choice:
    return dataclasses.replace(choice, **values)


def test_begins_where_cost_and_acceptance_join(explorer, choice):
    assert (choice.gpu, choice.target, choice.num_speculative_tokens, choice.batch_size) == (
        *("nvidia-h200", "qwen3-32b", 7, 1),
    )
    assert choice.workload == "chat"
    assert choice.acceptance_length is None
    assert explorer.without_acceptance(choice) == ""


def test_begins_with_a_text_of_the_chosen_model(explorer):
    """Another model's acceptance, fuller on another text, does not choose the text."""
    rows = acceptance_rows(WORLD)
    other = pd.concat([rows[rows["workload"] == "prose"].assign(target="other")] * 3)
    assert Explorer(loop_rows(WORLD), pd.concat([rows, other])).first().workload == "chat"


def test_cells_and_crossings_are_those_of_breakeven(explorer, choice):
    whole = breakeven(loop_rows(WORLD), acceptance_rows(WORLD))
    cells = whole.cells.query("batch_size == 1 and num_speculative_tokens == 7 and workload == 'chat'")
    found = explorer.curve(choice)
    columns = [name for name in cells.columns if name not in ("reason", "kv_dtype")]
    pd.testing.assert_frame_equal(
        found.cells[columns].reset_index(drop=True), cells[columns].reset_index(drop=True), check_dtype=False
    )
    wanted = [
        (curve["verify_backend"], curve["crossovers"])
        for curve in whole.crossovers
        if (curve["batch_size"], curve["num_speculative_tokens"], curve["workload"]) == (1, 7, "chat")
    ]
    assert [(curve["verify_backend"], curve["crossovers"]) for curve in found.crossovers] == wanted
    assert any(crossings for _, crossings in wanted)


def test_a_range_recomputes_its_crossings_and_leaves_the_curve(explorer, choice):
    part = explorer.curve(change(choice, context_range=(1024, 8192)))
    assert len(part.cells) == len(explorer.curve(choice).cells)
    found = [c["context_len"] for curve in part.crossovers for c in curve["crossovers"]]
    assert all(1024 <= context_len <= 8192 for context_len in found)
    everywhere = [c for curve in explorer.curve(choice).crossovers for c in curve["crossovers"]]
    assert len(found) < len(everywhere)


def test_moving_along_the_context_computes_nothing(explorer, choice):
    explorer.curve(choice)
    misses = explorer.result.cache_info().misses
    for context_len in (1024, 8192, 65536):
        cells = explorer.at_context(change(choice, context_len=context_len))
        assert set(cells["context_len"]) == {context_len}
        assert len(cells) == 3
    assert explorer.result.cache_info().misses == misses


def test_a_typed_length_is_the_imposed_one(explorer, choice):
    typed = explorer.curve(change(choice, acceptance_length=(3.0, 2.8, 3.3)))
    whole = breakeven(loop_rows(WORLD), (3.0, 2.8, 3.3)).cells.query("batch_size == 1 and num_speculative_tokens == 7")
    np.testing.assert_allclose(typed.cells["speedup_low"], whole["speedup_low"])
    assert set(typed.cells["origin"]) == {"forced"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 4}, "batch 4 was not measured with eagle3, bfloat16, bfloat16; there: 1, 8"),
        ({"num_speculative_tokens": 5}, "k = 5 was not measured with .*batch 1; there: 3, 7"),
        ({"gpu": "cpu-amd-epyc"}, "qwen3-32b was not measured with cpu-amd-epyc; there: smollm2-135m"),
        ({"pairings": ()}, "no backend is chosen"),
        ({"pairings": ("sdpa",)}, "sdpa was not measured with .*; there: per_token, triton_nosplit, triton_split"),
        ({"context_range": (2000, 3000)}, "no measured context between 2.0K and 2.9K"),
        ({"baseline": "fa3"}, "baseline must be fastest, same or one of"),
    ],
)
def test_an_empty_choice_says_why(explorer, choice, values, message):
    with pytest.raises(InputError, match=message):
        explorer.curve(change(choice, **values))


def test_without_acceptance_the_costs_are_drawn_alone(explorer, choice):
    lonely = change(choice, workload="poems")
    assert "no acceptance of qwen3-32b on poems" in explorer.without_acceptance(lonely)
    assert explorer.curve(lonely).cells["speedup"].isna().all()
    assert isinstance(explorer.figure(lonely), Figure)
    alone = Explorer(loop_rows(CPU))
    assert alone.first().acceptance_length == (3.0, 2.7, 3.3)


def test_parts_add_up_to_the_cost_and_best_k_is_measured(explorer, choice):
    parts = explorer.parts(choice)
    sums = parts.groupby("pairing")["tokens"].sum()
    costs = parts.groupby("pairing")["relative_step_cost"].first()
    np.testing.assert_allclose(sums, costs)
    best = explorer.best(choice)
    assert set(best["best_k"]) <= {0, 3, 7}
    assert set(explorer.causes(choice)) == {"per_token", "triton_nosplit", "triton_split"}
    with pytest.raises(InputError, match="a typed length holds for one k"):
        explorer.best(change(choice, acceptance_length=(2.0, 1.9, 2.1)))


def test_batch_gets_a_figure(folder):
    assert isinstance(explore(folder, interactive=False), Figure)
    with pytest.raises(InputError, match="no loop or step runs"):
        explore(folder / "acceptance")


@pytest.fixture
def widget(explorer, tmp_path):
    import matplotlib

    backend = matplotlib.get_backend()
    from labkit.publish.explorer_widgets import ExplorerWidget

    widget = ExplorerWidget(explorer, tmp_path)
    assert matplotlib.get_backend() == backend
    return widget


def test_widget_shows_choices_reasons_and_read_outs(widget):
    assert widget.message == ""
    assert "<td" in widget.readout.value
    assert "pays up to" in widget.crossings.value
    assert "k = " in widget.best.value or "off" in widget.best.value
    widget.controls["pairings"].boxes[1].value = True
    assert "Not measured here: sdpa" in widget.readout.value
    widget.controls["gpu"].value = "cpu-amd-epyc"
    assert "qwen3-32b was not measured with cpu-amd-epyc" in widget.message
    assert widget.message in widget.figure.texts[0].get_text()
    widget.controls["gpu"].value = "nvidia-h200"
    assert widget.message == ""
    widget.controls["workload"].value = "code_editing"
    assert widget.choice.workload == "code_editing"


def test_length_and_bounds_stay_in_order(widget):
    widget.controls["acceptance"].value = widget.controls["acceptance"].options[1]
    widget.controls["length"].value = 6.0
    middle, low, high = widget.choice.acceptance_length
    assert low <= middle <= high
    assert middle == 6.0
    widget.controls["bounds"].value = (1.5, 2.0)
    middle, low, high = widget.choice.acceptance_length
    assert (low, high) == (1.5, 2.0)
    assert low <= middle <= high


def test_brush_takes_measured_contexts(widget):
    widget._brushed(900.0, 9000.0)
    assert widget.controls["context_range"].value == (1024, 8192)
    widget._brushed(2000.0, 3000.0)  # holds none: the two around it
    assert widget.controls["context_range"].value == (1024, 8192)
    assert "between 1K and 8K" in widget.crossings.value


def test_exported_cell_makes_the_exported_file(widget, folder, tmp_path, monkeypatch):
    widget.canvas.draw()
    widget._export()
    written = {file.suffix: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(written) == {".svg", ".pdf", ".png", ".json"}
    monkeypatch.setenv("LABKIT_DATA", str(folder))
    exec(widget.code.value.replace(repr(str(tmp_path)), repr(str(tmp_path / "again"))), {})
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == written[file.suffix], file.name


def test_saved_notebook_shows_a_picture(widget):
    data, _ = widget._repr_mimebundle_()
    assert data["image/png"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_column_width_is_not_clipped(explorer, choice, tmp_path):
    from tests.drawn import assert_well_placed

    figure = explorer.figure(choice, width_in=3.4)
    assert_well_placed(figure)
    assert save_figure(figure, "x", explorer.sources(choice), out_dir=tmp_path, formats=["png"]).files

"""Cells of `%%ranks` that succeed: their variables stay, and their output is shown by rank."""

from __future__ import annotations

import pytest
import torch
from IPython.core.completer import provisionalcompleter

from dlo_lib.live_ranks.magic import parse


@pytest.fixture(autouse=True)
def _four_ranks(notebook):
    notebook.cell("%%ranks 4\npass")


def test_variables_stay_between_cells(notebook):
    notebook.cell("%%ranks\nx = torch.tensor(float(rank))")
    notebook.cell("%%ranks\ndist.all_reduce(x)")
    assert notebook.cell("%%ranks\nx").by_rank() == {"all 4 ranks": "tensor(6.)"}


def test_output_is_shown_by_rank_in_the_order_of_ranks(notebook):
    ran = notebook.cell("%%ranks\nprint('I am', rank)\nrank * 10")
    assert ran.text == "\n".join(f"[rank {rank}] I am {rank}\n[rank {rank}] {rank * 10}" for rank in range(4))


def test_ranks_with_the_same_output_share_a_section(notebook):
    ran = notebook.cell("%%ranks\nprint('odd' if rank % 2 else 'even')")
    assert ran.by_rank() == {"ranks 0 and 2": "even", "ranks 1 and 3": "odd"}
    assert ran.html.count("<section") == 2


def test_stacked_shows_each_rank(notebook):
    ran = notebook.cell("%%ranks --stacked\nprint('same')")
    assert ran.by_rank() == {f"rank {rank}": "same" for rank in range(4)}


def test_a_rank_without_output_has_no_section(notebook):
    assert notebook.cell("%%ranks\nif rank == 3:\n    print('here')").by_rank() == {"rank 3": "here"}


def test_a_cell_without_output_shows_nothing(notebook):
    notebook.cell("%%ranks\nsilent = 1")
    assert notebook.published == []


def test_tabs(notebook):
    ran = notebook.cell("%%ranks --tabs\nprint(rank)")
    assert ran.html.count('<input type="radio"') == 4
    assert ran.html.count(" checked>") == 1
    assert ran.by_rank() == {f"rank {rank}": str(rank) for rank in range(4)}


def test_one_rank(notebook):
    assert notebook.cell("%%rank 2\nonly = 5\nprint(rank)").by_rank() == {"rank 2": "2"}
    assert notebook.cell("%%ranks\n'only' in globals()").by_rank() == {
        "ranks 0, 1 and 3": "False",
        "rank 2": "True",
    }


def test_figures_of_each_rank(notebook):
    ran = notebook.cell("%%ranks\nimport matplotlib.pyplot as plt\nif rank < 2:\n    plt.plot([1, 2, rank]);")
    assert ran.html.count('src="data:image/png;base64,') == 2
    assert set(ran.by_rank()) == {"rank 0", "rank 1"}


def test_prints_and_figures_keep_their_order(notebook):
    ran = notebook.cell(
        "%%ranks\nfrom IPython.display import HTML, display\n"
        "import os\n"
        "if rank == 1:\n"
        "    for i in range(20):\n"
        "        print('text', i)\n"
        "        os.write(1, b'raw %d\\n' % i)\n"
        "        display(HTML(f'<b>shown {i}</b>'))"
    )
    places = [ran.html.index(f"{what} {i}") for i in range(20) for what in ("text", "raw", "<b>shown")]
    assert places == sorted(places)


def test_display_can_be_updated_and_cleared(notebook):
    code = (
        "%%ranks\nfrom IPython.display import clear_output, display\n"
        "print('gone')\nclear_output()\nhandle = display('first', display_id=True)\nhandle.update('second')"
    )
    assert notebook.cell(code).by_rank() == {"all 4 ranks": "'second'"}


def test_output_of_c_code_and_of_processes(notebook):
    ran = notebook.cell(
        "%%ranks\nimport os\nif rank == 0:\n    os.system('echo from a shell; echo error >&2')"
    )
    assert "from a shell\nerror" in ran.by_rank()["rank 0"]


def test_a_long_output_keeps_its_beginning_and_its_end(notebook):
    text = notebook.cell(
        "%%ranks\nif rank == 1:\n    for i in range(300_000):\n        print('line', i)"
    ).text
    assert len(text) < 100_000
    assert "[rank 1] line 0\n" in text
    assert text.endswith("line 299999")
    assert "characters are left out" in text


def test_markup_in_a_text_is_escaped(notebook):
    ran = notebook.cell("%%ranks\nprint('<script>alert(1)</script>')")
    assert "<script>" not in ran.html
    assert "&lt;script&gt;" in ran.html


def test_colours_of_a_terminal_are_removed(notebook):
    ran = notebook.cell("%%ranks\nprint('\\x1b[31mred\\x1b[0m')")
    assert ran.by_rank() == {"all 4 ranks": "red"}
    assert "\x1b" not in ran.html


def test_a_progress_bar_shows_its_last_state(notebook):
    ran = notebook.cell("%%ranks\nfor i in range(5):\n    print(f'\\rstep {i}', end='')")
    assert ran.by_rank() == {"all 4 ranks": "step 4"}


def test_functions_classes_and_comprehensions(notebook):
    code = """%%ranks
class Scale:
    by = 10
    def __call__(self, x):
        return [inner * self.by + rank for inner in x]
def outer():
    def inner():
        return Scale()([1, 2])
    return inner()
outer()"""
    expected = {f"rank {rank}": f"[{10 + rank}, {20 + rank}]" for rank in range(4)}
    assert notebook.cell(code).by_rank() == expected


def test_await_in_a_cell(notebook):
    ran = notebook.cell("%%ranks\nimport asyncio\nawait asyncio.sleep(0.01)\nrank >= 0")
    assert ran.by_rank() == {"all 4 ranks": "True"}


def test_magics_in_a_cell(notebook):
    assert "Wall time" in notebook.cell("%%ranks\n%time y = 3").text
    assert "Wall time" in notebook.cell("%%ranks\n%%time\ny = 3").text
    assert notebook.cell("%%ranks\n!echo from a shell").by_rank() == {"all 4 ranks": "from a shell"}


def test_a_value_with_a_semicolon_is_not_shown(notebook):
    notebook.cell("%%ranks\nrank;")
    assert notebook.published == []


def test_subgroups_and_ddp(notebook):
    code = """%%ranks
pair = dist.new_group([0, 1])
t = torch.ones(1) * rank
if rank < 2:
    dist.all_reduce(t, group=pair)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(2) * rank).sum().backward()
t.item(), model.module.weight.grad.tolist()"""
    shown = notebook.cell(code).by_rank()
    assert shown == {
        "ranks 0 and 1": "(1.0, [[1.5, 1.5]])",
        "rank 2": "(2.0, [[1.5, 1.5]])",
        "rank 3": "(3.0, [[1.5, 1.5]])",
    }


def test_pull(notebook):
    notebook.cell("%%ranks\nw = torch.full((2,), float(rank), requires_grad=True)\n(w * 3).sum().backward()")
    values = notebook.cell("ranks.pull('w')").value
    assert [value.tolist() for value in values] == [[rank, rank] for rank in range(4)]
    assert all(value.requires_grad for value in values)
    assert notebook.cell("ranks.pull('w.grad', rank=3)").value.tolist() == [3, 3]


def test_a_pulled_view_comes_without_its_storage(notebook):
    notebook.cell("%%ranks\nlarge = torch.zeros(1_000_000)\nsmall = large[:3]")
    assert notebook.cell("ranks.pull('small', rank=0)").value.untyped_storage().nbytes() == 12


def test_push(notebook):
    notebook.cell(
        "config = {'lr': 0.1}\ndef double(x):\n    return 2 * x\nranks.push('config', 'double', extra=7)"
    )
    ran = notebook.cell("%%ranks\nconfig['lr'], double(rank), extra")
    assert ran.by_rank()["rank 3"] == "(0.1, 6, 7)"
    notebook.cell("ranks.push(extra=8, rank=1)")
    assert notebook.cell("ranks.pull('extra')").value == [7, 8, 7, 7]


def test_pushed_tensors_are_copies(notebook):
    notebook.shell.user_ns["shared"] = torch.zeros(2)
    notebook.cell("ranks.push('shared')")
    notebook.cell("%%ranks\nshared += 1")
    assert notebook.shell.user_ns["shared"].tolist() == [0, 0]


def test_names_of_a_rank_are_completed(notebook):
    notebook.cell("%%ranks\nlong_variable_name = torch.ones(2)")
    notebook.cell("%%rank 1\nlonely_name = 1")

    def completed(text: str, cursor: int | None = None) -> set[str]:
        with provisionalcompleter():
            found = notebook.shell.Completer.completions(text, len(text) if cursor is None else cursor)
            return {text[: one.start] + one.text for one in found}

    assert "%%ranks 4\nlong_variable_name" in completed("%%ranks 4\nlong_var")
    assert "%%ranks\n1 + long_variable_name.shape" in completed("%%ranks\n1 + long_variable_name.sh")
    text = "%%ranks\nlong_var\nprint(1)"
    assert "%%ranks\nlong_variable_name" in completed(text, cursor=len("%%ranks\nlong_var"))
    assert "%%rank 1\nlonely_name" in completed("%%rank 1\nlonely")
    assert not any("lonely_name" in one for one in completed("%%rank 0\nlonely"))
    assert not any("long_variable_name" in one for one in completed("long_var"))


def test_another_number_of_ranks(notebook):
    notebook.cell("%%ranks\nx = 1")
    ran = notebook.cell("%%ranks 3\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item(), 'x' in globals()")
    assert "(The 4 ranks were ended, and their variables are lost.)" in ran.text
    assert ran.by_rank() == {"all 3 ranks": "(3.0, False)"}
    assert notebook.cell("%%ranks 1\nworld_size").by_rank() == {"rank 0": "1"}
    assert notebook.cell("%%ranks 5\nworld_size").by_rank() == {"all 5 ranks": "5"}
    assert repr(notebook.shell.user_ns["ranks"]) == "5 ranks, for cells that begin with %%ranks"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "%%ranks four\n1",
            '"%%ranks four" is not understood: write %%ranks 4, with --tabs, '
            "--stacked, --gpus, --cpu or --job 1234",
        ),
        ("%%ranks 0\n1", "the number of ranks is 0: use at least 1"),
        ("%%rank\n1", '"%%rank " is not understood: write %%rank 2'),
        ("%%rank 9\n1", "there is no rank 9: the ranks are 0 to 3"),
        ("ranks.push('missing')", "the notebook has no variable missing: define it first"),
        ("ranks.pull('rank', rank=4)", "there is no rank 4: the ranks are 0 to 3"),
        ("ranks.push(lock=__import__('threading').Lock())", "lock cannot be sent to the ranks"),
    ],
)
def test_bad_input_is_one_line_with_the_cure(notebook, code, message):
    ran = notebook.try_cell(code)
    assert message in ran.message
    assert "\n" not in ran.message


def test_options():
    assert parse("ranks", "").number is None
    assert parse("ranks", "--tabs 2").number == 2
    assert not parse("ranks", "4 --stacked").merge

"""Honest work in unusual files: other names, other editors, much output. The points are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hostile.case import ALL, ITSELF, NOTEBOOK, PLAIN, REST, Family, Notebook, cell, own_cell

HONEST = Family()
case = HONEST.case
WARN = "GRADED_WARN"


def under(name: str, notebook: Notebook, folder: Path) -> object:
    (folder / name).write_text(json.dumps(notebook))
    return ITSELF


# -- names


@case(WARN, PLAIN, "was taken for survival.ipynb", row="18")
def renamed_by_the_browser(notebook: Notebook, folder: Path) -> object:
    return under("lab (2).ipynb", notebook, folder)


@case(WARN, PLAIN, "was taken for")
def in_capitals(notebook: Notebook, folder: Path) -> object:
    return under("Survival.IPYNB", notebook, folder)


@case(WARN, PLAIN, "was taken for")
def with_spaces_and_accents(notebook: Notebook, folder: Path) -> object:
    return under("  TP élève José – final\u00a0(vrai).ipynb", notebook, folder)


@case(WARN, PLAIN, "was taken for")
def with_a_name_like_an_option(notebook: Notebook, folder: Path) -> object:
    return under("--help.ipynb", notebook, folder)


@case(WARN, PLAIN, "was taken for")
def with_a_name_like_a_formula(notebook: Notebook, folder: Path) -> object:
    return under('=HYPERLINK("x").ipynb', notebook, folder)


@case(WARN, PLAIN, "was taken for")
def with_a_name_that_is_no_text(notebook: Notebook, folder: Path) -> object:
    with open(os.fsencode(folder) + b"/\xff\xfe\n\x1b[31m.ipynb", "w") as file:
        file.write(json.dumps(notebook))
    return ITSELF


@case(WARN, PLAIN, "was taken for")
def in_a_folder_of_its_own(notebook: Notebook, folder: Path) -> object:
    (folder / "my work").mkdir()
    return under("my work/survival.ipynb", notebook, folder)


@case(WARN, PLAIN, "was taken for")
def saved_as_json(notebook: Notebook, folder: Path) -> object:
    return under("survival.ipynb.json", notebook, folder)


@case(WARN, PLAIN, "was taken for")
def saved_as_text_by_a_mail_program(notebook: Notebook, folder: Path) -> object:
    return under("survival.ipynb.txt", notebook, folder)


@case("GRADED", PLAIN)
def with_a_checkpoint_beside_it(notebook: Notebook, folder: Path) -> None:
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "survival-checkpoint.ipynb").write_text("{")


@case(WARN, PLAIN, "was taken for")
def worked_in_a_copy(notebook: Notebook, folder: Path) -> None:
    """The notebook by the lab's name has no answer in it."""
    under("survival-Copy1.ipynb", notebook, folder)
    notebook["cells"] = [one for one in notebook["cells"] if one["id"] not in ALL]


@case(WARN, PLAIN, "was taken for")
def damaged_but_for_a_copy(notebook: Notebook, folder: Path) -> object:
    under("survival (1).ipynb", notebook, folder)
    return "{"


@case("GRADED", PLAIN)
def with_a_damaged_copy_beside_it(notebook: Notebook, folder: Path) -> None:
    (folder / "survival (1).ipynb").write_text("{")


@case(
    "GRADED" if os.geteuid() == 0 else "INVALID(the file cannot be read", PLAIN if os.geteuid() == 0 else {}
)
def without_permission(notebook: Notebook, folder: Path) -> object:
    under(NOTEBOOK, notebook, folder)
    (folder / NOTEBOOK).chmod(0)  # root can still read it
    return ITSELF


@case("GRADED", PLAIN)
def with_ten_thousand_files_beside_it(notebook: Notebook, folder: Path) -> None:
    (folder / "data").mkdir()
    for number in range(2_000):
        (folder / "data" / f"{number}.csv").write_text("1")


@case("GRADED", PLAIN)
def with_modules_called_like_ours(notebook: Notebook, folder: Path) -> None:
    for name in (
        "torch.py",
        "checks.py",
        "hidden.py",
        "sitecustomize.py",
        "dlo_lib.py",
        "nbgrader_config.py",
        "json.py",
    ):
        (folder / name).write_text("raise SystemExit('not yours')")


@case("GRADED", PLAIN)
def with_names_that_no_table_likes(notebook: Notebook, folder: Path) -> None:
    deep = folder / "/".join(["x" * 200] * 12)
    os.makedirs(deep)
    (deep / "data.csv").write_text("1")
    for name in (b"\xff\xfe.csv", b"a\nb\x1b[31m.txt", b"x" * 255, b"--help", b"=1+1.csv"):
        with open(os.fsencode(folder) + b"/" + name, "w") as file:
            file.write("1")


@case("GRADED", PLAIN)
def with_a_folder_called_timestamp(notebook: Notebook, folder: Path) -> None:
    (folder / "timestamp.txt").unlink()
    (folder / "timestamp.txt").mkdir()
    (folder / "timestamp.txt" / "inner.txt").write_text("yesterday")


@case("GRADED", PLAIN)
def with_a_video_beside_it(notebook: Notebook, folder: Path) -> None:
    with open(folder / "me.mp4", "wb") as file:
        file.truncate(1 << 40)  # a sparse file


@case(WARN, PLAIN, "?img src=x onerror=alert(1)?.ipynb was taken for")
def with_a_name_like_a_page(notebook: Notebook, folder: Path) -> object:
    return under("<img src=x onerror=alert(1)>.ipynb", notebook, folder)


@case("GRADED", PLAIN, student="d'Alembert, Jean {x} %s <b>")
def a_student_whose_name_is_markup(notebook: Notebook, folder: Path) -> None: ...


@case("GRADED", PLAIN, student="Émilie du Châtelet")
def a_student_with_accents(notebook: Notebook, folder: Path) -> None: ...


@case("INVALID(the file is empty", {}, student="=cmd|' ‮")
def a_student_whose_name_is_a_formula(notebook: Notebook, folder: Path) -> object:
    return b""


# -- editors


@case("GRADED", PLAIN)
def saved_by_colab(notebook: Notebook, folder: Path) -> None:
    notebook["metadata"] |= {"colab": {"provenance": [], "toc_visible": True}, "accelerator": "GPU"}
    notebook["nbformat_minor"] = 0
    for number, one in enumerate(notebook["cells"]):
        one["metadata"]["id"] = f"aB{number}_xYz"
        one["metadata"]["colab"] = {"base_uri": "https://localhost:8080/"}
        del one["id"]


@case(WARN, PLAIN)
def saved_by_colab_with_the_metadata_lost(notebook: Notebook, folder: Path) -> None:
    saved_by_colab(notebook, folder)
    for one in notebook["cells"]:
        one["metadata"].pop("nbgrader", None)


@case("GRADED", PLAIN)
def saved_by_vscode(notebook: Notebook, folder: Path) -> None:
    notebook["metadata"]["vscode"] = {"interpreter": {"hash": "31f2aee4"}}
    for one in notebook["cells"]:
        one["metadata"]["vscode"] = {"languageId": "python"}
        one["source"] = [f"{line}\n" for line in one["source"].split("\n")]


@case("GRADED", PLAIN)
def with_widgets_and_attachments(notebook: Notebook, folder: Path) -> None:
    notebook["metadata"]["widgets"] = {
        "application/vnd.jupyter.widget-state+json": {"state": {}, "version_major": 2}
    }
    cell(notebook, "why")["attachments"] = {"image.png": {"image/png": "iVBORw0KGgo="}}


# -- cells


@case("GRADED", ALL)
def every_question_with_cells_of_their_own(notebook: Notebook, folder: Path) -> None:
    for number in range(len(notebook["cells"]), 0, -1):
        notebook["cells"].insert(
            number, own_cell(f"mine_{number} = {number}\nprint(mine_{number})", f"mine{number}")
        )


@case("GRADED", PLAIN)
def a_helper_in_a_cell_of_their_own(notebook: Notebook, folder: Path) -> None:
    place = notebook["cells"].index(cell(notebook, "scale"))
    notebook["cells"].insert(place, own_cell("def largest(x):\n    return x.float().abs().amax(dim=1)"))
    cell(notebook, "scale")["source"] = "def absmax_scale(x):\n    return largest(x) / 127"


@case("GRADED", PLAIN)
def magics_and_shell_commands(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(
        own_cell("%matplotlib inline\n!nvidia-smi\n%timeit -n1 -r1 1 + 1\n?print\nls = !ls\n%cd ..")
    )
    cell(notebook, "scale")["source"] = "%%time\n" + cell(notebook, "scale")["source"]


@case("GRADED", PLAIN, row="21")
def warnings_on_stderr(notebook: Notebook, folder: Path) -> None:
    text = (
        "import sys, warnings, logging\nwarnings.warn('careful')\nlogging.error('no!')\n"
        "print('hm', file=sys.stderr)\n"
    )
    body = (
        "\ndef absmax_scale(x):\n    warnings.warn('again')\n    print('hm', file=sys.stderr)\n"
        "    sys.stderr.write('x' * 1000)\n"
    )
    cell(notebook, "scale")["source"] = text + body + "    return x.float().abs().amax(dim=1) / 127"


@case("GRADED", PLAIN)
def an_input_prompt(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(own_cell("name = input('Your name? ')"))


@case("GRADED", PLAIN)
def a_debugger_left_in(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(own_cell("import pdb; pdb.set_trace()\nbreakpoint()"))


@case("GRADED", PLAIN)
def await_at_the_top_of_a_cell(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] += (
        "\nimport asyncio\nawait asyncio.sleep(0)\nawaited = await asyncio.sleep(0, 5)"
    )


@case("GRADED", PLAIN)
def tabs_and_a_last_line_without_end(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "def absmax_scale(x):\n\treturn x.float().abs().amax(dim=1) / 127\t"


@case("GRADED", PLAIN)
def a_cell_indented_as_a_whole(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "    def absmax_scale(x):\n        return x.float().abs().amax(dim=1) / 127"
    )


@case("GRADED", PLAIN)
def star_imports_over_the_labs_names(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].insert(2, own_cell("from torch import *\nfrom math import *\nfrom os import *"))


@case("GRADED", PLAIN)
def another_default_dtype_and_seed(notebook: Notebook, folder: Path) -> None:
    text = (
        "torch.manual_seed(1)\ntorch.set_num_threads(1)\ntorch.use_deterministic_algorithms(True)\n"
        "torch.set_printoptions(precision=1)"
    )
    notebook["cells"].insert(2, own_cell(text))


@case("GRADED", PLAIN)
def a_gradient_left_on_the_answer(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "def absmax_scale(x):\n"
        "    return torch.nn.Parameter(x.float().requires_grad_().abs().amax(dim=1) / 127)"
    )


@case("GRADED", PLAIN)
def a_view_of_a_larger_tensor(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "def absmax_scale(x):\n"
        "    return torch.stack([x.float().abs().amax(dim=1)] * 3, dim=1).T[1].expand(2, -1)[0] / 127"
    )


@case("GRADED", PLAIN)
def the_input_overwritten(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "def absmax_scale(x):\n    y = x.float().abs().amax(dim=1) / 127\n    x.zero_()\n    return y"
    )


@case("GRADED", PLAIN)
def numpy_instead_of_torch_inside(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "import numpy as np\ndef absmax_scale(x):\n"
        "    return torch.from_numpy(np.abs(x.float().numpy()).max(axis=1) / np.float32(127))"
    )


@case("GRADED", REST, "raised NameError")
def a_name_misspelt(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "def absmax_scale(x):\n    return y.float().abs().amax(dim=1) / 127"


@case("GRADED", REST, "raised SyntaxError")
def a_bracket_forgotten(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "def absmax_scale(x):\n    return (x.float().abs().amax(dim=1) / 127"


@case("GRADED", REST, "is not defined")
def a_function_called_otherwise(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "def absmaxScale(x):\n    return x.float().abs().amax(dim=1) / 127"


@case("GRADED", REST, "RecursionError")
def a_function_that_calls_itself(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "def absmax_scale(x):\n    return absmax_scale(x)"


@case("GRADED", PLAIN)
def an_answer_with_type_hints_and_a_decorator(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "from __future__ import annotations\nimport functools\n@functools.lru_cache\n"
        "def absmax_scale(x: torch.Tensor) -> Scale:\n"
        "    return x.float().abs().amax(dim=1) / 127"
    )


@case("GRADED", PLAIN)
def a_data_file_of_the_labs(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(
        own_cell("print(open('data/table.txt').read())\nopen('mine.txt', 'w').write('x')")
    )


@case("GRADED", PLAIN)
def the_answer_in_a_cell_of_their_own(notebook: Notebook, folder: Path) -> None:
    """The solution cell stays unchanged; as in the notebook, the later definition counts."""
    place = notebook["cells"].index(cell(notebook, "scale"))
    notebook["cells"].insert(place + 1, own_cell(cell(notebook, "scale")["source"]))
    cell(notebook, "scale")["source"] = (
        "def absmax_scale(x):\n"
        '    """The scale of each row of x (rows, cols), so that its largest element becomes 127."""\n'
        "    # YOUR CODE HERE\n    raise NotImplementedError()"
    )


@case("GRADED", PLAIN)
def a_file_written_by_a_cell(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].insert(2, own_cell("%%writefile mine.py\nHALF_RANGE = 127\n", "mine1"))
    notebook["cells"].insert(3, own_cell("from mine import HALF_RANGE", "mine2"))
    cell(notebook, "scale")["source"] = (
        "def absmax_scale(x):\n    return x.float().abs().amax(dim=1) / HALF_RANGE"
    )


@case("GRADED", PLAIN)
def a_main_guard(notebook: Notebook, folder: Path) -> None:
    body = cell(notebook, "scale")["source"].replace("\n", "\n    ")
    cell(notebook, "scale")["source"] = f"if __name__ == '__main__':\n    {body}"


@case("GRADED", PLAIN)
def a_compiled_function(notebook: Notebook, folder: Path) -> None:
    text = "import inspect\n@torch.jit.script\ndef absmax_scale(x: torch.Tensor) -> torch.Tensor:\n"
    cell(notebook, "scale")["source"] = text + "    return x.float().abs().amax(dim=1) / 127"


@case("GRADED", PLAIN)
def displays_and_progress_bars(notebook: Notebook, folder: Path) -> None:
    text = (
        "from IPython.display import HTML, clear_output, display\ndisplay(HTML('<b>x</b>'))\n"
        "clear_output(wait=True)\nIn, Out, _, __\n"
    )
    notebook["cells"].append(own_cell(text + "from tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass"))


@case("GRADED", PLAIN)
def a_captured_cell(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "%%capture printed\n" + cell(notebook, "scale")["source"]


@case("GRADED", PLAIN)
def markers_of_nbgrader_in_an_answer(notebook: Notebook, folder: Path) -> None:
    marks = (
        "### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS\n### BEGIN SOLUTION\n### AUTOTEST x\n"
        "### BEGIN MARK SCHEME\n# YOUR CODE HERE\n"
    )
    cell(notebook, "scale")["source"] = marks + cell(notebook, "scale")["source"]


@case("GRADED", PLAIN)
def an_alarm_clock_in_a_cell(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(
        own_cell(
            "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(0, 0.001, 0.001)"
        )
    )


@case(WARN, PLAIN, "cell `quantise` was missing")
def two_answers_in_one_cell(notebook: Notebook, folder: Path) -> None:
    scale, quantise = cell(notebook, "scale"), cell(notebook, "quantise")
    scale["source"] += "\n\n\n" + quantise["source"]
    notebook["cells"].remove(quantise)


@case("GRADED", PLAIN)
def an_answer_at_the_end(notebook: Notebook, folder: Path) -> None:
    notebook["cells"].append(notebook["cells"].pop(notebook["cells"].index(cell(notebook, "scale"))))


@case("GRADED", PLAIN)
def a_quiz_filled_in_a_cell_below(notebook: Notebook, folder: Path) -> None:
    answers = cell(notebook, "quiz")["source"]
    cell(notebook, "quiz")["source"] = 'quiz = {"q1": ""}'
    place = notebook["cells"].index(cell(notebook, "quiz")) + 1
    fill = "\nfor name, letter in mine.items():\n    quiz[name] = letter"
    notebook["cells"].insert(place, own_cell(answers.replace("quiz =", "mine =") + fill))


@case("GRADED", PLAIN)
def a_helper_below_a_line_that_needs_a_measurement(notebook: Notebook, folder: Path) -> None:
    """The judge runs no measurements, so the first line fails there and not in the notebook."""
    text = "print(seconds_of_the_measurement)\ndef largest(x):\n    return x.float().abs().amax(dim=1)"
    place = notebook["cells"].index(cell(notebook, "scale"))
    notebook["cells"].insert(place, own_cell(text))
    cell(notebook, "scale")["source"] = "def absmax_scale(x):\n    return largest(x) / 127"


@case("GRADED", PLAIN)
def in_another_time_zone(notebook: Notebook, folder: Path) -> None:
    (folder / "timestamp.txt").write_text("9999-12-31 23:59:59 -1400")
    cell(notebook, "scale")["source"] += (
        "\nimport os, time\nos.environ['TZ'] = 'Pacific/Kiritimati'\ntime.tzset()"
    )


@case("GRADED", PLAIN)
def with_a_pipe_for_a_timestamp(notebook: Notebook, folder: Path) -> None:
    (folder / "timestamp.txt").unlink()
    os.mkfifo(folder / "timestamp.txt")


@case("GRADED", PLAIN)
def a_function_in_other_words(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "class absmax_scale:\n    def __new__(cls, values, /, *, eps=0):\n"
        "        return values.float().abs().amax(dim=1) / 127\n"
        "        raise NotImplementedError()"
    )


@case("GRADED", REST, "an object of type coroutine")
def a_function_that_must_be_awaited(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = "async " + cell(notebook, "scale")["source"]


@case("GRADED", REST, "not written yet")
def the_stub_left_above_the_answer(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["source"] = (
        "def absmax_scale(x):\n    raise NotImplementedError()\n    return x.abs().amax(dim=1) / 127"
    )


@case("GRADED", PLAIN)
def quotes_and_spaces_of_a_word_processor(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] += [
        own_cell("print(“hello”)", "m1"),
        own_cell("\ufeffx\u00a0= 1", "m2"),
        own_cell("x = 1\x00", "m3"),
    ]

"""Invalid and nearly invalid notebooks: each has a row with a reason for the student."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hostile.case import ITSELF, NOTEBOOK, PLAIN, Family, Notebook, cell

FILES = Family()
case = FILES.case
NONE: dict[str, float] = {}


@case("INVALID(symlink", NONE, row="22")
def a_link_to_a_system_file(notebook: Notebook, folder: Path) -> object:
    (folder / NOTEBOOK).symlink_to("/etc/passwd")
    return ITSELF


@case("INVALID(symlink", NONE, row="22")
def a_link_to_a_classmate(notebook: Notebook, folder: Path) -> object:
    (folder / NOTEBOOK).symlink_to(folder.parents[1] / "ada" / folder.name / NOTEBOOK)
    return ITSELF


@case("INVALID(symlink", NONE)
def a_link_to_nothing(notebook: Notebook, folder: Path) -> object:
    (folder / NOTEBOOK).symlink_to("nowhere")
    return ITSELF


@case("INVALID(symlink", NONE)
def a_link_to_itself(notebook: Notebook, folder: Path) -> object:
    (folder / NOTEBOOK).symlink_to(NOTEBOOK)
    return ITSELF


@case("INVALID(", NONE)
def a_link_under_another_name(notebook: Notebook, folder: Path) -> object:
    (folder / "survival (1).ipynb").symlink_to(folder.parents[1] / "ada" / folder.name / NOTEBOOK)
    return ITSELF


@case("INVALID(not a regular file", NONE)
def a_folder_by_that_name(notebook: Notebook, folder: Path) -> object:
    (folder / NOTEBOOK).mkdir()
    (folder / NOTEBOOK / "inner.txt").write_text("x")
    return ITSELF


@case("INVALID(not a regular file", NONE)
def a_named_pipe(notebook: Notebook, folder: Path) -> object:
    os.mkfifo(folder / NOTEBOOK)
    return ITSELF


@case("INVALID(", NONE)
def a_socket(notebook: Notebook, folder: Path) -> object:
    import socket

    here = os.getcwd()
    os.chdir(folder)  # a socket's path may have 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(NOTEBOOK)
    finally:
        os.chdir(here)
    return ITSELF


@case("INVALID(the file is empty", NONE, row="19")
def an_empty_file(notebook: Notebook, folder: Path) -> object:
    return b""


@case("INVALID(the file is empty", NONE)
def a_file_of_blank_lines(notebook: Notebook, folder: Path) -> object:
    return b"\n \t\r\n" * 1000


@case("INVALID(damaged", NONE, row="19")
def cut_off_in_the_middle(notebook: Notebook, folder: Path) -> object:
    return json.dumps(notebook)[:900]


@case("INVALID(damaged", NONE)
def zeros_after_a_full_disk(notebook: Notebook, folder: Path) -> object:
    return bytes(5000)


@case("INVALID(damaged", NONE)
def with_conflict_markers_of_git(notebook: Notebook, folder: Path) -> object:
    text = json.dumps(notebook, indent=1)
    return text[:400] + "\n<<<<<<< HEAD\n" + text[400:500] + "\n=======\n>>>>>>> theirs\n" + text[500:]


@case("INVALID(damaged", NONE)
def a_python_script(notebook: Notebook, folder: Path) -> object:
    return str(cell(notebook, "scale")["source"])


@case("INVALID(damaged", NONE)
def the_page_of_a_login(notebook: Notebook, folder: Path) -> object:
    return "<!DOCTYPE html><html><body>Please log in</body></html>"


@case("INVALID(not a text file", NONE)
def a_zip_file(notebook: Notebook, folder: Path) -> object:
    return b"PK\x03\x04" + bytes(range(256)) * 20


@case("INVALID(notebook format 3", NONE, row="19")
def of_format_3(notebook: Notebook, folder: Path) -> object:
    return {
        "nbformat": 3,
        "nbformat_minor": 0,
        "metadata": {"name": ""},
        "worksheets": [{"cells": [], "metadata": {}}],
    }


@case("INVALID(not a notebook", NONE)
def a_list(notebook: Notebook, folder: Path) -> object:
    return [notebook]


@case("INVALID(not a notebook", NONE)
def a_number(notebook: Notebook, folder: Path) -> object:
    return "42"


@case("INVALID(not a notebook", NONE)
def cells_as_a_table(notebook: Notebook, folder: Path) -> object:
    notebook["cells"] = {one["id"]: one for one in notebook["cells"]}
    return notebook


@case("INVALID(nested too deep", NONE)
def nested_a_hundred_thousand_deep(notebook: Notebook, folder: Path) -> object:
    return "[" * 100_000 + "]" * 100_000


@case("INVALID(larger than 100 MB", NONE)
def of_300_megabytes(notebook: Notebook, folder: Path) -> object:
    with open(folder / NOTEBOOK, "wb") as file:
        file.truncate(300 << 20)  # a sparse file
    return ITSELF


@case("NO_ATTEMPT", NONE)
def no_cells_at_all(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] = []


@case("NO_ATTEMPT", NONE)
def cells_that_are_no_cells(notebook: Notebook, folder: Path) -> None:
    notebook["cells"] = [
        None,
        1,
        "x",
        [],
        {},
        {"cell_type": 5},
        {"cell_type": ["code"]},
        {"cell_type": "code", "source": {"a": 1}},
    ]


@case("INVALID(damaged", NONE)
def a_number_of_ten_thousand_digits(notebook: Notebook, folder: Path) -> object:
    return json.dumps(notebook).replace('"nbformat": 4', '"nbformat": ' + "9" * 10_000)


@case("INVALID(there is no notebook", NONE)
def only_a_pdf(notebook: Notebook, folder: Path) -> object:
    (folder / "survival.pdf").write_bytes(b"%PDF-1.7")
    return ITSELF


@case("INVALID(there is no notebook", NONE)
def the_notebook_of_another_lab(notebook: Notebook, folder: Path) -> object:
    notebook["metadata"]["dlo"]["lab"] = "91_small"
    (folder / "small.ipynb").write_text(json.dumps(notebook))
    return ITSELF


@case("GRADED", PLAIN)
def with_a_byte_order_mark(notebook: Notebook, folder: Path) -> object:
    return b"\xef\xbb\xbf" + json.dumps(notebook).encode()


@case("GRADED", PLAIN)
def with_line_ends_of_windows(notebook: Notebook, folder: Path) -> object:
    for one in notebook["cells"]:
        one["source"] = one["source"].replace("\n", "\r\n")
    return json.dumps(notebook, indent=1).replace("\n", "\r\n").encode()


@case("GRADED", PLAIN)
def with_line_ends_of_an_old_mac(notebook: Notebook, folder: Path) -> object:
    for one in notebook["cells"]:
        one["source"] = one["source"].replace("\n", "\r")
    return notebook


@case("GRADED", PLAIN)
def in_utf_16(notebook: Notebook, folder: Path) -> object:
    return json.dumps(notebook).encode("utf-16")


@case("INVALID(not a text file in UTF-8", NONE)
def in_latin_1(notebook: Notebook, folder: Path) -> object:
    cell(notebook, "scale")["source"] += "\n# l'échelle"
    return json.dumps(notebook, ensure_ascii=False).encode("latin-1")


@case("GRADED", PLAIN)
def with_every_key_twice(notebook: Notebook, folder: Path) -> object:
    return json.dumps(notebook).replace('"nbformat":', '"nbformat": 3, "nbformat":')


@case("GRADED", PLAIN)
def with_points_that_are_not_numbers(notebook: Notebook, folder: Path) -> object:
    cell(notebook, "scale")["metadata"]["nbgrader"]["points"] = float("nan")
    return notebook


@case("GRADED", PLAIN)
def with_outputs_of_twenty_megabytes(notebook: Notebook, folder: Path) -> None:
    cell(notebook, "scale")["outputs"] = [
        {"output_type": "stream", "name": "stdout", "text": "x" * (20 << 20)}
    ]


@case("GRADED", PLAIN)
def with_outputs_that_are_no_outputs(notebook: Notebook, folder: Path) -> None:
    odd: list[Any] = [
        None,
        7,
        {"output_type": "nonsense"},
        {"output_type": "execute_result", "data": {"text/plain": 9e99}},
    ]
    for one in notebook["cells"]:
        one["outputs"] = odd


@case("GRADED", PLAIN)
def with_metadata_that_is_none(notebook: Notebook, folder: Path) -> None:
    notebook["metadata"] = None
    notebook["nbformat"], notebook["nbformat_minor"] = "four", -1


@case("GRADED", PLAIN)
def of_a_kernel_in_another_language(notebook: Notebook, folder: Path) -> None:
    notebook["metadata"]["kernelspec"] = {"name": "ir", "language": "R", "display_name": "R"}
    notebook["metadata"]["language_info"] = {"name": "R"}


@case("GRADED", PLAIN)
def of_a_later_format(notebook: Notebook, folder: Path) -> None:
    notebook["nbformat"], notebook["nbformat_minor"] = 5, 99


@case("INVALID(symlink", NONE)
def a_folder_that_is_a_classmates(notebook: Notebook, folder: Path) -> object:
    (folder / "timestamp.txt").unlink()
    folder.rmdir()
    folder.symlink_to(folder.parents[1] / "ada" / folder.name)
    return ITSELF


@case("NO_ATTEMPT", NONE)
def a_file_where_the_folder_should_be(notebook: Notebook, folder: Path) -> object:
    (folder / "timestamp.txt").unlink()
    folder.rmdir()
    folder.write_text("x")
    return ITSELF

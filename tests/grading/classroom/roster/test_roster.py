"""Import a roster from tables of several programs: changes are reported first, and a mistake changes
nothing.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from dlo_lib.base.errors import UserError
from dlo_lib.grading.classroom.gradebook.nbgrader_course import create_course, open_course
from dlo_lib.grading.classroom.roster.roster import Change, import_roster, read_roster
from dlo_lib.grading.classroom.roster.roster_table import Person, parse_roster, unread_columns

EMILIE = Person("emilie", "Émilie", "du Châtelet", "e@uni.example")


def table(folder: Path, text: str | bytes) -> Path:
    file = folder / "users.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize(
    "text",
    [
        "id,first_name,last_name,email\nemilie,Émilie,du Châtelet,e@uni.example\n",
        (
            "\ufeffUsername;First name;Surname;Email address\r\n emilie ;Émilie;du Châtelet;e@uni.example\r\n"
            ";;;\r\n"
        ),
        "Nom d’utilisateur\tPrénom\tNom\tAdresse de courriel\nemilie\tÉmilie\tdu Châtelet\te@uni.example\n",
        "\n\nusername,Department,firstname,lastname,email\nemilie,Physics,Émilie,du Châtelet,e@uni.example",
        "username,firstname,lastname,email\nemilie,Émilie,du Châtelet,e@uni.example\n".encode("utf-16"),
        "Vorname;Nachname;Anmeldename;E-Mail-Adresse\nÉmilie;du Châtelet;emilie;e@uni.example\n",
        "Nombre,Apellido(s),Nombre de usuario,Dirección de correo\nÉmilie,du Châtelet,emilie,e@uni.example\n",
        "Nome,Cognome,Username,Indirizzo email\nÉmilie,du Châtelet,emilie,e@uni.example\n",
        "Vorname;Nachname;id;E-Mail-Adresse\nÉmilie;du Châtelet;emilie;e@uni.example\n",
    ],
    ids=[
        "nbgrader",
        "moodle in a spreadsheet",
        "french",
        "moodle",
        "utf-16",
        "german",
        "spanish",
        "italian",
        "german with id",
    ],
)
def test_tables_of_nbgrader_moodle_and_spreadsheets_are_read(tmp_path: Path, text: str | bytes) -> None:
    assert parse_roster(table(tmp_path, text)) == [EMILIE]


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    file = table(tmp_path, "id;Förnamn;last name;Department\nemilie;Émilie;du Châtelet;Physics\n")
    assert unread_columns(file) == ["Förnamn", "Department"]


@pytest.mark.parametrize("student", ["=cmd", "-rf", "a b", "@x", "a\u00a0b", "+1"])
def test_ids_that_are_formulas_options_or_two_words_are_refused(tmp_path: Path, student: str) -> None:
    with pytest.raises(UserError, match="which an id cannot have there"):
        parse_roster(table(tmp_path, f"id\n{student}\n"))


def test_quoted_cells_keep_their_commas_and_quotes(tmp_path: Path) -> None:
    (person,) = parse_roster(table(tmp_path, 'id,last name\nada,"Lovelace, ""Countess"""\n'))
    assert person.last_name == 'Lovelace, "Countess"'


def test_every_wrong_line_is_named(tmp_path: Path) -> None:
    lines = [
        "id,first name",
        "ada,Ada",
        "ADA,Ada again",
        "b/laise,Blaise",
        "chloe",
        ",Unknown",
        "../dan,Dan",
        f"{'x' * 200},Long",
        "e\x07,Bell",
    ]
    with pytest.raises(UserError) as refused:
        parse_roster(table(tmp_path, "\n".join(lines)))
    said = str(refused.value)
    assert "line 3: the id ADA is that of line 2 (ada)" in said
    assert "line 4: the id 'b/laise' has '/'" in said
    assert "line 5 has 1 cells, the header has 2" in said
    assert "line 6: no id" in said
    assert all(f"line {number}:" in said for number in (7, 8, 9))
    assert "Nothing was imported" in said
    assert "\n" not in said


def test_composed_and_decomposed_accents_are_one_id(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is that of line 2"):
        parse_roster(table(tmp_path, "id\nzoe\u0301\nzo\u00e9\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("name,email\nada,a@b", r"no column of ids .* there are: name, email"),
        ("id,login\nada,ada", "two columns for id: id, login"),
        ("id,name\nada,Ad\xe8le".encode("latin-1"), r"line 2 is not UTF-8: save it as UTF-8"),
        ('id,name\n"ada,Ada\n', r"line 2: not a CSV line"),
    ],
    ids=["empty", "no ids", "two ids", "latin-1", "open quote"],
)
def test_an_invalid_table_is_refused_with_the_cure(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_roster(table(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        parse_roster(tmp_path / "users.csv")


def test_a_dry_run_reports_the_changes_and_makes_none(course: Path, tmp_path: Path) -> None:
    file = table(
        tmp_path,
        "id,first name,last name,email\nada,Augusta,Lovelace,\nemilie,Émilie,du Châtelet,e@uni.example\n"
        "chloe,,,\n",
    )
    opened, before = open_course(course), (course / "gradebook.db").read_bytes()
    told = import_roster(opened, file, dry_run=True)
    assert (course / "gradebook.db").read_bytes() == before
    assert {line.person.id: line.change for line in told} == {
        "ada": Change.CHANGED, "emilie": Change.NEW, "chloe": Change.SAME,
        "blaise": Change.ABSENT, "dan": Change.ABSENT, "dan2": Change.ABSENT,
    }  # fmt: skip
    assert told[0].what == "first_name: Ada → Augusta"
    assert import_roster(opened, file) == told
    roster = {person.id: person for person in read_roster(opened)}
    assert roster["emilie"] == EMILIE
    assert roster["ada"].first_name == "Augusta"
    assert roster["chloe"].first_name == "Chloé"  # an empty cell changes nothing
    assert set(roster) == {"ada", "blaise", "chloe", "dan", "dan2", "emilie"}
    again = import_roster(opened, file)
    assert {line.change for line in again} == {Change.SAME, Change.ABSENT}


def test_a_student_without_a_name_is_shown_by_the_id_in_formgrader(course: Path, tmp_path: Path) -> None:
    """formgrader shows "last name, first name", and "None, None" for empty cells of the database."""
    opened = open_course(course)
    import_roster(opened, table(tmp_path, "id\nfrancis\n"))
    create_course(course, students=["ada", "grace"])
    with opened.gradebook as gradebook:
        named = {student.id: (student.last_name, student.first_name) for student in gradebook.students}
    assert named["francis"] == ("francis", "")
    assert named["grace"] == ("grace", "")
    assert named["ada"] == ("Lovelace", "Ada")
    people = {person.id: person for person in read_roster(opened)}
    assert people["francis"] == Person(
        "francis"
    )  # exports and Moodle's matching do not take the id for a name
    (told,) = [
        line for line in import_roster(opened, table(tmp_path, "id,last name\ngrace,Hopper\n")) if line.what
    ]
    assert told.what == "last_name: - → Hopper"
    assert next(person for person in read_roster(opened) if person.id == "grace").last_name == "Hopper"


def test_an_id_that_differs_in_case_from_one_of_the_course_is_refused(course: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ADA differs only in case from ada, who is in the course"):
        import_roster(open_course(course), table(tmp_path, "id\nADA\n"))


def test_a_failure_in_the_middle_enters_no_student(
    course: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pulled(session: Session) -> None:
        session.flush()
        raise RuntimeError("the plug was pulled")

    before = read_roster(open_course(course))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="pulled"):
        patch.setattr(Session, "commit", pulled)
        import_roster(open_course(course), table(tmp_path, "id\nx1\nx2\n"))
    assert read_roster(open_course(course)) == before


def test_a_locked_gradebook_stays_unchanged(course: Path, tmp_path: Path) -> None:
    before = read_roster(open_course(course))
    with closing(sqlite3.connect(course / "gradebook.db")) as somebody:
        somebody.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            UserError,
            match=r"the gradebook cannot be written \(database is locked\): wait until no process grades",
        ):
            import_roster(open_course(course), table(tmp_path, "id\nx1\n"))
    assert read_roster(open_course(course)) == before


def test_a_name_that_looks_like_another_is_said(tmp_path: Path) -> None:
    """A Cyrillic letter instead of a Latin one, the digit 0 instead of the letter o."""
    course = open_course(create_course(tmp_path / "course"))
    import_roster(course, table(tmp_path, "id,first_name,last_name\nada,Ada,Lovelace\nzoe,Zoé,Roy\n"))
    text = (
        "id,first_name,last_name\n\u0430da,Al,Khwarizmi\nbob,\u0410da,L\u043evelace\n"
        "z0e,Zo,Roy\nzo\u00e8,Zoè,Roy\n"
    )
    said = {line.person.id: line.what for line in import_roster(course, table(tmp_path, text), dry_run=True)}
    assert said["\u0430da"] == "the id looks like 'ada', with other letters"
    assert said["bob"] == "the name looks like 'Ada Lovelace', with other letters"
    assert said["z0e"] == "the id looks like 'zoe', with other letters"
    assert said["zo\u00e8"] == ""

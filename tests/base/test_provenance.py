"""What a run needs to be repeated: the commit, the seed, the settings and the hash of the data."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

from dlo_lib.base.provenance import CHANGED, Provenance, commit_of, digest

WHOLE = {"commit": "a" * 40, "seed": 0, "config": {"lr": 0.1}, "data": "0" * 64}


def git(folder, *words):
    named = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    subprocess.run(["git", "-C", str(folder), *named, *words], check=True, capture_output=True)


def test_a_whole_record_lacks_nothing_and_seed_0_is_a_seed():
    assert Provenance(**WHOLE).missing == ()
    assert Provenance.read(Provenance(**WHOLE).plain()) == Provenance(**WHOLE)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("commit", None, "commit"),
        ("commit", "main", "commit"),
        ("commit", "a" * 40 + CHANGED, "commit (files are changed and not committed)"),
        ("seed", None, "seed"),
        ("seed", True, "seed"),
        ("seed", "0", "seed"),
        ("config", {}, "configuration"),
        ("config", "lr = 0.1", "configuration"),
        ("data", "cifar10", "data hash"),
    ],
)
def test_a_field_that_cannot_be_right_is_missing(field, value, said):
    assert Provenance(**{**WHOLE, field: value}).missing == (said,)


@pytest.mark.parametrize("anything", [None, 3, [], "text", {"commit": {}, "seed": [], "data": 1}])
def test_a_record_of_any_content_is_read(anything):
    assert len(Provenance.read(anything).missing) == 4


def test_the_commit_of_a_folder_says_whether_files_differ_from_it(tmp_path):
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "output.log").write_text("not tracked")
    assert commit_of(tmp_path) == commit
    (tmp_path / "code.py").write_text("x = 2\n")
    assert commit_of(tmp_path) == commit + CHANGED


def test_the_hash_of_data_depends_on_values_dtype_shape_and_order(tmp_path):
    images = torch.arange(12.0).view(3, 4)
    file = tmp_path / "data.bin"
    file.write_bytes(b"abc")
    hashes = [
        digest(images),
        digest(images.view(4, 3)),
        digest(images.double()),
        digest(images.flip(0)),
        digest(images, images),
        digest(images[:0]),
        digest("abc"),
        digest(b"abc"),
        digest(file),
        digest("a", "bc"),
    ]
    assert len(set(hashes)) == len(hashes)
    assert digest(images) == digest(images.clone()) == digest(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert digest(images.t()) == digest(images.t().contiguous()), "strides are not part of the data"
